"""The frames between a server and its worker processes.

A frame is a length (4 bytes, big-endian) and a msgpack array of that many bytes. A server sends Start, Batch, Cancel, Free and Stop. A worker sends Ready or
StartFailed, Events and Restarted. Both send Turn. Of a worker in a cluster, WorkerWaits, WorkerPlaced, WorkerLeaves and WorkerEnded come too, from the process that speaks with the cluster.

Workers outside of the server, in any language, may speak the lock-step protocol of the project `batching` (https://github.com/kemingy/batching) instead. A frame
is a length (4 bytes, big-endian) and that many bytes. The worker's first frame is empty and requests a batch. The server sends a msgpack map of ids (36
characters each) to request bodies. The worker sends a map of the same ids to response bodies, which also requests the next batch. Its key `error_ids` has the
ids of requests that failed, concatenated without separators.
"""

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from weir.errors import InvalidRequest, ModelError, WeirError
from weir.messages import Batch, Events, Timing
from weir.metrics import MetricReport
from weir.wire.cells import BufferPlacer, Cells, Failure, Fetch, Ref, pack_cells, pack_error, unpack_cells, unpack_error

F = TypeVar("F")

# A longer frame is garbage, or a batch that should have gone through the arena.
MAX_FRAME_BYTES = 1 << 30


class FrameError(Exception):
    """The bytes are not a frame. The rest of their stream cannot be read either."""


class Start(NamedTuple):
    """The first frame: the model (module:qualname, or a class pickled by value, with its parameters), and the options of the worker.

    Everything in it must be picklable.
    """

    target: str | bytes
    options: dict[str, Any]


