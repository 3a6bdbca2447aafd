"""bert-as-service over ZeroMQ, without I/O: the frames of ZMTP 3, the transport protocol of ZeroMQ, and in them requests and responses.

A request has four frames: the client's identity, texts or a command, the number of the request, and the number of texts. The response is published under
the client's identity as its topic. docs/reference/zeromq.md has the tables.

A listening socket turns bytes into events. It speaks version 3.0 of ZMTP with the mechanism NULL (https://rfc.zeromq.org/spec/23/), and accepts the
subscriptions of version 3.1 too (https://rfc.zeromq.org/spec/37/). The memory that a peer's bytes take has a limit. libzmq limits the size of a message's
frames, but neither their number nor the number of a peer's subscriptions.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from weir.errors import InvalidRequest, TooLarge, WeirError, bounded
from weir.text_models.texts import Text
from weir.wire.values import UNREADABLE, without_halves, without_nul, words_without_nul, writable

# Signature, version 3.0, mechanism, as-server = 0, filler (spec 23, "Greeting").
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

MORE, LONG, COMMAND = 1, 2, 4  # the flags of a frame
_MAX_COMMAND = 512  # bytes
# Bytes; a frame up to this size is kept even in a message that is too large, as a message has few frames.
_ALWAYS_KEPT = 256
_LARGE_FRAME = 1 << 16  # bytes; the body of such a frame is not copied
_MAX_TOPIC = 300  # bytes of a subscription
_MAX_PING_CONTEXT = 16  # bytes of a PING that its PONG repeats (spec 37)


class Received(NamedTuple):
    """A complete message. For a message that was too large, `size` is its size in bytes, and its large frames are empty; else `size` is 0."""

    frames: Sequence[bytes | bytearray]
    size: int = 0


class Subscribed(NamedTuple):
    """The peer subscribes to messages whose first frame begins with `topic`, or cancels that subscription (`wanted` is False)."""

    topic: bytes
    wanted: bool


class ZmtpReply(NamedTuple):
    """Bytes to send to the peer."""

    data: bytes


Event = Received | Subscribed | ZmtpReply


class _Stage(Enum):
    GREETING = 1
    HANDSHAKE = 2
    TRAFFIC = 3


class ZmtpParser:
    """Parses the bytes that one peer sends to a socket of type "PULL", which receives messages, or "PUB", which receives subscriptions.

    In a message of more than `max_message` bytes, the frames that do not fit are skipped. The small frames are kept, so that the sender can be
    answered: they say who it is and which request it was.

    `feed` raises InvalidRequest for bytes that are not ZMTP or not from a matching socket, and TooLarge for a message whose first frame does not fit,
    or with more than `max_frames` frames. After an error the parser must not be used again, and the connection is to be closed.
    """

    def __init__(self, socket_type: str, max_message: int, max_frames: int) -> None:
        self._peers = {"PULL": (b"PUSH",), "PUB": (b"SUB", b"XSUB")}[socket_type]
        self._takes_messages = socket_type == "PULL"
        self._max_message = max_message
        self._max_frames = max_frames
        self._stage = _Stage.GREETING
        self._buffer = bytearray()
        self._needed = len(GREETING)  # how many bytes the buffer must have before it can be parsed further
        self._frames: list[bytes | bytearray] = []  # of the unfinished message
        self._held = 0  # bytes of these frames
        self._large_size, self._large_flags = 0, 0  # of the large frame that the buffer receives; size 0: none
        self._to_skip = 0  # bytes to come of a frame that is skipped
        self._skipped = 0  # bytes of the skipped frames of the unfinished message

    @property
    def unfinished(self) -> bool:
        """Whether a message or command has arrived in part."""
        return bool(self._buffer or self._frames or self._to_skip)

    @property
    def ready(self) -> bool:
        """Whether the handshake is complete."""
        return self._stage is _Stage.TRAFFIC

    @property
    def held(self) -> int:
        """How many bytes of an incomplete message or command are held in memory."""
        return len(self._buffer) + self._held

    def feed(self, data: bytes) -> Iterator[Event]:
        """Parse the next bytes of the peer, and yield the events that they complete. Parsing goes on only while the iterator is advanced."""
        left = memoryview(data)
        while len(left):
            if self._to_skip:
                part, left = left[: self._to_skip], left[self._to_skip :]
                self._to_skip -= len(part)
            elif self._large_size:
                room = self._large_size - len(self._buffer)
                self._buffer += left[:room]
                left = left[room:]
                yield from self._read_large_frame()
            else:
                self._buffer += left
                left = left[:0]
                yield from self._read_frames()

    def _read_large_frame(self) -> Iterator[Event]:
        """Complete the large frame that the buffer receives, once all of it is there. The buffer itself becomes the body, without a copy."""
        if len(self._buffer) == self._large_size:
            body, self._buffer, self._large_size = self._buffer, bytearray(), 0
            yield from self._complete(self._large_flags, body)

    def _read_frames(self) -> Iterator[Event]:
        """Complete the greeting and the frames of which all bytes are in the buffer."""
        if self._stage is _Stage.GREETING:
            _check_greeting(self._buffer)
        while len(self._buffer) >= self._needed:
            if self._stage is _Stage.GREETING:
                del self._buffer[: len(GREETING)]
                self._stage, self._needed = _Stage.HANDSHAKE, 2
                continue
            frame = self._next_frame()
            if frame is None:
                return
            yield from self._complete(*frame)

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Remove the first frame from the buffer and return its flags and body; None if it is incomplete. Sets `_needed`."""
        flags = self._buffer[0]
        head = 9 if flags & LONG else 2
        if len(self._buffer) < head:
            self._needed = head
            return None
        size = struct.unpack_from(">Q" if flags & LONG else ">B", self._buffer, 1)[0]
        self._check_frame(flags, size)
        if not flags & COMMAND and size > _ALWAYS_KEPT and self._held + size > self._max_message:
            self._skip(head, size)
            return flags, b""
        if len(self._buffer) < head + size:
            self._needed = head + size
            if size >= _LARGE_FRAME:
                del self._buffer[:head]
                self._large_flags, self._large_size, self._needed = flags, size, 2
            return None
        body = bytes(memoryview(self._buffer)[head : head + size])
        del self._buffer[: head + size]
        self._needed = 2
        return flags, body

    def _skip(self, head: int, size: int) -> None:
        """Skip a frame that does not fit: drop its bytes in the buffer, and those that are still to come."""
        arrived = min(size, len(self._buffer) - head)
        del self._buffer[: head + arrived]
        self._to_skip = size - arrived
        self._skipped += size
        self._needed = 2

    def _check_frame(self, flags: int, size: int) -> None:
        if flags & ~(MORE | LONG | COMMAND) or (flags & COMMAND and flags & MORE):
            raise InvalidRequest(f"frame: flags {flags:#04x} do not exist in ZMTP 3")
        if flags & COMMAND and size > _MAX_COMMAND:
            raise TooLarge(f"frame: a command of {size} bytes, must have at most {_MAX_COMMAND}")
        if not flags & COMMAND and self._stage is not _Stage.TRAFFIC:
            raise InvalidRequest("frame: a message before the handshake")
        if not flags & COMMAND and not self._frames and size > self._max_message:
            raise TooLarge(f"frame: a message of more than {self._max_message} bytes")
        if not flags & COMMAND and len(self._frames) >= self._max_frames:
            raise TooLarge(f"frame: a message of more than {self._max_frames} frames")

    def _complete(self, flags: int, body: bytes | bytearray) -> Iterator[Event]:
        """Handle a complete frame; yield an event if it completes one."""
        if flags & COMMAND:
            yield from self._handle_command(bytes(body))
            return
        self._frames.append(body)
        self._held += len(body)
        if flags & MORE:
            return
        size = self._skipped and self._skipped + self._held
        frames, self._frames, self._held, self._skipped = self._frames, [], 0, 0
        if self._takes_messages:
            yield Received(frames, size)
        else:
            yield _read_subscription(list(map(bytes, frames)))

    def _handle_command(self, body: bytes) -> Iterator[Event]:
        length = body[0] if body else 0
        name, rest = body[1 : 1 + length], body[1 + length :]
        if not length or len(name) < length:
            raise InvalidRequest("frame: a command without a name")
        if self._stage is _Stage.HANDSHAKE:
            self._check_ready(name, rest)
            self._stage = _Stage.TRAFFIC
        elif name == b"PING":
            yield ZmtpReply(frame(b"\x04PONG" + rest[2 : 2 + _MAX_PING_CONTEXT], COMMAND))
        elif name in (b"SUBSCRIBE", b"CANCEL") and not self._takes_messages:
            yield Subscribed(_topic(rest), name == b"SUBSCRIBE")

    def _check_ready(self, name: bytes, properties: bytes) -> None:
        if name != b"READY":
            raise InvalidRequest(f"handshake: {name[:16]!r} instead of READY")
        kind = _properties(properties).get(b"socket-type", b"")
        if kind not in self._peers:
            raise InvalidRequest(f"handshake: a socket of type {kind[:16]!r}, must be {self._peers[0].decode()}")


