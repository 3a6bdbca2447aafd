"""The 99th percentile of the response time, or another one, from sampled rows. Banks predict theirs with it.

Each sampled row arrives in a queue drawn from the stationary law, so no run has to settle first, and is followed until
its own batch is dispatched. A queue beyond the length from which all are served alike moves up in one step.

Two methods make some ten thousand rows as good as a million. First, rows that find long queues are drawn more often,
with weights that make up for it. Second, the last random time of a row, that of its own batch or of the arrivals that
this batch waits for, is not drawn but enters by its law (conditional Monte Carlo). The seed is fixed, so the same table
gives the same percentile.

Times are in milliseconds. N is the number of sampled rows.
"""

from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.numerics import gamma_tail, log_gamma
from weir.policy.cost.profile import Floats
from weir.policy.solve.smdp import Actions, Continued, Costs, SteadyQueue
from weir.policy.solve.stationary import decay
from weir.policy.solve.tables import Table, extended, steady_table

ROWS, MOST_ROWS = 32_768, 131_072
_OFF = 0.005  # relative standard error of the percentile above which more rows are drawn
_STEP, _FINE = 0.02, 3e-4  # first step and final precision of the search for the percentile, relative to it
# States whose law is computed: this many, or this many more than the table has entries.
_MOST_STATES, _MORE_STATES = 800, 100
_CLEARLY = 0.3  # from this coefficient of variation on, the time of a batch may enter by its law
_FAR = 1e-7  # the share of the decisions that may lie beyond these states


class _Ends(NamedTuple):
    """Response times in ms, shape (N,) each: `base`, plus a Gamma distributed time with `shape` and `scale` (ms) where
    `shape` is not 0.
    """

    base: Floats
    shape: Floats
    scale: Floats


@dataclass(frozen=True, eq=False)
class TableShape:
    """Says what a table does with a row in the queue, by the length of the queue in rows."""

    table: Table

    @cached_property
    def last(self) -> int:
        """The batch, in rows, that is served from a long queue."""
        return int(self.table[-1])

    @cached_property
    def steady(self) -> int:
        """The length, in rows, from which on that batch is served from every queue."""
        return len(steady_table(self.table)) - 1

    @cached_property
    def served_at(self) -> NDArray[np.int64]:
        """For each length up to `steady`, the next length at which the table dispatches; shape (steady + 1,), rows."""
        lengths = np.arange(self.steady + 1)
        serving = np.where(extended(self.table, self.steady + 1) > 0, lengths, self.steady)
        return np.minimum.accumulate(serving[::-1])[::-1]

    @cached_property
    def batch(self) -> NDArray[np.int64]:
        """For each length up to `steady`, the batch that is dispatched next; shape (steady + 1,), rows."""
        return extended(self.table, self.steady + 1)[self.served_at].astype(np.int64)


