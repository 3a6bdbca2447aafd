"""How many arguments a user's method wants, where the contract leaves it the choice."""

import inspect
from collections.abc import Callable
from typing import Any


def takes_second(method: Callable[..., Any], name: str) -> bool:
    """Tell whether the bound `method` wants a second argument too: it has a second positional parameter that must be
    given or is called `name`, or any number of them."""
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return False  # written in C, without a signature
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return positional[1].default is inspect.Parameter.empty or positional[1].name == name
