"""The best table where lines may grow long, in bounded time and memory: solved on the states up to some `longest`.

Beyond it one size is served, whose values are continued (continued.py). b* is right for lines without end, but where many
sizes are nearly as quick, others are better for all lines that are met. So the size that turns out best in the longest
line is tried beyond it too, as long as that helps.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, log
from typing import NamedTuple

import numpy as np

from weir.policy.continued import Continued, Costs, Values
from weir.policy.decays import decay
from weir.policy.prices import Prices
from weir.policy.profile import Floats, Profile
from weir.policy.smdp import Actions, weights_of
from weir.policy.tables import Table, extended, with_full_batches

VISITED = 1e-8  # a state that fewer of the decisions meet is not visited
_LONG, _MORE = 400, 144  # states to look at: so many, and so many more than the largest batch
LONGEST = 640  # where it is one table that is asked for
_MOST_ENTRIES = 4096  # of a table
_BETTER = 1e-11  # of the values' span: what is less is rounding
_SPARE = 1e-3  # how far below capacity, relative to it, a size beyond the longest line must be


class Improved(NamedTuple):
    """The best actions by state, their values, a bound on how far their cost may be above the optimum with such batches
    beyond, and after how many steps."""

    actions: Actions
    values: Values
    error_bound: float
    steps: int


@dataclass(frozen=True, eq=False)
class Found:
    """What is best in `model`, and how often per ms each state is met at a decision."""

    model: Continued
    improved: Improved

    @cached_property
    def visits(self) -> Floats:
        """How often per ms each state is met at a decision."""
        return self.model.visits(self.improved.actions)

    @cached_property
    def law(self) -> Floats:
        """The stationary law of the decisions; what it lacks of 1 is in longer lines."""
        once = Costs(np.ones(len(self.model.sojourn)), 0.0)
        total, _ = self.model.rate_of(once, self.improved.actions, self.visits)
        return self.visits / total

    @property
    def rates(self) -> "Rates":
        """What the best actions do."""
        return rates_of(self.model, self.improved.actions, self.visits)

    @property
    def beyond(self) -> float:
        """The share of the decisions in longer lines."""
        return max(0.0, 1.0 - float(self.law.sum()))

    @property
    def mean_above(self) -> float:
        """How many rows more than in the longest lines there are in longer ones, on average, less 1."""
        model = self.model
        if self.beyond <= VISITED:
            return 0.0
        _, decisions = model.rate_of(Costs(np.ones(len(model.sojourn)), 0.0), self.improved.actions, self.visits)
        rows = Costs(np.zeros(len(model.sojourn)), 1.0)
        _, waiting = model.rate_of(rows, self.improved.actions, self.visits)
        return max(0.0, waiting / float(model.sojourn[model.size]) / decisions - model.longest - 1.0)

    def table(self) -> Table:
        """Return the table, with the full-batch rule from the first state that is not visited on."""
        model, law = self.model, self.law
        end = int(np.flatnonzero(law >= VISITED)[-1]) + 1
        actions = self.improved.actions
        if end > model.longest and model.size != model.profile.best_batch_size:
            fall = log(decay(model.profile, model.rate_per_ms, model.size))
            end = min(_MOST_ENTRIES, end + max(0, ceil(log(max(self.beyond, VISITED) / VISITED) / fall)))
        return with_full_batches(actions.astype(np.uint16), end, model.profile)


def longest_of(profile: Profile) -> int:
    """Return how long lines are looked at in a bank: as long as time allows."""
    return max(_LONG, profile.max_batch_size + _MORE)


def solve_long(
    profile: Profile, rate: float, prices: Prices, longest: int, start: Table | None = None, *, tolerance: float = 0.0
) -> Found:
    """Return the best table at `rate` rows per second, looked for in lines of up to `longest` rows (at least the largest
    batch), from the table `start`, until a step makes it no more than `tolerance` better, relative to its cost."""
    latency_weight, energy_weight = weights_of(profile, rate / 1000.0, prices)
    costs = _objective(profile, rate / 1000.0, latency_weight, energy_weight)
    model = Continued(profile, rate / 1000.0, profile.best_batch_size, longest)
    actions = model.start() if start is None else extended(start, longest + 1).astype(np.int64)
    best = Found(model, improve(model, costs, actions, tolerance))
    tried = {model.size}
    while best.beyond > VISITED:
        size = int(best.improved.actions[-1])
        if size in tried or model.rate_per_ms * model.sojourn[size] > (1.0 - _SPARE) * size:
            break
        tried.add(size)
        other = model.beyond(size)
        found = improve(other, costs, best.improved.actions, tolerance)
        if found.values.cost >= best.improved.values.cost:
            break
        best = Found(other, found._replace(steps=best.improved.steps + found.steps))
    return best


def improve(model: Continued, costs: Costs, actions: Actions, tolerance: float = 0.0) -> Improved:
    """Improve `actions` wherever another is better, until none is, or they cost no more than `tolerance` less by it."""
    met: set[bytes] = set()
    before = inf
    states = np.arange(model.longest + 1)
    while True:
        values = model.values(costs, actions)
        choices = model.choices(costs, values)
        best = np.argmin(choices, axis=0)
        margin = _BETTER * max(float(np.ptp(values.states)), np.finfo(float).tiny)
        better = np.where(choices[best, states] < choices[actions, states] - margin, best, actions)
        met.add(actions.tobytes())
        if better.tobytes() in met or before - values.cost < tolerance * values.cost:
            gaps = (values.states - choices[best, states]) / model.sojourn[best]
            return Improved(actions, values, max(0.0, float(gaps.max())), len(met))
        actions, before = better, values.cost


class Rates(NamedTuple):
    """What a policy does per ms, long lines included: the mean response time but for the profile's offset, the mean power, the
    busy share, the rows served and the batches."""

    response_time_ms: float
    power_w: float
    busy_share: float
    rows: float
    batches: float


def rates_of(model: Continued, actions: Actions, visits: Floats) -> Rates:
    """Return what the policy `actions` does, from how often it meets each state."""
    profile, sizes = model.profile, np.arange(len(model.sojourn), dtype=np.float64)
    response = _objective(profile, model.rate_per_ms, 1.0, 0.0)
    per_batch = (profile.energy_mj, profile.service_time_ms, sizes[1:], np.ones(len(sizes) - 1))
    all_costs = [response, *(Costs(np.concatenate(([0.0], once)), 0.0) for once in per_batch)]
    return Rates(*(model.rate_of(costs, actions, visits)[0] for costs in all_costs))


def rates_of_table(profile: Profile, rate_per_ms: float, table: Table) -> Rates:
    """Return what a stable `table` does. Where it has many entries, those beyond some hundred are taken to be as there."""
    steady = len(table) - 1
    longest = max(profile.max_batch_size + min(steady, LONGEST), _LONG)
    actions = extended(table, longest + 1).astype(np.int64)
    size = int(actions[-1])
    if not size or rate_per_ms * float(profile.service_time_ms[size - 1]) > (1.0 - _SPARE) * size:
        size = int(table[-1])
    actions[-1] = size
    model = Continued(profile, rate_per_ms, size, longest)
    return rates_of(model, actions, model.visits(actions))


def _objective(profile: Profile, rate_per_ms: float, latency_weight: float, energy_weight: float) -> Costs:
    squares = (1.0 + profile.cv**2) * profile.service_time_ms**2
    once = energy_weight * profile.energy_mj + latency_weight * squares / 2.0
    return Costs(np.concatenate(([0.0], once)), latency_weight / rate_per_ms)
