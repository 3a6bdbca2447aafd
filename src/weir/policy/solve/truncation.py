"""How far the model must reach: its law and the cost it pays beyond its last state (section IV-A and equation 15)."""

from math import ceil, log
from typing import NamedTuple

import numpy as np

from weir.errors import SettingsError
from weir.policy.cost.prices import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.long_lines import VISITED
from weir.policy.solve.policy_iteration import iterate_policies, start_actions
from weir.policy.solve.smdp import Actions, Model, model_of
from weir.policy.solve.stationary import band, decay, stationary
from weir.policy.solve.tables import Table, with_full_batches
from weir.policy.solve.value_iteration import iterate_values

MOST_STATES = 1_000  # with which a step of policy iteration takes a tenth of a second, and 50 MB
_STRIDE = 16


def enough_states(profile: Profile, rate: float, tolerance: float) -> int:
    """Return an s_max beyond which about `tolerance` of the cost falls, from how long lines decay under batches of b*."""
    fall = log(decay(profile, rate / 1000.0, profile.best_batch_size))
    longest = profile.max_batch_size + int(np.sqrt(profile.max_batch_size))
    return min(MOST_STATES, longest + ceil(-log(tolerance) / fall))


def law_of(model: Model, actions: Actions) -> Floats:
    """Return the stationary law of the model's states under `actions`, which serve in S_o."""
    return stationary(*band(model.arrivals, actions, model.rows))


def cost_of(model: Model, actions: Actions, law: Floats) -> float:
    """Return g, the mean cost per ms under `actions` (equation 14)."""
    costs = model.chosen(model.costs, actions)
    return float(law @ costs) / float(law @ model.sojourn[actions])


def overflow_cost_rate(model: Model, actions: Actions, law: Floats) -> float:
    """Return Δ, the mean cost per ms that is paid in the overflow state (equation 15)."""
    return float(law[-1] * model.costs[actions[-1], -1]) / float(law @ model.sojourn[actions])


def overflow_share(model: Model, actions: Actions, law: Floats) -> float:
    """Return Δ / g, 0 where nothing costs anything."""
    cost = cost_of(model, actions, law)
    return overflow_cost_rate(model, actions, law) / cost if cost else 0.0


def served_table(profile: Profile, actions: Actions, law: Floats) -> Table:
    """Return the table that `actions` are, with the full-batch rule from the first state that is not visited on: what the
    model does there matters to nothing it was solved for, and the rule is right for every rate above."""
    visited = np.flatnonzero(law >= VISITED)
    return with_full_batches(actions.astype(np.uint16), int(visited[-1]) + 1, profile)


class Truncation(NamedTuple):
    """A truncation that is acceptable, as the paper's Table I has it: found by so many `iterations` of value iteration,
    with the cost g per ms of its policy and `delta` of that paid in S_o, and the paper's measures of memory and work."""

    s_max: int
    overflow_cost: float
    iterations: int
    actions: Actions
    cost: float
    delta: float
    space: int
    time: int


def minimum_s_max(
    profile: Profile,
    rate: float,
    prices: Prices,
    overflow_cost: float,
    tolerance: float = 0.001,
    *,
    epsilon: float = 0.01,
    max_iterations: int = 10_000,
    longest: int = 1000,
) -> Truncation:
    """Return the smallest s_max, from the largest batch on, with which value iteration finds a policy that serves and
    whose Δ is less than `tolerance` (section V-C, Table I); `rate` is in rows per second.

    A model is swept only where policy iteration, which is a hundred times quicker, does not rule it out: where to wait in
    S_o for ever is cheaper than any policy that serves, and where the best policy's Δ is clearly too large. From the first
    that is left on, value iteration may still be short of sweeps to find out that serving pays; the longer the
    truncated line, the sooner it does, so that the first that does is found by halving.

    Raises SettingsError if there is none up to `longest`.
    """
    s_max = profile.max_batch_size
    while not _possible(profile, rate, prices, s_max, overflow_cost, tolerance):
        s_max += 1
        _check_length(s_max, longest, overflow_cost)
    below = s_max - 1
    found = _swept(profile, rate, prices, s_max, overflow_cost, epsilon, max_iterations)
    while not (found and found.delta < tolerance):
        below = s_max
        s_max += _STRIDE
        _check_length(s_max, longest, overflow_cost)
        found = _swept(profile, rate, prices, s_max, overflow_cost, epsilon, max_iterations)
    while found.s_max - below > 1:
        middle = (below + found.s_max) // 2
        tried = _swept(profile, rate, prices, middle, overflow_cost, epsilon, max_iterations)
        if tried and tried.delta < tolerance:
            found = tried
        else:
            below = middle
    return found


def _check_length(s_max: int, longest: int, overflow_cost: float) -> None:
    if s_max > longest:
        raise SettingsError(f"overflow_cost={overflow_cost:g}: no s_max up to {longest} is acceptable")


def _possible(
    profile: Profile, rate: float, prices: Prices, s_max: int, overflow_cost: float, tolerance: float
) -> bool:
    """Say whether value iteration could end in an acceptable policy. What it ends in is near the optimum, so a Δ within 5 %
    of the tolerance is left to it."""
    model = model_of(profile, rate, prices, s_max, overflow_cost)
    best = iterate_policies(model, start_actions(model), overflow_cost=overflow_cost)
    if overflow_cost + model.latency_weight * s_max / model.rate_per_ms <= best.cost:
        return False
    return overflow_cost_rate(model, best.actions, law_of(model, best.actions)) < 1.05 * tolerance


def _swept(
    profile: Profile,
    rate: float,
    prices: Prices,
    s_max: int,
    overflow_cost: float,
    epsilon: float,
    max_iterations: int,
) -> Truncation | None:
    """Return what value iteration ends in; None for a policy that does not serve."""
    model = model_of(profile, rate, prices, s_max, overflow_cost)
    swept = iterate_values(model, epsilon=epsilon, max_iterations=max_iterations)
    if not swept.actions[-1]:
        return None
    law = law_of(model, swept.actions)
    cost, delta = cost_of(model, swept.actions, law), overflow_cost_rate(model, swept.actions, law)
    space = profile.max_batch_size * s_max
    time = swept.iterations * profile.max_batch_size * s_max**2
    return Truncation(s_max, overflow_cost, swept.iterations, swept.actions, cost, delta, space, time)
