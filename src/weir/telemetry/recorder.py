"""One recorder of what happens to the requests of a model, and what is read off it.

A Recorder hears each event of a service once: a batch is one pass or one update, for counting must not show in the time of a
request. What is shown are views. Metrics adds the recorders of one label up for /metrics (exposition.py) and the dashboard;
`Recorder.to_dict` has the numbers of the statistics extension since the model was loaded; its RollingWindow those of the last
half to whole minute, which a policy is held against.
"""

import operator
import time
import weakref
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.errors import Cancelled, ModelError, ModelNotFound, WeirError
from weir.messages import Dispatch, Kind, Reason, Request, Timing

if TYPE_CHECKING:
    from weir.policy.cost.objective import Prices
    from weir.policy.cost.profile import Profile

# 100 µs (one request through an idle server) to 30 s (the default timeout), three steps to a decade.
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Histogram:
    """Counts of values up to each of `bounds` (ascending), with their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_ages(self, instants: list[float], now: float) -> float:
        """Count `now - instant` for each of `instants`, which must be sorted and not empty; return the sum of these."""
        bounds, counts = self.bounds, self.counts
        end = len(instants)
        spent = end * now - sum(instants)
        self.sum += spent
        bucket = bisect_left(bounds, now - instants[-1])
        last = bisect_left(bounds, now - instants[0])
        while bucket < last:  # from the youngest to the oldest
            start = bisect_left(instants, now - bounds[bucket], 0, end)
            counts[bucket] += end - start
            end = start
            bucket += 1
        counts[last] += end
        return spent

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def add(self, other: "Histogram") -> None:
        """Count what `other`, of the same bounds, has counted."""
        self.counts = list(map(operator.add, self.counts, other.counts))
        self.sum += other.sum

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus buckets: the upper bound as text, and how many values are at most that."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class SilentObserver:
    """Subclass it and override what you want to hear."""

    def refused(self, model: str, door: str, error: WeirError) -> None:
        """Ignore it."""

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Ignore it."""

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Ignore it."""

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        """Ignore it."""

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Ignore it."""

    def failed(self, model: str, errors: Sequence[ModelError], now: float) -> None:
        """Ignore it."""

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Ignore it."""

    def transferred(self, model: str, door: str, received_bytes: int, sent_bytes: int) -> None:
        """Ignore it."""


class Total:
    """How often something happened, and how long it took in all, in seconds."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, count: int, seconds: float) -> None:
        """It happened so many times more, which took so long together."""
        self.count += count
        self.seconds += seconds

    def to_dict(self) -> dict[str, int]:
        """Return count and nanoseconds."""
        return {"count": self.count, "ns": round(1e9 * self.seconds)}


class Steps:
    """The three steps of a batch in a worker: what is decoded and preprocessed, `predict`, what is postprocessed and encoded."""

    __slots__ = ("infer", "input", "output")

    def __init__(self) -> None:
        self.input = Total()
        self.infer = Total()
        self.output = Total()

    def add(self, count: int, timing: Timing) -> None:
        """A batch took so long for each of `count`."""
        self.input.add(count, count * timing.preprocess)
        self.infer.add(count, count * timing.predict)
        self.output.add(count, count * timing.postprocess)

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the three, by the protocol's names."""
        return {
            "compute_input": self.input.to_dict(), "compute_infer": self.infer.to_dict(),
            "compute_output": self.output.to_dict(),
        }  # fmt: skip


Outcome = tuple[str, str, type[WeirError] | None]  # model, door, and the error or None

_arrival = attrgetter("arrival")
_door = attrgetter("door")


