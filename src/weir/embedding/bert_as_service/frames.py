"""The frames of bert-as-service over ZeroMQ.

A request has four frames: the client's identity, texts or a command, the request's number, and how many texts there are. Its answer goes to the topic of
the identity. docs/reference/zeromq.md has the tables.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from weir.embedding.texts import Text
from weir.errors import InvalidRequest, WeirError, bounded
from weir.wire.values import UNREADABLE, without_halves, without_nul, words_without_nul, writable

SHOW_CONFIG, SHOW_STATUS, TERMINATION = b"SHOW_CONFIG", b"SHOW_STATUS", b"TERMINATION"
COMMANDS = frozenset((SHOW_CONFIG, SHOW_STATUS, TERMINATION))

REQUEST_FRAMES = 4
MAX_FRAMES = 5  # of a message that is read: one that is no request is dropped, and its connection goes on
MAX_IDENTITY = 255  # bytes
_MAX_DIGITS = 20
_MAX_COMMAND = max(map(len, COMMANDS))  # bytes
_PIECE = 1 << 20  # bytes of a list of texts that are read at once: a few milliseconds
_NOTHING = b","  # what stands in a piece between two commas that have nothing between them: no list has that
_LOOKED_AT = 1 << 16  # bytes outside of texts in which the end of an element is looked for
_MOST_SHOWN = 500  # characters of an error in a refusal


class Ask(NamedTuple):
    """A request: whose it is, its texts or command, its number, and how many texts there are."""

    identity: bytes
    payload: bytes | bytearray
    id: bytes
    size: int

    @property
    def command(self) -> bytes:
        """The command that it is; empty for texts."""
        return bytes(self.payload) if len(self.payload) <= _MAX_COMMAND and bytes(self.payload) in COMMANDS else b""


class RefusedRequest(msgspec.Struct, omit_defaults=True):
    """An error: its class in weir.errors, its text, the HTTP status that stands for it, and when to ask again."""

    type: str
    message: str
    status: int = 500
    retry_after: float | None = None


_COMMA = ord(",")
_TEXTS = msgspec.json.Decoder(list[str | list[str | int]])
encode_json = msgspec.json.Encoder(enc_hook=writable).encode


def read_ask(frames: Sequence[bytes | bytearray]) -> Ask:
    """Return the request in `frames`; texts are not looked into. Raises InvalidRequest if it is none."""
    if len(frames) != REQUEST_FRAMES:
        raise InvalidRequest(f"frames: {len(frames)}; a request has {REQUEST_FRAMES}")
    identity, payload, number, count = bytes(frames[0]), frames[1], bytes(frames[2]), bytes(frames[3])
    if not 0 < len(identity) <= MAX_IDENTITY:
        raise InvalidRequest(f"identity: {len(identity)} bytes; 1 to {MAX_IDENTITY} are allowed")
    for name, digits in (("id", number), ("count", count)):
        if not (digits.isdigit() and len(digits) <= _MAX_DIGITS):
            raise InvalidRequest(f"{name}: {digits[:_MAX_DIGITS]!r}; must be a number of at most {_MAX_DIGITS} digits")
    return Ask(identity, payload, number, int(count))


def read_texts(ask: Ask) -> list[Text]:
    """Return the texts of a request. It takes milliseconds at a time, however many there are, so that other threads are let in between.

    ` ||| ` parts the two texts of a pair. Characters that are no text are left out, as in bert-as-service: NUL, and halves of surrogate pairs. Raises
    InvalidRequest if there are not as many texts as the request states, or one of them is no text.
    """
    found: list[Any] = []
    for piece in _pieces(ask.payload):
        found += _read_piece(piece)
    if len(found) != ask.size:
        raise InvalidRequest(f"count: {ask.size}, but there are {len(found)} texts")
    if not found:
        raise InvalidRequest("texts: must not be empty")
    return [_text(place, each) for place, each in enumerate(found)]


def _read_piece(piece: bytes | bytearray) -> list[Any]:
    """Return the texts in a piece of the list."""
    try:
        return _TEXTS.decode(piece)
    except UNREADABLE as error:
        made = without_halves(piece)
        if made is None:
            raise InvalidRequest(f"texts: must be a JSON list of texts ({error})") from None
    try:
        return _TEXTS.decode(made)
    except UNREADABLE as error:
        raise InvalidRequest(f"texts: must be a JSON list of texts ({error})") from None


def _pieces(payload: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """Cut a JSON list between its elements into lists of about a megabyte. What is no list comes as it is."""
    start, size = payload.find(b"[") + 1, _PIECE
    if len(payload) <= _PIECE or payload[:start].strip() != b"[":
        yield payload
        return
    while len(payload) - start > size:
        cut = _last_comma(bytes(payload[start : start + size]))
        if cut is None:
            size *= 2  # one element is as large
            continue
        yield b"[" + (payload[start : start + cut].strip() or _NOTHING) + b"]"
        start, size = start + cut + 1, _PIECE
    rest = payload[start:].strip()
    yield b"[" + (_NOTHING + rest if rest == b"]" else rest)


def _last_comma(part: bytes) -> int | None:
    """Return where the last comma between two elements is in a `part` of a list that begins with an element; None if there is none."""
    # Escapes are made to be of no meaning, so that every quote is the begin or the end of a text.
    outside = part.replace(rb"\\", b"__").replace(rb"\"", b"__").split(b'"')
    end = len(part)
    if not len(outside) % 2:  # it ends within a text
        end -= len(outside.pop()) + 1
    structure = b"".join(outside[::2])
    depth = sum(map(structure.count, b"[{")) - sum(map(structure.count, b"]}"))
    looked_at = 0
    for place in range(len(outside) - 1, -1, -1):
        end -= len(outside[place])
        if not place % 2:
            for at in range(len(outside[place]) - 1, -1, -1):
                sign = outside[place][at]
                if sign == _COMMA and not depth:
                    return end + at
                depth += (sign in b"]}") - (sign in b"[{")
            looked_at += len(outside[place])
        end -= 1  # the quote before it
        if looked_at > _LOOKED_AT:
            return None
    return None


def _text(place: int, found: Any) -> Text:
    if isinstance(found, str):
        return _parted(without_nul(found))
    if found and len({type(each) for each in found}) != 1:
        raise InvalidRequest(f"texts[{place}]: must be all words, or all token ids")
    return words_without_nul(found)


def _parted(text: str) -> Text:
    first, separator, second = text.rpartition(" ||| ")
    return (first, second) if separator and first.strip() and second.strip() else text


def write_vectors(ask: Ask, vectors: NDArray[Any], tokens: list[list[str]] | None) -> list[bytes | memoryview]:
    """Return the answer of vectors to `ask`; `tokens` are those of each text, if they are shown."""
    array = numpy.ascontiguousarray(vectors)
    head = {"dtype": array.dtype.name, "shape": list(array.shape), "tokens": "" if tokens is None else tokens}
    return [ask.identity, encode_json(head), array.data.cast("B") if array.size else b"", ask.id]


def write_facts(ask: Ask, facts: dict[str, Any]) -> list[bytes | memoryview]:
    """Return the answer to a question about the server."""
    return [ask.identity, encode_json(facts), ask.id]


def write_refusal(ask: Ask, error: RefusedRequest) -> list[bytes | memoryview]:
    """Return the answer that refuses a request. Bert-as-service has no form for an error.

    It is an array of a type that there is not: whoever makes an array of it, as its clients do, raises TypeError, which quotes the name
    of the type: what is wrong. Other clients find `error` beside it.
    """
    # With a comma it would be several types.
    name = bounded(f"{error.type}: {error.message}", _MOST_SHOWN).replace(",", ";")
    head = {"dtype": f"refused by the server: {name}", "shape": [], "tokens": "", "error": error}
    return [ask.identity, encode_json(head), b"", ask.id]


def failed(error: WeirError, status: int) -> RefusedRequest:
    """Return `error`, for which HTTP has `status`, ready to travel."""
    return RefusedRequest(type(error).__name__, bounded(error.message), status, getattr(error, "retry_after", None))
