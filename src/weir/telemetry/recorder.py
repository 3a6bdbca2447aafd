"""One recorder of what happens to the requests of a model, and the views of what it counts.

A Recorder is notified of each event of a service once. A batch is one pass over its requests or one update, so that counting
does not add to the time of a request. The views: Metrics adds up the recorders of one label for /metrics
(exposition.py) and the dashboard. `Recorder.to_dict` has the numbers of the statistics extension since the model was
loaded. Its RollingWindow has those of the last 30 to 60 seconds, with which a policy's predictions are compared.
"""

import operator
import time
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.errors import Cancelled, ModelError, ModelNotFound, WeirError
from weir.messages import Dispatch, Kind, Reason, Request, Timing, arrivals_of
from weir.metrics import MetricReport, ReportedMetrics

if TYPE_CHECKING:
    from prometheus_client.samples import Exemplar

    from weir.policy.cost import Prices, Profile

# 100 µs (one request through an idle server) to 30 s (the default timeout), three steps to a decade.
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Bulk work may wait for hours.
BULK_SECONDS = (0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 86400.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


# By a model's label and the index of an interval of SECONDS: a traced request that took so long.
Exemplars = dict[str, dict[int, "Exemplar"]]


class Histogram:
    """Counts values by intervals that end at each of `bounds` (ascending), and adds them up."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value, in the unit of the bounds."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_ages(self, instants: list[float], now: float) -> float:
        """Count `now - instant` for each of `instants` and return the sum of these ages, all in seconds.

        `instants` must be sorted and not empty.
        """
        bounds, counts = self.bounds, self.counts
        end = len(instants)
        if end == 1:
            spent = now - instants[0]
            counts[bisect_left(bounds, spent)] += 1
            self.sum += spent
            return spent
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
        """The number of values counted."""
        return sum(self.counts)

    def add(self, other: "Histogram") -> None:
        """Add the counts of `other`, which has the same bounds."""
        self.counts = list(map(operator.add, self.counts, other.counts))
        self.sum += other.sum

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the buckets for Prometheus: each upper bound as text, and how many values are at most that."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class SilentObserver:
    """An Observer that ignores every event. Derive from it and override the events of interest."""

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        """Ignore the event."""

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Ignore the event."""

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Ignore the event."""

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        """Ignore the event."""

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Ignore the event."""

    def failed(self, model: str, errors: Sequence[ModelError], now: float) -> None:
        """Ignore the event."""

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Ignore the event."""

    def metrics_reported(self, model: str, worker: int, reports: Sequence[MetricReport]) -> None:
        """Ignore the event, which is not among those of Observer: a worker has reported what its model's own metrics have become."""

    def transferred(self, model: str, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        """Ignore the event."""


def total(count: int, seconds: float) -> dict[str, int]:
    """Return a count and its time as the statistics extension does, in nanoseconds."""
    return {"count": count, "ns": round(1e9 * seconds)}


class Total:
    """Counts how often something happened, and the seconds that it took in all."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, count: int, seconds: float) -> None:
        """Add `count` events that took `seconds` together."""
        self.count += count
        self.seconds += seconds

    def to_dict(self) -> dict[str, int]:
        """Return the count and the nanoseconds."""
        return total(self.count, self.seconds)


class Steps:
    """Counts the three steps of batches in workers, and the `seconds` of each: decoding and preprocess, `predict`, postprocess and
    encoding."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = [0.0, 0.0, 0.0]

    def add(self, count: int, timing: Timing) -> None:
        """Add the steps of a batch, once for each of `count`."""
        self.count += count
        seconds, (preprocess, predict, postprocess) = self.seconds, timing
        seconds[0] += count * preprocess
        seconds[1] += count * predict
        seconds[2] += count * postprocess

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the three by the names of the statistics extension."""
        names = ("compute_input", "compute_infer", "compute_output")
        return {name: total(self.count, seconds) for name, seconds in zip(names, self.seconds, strict=True)}


End = tuple[str, type[WeirError] | None]  # of a request: its frontend, or in `totals` its route, and the error or None
Outcome = tuple[str, str, type[WeirError] | None]  # its model, and its End


class Recorder(SilentObserver):
    """An Observer that counts everything that happens to the requests of one service, once.

    Without `detailed`, the histograms only add up. Only metrics show them, and a service without metrics shall not pay for
    them. `time_of_day` returns seconds since 1970.

    Attributes:
        batches: batches by Reason.
        refused_requests: requests that never entered the queue, by (frontend, error).
        totals: histograms of the times in seconds from arrival to end of the others, except bulk work, by (route or else frontend, error or
            None).
        bulk_totals: the same of bulk work.
        bytes: [received, sent] by frontend.
        parts: responses of a streaming model.
        rows: histogram of rows per batch.
        bulk_rows: rows of bulk work that were dispatched.
        queue, preprocess, predict, postprocess, first_part: histograms of times in seconds; bulk work does not count in `queue`.
        inference_count: rows that came back from a worker.
        execution_count: batches that came back; one that the worker ran again in halves counts once.
        success, fail: requests, and their time from arrival to end. A request whose caller left is neither.
        waited: requests, and their time in the queue.
        requests: the steps of batches, once for each request in them.
        by_rows: the steps of batches, once for each batch, by its rows.
        reported: the model's own metrics, of all its workers.
    """

    def __init__(self, time_of_day: Callable[[], float] = time.time, *, detailed: bool = True) -> None:
        self._time_of_day = time_of_day
        self.reported = ReportedMetrics()
        self.batches = [0] * len(Reason)
        self.refused_requests: defaultdict[tuple[str, type[WeirError]], int] = defaultdict(int)
        self.bytes: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.parts = 0
        rows, seconds, bulk_seconds = (ROWS, SECONDS, BULK_SECONDS) if detailed else ((), (), ())
        self.rows = Histogram(rows)
        self.queue, self.preprocess, self.predict, self.postprocess, self.first_part = (
            Histogram(seconds) for _ in range(5)
        )
        self.totals: defaultdict[End, Histogram] = defaultdict(lambda: Histogram(seconds))
        self.bulk_totals: defaultdict[End, Histogram] = defaultdict(lambda: Histogram(bulk_seconds))
        self._steps = self.preprocess, self.predict, self.postprocess
        self.bulk_rows = 0
        self.inference_count = self.execution_count = 0
        self._last_inference = 0.0  # seconds since 1970
        self.success, self.fail, self.waited = Total(), Total(), Total()
        self.requests = Steps()
        self.by_rows: dict[int, Steps] = {}

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        """Count a request that never entered the queue."""
        self.refused_requests[frontend, type(error)] += 1
        self.fail.add(1, 0.0)

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Count a batch, and the time for which its requests have waited."""
        rows, waited = dispatch.rows, self.waited
        self.batches[dispatch.reason] += 1
        self.rows.observe(rows)
        self.bulk_rows += dispatch.bulk
        if dispatch.attempt or dispatch.bulk == rows:
            return  # their wait was counted when they were dispatched first; and that of bulk work does not count
        if dispatch.slices is None and not dispatch.bulk:
            arrivals = dispatch.arrivals
        else:
            arrivals = arrivals_of(_interactive(_first_pieces(dispatch)))
        if arrivals:
            waited.count += len(arrivals)
            waited.seconds += self.queue.observe_ages(arrivals, dispatch.at)

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Count requests that had their end at `now` (seconds)."""
        if not requests:
            return
        kind, count = None if error is None else type(error), len(requests)
        form = requests[0].form
        first = form.route or form.frontend
        sources = [first] if count == 1 else [request.form.route or request.form.frontend for request in requests]
        if self.bulk_rows or sources.count(first) < count:
            spent = self._spent_by_class(requests, kind, now)
        else:
            spent = self.totals[first, kind].observe_ages(arrivals_of(requests), now)
        if error is None or not isinstance(error, Cancelled):
            ends = self.success if error is None else self.fail
            ends.count += count
            ends.seconds += spent

    def _spent_by_class(self, requests: Sequence[Request], kind: type[WeirError] | None, now: float) -> float:
        found: defaultdict[tuple[bool, str], list[Request]] = defaultdict(list)
        for request in requests:
            found[request.form.priority < 0, request.form.route or request.form.frontend].append(request)
        return sum(
            (self.bulk_totals if bulk else self.totals)[source, kind].observe_ages(arrivals_of(members), now)
            for (bulk, source), members in found.items()
        )

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        """Count responses of a streaming model, and the time until the first response of each request."""
        self.parts += len(requests)
        if firsts:
            self.first_part.observe_ages(arrivals_of(firsts), now)

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Count a batch that came back, and the times of its steps."""
        for step, seconds in zip(self._steps, timing, strict=True):  # `observe` inlined: three calls less
            step.counts[bisect_left(step.bounds, seconds)] += 1
            step.sum += seconds
        rows = dispatch.rows
        self.inference_count += rows
        self.execution_count += 1
        self._last_inference = self._time_of_day()
        self.requests.add(len(dispatch.requests), timing)
        steps = self.by_rows.get(rows)
        if steps is None:
            steps = self.by_rows[rows] = Steps()
        steps.add(1, timing)

    def transferred(self, model: str, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        """Count the bytes of a request body and of its response."""
        count = self.bytes[frontend]
        count[0] += received_bytes
        count[1] += sent_bytes

    def metrics_reported(self, model: str, worker: int, reports: Sequence[MetricReport]) -> None:
        """Add what a worker has reported of the model's own metrics."""
        self.reported.add(worker, reports)

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Drop the gauges of a worker that has ended."""
        if state != "ready":
            self.reported.forget(worker)

    @property
    def ended(self) -> Counter[End]:
        """Requests that had their end, those refused included."""
        found = Counter[End](self.refused_requests)
        for (source, kind), histogram in (*self.totals.items(), *self.bulk_totals.items()):
            found[frontend_of(source), kind] += histogram.count
        return found

    @property
    def total(self) -> Histogram:
        """The histogram of all `totals`."""
        return _sum_of(self.totals, SECONDS)

    @property
    def bulk_total(self) -> Histogram:
        """The histogram of all `bulk_totals`."""
        return _sum_of(self.bulk_totals, BULK_SECONDS)

    @property
    def ran(self) -> bool:
        """Whether a batch was dispatched, or an accepted request had its end."""
        return any(self.batches) or bool(self.success.count or self.totals or self.parts or self.execution_count)

    def add(self, other: "Recorder") -> None:
        """Add the counts of `other`, as far as /metrics shows them."""
        self.batches = list(map(operator.add, self.batches, other.batches))
        self.parts += other.parts
        self.bulk_rows += other.bulk_rows
        self.execution_count += other.execution_count
        for name in ("rows", "queue", "preprocess", "predict", "postprocess", "first_part"):
            getattr(self, name).add(getattr(other, name))
        for name in ("totals", "bulk_totals"):
            for end, histogram in getattr(other, name).items():
                getattr(self, name)[end].add(histogram)
        for refusal, count in other.refused_requests.items():
            self.refused_requests[refusal] += count
        for frontend, (received, sent) in other.bytes.items():
            self.transferred("", frontend, received, sent)
        self.reported.merge(other.reported)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts since the model was loaded in the form of the Open Inference Protocol's statistics
        extension, without name and version.
        """
        nothing = Total().to_dict()
        ends = {"success": self.success.to_dict(), "fail": self.fail.to_dict(), "queue": self.waited.to_dict()}
        caching = {"cache_hit": nothing, "cache_miss": nothing}
        return {
            "last_inference": round(1e3 * self._last_inference),
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {**ends, **self.requests.to_dict(), **caching},
            "batch_stats": [{"batch_size": rows, **self.by_rows[rows].to_dict()} for rows in sorted(self.by_rows)],
        }


class Metrics(SilentObserver):
    """The counts of all models, by label: those of their services' recorders, including services that are gone.

    Given to a service as an observer, it is not called for each event; it reads the recorder of the service. Events
    that no service knows of (requests for unknown models, bodies that a product reads) it records itself, by label.
    """

    def __init__(self) -> None:
        self._own: defaultdict[str, Recorder] = defaultdict(Recorder)
        self._attached: dict[str, list[Recorder]] = {}
        self._left: deque[tuple[str, Recorder]] = deque()
        self.exemplars: Exemplars = {}

    def attach(self, label: str, recorder: Recorder, owner: object) -> None:
        """Show the counts of `recorder` as those of the model `label`. They are kept when `owner` is gone."""
        self._attached.setdefault(label, []).append(recorder)
        weakref.finalize(owner, self._left.append, (label, recorder)).atexit = False

    def own(self, label: str) -> Recorder:
        """Return the recorder for events of `label` that no service knows of."""
        return self._own[label]

    def of(self, label: str) -> Recorder:
        """Return a recorder with all counts of the model `label`."""
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
        """The counts of each model that has dispatched a batch or ended a request, by label."""
        return {label: found for label in self._labels() if (found := self.of(label)).ran}

    @property
    def reported(self) -> dict[str, ReportedMetrics]:
        """The models' own metrics, by label."""
        return {label: self.of(label).reported for label in self._labels()}

    @property
    def ended(self) -> dict[Outcome, int]:
        """Requests that had their end, those refused included."""
        return self._outcomes("ended")

    @property
    def refused_requests(self) -> dict[Outcome, int]:
        """Requests that never entered a queue."""
        return self._outcomes("refused_requests")

    @property
    def bytes(self) -> dict[tuple[str, str], list[int]]:
        """Bytes [received, sent] by (model, frontend)."""
        return {
            (label, frontend): list(count)
            for label in self._labels()
            for frontend, count in self.of(label).bytes.items()
        }

    def _labels(self) -> list[str]:
        """Return all labels, after adding the counts of services that are gone to our own.

        That is done here because the garbage collector may call `attach`'s finalizer at any time.
        """
        while self._left:
            label, recorder = self._left.popleft()
            self._attached[label].remove(recorder)
            recorder.reported.forget()
            self._own[label].add(recorder)
        return list(dict.fromkeys((*self._own, *self._attached)))

    def _outcomes(self, name: str) -> dict[Outcome, int]:
        found: defaultdict[Outcome, int] = defaultdict(int)
        for label in self._labels():
            for (frontend, kind), count in getattr(self.of(label), name).items():
                # A name that callers choose must not become a label: the number of labels would have no bound.
                named = "" if kind is not None and issubclass(kind, ModelNotFound) else label
                found[named, frontend, kind] += count
        return dict(found)

    # Events that no service knows of.

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        """Record a request that reached no queue."""
        self._own["" if isinstance(error, ModelNotFound) else model].refused(model, frontend, error)

    def transferred(self, model: str, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        """Record the bytes of a request body and of its response."""
        self._own[model].transferred(model, frontend, received_bytes, sent_bytes)


def frontend_of(source: str) -> str:
    """Return the frontend of requests that are counted by `source`: by their route, if they came over HTTP."""
    return "http" if source.startswith("/") else source


def _sum_of(histograms: Mapping[End, Histogram], bounds: Sequence[float]) -> Histogram:
    found = Histogram(bounds)
    for each in list(histograms.values()):
        found.add(each)
    return found


def _interactive(requests: Sequence[Request]) -> list[Request]:
    """Return the requests that are not bulk work."""
    return [request for request in requests if request.form.priority >= 0]


def _first_pieces(dispatch: Dispatch) -> list[Request]:
    if dispatch.slices is None:
        return dispatch.requests
    pieces = zip(dispatch.requests, dispatch.slices, strict=True)
    return [request for request, piece in pieces if piece is None or piece[0] == 0]


# The batches of the last 30 to 60 seconds. The window is called once per batch. It consists of two halves, the one
# that is being filled and the complete one before it, so that old batches are forgotten without a list of them.


HALF = 30.0  # seconds

# 20 µs to two minutes in steps of a fifth: a percentile read from them is off by at most a tenth.
AGES = tuple(2e-5 * 1.2**step for step in range(86))


class WindowHalf:
    """One half of the window.

    `begun` is the instant at which it began (seconds), `arrivals` the rows that had ever arrived by then, and
    `sizes[b]` the number of batches of b rows.
    """

    __slots__ = ("ages", "arrivals", "batches", "begun", "requests", "rows", "sizes")

    def __init__(self, begun: float, arrivals: int) -> None:
        self.begun = begun
        self.arrivals = arrivals
        self.batches = self.requests = self.rows = 0
        self.ages = Histogram(AGES)
        self.sizes = Counter[int]()


class WindowSummary(NamedTuple):
    """The figures of the window; None where there were no batches.

    Attributes:
        seconds: the time that it covers.
        requests, rows, batches: how many came back from workers.
        rate: rows accepted per second.
        response_time_ms: mean over rows, in ms, from arrival to the return of their batch.
        p99_ms: its 99th percentile.
        sizes: the number of batches by rows.
    """

    seconds: float
    requests: int
    rows: int
    batches: int
    rate: float
    response_time_ms: float | None
    p99_ms: float | None
    sizes: Mapping[int, int]

    def power_w(self, profile: "Profile") -> float:
        """Return the mean power in watts if each batch took the energy that `profile` states."""
        energies = profile.energy_mj
        spent = sum(count * energies[min(rows, len(energies)) - 1] for rows, count in self.sizes.items())
        return float(spent) / (1000.0 * self.seconds)

    def cost(self, profile: "Profile", prices: "Prices") -> float | None:
        """Return the cost of these batches by the weights `prices`; None if there were none."""
        if self.response_time_ms is None:
            return None
        latency_weight = prices.latency_weight_at(self.rate)
        return latency_weight * self.response_time_ms + prices.energy_weight * self.power_w(profile)


class RollingWindow(SilentObserver):
    """An Observer of the batches of one service in the last 30 to 60 seconds. `arrivals` returns the rows that were ever accepted."""

    def __init__(self, clock: Callable[[], float], arrivals: Callable[[], int]) -> None:
        self._clock = clock
        self._arrivals = arrivals
        self.forget()

    def forget(self) -> None:
        """Start again: what was measured belongs to other tables."""
        self._current = self._previous = self._new_half(self._clock())

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Count a batch that came back at `now` (seconds), and the ages of its requests. Bulk work does not count: no policy decides about it."""
        if now - self._current.begun >= HALF:
            self._turn(now)
        half, requests, rows = self._current, dispatch.requests, dispatch.rows
        if dispatch.bulk == rows:
            return
        half.batches += 1
        half.rows += rows
        half.sizes[rows] += 1
        if rows == len(requests) and not dispatch.bulk:
            half.requests += rows
            half.ages.observe_ages(dispatch.arrivals, now)
        else:
            half.requests += _weigh(dispatch, half.ages, now)

    def read(self) -> WindowSummary:
        """Return the figures of the window as of now."""
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
            sizes=sum((half.sizes for half in halves), Counter()),
        )

    def _turn(self, now: float) -> None:
        idle = now - self._current.begun >= 2 * HALF
        new = self._new_half(now)
        self._previous = new if idle else self._current
        self._current = new

    def _new_half(self, now: float) -> WindowHalf:
        return WindowHalf(now, self._arrivals())


def quantile(counts: list[int], share: float) -> float:
    """Return the age in seconds that the given share of the values counted does not exceed; `counts` is by bucket of
    AGES.
    """
    reached = list(accumulate(counts))
    wanted = share * reached[-1]
    bucket = bisect_left(reached, wanted)
    left = wanted - (reached[bucket] - counts[bucket])
    low = AGES[bucket - 1] if bucket else 0.0
    high = AGES[min(bucket, len(AGES) - 1)]
    return low + (high - low) * left / counts[bucket]


def _weigh(dispatch: Dispatch, ages: Histogram, now: float) -> int:
    """Count each request's age once for each of its rows in this batch. Return how many requests begin in it."""
    begun = 0
    for request, part in zip(dispatch.requests, dispatch.slices or [None] * len(dispatch.requests), strict=True):
        start, stop = part or (0, request.form.rows)
        rows = stop - start
        if request.form.priority < 0:
            continue
        if part is not None and request.form.kind is Kind.ITEMS:
            rows = rows * request.form.rows // len(request.payload)  # a part counts items, which have equal rows
        begun += start == 0
        age = now - request.arrival
        ages.counts[bisect_left(AGES, age)] += rows
        ages.sum += rows * age
    return begun
