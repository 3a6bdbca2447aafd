"""Solve one rate after another, each from the best actions of the one before."""

from math import sqrt
from typing import NamedTuple

import numpy as np

from weir.policy.long_lines import longest_of, solve_long
from weir.policy.prices import Prices
from weir.policy.profile import Floats, Profile
from weir.policy.sampled import Sampler
from weir.policy.smdp import check_rate
from weir.policy.tables import Table, limit_of

# How far apart neighbouring rates with different limits may be. A server knows its rate to 10 % at best. Where rates are
# 60 % apart, the nearest table costs up to 5 % too much between them; so it is 0.3 % (the paper's profile).
RATIO = 1.2


class Solved(NamedTuple):
    """The best table at one rate, and what it is predicted to do. `actions` are those it was made from, for lines of any length:
    the table has the full-batch rule in their place where lines are not met, which is no good start for another rate."""

    rate: float
    table: Table
    actions: Table
    response_time_ms: float
    p99_ms: float
    power_w: float


def solve_rates(profile: Profile, prices: Prices, rates: Floats) -> list[Solved]:
    """Return the best table for each of `rates` (rows per second). Raises SettingsError for one that cannot be served."""
    found: list[Solved] = []
    for rate in rates.tolist():
        found.append(_solve(profile, prices, rate, found[-1].actions if found else None))
    return found


def solve_between(profile: Profile, prices: Prices, found: list[Solved]) -> list[Solved]:
    """Return `found` with rates added, halfway by ratio, wherever the limit changes from one rate to the next and they are
    further apart than RATIO."""
    result = found[:1]
    for each in found[1:]:
        result += [*_between(profile, prices, result[-1], each), each]
    return result


def _between(profile: Profile, prices: Prices, low: Solved, high: Solved) -> list[Solved]:
    if limit_of(low.table) == limit_of(high.table) or high.rate <= RATIO * low.rate:
        return []
    middle = _solve(profile, prices, sqrt(low.rate * high.rate), low.actions)
    return [*_between(profile, prices, low, middle), middle, *_between(profile, prices, middle, high)]


def _solve(profile: Profile, prices: Prices, rate: float, start: Table | None) -> Solved:
    check_rate(profile, rate)
    found = solve_long(profile, rate, prices, longest_of(profile), start)
    seen, offset = found.served.rates, profile.latency_offset_ms
    p99 = Sampler(found.served).quantile_ms(0.99)
    actions = found.improved.actions.astype(np.uint16)
    return Solved(rate, found.table, actions, seen.response_time_ms + offset, p99 + offset, seen.power_w)
