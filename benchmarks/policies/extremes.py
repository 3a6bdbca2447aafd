"""Latency only, and energy only."""

from benchmarks.policies.lines import Effort, Player, of, play_all, real, show, tuned_delay, tuned_limit
from benchmarks.policies.table import Compared, Comparison
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.online.adaptive import SolvedPolicy
from weir.simulation.arrivals import Poisson
from weir.simulation.banks import make_bank

LOADS = (0.1, 0.5, 0.9)
LATENCY, ENERGY = Prices(1.0, 0.0), Prices(0.0, 1.0)


def compare(effort: Effort) -> Compared:
    """Play both at each load."""
    profile = GOOGLENET_P4
    made = Compared(["load", "policy", "mean response, ms", "p99, ms", "power beyond the unavoidable, W"])
    fastest, frugal = (SolvedPolicy(make_bank(profile, prices)) for prices in (LATENCY, ENERGY))
    for load in LOADS:
        players: dict[str, Player] = {
            "latency only, solved": real(profile, fastest),
            "latency only, best limit": tuned_limit(profile, LATENCY),
            "latency only, best size and delay": tuned_delay(profile, LATENCY),
            "greedy": real(profile, "greedy"),
            "energy only, solved": real(profile, frugal),
            "full batches": real(profile, "full"),
        }
        seen = play_all(Poisson(load * profile.max_rate), players, effort)
        for name, found in seen.items():
            made.rows.append([
                f"{load:g}", name, show(of(found, lambda each: each.response_time_ms), 3),
                show(of(found, lambda each: each.p99_ms)), show(of(found, lambda each: each.excess_w), 3),
            ])  # fmt: skip
    return made


COMPARISON = Comparison("extremes", "Latency only, energy only", lambda seeds: 6 * seeds * len(LOADS), compare)
