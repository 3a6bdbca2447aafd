"""The values that every part speaks: requests, batches, events, and the Observer that hears of them.

A *request* waits in the queue. A *dispatch* is the batcher's decision to run some of them now, with its reasons. A *batch*
is what goes to a worker: the same work as a flat list of entries. *Events* come back, by entry index.
"""

from collections.abc import Hashable, Sequence
from enum import Enum, IntEnum
from typing import Any, NamedTuple, Protocol

from weir.errors import ModelError, WeirError

# How a payload is encoded: a content type, or OBJECT for a Python value of this process tree.
OBJECT = "object"
# How an answer may be wanted: as OBJECT, but the arrays of a tensor model may lie in shared memory. They cannot be written to,
# and their place is given back when the last of them is gone.
LENT = "lent"
JSON = "application/json"
MSGPACK = "application/msgpack"
OCTETS = "application/octet-stream"
# The JSON body of an inference request of the Open Inference Protocol, and of its response.
KSERVE = "application/vnd.kserve.v2+json"


class Kind(IntEnum):
    """What the payload of a request is.

    ITEM: one item, never divided. ITEMS: a list of items of equal rows and cost, divided between items (items that
    differ travel as requests of their own). TENSORS: a dict of arrays with the batch as first dimension, divided along it.
    """

    ITEM = 0
    ITEMS = 1
    TENSORS = 2


class Express(NamedTuple):
    """The batch key of an express call, which has batches of its own that do not wait behind other requests. `call` tells such
    calls apart; its requests of equal `key` share batches."""

    call: object
    key: Hashable = None


def with_key(key: Hashable, inner: Hashable) -> Hashable:
    """Return the batch key of requests with `key`, which their caller gave, and `inner`, which distinguishes their items."""
    if isinstance(key, Express):
        return Express(key.call, with_key(key.key, inner))
    return inner if key is None else (inner, key)


class Reason(IntEnum):
    """Why a batch was cut. Its lower-case name is what metrics and explanations show."""

    SIZE = 0  # as many rows as a batch may have, or as the policy waits for
    DELAY = 1  # the oldest request has waited as long as it may
    DEADLINE = 2  # an answer would have come too late, had it waited longer
    POLICY = 3  # the policy's own rule (a control limit, a table)
    IDLE = 4  # a worker was idle and the policy does not wait
    DRAIN = 5  # nothing more will come
    RETRY = 6  # part of a batch whose worker died
    EXPRESS = 7  # a call with batches of its own, which do not wait for the policy


class Wakeup(IntEnum):
    """What made the batcher look: an arrival, a worker that became free, or the timer."""

    ARRIVAL = 0
    WORKER = 1
    TIMER = 2


class Request(Protocol):
    """What the batcher and the executors need of a request; each frontend has a class of its own.

    The frontend sets the first group of attributes; batching/request_state.py writes the second.
    Exactly one of `finish` and `fail` is called, once, unless the caller has cancelled. For a streaming model,
    `part` is called any number of times before.
    """

    kind: Kind
    payload: Any  # ITEM: the item; ITEMS: a sequence of items; TENSORS: dict name -> array
    content_type: str  # how `payload` (ITEMS: each element of it) is encoded; OBJECT if it is a Python value
    accept: str  # how the answer is wanted; OBJECT for a Python value
    rows: int
    cost: float
    key: Hashable  # requests of different keys never share a batch; tensor shapes are part of it
    priority: int  # higher goes first
    arrival: float  # instants are seconds of the service's clock
    timeout: float
    deadline: float  # arrival + timeout
    large: bool  # shares with other sizes, as a single row does not
    tag: float  # in a queue by length the lowest goes first, and among equals the one that arrived first (see embedding/fair_queue.py)
    brief: bool  # part of what is done in a batch: in a queue by length, batches with such requests are short, so that they are done soon
    door: str  # the frontend that it came by: "python", "http", ...
    trace: Any  # the header `traceparent` that it came with, or None; its Trace once it is in the queue, if requests are traced

    settled: bool  # whether it has ended (answered, failed or cancelled)
    taken: int  # rows (ITEMS: items) dispatched so far; `rows` as soon as nothing of it is left in the queue
    overtaken: int  # batches that have gone before it out of the order of arrival
    partial: Any  # answers gathered so far, while only some pieces of a divided request are back

    def part(self, output: Any, dispatch: "Dispatch") -> None:
        """Deliver one of several answers; more may come. Raises a WeirError (Overloaded) if
        its reader cannot take it; then `fail` is called with that error."""

    def finish(self, output: Any, dispatch: "Dispatch") -> None:
        """Deliver the (last) answer: a value, encoded bytes or a Block; or NO_ANSWER, when a streaming model has given its
        last part before. ITEMS: a list with a WeirError in a failed item's place."""

    def fail(self, error: WeirError) -> None:
        """Deliver the error that ends the whole request."""


class NoAnswer(Enum):
    """The type of NO_ANSWER."""

    NO_ANSWER = "no further answer"


NO_ANSWER = NoAnswer.NO_ANSWER  # what `finish` gets of a streaming request whose last answer was a part


