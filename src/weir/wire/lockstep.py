"""The lock-step protocol of the project `batching` (https://github.com/kemingy/batching), which workers in any language can speak.

A frame is a length (4 bytes, big-endian) and that many bytes. The worker's first frame is empty and requests a batch. The server sends a msgpack map of ids
(36 characters each) to request bodies. The worker sends a map of the same ids to response bodies, which also requests the next batch. Its key `error_ids`
has the ids of requests that failed, concatenated without separators.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from weir.wire.frames import FrameError

ID_LENGTH = 36
ERROR_IDS = "error_ids"
# A longer frame is garbage, or takes too much memory.
MAX_BODY_BYTES = 256 << 20
ASK = bytes(4)  # the worker's first frame, which is empty

_LOCKSTEP_HEAD = struct.Struct("!I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
# By first byte of a value: the offset of the content of bytes or of a string. Libraries that are older than msgpack's type for bytes write bytes
# as strings, so a string need not be UTF-8.
_BEGINS = {0xC4: 2, 0xC5: 3, 0xC6: 5, 0xD9: 2, 0xDA: 3, 0xDB: 5} | dict.fromkeys(range(0xA0, 0xC0), 1)


class LockstepReply(NamedTuple):
    """A worker's reply to a batch: the bodies in the order of the batch's ids (None for a missing one), and the indices of those that failed."""

    bodies: list[bytes | None]
    failed: frozenset[int]


class LockstepParser:
    """Parses frames from bytes that may arrive in pieces of any size."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._held = bytearray()  # an incomplete frame
        self._wanted = 4  # bytes of `_held` that the next step needs

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the bodies of the frames that `data` completes, in order. No reference to `data` is kept.

        Raises FrameError for a length over the limit, before memory is allocated for it. The parser must not be fed after that.
        """
        self._held += data
        bodies: list[bytes] = []
        while len(self._held) >= self._wanted:
            (length,) = _LOCKSTEP_HEAD.unpack_from(self._held)
            if length > self._max_body_bytes:
                raise FrameError(f"a frame of {length} bytes, over the limit of {self._max_body_bytes}")
            self._wanted = 4 + length
            if len(self._held) < self._wanted:
                break
            bodies.append(bytes(memoryview(self._held)[4 : self._wanted]))
            del self._held[: self._wanted]
            self._wanted = 4
        return bodies


def make_ids(salt: int, batch_id: int, count: int) -> list[str]:
    """Return ids for the entries of a batch, in the form of UUIDs (version 8, RFC 9562). `salt` distinguishes servers."""
    first = f"{salt & 0xFFFFFFFF:08x}-{batch_id >> 24 & 0xFFFF:04x}"
    start = f"{first}-8{batch_id >> 12 & 0xFFF:03x}-8{batch_id & 0xFFF:03x}-"
    return [f"{start}{index:012x}" for index in range(count)]


def encode_jobs(ids: Sequence[str], bodies: Sequence[bytes]) -> bytes:
    """Return the frame that sends a worker these bodies."""
    return _frame(_encode(dict(zip(ids, bodies, strict=True))))


def decode_jobs(body: bytes) -> dict[str, bytes]:
    """Return the bodies in a server's frame, by id. Raises FrameError for any other frame."""
    return _map(body)


def encode_reply(bodies: dict[str, bytes], failed: Sequence[str] = ()) -> bytes:
    """Return the frame with the results of a batch. The bodies of `failed` ids are their errors."""
    more = {ERROR_IDS: "".join(failed)} if failed else {}
    return _frame(_encode({**bodies, **more}))


def decode_reply(body: bytes, ids: Sequence[str]) -> LockstepReply:
    """Return a worker's reply to the batch with these ids. Other ids in it are ignored.

    Raises FrameError if `body` is no such map, or if `error_ids` does not consist of whole ids.
    """
    answer = _map(body)
    named = answer.pop(ERROR_IDS, b"").decode("ascii", "replace")
    if len(named) % ID_LENGTH:
        raise FrameError(f"error_ids of {len(named)} characters, which must be {ID_LENGTH} for each id")
    wrong = {named[start : start + ID_LENGTH] for start in range(0, len(named), ID_LENGTH)}
    return LockstepReply(
        [answer.get(each) for each in ids],
        frozenset(index for index, each in enumerate(ids) if each in wrong) if wrong else frozenset(),
    )


def _map(body: bytes) -> dict[str, bytes]:
    try:
        return {key: _content(bytes(value)) for key, value in _decode(body).items()}
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        raise FrameError(f"a frame of {len(body)} bytes that is no msgpack map of ids to bytes ({error})") from None


def _content(value: bytes) -> bytes:
    """Return the content of an encoded bytes value or string. Raises KeyError for any other value."""
    return value[_BEGINS[value[0]] :]


def _frame(body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes, over the limit of {MAX_BODY_BYTES}")
    return _LOCKSTEP_HEAD.pack(len(body)) + body
