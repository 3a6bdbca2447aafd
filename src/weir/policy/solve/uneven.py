"""Tables for a model whose workers are of two kinds, such as a large and a small GPU: which kind runs the next batch, how
many rows it has, and when a worker is better left idle.

A slow worker helps only if the rows that it takes would otherwise wait longer than it needs for them. That depends on how
many rows wait and on when a fast worker is free, so both are in the state:

    (i, j, q)    the next worker of the first kind is free after i steps, of the second after j (0: one is idle); q rows wait

A step of kind k takes d_k = max τ_k/(n_k·m_k), for n_k workers and m_k steps. The workers of one kind count as one that is
n_k times as fast: while all are busy, that is how often one of them becomes free. A batch of b rows that starts on kind k
costs w1·b·τ_k(b)/λ + w2·ζ_k(b), and keeps its kind busy for τ_k(b)/n_k, in steps, rounded up or down by chance so that the
mean is right. Each row that waits costs w1/λ per ms. The decision is made again after d, the shorter of both steps: rows
have arrived (Poisson), and a kind has made a step of its own with the probability d/d_k.

Value iteration finds the actions of least mean cost (Puterman, "Markov Decision Processes", 1994, section 8.5). Between two
improvements the actions stay for a while, which costs less and leads to the same values (modified policy iteration, section
8.7 there). Beyond the last state, values go on in a straight line.

A Bank of bank.py has the rows that wait as its only state, so these tables have a bank of their own.

Rates are in rows per second, times in milliseconds, as in smdp.py.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.policy.cost import Floats, Prices, Profile

STEPS = (24, 12)  # of the longest batch of each kind, in the chain
UNITS = 32  # a largest batch of more rows is counted in this many units of rows
QUEUES = 3  # the table ends at this many times the largest batch
SIZES = 12  # batch sizes to choose from, besides all rows that wait
LOADS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # the rates of a bank, as shares of what all workers serve
PRECISION = 1e-3  # of the mean cost
EQUAL = 1e-9  # values that differ by no more than this part are equal but for rounding
KEPT = 16  # sweeps with the same actions
IMPROVEMENTS = 400  # at most

Rows = NDArray[np.int64]


class WorkerKind(NamedTuple):
    """Workers that are alike.

    Attributes:
        profile: that of one of them.
        workers: how many there are.
        number: the kind's number among those of the model.
        name: the kind's name.
    """

    profile: Profile
    workers: int
    number: int = 0
    name: str = ""

    @property
    def max_rate(self) -> float:
        """The most rows per second that they serve together."""
        return self.workers * self.profile.max_rate

    def step_ms(self, steps: int) -> float:
        """Return the length of a step in ms, of which the longest batch takes `steps` for each worker."""
        return float(self.profile.service_time_ms.max()) / (self.workers * steps)


class UnevenTable(NamedTuple):
    """Says what both kinds of workers do at one arrival rate, in rows.

    Attributes:
        first: by the steps until a worker of the second kind is idle, and by rows waiting, how many rows the first kind starts
            while one of its workers is idle; 0 is to wait. Shape (steps + 1, states).
        second: the same of the second kind, by the steps until one of the first is idle. While both have idle workers, one
            starts first: the other's entry is 0.
    """

    first: Rows
    second: Rows


class UnevenBank(NamedTuple):
    """Tables for a range of arrival rates.

    Attributes:
        kinds: the workers.
        prices: what the tables were solved for.
        rates: arrival rates in rows per second, ascending.
        tables: one for each.
    """

    kinds: tuple[WorkerKind, WorkerKind]
    prices: Prices
    rates: tuple[float, ...]
    tables: tuple[UnevenTable, ...]

    def at(self, rate: float) -> int:
        """Return the index of the table for `rate`, the nearest one by ratio."""
        return sum(low * high <= rate * rate for low, high in pairwise(self.rates))


def solve_uneven(kinds: tuple[WorkerKind, WorkerKind], prices: Prices, loads: Sequence[float] = LOADS) -> UnevenBank:
    """Return the tables of least cost for a range of rates: `loads`, ascending shares of what all workers serve together.

    Each kind must have a worker. Raises SettingsError if the profiles have different largest batches.
    """
    first, second = (each.profile.max_batch_size for each in kinds)
    if first != second:
        raise SettingsError(
            f"max_batch_size={first} and {second}: the profiles of both kinds of workers must have the same"
        )
    rates = tuple(load * sum(each.max_rate for each in kinds) for load in loads)
    tables: list[UnevenTable] = []
    values = None
    for rate in rates:
        chain = _Chain(kinds, rate, prices)
        values = chain.solve(values)
        tables.append(chain.table())
    return UnevenBank(kinds, prices, rates, tuple(tables))


class _Starts(NamedTuple):
    """The actions of some states: where each is, where it leads to (two states, of which the latter has the chance `part`),
    and what it costs. States are flat indices."""

    states: Rows
    low: Rows
    high: Rows
    part: Floats
    cost: Floats

    def apply(self, values: Floats) -> None:
        """Put the values that the actions lead to in place."""
        flat = values.reshape(-1)
        low = flat[self.low]
        flat[self.states] = self.cost + low + self.part * (flat[self.high] - low)


class _KindCosts:
    """The batches of one kind of workers, by units of rows (index 0: one unit)."""

    def __init__(self, kind: WorkerKind, steps: int, unit: int, most: int, weight: float, energy_weight: float) -> None:
        profile = kind.profile
        sizes = np.minimum(np.arange(1, most + 1) * unit, profile.max_batch_size)
        times = profile.service_time_ms[sizes - 1]
        self.step = kind.step_ms(steps)
        busy = times / (kind.workers * self.step)
        self.low = np.minimum(busy.astype(np.int64), steps - 1)
        self.part = busy - self.low
        self.cost = weight * sizes * times + energy_weight * profile.energy_mj[sizes - 1]

    def ahead(self, values: Floats, units: int) -> Floats:
        """Return the mean of `values`, by steps of this kind along the first axis, after a batch of that many units starts."""
        low, part = self.low[units - 1], self.part[units - 1]
        mean: Floats = (1.0 - part) * values[low] + part * values[low + 1]
        return mean


class _Chain:
    """The chain of two kinds of workers at one rate."""

    def __init__(self, kinds: Sequence[WorkerKind], rate: float, prices: Prices) -> None:
        self._largest = kinds[0].profile.max_batch_size
        self._unit = -(-self._largest // UNITS)
        self._most = most = -(-self._largest // self._unit)
        self._shape = (STEPS[0] + 1, STEPS[1] + 1, QUEUES * most + 1)
        weight = 1000.0 * prices.latency_weight_at(rate) / rate  # of a row for a ms
        self._kinds = [
            _KindCosts(kind, steps, self._unit, most, weight, prices.energy_weight)
            for kind, steps in zip(kinds, STEPS, strict=True)
        ]
        step = min(each.step for each in self._kinds)
        self._moves = [step / each.step for each in self._kinds]
        self._waiting = weight * step * self._unit * np.arange(self._shape[2])
        self._arrive = _arrivals(rate / 1000.0 * step / self._unit, self._shape[2])
        self._sizes = sorted({round(float(size)) for size in np.geomspace(1, most, SIZES)})
        self._first = np.zeros(self._shape[1:], np.int64)
        self._second = np.zeros((self._shape[0], self._shape[2]), np.int64)

    def table(self) -> UnevenTable:
        """Return the actions in rows, by rows waiting."""
        rows = np.arange((self._shape[2] - 1) * self._unit + 1)
        units = -(-rows // self._unit)

        def by_rows(actions: Rows) -> Rows:
            return np.minimum(np.minimum(actions[:, units] * self._unit, rows), self._largest)

        return UnevenTable(by_rows(self._first), by_rows(self._second))

    def solve(self, values: Floats | None) -> Floats:
        """Find the actions of least cost. Return the values, from which another rate's may begin."""
        values = np.zeros(self._shape) if values is None else values
        for _ in range(IMPROVEMENTS):
            found = self._wait(values)
            self._improve(found)
            gains = found - values
            low, high = float(gains.min()), float(gains.max())
            if high - low < PRECISION * high:
                break
            starts = self._starts()
            for _ in range(KEPT):
                found = self._wait(found)
                for each in starts:
                    each.apply(found)
            values = found - found[0, 0, 0]
        return values

    def _wait(self, values: Floats) -> Floats:
        """Return the values before one step of waiting, with its cost."""
        found = np.asarray(values @ self._arrive, dtype=np.float64)
        for axis, move in enumerate(self._moves):
            along = np.moveaxis(found, axis, 0)
            along[1:] += move * (along[:-1] - along[1:])
        found += self._waiting
        return found

    def _improve(self, values: Floats) -> None:
        """Choose the best actions, and put their values in place."""
        of_first, of_second = values, values.swapaxes(0, 1)
        values[1:, 0], self._second[1:] = self._best(of_second[:, 1:], 1)
        values[0, 1:], self._first[1:] = self._best(of_first[:, 1:], 0)
        (one, first), (other, second) = self._best(of_first[:, 0], 0), self._best(of_second[:, 0], 1)
        values[0, 0] = np.minimum(one, other)
        ours = one <= other + EQUAL * np.abs(other)  # if both start, the order does not matter
        self._first[0], self._second[0] = np.where(ours, first, 0), np.where(ours, 0, second)

    def _best(self, values: Floats, kind: int) -> tuple[Floats, Rows]:
        """Return the least values with a batch of `kind`, which is idle, or without one; and its units. `values` are by steps of
        the kind along the first axis, and by units waiting along the last."""
        best, chosen, of = values[0].copy(), np.zeros(values[0].shape, np.int64), self._kinds[kind]

        def compare(units: int, here: slice, after: Floats) -> None:
            cost = of.cost[units - 1] + of.ahead(after, units)
            better = cost < best[..., here]
            best[..., here][better] = cost[better]
            chosen[..., here][better] = units

        for units in range(1, self._most + 1):  # all that wait
            compare(units, slice(units, units + 1), values[..., :1])
        for units in self._sizes:
            compare(units, slice(units, None), values[..., : self._shape[2] - units])
        return best, chosen

    def _starts(self) -> list[_Starts]:
        """Return the present actions: first those of states in which one kind is idle, then those in which both are."""
        indices = np.arange(np.prod(self._shape)).reshape(self._shape)
        by_second = indices.swapaxes(0, 1)
        one = [self._leads(indices[:, 1:], self._first[1:], 0), self._leads(by_second[:, 1:], self._second[1:], 1)]
        both = [self._leads(indices[:, :1], self._first[:1], 0), self._leads(by_second[:, :1], self._second[:1], 1)]
        return [*one, *both]

    def _leads(self, indices: Rows, actions: Rows, kind: int) -> _Starts:
        """Return where `actions` of `kind` lead. `indices` are those of states by steps of the kind, then as `actions`."""
        of = self._kinds[kind]
        other, waiting = np.nonzero(actions)
        units = actions[other, waiting]
        low, left = of.low[units - 1], waiting - units
        after = indices[low, other, left], indices[low + 1, other, left]
        return _Starts(indices[0, other, waiting], *after, of.part[units - 1], of.cost[units - 1])


def _arrivals(mean: float, states: int) -> Floats:
    """Return the matrix that takes values by units waiting to their means after a step, in which `mean` units arrive.

    Beyond the last state, values go on in a straight line.
    """
    law = [exp(-mean)]
    while len(law) < states and sum(law) < 1.0 - 1e-9:
        law.append(law[-1] * mean / len(law))
    found, last = np.zeros((states, states)), states - 1
    for more, chance in enumerate(law):
        for state in range(states):
            beyond = max(0, state + more - last)
            found[min(state + more, last), state] += chance * (1 + beyond)
            found[last - 1, state] -= chance * beyond
    normal: Floats = found / found.sum(axis=0)
    return normal
