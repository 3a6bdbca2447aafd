"""Serves many independent queues at once, each by several tables: what several workers do, sooner than one at a time.

A step starts one batch in every queue, so numpy does for hundreds of queues what would take a loop for each. All tables
meet the same arrivals and the same luck. Rules are tables only: waits have no bound, and no row is refused.
tests/simulation/test_replicas.py holds it equal to `play`, which serves one queue.
"""

from collections.abc import Callable, Sequence
from copy import copy
from math import inf, log
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.numerics import GammaQuantile
from weir.policy.cost import Floats, Prices, Profile
from weir.policy.solve.tables import Table, limit_of, multi_worker_table, stacked

Ints = NDArray[np.int64]

# Of an estimate: each queue has about this many batches, and this many more for each worker (where service times vary, workers
# soon forget that they started together; the second number), but at most MOST_BATCHES; and at least LONGEST times as many
# rows as wait with the probability RARE. Queues are served PART_ROWS rows at a time.
BATCHES, BATCHES_EACH, MOST_BATCHES = 300, (150, 40), 4_000
LONGEST, RARE, MOST_ROWS = 2, 1e-3, 200_000
PART_ROWS, FEWEST_QUEUES, MOST_QUEUES, MOST_PARTS = 300_000, 24, 256, 27
ENOUGH = 0.003  # relative standard error of the mean at which an estimate is good enough
SHARE, LATE_COUNTS = 0.99, 0.1  # a relative error of the share of later rows counts as this part of one of the mean
LEAST_SPARE = 0.003  # of the workers: where fewer are spare, queues begin as if this many were
WARM = 0.2  # share of the rows of a queue that come before it counts
WIDEST, FINE = 6.0, 32  # normal scores are looked up within this many deviations, in steps of one by this
SAME_CV = 2  # decimals: coefficients of variation that agree so far are the same
TOGETHER = 4_000_000  # rows of the cases that are served at once: many short ones, or a long one alone


class Draws(NamedTuple):
    """The chance in some queues.

    Attributes:
        warm: rows of each queue that come before it counts.
        rows: of each queue, with those; a few more arrive, so that the last batch is as large as it would be.
        arrivals: at one row per unit of time; shape (queues, rows and the few more).
        luck: sums of normal scores, one of each row, before each row; the same shape, or none where service times do
            not vary. The sum over the rows of a batch decides its service time, so rules that cut other batches still
            have much the same luck.
    """

    warm: int
    rows: int
    arrivals: Floats
    luck: Floats


class ReplicaCase(NamedTuple):
    """Says what is served at once with others: rows that arrive at `rate` per second, by each of `tables`."""

    rate: float
    tables: Sequence[Table]
    draws: Draws


class ReplicaFigures(NamedTuple):
    """Says what each table does in each queue, for the rows that count. Shapes (tables, queues).

    Attributes:
        response_ms: mean response time in ms.
        excess_w: power in watts beyond the least energy of as many rows.
        power_w: mean power in watts.
        busy: share of the workers' time in which they are busy.
        batches: how many they are.
        times_ms: by table, the response times of all rows, queue by queue; only if they are wanted.
        work: of each queue, likewise; it is of use if there is one table.
    """

    response_ms: Floats
    excess_w: Floats
    power_w: Floats
    busy: Floats
    batches: Ints
    times_ms: Sequence[Sequence[Floats]] = ()
    work: "Work | None" = None


class _Batches(NamedTuple):
    """Batches of some queues: whose they are, their first row, rows, start and end in ms; and just before their start, how
    many rows wait, and for how many ms the workers still work.
    """

    line: Ints
    first: Ints
    rows: Ints
    start: Floats
    end: Floats
    waiting: Ints
    left: Floats

    def some(self, which: NDArray[Any] | slice) -> "_Batches":
        """Return those that `which` chooses, by truth or by place."""
        return _Batches._make(part[which] for part in self)


