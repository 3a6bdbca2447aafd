"""The values that all parts exchange: requests, batches, events, the traces they belong to, and the Observer that is notified of them.

A *request* waits in the queue. A *dispatch* is the batcher's decision to run some requests now, and its reasons. A *batch* is the
same work as a flat list of entries, which goes to a worker. *Events* come back from the worker, by index of entry.

A request is identified in a trace by what its caller says, as headers that are read only if requests are traced, and by its own span.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from typing import Annotated, Any, NamedTuple, Protocol, TypedDict, cast

import msgspec
from msgspec import Meta

from weir.errors import ModelError, WeirError
from weir.metrics import MetricReport

# The encoding of a payload is a content type, or OBJECT for a Python value.
OBJECT = "object"
# A form for responses: like OBJECT, but arrays of a tensor model may lie in shared memory. They are read-only, and their place is
# released when the last of them is deleted.
LENT = "lent"
JSON = "application/json"
MSGPACK = "application/msgpack"
OCTETS = "application/octet-stream"
# The JSON body of an inference request of the Open Inference Protocol, and of its response.
KSERVE = "application/vnd.kserve.v2+json"
# Arrays as bytes, so that they pass through a process without being read there: see wire/tensors.py.
PACKED = "packed arrays"


# This is added to the priority of a request that states that it is bulk work: its own priorities order bulk work then.
BULK = -(1 << 40)


def label_of(name: str, version: str) -> str:
    """Return by what observers, workers and logs know a model: its name, followed by a slash and the version if there is one."""
    return f"{name}/{version}" if version else name


def parts_of(label: str) -> tuple[str, str]:
    """Return the name and the version in a label. Only who knows the model can tell that a name with slashes has no version."""
    name, slash, version = label.rpartition("/")
    return (name, version) if slash else (label, "")


class Kind(IntEnum):
    """The kind of a request's payload.

    ITEM: one item, which is never divided. ITEMS: a list of items of equal rows and cost, which may be divided between items; items
    that differ are separate requests. TENSORS: a dict of arrays with the batch as first dimension, which may be divided along it.
    """

    ITEM = 0
    ITEMS = 1
    TENSORS = 2


class Express(NamedTuple):
    """The batch key of an express call, which has batches of its own that do not wait behind other requests. `call` identifies the
    call; its requests of equal `key` share batches."""

    call: object
    key: Hashable = None


def with_key(key: Hashable, inner: Hashable) -> Hashable:
    """Return the batch key that combines `key`, which the caller gave, with `inner`, which distinguishes items."""
    if isinstance(key, Express):
        return Express(key.call, with_key(key.key, inner))
    return inner if key is None else (inner, key)


class Reason(IntEnum):
    """The reason for which a batch was dispatched. Metrics and explanations show the name in lower case."""

    SIZE = 0  # it has as many rows as a batch may have, or as the policy waits for
    DELAY = 1  # the oldest request has waited as long as it may
    DEADLINE = 2  # with a longer wait, a response would have been too late
    POLICY = 3  # the policy's own rule (a control limit, a table)
    IDLE = 4  # a worker was idle, and the policy does not wait
    DRAIN = 5  # no more requests will come
    RETRY = 6  # it is a part of a batch whose worker died
    EXPRESS = 7  # an express call, whose batches do not wait for the policy
    BULK = 8  # bulk requests, in time that interactive ones leave


class Wakeup(IntEnum):
    """The reason for which the batcher was polled: an arrival, a worker that became free, or the timer."""

    ARRIVAL = 0
    WORKER = 1
    TIMER = 2


LONGEST_TIMEOUT = 1e8  # seconds, three years; the timers of event loops do not reach much further

_Text = Annotated[str, Meta(max_length=64 << 10)]


class Form(msgspec.Struct, frozen=True, array_like=True):
    """The part that requests share that differ in payload and arrival only. It is made once for requests that repeat, and never changes.

    Arguments:
        timeout: seconds from the arrival to the deadline.
        kind: the kind of the payload.
        content_type: how the payload (ITEMS: each element of it) is encoded; OBJECT if it is a Python value.
        accept: the encoding of the response; OBJECT for a Python value.
        rows, cost: the size of a request.
        key: requests of different keys never share a batch; tensor shapes are part of it.
        priority: higher goes first; a request with one below 0 is bulk work.
        frontend: the frontend by which the request came: "python", "http", ...
        caller: the API key that it came with; "" where the server asks for none.
        explain: whether the response says something of its batch.
        route: the template of the path, as /infer/{model}, by which the request came over HTTP; "" where none is known.
    """

    timeout: Annotated[float, Meta(le=LONGEST_TIMEOUT)]
    kind: Kind = Kind.ITEM
    content_type: _Text = OBJECT
    accept: _Text = OBJECT
    rows: Annotated[int, Meta(ge=1, le=1 << 31)] = 1
    cost: float = 1.0
    key: Any = None
    priority: Annotated[int, Meta(ge=-(1 << 42), le=1 << 42)] = 0
    frontend: _Text = "python"
    caller: _Text = ""
    explain: bool = False
    route: _Text = ""

    def replaced(self, **fields: Any) -> "Form":
        """Return a form that is like this one but for these fields."""
        return msgspec.structs.replace(self, **fields)


def of_route(route: str) -> dict[str, str]:
    """Return the attributes of the span of a request that came to `route` over HTTP; none for ""."""
    return {"http.request.method": "POST", "http.route": route} if route else {}


class Request(Protocol):
    """The attributes and methods of a request that the batcher and the executors use. Each frontend has its own classes.

    The frontend sets the first group of attributes; only batching/ writes the second. Either `finish` or `fail` is
    called, exactly once, unless the caller has cancelled. For a streaming model, `part` may be called any number of times before.
    If one of them raises, the exception is logged, and `abandon` is called where a request has it: its caller must not wait for ever.
    Where `finish` delivers an error because the response cannot be delivered, it says so to `Dispatch.refuse`.
    """

    form: Form
    payload: Any  # ITEM: the item; ITEMS: a sequence of items; TENSORS: dict name -> array
    arrival: float  # instants are seconds of the service's clock
    deadline: float  # the arrival and the timeout
    tag: float  # a queue by length serves the lowest tag first, then the earliest arrival (see CallerQueue in text_server/requests.py)
    brief: bool  # in a queue by length, batches with such a request are kept short, so that they are done soon
    # An Origin; a Trace once the request is in the queue, if requests are traced.
    trace: Any

    large: bool  # whether it waits among the large requests, which small ones may overtake
    settled: bool  # whether it has ended (with a response or an error, or cancelled)
    taken: int  # rows (ITEMS: items) dispatched so far; equals `rows` when nothing of it is left in the queue
    overtaken: int  # how many batches with later requests have gone before it
    partial: Any  # the responses to some pieces of a divided request, until all pieces are back

    def part(self, output: Any, dispatch: "Dispatch") -> None:
        """Deliver one of several responses; more may come. Raises a WeirError (Overloaded) if the reader cannot take it, after
        which `fail` is called with that error."""

    def finish(self, output: Any, dispatch: "Dispatch") -> None:
        """Deliver the (last) response: a value, encoded bytes or a Block; or NO_RESPONSE if the last part of a streaming model has
        already been delivered. For ITEMS it is a list, with a WeirError in the place of a failed item."""

    def fail(self, error: WeirError) -> None:
        """Deliver the error that ends the whole request."""


class NoResponse(Enum):
    """The type of NO_RESPONSE."""

    NO_RESPONSE = "no further answer"


NO_RESPONSE = NoResponse.NO_RESPONSE  # the argument of `finish` for a streaming request whose last response was a part


def arrivals_of(requests: Sequence[Request]) -> list[float]:
    """Return the instants at which `requests` arrived, ascending, in seconds."""
    if len(requests) == 1:
        return [requests[0].arrival]
    arrivals = [request.arrival for request in requests]
    arrivals.sort()  # one pass when they are in order, which they nearly always are
    return arrivals


class DispatchRecord(TypedDict):
    """A batch, in rows, why it was dispatched (`reason`), and what the policy knew and wanted then. Ages are in seconds."""

    batch_id: int
    worker: int
    rows: int
    cost: float
    padding: float
    reason: str
    waiting: int
    oldest_age: float
    limit: int | None
    wakeup: str
    at: float
    attempt: int
    bulk: int


@dataclass(slots=True, eq=False, repr=False)
class Dispatch:
    """A decision to run some requests now, and its explanation.

    Attributes:
        batch_id, worker: the number of the batch, and the index of its worker.
        requests: the requests.
        slices: None if all requests are in it as a whole; else for each request the half-open range of its rows (TENSORS) or
            items (ITEMS) in this batch, or None for all.
        rows, cost: the size of the batch.
        padding: the part of `cost` that is padding.
        reason: why the batch was cut.
        waiting: rows waiting in the group at the decision.
        oldest_age: seconds that the oldest request of the group had waited at the decision.
        limit: the number of rows that the policy waited for, or None.
        wakeup: why the batcher was polled.
        at: the instant of the decision, in seconds of the service's clock.
        attempt: how many times a worker has died with these requests.
        undivided: whether the entries of the batch are its requests: no list of items, and no part of a request.
        seconds: how long the batch has occupied its worker, once it is back.
        entries: the batch's entries, which collate.py keeps here.
        begun: the entries that have received a part, or None.
        due: an instant before which no deadline of its requests passes.
        bulk: how many of its rows are bulk work.
        gives_way: whether its worker runs bulk work only, in the time that the others leave.
        missed: whether a deadline of its requests passed, or a caller gave up shortly before.
        shorter: whether its worker may have left some of it out, because the requests have ended.
        woken_at: the instant at which a worker was ready after there had been none; None if there was always one.
        refused: requests whose `finish` could not deliver the response, each with the error that its caller got instead.
    """

    batch_id: int
    worker: int
    requests: list[Request]
    slices: list[tuple[int, int] | None] | None
    rows: int
    cost: float
    reason: Reason
    waiting: int
    oldest_age: float
    limit: int | None
    wakeup: Wakeup
    at: float
    attempt: int = 0
    undivided: bool = False
    padding: float = 0.0
    bulk: int = 0
    gives_way: bool = False
    due: float = inf
    seconds: float = 0.0
    entries: list[tuple[Request, int, int]] | None = None
    begun: set[int] | None = None
    missed: bool = False
    shorter: bool = False
    woken_at: float | None = None
    refused: Sequence[tuple[Request, WeirError]] = ()
    _arrivals: list[float] | None = None

    @property
    def arrivals(self) -> list[float]:
        """The instants at which its requests arrived, ascending, in seconds."""
        if self._arrivals is None:
            self._arrivals = arrivals_of(self.requests)  # observers ask several times, and there are many requests
        return self._arrivals

    def refuse(self, request: Request, error: WeirError) -> None:
        """Note that the caller of `request` gets `error` instead of its response: with that it ends."""
        self.refused = (*self.refused, (request, error))

    def started_for(self, arrival: float) -> float:
        """Return for how many seconds a request that arrived at the instant `arrival` has waited for a worker to start."""
        return 0.0 if self.woken_at is None else max(0.0, self.woken_at - arrival)

    def explain(self) -> dict[str, Any]:
        """Return the explanation as a JSON-able dict with the fields of DispatchRecord."""
        return explained(self.record())

    def record(self) -> tuple[Any, ...]:
        """Return what is remembered of it, for `explained`: the values of DispatchRecord."""
        return (
            self.batch_id, self.worker, self.rows, self.cost, self.padding, self.reason, self.waiting, self.oldest_age, self.limit,
            self.wakeup, self.at, self.attempt, self.bulk,
        )  # fmt: skip


def explained(record: tuple[Any, ...]) -> dict[str, Any]:
    """Return the explanation of the dispatch of which this is the record."""
    own = dict(zip(DispatchRecord.__annotations__, record, strict=True))
    return own | {"reason": own["reason"].name.lower(), "wakeup": own["wakeup"].name.lower()}


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """A flat list of entries for a worker, which collate.py makes from a Dispatch.

    `content_types` and `accepts` are one string when all entries agree, else one per entry. `share` is for how many workers' CPUs the batch is, its own
    worker and some of those that have no batch: the executor sets it when it sends the batch. `others` is how many more batches may be sent now: those that
    were formed together with it, and at most one for each row that still waits. `requests` has the request of each entry; it stays in this process, and
    a batch that is not made of requests has none.
    """

    batch_id: int
    payloads: list[Any]
    content_types: str | list[str]
    accepts: str | list[str]
    attempt: int = 0
    share: int = 1
    others: int = 0
    requests: Sequence[Request] = ()


class Timing(NamedTuple):
    """Seconds that a batch spent in each step in the worker (decoding counts as preprocess, encoding as postprocess)."""

    preprocess: float
    predict: float
    postprocess: float


class EventKind(IntEnum):
    """PART: one of several responses. DONE: the (last) response, which ends the request. ERROR: an error, which ends the request. END:
    the end of a streaming request without a further response; its output has no meaning.

    Events find out by themselves which outputs are errors; whoever makes Events need not say so."""

    PART = 0
    DONE = 1
    ERROR = 2
    END = 3


class Block(Protocol):
    """A place in shared memory that holds one large payload or result. It has one or more owners, and is freed when the last one releases it."""

    @property
    def view(self) -> memoryview:
        """The bytes. Writable while the payload is being received."""

    def retain(self) -> None:
        """Add an owner."""

    def release(self) -> None:
        """Remove an owner."""


class Events:
    """A worker's report on a batch: one event for each entry in `indices`.

    `indices` None means all entries in order; `kinds` None means that all are DONE. `outputs` has an output for each: encoded
    bytes, a Block or a value. An output that is a WeirError is the entry's end: its kind is ERROR, whatever the argument says,
    so that no error can pass for a response. `final` is True in the last Events of a batch: its place is free again and
    `timing` is set. Each entry has then had exactly one DONE, ERROR or END, except entries that were cancelled. `measured` is what the
    model's own metrics have become meanwhile.
    """

    __slots__ = ("batch_id", "final", "indices", "kinds", "measured", "outputs", "timing")

    def __init__(
        self,
        batch_id: int,
        outputs: list[Any],
        *,
        indices: list[int] | None = None,
        kinds: Sequence[int] | None = None,
        final: bool = True,
        timing: Timing | None = None,
        measured: list[MetricReport] | None = None,
    ) -> None:
        self.batch_id = batch_id
        self.outputs = outputs
        self.indices = indices
        self.kinds = _with_errors(outputs, kinds) if has_failed(outputs) else kinds
        self.final = final
        self.timing = timing
        self.measured = measured

    def failed(self) -> list[int]:
        """Return the entries that have failed."""
        if self.kinds is None:
            return []
        indices = range(len(self.kinds)) if self.indices is None else self.indices
        return [index for index, kind in zip(indices, self.kinds, strict=True) if kind == EventKind.ERROR]


# A column of nothing else has no error: to ask for each class whether it is an error takes a call for each.
_NO_ERRORS = frozenset({bytes, str, int, float, bool, list, dict, tuple, type(None)})


def has_failed(column: list[Any]) -> bool:
    """Return whether an entry of `column`, which has values and errors, is an error."""
    if _NO_ERRORS.issuperset(map(type, column)):
        return False
    return any(issubclass(kind, WeirError) for kind in set(map(type, column)))


def _with_errors(outputs: list[Any], kinds: Sequence[int] | None) -> list[int]:
    known = [EventKind.DONE] * len(outputs) if kinds is None else kinds
    pairs = zip(outputs, known, strict=True)
    return [EventKind.ERROR if isinstance(output, WeirError) else kind for output, kind in pairs]


class Observer(Protocol):
    """Is told what happens, once per batch. Its methods are called on the event loop and must return quickly.

    `model` is the label of the service; instants are in seconds of its clock.
    """

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        """A request that came by the frontend `frontend` was refused before it entered the queue."""

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """A batch was cut and handed to a worker."""

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """These requests ended at `now`: all have a response, or all failed with the same type of error (Cancelled if the caller
        left)."""

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        """Each of these requests to a streaming model got a response at `now`; those in `firsts` their first."""

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """A batch has ended, and took these times in its worker."""

    def failed(self, model: str, errors: Sequence[ModelError], now: float) -> None:
        """The model failed for some entries of a batch, one for each of `errors`: it raised, or returned a wrong value. `answered`
        is called for the requests too; a list of items may be answered although some of them failed."""

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """A worker is now in `state`: starting, ready, lost, stopped or failed."""

    def transferred(self, model: str, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        """The frontend `frontend` read a body and wrote a response of these sizes."""


TRACEPARENT = "traceparent"
# The headers, and in gRPC the metadata, that the propagators of OpenTelemetry read.
TRACE_FIELDS = frozenset(
    (
        TRACEPARENT, "tracestate", "baggage", "b3", "x-b3-traceid", "x-b3-spanid", "x-b3-parentspanid", "x-b3-sampled", "x-b3-flags",
        "uber-trace-id", "x-amzn-trace-id", "ot-tracer-traceid", "ot-tracer-spanid", "ot-tracer-sampled",
    )
)  # fmt: skip
TRACE_FIELD_NAMES = {name.encode(): name for name in TRACE_FIELDS}  # by name as it is in a head

# The trace of the request that the running task belongs to. Log lines carry its id.
CURRENT_TRACE: "ContextVar[Trace | None]" = ContextVar("trace", default=None)


@dataclass(slots=True, eq=False, repr=False)
class Trace:
    """The span of one request, from its arrival on. `parent_id` 0: the span is the first of its trace.

    Attributes:
        batches: the contexts of the spans of the batches that the request was in.
        dispatched: the instant, in seconds of the service's clock, at which it left the queue first; None before.
        has_span: whether the span has been made, which says how the request has ended.
        state: what vendors have added to the trace (`tracestate`), as OpenTelemetry has it; None for nothing.
    """

    trace_id: int
    span_id: int
    parent_id: int = 0
    sampled: bool = field(default=True, kw_only=True)
    state: Any = field(default=None, kw_only=True)
    dispatched: float | None = None
    has_span: bool = False
    batches: list[Any] = field(default_factory=list)

    @property
    def traceparent(self) -> str:
        """The value of the header `traceparent` for requests that this one causes."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    @property
    def name(self) -> str:
        """The id of the trace as 32 hexadecimal digits."""
        return f"{self.trace_id:032x}"


class ChildOrigin(NamedTuple):
    """Stands for a request that `trace` causes: its span is a child of the one that `trace` stands for."""

    trace: Trace


# Whose child the span of a request is, before it has one: the caller's headers in TRACE_FIELDS by name, a request of this server, or nobody's.
Origin = Mapping[str, str] | ChildOrigin | None


def child_of(trace: Trace | Origin) -> Origin:
    """Return the origin of another request that has the same cause as `trace`, or of one that `trace` causes."""
    return ChildOrigin(trace) if type(trace) is Trace else cast(Origin, trace)


def carrier_in(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """Return the `headers` (names in lower case) that name the caller's span; None if there are none."""
    carrier = None
    for name, value in headers:
        if name in TRACE_FIELD_NAMES:
            carrier = carry(carrier, TRACE_FIELD_NAMES[name], value.decode("latin-1"))
    return carrier


def carry(carrier: dict[str, str] | None, name: str, value: str) -> dict[str, str]:
    """Return `carrier` with one more header, or a new one. A header that comes several times is a list, as HTTP has it."""
    if carrier is None:
        return {name: value}
    carrier[name] = f"{carrier[name]},{value}" if name in carrier else value
    return carrier
