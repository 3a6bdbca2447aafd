"""A latency objective: the energy beyond the unavoidable, against plain limits and timeouts that keep the same tail."""

from math import isnan

from benchmarks.policies.lines import Effort, Player, of, percent, play_all, real, saved, show, tuned_delay, tuned_limit
from benchmarks.policies.table import Compared, Comparison
from weir.policy.adaptive import SolvedPolicy
from weir.policy.objective import Objective
from weir.policy.prices import Prices
from weir.policy.profile import GOOGLENET_P4
from weir.simulation.banks import make_bank
from weir.simulation.processes import Poisson
from weir.simulation.rounds import Figures

LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
OBJECTIVE = Objective.parse("p99=20ms")
# Finer than any hand would: the rival must not lose for want of a setting.
SIZES = (8, 16, 24, 32)
DELAYS = tuple(half / 2000.0 for half in range(10, 38))


def excess(figures: Figures) -> float:
    """The power beyond what no policy can avoid."""
    return figures.excess_w


def compare(effort: Effort) -> Compared:
    """Play the solved policy, the best limit and the best size and delay at each load."""
    bank = make_bank(GOOGLENET_P4, objective=OBJECTIVE)
    made = Compared(
        [
            "load",
            "solved: excess, W",
            "late, %",
            "refused, %",
            "best limit: excess, W",
            "saved",
            "best size and delay: excess, W",
            "saved",
        ]
    )
    for load in LOADS:
        arrivals = Poisson(load * GOOGLENET_P4.max_rate)
        players: dict[str, Player] = {
            "solved": real(GOOGLENET_P4, SolvedPolicy(bank), deadline=OBJECTIVE.deadline),
            "limit": tuned_limit(GOOGLENET_P4, Prices(), objective=OBJECTIVE),
            "delay": tuned_delay(GOOGLENET_P4, Prices(), DELAYS, sizes=SIZES, objective=OBJECTIVE),
        }
        seen = play_all(arrivals, players, effort)
        ours, limit, delay = (seen[name] for name in players)
        made.rows.append([
            f"{load:g}", show(of(ours, excess)), show(of(ours, lambda each: each.late_share), 2, 100.0),
            show(of(ours, lambda each: each.refused_share), 2, 100.0), show(of(limit, excess)),
            percent(saved(ours, limit, excess)), show(of(delay, excess)), percent(saved(ours, delay, excess)),
        ])  # fmt: skip
        for name, each in seen.items():
            found = of(each, excess)
            made.values.setdefault(name, []).append(found.value if found is not None else float("nan"))
    made.values["load"] = list(LOADS)
    assert not any(isnan(value) for value in made.values["solved"])  # it can everywhere
    return made


COMPARISON = Comparison("promise", "A latency objective", lambda seeds: 3 * seeds * len(LOADS), compare)
