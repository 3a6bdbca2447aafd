"""The transport protocol of ZeroMQ, ZMTP 3, as far as a socket that listens needs it: bytes in, events out, no I/O.

Version 3 with the mechanism NULL (https://rfc.zeromq.org/spec/23/), subscriptions also as version 3.1 says them
(https://rfc.zeromq.org/spec/37/). What a stranger sends takes no more memory than a limit that is known before: libzmq bounds
the frames of a message, but neither their number nor that of a peer's subscriptions.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from weir.errors import InvalidRequest, TooLarge

# The signature, version 3.0, the mechanism, not a server of it, filler.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

MORE, LONG, COMMAND = 1, 2, 4
_MAX_COMMAND = 512  # bytes
_SMALL = 256  # bytes of a frame that is kept whatever its message has: there are few in one
_LARGE = 1 << 16  # bytes of a frame whose body is not copied
_MAX_TOPIC = 300  # bytes of a subscription
_MAX_CONTEXT = 16  # bytes of a PING that come back with its PONG


class Received(NamedTuple):
    """A whole message. Of one that was too large, `size` is what its frames had, and the largest of them are empty here."""

    frames: Sequence[bytes | bytearray]
    size: int = 0


class Subscribed(NamedTuple):
    """The peer wants messages whose first frame begins with `topic`, or wants them no longer."""

    topic: bytes
    wanted: bool


class ZmtpReply(NamedTuple):
    """Bytes that must be sent to the peer."""

    data: bytes


Event = Received | Subscribed | ZmtpReply


class _Stage(Enum):
    GREETING = 1
    HANDSHAKE = 2
    TRAFFIC = 3


class ZmtpParser:
    """Reads what one peer sends to a socket of type `own` ("PULL": takes messages; "PUB": takes subscriptions).

    Of a message of more than `max_message` bytes, the frames that do not fit are thrown away as they come, so that whoever sent it can be
    answered: the first frame says who that is, and the others which request it was. Raises InvalidRequest for whatever is not ZMTP, or not
    from a socket of the other type, and TooLarge for a message whose first frame does not fit or of more than `max_frames` frames;
    the connection is then of no more use.
    """

    def __init__(self, own: str, max_message: int, max_frames: int) -> None:
        self._peers = {"PULL": (b"PUSH",), "PUB": (b"SUB", b"XSUB")}[own]
        self._takes_messages = own == "PULL"
        self._max_message = max_message
        self._max_frames = max_frames
        self._stage = _Stage.GREETING
        self._buffer = bytearray()
        self._needed = len(GREETING)  # bytes in the buffer before there is anything to do
        self._frames: list[bytes | bytearray] = []
        self._held = 0  # bytes of the frames of an unfinished message
        self._large_size, self._large_flags = 0, 0  # of the large frame that the buffer is for
        self._to_skip = 0  # bytes that are to come of a frame that does not fit
        self._skipped = 0  # bytes of such frames of the unfinished message

    @property
    def unfinished(self) -> bool:
        """Whether a part of a message or command has come, and not all of it."""
        return bool(self._buffer or self._frames or self._to_skip)

    @property
    def ready(self) -> bool:
        """Whether the handshake is done."""
        return self._stage is _Stage.TRAFFIC

    @property
    def held(self) -> int:
        """Bytes of what has not come whole."""
        return len(self._buffer) + self._held

    def feed(self, data: bytes) -> Iterator[Event]:
        """Take what came, and yield what it made whole."""
        left = memoryview(data)
        while len(left):
            if self._to_skip:
                part, left = left[: self._to_skip], left[self._to_skip :]
                self._to_skip -= len(part)
            elif self._large_size:
                room = self._large_size - len(self._buffer)
                self._buffer += left[:room]
                left = left[room:]
                yield from self._large()
            else:
                self._buffer += left
                left = left[:0]
                yield from self._small()

    def _large(self) -> Iterator[Event]:
        """Take the large frame that the buffer is for, if it is whole: as it is, for a copy would be as large again."""
        if len(self._buffer) == self._large_size:
            body, self._buffer, self._large_size = self._buffer, bytearray(), 0
            yield from self._took(self._large_flags, body)

    def _small(self) -> Iterator[Event]:
        """Take the frames that are whole in the buffer."""
        if self._stage is _Stage.GREETING:
            _check_greeting(self._buffer)
        while len(self._buffer) >= self._needed:
            if self._stage is _Stage.GREETING:
                del self._buffer[: len(GREETING)]
                self._stage, self._needed = _Stage.HANDSHAKE, 2
                continue
            frame = self._next()
            if frame is None:
                return
            yield from self._took(*frame)

    def _next(self) -> tuple[int, bytes] | None:
        """Return flags and body of the first frame in the buffer, or None if it has not come whole; what must come is `_needed`."""
        flags = self._buffer[0]
        head = 9 if flags & LONG else 2
        if len(self._buffer) < head:
            self._needed = head
            return None
        size = struct.unpack_from(">Q" if flags & LONG else ">B", self._buffer, 1)[0]
        self._check_frame(flags, size)
        if not flags & COMMAND and size > _SMALL and self._held + size > self._max_message:
            self._skip(head, size)
            return flags, b""
        if len(self._buffer) < head + size:
            self._needed = head + size
            if size >= _LARGE:
                del self._buffer[:head]
                self._large_flags, self._large_size, self._needed = flags, size, 2
            return None
        body = bytes(memoryview(self._buffer)[head : head + size])
        del self._buffer[: head + size]
        self._needed = 2
        return flags, body

    def _skip(self, head: int, size: int) -> None:
        """Throw away a frame that does not fit: what has come of it, and what is to come."""
        came = min(size, len(self._buffer) - head)
        del self._buffer[: head + came]
        self._to_skip = size - came
        self._skipped += size
        self._needed = 2

    def _check_frame(self, flags: int, size: int) -> None:
        if flags & ~(MORE | LONG | COMMAND) or (flags & COMMAND and flags & MORE):
            raise InvalidRequest(f"frame: flags {flags:#04x} are none of ZMTP 3")
        if flags & COMMAND and size > _MAX_COMMAND:
            raise TooLarge(f"frame: a command of {size} bytes; {_MAX_COMMAND} are allowed")
        if not flags & COMMAND and self._stage is not _Stage.TRAFFIC:
            raise InvalidRequest("frame: a message before the handshake")
        if not flags & COMMAND and not self._frames and size > self._max_message:
            raise TooLarge(f"frame: a message of more than {self._max_message} bytes")
        if not flags & COMMAND and len(self._frames) >= self._max_frames:
            raise TooLarge(f"frame: a message of more than {self._max_frames} frames")

    def _took(self, flags: int, body: bytes | bytearray) -> Iterator[Event]:
        if flags & COMMAND:
            yield from self._commanded(bytes(body))
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
            yield _subscription_in(list(map(bytes, frames)))

    def _commanded(self, body: bytes) -> Iterator[Event]:
        length = body[0] if body else 0
        name, rest = body[1 : 1 + length], body[1 + length :]
        if not length or len(name) < length:
            raise InvalidRequest("frame: a command without a name")
        if self._stage is _Stage.HANDSHAKE:
            self._check_ready(name, rest)
            self._stage = _Stage.TRAFFIC
        elif name == b"PING":
            yield ZmtpReply(frame(b"\x04PONG" + rest[2 : 2 + _MAX_CONTEXT], COMMAND))
        elif name in (b"SUBSCRIBE", b"CANCEL") and not self._takes_messages:
            yield Subscribed(_topic(rest), name == b"SUBSCRIBE")

    def _check_ready(self, name: bytes, properties: bytes) -> None:
        if name != b"READY":
            raise InvalidRequest(f"handshake: {name[:16]!r} instead of READY")
        kind = _properties(properties).get(b"socket-type", b"")
        if kind not in self._peers:
            raise InvalidRequest(f"handshake: a socket of type {kind[:16]!r}; {self._peers[0].decode()} is wanted here")


def ready(own: str) -> bytes:
    """Return the command that ends the handshake of a socket of type `own`."""
    kind = own.encode()
    return frame(b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind, COMMAND)


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return one frame."""
    return head(len(body), flags) + body


