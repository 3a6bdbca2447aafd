"""The convex hull of what policies can attain: mean response time against mean power, at one load."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from reproduction.published import PROFILE
from weir.policy.cost import Prices
from weir.policy.solve.bank import solve
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import Table, with_full_batches

_BETTER = 1e-7  # relative: below it two costs are one
_DEAREST = 1e5  # w2 against w1 = 1 that stands for energy only


class Corner(NamedTuple):
    """A policy that is optimal for some weights: a corner of the hull."""

    response_time_ms: float
    power_w: float
    limit: int
    table: Table

    def cost(self, latency_weight: float, energy_weight: float) -> float:
        """Return what it costs for those weights."""
        return latency_weight * self.response_time_ms + energy_weight * self.power_w


def corners(load: float) -> list[Corner]:
    """Return all corners at `load`, quickest first.

    Between two corners the weights are chosen for which both cost the same; if another policy costs less, it is a corner
    between them, and both halves are searched. If none does, the straight line between them is the hull.
    """
    quick, thrifty = _solved(load, 1.0, 0.0), _solved(load, 1.0, _DEAREST)
    found = [quick, *_between(load, quick, thrifty), thrifty]
    return [each for i, each in enumerate(found) if not i or each.response_time_ms > found[i - 1].response_time_ms]


def _between(load: float, quick: Corner, thrifty: Corner) -> list[Corner]:
    latency_weight = quick.power_w - thrifty.power_w
    energy_weight = thrifty.response_time_ms - quick.response_time_ms
    if latency_weight <= 0.0 or energy_weight <= 0.0:
        return []
    middle = _solved(load, 1.0, energy_weight / latency_weight)
    weights = (1.0, energy_weight / latency_weight)
    if middle.cost(*weights) >= quick.cost(*weights) * (1.0 - _BETTER):
        return []
    return [*_between(load, quick, middle), middle, *_between(load, middle, thrifty)]


def _solved(load: float, latency_weight: float, energy_weight: float) -> Corner:
    rate = load * PROFILE.max_rate
    solution = solve(PROFILE, rate, Prices(latency_weight, energy_weight))
    # As solved, and full batches only beyond s_max: Solution.table has them in all states that are not visited.
    table = with_full_batches(solution.actions.astype(np.uint16), solution.s_max, PROFILE)
    found = evaluate(PROFILE, rate, table)
    return Corner(found.response_time_ms, found.power_w, solution.limit, table)


def least_power_w(found: list[Corner], response_time_ms: float) -> float:
    """Return the least power that a mix of policies attains at a mean response time of at most that: the hull there."""
    if response_time_ms < found[0].response_time_ms:
        return float("inf")
    for left, right in pairwise(found):
        if response_time_ms <= right.response_time_ms:
            share = (response_time_ms - left.response_time_ms) / (right.response_time_ms - left.response_time_ms)
            return left.power_w + share * (right.power_w - left.power_w)
    return found[-1].power_w
