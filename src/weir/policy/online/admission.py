"""Admits rows where a latency is promised: those that will have their responses in time, whatever comes later.

The rows that wait are planned as batches, in their order: each batch on the worker that is free first, and as large as
leaves its own first row in time. A row that finds room in a planned batch joins it. A row that finds none begins
another batch, but only if that could still grow to `least` rows in time; otherwise it is refused. So a queue that is
long by chance is served in batches of many sizes, and one that stays long in batches of nearly `least` rows, which
serve nearly as many rows per second as any. Nothing needs to know whether there is an overload.

Rows that join a batch behind its first one never delay those before them. So where service times are exact, every
admitted row is in time for any arrivals. Where they vary, the objective's slack covers that.
"""

from bisect import bisect_right
from heapq import heapreplace
from math import inf
from typing import NamedTuple

import numpy as np

from weir.policy.cost import ROUNDING, Floats, LatencySLO, Profile
from weir.policy.solve.tables import Table, multi_worker_table

# A batch serves at least this share of the rows per second that the best one does. Smaller batches would let more rows
# begin one, and refuse less while a queue is long by chance. Under overload the rows per second decide.
NEARLY, FULLY = 0.96, 0.99
# The true rate may be higher than its estimate by this factor, a standard error of it. Beyond the highest rate of a
# bank it is taken as OVERLOAD times the capacity.
HIGHER, OVERLOAD = 1.1, 1.5


class AdmissionGate(NamedTuple):
    """Admits rows at one arrival rate.

    Attributes:
        times: service time in seconds by rows, from 0 on.
        within: seconds from the arrival of a row to the end of its batch, at most.
        least: a row begins a batch only if that could still grow to that many rows.
        depth: batches that a worker holds at a time.
        spacing: two batches start at least that many seconds apart.
    """

    times: tuple[float, ...]
    within: float
    least: int
    depth: int = 1
    spacing: float = 0.0


