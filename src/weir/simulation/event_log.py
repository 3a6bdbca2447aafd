"""What a simulation has seen: written per batch into plain lists, handed over in parts as arrays."""

from collections.abc import Callable, Sequence
from math import nan
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from weir.messages import Dispatch
from weir.simulation.requests import SimulatedRequest
from weir.simulation.traces import Floats, Ints

V = TypeVar("V", np.float64, np.int64)
PART = 65_536  # requests after which a part is handed over


class Batches(NamedTuple):
    """Batches in the order of their decisions. Instants are in seconds.

    `at` is when the batch was cut, `start` when its worker began it (later than `at` if the worker had another in flight)
    and `end` when the worker was done. `waiting` rows were in the line when it was decided; `reason` is a messages.Reason.
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
    """A part of what happened. Members are requests (`request` is the index), or pieces of divided ones, batch after batch.

    `end` is when a request was done; NaN for a piece after which others followed. `refused` and `expired` are
    the indices of requests that were never run.
    """

    batches: Batches
    request: Ints
    arrival: Floats
    end: Floats
    rows: Ints
    refused: Ints
    expired: Ints

    def of_batch(self, values: NDArray[V]) -> NDArray[V]:
        """Return a value per batch as a value per member."""
        return np.repeat(values, self.batches.requests)


class EventLog:
    """Hears of each batch, and hands parts to `sink`."""

    def __init__(self, sink: Callable[[LogPart], None]) -> None:
        self._sink = sink
        self._pieces: dict[int, tuple[int, float]] = {}  # of requests run in part: rows so far, latest end
        self._clear()

    def _clear(self) -> None:
        self._batches: list[float] = []  # the fields of Batches, batch after batch: no object per batch is kept
        self._index: list[int] = []
        self._arrival: list[float] = []
        # Where members are that have not one row and their batch's end, with their end and rows.
        self._odd: list[tuple[int, float, int]] = []
        self.refused: list[int] = []
        self.expired: list[int] = []

    def started(self, cut: Dispatch, requests: list[SimulatedRequest], start: float, end: float) -> None:
        """A batch was cut; when it starts and ends is known already."""
        self._batches += (cut.at, start, end, cut.rows, cut.worker, cut.reason, cut.waiting, len(requests))
        if not cut.plain:
            self._divided(cut, requests, end)
        self._index += [request.index for request in requests]
        self._arrival += [request.arrival for request in requests]
        if len(self._index) >= PART:
            self.hand_over()

    def _divided(self, cut: Dispatch, requests: list[SimulatedRequest], end: float) -> None:
        slices = cut.slices or [None] * len(requests)
        for place, (request, part) in enumerate(zip(requests, slices, strict=True), len(self._index)):
            rows = request.rows if part is None else part[1] - part[0]
            before, latest = self._pieces.pop(request.index, (0, end))
            latest = max(latest, end)
            if before + rows < request.rows:
                self._pieces[request.index] = (before + rows, latest)
                latest = nan
            self._odd.append((place, latest, rows))

    def lost(self, index: int) -> None:
        """A request has left the line at its deadline, with all or a part of it never run."""
        self._pieces.pop(index, None)
        self.expired.append(index)

    def hand_over(self) -> None:
        """Hand over what has been seen since the last time."""
        columns = [self._batches[field :: len(Batches._fields)] for field in range(len(Batches._fields))]
        at, start, end_of_batch = map(_floats, columns[:3])
        batches = Batches(at, start, end_of_batch, *map(_ints, columns[3:]))
        end = np.repeat(end_of_batch, batches.requests)
        rows = np.ones(len(end), dtype=np.int64)
        if self._odd:
            places, ends, sizes = zip(*self._odd, strict=True)
            end[list(places)], rows[list(places)] = ends, sizes
        part = LogPart(
            batches, _ints(self._index), _floats(self._arrival), end, rows, _ints(self.refused), _ints(self.expired)
        )
        self._clear()
        self._sink(part)


def _floats(values: list[float]) -> Floats:
    return np.fromiter(values, np.float64, len(values))


def _ints(values: Sequence[float]) -> Ints:
    return np.fromiter(values, np.int64, len(values))
