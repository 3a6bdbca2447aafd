"""Serves many independent queues at once, each by several tables: what several workers do, sooner than one at a time.

A step starts one batch in every queue, so numpy does for hundreds of queues what would take a loop for each. All tables
meet the same arrivals and the same luck. Rules are tables only: waits have no bound, and no row is refused.
tests/simulation/test_replicas.py holds it equal to `play`, which serves one queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.numerics import GammaQuantile
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.quantile import QuantileSampler
from weir.policy.solve.smdp import SteadyQueue
from weir.policy.solve.tables import Table, full_batch_table, limit_of, multi_worker_table, stacked

Ints = NDArray[np.int64]

# Of an estimate: a pilot shows how large batches are. Then each queue has so many batches, and so many more for each worker
# (where service times vary, workers soon forget that they started together; the second number), but at most MOST_BATCHES;
# and at least LONGEST times as many rows as wait with the probability RARE. Queues are served PART_ROWS rows at a time.
PILOT_QUEUES, PILOT_ROWS = 32, 1_000
BATCHES, BATCHES_EACH, MOST_BATCHES = 300, (150, 40), 4_000
LONGEST, RARE, MOST_ROWS = 6, 1e-3, 200_000
PART_ROWS, FEWEST_QUEUES, MOST_QUEUES, MOST_PARTS = 300_000, 16, 256, 4
ENOUGH = 0.003  # relative standard error of the mean at which an estimate is good enough
SHARE, LATE_COUNTS = 0.99, 0.03  # a relative error of the share of later rows counts as this part of one of the mean
BUSY = 0.7  # load from which on chance is that large
WARM = 0.2  # share of the rows of a queue that come before it counts
WIDEST, FINE = 6.0, 32  # normal scores are looked up within this many deviations, in steps of one by this
SAME_CV = 2  # decimals: coefficients of variation that agree so far have one law


class Draws(NamedTuple):
    """The chance in some queues.

    Attributes:
        rows: of each queue; a few more arrive, so that the last batch is as large as it would be.
        arrivals: at one row per unit of time; shape (queues, rows and the few more).
        luck: sums of normal scores, one of each row, before each row; the same shape, or none where service times do
            not vary. The sum over the rows of a batch decides its service time, so rules that cut other batches still
            have much the same luck.
    """

    rows: int
    arrivals: Floats
    luck: Floats


class ReplicaFigures(NamedTuple):
    """What each table does in each queue, for the rows that count. Shapes (tables, queues).

    Attributes:
        response_ms: mean response time in ms.
        excess_w: power in watts beyond the least energy of as many rows.
        power_w: mean power in watts.
        busy: share of the workers' time in which they are busy.
        times_ms: by table, the response times of all rows, queue by queue; only if they are wanted.
    """

    response_ms: Floats
    excess_w: Floats
    power_w: Floats
    busy: Floats
    batches: int
    times_ms: Sequence[Sequence[Floats]] = ()


@dataclass(frozen=True, eq=False)
class _Batches:
    """Batches of all queues, in any order: whose they are, their first row, rows, start and end in ms."""

    line: Ints
    first: Ints
    rows: Ints
    start: Floats
    end: Floats

    def some(self, which: NDArray[Any]) -> "_Batches":
        """Return those that `which` chooses, by truth or by place."""
        return _Batches(self.line[which], self.first[which], self.rows[which], self.start[which], self.end[which])


class Replicas:
    """Queues that are each served by `workers` workers with the costs of `profile`."""

    def __init__(self, profile: Profile, workers: int) -> None:
        self.profile, self.workers = profile, workers
        self._mean = np.append(0.0, profile.service_time_ms)
        cvs, laws = np.unique(np.round(profile.cv, SAME_CV), return_inverse=True)
        self._law = np.append(0, laws)  # by size, the row of `_quantiles`
        self._quantiles = quantiles(cvs) if cvs.any() else None

    def draws(self, queues: int, rows: int, seed: Sequence[int]) -> Draws:
        """Return the chance in that many queues of so many rows."""
        rng, shape = np.random.default_rng(seed), (queues, rows + self.profile.max_batch_size + 1)
        arrivals = np.cumsum(rng.standard_exponential(shape), axis=1)
        return Draws(
            rows, arrivals, np.empty(0) if self._quantiles is None else np.cumsum(rng.standard_normal(shape), axis=1)
        )

    def serve(self, rate: float, tables: Sequence[Table], draws: Draws, *, times: bool = False) -> ReplicaFigures:
        """Serve rows that arrive at `rate` per second by each of `tables`.

        Each table waits for its control limit and serves every longer queue. The response times of all rows are
        returned if `times`.
        """
        # Each queue has a time of its own, which begins after that of the one before. So all arrivals ascend.
        coming = draws.arrivals * (1000.0 / rate)
        coming = coming + 2.0 * float(coming[:, -1].max()) * np.arange(len(coming))[:, None]
        made = self._batches(coming, draws, tables)
        kept = made.first >= int(WARM * draws.rows)
        return self._summed(made.some(kept), coming, len(tables), times=times)

    def _batches(self, coming: Floats, draws: Draws, tables: Sequence[Table]) -> _Batches:
        """Serve the queues whose rows arrive at `coming`, shape (queues, rows), in ms. A line is a queue and a table."""
        queues, width = coming.shape
        arrivals, luck, entries = coming.ravel(), draws.luck.ravel(), stacked(tables).astype(np.int64)
        most = entries.shape[1] - 1
        line = np.arange(len(tables) * queues)
        limit, which, begin = (
            np.repeat([limit_of(each) for each in tables], queues),
            line // queues,
            line % queues * width,
        )
        head, last = begin.copy(), np.full(len(line), -np.inf)
        free = np.full((len(line), self.workers), -np.inf)
        found: list[tuple[Any, ...]] = []
        while len(line):
            places = np.arange(len(line))
            worker = free.argmin(axis=1)
            now = np.maximum(free[places, worker], arrivals[head + limit - 1])
            now = np.maximum(now, last, out=last)  # in the order of arrival
            rows = entries[which, np.minimum(np.searchsorted(arrivals, now, side="right") - head, most)]
            end = now + self._service_ms(rows, luck, head)
            free[places, worker] = end
            found.append((line, head - begin, rows, now.copy(), end))
            head = head + rows
            going = head - begin < draws.rows
            if not going.all():
                line, limit, which, begin, head, last, free = (
                    part[going] for part in (line, limit, which, begin, head, last, free)
                )
        return _Batches(*map(np.concatenate, zip(*found, strict=True)))

    def _service_ms(self, rows: Ints, luck: Floats, head: Ints) -> Floats:
        """Return how long batches of `rows` rows take, whose first rows are at `head`; shape (lines,), ms."""
        mean: Floats = self._mean[rows]
        if self._quantiles is None:
            return mean
        score = (luck[head + rows] - luck[head]) / np.sqrt(rows)
        at = np.clip((score + WIDEST) * FINE, 0.0, self._quantiles.shape[1] - 1.001)
        cell, law = at.astype(np.int64), self._law[rows]
        low, high = self._quantiles[law, cell], self._quantiles[law, cell + 1]
        return np.asarray(mean * (low + (at - cell) * (high - low)), dtype=np.float64)

    def _summed(self, made: _Batches, coming: Floats, tables: int, *, times: bool) -> ReplicaFigures:
        queues, width = coming.shape
        profile, lines = self.profile, tables * queues
        sums = np.cumsum(np.concatenate((np.zeros((queues, 1)), coming), axis=1), axis=1)
        queue = made.line % queues
        arrived_at = sums[queue, made.first + made.rows] - sums[queue, made.first]

        def total(values: NDArray[Any]) -> Floats:
            return np.asarray(np.bincount(made.line, values, lines), dtype=np.float64)

        rows = total(made.rows)
        start, stop = np.full(lines, np.inf), np.full(lines, -np.inf)
        np.minimum.at(start, made.line, made.start)
        np.maximum.at(stop, made.line, made.start)
        span = stop - start
        energy = profile.energy_mj[made.rows - 1]
        spare = energy - made.rows * float(np.min(profile.energy_mj / profile.sizes))
        shape, response = (tables, queues), total(made.end * made.rows - arrived_at) / rows
        served = ReplicaFigures(
            response.reshape(shape) + profile.latency_offset_ms, (total(spare) / span).reshape(shape), (total(energy) / span).reshape(shape),
            np.minimum(total(made.end - made.start) / span / self.workers, 1.0).reshape(shape), len(made.rows),
        )  # fmt: skip
        if not times:
            return served
        made = made.some(np.argsort(made.line, kind="stable"))  # by line, and in the order of their start
        first = made.line % queues * width + made.first - (np.cumsum(made.rows) - made.rows)
        row = np.repeat(first, made.rows) + np.arange(int(made.rows.sum()))
        took = np.repeat(made.end, made.rows) - coming.ravel()[row] + profile.latency_offset_ms
        parts = np.split(took, np.cumsum(rows[:-1]).astype(np.int64))
        return served._replace(times_ms=[parts[table * queues : (table + 1) * queues] for table in range(tables)])


# Of the limits that are tried first; how many of the best are looked at; and limits that are tried around each of them.
FIRST_RATIO, VALLEYS, TRIED = 1.3, 2, 7
SEARCH_QUEUES, SEARCH_ROWS, SEARCH_BATCHES = 24, 1_000, 100


def best_limit(replicas: Replicas, rate: float, latency_weight: float, energy_weight: float, seed: int) -> int:
    """Return the common control limit, in rows, with the least cost at `rate` rows per second in all.

    The cost may have several valleys: where service times hardly depend on the size, workers that never wait are all
    busy with small batches, and ones that wait for many rows are not. So limits of all sizes are tried first, and then
    those between the neighbours of the best few, until none is left between. All are tried on the same arrivals.
    """
    most = replicas.profile.best_batch_size
    costs: dict[int, float] = {}
    rows = SEARCH_ROWS + SEARCH_BATCHES * most
    draws = replicas.draws(SEARCH_QUEUES, rows, [seed, 0])

    def attempt(limits: set[int]) -> None:
        new = sorted(limits - costs.keys())
        if new:
            made = replicas.serve(rate, [multi_worker_table(replicas.profile, limit) for limit in new], draws)
            cost = latency_weight * made.response_ms + energy_weight * made.excess_w
            costs.update(zip(new, cost.mean(axis=1).tolist(), strict=True))

    attempt({1, most} | {int(FIRST_RATIO**power) for power in range(99) if FIRST_RATIO**power < most})
    while True:
        known = sorted(costs)
        between: set[int] = set()
        for best in sorted(costs, key=costs.__getitem__)[:VALLEYS]:
            at = known.index(best)
            low, high = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
            between |= set(np.unique(np.linspace(low, high, TRIED).astype(int)).tolist())
        if between <= costs.keys():
            return min(costs, key=costs.__getitem__)
        attempt(between)


class ReplicaEstimate(NamedTuple):
    """What a table does: mean and 99th percentile of the response time in ms, mean power in W, and the share of the
    workers' time in which they are busy. `error` is the relative standard error of the mean response time.
    """

    response_time_ms: float
    p99_ms: float
    power_w: float
    busy: float
    error: float


class Estimator:
    """Estimates what tables do at `rate` rows per second.

    How long queues are near capacity is mostly chance: so much that a million rows say little. But nearly all of that
    chance also strikes one worker that is as fast as all of them together, and what that one does is known exactly. So
    it serves the same queues, and these are then weighted such that its mean response time is the exact one (control
    variates by regression). These queues begin as long as its are at any instant. Below the load BUSY there is no need for that.
    """

    def __init__(self, replicas: Replicas, rate: float, seed: int, part_rows: int = PART_ROWS) -> None:
        profile = replicas.profile
        self.rate = rate
        self._replicas, self._seed, self._part_rows = replicas, seed, part_rows
        self._full = full_batch_table(profile)
        faster = replace(profile, service_time_ms=profile.service_time_ms / replicas.workers)
        self._one, self._known = Replicas(faster, 1), SteadyQueue(faster, rate / 1000.0, self._full)
        self._sampler = QuantileSampler(self._known)
        self._busy = rate > BUSY * replicas.workers * profile.max_rate
        self._spare = (replicas.workers - 1) * profile.best_batch_size // 2 if self._busy else 0

    def __call__(self, table: Table, enough: float = ENOUGH) -> ReplicaEstimate:
        """Return what `table` does, with an `error` of at most `enough` unless that takes too long."""
        seen = _Seen()
        for number in range(1, MOST_PARTS + 1):
            self._see(seen, table, number)
            found = seen.estimate()
            if found.error <= enough:
                break
        return found

    def late(self, table: Table, deadline_ms: float) -> tuple[float, float]:
        """Return the share of the rows that `table` answers after the deadline, and its standard error."""
        seen = _Seen()
        self._see(seen, table, 1)
        return seen.later_than(deadline_ms)

    def _see(self, seen: "_Seen", table: Table, number: int) -> None:
        offset = self._replicas.profile.latency_offset_ms
        draws = self._draws(*self._size(table), number)
        seen.parts.append(self._replicas.serve(self.rate, [table], draws, times=True))
        if not self._busy:
            seen.beyond.append(np.zeros(len(draws.arrivals)))
            seen.later.append(seen.beyond[-1])
            return
        one = self._one.serve(self.rate, [self._full], self._without_spare(draws), times=True)
        seen.beyond.append(one.response_ms[0] - self._known.rates.response_time_ms - offset)
        seen.later.append(
            np.array([np.mean(times > self._late_ms + offset) for times in one.times_ms[0]]) - (1.0 - SHARE)
        )

    @cached_property
    def _late_ms(self) -> float:
        return self._sampler.quantile_ms(SHARE)

    def _size(self, table: Table) -> tuple[int, int]:
        """Return how many queues are served at a time, and how many rows each has."""
        pilot = self._replicas.serve(self.rate, [table], self._draws(PILOT_QUEUES, PILOT_ROWS, 0))
        each = BATCHES_EACH[bool(self._replicas.profile.cv.any()) or not self._busy]
        batches = min(BATCHES + each * self._replicas.workers, MOST_BATCHES)
        longest = LONGEST * int(self._sampler.states(np.array([1.0 - RARE]))[0])
        rows = min(max(batches * PILOT_QUEUES * PILOT_ROWS / pilot.batches, longest), MOST_ROWS)
        return int(np.clip(self._part_rows / rows, FEWEST_QUEUES, MOST_QUEUES)), int(rows)

    def _draws(self, queues: int, rows: int, number: int) -> Draws:
        """Return chance for queues that are as long as the fast worker's are at any instant when their rows begin."""
        draws = self._replicas.draws(queues, rows + self._spare, [self._seed, number])
        if not self._busy:
            return draws
        rng = np.random.default_rng([self._seed, number, 1])
        first = self._spare + np.minimum(self._sampler.states(rng.random(queues)), rows // 2)
        begun = draws.arrivals - np.where(first, draws.arrivals[np.arange(queues), first - 1], 0.0)[:, None]
        return draws._replace(arrivals=np.maximum(begun, 0.0))

    def _without_spare(self, draws: Draws) -> Draws:
        """Return the same without the first rows, which the other workers have in hand while the fast one has none."""
        if not self._spare:
            return draws
        return Draws(draws.rows - self._spare, draws.arrivals[:, self._spare :], draws.luck[..., self._spare :])


class _Seen:
    """Some queues that were served: in parts what the table does in them, and by how much the fast worker's mean
    response time, and its share of late rows, are too high; shape (queues,).
    """

    def __init__(self) -> None:
        self.parts: list[ReplicaFigures] = []
        self.beyond: list[Floats] = []
        self.later: list[Floats] = []

    @property
    def _times(self) -> list[Floats]:
        return [each for part in self.parts for each in part.times_ms[0]]

    def later_than(self, deadline_ms: float) -> tuple[float, float]:
        """Return the share of the rows that are later, and its standard error."""
        late = np.array([np.mean(each > deadline_ms) for each in self._times])
        later = np.concatenate(self.later)
        return max(float(_weights(later) @ late), 0.0), _error(late, later)

    def estimate(self) -> ReplicaEstimate:
        """Return the means over all queues, by their weights."""
        beyond, later = np.concatenate(self.beyond), np.concatenate(self.later)
        response, power, busy = (
            np.concatenate([getattr(part, name)[0] for part in self.parts])
            for name in ("response_ms", "power_w", "busy")
        )
        weights = _weights(beyond)
        p99 = _quantile(self._times, _weights(later), SHARE)
        mean = float(weights @ response)
        late_error = self.later_than(p99)[1] / (1.0 - SHARE)
        error = max(_error(response, beyond) / mean, late_error * LATE_COUNTS)
        return ReplicaEstimate(mean, p99, float(weights @ power), float(weights @ busy), error)


def _weights(control: Floats) -> Floats:
    """Return the weights of queues with which the mean of `control` is 0; shape (queues,)."""
    off = control - control.mean()
    square = float(off @ off)
    slope = float(control.mean()) * len(off) / square if square else 0.0
    return np.asarray((1.0 - slope * off) / len(off), dtype=np.float64)


def _error(values: Floats, control: Floats) -> float:
    """Return the standard error of the mean of `values` with these weights."""
    off = control - control.mean()
    square = float(off @ off)
    left = values - values.mean() - (float(off @ values) / square if square else 0.0) * off
    return float(left.std()) / float(len(left) ** 0.5)


def _quantile(times: Sequence[Floats], weights: Floats, share: float) -> float:
    """Return the quantile of `times`, by queue, if each queue has its weight."""
    some = np.maximum(weights, 0.0)
    each = np.repeat(some / some.sum() / [len(part) for part in times], [len(part) for part in times])
    every = np.concatenate(times)
    late = every >= np.quantile(every[:: 1 + len(every) // 100_000], 1.0 - 4.0 * (1.0 - share))
    every, each = every[late], each[late]
    order = np.argsort(every)[::-1]
    return float(every[order[min(int(np.searchsorted(np.cumsum(each[order]), 1.0 - share)), len(order) - 1)]])


def quantiles(cvs: Floats) -> Floats:
    """Return the quantiles of Gamma laws of mean 1 with these coefficients of variation, by normal score; shape (laws,
    scores).
    """
    scores = np.arange(-WIDEST, WIDEST + 0.5 / FINE, 1.0 / FINE)
    shares = [NormalDist().cdf(score) for score in scores.tolist()]
    found = np.ones((len(cvs), len(scores)))
    for law in np.flatnonzero(cvs > 0.0).tolist():
        shape = 1.0 / float(cvs[law]) ** 2
        found[law] = np.array(list(map(GammaQuantile(shape), shares))) / shape
    return found
