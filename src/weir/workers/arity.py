"""How many arguments a user's method wants, where the contract leaves it the choice."""

import inspect
from collections.abc import Callable
from typing import Any


def takes_first(method: Callable[..., Any], name: str) -> bool:
    """Tell whether the bound `method` wants an argument: it has a positional parameter that must be given or is called `name`,
    or any number of them."""
    return _takes(method, name, 0)


def takes_second(method: Callable[..., Any], name: str) -> bool:
    """Tell whether the bound `method` wants a second argument too; see `takes_first`."""
    return _takes(method, name, 1)


def _takes(method: Callable[..., Any], name: str, place: int) -> bool:
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return False  # written in C, without a signature
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(positional) <= place:
        return any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return positional[place].default is inspect.Parameter.empty or positional[place].name == name