class QuantileSampler:
    """Samples rows that arrive in the queue `served`."""

    def __init__(self, served: SteadyQueue) -> None:
        self._profile, self._rate = served.profile, served.rate_per_ms
        self._rules = TableShape(served.table)
        self._served = served
        self._draw = np.random.default_rng(1)

    def quantile_ms(self, share: float) -> float:
        """Return the time in ms within which the given share of the rows is answered, without the profile's latency
        offset.
        """
        rows, near, off = ROWS, 0.0, 1.0
        while off > _OFF:
            # A row's rank is the share of rows that meet shorter queues: 1 - x³, so that long queues are drawn more often.
            x = (np.arange(rows) + self._draw.random(rows)) / rows
            ends, weights = self._follow(1.0 - x**3), x**2
            near = near or float(np.average(ends.base + ends.shape * ends.scale, weights=weights))
            near, off = _later_than(ends, weights, 1.0 - share, near)
            if rows == MOST_ROWS:
                break
            rows = MOST_ROWS
        return near

    @cached_property
    def _model(self) -> Continued:
        """The model of the queue, extended beyond the length up to which the table's entries differ."""
        short = self._served.model
        fall = log(decay(self._profile, self._rate, short.size))
        more = min(max(_MOST_STATES - short.longest, _MORE_STATES), int(-log(_FAR) / fall) + 1)
        return Continued(self._profile, self._rate, short.size, short.longest + more)

    @cached_property
    def _actions(self) -> Actions:
        """The batch in each state, in rows; the last entry is for all states above the longest. Shape (S + 1,)."""
        return extended(self._served.table, self._model.longest + 2).astype(np.int64)

    @cached_property
    def _met(self) -> Floats:
        """The share of the rows that arrive after a decision in each state; the last entry is for those above the
        longest. Shape (S + 1,).
        """
        model, actions = self._model, self._actions[:-1]
        visits = model.visits(actions)
        chain = model.chain(actions)
        once, rows = Costs(np.ones(len(model.sojourn)), 0.0), Costs(np.zeros(len(model.sojourn)), 1.0)
        _, beyond = model.rate_of(once, chain, actions, visits)
        time = float(model.sojourn[model.size])
        _, waiting = model.rate_of(rows, chain, actions, visits)
        # What is less is left by rounding, and no row sees it.
        reached = beyond > np.finfo(np.float64).eps * visits.sum()
        self._mean_above = max(0.0, waiting / time / beyond - model.longest - 1.0) if reached else 0.0
        spent = np.append(visits, beyond) * model.sojourn[self._actions]
        return np.asarray(spent / spent.sum(), dtype=np.float64)

    def states(self, rank: Floats) -> NDArray[np.int64]:
        """Return the states, in rows waiting, that rows of this rank find; both of shape (N,)."""
        law = np.cumsum(self._met)
        state = np.searchsorted(law[:-1], rank)
        # Above the longest state the law is taken as geometric: it is so in the limit.
        left = np.minimum((1.0 - rank) / max(1.0 - law[-2], 1e-300), 1.0)
        over = np.floor(-np.log(np.maximum(left, 1e-300)) / np.log1p(1.0 / max(self._mean_above, 1e-9)))
        return np.asarray(state + np.where(state > self._model.longest, over, 0.0), dtype=np.int64)

    def _follow(self, rank: Floats) -> _Ends:
        """Return the response times of rows of this rank, shape (N,): the share of rows that find shorter queues."""
        rate, rules, draw = self._rate, self._rules, self._draw
        position, behind, age = self._arrive(self.states(rank))
        ends = _Ends(*(np.zeros(len(rank)) for _ in range(3)))
        index = np.arange(len(rank))
        while len(index):
            # Batches of long queues, all ahead of the row.
            far = np.maximum(-(-(position - rules.steady) // rules.last), 0)
            if far.any():
                time = self._services(np.full(len(far), rules.last), far)
                position, age, behind = position - far * rules.last, age + time, behind + draw.poisson(rate * time)
            length = np.minimum(position + behind, rules.steady)
            missing = rules.served_at[length] - length
            size = rules.batch[length]
            last = position <= size
            self._end(ends, index[last], age[last], size[last], missing[last])
            index, position, behind, age, size, missing = (
                part[~last] for part in (index, position, behind, age, size, missing)
            )
            time = self._services(size, np.ones_like(size))
            age = age + draw.standard_gamma(missing) / rate + time
            position, behind = position - size, behind + missing + draw.poisson(rate * time)
        return ends

    def _end(self, ends: _Ends, index: NDArray[np.int64], age: Floats, size: Actions, missing: Actions) -> None:
        """Set the response times of the rows at `index`, whose own batch is the next one.

        Of the two times that are left, that of the batch and that of the arrivals it waits for, the one that varies
        more enters by its law, and the other is drawn. All arguments have the same shape: `age` in ms since arrival,
        `size` of the batch in rows, and the `missing` arrivals in rows.
        """
        mean, cv, rate = self._profile.service_time_ms[size - 1], self._profile.cv[size - 1], self._rate
        varies = (mean * cv >= np.sqrt(missing) / rate) & ((cv >= _CLEARLY) | (missing == 0))
        kept = varies & (cv >= _CLEARLY)
        waits = self._draw.standard_gamma(np.where(varies, missing, 0.0)) / rate
        ends.base[index] = age + waits + np.where(kept, 0.0, self._services(size, np.ones_like(size)))
        ends.shape[index] = np.where(kept, 1.0 / np.where(kept, cv, 1.0) ** 2, np.where(varies, 0.0, missing))
        ends.scale[index] = np.where(kept, mean * cv**2, 1.0 / rate)

    def _arrive(self, state: NDArray[np.int64]) -> tuple[Actions, Actions, Floats]:
        """Return each row's place in the queue (from 1), the rows behind it, and its age in ms, at the first decision
        after its arrival. All have the shape (N,) of `state`.
        """
        size = self._actions[np.minimum(state, len(self._actions) - 1)]
        met = self._services(size, np.ones_like(size), longer=True)
        part = self._draw.random(len(state))
        before, after = (self._draw.poisson(self._rate * met * share) for share in (part, 1.0 - part))
        return state - size + before + 1, after, met * (1.0 - part)

    def _services(self, size: Actions, count: Actions, *, longer: bool = False) -> Floats:
        """Return the time in ms that `count` batches of `size` rows take, 0 for size 0; arguments of the same shape.

        With `longer` the times are distributed as for the batch that a row finds under way, of which long ones are
        more frequent.
        """
        mean, cv = self._profile.service_time_ms[size - 1], self._profile.cv[size - 1]
        if not cv.any():
            return np.where(size > 0, mean * count, 0.0)
        varied = np.where(cv > 0.0, cv**2, 1.0)
        drawn = self._draw.standard_gamma(np.where(cv > 0.0, count / varied + longer, 0.0)) * varied
        return np.where(size > 0, mean * np.where(cv > 0.0, drawn, count), 0.0)


def _later_than(ends: _Ends, weights: Floats, share: float, near: float) -> tuple[float, float]:
    """Return the time in ms after which the given share of the weights ends, and its relative standard error.

    `weights` has shape (N,). `near` (ms) is a first guess.
    """
    wanted, tail = share * float(weights.sum()), _Tail(ends)

    def later(time: float) -> float:
        return float(weights @ tail(time)) / wanted

    low, high, by = near, near, 1.0 + _STEP
    at_low = at_high = later(near)
    while at_low <= 1.0:
        low, high, at_high, by = low / by, low, at_low, by * by
        at_low = later(low)
    while at_high > 1.0:
        low, high, at_low, by = high, high * by, at_high, by * by
        at_high = later(high)
    slope, moved = (at_low - at_high) / log(high / low), 0
    while high - low > _FINE * high:
        # As if it fell exponentially; a little to the other side of that, if it was the same end that moved last.
        part = log(at_low) / log(at_low / max(at_high, 1e-12))
        middle = low + part * (high - low) + moved * _FINE / 2.0 * high
        middle = min(max(middle, low + (high - low) / 10.0), high - (high - low) / 10.0)
        seen = later(middle)
        if seen > 1.0:
            low, at_low, moved = middle, seen, 1
        else:
            high, at_high, moved = middle, seen, -1
    # The rows are in the order of their rank: neighbours differ by what the rank does not decide.
    off = float(np.sqrt(np.sum(np.diff(weights * (tail(high) - share)) ** 2) / 2.0)) / wanted
    return high, off / max(slope, 1e-12)


class _Tail:
    """The probability that each row ends later than a time."""

    def __init__(self, ends: _Ends) -> None:
        varies = ends.shape > 0.0
        self._base, self._shape = ends.base, np.where(varies, ends.shape, 1.0)
        self._scale = np.where(varies, ends.scale, 1.0)
        self._far = np.where(varies, ends.shape + 6.0 * np.sqrt(ends.shape) + 12.0, 0.0)  # as good as never later
        self._logarithm = log_gamma(self._shape)

    def __call__(self, time: float) -> Floats:
        """Return the probability for each row that it ends later than `time` (ms); shape (N,)."""
        later = (self._base > time).astype(np.float64)
        left = (time - self._base) / self._scale
        some = np.flatnonzero((left >= 0.0) & (left < self._far))
        later[some] = gamma_tail(self._shape[some], left[some], self._logarithm[some])
        return later
