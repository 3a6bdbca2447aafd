"""The most answers in time: what is lost of all requests, beside a promise of a percentile and `greedy`."""

from benchmarks.policies.lines import Effort, Player, of, play_all, real, show
from benchmarks.policies.table import Compared, Comparison
from weir.policy.adaptive import SolvedPolicy
from weir.policy.objective import Objective
from weir.policy.profile import GOOGLENET_P4
from weir.simulation.banks import make_bank
from weir.simulation.processes import Poisson
from weir.simulation.rounds import Figures

LOADS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99, 1.1)
OBJECTIVES = {"most in time": "in-time=20ms", "p99": "p99=20ms"}


def lost(figures: Figures) -> float:
    """Of all that arrived: late, or refused."""
    return figures.late_share * (1.0 - figures.refused_share) + figures.refused_share


def compare(effort: Effort) -> Compared:
    """Play both objectives and greedy at each load."""
    objectives = {name: Objective.parse(text) for name, text in OBJECTIVES.items()}
    deadline = objectives["p99"].deadline
    players: dict[str, Player] = {
        name: real(GOOGLENET_P4, SolvedPolicy(make_bank(GOOGLENET_P4, objective=each)), deadline=deadline)
        for name, each in objectives.items()
    }
    players["greedy"] = real(GOOGLENET_P4, "greedy", deadline=deadline)
    made = Compared(["load", *(text for name in players for text in (f"{name}: lost, %", "refused, %", "power, W"))])
    for load in LOADS:
        seen = play_all(Poisson(load * GOOGLENET_P4.max_rate), players, effort)
        row = [f"{load:g}"]
        for found in seen.values():
            row += [show(of(found, lost), 2, 100.0), show(of(found, lambda each: each.refused_share), 2, 100.0)]
            row.append(show(of(found, lambda each: each.power_w), 1))
        made.rows.append(row)
    return made


COMPARISON = Comparison("in-time", "The most answers in time", lambda seeds: 3 * seeds * len(LOADS), compare)
