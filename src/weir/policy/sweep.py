"""Solve one rate after another, each from the table of the one before."""

from math import sqrt
from typing import NamedTuple

import numpy as np

from weir.policy.ages import longer_services
from weir.policy.evaluation import line_of
from weir.policy.long_lines import longest_of, solve_long
from weir.policy.prices import Prices
from weir.policy.profile import Floats, Profile
from weir.policy.response import response_of
from weir.policy.rules_in_line import Rules
from weir.policy.sampled import Sampler
from weir.policy.smdp import check_rate
from weir.policy.tables import Table, limit_of
from weir.policy.truncation import enough_states

# How far apart neighbouring rates with different limits may be. A server knows its rate to 10 % at best. Where rates are
# 60 % apart, the nearest table costs up to 5 % too much between them; so it is 0.3 % (the paper's profile).
RATIO = 1.2
BANK_CELLS = 256  # enough for a prediction of the 99th percentile to 0.1 %
TAIL = 1e-9  # of the cost: what may lie in lines that are not looked at, while that leaves them short
TOLERANCE = 1e-6  # of the cost: what a last step of policy iteration may leave
MOST_WORK = 150_000  # states times kinds of batches for which the response time's law is computed; else it is sampled
MOST_LENGTHS = 40_000  # the same for places times lengths of lines, which count where batches leave rows behind


class Solved(NamedTuple):
    """The best table at one rate, and what it is predicted to do."""

    rate: float
    table: Table
    response_time_ms: float
    p99_ms: float
    power_w: float


def solve_rates(profile: Profile, prices: Prices, rates: Floats) -> list[Solved]:
    """Return the best table for each of `rates` (rows per second). Raises SettingsError for one that cannot be served."""
    found: list[Solved] = []
    for rate in rates.tolist():
        found.append(_solve(profile, prices, rate, found[-1].table if found else None))
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
    middle = _solve(profile, prices, sqrt(low.rate * high.rate), low.table)
    return [*_between(profile, prices, low, middle), middle, *_between(profile, prices, middle, high)]


def _solve(profile: Profile, prices: Prices, rate: float, start: Table | None) -> Solved:
    check_rate(profile, rate)
    enough = enough_states(profile, rate, TAIL)
    found = solve_long(profile, rate, prices, min(enough, longest_of(profile)), start, tolerance=TOLERANCE)
    table = found.table()
    seen = found.rates
    if _is_followed(profile, table, enough):
        line = line_of(profile, rate, table)
        p99 = response_of(profile, line, table, cells=BANK_CELLS).quantile_ms(0.99)
    else:
        p99 = float(np.quantile(Sampler(found).response_times_ms(), 0.99)) + profile.latency_offset_ms
    return Solved(rate, table, seen.response_time_ms + profile.latency_offset_ms, p99, seen.power_w)


def _is_followed(profile: Profile, table: Table, states: int) -> bool:
    """Whether the response time's law is computed. Where batches leave rows behind, their lengths are kept too."""
    rules = Rules(table)
    lengths = 0 if rules.leaves_none else rules.steady * states
    return states * _kinds(profile) <= MOST_WORK and lengths <= MOST_LENGTHS


def _kinds(profile: Profile) -> int:
    """Return how many kinds of batches a row may meet under way: by size, and by time where it varies."""
    return sum(len(longer_services(1.0, cv)[0]) for cv in profile.cv.tolist())
