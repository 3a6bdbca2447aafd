"""Runs real Batchers in virtual time, as serving/driver.py runs one in real time: one model, or several that share workers.

Events at the same instant happen in this order: all arrivals, then one poll; batches that end, each followed by a
poll; the timer. So a request that arrives at the very instant at which a worker becomes free still joins its next
batch.

Instants and durations are in seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import count, repeat
from math import inf, nan
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from weir.batching import BatchingSettings
from weir.batching.batcher import Batcher, BatcherUser
from weir.batching.request_state import RequestBase
from weir.errors import DeadlineExceeded, Overloaded, WeirError
from weir.messages import Dispatch, Form, Kind, Wakeup
from weir.numerics import GammaQuantile
from weir.policy.cost import Profile
from weir.policy.decision import Policy
from weir.simulation.arrivals import Floats, Ints

# The simulator's request.


ITEM, TENSORS = Kind.ITEM, Kind.TENSORS


@lru_cache(maxsize=1024)
def _form_of(timeout: float, rows: int, priority: int) -> Form:
    kind = ITEM if rows == 1 else TENSORS
    return Form(timeout, kind, rows=rows, priority=priority, frontend="simulation")


class SimulatedRequest(RequestBase):
    """A request of the simulator, with only what the Batcher needs. `index` is its number in the order of arrival.

    A request with one row is an item; with more rows it is a tensor, which may be divided.
    """

    __slots__ = ("index",)

    def __init__(self, index: int, arrival: float, timeout: float = inf, rows: int = 1, priority: int = 0) -> None:
        super().__init__(_form_of(timeout, rows, priority), None, arrival)
        self.index = index

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Ignore the response: the simulator has none."""

    def fail(self, error: WeirError) -> None:
        """Ignore the error: the log has it."""


class BulkRequest(SimulatedRequest):
    """A request of bulk work, one row. Its `index` is negative, so that it is told from the requests that arrive."""

    __slots__ = ()

    def __init__(self, number: int) -> None:
        super().__init__(-1 - number, 0.0, priority=-1)


# The log of a simulation: plain lists while it runs, passed on in parts as arrays.


V = TypeVar("V", np.float64, np.int64)
PART = 65_536  # requests in a part


class BatchLog(NamedTuple):
    """Batches in the order of their dispatch; arrays of shape (batches,). Instants are in seconds.

    Attributes:
        at: when the batch was dispatched.
        start: when its worker began it; later than `at` if the worker had another batch in flight.
        end: when the worker was done.
        rows: its rows.
        worker: its worker's number.
        reason: a messages.Reason.
        waiting: rows in the queue at its dispatch.
        requests: how many requests, or pieces of requests, are in it.
    """

    at: Floats
    start: Floats
    end: Floats
    rows: Ints
    worker: Ints
    reason: Ints
    waiting: Ints
    requests: Ints  # how many requests are in it


class LogPart(NamedTuple):
    """A part of what happened. Members are requests, or pieces of divided requests, batch after batch.

    Attributes:
        batches: the batches.
        request: index of the request by member, negative for bulk work; shape (members,).
        arrival: its arrival in seconds.
        end: when the request was done, in seconds; NaN for a piece that others follow.
        rows: rows of the member.
        refused, expired: indices of the requests that were never run.
    """

    batches: BatchLog
    request: Ints
    arrival: Floats
    end: Floats
    rows: Ints
    refused: Ints
    expired: Ints

    def of_batch(self, values: NDArray[V]) -> NDArray[V]:
        """Return values by batch, shape (batches,), as values by member, shape (members,)."""
        return np.repeat(values, self.batches.requests)


Sink = Callable[[LogPart], None]


