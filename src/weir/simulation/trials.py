"""Trials of rules on lines of Poisson arrivals: the same line for every rule, and for every rate in its own time."""

from collections.abc import Callable
from math import inf

import numpy as np

from weir.policy.cost.profile import Floats, Profile
from weir.simulation.processes import Arrivals
from weir.simulation.rounds import Figures, Rule, figures, play
from weir.simulation.services import Services


class Trials:
    """One line of `requests` Poisson arrivals, stretched to any rate; its mean rate is then that rate exactly.

    `deadline` (seconds) is what responses are late against. `process` makes other arrivals of a mean rate than Poisson.
    `played` counts the trials.
    """

    def __init__(
        self, profile: Profile, *, workers: int = 1, requests: int = 30_000, seed: int = 1, deadline: float = inf,
        process: Callable[[float], Arrivals] | None = None,
    ) -> None:  # fmt: skip
        self.profile, self.workers, self.deadline = profile, workers, deadline
        times = np.cumsum(np.random.default_rng([seed, 1]).exponential(1.0, requests))
        self._unit: Floats = times * (requests / times[-1])
        self._services = Services(profile, seed)
        self._line: tuple[float, list[float]] = (0.0, [])
        self._process, self._seed = process, seed
        self.played = 0

    def __call__(self, rate: float, rule: Rule) -> Figures:
        """Return what `rule` does with `rate` rows per second."""
        if self._line[0] != rate:
            self._line = (rate, self._arrivals(rate).tolist())
        self.played += 1
        rounds = play(self._line[1], rule, self._services, self.profile.max_batch_size, self.workers)
        return figures(rounds, self.profile, self.deadline)

    def _arrivals(self, rate: float) -> Floats:
        if self._process is None:
            return self._unit / rate
        return self._process(rate).times(np.random.default_rng([self._seed, 1]), len(self._unit))


def lowest(cost: Callable[[int], float], start: int, most: int) -> int:
    """Return the whole number from 1 to `most` with the lowest cost that a search from `start` finds: first by factors
    of 1.5, so that a start far off does no harm, then by steps that halve."""
    known: dict[int, float] = {}

    def of(limit: int) -> float:
        if limit not in known:
            known[limit] = cost(limit)
        return known[limit]

    at = min(max(start, 1), most)
    while (there := min((_clip(at, 1.5, most), _clip(at, 1 / 1.5, most), at), key=of)) != at:
        at = there
    step = max(1, round(at / 4))
    while True:
        there = min((at, max(at - step, 1), min(at + step, most)), key=of)
        if there == at:
            if step == 1:
                return at
            step = max(1, step // 2)
        at = there


def _clip(limit: int, factor: float, most: int) -> int:
    return int(np.clip(round(limit * factor), 1, most))