class Recorder(SilentObserver):
    """An Observer that counts everything that happens to the requests of one service, once.

    `batches` is indexed by Reason. `ended` counts requests by (door, error or None), `refused_requests` those of them that never
    entered the queue; `bytes` has [received, sent] by door. `parts` are answers of a streaming model. The histograms of times are
    in seconds, that of `rows` is by batch. `inference_count` counts rows and `execution_count` batches that came back from a worker;
    one that the worker ran again in halves is one. `success` and `fail` count requests and the time from arrival to end; a caller
    who left is neither. `waited` counts requests and the time in the queue. `requests` has the steps once for each request in a batch, `by_rows` once for each batch, by its rows.
    `last_inference_ms` is the time of day of the last batch in milliseconds, 0 before the first. `window` is told of the same
    batches, if there is one. Without `detailed`, histograms, and what was accepted in `ended`, stay empty: only a view of
    metrics reads them, and a service without one does not pay for them.
    """

    def __init__(self, time_of_day: Callable[[], float] = time.time, *, detailed: bool = True) -> None:
        self._time_of_day = time_of_day
        self._detailed = detailed
        self.window: RollingWindow | None = None
        self.batches = [0] * len(Reason)
        self.ended: defaultdict[tuple[str, type[WeirError] | None], int] = defaultdict(int)
        self.refused_requests: defaultdict[tuple[str, type[WeirError]], int] = defaultdict(int)
        self.bytes: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.parts = 0
        self.rows = Histogram(ROWS)
        self.queue, self.preprocess, self.predict, self.postprocess, self.total, self.first_part = (
            Histogram(SECONDS) for _ in range(6)
        )
        self.inference_count = self.execution_count = self.last_inference_ms = 0
        self.success, self.fail, self.waited = Total(), Total(), Total()
        self.requests = Steps()
        self.by_rows: dict[int, Steps] = {}

    def refused(self, model: str, door: str, error: WeirError) -> None:
        """Count a request that never entered the queue."""
        outcome = (door, type(error))
        self.ended[outcome] += 1
        self.refused_requests[outcome] += 1
        self.fail.add(1, 0.0)

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Count a batch, and the time that its requests have waited."""
        self.batches[dispatch.reason] += 1
        if self._detailed:
            self.rows.observe(dispatch.rows)
        if dispatch.attempt:
            return  # their wait was counted when they were dispatched first
        requests = dispatch.requests if dispatch.slices is None else _first_pieces(dispatch)
        if requests:
            self.waited.add(len(requests), self._spent(self.queue, requests, dispatch.at))

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Count requests that had their end."""
        if not requests:
            return
        kind, count = None if error is None else type(error), len(requests)
        spent = self._spent(self.total, requests, now)
        if error is None:
            self.success.add(count, spent)
        elif not isinstance(error, Cancelled):
            self.fail.add(count, spent)
        if not self._detailed:
            return
        doors = list(map(_door, requests))
        first = doors[0]
        if doors.count(first) == count:
            self.ended[first, kind] += count
        else:
            for door in set(doors):
                self.ended[door, kind] += doors.count(door)

    def _spent(self, ages: Histogram, requests: Sequence[Request], now: float) -> float:
        """Return how long ago `requests` arrived, in all; their ages are counted if distributions are."""
        if self._detailed:
            return ages.observe_ages(_sorted_arrivals(requests), now)
        arrivals: float = sum(map(_arrival, requests))
        return len(requests) * now - arrivals

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        """Count the answers of a streaming model, and the time until the first of each request."""
        self.parts += len(requests)
        if firsts:
            self.first_part.observe_ages(_sorted_arrivals(firsts), now)

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Count a batch that came back, and note how long its steps took."""
        if self._detailed:
            self.preprocess.observe(timing.preprocess)
            self.predict.observe(timing.predict)
            self.postprocess.observe(timing.postprocess)
        rows = dispatch.rows
        self.inference_count += rows
        self.execution_count += 1
        self.last_inference_ms = round(1e3 * self._time_of_day())
        self.requests.add(len(dispatch.requests), timing)
        steps = self.by_rows.get(rows)
        if steps is None:
            steps = self.by_rows[rows] = Steps()
        steps.add(1, timing)
        if self.window is not None:
            self.window.computed(dispatch, now)

    def transferred(self, model: str, door: str, received_bytes: int, sent_bytes: int) -> None:
        """Count the bytes of a body and its answer."""
        count = self.bytes[door]
        count[0] += received_bytes
        count[1] += sent_bytes

    @property
    def ran(self) -> bool:
        """Whether a batch was cut, or a request had its end after it was accepted."""
        return any(self.batches) or bool(self.success.count or self.total.count or self.parts or self.execution_count)

    def add(self, other: "Recorder") -> None:
        """Count what `other` has counted, as far as /metrics shows it."""
        self.batches = list(map(operator.add, self.batches, other.batches))
        self.parts += other.parts
        self.execution_count += other.execution_count
        for name in ("rows", "queue", "preprocess", "predict", "postprocess", "total", "first_part"):
            getattr(self, name).add(getattr(other, name))
        for outcome, count in other.ended.items():
            self.ended[outcome] += count
        for refusal, count in other.refused_requests.items():
            self.refused_requests[refusal] += count
        for door, (received, sent) in other.bytes.items():
            self.transferred("", door, received, sent)

    def to_dict(self) -> dict[str, Any]:
        """Return what the model has done since it was loaded, as the statistics extension of the Open Inference Protocol writes it,
        without name and version."""
        nothing = Total().to_dict()
        ends = {"success": self.success.to_dict(), "fail": self.fail.to_dict(), "queue": self.waited.to_dict()}
        caching = {"cache_hit": nothing, "cache_miss": nothing}
        return {
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {**ends, **self.requests.to_dict(), **caching},
            "batch_stats": [{"batch_size": rows, **self.by_rows[rows].to_dict()} for rows in sorted(self.by_rows)],
        }


class Metrics(SilentObserver):
    """The counts of all models, by label: what their recorders have counted, and those before them that served under the label.

    Given to a service as an observer, it is not told of events: it reads the recorder of the service. What it is told itself (of
    models that are not there, of bodies that a product reads) it records by label.
    """

    def __init__(self) -> None:
        self._own: defaultdict[str, Recorder] = defaultdict(Recorder)
        self._attached: dict[str, list[Recorder]] = {}
        self._left: deque[tuple[str, Recorder]] = deque()

    def attach(self, label: str, recorder: Recorder, owner: object) -> None:
        """Show what `recorder` counts of the model called `label`. Its counts are kept when `owner` is gone."""
        self._attached.setdefault(label, []).append(recorder)
        weakref.finalize(owner, self._left.append, (label, recorder)).atexit = False

    def of(self, label: str) -> Recorder:
        """Return what was counted of the model called `label`, in all."""
        found = [self._own[label]] if label in self._own else []
        found += self._attached.get(label, ())
        if len(found) == 1:
            return found[0]
        summed = Recorder()
        for each in found:
            summed.add(each)
        return summed

    @property
    def models(self) -> dict[str, Recorder]:
        """What was counted of each model that has cut a batch or given a request its end."""
        return {label: found for label in self._labels() if (found := self.of(label)).ran}

    @property
    def ended(self) -> dict[Outcome, int]:
        """Requests that had their end; every refused one is among them."""
        return self._outcomes("ended")

    @property
    def refused_requests(self) -> dict[Outcome, int]:
        """Requests that never entered a queue."""
        return self._outcomes("refused_requests")

    @property
    def bytes(self) -> dict[tuple[str, str], list[int]]:
        """Bytes [received, sent] by (model, door)."""
        return {(label, door): list(count) for label in self._labels() for door, count in self.of(label).bytes.items()}

    def _labels(self) -> list[str]:
        """Return all labels. What has left is kept with what was recorded here: now, for a collector of garbage may call at any time."""
        while self._left:
            label, recorder = self._left.popleft()
            self._attached[label].remove(recorder)
            self._own[label].add(recorder)
        return list(dict.fromkeys((*self._own, *self._attached)))

    def _outcomes(self, name: str) -> dict[Outcome, int]:
        found: defaultdict[Outcome, int] = defaultdict(int)
        for label in self._labels():
            for (door, kind), count in getattr(self.of(label), name).items():
                # A name that callers choose must not become a label: there would be no end of them.
                named = "" if kind is not None and issubclass(kind, ModelNotFound) else label
                found[named, door, kind] += count
        return dict(found)

    # What is told here.

    def refused(self, model: str, door: str, error: WeirError) -> None:
        """Record a request that reached no queue."""
        self._own["" if isinstance(error, ModelNotFound) else model].refused(model, door, error)

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Record a batch."""
        self._own[model].dispatched(model, dispatch)

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Record requests that had their end."""
        self._own[model].answered(model, requests, error, now)

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        """Record the answers of a streaming model."""
        self._own[model].streamed(model, requests, firsts, now)

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Record a batch that came back."""
        self._own[model].computed(model, dispatch, timing, now)

    def transferred(self, model: str, door: str, received_bytes: int, sent_bytes: int) -> None:
        """Record the bytes of a body and its answer."""
        self._own[model].transferred(model, door, received_bytes, sent_bytes)


