"""Reads the text form of protocol buffers, as far as configurations of models need it: without their schema.

A field that stands more than once becomes a list; numbers, true and false become what they are, other words texts.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from weir.errors import SettingsError

_TOKEN = re.compile(
    r"""(?P<space>[\s]+|\#[^\n]*) | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*') | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?f?)
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*) | (?P<sign>[{}\[\]<>:,;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_CLOSING = {"{": "}", "<": ">"}
DEEPEST = 32


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def read_pbtxt(text: str, source: str) -> dict[str, Any]:
    """Return the message that `text` is. Raises SettingsError naming `source`, the line and what is wrong there."""
    reader = _Reader([*_tokens(text, source)], source)
    message = reader.message("", 0)
    return message


def _tokens(text: str, source: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise SettingsError(f"{source}: line {line}: cannot be read: {text[at : at + 20]!r}")
        if found.lastgroup != "space":
            yield _Token(str(found.lastgroup), found[0], line)
        line += found[0].count("\n")
        at = found.end()
    yield _Token("end", "", line)


class _Reader:
    """Goes through the tokens once."""

    def __init__(self, tokens: list[_Token], source: str) -> None:
        self._tokens = tokens
        self._source = source
        self._at = 0

    def message(self, closing: str, depth: int) -> dict[str, Any]:
        """Read fields up to `closing`, or the end."""
        if depth > DEEPEST:
            raise self._error(f"messages are nested more than {DEEPEST} deep")
        fields: dict[str, Any] = {}
        while True:
            token = self._next()
            if token.text == closing and token.kind in ("sign", "end"):
                return fields
            if token.kind != "word":
                raise self._error(f"must be the name of a field, is {token.text!r}")
            value = self._field(depth)
            if token.text in fields:
                before = fields[token.text]
                more = value if isinstance(value, list) else [value]
                fields[token.text] = [*(before if isinstance(before, list) else [before]), *more]
            else:
                fields[token.text] = value
            if self._peek().text in (",", ";"):
                self._next()

    def _field(self, depth: int) -> Any:
        if self._peek().text in _CLOSING:
            return self.message(_CLOSING[self._next().text], depth + 1)
        if self._peek().text == "[":
            return self._value(depth)
        if self._next().text != ":":
            raise self._error("a field's name must be followed by a colon and its value")
        return self._value(depth)

    def _value(self, depth: int) -> Any:
        token = self._next()
        if token.text in _CLOSING and token.kind == "sign":
            return self.message(_CLOSING[token.text], depth + 1)
        if token.text == "[" and token.kind == "sign":
            return self._list(depth)
        if token.kind == "text":
            return self._text(token)
        if token.kind == "number":
            number = token.text.removesuffix("f")
            return int(number) if number.lstrip("+-").isdigit() else float(number)
        if token.kind == "word":
            return {"true": True, "false": False}.get(token.text, token.text)
        raise self._error(f"must be a value, is {token.text!r}")

    def _list(self, depth: int) -> list[Any]:
        if depth > DEEPEST:
            raise self._error(f"lists are nested more than {DEEPEST} deep")
        values: list[Any] = []
        while self._peek().text != "]":
            values.append(self._value(depth + 1))
            if self._peek().text == ",":
                self._next()
            elif self._peek().text != "]":
                raise self._error("the values of a list are separated by commas")
        self._next()
        return values

    def _text(self, token: _Token) -> str:
        pieces = [token.text]
        while self._peek().kind == "text":  # neighbours are one text
            pieces.append(self._next().text)
        return "".join(_ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), piece[1:-1]) for piece in pieces)

    def _peek(self) -> _Token:
        return self._tokens[min(self._at, len(self._tokens) - 1)]

    def _next(self) -> _Token:
        token = self._peek()
        self._at += 1
        return token

    def _error(self, what: str) -> SettingsError:
        line = self._tokens[min(max(self._at - 1, 0), len(self._tokens) - 1)].line
        return SettingsError(f"{self._source}: line {line}: {what}")
