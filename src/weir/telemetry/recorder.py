"""Counts what happens to the requests of a model, a batch at a time."""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from weir.errors import Cancelled, ModelError, ModelNotFound, WeirError
from weir.messages import Dispatch, Reason, Request, Timing

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

    def observe_ages(self, instants: list[float], now: float) -> None:
        """Count `now - instant` for each of `instants`, which must be sorted and not empty."""
        bounds, counts = self.bounds, self.counts
        end = len(instants)
        self.sum += end * now - sum(instants)
        bucket = bisect_left(bounds, now - instants[-1])
        last = bisect_left(bounds, now - instants[0])
        while bucket < last:  # from the youngest to the oldest
            start = bisect_left(instants, now - bounds[bucket], 0, end)
            counts[bucket] += end - start
            end = start
            bucket += 1
        counts[last] += end

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus buckets: the upper bound as text, and how many values are at most that."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


Outcome = tuple[str, str, type[WeirError] | None]  # model, door, and the error or None

_arrival = attrgetter("arrival")
_door = attrgetter("door")


class ModelRecord:
    """What is counted for one model. `batches` is indexed by Reason."""

    __slots__ = ("batches", "first_part", "parts", "postprocess", "predict", "preprocess", "queue", "rows", "total")

    def __init__(self) -> None:
        self.batches = [0] * len(Reason)
        self.rows = Histogram(ROWS)
        self.queue = Histogram(SECONDS)
        self.preprocess = Histogram(SECONDS)
        self.predict = Histogram(SECONDS)
        self.postprocess = Histogram(SECONDS)
        self.total = Histogram(SECONDS)
        self.parts = 0  # answers of a streaming model
        self.first_part = Histogram(SECONDS)


class Metrics:
    """An Observer that counts.

    `models` has the counts of each model; `ended` and `refused_requests` count requests by outcome (every refused one
    is in `ended` too); `bytes` counts [received, sent] by (model, door).
    """

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelRecord] = defaultdict(ModelRecord)
        self.ended: defaultdict[Outcome, int] = defaultdict(int)
        self.refused_requests: defaultdict[Outcome, int] = defaultdict(int)
        self.bytes: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])

    def refused(self, model: str, door: str, error: WeirError) -> None:
        """Count a request that never entered the line."""
        if isinstance(error, ModelNotFound):
            model = ""  # a name that callers choose must not become a label: there would be no end of them
        outcome = (model, door, type(error))
        self.ended[outcome] += 1
        self.refused_requests[outcome] += 1

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Count a batch, and the time that its requests have waited."""
        record = self.models[model]
        record.batches[dispatch.reason] += 1
        record.rows.observe(dispatch.rows)
        if dispatch.attempt:
            return  # their wait was counted when they were dispatched first
        requests = dispatch.requests if dispatch.slices is None else _first_pieces(dispatch)
        if requests:
            record.queue.observe_ages(_sorted_arrivals(requests), dispatch.at)

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Count requests that had their end."""
        if not requests:
            return
        kind = None if error is None else type(error)
        self.models[model].total.observe_ages(_sorted_arrivals(requests), now)
        doors = list(map(_door, requests))
        first = doors[0]
        if doors.count(first) == len(doors):
            self.ended[model, first, kind] += len(doors)
        else:
            for door in set(doors):
                self.ended[model, door, kind] += doors.count(door)

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        """Count the answers of a streaming model, and the time until the first of each request."""
        record = self.models[model]
        record.parts += len(requests)
        if firsts:
            record.first_part.observe_ages(_sorted_arrivals(firsts), now)

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Note how long the steps of a batch took."""
        record = self.models[model]
        record.preprocess.observe(timing.preprocess)
        record.predict.observe(timing.predict)
        record.postprocess.observe(timing.postprocess)

    def failed(self, model: str, errors: Sequence[ModelError], now: float) -> None:
        """Ignore it: requests are counted when they have their end."""

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Ignore it: the states and restarts of workers are read when somebody asks."""

    def transferred(self, model: str, door: str, received_bytes: int, sent_bytes: int) -> None:
        """Count the bytes of a body and its answer."""
        count = self.bytes[model, door]
        count[0] += received_bytes
        count[1] += sent_bytes


def _sorted_arrivals(requests: Sequence[Request]) -> list[float]:
    arrivals = list(map(_arrival, requests))
    arrivals.sort()  # one pass when they are in order, which they nearly always are
    return arrivals


def _first_pieces(dispatch: Dispatch) -> list[Request]:
    pieces = zip(dispatch.requests, dispatch.slices or (), strict=True)
    return [request for request, piece in pieces if piece is None or piece[0] == 0]


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


class Statistics(SilentObserver):
    """An Observer that counts for one service.

    `inference_count` counts rows and `execution_count` batches that came back from a worker; one that the worker ran again in
    halves is one. `success` and `fail` count requests and the time from arrival to end, `queue` that from arrival to dispatch.
    A caller who left is neither. `requests` has the steps once for each request in a batch, `batches` once for each batch, by
    its rows. `last_inference_ms` is the time of day of the last batch in milliseconds, 0 before the first.
    """

    def __init__(self, time_of_day: Callable[[], float] = time.time) -> None:
        self._time_of_day = time_of_day
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.success = Total()
        self.fail = Total()
        self.queue = Total()
        self.requests = Steps()
        self.batches: dict[int, Steps] = {}

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Note how long the requests of a batch have waited."""
        if dispatch.attempt:
            return  # they were counted when they were dispatched first
        requests = dispatch.requests
        if dispatch.slices is not None:
            pieces = zip(requests, dispatch.slices, strict=True)
            requests = [request for request, piece in pieces if piece is None or piece[0] == 0]
        self.queue.add(len(requests), _ages(requests, dispatch.at))

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Count a batch."""
        rows = dispatch.rows
        self.inference_count += rows
        self.execution_count += 1
        self.last_inference_ms = round(1e3 * self._time_of_day())
        self.requests.add(len(dispatch.requests), timing)
        steps = self.batches.get(rows)
        if steps is None:
            steps = self.batches[rows] = Steps()
        steps.add(1, timing)

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Count requests that had their end."""
        if error is None:
            self.success.add(len(requests), _ages(requests, now))
        elif not isinstance(error, Cancelled):
            self.fail.add(len(requests), _ages(requests, now))

    def refused(self, model: str, door: str, error: WeirError) -> None:
        """Count a request that never entered the line."""
        self.fail.add(1, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return it as the protocol writes it, without name and version."""
        nothing = Total().to_dict()
        ends = {"success": self.success.to_dict(), "fail": self.fail.to_dict(), "queue": self.queue.to_dict()}
        caching = {"cache_hit": nothing, "cache_miss": nothing}
        return {
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {**ends, **self.requests.to_dict(), **caching},
            "batch_stats": [{"batch_size": rows, **self.batches[rows].to_dict()} for rows in sorted(self.batches)],
        }


def _ages(requests: Sequence[Request], now: float) -> float:
    arrivals: float = sum(map(_arrival, requests))
    return len(requests) * now - arrivals