class Dispatch:
    """A decision to run these requests now, and its explanation.

    `slices` is None when every request is in it whole; else, for each request, the half-open range of its rows
    (TENSORS) or items (ITEMS) that is in this batch, or None for the whole. `plain` says that every request is one
    ITEM, so that the batch's entries are the requests. `padding` is the part of `cost` that is padding. `oldest_age` and `waiting` (rows of the group) are as they were
    when the decision was made; `limit` is the number of rows that the policy waited for, if it had one. `seconds` is how long
    it has occupied its worker, once it is back.
    """

    __slots__ = (
        "attempt", "at", "batch_id", "begun", "cost", "entries", "limit", "missed", "oldest_age", "padding", "plain", "reason",
        "requests", "rows", "seconds", "slices", "waiting", "wakeup", "worker",
    )  # fmt: skip

    def __init__(
        self, batch_id: int, worker: int, requests: list[Request], slices: list[tuple[int, int] | None] | None,
        rows: int, cost: float, reason: Reason, waiting: int, oldest_age: float, limit: int | None, wakeup: Wakeup,
        at: float, attempt: int = 0, plain: bool = False, padding: float = 0.0,
    ) -> None:  # fmt: skip
        self.batch_id = batch_id
        self.worker = worker
        self.requests = requests
        self.slices = slices
        self.rows = rows
        self.cost = cost
        self.reason = reason
        self.waiting = waiting
        self.oldest_age = oldest_age
        self.limit = limit
        self.wakeup = wakeup
        self.at = at
        self.attempt = attempt  # how many times a worker has died with these requests
        self.plain = plain
        self.padding = padding
        self.seconds = 0.0
        self.entries: list[tuple[Request, int, int]] | None = None  # collate.py's memory of the batch's entries
        self.begun: set[int] | None = None  # entries that have received a part
        self.missed = False  # a deadline of its requests passed, or their callers gave up shortly before

    def explain(self) -> dict[str, Any]:
        """Return the explanation as a JSON-able dict."""
        return {
            "batch_id": self.batch_id,
            "worker": self.worker,
            "rows": self.rows,
            "cost": self.cost,
            "padding": self.padding,
            "reason": self.reason.name.lower(),
            "waiting": self.waiting,
            "oldest_age": self.oldest_age,
            "limit": self.limit,
            "wakeup": self.wakeup.name.lower(),
            "at": self.at,
            "attempt": self.attempt,
        }


class Batch:
    """What a worker gets: a flat list of entries (collate.py makes it from a Dispatch).

    `content_types` and `accepts` are one string when all entries agree, else one per entry.
    """

    __slots__ = ("accepts", "attempt", "batch_id", "content_types", "payloads")

    def __init__(
        self, batch_id: int, payloads: list[Any], content_types: str | list[str], accepts: str | list[str],
        attempt: int = 0,
    ) -> None:  # fmt: skip
        self.batch_id = batch_id
        self.payloads = payloads
        self.content_types = content_types
        self.accepts = accepts
        self.attempt = attempt


class Timing(NamedTuple):
    """Seconds that a batch spent in each step in the worker (decoding counts as preprocess, encoding as postprocess)."""

    preprocess: float
    predict: float
    postprocess: float


class EventKind(IntEnum):
    """PART: one of several answers. DONE: the (last) answer, the request's end. ERROR: the request's end. END: the end of a
    streaming request without a further answer; its output says nothing."""

    PART = 0
    DONE = 1
    ERROR = 2
    END = 3


class Events:
    """What a worker says of a batch: one event per entry named.

    `indices` None means all entries in order; `kinds` None means all DONE. `outputs` is aligned to them: encoded
    bytes, a Block or a value, or a WeirError for ERROR. `final` is True in the last Events of a batch: its place
    is free again and `timing` is set; each entry has then had exactly one DONE, ERROR or END (entries cancelled by us
    may have none).
    """

    __slots__ = ("batch_id", "final", "indices", "kinds", "outputs", "timing")

    def __init__(
        self, batch_id: int, outputs: list[Any], *, indices: list[int] | None = None,
        kinds: Sequence[int] | None = None, final: bool = True, timing: Timing | None = None,
    ) -> None:  # fmt: skip
        self.batch_id = batch_id
        self.outputs = outputs
        self.indices = indices
        self.kinds = kinds
        self.final = final
        self.timing = timing


class Observer(Protocol):
    """Is notified of what happens, once for each batch, and never decides. Its methods are called on the event loop and must return quickly."""

    def refused(self, model: str, door: str, error: WeirError) -> None:
        """A request was refused before it entered the queue (Overloaded, refused early, draining, invalid)."""

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """A batch was cut and handed to a worker."""

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """These requests ended at `now`: all were answered, or all failed with the same kind of error (Cancelled when the caller left)."""

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        """Each of these requests to a streaming model got an answer at `now`; those in `firsts` their first."""

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """A batch came back whole."""

    def failed(self, model: str, errors: Sequence[ModelError], now: float) -> None:
        """The model failed so many entries of a batch: it raised, or returned a wrong value. `answered` is called for the
        requests too; a list of items may be answered although some of them failed."""

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """A worker went to `state`: starting, ready, lost, stopped or failed."""

    def transferred(self, model: str, door: str, received_bytes: int, sent_bytes: int) -> None:
        """A frontend read a body and wrote an answer of these sizes."""