def _sorted_arrivals(requests: Sequence[Request]) -> list[float]:
    arrivals = list(map(_arrival, requests))
    arrivals.sort()  # one pass when they are in order, which they nearly always are
    return arrivals


def _first_pieces(dispatch: Dispatch) -> list[Request]:
    pieces = zip(dispatch.requests, dispatch.slices or (), strict=True)
    return [request for request, piece in pieces if piece is None or piece[0] == 0]


# What came of the batches of the last half to whole minute. The window takes one call per batch. It turns in halves: what is read
# is the half that fills and the whole one before it, so old batches are forgotten without a list of them.


HALF = 30.0  # seconds

# 20 µs to two minutes in steps of a fifth: a percentile read from them is off by at most a tenth.
AGES = tuple(2e-5 * 1.2**step for step in range(86))


class WindowHalf:
    """One half of the window. `sizes[b]` counts the batches of b rows; `arrivals` is the count at its begin."""

    __slots__ = ("ages", "arrivals", "batches", "begun", "requests", "rows", "sizes")

    def __init__(self, begun: float, arrivals: int, largest: int) -> None:
        self.begun = begun
        self.arrivals = arrivals
        self.batches = self.requests = self.rows = 0
        self.ages = Histogram(AGES)
        self.sizes = [0] * (largest + 1)


