"""JSON as callers send it: what cannot be read is refused, and half of a surrogate pair by the place where it stands."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from weir.errors import InvalidRequest


def read_json(body: bytes) -> Any:
    """Return what `body` says. Raises InvalidRequest saying what is wrong; its details name the field (`param`) if it is one's."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _half(body) or InvalidRequest(f"body: is not JSON ({error})") from error


def _half(body: bytes) -> InvalidRequest | None:
    """Return the error about a text that is no Unicode; None if it is something else. Python's own reader takes such texts, and is slower."""
    if rb"\u" not in body:
        return None
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for where, text in _texts(said):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            rule = f"is not valid Unicode: character {error.start} is half of a surrogate pair"
            return InvalidRequest(f"{where or 'body'}: {rule}", details={"param": where.partition("[")[0] or None})
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
