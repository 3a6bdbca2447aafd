"""Counts what happens, a batch at a time.

One dictionary update or one pass over a batch per event: counting must not show in the time of a request.
exposition.py turns the counts into Prometheus' format when somebody asks.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

from weir.errors import ModelError, ModelNotFound, WeirError
from weir.messages import Dispatch, Reason, Request, Timing
from weir.telemetry.histogram import ROWS, SECONDS, Histogram

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
