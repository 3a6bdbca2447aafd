"""Solve for the best table at one rate."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weir.policy.cost.latency_slo import unavoidable_power_w
from weir.policy.cost.prices import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.solve.evaluation import Performance, evaluate
from weir.policy.solve.smdp import LONGEST, Actions, check_rate, longest_of, solve_long
from weir.policy.solve.tables import Table, checked_table, limit_of

NOTHING = 1e-12  # a cost that is none
TOLERANCE = 1e-3  # how much more than the least, relative to it, a table may cost without a warning


@dataclass(frozen=True, eq=False)
class Solution:
    """A solved table, and how it was solved.

    Attributes:
        profile, rate, prices: what was asked; the rate in rows per second.
        table: the best table.
        actions: the best actions by state, 0 ... s_max, and that in all longer queues.
        values: relative values of these states, 0 in state 0.
        cost: g, the cost per ms under the table (equation 14): what `evaluate` says.
        error_bound: how far `cost` may be above the least of all policies that serve one of the sizes that were tried from
            queues above s_max.
        s_max: the longest queue, in rows, whose best action was looked for; what happens above is exact too.
        iterations, seconds: how many steps of policy iteration it took, and how long; None if no clock was given.
    """

    profile: Profile
    rate: float
    prices: Prices
    table: Table
    actions: Actions
    values: Floats
    cost: float
    error_bound: float
    s_max: int
    iterations: int
    seconds: float | None

    @property
    def limit(self) -> int:
        """The control limit: the smallest number of waiting rows that is served."""
        return limit_of(self.table)

    @cached_property
    def performance(self) -> Performance:
        """What the table does."""
        return evaluate(self.profile, self.rate, self.table, self.prices)


def solve(
    profile: Profile,
    rate: float,
    prices: Prices | None = None,
    *,
    start: Table | None = None,
    clock: Callable[[], float] | None = None,
) -> Solution:
    """Return the table with the least cost at `rate` rows per second, for Poisson arrivals and one worker.

    Args:
        profile: what a batch costs.
        rate: rows per second.
        prices: what latency and energy are worth.
        start: a table from which policy iteration starts, e.g. that of a rate nearby.
        clock: gives the seconds that `Solution.seconds` is the difference of.

    Warns with a RuntimeWarning that says by how much, if the cost may be more than a thousandth above the least: where rounding
    ends policy iteration.
    Raises SettingsError naming the value: a rate that no policy can serve, a table that cannot be.
    """
    prices = prices or Prices()
    began = clock() if clock else 0.0
    check_rate(profile, rate)
    first = None if start is None else checked_table(start, profile.max_batch_size, "start")
    found = solve_long(profile, rate, prices, max(LONGEST, longest_of(profile)), first)
    model, values = found.model, found.improved.values
    cost, bound = found.cost, found.error_bound
    if not prices.latency_weight:  # it was solved with time at a price, whose optimum is near the one asked for
        cost = prices.energy_weight * found.served.rates.power_w
        bound = max(0.0, cost - prices.energy_weight * unavoidable_power_w(profile, rate))
    cost += prices.latency_weight_at(rate) * profile.latency_offset_ms
    if bound > TOLERANCE * max(cost, NOTHING):
        warnings.warn(
            f"rate={rate:g}: the table costs {cost:g}, which may be {bound:g} above the least",
            RuntimeWarning,
            stacklevel=2,
        )
    return Solution(
        profile, rate, prices, found.table, np.append(found.improved.actions, model.size),
        np.append(values.states, values.above[0]), cost, bound, model.longest, found.improved.steps,
        clock() - began if clock else None,
    )  # fmt: skip
