"""The messages of bert-as-service over ZeroMQ: parse requests, write answers.

A request has four frames: the client's identity, texts or a command, the number of the request, and the number of texts. The answer is published under
the client's identity as its topic. docs/reference/zeromq.md has the tables.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from weir.errors import InvalidRequest, WeirError, bounded
from weir.text_models.texts import Text
from weir.wire.values import UNREADABLE, without_halves, without_nul, words_without_nul, writable

SHOW_CONFIG, SHOW_STATUS, TERMINATION = b"SHOW_CONFIG", b"SHOW_STATUS", b"TERMINATION"
COMMANDS = frozenset((SHOW_CONFIG, SHOW_STATUS, TERMINATION))

REQUEST_FRAMES = 4
MAX_FRAMES = 5  # of a message; one with five frames is dropped without closing its connection
MAX_IDENTITY = 255  # bytes
_MAX_DIGITS = 20
_MAX_COMMAND = max(map(len, COMMANDS))  # bytes
_PIECE = 1 << 20  # bytes of a list of texts that are decoded at once, which takes a few milliseconds
_INVALID_LIST = b","  # stands for a piece between two commas with nothing between them, so that decoding refuses it
_MAX_SCANNED = 1 << 16  # bytes outside of strings that are searched for the end of an element
_MAX_QUOTED = 500  # the most characters of an error in a refusal


class ZeroMqRequest(NamedTuple):
    """A request: the client's identity, a JSON list of texts or a command, the number of the request, and how many texts it states to have."""

    identity: bytes
    payload: bytes | bytearray
    id: bytes
    size: int

    @property
    def command(self) -> bytes:
        """The command in the payload; b"" if the payload is texts."""
        return bytes(self.payload) if len(self.payload) <= _MAX_COMMAND and bytes(self.payload) in COMMANDS else b""


class RefusedRequest(msgspec.Struct, omit_defaults=True):
    """An error in an answer: its class in weir.errors, its message, its HTTP status, and after how many seconds to send the request again."""

    type: str
    message: str
    status: int = 500
    retry_after: float | None = None


_COMMA = ord(",")
_TEXTS = msgspec.json.Decoder(list[str | list[str | int]])
encode_json = msgspec.json.Encoder(enc_hook=writable).encode


def read_request(frames: Sequence[bytes | bytearray]) -> ZeroMqRequest:
    """Return the request in `frames`, without decoding its texts. Raises InvalidRequest naming the frame and the rule."""
    if len(frames) != REQUEST_FRAMES:
        raise InvalidRequest(f"frames: {len(frames)}; a request has {REQUEST_FRAMES}")
    identity, payload, number, count = bytes(frames[0]), frames[1], bytes(frames[2]), bytes(frames[3])
    if not 0 < len(identity) <= MAX_IDENTITY:
        raise InvalidRequest(f"identity: {len(identity)} bytes; must have 1 to {MAX_IDENTITY}")
    for name, digits in (("id", number), ("count", count)):
        if not (digits.isdigit() and len(digits) <= _MAX_DIGITS):
            raise InvalidRequest(f"{name}: {digits[:_MAX_DIGITS]!r}; must be a number of at most {_MAX_DIGITS} digits")
    return ZeroMqRequest(identity, payload, number, int(count))


def read_texts(request: ZeroMqRequest) -> list[Text]:
    """Return the texts of a request. It decodes a few milliseconds at a time, so that other threads can run in between.

    ` ||| ` separates the two texts of a pair. NULs and halves of surrogate pairs are removed, as in bert-as-service. Raises InvalidRequest if the
    payload is not a JSON list of texts, or the number of texts is not the stated one.
    """
    found: list[Any] = []
    for piece in _pieces(request.payload):
        found += _read_piece(piece)
    if len(found) != request.size:
        raise InvalidRequest(f"count: {request.size}, but there are {len(found)} texts")
    if not found:
        raise InvalidRequest("texts: must not be empty")
    return [_text(place, each) for place, each in enumerate(found)]