class Replicas:
    """Queues that are each served by `workers` workers with the costs of `profile`."""

    def __init__(self, profile: Profile, workers: int) -> None:
        self.profile, self.workers = profile, workers
        self._mean = np.append(0.0, profile.service_time_ms)
        cvs, laws = np.unique(np.round(profile.cv, SAME_CV), return_inverse=True)
        self._law = np.append(0, laws)  # by size, the row of `_quantiles`
        self._quantiles = quantiles(cvs) if cvs.any() else None

    def with_workers(self, workers: int) -> "Replicas":
        """Return queues that are served by that many of these workers; what does not depend on the number is shared."""
        made = copy(self)
        made.workers = workers
        return made

    def draws(self, queues: int, rows: int, seed: Sequence[int]) -> Draws:
        """Return the chance in that many queues of that many rows."""
        rng, shape = np.random.default_rng(seed), (queues, rows + self.profile.max_batch_size + 1)
        arrivals = np.cumsum(rng.standard_exponential(shape), axis=1)
        return Draws(
            int(WARM * rows),
            rows,
            arrivals,
            np.empty(0) if self._quantiles is None else np.cumsum(rng.standard_normal(shape), axis=1),
        )

    def serve(self, rate: float, tables: Sequence[Table], draws: Draws, *, times: bool = False) -> ReplicaFigures:
        """Serve rows that arrive at `rate` per second by each of `tables`.

        Each table waits for its control limit and serves every longer queue. The response times of all rows and the work
        are returned if `times`.
        """
        return self.serve_all([ReplicaCase(rate, tables, draws)], times=times)[0]

    def serve_all(self, cases: Sequence[ReplicaCase], *, times: bool = False) -> list[ReplicaFigures]:
        """Serve all `cases`, as `serve` does each: as many at once as are TOGETHER rows."""
        found: list[ReplicaFigures] = []
        rows = np.cumsum([case.draws.arrivals.size for case in cases]) // TOGETHER
        for part in sorted(set(rows.tolist())):
            found += self._served(
                [case for case, each in zip(cases, rows.tolist(), strict=True) if each == part], times=times
            )
        return found

    def _served(self, cases: Sequence[ReplicaCase], *, times: bool) -> list[ReplicaFigures]:
        coming = [case.draws.arrivals * (1000.0 / case.rate) for case in cases]
        # Each queue has a time of its own, which begins after that of the one before. So all arrivals ascend.
        spans = np.repeat([2.0 * float(each[:, -1].max()) for each in coming], [len(each) for each in coming])
        begins = np.split(np.cumsum(spans) - spans, np.cumsum([len(each) for each in coming])[:-1])
        made = self._batches(cases, [each + begin[:, None] for each, begin in zip(coming, begins, strict=True)])
        ends = np.cumsum([len(case.tables) * len(case.draws.arrivals) for case in cases])
        places = np.append(0, np.searchsorted(made.line, ends))
        found = []
        for case, arrivals, begin, low, high in zip(cases, coming, begins, places, places[1:], strict=False):
            part = made.some(slice(low, high))
            part = part.some(part.first >= case.draws.warm)
            line = part.line - made.line[low]
            own = begin[line % len(begin)]
            part = part._replace(line=line, start=part.start - own, end=part.end - own)
            figures = self._summed(part, arrivals, len(case.tables), times=times)
            found.append(figures._replace(work=self._work(part, case)) if times else figures)
        return found

    def _batches(self, cases: Sequence[ReplicaCase], coming: Sequence[Floats]) -> _Batches:
        """Serve the queues whose rows arrive at `coming`, by case of shape (queues, rows), in ms. A line is a queue and a
        table. Return the batches by line, and in the order of their start.
        """
        arrivals = np.concatenate([each.ravel() for each in coming])
        luck = np.concatenate([case.draws.luck.ravel() for case in cases])
        tables = [table for case in cases for table in case.tables]
        entries = stacked(tables).astype(np.int64)
        most = entries.shape[1] - 1
        begin, goal = _lines(cases, coming)
        which = np.repeat(
            np.arange(len(tables)), [len(each) for case, each in zip(cases, coming, strict=True) for _ in case.tables]
        )
        line, limit = np.arange(len(which)), np.array([limit_of(each) for each in tables])[which]
        head, last = begin.copy(), np.full(len(line), -np.inf)
        free = np.full((len(line), self.workers), -np.inf)
        found: list[tuple[Any, ...]] = []
        while len(line):
            places = np.arange(len(line))
            worker = free.argmin(axis=1)
            now = np.maximum(free[places, worker], arrivals[head + limit - 1])
            now = np.maximum(now, last, out=last)  # in the order of arrival
            waiting = arrivals.searchsorted(now, side="right") - head
            rows = entries[which, np.minimum(waiting, most)]
            end = now + self._service_ms(rows, luck, head)
            left = np.maximum(free - now[:, None], 0.0).sum(axis=1)
            free[places, worker] = end
            found.append((line, head - begin, rows, now.copy(), end, waiting, left))
            head = head + rows
            going = head < goal
            if not going.all():
                line, limit, which, begin, goal, head, last, free = (
                    part[going] for part in (line, limit, which, begin, goal, head, last, free)
                )
        made = _Batches(*map(np.concatenate, zip(*found, strict=True)))
        return made.some(np.argsort(made.line, kind="stable"))

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

    def _work(self, made: _Batches, case: ReplicaCase) -> "Work":
        row_ms = self.row_ms(case.tables[0])
        before, taken = made.left + row_ms * made.waiting, made.end - made.start
        arrived = np.diff(made.first + made.waiting) - case.rate / 1000.0 * np.diff(made.start)
        steps = made.line[1:] == made.line[:-1]
        first, after, longer = (
            part[:-1][steps] for part in (before, before + taken - row_ms * made.rows, taken - self._mean[made.rows])
        )
        queues = len(case.tables) * len(case.draws.arrivals)
        return Work(queues, made.line[:-1][steps], first, after, before[1:][steps], longer, row_ms * arrived[steps])

    def row_ms(self, table: Table) -> float:
        """Return the share of a row in the longest queue's batch, in ms of a worker."""
        return float(self._mean[table[-1]] / table[-1])

    def _summed(self, made: _Batches, coming: Floats, tables: int, *, times: bool) -> ReplicaFigures:
        queues, width = coming.shape
        profile, lines = self.profile, tables * queues
        sums = np.cumsum(np.concatenate((np.zeros((queues, 1)), coming), axis=1), axis=1)
        queue = made.line % queues
        arrived_at = sums[queue, made.first + made.rows] - sums[queue, made.first]

        def total(values: NDArray[Any]) -> Floats:
            return np.asarray(np.bincount(made.line, values, lines), dtype=np.float64)

        rows = total(made.rows)
        ends = np.searchsorted(made.line, np.arange(lines), side="right")
        span = made.start[ends - 1] - made.start[np.append(0, ends[:-1])]
        energy = profile.energy_mj[made.rows - 1]
        spare = energy - made.rows * float(np.min(profile.energy_mj / profile.sizes))
        shape, response = (tables, queues), total(made.end * made.rows - arrived_at) / rows
        served = ReplicaFigures(
            response.reshape(shape) + profile.latency_offset_ms,
            (total(spare) / span).reshape(shape),
            (total(energy) / span).reshape(shape),
            np.minimum(total(made.end - made.start) / span / self.workers, 1.0).reshape(shape),
            np.diff(ends, prepend=0).reshape(shape),
        )
        if not times:
            return served
        first = made.line % queues * width + made.first - (np.cumsum(made.rows) - made.rows)
        row = np.repeat(first, made.rows) + np.arange(int(made.rows.sum()))
        took = np.repeat(made.end, made.rows) - coming.ravel()[row] + profile.latency_offset_ms
        parts = np.split(took, np.cumsum(rows[:-1]).astype(np.int64))
        return served._replace(times_ms=[parts[table * queues : (table + 1) * queues] for table in range(tables)])


