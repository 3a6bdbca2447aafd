"""The most answers in time: what is lost of all requests, beside a promise of a percentile and `greedy`."""

import numpy as np

from benchmarks.policies.lines import Effort, Player, of, play_all, real, show
from benchmarks.policies.table import Compared, Comparison
from weir.policy.cost.objective import LatencySLO
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.simulation.arrivals import Poisson
from weir.simulation.banks import make_bank
from weir.simulation.rounds import Figures

LOADS, LOADS_VARIED = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99, 1.1), (0.6, 0.8, 0.85, 0.9)
OBJECTIVES = {"most in time": "in-time", "p99": "p99"}
CV = 0.3
VARIED = Profile(GOOGLENET_P4.service_time_ms, GOOGLENET_P4.energy_mj, np.full(GOOGLENET_P4.max_batch_size, CV))


def lost(figures: Figures) -> float:
    """Of all that arrived: late, or refused."""
    return figures.late_share * (1.0 - figures.refused_share) + figures.refused_share


def compare(effort: Effort) -> Compared:
    """Play both objectives and greedy at each load; then with service times that vary."""
    made = Compared(
        ["load", *(text for name in (*OBJECTIVES, "greedy") for text in (f"{name}: lost, %", "refused, %", "power, W"))]
    )
    for profile, deadline, loads, more in (
        (GOOGLENET_P4, 0.02, LOADS, ""), (VARIED, 0.03, LOADS_VARIED, f", CV {CV:g}, 30 ms")
    ):  # fmt: skip
        objectives = {name: LatencySLO.parse(f"{text}={1000.0 * deadline:g}ms") for name, text in OBJECTIVES.items()}
        players: dict[str, Player] = {
            name: real(profile, SolvedPolicy(make_bank(profile, objective=each)), deadline=deadline)
            for name, each in objectives.items()
        }
        players["greedy"] = real(profile, "greedy", deadline=deadline)
        for load in loads:
            seen = play_all(Poisson(load * profile.max_rate), players, effort)
            row = [f"{load:g}{more}"]
            for found in seen.values():
                row += [show(of(found, lost), 2, 100.0), show(of(found, lambda each: each.refused_share), 2, 100.0)]
                row.append(show(of(found, lambda each: each.power_w), 1))
            made.rows.append(row)
    return made


COMPARISON = Comparison(
    "in-time", "The most answers in time", lambda seeds: 3 * seeds * len((*LOADS, *LOADS_VARIED)), compare
)