class Cancel(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Nobody waits for these entries of a batch any more."""

    batch_id: int
    indices: list[int]


class Free(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """The server has read these blocks of the worker's own arena, so they are free."""

    refs: list[Ref]


class Stop(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The worker must finish its batches, unload the model and exit; with `keep`, only finish: its actor stays for another server."""

    keep: bool = False


class Ready(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """The model is loaded and warmed up. `measured`: see Events."""

    measured: list[MetricReport] | None = None


class StartFailed(NamedTuple):
    """The model's constructor, `load` or the warm-up has raised. The error has the traceback."""

    error: WeirError


class Restarted(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """The worker calls `predict` for this batch, perhaps again. The time limit of the batch starts now."""

    batch_id: int


class Turn(msgspec.Struct, array_like=True, tag=13, frozen=True):
    """The worker wants to compute alone on its device (`wanted`), or has done so; or the server lets it."""

    wanted: bool = True


class WorkerWaits(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """The worker has no place in the cluster yet, for this reason."""

    reason: str


class WorkerPlaced(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """The worker has its place: its process is about to load the model."""

    pid: int
    node: str
    address: str
    gpus: list[str]
    actor: str
    taken_over: bool = False


class WorkerLeaves(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """The worker's node will soon be gone, for this reason: it should get no more batches."""

    reason: str


class WorkerEnded(msgspec.Struct, array_like=True, tag=12, frozen=True):
    """The worker has ended, for this reason."""

    reason: str


Notice = WorkerWaits | WorkerPlaced | WorkerLeaves | WorkerEnded
Frame = Notice | Start | Batch | Cancel | Free | Stop | Ready | StartFailed | Events | Restarted | Turn


class _Start(msgspec.Struct, array_like=True, tag=0):
    pickled: bytes


class _Batch(msgspec.Struct, array_like=True, tag=1):
    batch_id: int
    attempt: int
    content_types: str | list[str]
    accepts: str | list[str]
    cells: Cells
    share: int = 1


class _StartFailed(msgspec.Struct, array_like=True, tag=6):
    failure: Failure


class _Events(msgspec.Struct, array_like=True, tag=8):
    batch_id: int
    cells: Cells
    indices: list[int] | None
    kinds: list[int] | None
    final: bool
    timing: Timing | None
    measured: list[MetricReport] | None = None


_Body = Notice | _Start | _Batch | Cancel | Free | Stop | Ready | _StartFailed | Restarted | _Events | Turn

_HEAD = struct.Struct(">I")
_encode_into = msgspec.msgpack.Encoder().encode_into
_decode = msgspec.msgpack.Decoder(_Body).decode


def encode_batch(
    batch: Batch, places: BufferPlacer | None = None, *, max_frame_bytes: int = MAX_FRAME_BYTES
) -> bytearray:
    """Return the frame of `batch`. Large buffers are put into `places`, and the frame has references to them.

    A payload that cannot be pickled is replaced by an InvalidRequest. If the frame would be too long, every payload is.
    """
    content_types, accepts = batch.content_types, batch.accepts
    if type(content_types) is not str:
        content_types = _collapse(content_types)
    if type(accepts) is not str:
        accepts = _collapse(accepts)
    cells = pack_cells(batch.payloads, places, InvalidRequest, content_types)
    frame = framed(_Batch(batch.batch_id, batch.attempt, content_types, accepts, cells, batch.share), _encode_into)
    if len(frame) - 4 <= max_frame_bytes:
        return frame
    refused = _too_long(frame, cells, batch.payloads, places, InvalidRequest, max_frame_bytes)
    cells = pack_cells(refused, None, InvalidRequest, content_types)
    return framed(_Batch(batch.batch_id, batch.attempt, content_types, accepts, cells, batch.share), _encode_into)


def encode_events(
    events: Events, places: BufferPlacer | None = None, *, max_frame_bytes: int = MAX_FRAME_BYTES
) -> bytearray:
    """Return the frame of `events`. Large buffers are put into `places`, and the frame has references to them.

    An output that cannot be pickled is replaced by a ModelError. If the frame would be too long, every output is.
    """
    kinds = None if events.kinds is None else list(events.kinds)
    cells = pack_cells(events.outputs, places, ModelError)
    body = _Events(events.batch_id, cells, events.indices, kinds, events.final, events.timing, events.measured)
    frame = framed(body, _encode_into)
    if len(frame) - 4 <= max_frame_bytes:
        return frame
    refused = _too_long(frame, cells, events.outputs, places, ModelError, max_frame_bytes)
    body.cells = pack_cells(refused, None, ModelError)
    return framed(body, _encode_into)


def encode_control(frame: Start | Cancel | Free | Stop | Ready | StartFailed | Restarted | Turn | Notice) -> bytearray:
    """Return the frame of anything except a Batch and Events. For Start, raises what pickling its parts raises."""
    match frame:
        case Start():
            return framed(_Start(pickle.dumps(tuple(frame), 5)), _encode_into)
        case StartFailed():
            return framed(_StartFailed(pack_error(frame.error)), _encode_into)
        case _:
            return framed(frame, _encode_into)


def _collapse(column: str | list[str]) -> str | list[str]:
    if column and column.count(column[0]) == len(column):
        return column[0]
    return column


def _too_long(
    frame: bytearray, cells: Cells, values: list[Any], places: BufferPlacer | None, complain: Callable[[str], WeirError], limit: int
) -> list[Any]:  # fmt: skip
    """Take back what `cells` has in `places`. Return an error for each of `values`, whose `frame` is longer than `limit`."""
    if places is not None:
        for ref in cells.refs():
            places.take_back(ref)
    text = f"the batch is {len(frame) - 4} bytes long between server and worker, over the limit of {limit}"
    return [value if isinstance(value, WeirError) else complain(text) for value in values]


def framed(body: Any, encode_into: Callable[[Any, bytearray, int], None]) -> bytearray:
    """Return the frame of `body`, which `encode_into` writes into a buffer at an offset."""
    frame = bytearray(4)
    encode_into(body, frame, 4)
    _HEAD.pack_into(frame, 0, min(len(frame) - 4, 0xFFFFFFFF))
    return frame


class FrameReader(Generic[F]):
    """Parses frames, which `decode` decodes, from bytes that may arrive in pieces of any size.

    `decode` raises msgspec.MsgspecError, ValueError or IndexError for bytes that are not a frame.
    """

    def __init__(self, decode: Callable[[memoryview], F], *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decode = decode
        self._max_frame_bytes = max_frame_bytes
        self._held = bytearray()  # an incomplete frame
        self._broken: FrameError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> list[F]:
        """Return the frames that `data` completes, in order. No reference to `data` is kept.

        Raises FrameError for bytes that are not a frame, and for all calls after that.
        """
        if self._broken is not None:
            raise self._broken
        if self._held:
            self._held += data
            data = self._held
        frames: list[F] = []
        try:
            with memoryview(data) as view:
                used = self._read(view, frames)
        except FrameError as error:
            self._broken = error
            self._held = bytearray()
            raise
        if data is self._held:
            del self._held[:used]
        elif used < len(data):
            self._held += memoryview(data)[used:]
        return frames

    def _read(self, view: memoryview, frames: list[F]) -> int:
        start, size = 0, len(view)
        while size - start >= 4:
            (length,) = _HEAD.unpack_from(view, start)
            if length > self._max_frame_bytes:
                raise FrameError(f"a frame of {length} bytes, over the limit of {self._max_frame_bytes}")
            end = start + 4 + length
            if end > size:
                break
            with view[start + 4 : end] as body:
                try:
                    frames.append(self._decode(body))
                except (msgspec.MsgspecError, ValueError, IndexError) as error:
                    raise FrameError(f"a frame of {length} bytes that cannot be read: {error}") from None
            start = end
        return start


class FrameParser(FrameReader[Frame]):
    """Parses the frames between a server and its workers.

    `fetch` returns buffers in the arena of the other side. Without `fetch`, a frame with references is a FrameError.
    """

    def __init__(self, fetch: Fetch | None = None, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(self._made, max_frame_bytes=max_frame_bytes)
        self._fetch = fetch

    def _made(self, data: memoryview) -> Frame:
        body: _Body = _decode(data)
        match body:
            case _Events():
                return Events(
                    body.batch_id,
                    unpack_cells(body.cells, self._fetch, ModelError),
                    indices=body.indices,
                    kinds=body.kinds,
                    final=body.final,
                    timing=body.timing,
                    measured=body.measured,
                )
            case _Batch():
                payloads = unpack_cells(body.cells, self._fetch, InvalidRequest)
                return Batch(body.batch_id, payloads, body.content_types, body.accepts, body.attempt, body.share)
            case _Start():
                return Start(*pickle.loads(body.pickled))  # noqa: S301 - from our own parent process
            case _StartFailed():
                return StartFailed(unpack_error(body.failure))
            case _:
                return body


# The lock-step protocol.

ID_LENGTH = 36
ERROR_IDS = "error_ids"
# A longer frame is garbage, or takes too much memory.
MAX_BODY_BYTES = 256 << 20
ASK = bytes(4)  # the worker's first frame, which is empty

_LOCKSTEP_HEAD = struct.Struct("!I")
_encode_map = msgspec.msgpack.Encoder().encode
_decode_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
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
    return _lockstep_frame(_encode_map(dict(zip(ids, bodies, strict=True))))


def decode_jobs(body: bytes) -> dict[str, bytes]:
    """Return the bodies in a server's frame, by id. Raises FrameError for any other frame."""
    return _map(body)


def encode_reply(bodies: dict[str, bytes], failed: Sequence[str] = ()) -> bytes:
    """Return the frame with the results of a batch. The bodies of `failed` ids are their errors."""
    more = {ERROR_IDS: "".join(failed)} if failed else {}
    return _lockstep_frame(_encode_map({**bodies, **more}))


def decode_reply(body: bytes, ids: Sequence[str]) -> LockstepReply:
    """Return a worker's reply to the batch with these ids. Other ids in it are ignored.

    Raises FrameError if `body` is not such a map, or if `error_ids` does not consist of whole ids.
    """
    reply = _map(body)
    named = reply.pop(ERROR_IDS, b"").decode("ascii", "replace")
    if len(named) % ID_LENGTH:
        raise FrameError(f"error_ids of {len(named)} characters, which must be {ID_LENGTH} for each id")
    wrong = {named[start : start + ID_LENGTH] for start in range(0, len(named), ID_LENGTH)}
    return LockstepReply(
        [reply.get(each) for each in ids],
        frozenset(index for index, each in enumerate(ids) if each in wrong) if wrong else frozenset(),
    )


def _map(body: bytes) -> dict[str, bytes]:
    try:
        return {key: _content(bytes(value)) for key, value in _decode_map(body).items()}
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        raise FrameError(f"a frame of {len(body)} bytes that is not a msgpack map of ids to bytes ({error})") from None


def _content(value: bytes) -> bytes:
    """Return the content of an encoded bytes value or string. Raises KeyError for any other value."""
    return value[_BEGINS[value[0]] :]


def _lockstep_frame(body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes, over the limit of {MAX_BODY_BYTES}")
    return _LOCKSTEP_HEAD.pack(len(body)) + body
