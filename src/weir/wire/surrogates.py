"""Finds the text for which a body is no JSON: half of a surrogate pair, which some clients write where a text was cut.

One pass of a regular expression finds the half. Then only what stands before it is read, token by token, to say where it is; nothing
is decoded and nothing is kept but the place, so that a hostile body costs no memory.
"""

import json
import re
from typing import Any, NamedTuple

# Tokens that are read to say where the half is; where there are more, its byte is named instead.
MAX_TOKENS = 50_000
MAX_HALVES = 10_000  # of one body that are put up with
_MAX_DEPTH = 1024  # JSON nested more deeply is refused for that
_LONGEST_NAME = 80  # characters of a key in the place
_LONGEST_PLACE = 200  # characters

# Everything up to the first escape that is half of a pair. Backslashes stand in texts only, and each takes what follows it along.
_UP_TO_HALF = re.compile(
    rb"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(?!u[dD][89a-fA-F]).)*+"
    rb"(?=\\u[dD][89a-fA-F][0-9a-fA-F]{2})",
    re.DOTALL,
)
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},:]', re.DOTALL)
_NUL = rb"\u0000"
_NO_TOKEN = "\ufffd"  # the character that stands for what is none
_Level = list[int | str]  # one open list or object: the index or the key that is being read


class Half(NamedTuple):
    """A text that is no Unicode: `where` it stands ("" for all of the body), and what is wrong with it."""

    where: str
    rule: str

    def __str__(self) -> str:
        return f"{self.where if self.where and self.where[0] != '[' else 'body' + self.where}: {self.rule}"


def find_half(body: bytes | bytearray | memoryview) -> Half | None:
    """Return the first; None if there is none, or if something else is wrong before it or with its text.

    Takes no memory but a copy of `body` and, where the text is long, of that text; the time is linear.
    """
    text = bytes(body)
    found = _UP_TO_HALF.match(text)
    if found is None:
        return None
    half = found.end()
    levels: list[_Level] = []
    is_key = False
    for count, token in enumerate(_TOKEN.finditer(text)):
        if token.start() > half or len(levels) > _MAX_DEPTH:
            return None
        if token.end() > half:
            return _named(text[token.start() + 1 : half], levels[:-1] if is_key else levels)
        if count == MAX_TOKENS:
            return Half("", f"is not valid Unicode: byte {half} begins half of a surrogate pair")
        is_key = _read(token[0], levels, is_key)
    return None


def without_halves(body: bytes | bytearray | memoryview) -> bytes | None:
    """Return `body`, which is JSON, with a NUL in the place of each half; None if it has none, or more than MAX_HALVES.

    Both escapes have six bytes, so everything stays where it is. The time is linear.
    """
    made, place = bytearray(body), 0
    text = bytes(body)
    for _ in range(MAX_HALVES):
        found = _UP_TO_HALF.match(text, place)
        if found is None:
            return bytes(made) if place else None
        place = found.end() + len(_NUL)
        made[found.end() : place] = _NUL
    return None


def without_nul(text: str) -> str:
    """Return `text` as bert-as-service reads it: without NULs. One that has nothing else becomes a space, which is no token."""
    return (text.replace("\0", "") or " ") if "\0" in text else text


def words_without_nul(words: list[Any]) -> list[Any]:
    """Return `words`, each of which is a token as it is, as bert-as-service reads them: one with a NUL is no known token."""
    return [_NO_TOKEN if isinstance(word, str) and "\0" in word else word for word in words]


def _read(token: bytes, levels: list[_Level], is_key: bool) -> bool:
    """Take one token into account; tell whether the next text is a key."""
    if token == b"[":
        levels.append([0])
    elif token == b"{":
        levels.append([""])
        return True
    elif token in (b"]", b"}"):
        if levels:
            levels.pop()
    elif token == b"," and levels:
        place = levels[-1][0]
        if isinstance(place, str):
            return True
        levels[-1][0] = place + 1
    elif is_key and levels:
        levels[-1][0] = _readable(token[1:-1][: 6 * _LONGEST_NAME])[:_LONGEST_NAME]  # \\u0041 is six bytes
    return False


def _named(before: bytes, levels: list[_Level]) -> Half:
    """Return the half in a text that begins with `before`."""
    where = ""
    for (place,) in levels:
        where += f"[{place}]" if isinstance(place, int) else f".{place}" if where else place
        if len(where) > _LONGEST_PLACE:
            where = where[:_LONGEST_PLACE] + "..."
            break
    return Half(where, f"is not valid Unicode: character {len(_readable(before))} is half of a surrogate pair")


def _readable(content: bytes) -> str:
    """Return what the content of a text in JSON says, as far as it can be read."""
    raw = content.decode(errors="replace")
    try:
        said: str = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return raw
    return said