class Work(NamedTuple):
    """The work of each queue: what is left of its batches, and the mean share in a full batch of each row that waits; ms of a
    worker. All are of shape (steps,); a step leads from just before the start of a batch to just before that of the next.

    Attributes:
        queues: how many they are.
        queue: whose step it is.
        before, after, next: the work just before and after the start of the batch, and at the step's end.
        longer: by how much the batch takes longer than on the mean.
        more: the work of the rows that arrive in the step beyond the mean.
    """

    queues: int
    queue: Ints
    before: Floats
    after: Floats
    next: Floats
    longer: Floats
    more: Floats

    def drift(self, value: Callable[[Floats], Floats], slope: Callable[[Floats], Floats]) -> Floats:
        """Return by queue by how much a function of the work, with that slope, changes but for what is luck: what comes
        after the work that decides the slope, and is nothing on the mean. Over a long time these changes are nothing on
        the mean.
        """
        luck = slope(self.before) * self.longer + slope(self.after) * self.more
        changed = value(self.next) - value(self.before)
        return np.asarray(np.bincount(self.queue, changed - luck, self.queues), dtype=np.float64)


def _lines(cases: Sequence[ReplicaCase], coming: Sequence[Floats]) -> tuple[Ints, Ints]:
    """Return, by line, the place of its queue's first row among all, and that of the first row beyond its rows."""
    found, before = [], 0
    for case, each in zip(cases, coming, strict=True):
        begin = np.tile(before + each.shape[1] * np.arange(len(each)), len(case.tables))
        found.append((begin, begin + case.draws.rows))
        before += each.size
    begins, goals = (np.concatenate(part) for part in zip(*found, strict=True))
    return begins, goals


