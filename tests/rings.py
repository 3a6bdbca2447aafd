"""How many items a table makes, and which run in `make test` and which only in `make nightly`."""

import asyncio
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def spread(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Return `cases` for `parametrize`: `count` of them, evenly spread, run in `make test`; the others at night."""
    every = list(cases)
    by_day = {place * len(every) // count for place in range(count)}
    return [case if place in by_day else _at_night(case) for place, case in enumerate(every)]


def _at_night(case: Any) -> Any:
    return pytest.param(*case if type(case) is tuple else (case,), marks=pytest.mark.nightly)


def subcases(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Do what `parametrize` does in one test, whose cases are subtests: for tables of cases that take less time than an item.

    The cases share the fixtures of the test.
    """
    listed = (names,) if isinstance(names, str) else names
    rows = [case if len(listed) > 1 else (case,) for case in cases]

    def decorated(function: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(function)
        others = [each for name, each in signature.parameters.items() if name not in (*listed, "subtests")]
        passed_on = "subtests" in signature.parameters

        @wraps(function)
        def run(*own: Any, subtests: pytest.Subtests, **fixtures: Any) -> None:
            if passed_on:
                fixtures["subtests"] = subtests
            for row in rows:
                with subtests.test(", ".join(repr(value)[:100] for value in row)):
                    done = function(*own, **fixtures, **dict(zip(listed, row, strict=True)))
                    if inspect.iscoroutine(done):
                        asyncio.run(done)

        shown = [*others, inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)]
        run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]  # what pytest asks
        return run

    return decorated