def head(size: int, flags: int = 0) -> bytes:
    """Return what goes before the body of a frame."""
    return struct.pack(">BQ", flags | LONG, size) if size > 255 else bytes((flags, size))


def pack(frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return a message as buffers to be written one after the other; bodies are not copied."""
    buffers: list[bytes | memoryview] = []
    for place, body in enumerate(frames):
        buffers += (head(len(body), MORE if place + 1 < len(frames) else 0), body)
    return buffers


def _check_greeting(begun: bytearray) -> None:
    """Raise InvalidRequest as soon as what came cannot become a greeting."""
    for place, wanted in ((0, GREETING[0]), (10, GREETING[10])):
        if len(begun) > place and begun[place] != wanted:
            raise InvalidRequest("greeting: not that of ZMTP 3")
    if len(begun) > 9 and not begun[9] & 1:
        raise InvalidRequest("greeting: not that of ZMTP 3")
    if len(begun) >= 32 and begun[12:32] != GREETING[12:32]:
        raise InvalidRequest("greeting: a mechanism other than NULL")


def _properties(data: bytes) -> dict[bytes, bytes]:
    found, place = {}, 0
    while place < len(data):
        end = place + 1 + data[place]
        if end + 4 > len(data):
            raise InvalidRequest("handshake: a property that does not end")
        name, size = data[place + 1 : end].lower(), int.from_bytes(data[end : end + 4], "big")
        place = end + 4 + size
        if place > len(data):
            raise InvalidRequest("handshake: a property that does not end")
        found[name] = data[end + 4 : place]
    return found


def _subscription_in(frames: list[bytes]) -> Subscribed:
    """Return the subscription in a message, as version 3.0 has it: a byte that says which, and the topic."""
    body = frames[0]
    if len(frames) != 1 or body[:1] not in (b"\0", b"\1"):
        raise InvalidRequest("frame: not a subscription")
    return Subscribed(_topic(body[1:]), body[:1] == b"\1")


def _topic(topic: bytes) -> bytes:
    if len(topic) > _MAX_TOPIC:
        raise TooLarge(f"subscription: to {len(topic)} bytes; {_MAX_TOPIC} are allowed")
    return topic