# Of the limits that are tried first; how many of the best are looked at; and limits that are tried around each of them.
FIRST_RATIO, VALLEYS, TRIED = 1.3, 2, 7
SEARCH_QUEUES, SEARCH_ROWS, SEARCH_BATCHES = 24, 1_000, 100
# The first limits are tried on this part of the rows. Ones that are worse by this many standard errors, and by that share of
# the least cost, are left; the others are tried on at least this many batches as large as theirs, if that is fewer rows.
FIRST_PART, WORSE, WORSE_BY, OWN_BATCHES = 0.2, 3.0, 0.02, 500


def best_tables(replicas: Replicas, rates: Sequence[float], prices: Prices, seed: int) -> list[Table]:
    """Return for each rate, in rows per second in all, the table with the common control limit that costs least.

    The cost may have several valleys: where service times hardly depend on the size, workers that never wait are all
    busy with small batches, and ones that wait for many rows are not. So limits of all sizes are tried first, and then
    those between the neighbours of the best few, until none is left between. All are tried on the same arrivals.
    """
    most = replicas.profile.best_batch_size
    draws = replicas.draws(SEARCH_QUEUES, SEARCH_ROWS + SEARCH_BATCHES * most, [seed, 0])
    searches = [_LimitSearch(replicas.profile, rate, prices) for rate in rates]
    while going := [search for search in searches if search.next]:
        cases = [
            ReplicaCase(
                search.rate,
                [multi_worker_table(replicas.profile, limit) for limit in search.next],
                _first(draws, search.rows, most),
            )
            for search in going
        ]
        for search, made in zip(going, replicas.serve_all(cases), strict=True):
            search.learn(made)
    return [multi_worker_table(replicas.profile, search.best) for search in searches]


def _first(draws: Draws, rows: int, most: int) -> Draws:
    """Return the first rows of each queue, and the few more: at most `most`."""
    width = rows + most + 1
    return Draws(int(WARM * rows), rows, draws.arrivals[:, :width], draws.luck[..., :width])


class _LimitSearch:
    """The search for the best limit at one rate.

    Attributes:
        rate: rows per second.
        next: the limits to try next, ascending; none when it is over.
        rows: of each queue in which they are tried.
    """

    def __init__(self, profile: Profile, rate: float, prices: Prices) -> None:
        self.rate, self._weights = rate, (prices.latency_weight_at(rate), prices.energy_weight)
        most = self._most = profile.best_batch_size
        self.next = sorted({1, most} | {int(FIRST_RATIO**power) for power in range(99) if FIRST_RATIO**power < most})
        self._all_rows = SEARCH_ROWS + SEARCH_BATCHES * most
        self.rows = int(FIRST_PART * self._all_rows)
        self._first = True
        self._costs: dict[int, float] = {}

    @property
    def best(self) -> int:
        """The best limit so far."""
        return min(self._costs, key=self._costs.__getitem__)

    def learn(self, made: ReplicaFigures) -> None:
        """Learn what the limits in `next` do, and choose the next ones."""
        latency, energy = self._weights
        cost = latency * made.response_ms + energy * made.excess_w
        self._costs.update(zip(self.next, cost.mean(axis=1).tolist(), strict=True))
        if self._first:
            self._first = False
            self.next = self._contenders(cost, made)
        else:
            self.next = self._between()

    def _contenders(self, cost: Floats, made: ReplicaFigures) -> list[int]:
        """Return the limits that may be the best, with their neighbours, and set `rows` for them."""
        least = int(cost.mean(axis=1).argmin())
        beyond = cost - cost[least]
        error = beyond.std(axis=1) / float(cost.shape[1]) ** 0.5
        good = beyond.mean(axis=1) <= np.maximum(WORSE * error, WORSE_BY * abs(float(cost[least].mean())))
        largest = (1.0 - WARM) * self.rows * cost.shape[1] / float(made.batches[good].sum(axis=1).min())
        self.rows = min(SEARCH_ROWS + int(OWN_BATCHES * largest), self._all_rows)
        near = good | np.append(good[1:], False) | np.append(False, good[:-1])
        self._costs = {}
        return [limit for limit, kept in zip(self.next, near.tolist(), strict=True) if kept]

    def _between(self) -> list[int]:
        """Return the limits between the neighbours of the best few."""
        known = sorted(self._costs)
        between: set[int] = set()
        for best in sorted(self._costs, key=self._costs.__getitem__)[:VALLEYS]:
            at = known.index(best)
            low, high = known[max(at - 1, 0)], known[min(at + 1, len(known) - 1)]
            between |= set(np.unique(np.linspace(low, high, TRIED).astype(int)).tolist())
        return sorted(between - self._costs.keys())