class EventLog:
    """Records each batch in plain lists, and passes them on in parts, as arrays, to `sink`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        # By request that was run in part: its rows so far, the latest end.
        self._pieces: dict[int, tuple[int, float]] = {}
        self._clear()

    def _clear(self) -> None:
        self._batches: list[float] = []  # the fields of BatchLog, batch after batch: no object per batch is kept
        self._index: list[int] = []
        self._arrival: list[float] = []
        # Members that differ from one row and their batch's end: their index, end and rows.
        self._odd: list[tuple[int, float, int]] = []
        self.refused: list[int] = []
        self.expired: list[int] = []

    def started(self, cut: Dispatch, start: float, end: float) -> None:
        """Record a batch. When it will start and end (seconds) is known already."""
        requests = cast("list[SimulatedRequest]", cut.requests)
        self._batches += (cut.at, start, end, cut.rows, cut.worker, cut.reason, cut.waiting, len(requests))
        if cut.slices is not None or cut.rows != len(requests):
            self._divided(cut, requests, end)
        self._index += [request.index for request in requests]
        self._arrival += [request.arrival for request in requests]
        if len(self._index) >= PART:
            self.hand_over()

    def _divided(self, cut: Dispatch, requests: list[SimulatedRequest], end: float) -> None:
        slices = cut.slices or [None] * len(requests)
        for member, (request, part) in enumerate(zip(requests, slices, strict=True), len(self._index)):
            rows = request.form.rows if part is None else part[1] - part[0]
            before, latest = self._pieces.pop(request.index, (0, end))
            latest = max(latest, end)
            if before + rows < request.form.rows:
                self._pieces[request.index] = (before + rows, latest)
                latest = nan
            self._odd.append((member, latest, rows))

    def lost(self, index: int) -> None:
        """Record that a request has left the queue at its deadline, before all of it was run."""
        self._pieces.pop(index, None)
        self.expired.append(index)

    def hand_over(self) -> None:
        """Pass on what was recorded since the last time."""
        columns = [self._batches[field :: len(BatchLog._fields)] for field in range(len(BatchLog._fields))]
        at, start, end_of_batch = map(_floats, columns[:3])
        batches = BatchLog(at, start, end_of_batch, *map(_ints, columns[3:]))
        end = np.repeat(end_of_batch, batches.requests)
        rows = np.ones(len(end), dtype=np.int64)
        if self._odd:
            members, ends, sizes = zip(*self._odd, strict=True)
            end[list(members)], rows[list(members)] = ends, sizes
        part = LogPart(
            batches, _ints(self._index), _floats(self._arrival), end, rows, _ints(self.refused), _ints(self.expired)
        )
        self._clear()
        self._sink(part)


def _floats(values: list[float]) -> Floats:
    return np.fromiter(values, np.float64, len(values))


def _ints(values: Sequence[float]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


# How long each simulated batch takes.


BLOCK = 16_384  # requests whose random numbers are drawn at once
KEPT = 16  # blocks that are kept; others are drawn again, with the same result
STREAM = 2  # of the random generator; arrivals use 0 and searches 1, so that all are independent
EXACT = 1e-4  # a smaller coefficient of variation counts as 0
_quantile = lru_cache(256)(GammaQuantile)  # 55 KB each, made in milliseconds


class ServiceTimes:
    """Service times in seconds with the mean and the coefficient of variation of `profile` (a Gamma law).

    The random number belongs to the request: a batch uses that of its first request. So two policies that start a
    batch with the same request get the same random numbers, whatever they did before, and larger
    batches take longer.
    """

    def __init__(self, profile: Profile, seed: int) -> None:
        self._seed = seed
        self._mean: list[float] = [0.0, *(profile.service_time_ms / 1000.0).tolist()]
        self._shape: list[float] = [0.0, *(float(1.0 / cv**2) if cv > EXACT else 0.0 for cv in profile.cv)]
        self._luck: dict[int, list[float]] = {}

    def of(self, cut: Dispatch) -> float:
        """Return the seconds that the batch `cut` takes."""
        return self.time(cut.rows, abs(cast(SimulatedRequest, cut.requests[0]).index))

    def time(self, rows: int, index: int) -> float:
        """Return the seconds that a batch of `rows` rows takes whose first request has the number `index`."""
        shape = self._shape[rows]
        if not shape:
            return self._mean[rows]
        return self._mean[rows] * _quantile(shape)(self._share(index)) / shape

    def _share(self, index: int) -> float:
        """Return the random number of a request, uniform between 0 and 1."""
        number, offset = divmod(index, BLOCK)
        block = self._luck.get(number)
        if block is None:
            if len(self._luck) >= KEPT:
                del self._luck[min(self._luck)]
            block = self._luck[number] = np.random.default_rng([self._seed, STREAM, number]).random(BLOCK).tolist()
        return block[offset]


class Times(Protocol):
    """Says how long batches take."""

    def of(self, cut: Dispatch) -> float:
        """Return the seconds that the batch `cut` takes."""


ARRIVAL, WORKER, TIMER = Wakeup.ARRIVAL, Wakeup.WORKER, Wakeup.TIMER


class Engine:
    """The virtual time of one or several models, and what will happen in it. `now` is in seconds.

    Make a SimulatedModel for each model, let its requests arrive, in the order of their arrival over all models, and then
    `finish`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.over = False  # no more requests arrive
        self.models: list[SimulatedModel] = []
        self.wakes: list[float] = []  # by model: the instant for which its batcher wants a timer
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = count(1)

    def schedule(self, at: float, event: Callable[[], None], *, first: bool = False) -> None:
        """Call `event` at the instant `at`, after those that were scheduled before for this instant, or `first` of all."""
        number = next(self._numbers)
        heappush(self._events, (at, -number if first else number, event))

    def advance(self, until: float) -> None:
        """Let models decide about their arrivals, and everything happen that happens before `until` (seconds)."""
        for model in self.models:
            if model.undecided:
                model.poll(ARRIVAL)
        events, wakes = self._events, self.wakes
        while True:
            at = events[0][0] if events else inf
            wake = min(wakes)
            if min(at, wake) >= until:
                return
            if wake < at:
                self.now = max(self.now, wake)
                self.models[wakes.index(wake)].wake_up()
            else:
                self.now, _, event = heappop(events)
                event()

    def finish(self) -> None:
        """Let time pass after the last arrival: run all batches that the policies start, then drain what still waits."""
        self.over = True
        self.advance(inf)
        for model in self.models:
            if model.batcher.has_waiting:
                model.batcher.drain()
                model.undecided = True
        self.advance(inf)
        for model in self.models:
            model.log.hand_over()


