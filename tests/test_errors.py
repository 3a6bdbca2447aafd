"""errors.py: what messages show of values that strangers choose."""

import tracemalloc
from typing import Any

import pytest

from weir.errors import bounded, brief


@pytest.mark.parametrize(
    "value",
    [
        None, True, 12, 1.5, "", "it's", 'a "b"', b"x", [], (), {}, (1,), [1, "a", [None, {}]], {"a": [1, (2, 3)], 1: {}},
        "x" * 100, ["y" * 100], list(range(100)), {"k" * 100: 1},
    ],
)  # fmt: skip
def test_it_is_the_beginning_of_the_repr(value: Any) -> None:
    for limit in (7, 80):
        assert brief(value, limit) == f"{value!r:.{limit}}"


def test_no_more_of_a_value_is_looked_at_than_is_shown() -> None:
    nested: Any = "deep"
    for _ in range(100_000):
        nested = [nested]
    wide = ["\U000e0001" * 10_000_000, *range(1_000_000)]
    tracemalloc.start()
    try:
        assert brief(nested) == "[" * 80
        assert len(brief(wide)) == 80
        assert brief({"a": wide}).startswith("{'a': [")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    while isinstance(nested, list):  # freed one by one: Python's own way is recursive
        (nested,) = nested


def test_messages_are_bounded() -> None:
    assert bounded("short") == "short"
    assert bounded("x" * 5000) == "x" * 4096 + "... (5000 characters)"
    assert bounded("abcdef", 3) == "abc... (6 characters)"