class WindowSummary(NamedTuple):
    """What the window shows; None where it has nothing to say. Times are means over rows, from arrival to the return of
    their batch; `rate` counts rows accepted per second."""

    seconds: float
    requests: int
    rows: int
    batches: int
    rate: float
    response_time_ms: float | None
    p99_ms: float | None
    sizes: list[int]

    def power_w(self, profile: "Profile") -> float:
        """Return the mean power of these batches, were each to take the energy that `profile` states."""
        energies = profile.energy_mj
        spent = sum(count * energies[min(b, len(energies)) - 1] for b, count in enumerate(self.sizes) if count)
        return float(spent) / (1000.0 * self.seconds)

    def cost(self, profile: "Profile", prices: "Prices") -> float | None:
        """Return what these batches cost by `prices`; None if there were none."""
        if self.response_time_ms is None:
            return None
        latency_weight = prices.latency_weight_at(self.rate)
        return latency_weight * self.response_time_ms + prices.energy_weight * self.power_w(profile)


class RollingWindow:
    """What came of the last batches of one service. `arrivals` says how many rows were ever accepted."""

    def __init__(self, clock: Callable[[], float], arrivals: Callable[[], int], max_batch_size: int) -> None:
        self._clock = clock
        self._arrivals = arrivals
        self._largest = max_batch_size
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was measured belongs to other tables."""
        self._current = self._previous = self._new_half(self._clock())

    def computed(self, dispatch: Dispatch, now: float) -> None:
        """Count a batch that came back at `now`, and how old its requests are."""
        if now - self._current.begun >= HALF:
            self._turn(now)
        half, requests, rows = self._current, dispatch.requests, dispatch.rows
        half.batches += 1
        half.rows += rows
        half.sizes[min(rows, self._largest)] += 1
        if rows == len(requests):
            half.requests += rows
            arrivals = list(map(_arrival, requests))
            arrivals.sort()
            half.ages.observe_ages(arrivals, now)
        else:
            half.requests += _weigh(dispatch, half.ages, now)

    def read(self) -> WindowSummary:
        """Return what the window shows now."""
        now = self._clock()
        if now - self._current.begun >= HALF:
            self._turn(now)
        halves = [self._current] if self._previous is self._current else [self._previous, self._current]
        seconds = max(now - halves[0].begun, 1e-9)
        counts = [sum(column) for column in zip(*(half.ages.counts for half in halves), strict=True)]
        aged = sum(counts)
        return WindowSummary(
            seconds=seconds,
            requests=sum(half.requests for half in halves),
            rows=sum(half.rows for half in halves),
            batches=sum(half.batches for half in halves),
            rate=(self._arrivals() - halves[0].arrivals) / seconds,
            response_time_ms=1000.0 * sum(half.ages.sum for half in halves) / aged if aged else None,
            p99_ms=1000.0 * quantile(counts, 0.99) if aged else None,
            sizes=[sum(column) for column in zip(*(half.sizes for half in halves), strict=True)],
        )

    def _turn(self, now: float) -> None:
        idle = now - self._current.begun >= 2 * HALF
        new = self._new_half(now)
        self._previous = new if idle else self._current
        self._current = new

    def _new_half(self, now: float) -> WindowHalf:
        return WindowHalf(now, self._arrivals(), self._largest)


def quantile(counts: list[int], share: float) -> float:
    """Return the age, in seconds, that `share` of those counted in the buckets of AGES do not exceed."""
    reached = list(accumulate(counts))
    wanted = share * reached[-1]
    bucket = bisect_left(reached, wanted)
    left = wanted - (reached[bucket] - counts[bucket])
    low = AGES[bucket - 1] if bucket else 0.0
    high = AGES[min(bucket, len(AGES) - 1)]
    return low + (high - low) * left / counts[bucket]


def _weigh(dispatch: Dispatch, ages: Histogram, now: float) -> int:
    """Count each request's age once for each of its rows in this batch; return how many requests begin in it."""
    begun = 0
    for request, part in zip(dispatch.requests, dispatch.slices or [None] * len(dispatch.requests), strict=True):
        start, stop = part or (0, request.rows)
        rows = stop - start
        if part is not None and request.kind is Kind.ITEMS:
            rows = rows * request.rows // len(request.payload)  # a part counts items, which have equal rows
        begun += start == 0
        age = now - request.arrival
        ages.counts[bisect_left(AGES, age)] += rows
        ages.sum += rows * age
    return begun