class SimulatedWorkers:
    """The workers of one model or several, which call `begin`. A subclass decides who else has a say when batches begin and end.

    Attributes:
        ready: how many there are at the start.
        places: batches that may be at a worker at once; it computes them one after another.
        kinds: the number of each worker's kind, going round.
    """

    def __init__(self, ready: int = 1, places: int = 1, kinds: Sequence[int] = ()) -> None:
        self.ready, self.places, self.kinds = ready, places, kinds
        self._busy_until: dict[int, float] = {}

    def serve(self, model: "SimulatedModel") -> None:
        """Be ready for the batches of `model` from now on."""
        for worker in range(self.ready):
            model.batcher.worker_ready(worker, self.places, 0.0)

    def begin(self, model: "SimulatedModel", cut: Dispatch) -> None:
        """Run the batch `cut` once its worker is done with those before."""
        start = max(cut.at, self._busy_until.get(cut.worker, 0.0))
        end = self._busy_until[cut.worker] = start + model.times.of(cut)
        model.engine.schedule(end, partial(self.end, model, cut))
        model.log.started(cut, start, end)

    def end(self, model: "SimulatedModel", cut: Dispatch) -> None:
        """Give the batch `cut` back to `model`, which may begin another one."""
        model.take_back(cut)


BULK_BATCHES = 4  # full batches of bulk work that wait at a time


class SimulatedModel(BatcherUser):
    """One model in an Engine: its Batcher, with a queue. Memory is bounded by what waits.

    Args:
        engine: the virtual time.
        settings: of the batcher.
        policy: decides.
        times: say how long batches take.
        sink: takes the record of what happens, part by part.
        workers: run the batches; by default there is one.
        timeout: seconds from the arrival of each request to its deadline; None: there is none.
        bulk: bulk work that is there from the start. A few batches of it wait at a time, as those of a running job do.
    """

    def __init__(
        self, engine: Engine, settings: BatchingSettings, policy: Policy, times: Times, sink: Sink,
        workers: SimulatedWorkers | None = None, *, timeout: float | None = None, bulk: Iterable[SimulatedRequest] = (),
    ) -> None:  # fmt: skip
        self.engine, self.times, self.log = engine, times, EventLog(sink)
        self._workers = SimulatedWorkers() if workers is None else workers
        self.batcher = Batcher(settings, policy, self._workers.kinds)
        self._timeout = inf if timeout is None else timeout
        self._bulk = iter(bulk)
        self._next_bulk = next(self._bulk, None)
        self.undecided = self._next_bulk is not None  # a request arrived at `now` and the batcher was not polled yet
        self._number = len(engine.models)
        engine.models.append(self)
        engine.wakes.append(inf)
        self._workers.serve(self)

    def arrive(self, first_index: int, times: Iterable[float], rows: Iterable[int] | None = None) -> None:
        """Let requests arrive at `times` (seconds, ascending). Each has one row if `rows` is None."""
        timeout, sizes = self._timeout, iter(rows) if rows is not None else repeat(1)
        self.accept(SimulatedRequest(index, now, timeout, next(sizes)) for index, now in enumerate(times, first_index))

    def accept(self, requests: Iterable[SimulatedRequest]) -> None:
        """Let `requests` arrive, in the order of their arrival."""
        engine, batcher = self.engine, self.batcher
        for request in requests:
            now = request.arrival
            if now > engine.now:
                engine.advance(now)
                engine.now = now
            try:
                batcher.submit(request, now)
            except (Overloaded, DeadlineExceeded):
                self.log.refused.append(request.index)
            # With all places taken and no deadlines, a poll would decide nothing.
            self.undecided = batcher.free_places > 0 or self._timeout < inf

    def poll(self, wakeup: Wakeup) -> None:
        """Begin the batches that are due now."""
        self.undecided = False
        self._feed()
        for cut in self.batcher.poll(self.engine.now, wakeup):
            self._workers.begin(self, cut)
        # The timer is only needed for decisions, which need a free place, and for deadlines.
        needed = self.batcher.free_places > 0 or self._timeout < inf
        wake = self.batcher.next_wakeup if needed else None
        self.engine.wakes[self._number] = inf if wake is None else wake

    def wake_up(self) -> None:
        """Do what the batcher wanted its timer for."""
        for request in self.batcher.expire(self.engine.now):
            # All rows of the others are running; their end shows that they are late.
            if request.taken < request.form.rows:
                self.log.lost(cast(SimulatedRequest, request).index)
        self.poll(TIMER)

    def take_back(self, cut: Dispatch) -> None:
        """Take back a batch that has ended, and begin others."""
        self.batcher.finished(cut.batch_id, self.engine.now)
        if self.batcher.has_waiting or self._next_bulk is not None:
            self.poll(WORKER)

    def poll_worker(self) -> None:
        """See BatcherUser."""
        self.poll(WORKER)

    def _feed(self) -> None:
        """Let further bulk work wait."""
        batcher = self.batcher
        most = BULK_BATCHES * batcher.settings.max_batch_size
        while self._next_bulk is not None and batcher.waiting_bulk < most and batcher.room(1, bulk=True):
            batcher.submit(self._next_bulk, self.engine.now)
            self._next_bulk = next(self._bulk, None)