def ready(socket_type: str) -> bytes:
    """Return the command READY, which ends the handshake, for a socket of this type."""
    kind = socket_type.encode()
    return frame(b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind, COMMAND)


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return the bytes of one frame."""
    return head(len(body), flags) + body


def head(size: int, flags: int = 0) -> bytes:
    """Return the bytes before the body of a frame: flags and size."""
    return struct.pack(">BQ", flags | LONG, size) if size > 255 else bytes((flags, size))


def pack(frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return a message of these frames as buffers to be written in order. Bodies are not copied."""
    buffers: list[bytes | memoryview] = []
    for index, body in enumerate(frames):
        buffers += (head(len(body), MORE if index + 1 < len(frames) else 0), body)
    return buffers


def _check_greeting(begun: bytearray) -> None:
    """Raise InvalidRequest as soon as the bytes cannot be the beginning of a greeting of ZMTP 3."""
    for index in (0, 10):
        if len(begun) > index and begun[index] != GREETING[index]:
            raise InvalidRequest("greeting: not that of ZMTP 3")
    if len(begun) > 9 and not begun[9] & 1:
        raise InvalidRequest("greeting: not that of ZMTP 3")
    if len(begun) >= 32 and begun[12:32] != GREETING[12:32]:
        raise InvalidRequest("greeting: a mechanism other than NULL")


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return the values of a READY command by lower-case name (spec 23, "Commands")."""
    found, position = {}, 0
    while position < len(data):
        end = position + 1 + data[position]
        if end + 4 > len(data):
            raise InvalidRequest("handshake: a property that does not end")
        name, size = data[position + 1 : end].lower(), int.from_bytes(data[end : end + 4], "big")
        position = end + 4 + size
        if position > len(data):
            raise InvalidRequest("handshake: a property that does not end")
        found[name] = data[end + 4 : position]
    return found


def _read_subscription(frames: list[bytes]) -> Subscribed:
    """Return the subscription in a message of version 3.0: 1 to subscribe or 0 to cancel, then the topic."""
    body = frames[0]
    if len(frames) != 1 or body[:1] not in (b"\0", b"\1"):
        raise InvalidRequest("frame: not a subscription")
    return Subscribed(_topic(body[1:]), body[:1] == b"\1")


def _topic(topic: bytes) -> bytes:
    if len(topic) > _MAX_TOPIC:
        raise TooLarge(f"subscription: has {len(topic)} bytes, must have at most {_MAX_TOPIC}")
    return topic


# The messages of bert-as-service.

SHOW_CONFIG, SHOW_STATUS, TERMINATION = b"SHOW_CONFIG", b"SHOW_STATUS", b"TERMINATION"
COMMANDS = frozenset((SHOW_CONFIG, SHOW_STATUS, TERMINATION))

REQUEST_FRAMES = 4
MAX_FRAMES = 5  # of a message; one with five frames is dropped without closing its connection
MAX_IDENTITY = 255  # bytes
_MAX_DIGITS = 20
_LONGEST_COMMAND = max(map(len, COMMANDS))  # bytes
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
        return bytes(self.payload) if len(self.payload) <= _LONGEST_COMMAND and bytes(self.payload) in COMMANDS else b""


class RefusedRequest(msgspec.Struct, omit_defaults=True):
    """An error in a response: its class in weir.errors, its message, its HTTP status, and after how many seconds to send the request again."""

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
    return [_text(index, each) for index, each in enumerate(found)]


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
    for index in range(len(outside) - 1, -1, -1):
        end -= len(outside[index])
        if not index % 2:
            for at in range(len(outside[index]) - 1, -1, -1):
                byte = outside[index][at]
                if byte == _COMMA and not depth:
                    return end + at
                depth += (byte in b"]}") - (byte in b"[{")
            scanned += len(outside[index])
        end -= 1  # the quote before
        if scanned > _MAX_SCANNED:
            return None
    return None


def _text(index: int, found: Any) -> Text:
    if isinstance(found, str):
        return _split_pair(without_nul(found))
    if found and len({type(each) for each in found}) != 1:
        raise InvalidRequest(f"texts[{index}]: must be all words, or all token ids")
    return words_without_nul(found)


def _split_pair(text: str) -> Text:
    first, separator, second = text.rpartition(" ||| ")
    return (first, second) if separator and first.strip() and second.strip() else text


def write_vectors(
    request: ZeroMqRequest, vectors: NDArray[Any], tokens: list[list[str]] | None
) -> list[bytes | memoryview]:
    """Return the response to `request`: `vectors`, and the tokens of each text if they are shown."""
    array = numpy.ascontiguousarray(vectors)
    head = {"dtype": array.dtype.name, "shape": list(array.shape), "tokens": "" if tokens is None else tokens}
    return [request.identity, encode_json(head), array.data.cast("B") if array.size else b"", request.id]


def write_facts(request: ZeroMqRequest, facts: dict[str, Any]) -> list[bytes | memoryview]:
    """Return the response to a command: facts about the server."""
    return [request.identity, encode_json(facts), request.id]


def write_refusal(request: ZeroMqRequest, error: RefusedRequest) -> list[bytes | memoryview]:
    """Return the response that refuses a request. bert-as-service has no format for errors.

    The response is an array with a `dtype` that does not exist and holds the message. The stock client raises a TypeError that quotes it. Other clients
    find the error in the field `error`.
    """
    # numpy would take a comma for the separator of several types.
    name = bounded(f"{error.type}: {error.message}", _MAX_QUOTED).replace(",", ";")
    head = {"dtype": f"refused by the server: {name}", "shape": [], "tokens": "", "error": error}
    return [request.identity, encode_json(head), b"", request.id]


def refusal_of(error: WeirError, status: int) -> RefusedRequest:
    """Return `error`, whose HTTP status is `status`, as it is sent in a response."""
    return RefusedRequest(type(error).__name__, bounded(error.message), status, getattr(error, "retry_after", None))
