"""Solve for the best table at one rate."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from weir.errors import SettingsError
from weir.policy.cost.latency_slo import unavoidable_power_w
from weir.policy.cost.prices import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.evaluation import Performance, evaluate
from weir.policy.solve.long_lines import LONGEST, Found, longest_of, solve_long
from weir.policy.solve.policy_iteration import Solved, iterate_policies, quick_law, safe_overflow_cost, start_actions
from weir.policy.solve.smdp import Actions, Model, check_rate, model_of
from weir.policy.solve.tables import Table, checked_table, extended, limit_of
from weir.policy.solve.truncation import MOST_STATES, cost_of, enough_states, overflow_share, served_table
from weir.policy.solve.value_iteration import iterate_values

METHODS = ("policy-iteration", "value-iteration")
_NOTHING = 1e-12  # a cost that is none
TOLERANCE = 1e-3  # how much more than the least, relative to it, a table may cost without a warning


@dataclass(frozen=True, eq=False)
class Solution:
    """A solved table, and how it was solved.

    Attributes:
        profile, rate, prices: what was asked; the rate in rows per second.
        table: the best table.
        actions: the best actions by state, 0 ... s_max, and that in all longer lines, or in S_o.
        values: relative values of these states, 0 in state 0.
        cost: g, the cost per ms under the table (equation 14): what `evaluate` says, or that of the truncated model.
        error_bound: how far `cost` may be above the least of all policies that serve one of the sizes that were tried from
            lines above s_max, or of the truncated model.
        s_max: the longest line whose best action was looked for.
        overflow_cost, tail_share: of a truncated model what overflow costs, and the share of the cost that is paid so (equation
            15, relative to g). 0 where nothing is truncated: what happens above s_max is then exact (long_lines.py).
        method, iterations, seconds: how it was solved; None seconds if no clock was given.
    """

    profile: Profile
    rate: float
    prices: Prices
    table: Table
    actions: Actions
    values: Floats
    cost: float
    error_bound: float
    tail_share: float
    s_max: int
    overflow_cost: float
    method: str
    iterations: int
    seconds: float | None

    @property
    def limit(self) -> int:
        """The control limit: the smallest number of waiting rows that is served."""
        return limit_of(self.table)

    @cached_property
    def performance(self) -> Performance:
        """What the table does in the model that is not truncated."""
        return evaluate(self.profile, self.rate, self.table, self.prices)


def solve(
    profile: Profile,
    rate: float,
    prices: Prices | None = None,
    *,
    method: str = "policy-iteration",
    s_max: int | None = None,
    overflow_cost: float | None = None,
    tail_tolerance: float = 1e-9,
    eta: float | None = None,
    epsilon: float = 0.01,
    max_iterations: int = 10_000,
    start: Table | None = None,
    clock: Callable[[], float] | None = None,
) -> Solution:
    """Return the table with the least cost at `rate` rows per second, for Poisson arrivals and one worker.

    Arguments:
        method: "policy-iteration", or "value-iteration" (the paper's, equations 21 and 22, slower).
        s_max: the longest line of the paper's truncated model; None: nothing is truncated, but for value iteration or a given
            `overflow_cost`, where it is grown until the tail share is at most `tail_tolerance`, up to 1000.
        overflow_cost: c_o of equation 13, per ms, of the truncated model; None: so much that neither waiting in the overflow
            state nor losing rows there pays.
        eta, epsilon, max_iterations: of value iteration, see `iterate_values`; with policy iteration they have no
            effect.
        start: a table from which policy iteration starts, e.g. that of a rate nearby.
        clock: gives the seconds that `Solution.seconds` is the difference of.

    Warns with a RuntimeWarning that says by how much, if the cost may be more than a thousandth above the least: where value
    iteration ends too soon, or rounding ends policy iteration.
    Raises SettingsError naming the value: a rate that no policy can serve, an unknown method, a table that cannot be, an
    s_max below the largest batch, an overflow cost so small that value iteration finds it best never to serve.
    """
    if method not in METHODS:
        raise SettingsError(f"method={method!r}: must be one of {', '.join(METHODS)}")
    if not tail_tolerance > 0.0:
        raise SettingsError(f"tail_tolerance={tail_tolerance!r}: must be greater than 0")
    prices = prices or Prices()
    began = clock() if clock else 0.0
    check_rate(profile, rate)
    first = None if start is None else checked_table(start, profile.max_batch_size, "start")
    if s_max is None and overflow_cost is None and method == METHODS[0]:
        longest = max(LONGEST, longest_of(profile))
        return _warned(_continued(solve_long(profile, rate, prices, longest, first), prices, rate, began, clock))
    size = s_max if s_max is not None else enough_states(profile, rate, tail_tolerance)
    while True:
        model = model_of(profile, rate, prices, size, overflow_cost or 0.0)
        begin = start_actions(model) if first is None else extended(first, size + 2).astype(np.int64)
        if method == METHODS[0]:
            solved = iterate_policies(model, begin, overflow_cost=overflow_cost)
        else:
            solved = _by_values(model, overflow_cost, eta, epsilon, max_iterations)
        law = solved.law
        tail_share = overflow_share(solved.model, solved.actions, law)
        if s_max is not None or tail_share <= tail_tolerance or size >= MOST_STATES:
            break
        size = min(ceil(1.5 * size), MOST_STATES)
    seconds = clock() - began if clock else None
    cost, bound = solved.cost, solved.error_bound
    if not prices.latency_weight:  # it was solved with time at a price, whose optimum is near the one asked for
        cost = cost_of(replace(solved.model, latency_weight=0.0), solved.actions, law)
        bound = max(0.0, cost - prices.energy_weight * unavoidable_power_w(profile, rate))
    return _warned(Solution(
        profile, rate, prices, served_table(profile, solved.actions, law), solved.actions, solved.values, cost,
        bound, tail_share, size, solved.model.overflow_cost, method, solved.steps, seconds,
    ))  # fmt: skip


def _warned(solution: Solution) -> Solution:
    """Return `solution`; warn if it may be far from the best."""
    if solution.error_bound > TOLERANCE * max(solution.cost, _NOTHING):
        warnings.warn(
            f"rate={solution.rate:g}: the table costs {solution.cost:g}, which may be {solution.error_bound:g} above the least",
            RuntimeWarning,
            stacklevel=3,
        )
    return solution


def _continued(found: Found, prices: Prices, rate: float, began: float, clock: Callable[[], float] | None) -> Solution:
    """Return the solution that was found without a truncated model."""
    profile, model, values = found.served.profile, found.model, found.improved.values
    cost, bound = found.cost, found.error_bound
    if not prices.latency_weight:
        cost = prices.energy_weight * found.served.rates.power_w
        bound = max(0.0, cost - prices.energy_weight * unavoidable_power_w(profile, rate))
    cost += prices.latency_weight_at(rate) * profile.latency_offset_ms
    return Solution(
        profile, rate, prices, found.table, np.append(found.improved.actions, model.size),
        np.append(values.states, values.above[0]), cost, bound, 0.0, model.longest, 0.0, METHODS[0],
        found.improved.steps, clock() - began if clock else None,
    )  # fmt: skip


def _by_values(
    model: Model, overflow_cost: float | None, eta: float | None, epsilon: float, max_iterations: int
) -> Solved:
    """Solve `model` by value iteration. Raises SettingsError if it then waits in S_o, that is, never serves."""
    if overflow_cost is None:
        model = model.with_overflow(safe_overflow_cost(model))
    swept = iterate_values(model, eta=eta, epsilon=epsilon, max_iterations=max_iterations)
    if not swept.actions[-1]:
        raise SettingsError(
            f"overflow_cost={model.overflow_cost:g}: too small for s_max={model.s_max} and {swept.iterations} iterations: "
            "never to serve looks cheapest; it must exceed the least cost"
        )
    law = quick_law(model, swept.actions)
    gain = cost_of(model, swept.actions, law)
    return Solved(model, swept.actions, swept.values, gain, swept.span, swept.iterations, law)
