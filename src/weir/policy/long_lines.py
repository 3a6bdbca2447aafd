"""The best table where lines may grow long, in bounded time and memory, and what any table does, however long its lines.

The best actions are looked for in the states up to some `longest`. Beyond it one size is served, whose values are continued
(continued.py). b* is right for lines without end, but where many sizes are nearly as quick, or a slower one takes less
energy, others are better for all lines that are met. So other sizes are tried beyond it too. What is returned is a table,
and all that is said of it is said of that table: with what replaces the states that are not met, and to its last entry.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf, log
from typing import NamedTuple

import numpy as np

from weir.policy.continued import Chain, Continued, Costs, Values
from weir.policy.prices import Prices
from weir.policy.profile import Floats, Profile
from weir.policy.smdp import Actions, weights_of
from weir.policy.stationary import stationary
from weir.policy.tables import Table, extended, steady_table, with_full_batches
from weir.policy.tail_decay import decay

VISITED = 1e-8  # a state that fewer of the decisions meet is not visited
_TAIL = 1e-9  # about the share of the decisions in longer lines than are looked at first
_GAIN = 1e-9  # of the cost: what makes it worth while to look at longer lines still
_LONG, _MORE = 400, 144  # states to look at: so many, and so many more than the largest batch
LONGEST = 640  # where it is one table that is asked for
_MOST_ENTRIES = 2048  # of a table
_BETTER = 1e-11  # of the values' span: what is less is rounding
_SPARE = 1e-3  # how far below capacity, relative to it, a size beyond the longest line must be
_RARER, _RAREST = 1e-3, 1e-14  # by how much it has to be rarer where such states matter, and at least
_SAME = 1e-8  # how much more a table may cost, relative to its cost, than the actions that it was made from
_WORSE = 1e-3  # how much more a table may cost, relative to its cost, for being stable at every rate


class Improved(NamedTuple):
    """The best actions by state, their values, a bound on how far their cost may be above the optimum with such batches
    beyond, and after how many steps."""

    actions: Actions
    values: Values
    error_bound: float
    steps: int


class Rates(NamedTuple):
    """What a policy does per ms, long lines included: the mean response time but for the profile's offset, the mean power, the
    busy share, the rows served and the batches."""

    response_time_ms: float
    power_w: float
    busy_share: float
    rows: float
    batches: float

    def cost(self, latency_weight: float, energy_weight: float) -> float:
        """Return the cost per ms with these weights."""
        return latency_weight * self.response_time_ms + energy_weight * self.power_w


@dataclass(frozen=True, eq=False)
class Served:
    """A line that is served by a stable `table`: exactly, however long it grows."""

    profile: Profile
    rate_per_ms: float
    table: Table

    @cached_property
    def model(self) -> Continued:
        """The model of the line, as long as the table's entries differ."""
        short = steady_table(self.table)
        size = int(short[-1])
        return Continued(self.profile, self.rate_per_ms, size, max(len(short) - 1, size))

    @cached_property
    def actions(self) -> Actions:
        """What is done in each of the model's states."""
        return extended(self.table, self.model.longest + 1).astype(np.int64)

    @cached_property
    def chain(self) -> Chain:
        """The chain of the model's states."""
        return self.model.chain(self.actions)

    @cached_property
    def visits(self) -> Floats:
        """How often per ms each of the model's states is met at a decision."""
        law = stationary(*self.chain.band(self.profile.max_batch_size))
        return law / self.model.time_of(self.chain, self.actions, law)

    @cached_property
    def rates(self) -> Rates:
        """What the table does."""
        return rates_of(self.model, self.chain, self.actions, self.visits)


@dataclass(frozen=True, eq=False)
class Found:
    """The best table that was found, what it does, its cost per ms, how far that may be above the least of all policies that
    serve one size of those tried from lines above the longest, and the best policy that the table was made from."""

    served: Served
    cost: float
    error_bound: float
    model: Continued
    improved: Improved

    @property
    def table(self) -> Table:
        """The table."""
        return self.served.table


def longest_of(profile: Profile) -> int:
    """Return how long lines are looked at in a bank: as long as time allows."""
    return max(_LONG, profile.max_batch_size + _MORE)


def solve_long(profile: Profile, rate: float, prices: Prices, longest: int, start: Table | None = None) -> Found:
    """Return the best table at `rate` rows per second, looked for in lines of up to `longest` rows (at least the largest
    batch), or fewer where longer ones are not met, from the table `start`."""
    weights = weights_of(profile, rate / 1000.0, prices)
    costs = _objective(profile, rate / 1000.0, *weights)
    longest = max(longest, profile.max_batch_size)
    model = Continued(profile, rate / 1000.0, profile.best_batch_size, min(longest, enough_states(profile, rate)))
    improved = improve(model, costs, _begun(model, start))
    steps = improved.steps
    while model.longest < longest:
        longer = replace(model, longest=min(2 * model.longest, longest))
        added = _begun(longer, start)[model.longest + 1 :]
        before, model, improved = improved, longer, improve(longer, costs, np.append(improved.actions, added))
        steps += improved.steps
        gained = before.values.cost - improved.values.cost
        if gained <= _GAIN * improved.values.cost and model.beyond_share(improved.actions) <= VISITED:
            break
    found, tried = [(model, improved)], {model.size}
    while model.beyond_share(improved.actions) > VISITED:
        sizes = [int(improved.actions[-1]), profile.max_batch_size]
        left = [size for size in sizes if size not in tried and _keeps_up(model, size)]
        if not left:
            break
        tried.add(left[0])
        other = model.beyond(left[0])
        found.append((other, improve(other, costs, improved.actions)))
        steps += found[-1][1].steps
        model, improved = min(found, key=_cost_of)
    least = min(each.values.cost - each.error_bound for _, each in found)
    served = _delivered(model, improved, weights)
    cost = served.rates.cost(*weights)
    return Found(served, cost, max(0.0, cost - least), model, improved._replace(steps=steps))