def _read_piece(piece: bytes | bytearray) -> list[Any]:
    """Decode a piece of the list, if necessary without halves of surrogate pairs. Raises InvalidRequest."""
    try:
        return _TEXTS.decode(piece)
    except UNREADABLE as error:
        cleaned = without_halves(piece)
        if cleaned is not None:
            return _read_piece(cleaned)
        raise InvalidRequest(f"texts: must be a JSON list of texts ({error})") from None


def _pieces(payload: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """Split a JSON list between its elements into JSON lists of about _PIECE bytes. Anything else is yielded as it is."""
    start, size = payload.find(b"[") + 1, _PIECE
    if len(payload) <= _PIECE or payload[:start].strip() != b"[":
        yield payload
        return
    while len(payload) - start > size:
        cut = _last_comma(bytes(payload[start : start + size]))
        if cut is None:
            size *= 2  # one element is larger than the piece
            continue
        yield b"[" + (payload[start : start + cut].strip() or _INVALID_LIST) + b"]"
        start, size = start + cut + 1, _PIECE
    rest = payload[start:].strip()
    yield b"[" + (_INVALID_LIST + rest if rest == b"]" else rest)


def _last_comma(part: bytes) -> int | None:
    """Return the index of the last comma between two elements in `part`, which begins with an element of a list; None if there is none."""
    # Escapes are replaced, so that every quote begins or ends a string.
    outside = part.replace(rb"\\", b"__").replace(rb"\"", b"__").split(b'"')
    end = len(part)
    if not len(outside) % 2:  # the part ends inside a string
        end -= len(outside.pop()) + 1
    structure = b"".join(outside[::2])
    depth = sum(map(structure.count, b"[{")) - sum(map(structure.count, b"]}"))
    scanned = 0
    for place in range(len(outside) - 1, -1, -1):
        end -= len(outside[place])
        if not place % 2:
            for at in range(len(outside[place]) - 1, -1, -1):
                byte = outside[place][at]
                if byte == _COMMA and not depth:
                    return end + at
                depth += (byte in b"]}") - (byte in b"[{")
            scanned += len(outside[place])
        end -= 1  # the quote before
        if scanned > _MAX_SCANNED:
            return None
    return None


def _text(place: int, found: Any) -> Text:
    if isinstance(found, str):
        return _split_pair(without_nul(found))
    if found and len({type(each) for each in found}) != 1:
        raise InvalidRequest(f"texts[{place}]: must be all words, or all token ids")
    return words_without_nul(found)


def _split_pair(text: str) -> Text:
    first, separator, second = text.rpartition(" ||| ")
    return (first, second) if separator and first.strip() and second.strip() else text


def write_vectors(
    request: ZeroMqRequest, vectors: NDArray[Any], tokens: list[list[str]] | None
) -> list[bytes | memoryview]:
    """Return the answer to `request`: `vectors`, and the tokens of each text if they are shown."""
    array = numpy.ascontiguousarray(vectors)
    head = {"dtype": array.dtype.name, "shape": list(array.shape), "tokens": "" if tokens is None else tokens}
    return [request.identity, encode_json(head), array.data.cast("B") if array.size else b"", request.id]


def write_facts(request: ZeroMqRequest, facts: dict[str, Any]) -> list[bytes | memoryview]:
    """Return the answer to a command: facts about the server."""
    return [request.identity, encode_json(facts), request.id]


def write_refusal(request: ZeroMqRequest, error: RefusedRequest) -> list[bytes | memoryview]:
    """Return the answer that refuses a request. bert-as-service has no format for errors.

    The answer is an array with a `dtype` that does not exist and holds the message. The stock client raises a TypeError that quotes it. Other clients
    find the error in the field `error`.
    """
    # numpy would take a comma for the separator of several types.
    name = bounded(f"{error.type}: {error.message}", _MAX_QUOTED).replace(",", ";")
    head = {"dtype": f"refused by the server: {name}", "shape": [], "tokens": "", "error": error}
    return [request.identity, encode_json(head), b"", request.id]


def refusal_of(error: WeirError, status: int) -> RefusedRequest:
    """Return `error`, whose HTTP status is `status`, as it is sent in an answer."""
    return RefusedRequest(type(error).__name__, bounded(error.message), status, getattr(error, "retry_after", None))
