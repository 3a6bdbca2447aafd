"""The messages between a front and the dispatcher, in frames, and the link on which those of one turn of an event loop leave in one frame.

Nothing is pickled. The types state the bounds of what a front may send: a frame outside of them ends the front.
"""

import asyncio
import socket
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from msgspec import Meta

from weir import errors
from weir.errors import WeirError
from weir.messages import Dispatch, Form, Reason, Wakeup
from weir.model import Tensor
from weir.protocols.response import encode_safely
from weir.wire.frames import FrameReader, framed
from weir.workers.process.channel import Channel

# The dispatcher reads longer bodies itself, straight into the memory that it shares with the workers.
LONGEST_BODY = 32 << 10
LONGEST_PAYLOAD = 2 * LONGEST_BODY  # what is read from a body may be longer, such as numbers in JSON
LONGEST_TOKENS = 1 << 20  # bytes of the token ids of a text

# The frame of a front is closed when it has this many bytes, and may have as many again: a message is short.
FULL_FRAME = 1 << 20
LONGEST_FRAME = 4 << 20

FORMS = 1024  # of requests that a front may have at a time

LONGEST_TEXT = 8 << 10  # characters of an error's message or of a line of the log

Number = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]


# From a front.


class RequestForm(msgspec.Struct, array_like=True, tag=8, gc=False, frozen=True):
    """The `form` of many requests, under a `number` below FORMS that the front has chosen: each form replaces the former one of that number.

    `model` is the number of the facts under which the requests were read.
    """

    number: Annotated[int, Meta(ge=0, lt=FORMS)]
    model: Number
    form: Form