def _begun(model: Continued, start: Table | None) -> Actions:
    """Return the actions that are improved first: those of `start`, or that nothing waits."""
    if start is None:
        return model.start()
    actions = extended(start, model.longest + 1).astype(np.int64)
    actions[-1] = actions[-1] or model.size
    return actions


def enough_states(profile: Profile, rate: float) -> int:
    """Return how long lines hardly ever grow under batches of b* at `rate` rows per second."""
    fall = log(decay(profile, rate / 1000.0, profile.best_batch_size))
    return profile.max_batch_size + int(np.sqrt(profile.max_batch_size)) + ceil(-log(_TAIL) / fall)


def _cost_of(found: tuple[Continued, Improved]) -> float:
    return found[1].values.cost


def _keeps_up(model: Continued, size: int) -> bool:
    return model.rate_per_ms * float(model.sojourn[size]) <= (1.0 - _SPARE) * size


def _delivered(model: Continued, improved: Improved, weights: tuple[float, float]) -> Served:
    """Return the table that serves as `improved` does, with the full-batch rule from the first state that is not visited on,
    so that it is stable at every rate; where lines are so long that this would cost more, without the rule."""
    visits = model.visits(improved.actions)
    share = visits / model.decisions(improved.actions, visits)
    as_found = np.append(improved.actions, model.size).astype(np.uint16)
    rare, worse = VISITED / _RARER, inf
    while worse > _SAME * improved.values.cost and rare > _RAREST:  # a rare state may be a dear one
        rare *= _RARER
        end = _end(model, share, rare)
        served = Served(model.profile, model.rate_per_ms, with_full_batches(as_found, end, model.profile))
        worse = served.rates.cost(*weights) - improved.values.cost
    dear = worse > _WORSE * improved.values.cost
    return Served(model.profile, model.rate_per_ms, as_found) if dear else served


def _end(model: Continued, share: Floats, rare: float) -> int:
    """Return the length from which on fewer than `rare` of the decisions meet each line, of which the short ones have this
    `share`."""
    end = int(np.flatnonzero(share >= rare)[-1]) + 1
    if end <= model.longest or model.size == model.profile.best_batch_size:
        return end
    beyond = max(1.0 - float(share.sum()), rare)
    fall = log(decay(model.profile, model.rate_per_ms, model.size))
    return min(_MOST_ENTRIES, end + ceil(log(beyond / rare) / fall))


def improve(model: Continued, costs: Costs, actions: Actions) -> Improved:
    """Improve `actions` wherever another is better, until none is.

    A step may have long lines wait for longer ones and then serve so few rows that none of them ever becomes short again. Such a policy
    has two costs per ms, and no values; it goes on from one in which those lines do not wait."""
    met: set[bytes] = set()
    states = np.arange(model.longest + 1)
    while True:
        try:
            values = model.values(costs, actions)
        except np.linalg.LinAlgError:
            met.add(actions.tobytes())
            actions = model.returning(actions)
            values = model.values(costs, actions)
        choices = model.choices(costs, values)
        best = np.argmin(choices, axis=0)
        margin = _BETTER * max(float(np.ptp(values.states)), np.finfo(float).tiny)
        better = np.where(choices[best, states] < choices[actions, states] - margin, best, actions)
        met.add(actions.tobytes())
        if better.tobytes() in met:
            gaps = (values.states - choices[best, states]) / model.sojourn[best]
            return Improved(actions, values, max(0.0, float(gaps.max())), len(met))
        actions = better


def rates_of(model: Continued, chain: Chain, actions: Actions, visits: Floats) -> Rates:
    """Return what the policy `actions` does, from how often it meets each state."""
    profile, sizes = model.profile, np.arange(len(model.sojourn), dtype=np.float64)
    response = _objective(profile, model.rate_per_ms, 1.0, 0.0)
    per_batch = (profile.energy_mj, profile.service_time_ms, sizes[1:], np.ones(len(sizes) - 1))
    all_costs = [response, *(Costs(np.concatenate(([0.0], once)), 0.0) for once in per_batch)]
    return Rates(*(model.rate_of(costs, chain, actions, visits)[0] for costs in all_costs))


def _objective(profile: Profile, rate_per_ms: float, latency_weight: float, energy_weight: float) -> Costs:
    squares = (1.0 + profile.cv**2) * profile.service_time_ms**2
    once = energy_weight * profile.energy_mj + latency_weight * squares / 2.0
    return Costs(np.concatenate(([0.0], once)), latency_weight / rate_per_ms)
