"""Finds the text for which a body is no JSON: half of a surrogate pair, which some clients write where a text was cut."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple


class Half(NamedTuple):
    """A text that is no Unicode: `where` it stands ("" for all of the body), and what is wrong with it."""

    where: str
    rule: str

    def __str__(self) -> str:
        return f"{self.where if self.where and self.where[0] != '[' else 'body' + self.where}: {self.rule}"


def find_half(body: bytes | bytearray | memoryview) -> Half | None:
    """Return the first; None if it is something else that is wrong. Python's own reader takes such texts, and is slower."""
    text = bytes(body)
    if rb"\u" not in text:
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for where, each in _texts(said):
        try:
            each.encode()
        except UnicodeEncodeError as error:
            return Half(where, f"is not valid Unicode: character {error.start} is half of a surrogate pair")
    return None


def _texts(said: Any) -> Iterator[tuple[str, str]]:
    """Return every text with the place where it stands, in order."""
    left = [("", said)]
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            yield where, value
        elif isinstance(value, list):
            left += [(f"{where}[{place}]", value[place]) for place in range(len(value) - 1, -1, -1)]
        elif isinstance(value, dict):
            for name in value:
                yield where, name
            inside = [(f"{where}.{name}" if where else name, each) for name, each in value.items()]
            left += reversed(inside)