class SentText(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A text as tokens (see weir.text_models.texts.Tokens), whose number is its cost. Its arrival is when its request began.

    `ahead` says by how many tokens its caller has had more than others of the front, and `brief` is as in RequestBase.
    """

    ids: Annotated[bytes, Meta(max_length=LONGEST_TOKENS)]
    cost: Annotated[int, Meta(ge=1, le=LONGEST_TOKENS)]
    ahead: Annotated[float, Meta(ge=0, le=1e15)]
    brief: bool
    second: int
    outputs: tuple[Text, ...]


class SentPlace(msgspec.Struct, array_like=True, tag=1, gc=False, frozen=True):
    """The first bytes of a place of the model's arena."""

    offset: Number
    size_bytes: Annotated[int, Meta(ge=1, le=1 << 48)]


SentPayload = Annotated[bytes, Meta(max_length=LONGEST_PAYLOAD)] | SentText | SentPlace


class Submit(msgspec.Struct, array_like=True, tag=0, gc=False):
    """Requests of the form `form`, in order of arrival, and numbered one after another from `first`: above all requests before them.

    All are texts, or none is.
    """

    first: Number
    form: int
    arrivals: list[float]
    payloads: list[SentPayload]

    def takes(self, other: "Submit") -> bool:
        """Add the requests of `other`, if one message could have had all; return whether it could."""
        follows = self.form == other.form and self.first + len(self.payloads) == other.first
        if not (follows and self.arrivals and other.arrivals and self.arrivals[-1] <= other.arrivals[0]):
            return False
        self.arrivals += other.arrivals
        self.payloads += other.payloads
        return True


class Reported(msgspec.Struct, array_like=True, tag=21):
    """The counts of the product of a front, for the product of the dispatcher, which reads them."""

    data: bytes


class WantPlace(msgspec.Struct, array_like=True, tag=10, gc=False, frozen=True):
    """Asks for memory of `size_bytes` in the arena of a model."""

    model: Number
    size_bytes: Annotated[int, Meta(ge=1, le=1 << 48)]


class PlaceFree(msgspec.Struct, array_like=True, tag=12, gc=False, frozen=True):
    """The front does not need a place any more: of a model's arena, whose number is that of the model, or of a PlacedOutput."""

    memory: int
    offset: Number


class WantCopy(msgspec.Struct, array_like=True, tag=14, gc=False):
    """The front cannot read a PlacedOutput."""

    memory: int
    offset: Number


class CallerLeft(msgspec.Struct, array_like=True, tag=1, gc=False):
    """The caller of the request `number` has left."""

    number: Number


class Transferred(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Bytes of the requests for a model, and of their responses, since the last such message."""

    model: Number
    frontend: Text
    received: Number
    sent: Number


class SentError(msgspec.Struct, array_like=True, gc=False):
    """An error: the nearest class in weir.errors, the name of its own class, and its attributes as JSON."""

    kind: Text
    name: Text
    state: bytes


class Refused(msgspec.Struct, array_like=True, tag=3):
    """A request that the front has refused, for the observers. `model` is None where it names none."""

    model: Number | None
    frontend: Text
    error: SentError


class AccessLine(msgspec.Struct, array_like=True, tag=4):
    """A line of the access log. `ended` and `began` are instants."""

    client: Text
    method: Text
    target: Annotated[bytes, Meta(max_length=LONGEST_TEXT)]
    status: int
    size_bytes: Number
    began: float
    ended: float
    protocol: Text


class Noted(msgspec.Struct, array_like=True, tag=5):
    """A line of the log."""

    logger: Text
    level: int
    text: Text


class FrontListens(msgspec.Struct, array_like=True, tag=6):
    """The front listens."""


class Alive(msgspec.Struct, array_like=True, tag=9):
    """The front's event loop turns. It says so once a second."""


class ProductDrained(msgspec.Struct, array_like=True, tag=11):
    """After Refuse: all requests have ended that the product in the front had accepted."""


class Drained(msgspec.Struct, array_like=True, tag=7):
    """The front has closed its sockets. `in_time`: all responses were sent before."""

    in_time: bool


# From the dispatcher.


class ModelDescription(msgspec.Struct, array_like=True):
    """Tells a front what it must know of a model to read its requests. `number` stands for the dispatcher's facts, of which it knows no other form.

    `hot`: a front may read its requests; it hands over those of other models. `takes_texts`: the product in a front may put texts into its queue.
    """

    number: int
    name: str
    version: str
    platform: str
    hot: bool
    timeout: float
    max_batch_size: int
    max_queue_size: int
    inputs: list[Tensor]
    outputs: list[Tensor]
    content_types: list[str]
    streaming: bool
    writes_bytes: bool
    encodes: bool
    arena_bytes: int
    takes_texts: bool
    max_batch_cost: float | None


class ModelTable(msgspec.Struct, array_like=True, tag=0):
    """The models that there are now. `defaults` and `routes` have the number of a model by name and by path."""

    models: list[ModelDescription]
    defaults: dict[str, int]
    routes: dict[str, int]
    aliases: dict[str, str]


class Batched(msgspec.Struct, array_like=True, gc=False):
    """The part of a Dispatch that a response states of its batch."""

    rows: int
    reason: int
    waiting: int
    oldest_age: float
    limit: int | None
    wakeup: int
    at: float
    woken_at: float | None


class SentArray(msgspec.Struct, array_like=True, gc=False):
    """An array of float32."""

    shape: tuple[int, ...]
    data: bytes


class Outputs(msgspec.Struct, array_like=True, tag=1):
    """The outputs of several requests. `batch` is theirs if the responses say more than their outputs, else None.

    The output of a text is JSON, if its form asks for that, or arrays.
    """

    numbers: list[int]
    outputs: list[bytes | list[SentArray]]
    batch: Batched | None = None

    def takes(self, other: "Outputs") -> bool:
        """Add the outputs of `other`, if both say no more; return whether they do not."""
        if self.batch is not None or other.batch is not None:
            return False
        self.numbers += other.numbers
        self.outputs += other.outputs
        return True


class PlacedOutput(msgspec.Struct, array_like=True, tag=9, gc=False):
    """The response to a request, in memory that the front has under a number. It is read there until PlaceFree names it."""

    number: int
    memory: int
    offset: int
    size_bytes: int
    batch: Batched


class MemoryGone(msgspec.Struct, array_like=True, tag=10, gc=False):
    """Nothing more comes in the memory with this number."""

    memory: int


class FailedRequest(msgspec.Struct, array_like=True, tag=3):
    """The error that ends a request."""

    number: int
    error: SentError


class MustHandOver(msgspec.Struct, array_like=True, tag=4, gc=False):
    """The dispatcher must read this request itself: the model is not what the front believes."""

    number: int


class Granted(msgspec.Struct, array_like=True, tag=7, gc=False):
    """A place for the front, in the arena of a model; or none, with the offset -1."""

    model: int
    size_bytes: int
    offset: int


class GiveBack(msgspec.Struct, array_like=True, tag=8, gc=False):
    """Others need room in the arena of a model."""

    model: int


class Refuse(msgspec.Struct, array_like=True, tag=5):
    """Refuse new requests from now on: the server ends."""


class Drain(msgspec.Struct, array_like=True, tag=6):
    """Accept no more connections, and report Drained when all responses have been sent, or after `seconds` (None: no limit)."""

    seconds: float | None


FromFront = (
    RequestForm | Submit | WantPlace | PlaceFree | CallerLeft | Transferred | Refused | AccessLine | Noted | Reported
    | WantCopy | FrontListens | Alive | ProductDrained | Drained
)  # fmt: skip
FromDispatcher = (
    ModelTable
    | Outputs
    | PlacedOutput
    | MemoryGone
    | FailedRequest
    | MustHandOver
    | Granted
    | GiveBack
    | Refuse
    | Drain
)

_encode_into = msgspec.msgpack.Encoder().encode_into
_from_front = msgspec.msgpack.Decoder(list[FromFront]).decode
_from_dispatcher = msgspec.msgpack.Decoder(list[FromDispatcher]).decode


def frame_of(messages: Sequence[Any]) -> bytearray:
    """Return the frame of `messages`."""
    return framed(messages, _encode_into)


def joined(frames: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the messages of `frames`, which came together. Those about several requests that follow one another are one, if they can be."""
    messages: list[Any] = []
    last: Any = None
    for message in chain.from_iterable(frames):
        if type(message) is not type(last) or type(message) not in (Submit, Outputs) or not last.takes(message):
            messages.append(message)
            last = message
    return messages


def reader_of_front() -> FrameReader[list[FromFront]]:
    """Return what reads the frames of a front."""
    return FrameReader(_from_front, max_frame_bytes=LONGEST_FRAME)


def reader_of_dispatcher() -> FrameReader[list[FromDispatcher]]:
    """Return what reads the frames of the dispatcher."""
    return FrameReader(_from_dispatcher)


class Violation(Exception):
    """A front has sent what it must not send, which the message says."""


def batch_key(value: Any) -> Hashable:
    """Return the batch key that was sent as `value`: msgpack knows tuples as arrays. Raises Violation if it is none."""
    if isinstance(value, list):
        return tuple(map(batch_key, value))
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise Violation(f"a batch key with a value of type {type(value).__name__}")


# Errors.

_KEPT = frozenset(("message", "details", "field", "index", "rule", "retry_after", "original_type", "remote_traceback"))


def sent_error(error: WeirError, longest: int = sys.maxsize) -> SentError:
    """Return `error` as it is sent, with at most `longest` characters of its message. Its cause stays where it is."""
    kind = type(error)
    nearest = next(base for base in kind.__mro__ if getattr(errors, base.__name__, None) is base)
    state = {name: value for name, value in vars(error).items() if name in _KEPT}
    state["message"] = state["message"][:longest]
    return SentError(nearest.__name__, kind.__name__, encode_safely(state))


def received_error(sent: SentError) -> WeirError:
    """Return the error that was sent.

    Raises Violation or msgspec.MsgspecError if it is none of Weir's.
    """
    kind = getattr(errors, sent.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, WeirError)):
        raise Violation(f"{sent.kind!r:.80} is no error of Weir's")
    error = kind("(lost on the way)")
    if sent.name != sent.kind:
        error.__class__ = _own_class(cast(Any, kind), sent.name)
    state = msgspec.json.decode(sent.state, type=dict[str, Any])
    error.__dict__.update({name: value for name, value in state.items() if name in _KEPT})
    error.message = str(error.message)
    error.args = (error.message,)
    return error


@lru_cache(maxsize=64)
def _own_class(kind: Any, name: str) -> type[WeirError]:
    """Return a class with the name of an error that a model has declared."""
    return type(name, (kind,), {})


# Batches.


_batched_of = attrgetter(*Batched.__struct_fields__)


def batched(dispatch: Dispatch) -> Batched:
    """Return what a response says of its batch."""
    return Batched(*_batched_of(dispatch))


def dispatch_of(batch: Batched) -> Dispatch:
    """Return a Dispatch that says of its batch what `batch` does."""
    dispatch = Dispatch(
        0, 0, [], None, batch.rows, float(batch.rows), Reason(batch.reason), batch.waiting, batch.oldest_age, batch.limit,
        Wakeup(batch.wakeup), batch.at,
    )  # fmt: skip
    dispatch.woken_at = batch.woken_at
    return dispatch


# The batch of responses that say nothing of it.
PLAIN = Dispatch(0, 0, [], None, 1, 1.0, Reason.IDLE, 0, 0.0, None, Wakeup.ARRIVAL, 0.0)


R = TypeVar("R")


class CombinedReader(Generic[R]):
    """Reads frames as `reader` does, but those that came together as one: where the other end was faster, they cost little more."""

    def __init__(self, reader: FrameReader[list[R]]) -> None:
        self._read = reader.feed

    def feed(self, data: memoryview) -> list[list[R]]:
        """See FrameReader."""
        frames = self._read(data)
        return frames if len(frames) < 2 else [joined(frames)]


class Link(Generic[R]):
    """Sends messages. Those that `reader` reads at a time go to `received`; `ended` is called once, with a reason, when no more can come."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        reader: FrameReader[list[R]],
        received: Callable[[list[R]], None],
        ended: Callable[[str], None],
    ) -> None:
        self._channel = Channel(end, CombinedReader(reader), received, ended)
        self._loop = loop
        self._messages: list[Any] = []
        self._size = 0
        self._scheduled = False
        self.last: Any = None  # the message that was put last; None once it has left

    def open(self) -> None:
        """Begin to receive."""
        self._channel.open(self._loop)

    def put(self, message: Any, size_bytes: int = 0) -> None:
        """Send `message`, which has about `size_bytes` bytes, at the end of this turn of the loop."""
        self._messages.append(message)
        self.last = message
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush_turn)
        self.grew(size_bytes)

    def grew(self, size_bytes: int) -> None:
        """Note that the message that was put last has `size_bytes` more."""
        self._size += size_bytes
        if self._size > FULL_FRAME:
            self.flush()

    def send(self, message: Any) -> None:
        """Send `message` now, with what waits for the end of the turn."""
        self._messages.append(message)
        self.flush()

    def _flush_turn(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Send now what waits for the end of the turn."""
        messages = self._messages
        if messages:
            self._messages = []
            self.last = None
            self._size = 0
            self._channel.send(frame_of(messages))

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that the other end has not read, and the kernel not taken."""
        return self._channel.unsent_bytes

    def receive_rest(self) -> None:
        """Receive what has arrived, without waiting for the loop to notice."""
        self._channel.receive_rest()

    def close(self) -> None:
        """Send and receive no more. Idempotent."""
        self._messages.clear()
        self.last = None
        self._channel.close()