class AdmissionPlan:
    """The batches in which the rows that wait will be served. `bound` is the number of rows for which they have room."""

    __slots__ = ("_ends", "_firsts", "_gate", "_planned", "_spaced", "bound", "next", "waits_by")

    def __init__(self) -> None:
        self.bound = 0
        self.waits_by: AdmissionGate | None = None  # the gate if nothing was dispatched last
        self._gate = AdmissionGate((0.0,), 0.0, 0)
        self._ends: list[float] = []  # when each worker will have served what it has, in seconds; ascending
        self._planned: list[float] = []  # the same if it also serves the planned batches; a heap
        self.next = self._spaced = -inf  # from when on a batch may start: the next, and the one after those planned
        self._firsts: list[tuple[int, float]] = []  # first row of each planned batch: its index, and its arrival

    def dispatch(
        self,
        gate: AdmissionGate,
        rows: int,
        waiting: int,
        now: float,
        oldest: float,
        last: float,
        idle: int,
        workers: int,
    ) -> None:
        """Plan again because `rows` of `waiting` rows are dispatched at `now`, or none are because the policy waits.

        `oldest` and `last` are the instants at which the first and the last of them arrived, in seconds. Of the
        `workers` workers, `idle` are surely idle before that.
        """
        times, ends = gate.times, self._ends
        self.waits_by = None if rows else gate
        if len(ends) != workers:
            ends = [now] * workers
        longest = now + gate.depth * times[-1]
        ends = [now if each < idle else min(max(end, now), longest) for each, end in enumerate(ends)]
        ends[0] += times[rows]
        ends.sort()
        self._gate, self._ends, self._planned = gate, ends, ends.copy()
        known = [(0, oldest), *self._firsts, (waiting - 1, last)]
        self._firsts, self.bound = [], 0
        self.next = self._spaced = now + gate.spacing if rows else now
        if not rows:  # a batch of any size will be dispatched in time
            self._add(oldest, len(times) - 1)
        self._plan_known(known, rows, waiting - rows)

    def _plan_known(self, known: list[tuple[int, float]], before: int, waiting: int) -> None:
        """Plan batches for `waiting` rows of those in `known`, the first of which has the index `before`.

        This is the work of every dispatch, so `_fitting` and `_add` are written out.
        """
        (times, within, _, _, spacing), planned, firsts = self._gate, self._planned, self._firsts
        bound, spaced, at = self.bound, self._spaced, 0
        end = len(known) - 1
        while bound < waiting:
            row = bound + before
            while at < end and known[at + 1][0] <= row:
                at += 1
            (low, first), (high, following) = known[at], known[min(at + 1, end)]
            first += (following - first) * (row - low) / max(high - low, 1)  # at even gaps between those that are known
            start = max(planned[0], spaced)
            fitting = bisect_right(times, within - (start - first) + ROUNDING) - 1
            if fitting <= 0:
                self._give_up(first, bound, waiting)
                bound = waiting
                break
            firsts.append((bound, first))
            bound += fitting
            heapreplace(planned, start + times[fitting])
            spaced = start + spacing
        self.bound, self._spaced = bound, spaced

    def full(self, now: float) -> int:
        """Return `bound` as of `now` (seconds): an arrival has found that many rows waiting."""
        if now >= self.opens:
            self._spaced = max(self._spaced, now)
            self._add(now, self._fitting(now))
        return self.bound

    @property
    def opens(self) -> float:
        """The instant in seconds from which on a row may begin another batch."""
        gate = self._gate
        return self._start + gate.times[gate.least] - gate.within - ROUNDING if self._planned else inf

    @property
    def _start(self) -> float:
        """The instant in seconds at which the batch after those that are planned starts."""
        return max(self._planned[0], self._spaced)

    @property
    def first(self) -> int | None:
        """The size of the next batch as planned, in rows; None if no row was expected."""
        return (self._firsts[1][0] if len(self._firsts) > 1 else self.bound) or None

    def _fitting(self, first: float) -> int:
        """Return the largest next batch, in rows, whose first row is in time if it arrived at `first` (seconds)."""
        return max(bisect_right(self._gate.times, self._gate.within - (self._start - first) + ROUNDING) - 1, 0)

    def _add(self, first: float, rows: int) -> None:
        self._firsts.append((self.bound, first))
        self.bound += rows
        start = self._start
        heapreplace(self._planned, start + self._gate.times[rows])
        self._spaced = start + self._gate.spacing

    def _give_up(self, first: float, row: int, waiting: int) -> None:
        """Plan full batches for the rows from the index `row` on, the first of which arrived at `first`: they are late anyway."""
        times = self._gate.times
        batches = -(-(waiting - row) // (len(times) - 1))
        rounds = -(-batches // len(self._planned))
        self._planned = [end + rounds * times[-1] for end in self._planned]
        self._firsts.append((row, first))


class Admission(NamedTuple):
    """Says what an objective admits. `times`, `within`, `depth` and `spacing` are those of its gates."""

    times: tuple[float, ...]
    within: float
    depth: int
    workers: int
    spacing: float = 0.0

    @property
    def largest(self) -> int:
        """The largest batch in rows."""
        return len(self.times) - 1

    @property
    def overload(self) -> AdmissionGate:
        """The gate for arrival rates that exceed what can be served."""
        times = np.array(self.times[1:])
        capacity = self.workers * float(np.max(np.arange(1, len(times) + 1) / times))
        return self.gate_at(OVERLOAD * capacity, FULLY)

    @property
    def max_waiting(self) -> int:
        """The most rows that may wait under overload, just after batches of `least` rows have started on all workers."""
        plan, gate = AdmissionPlan(), self.overload
        for number in range(self.workers * self.depth):
            plan.dispatch(gate, gate.least, gate.least, 0.0, 0.0, 0.0, max(self.workers - number, 0), self.workers)
        while plan.opens <= 0.0:
            plan.full(0.0)
        return plan.bound or self.largest

    def gate_at(self, rate: float, share: float = NEARLY) -> AdmissionGate:
        """Return the gate at `rate` rows per second, for batches that serve at least this share of what the best do.

        Its `least` is the smallest such batch. Where a batch can only begin shortly before a worker is free, only so
        many rows come in time to join it.
        """
        times, rate = np.array(self.times), HIGHER * rate
        coming = np.floor(rate * (self.within - times[1:]) + ROUNDING).astype(np.int64)
        rows = np.minimum(np.arange(1, len(times)), np.maximum(coming, 1))
        speeds = rows / times[rows]
        least = int(np.argmax(speeds >= share * float(speeds.max()))) + 1
        return AdmissionGate(self.times, self.within, least, self.depth, self.spacing)

    def waits(self, allowance: Floats) -> Floats:
        """Return how long the oldest of n waiting rows may wait on purpose, given for how long a batch of n may, in
        seconds; both of shape (max_batch_size + 1,).

        Where no row is in time behind a batch that has just started, that is until a batch of one row more must start:
        a row that comes later would have to stay behind.
        """
        behind = self.times[self.overload.least] + self.times[1] <= self.within
        return allowance if behind or self.workers * self.depth > 1 else np.append(allowance[1:], allowance[-1:])

    def table(self, profile: Profile, limit: int = 1) -> Table:
        """Return the table that waits for `limit` rows and then takes full batches, none above `largest`."""
        return multi_worker_table(profile, limit)[: self.largest + 1]


def admission(profile: Profile, objective: LatencySLO, workers: int = 1) -> Admission | None:
    """Return what `objective` admits; None if even a row that is served alone may be late.

    Args:
        profile: the costs of a batch on one worker.
        objective: the latency SLO.
        workers: the number of workers that serve the queue.
    """
    times = profile.service_time_ms[: profile.best_batch_size] / 1000.0
    # Where refusals count, the margin only applies to waits on purpose.
    spared = objective.slack if objective.counts_refusals else max(objective.margin, objective.slack)
    within = objective.deadline - spared - profile.latency_offset_ms / 1000.0
    largest = int(np.searchsorted(times, within + ROUNDING, side="right"))
    if not largest:
        return None
    made = Admission((0.0, *times[:largest].tolist()), within, profile.pipeline_depth, workers)
    places = workers * profile.pipeline_depth
    apart = _fastest(times, within / (1.0 + 1.0 / places))
    if _speed(times, _fastest(times, within / 2.0)) < FULLY * _speed(times, apart) and places > 1:
        return made._replace(times=made.times[: apart + 1], spacing=made.times[apart] / places)
    return made


# If all workers start at once, a row that comes right behind waits for two batches: 2·τ(b) must be within D. If two
# batches start at least τ(b)/c apart, a worker is free after as long, and (1 + 1/c)·τ(b) must. Batches are spaced like
# that where they then serve more rows per second. docs/explanation/beyond-the-paper.md has the details.


def _fastest(times: Floats, within: float) -> int:
    """Return which batch, in rows, of those that take at most `within` seconds serves the most per second; 0: none."""
    speeds = np.where(times <= within + ROUNDING, np.arange(1, len(times) + 1) / times, 0.0)
    return len(times) - int(np.argmax(speeds[::-1])) if speeds.any() else 0


def _speed(times: Floats, rows: int) -> float:
    return rows / float(times[rows - 1])