# One simulated run, request by request and batch by batch.


@dataclass(frozen=True, eq=False)
class Run:
    """Says what happened to each request, in the order of arrival, and to each batch. Instants are in seconds.

    Attributes:
        profile, workers: what was simulated.
        arrival: shape (requests,), as all arrays but those of `batches`.
        start: when the last piece of the request was started; NaN for requests that were never run.
        end: when its caller had the response (with the profile's latency offset); NaN likewise.
        refused: whether the request was refused at its arrival.
        expired: whether its deadline passed in the queue.
        batches: the batches.
    """

    profile: Profile
    workers: int
    arrival: Floats
    start: Floats
    end: Floats
    refused: NDArray[np.bool_]
    expired: NDArray[np.bool_]
    batches: BatchLog

    @property
    def response_time_ms(self) -> Floats:
        """Response times in ms of the requests that have a response; shape (answered,)."""
        return 1000.0 * (self.end - self.arrival)[np.isfinite(self.end)]

    @property
    def seconds(self) -> float:
        """Seconds until the last batch ended, or the last request arrived."""
        ends = [float(self.arrival[-1])] if len(self.arrival) else [0.0]
        return max([*ends, float(self.batches.end.max()) if len(self.batches.end) else 0.0])

    @property
    def energy_mj(self) -> float:
        """The energy of all batches in mJ."""
        return float(self.profile.energy_mj[self.batches.rows - 1].sum())

    @property
    def power_w(self) -> float:
        """Mean power in watts."""
        return self.energy_mj / 1000.0 / self.seconds

    def late_share(self, seconds: float) -> float:
        """Return the share of the requests without a response within that many seconds of their arrival."""
        return 1.0 - float((self.end - self.arrival <= seconds + 1e-9).mean())

    @property
    def busy_share(self) -> float:
        """The share of the workers' time that was spent on batches."""
        return float((self.batches.end - self.batches.start).sum()) / (self.workers * self.seconds)


class Whole:
    """A sink that keeps every part of a run."""

    def __init__(self) -> None:
        self._parts: list[LogPart] = []

    def __call__(self, part: LogPart) -> None:
        """Keep a part."""
        self._parts.append(part)

    def run(self, profile: Profile, workers: int, arrival: Floats) -> Run:
        """Return the run of the requests that arrived at `arrival` (seconds; shape (requests,))."""
        parts, count = self._parts, len(arrival)
        columns = zip(*(part.batches for part in parts), strict=True)
        batches = BatchLog(*(np.concatenate(column) for column in columns))
        index = np.concatenate([part.request for part in parts])
        end = np.concatenate([part.end for part in parts])
        start = np.concatenate([part.of_batch(part.batches.start) for part in parts])
        done = np.isfinite(end)
        starts, ends = np.full(count, np.nan), np.full(count, np.nan)
        starts[index[done]] = start[done]
        ends[index[done]] = end[done] + profile.latency_offset_ms / 1000.0
        refused = _marked(count, [part.refused for part in parts])
        return Run(
            profile, workers, arrival, starts, ends, refused, _marked(count, [part.expired for part in parts]), batches
        )


def _marked(count: int, indices: list[Ints]) -> NDArray[np.bool_]:
    marks = np.zeros(count, dtype=np.bool_)
    marks[np.concatenate(indices)] = True
    return marks
