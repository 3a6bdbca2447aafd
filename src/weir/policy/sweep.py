"""Solve one rate after another, each from the table of the one before."""

from typing import NamedTuple

from weir.policy.prices import Prices
from weir.policy.profile import Floats, Profile
from weir.policy.solver import solve
from weir.policy.tables import Table


class Solved(NamedTuple):
    """The best table at one rate, and what it is predicted to do."""

    table: Table
    response_time_ms: float
    p99_ms: float
    power_w: float


def solve_rates(profile: Profile, prices: Prices, rates: Floats) -> list[Solved]:
    """Return the best table for each of `rates` (rows per second). Raises SettingsError for one that cannot be served."""
    found: list[Solved] = []
    for rate in rates.tolist():
        solution = solve(profile, rate, prices, start=found[-1].table if found else None)
        seen = solution.performance
        found.append(Solved(solution.table, seen.response_time_ms, float("nan"), seen.power_w))
    return found