class ReplicaEstimate(NamedTuple):
    """Says what a table does: mean and 99th percentile of the response time in ms, mean power in W, and the share of the
    workers' time in which they are busy. `error` is the relative standard error of the mean response time.
    """

    response_time_ms: float
    p99_ms: float
    power_w: float
    busy: float
    error: float


def estimate(replicas: Replicas, rate: float, table: Table, seed: int) -> ReplicaEstimate:
    """Return what `table` does at `rate` rows per second, with an `error` of at most ENOUGH unless that takes too long."""
    return looks(replicas, [(rate, table)], seed, enough=ENOUGH)[0].estimate()


def looks(
    replicas: Replicas, pairs: Sequence[tuple[float, Table]], seed: int, part_rows: int = PART_ROWS, enough: float = inf
) -> list["SeenQueues"]:
    """Return what is seen of each rate (rows per second) and table, until the `error` is at most `enough` or that takes
    too long. They are served at once.
    """
    found = left = [SeenQueues(replicas, rate, table, seed) for rate, table in pairs]
    sizes = {each: each.size(part_rows) for each in found}
    looked = 1
    for number in range(1, MOST_PARTS + 1):
        cases = [each.case(*sizes[each], number) for each in left]
        for each, part in zip(left, replicas.serve_all(cases, times=True), strict=True):
            each.add(part)
        if number == looked:
            looked += (number + 1) // 2  # more and more seldom: each look takes longer
            left = [each for each in left if enough < inf and each.estimate().error > enough]
        if not left:
            break
    return found


