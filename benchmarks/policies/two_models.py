"""Two models on one device, exactly: a chain of both queue lengths, by dense linear algebra. It shares no code with the solver.

Arrivals are Poisson and service times constant. Both queues are cut off at `most` rows: an arrival beyond is lost, which at the
loads of the tests hardly ever happens and is the same for all rules that are compared. Times are in ms, rates in rows per ms.
"""

from collections.abc import Sequence
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.policy.cost import Profile
from weir.policy.solve.device import DeviceTable

Numbers = NDArray[np.float64]
Rule = NDArray[np.int64]  # by rows of both models: 0 to wait, then the actions in the order of `TwoModels.actions`


def poisson(mean: float, count: int) -> Numbers:
    """Return the probabilities of 0 ... count - 1 arrivals."""
    found = [exp(-mean)]
    for k in range(1, count):
        found.append(found[-1] * mean / k)
    return np.array(found)


class TwoModels:
    """The decisions of one device. `actions` are (model, rows)."""

    def __init__(
        self, profiles: Sequence[Profile], rates: Sequence[float], energy_weight: float = 0.0, most: int = 24
    ) -> None:
        self.profiles = profiles
        self.states = most + 1
        self.rates = np.array(rates) / 1000.0
        self.actions = [(k, b) for k, each in enumerate(profiles) for b in range(1, each.max_batch_size + 1)]
        total, first = float(self.rates.sum()), np.arange(self.states, dtype=np.float64)
        self.rows = first[:, None] + first[None, :]
        self.waiting = self.rows / total / total  # each row costs 1/total per ms, and the next arrival comes in 1/total
        self.time = np.array([1.0 / total, *(profiles[k].service_time_ms[b - 1] for k, b in self.actions)])
        self.moves = [[self._moves(j, k, b) for j in (0, 1)] for k, b in self.actions]
        # Those that arrive during a batch wait for half of it in the mean.
        self.cost = [
            (self.rows * time + total * time**2 / 2.0) / total + energy_weight * profiles[k].energy_mj[b - 1]
            for (k, b), time in zip(self.actions, self.time[1:], strict=True)
        ]

    def _moves(self, queue: int, model: int, rows: int) -> Numbers:
        """Return where the length of `queue` goes during a batch of `rows` rows of `model`."""
        law = poisson(self.rates[queue] * self.profiles[model].service_time_ms[rows - 1], self.states)
        found = np.zeros((self.states, self.states))
        for length in range(self.states):
            left = length - (rows if queue == model else 0)
            if left >= 0:
                found[length, left:] = law[: self.states - left]
                found[length, -1] += 1.0 - found[length].sum()
        return found

    def evaluate(self, rule: Rule) -> tuple[float, Numbers]:
        """Return the mean cost per ms of `rule`, and the relative values of the states."""
        size, total = self.states, float(self.rates.sum())
        law, cost = np.zeros((size * size, size * size)), np.zeros(size * size)
        for state in range(size * size):
            i, j = divmod(state, size)
            action = int(rule[i, j])
            if action:
                first, second = self.moves[action - 1]
                law[state] = np.outer(first[i], second[j]).ravel()
                cost[state] = self.cost[action - 1][i, j]
            else:
                law[state, min(i + 1, size - 1) * size + j] += self.rates[0] / total
                law[state, i * size + min(j + 1, size - 1)] += self.rates[1] / total
                cost[state] = self.waiting[i, j]
        system = np.eye(size * size) - law
        system[:, 0] = self.time[rule.ravel()]
        found = np.linalg.solve(system, cost)
        mean, found[0] = float(found[0]), 0.0
        return mean, np.asarray(found.reshape(size, size), dtype=np.float64)

    def least(self, rule: Rule) -> float:
        """Return the least mean cost per ms, by policy iteration from `rule`."""
        return self.best(rule)[0]

    def best(self, rule: Rule) -> tuple[float, Rule]:
        """Return the least mean cost per ms and the rule that has it, by policy iteration from `rule`."""
        while True:
            mean, values = self.evaluate(rule)
            choices = self._choices(values, mean)
            present = np.take_along_axis(choices, rule[None], axis=0)[0]
            better = np.where(choices.min(axis=0) < present - 1e-9 * np.ptp(values), choices.argmin(axis=0), rule)
            if np.array_equal(better, rule):
                return mean, rule
            rule = better

    def _choices(self, values: Numbers, mean: float) -> Numbers:
        total = float(self.rates.sum())
        up = np.concatenate((values[1:], values[-1:])), np.concatenate((values[:, 1:], values[:, -1:]), axis=1)
        found = [self.waiting - mean * self.time[0] + (self.rates[0] * up[0] + self.rates[1] * up[1]) / total]
        found[0][-1], found[0][:, -1] = np.inf, np.inf  # a full queue does not wait
        lengths: Any = np.indices((self.states, self.states))
        for (k, b), (first, second), cost, time in zip(self.actions, self.moves, self.cost, self.time[1:], strict=True):
            found.append(np.where(lengths[k] >= b, cost - mean * time + first @ values @ second.T, np.inf))
        return np.array(found)

    def rule(self, tables: Sequence[DeviceTable]) -> Rule:
        """Return what the order of `tables` does."""
        found = np.zeros((self.states, self.states), dtype=np.int64)
        for i, j in np.ndindex(found.shape):
            sizes = [self._size(table, waiting) for table, waiting in zip(tables, (i, j), strict=True)]
            if not any(sizes):
                if max(i, j) < self.states - 1:
                    continue
                sizes = [min(n, each.max_batch_size) for n, each in zip((i, j), self.profiles, strict=True)]
            urgency = [
                table.urgency_of(waiting) if size else -np.inf
                for table, waiting, size in zip(tables, (i, j), sizes, strict=True)
            ]
            model = int(urgency[1] > urgency[0])
            found[i, j] = 1 + self.actions.index((model, sizes[model]))
        return found

    def play(self, rule: Rule, arrivals: Sequence[Numbers]) -> tuple[list[Numbers], list[float]]:
        """Return what `rule` does with the requests that arrive at `arrivals`, for each model ascending instants in ms: the instants
        at which they are done, and the energies of the models.

        Beyond the chain's longest queue it does what it does there.
        """
        ends = [np.full(len(each), np.nan) for each in arrivals]
        served, energy, now, last = [0, 0], [0.0, 0.0], 0.0, self.states - 1
        while True:
            waiting = [int(np.searchsorted(arrivals[k], now, "right")) - served[k] for k in (0, 1)]
            action = int(rule[min(waiting[0], last), min(waiting[1], last)])
            if action:
                k, rows = self.actions[action - 1]
                now += float(self.profiles[k].service_time_ms[rows - 1])
                energy[k] += float(self.profiles[k].energy_mj[rows - 1])
                ends[k][served[k] : served[k] + rows] = now
                served[k] += rows
                continue
            coming = [
                each[place] for each in arrivals if (place := int(np.searchsorted(each, now, "right"))) < len(each)
            ]
            if not coming:
                return ends, energy
            now = float(min(coming))

    @staticmethod
    def _size(table: DeviceTable, waiting: int) -> int:
        return int(table.table[min(waiting, len(table.table) - 1)])