class SeenQueues:
    """Some queues that `table` serves at `rate` rows per second, in parts, and what is estimated from them.

    How long queues are near capacity is mostly chance: so much that a million rows say little. But where the work drifts is
    known. While all workers are busy with full batches it falls by the workers that are to spare, whatever its size; else
    queues are short, and soon forget how they began. So three functions of the work are followed whose changes nearly say
    how many rows waited, and how many for long. Over a long time these changes are nothing on the mean, and the queues
    are weighted such that they are nothing here (control variates by regression). This also makes up for how the queues
    began: as long as if the work that is more than keeps the workers busy were exponential.
    """

    def __init__(self, replicas: Replicas, rate: float, table: Table, seed: int) -> None:
        self._replicas, self._rate, self._table, self._seed = replicas, rate, table, seed
        profile, full, self._row_ms = replicas.profile, int(table[-1]), replicas.row_ms(table)
        self._batch_ms, square = full * self._row_ms, float(profile.cv[full - 1]) ** 2
        used = rate / 1000.0 * self._row_ms  # workers
        self._stable = used < replicas.workers
        chance = rate / 1000.0 * (self._row_ms**2 + square * self._batch_ms**2 / full)
        # Of the work, in ms: the mean of what is beyond that which keeps the workers busy, and that.
        self._beyond = chance / (2.0 * max(replicas.workers - used, LEAST_SPARE * replicas.workers))
        self._busy = min(used, replicas.workers) * self._batch_ms * (1.0 + square) / 2.0
        self._longest = min(int((self._busy - log(RARE) * self._beyond) / self._row_ms), MOST_ROWS // LONGEST)
        self._parts: list[ReplicaFigures] = []

    def size(self, part_rows: int) -> tuple[int, int]:
        """Return how many queues are served at a time, and how many rows each has."""
        replicas, sizes = self._replicas, np.arange(limit_of(self._table), int(self._table[-1]) + 1)
        enough = self._rate / 1000.0 * replicas.profile.service_time_ms[sizes - 1] <= replicas.workers * sizes
        batch = int(sizes[enough.argmax() if enough.any() else -1])  # the smallest that the workers can keep up with
        batches = BATCHES + BATCHES_EACH[bool(replicas.profile.cv.any())] * replicas.workers
        rows = max(min(batches, MOST_BATCHES) * batch, LONGEST * self._longest)
        rows = self._longest + min(rows, MOST_ROWS)
        return int(np.clip(part_rows / rows, FEWEST_QUEUES, MOST_QUEUES)), rows

    def case(self, queues: int, rows: int, number: int) -> ReplicaCase:
        """Return the part of this number."""
        draws = self._replicas.draws(queues, rows + self._longest, [self._seed, number])
        beyond = np.random.default_rng([self._seed, number, 1]).exponential(self._beyond, queues)
        first = np.minimum(((self._busy + beyond) / self._row_ms).astype(np.int64), self._longest)
        begun = draws.arrivals - np.where(first, draws.arrivals[np.arange(queues), first - 1], 0.0)[:, None]
        warm = max(self._longest, int(WARM * rows))
        return ReplicaCase(self._rate, [self._table], Draws(warm, rows, np.maximum(begun, 0.0), draws.luck))

    def add(self, part: ReplicaFigures) -> None:
        """Add a part."""
        self._parts.append(part)

    @property
    def _times(self) -> list[Floats]:
        return [each for part in self._parts for each in part.times_ms[0]]

    def _drifts(self, late_ms: float) -> Floats:
        """Return what the work drifted in each queue: for its mean, and for the rows that are later; shape (3, queues)."""
        most = self._busy + self._replicas.workers * max(late_ms - self._batch_ms, 0.0)
        by = max(self._beyond, self._batch_ms)

        def rises(work: Floats) -> Floats:
            return np.asarray(np.exp((np.minimum(work, most) - most) / by), dtype=np.float64)

        functions = (
            (lambda work: work, np.ones_like),
            (lambda work: work**2 / 2.0, lambda work: work),
            (lambda work: by * rises(work) + np.maximum(work - most, 0.0), rises),
        )
        works = [part.work for part in self._parts if part.work]
        found = np.array([np.concatenate([work.drift(*each) for work in works]) for each in functions])
        return found if self._stable else np.zeros_like(found)

    def later_than(self, deadline_ms: float) -> tuple[float, float]:
        """Return the share of the rows that are later, and its standard error."""
        late = np.array([np.mean(each > deadline_ms) for each in self._times])
        weighted = _Weighted(self._drifts(deadline_ms))
        return max(weighted.mean(late), 0.0), weighted.error(late)

    def estimate(self) -> ReplicaEstimate:
        """Return the means over all queues, by their weights."""
        response, power, busy = (
            np.concatenate([getattr(part, name)[0] for part in self._parts])
            for name in ("response_ms", "power_w", "busy")
        )
        times = self._times
        about = _quantile(times, np.full(len(times), 1.0 / len(times)), SHARE)
        weighted = _Weighted(self._drifts(about))
        p99 = _quantile(times, weighted.weights, SHARE)
        mean = weighted.mean(response)
        near = p99 * (1.0 + ENOUGH)  # it may be what many rows take exactly
        late_error = weighted.error(np.array([np.mean(each > near) for each in times])) / (1.0 - SHARE)
        error = max(weighted.error(response) / mean, late_error * LATE_COUNTS)
        return ReplicaEstimate(mean, p99, weighted.mean(power), weighted.mean(busy), error)


class _Weighted:
    """Weights of queues with which the means of `controls` are 0; those have the shape (controls, queues)."""

    def __init__(self, controls: Floats) -> None:
        count = controls.shape[1]
        spread = controls.std(axis=1, keepdims=True)
        scaled = controls / np.where(spread > 0.0, spread, 1.0)
        mean = scaled.mean(axis=1)
        self._off = scaled - mean[:, None]
        self._inverse = np.linalg.pinv(self._off)
        self.weights = np.asarray(1.0 / count - self._inverse @ mean, dtype=np.float64)

    def mean(self, values: Floats) -> float:
        """Return the mean of `values` with these weights."""
        return float(self.weights @ values)

    def error(self, values: Floats) -> float:
        """Return its standard error."""
        left = values - values.mean()
        left = left - left @ self._inverse @ self._off
        return float((left @ left / (len(left) - 1 - len(self._off)) * (self.weights @ self.weights)) ** 0.5)


def _quantile(times: Sequence[Floats], weights: Floats, share: float) -> float:
    """Return the quantile of `times`, by queue, if each queue has its weight."""
    each = np.repeat(weights / [len(part) for part in times], [len(part) for part in times])
    every = np.concatenate(times)
    late = every >= np.quantile(every[:: 1 + len(every) // 100_000], 1.0 - 4.0 * (1.0 - share))
    every, each = every[late], each[late]
    order = np.argsort(every)[::-1]
    later = np.maximum.accumulate(np.cumsum(each[order]))
    return float(every[order[min(int(np.searchsorted(later, 1.0 - share)), len(order) - 1)]])


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
