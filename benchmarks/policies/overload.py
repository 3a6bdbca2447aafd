"""A promise under overload: who is let in is answered in time, and the worker hardly serves fewer for it."""

from functools import partial

from benchmarks.policies.lines import Effort, Player, of, play_all, real, ruled, show
from benchmarks.policies.table import Compared, Comparison
from weir.policy.cost.objective import LatencySLO
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.tables import greedy_table
from weir.simulation.arrivals import Arrivals, GammaRenewal, OnOff, Poisson
from weir.simulation.banks import make_bank
from weir.simulation.rounds import Figures, Rule

OBJECTIVE = LatencySLO.parse("p99=20ms")
LINES = (32, 64, 128)  # rows that may wait under greedy


def traffic(capacity: float) -> dict[str, Arrivals]:
    """Traffic that is more than can be served, all the time or now and then."""
    return {
        "steady, 1.05 times what can be served": Poisson(1.05 * capacity),
        "steady, 1.5 times": Poisson(1.5 * capacity),
        "steady, twice": Poisson(2.0 * capacity),
        "steady, 10 times": Poisson(10.0 * capacity),
        "twice for 0.3 s, nothing for 0.3 s": OnOff(capacity, on=0.3, off=0.3),
        "10 times for 0.1 s, nothing for 1 s": OnOff(10.0 * capacity / 11.0, on=0.1, off=1.0),
        "twice for 30 ms, nothing for 30 ms": OnOff(capacity, on=0.03, off=0.03),
        "clumps (gaps of CV 3), 0.9 times": GammaRenewal(0.9 * capacity, cv=3.0),
    }


def late(figures: Figures) -> float:
    """Of those served."""
    return figures.late_share


def in_time(figures: Figures) -> float:
    """Of those that arrived."""
    return (1.0 - figures.refused_share) * (1.0 - figures.late_share)


def compare(effort: Effort) -> Compared:
    """Play the solved policy against greedy with lines of several lengths."""
    profile = GOOGLENET_P4
    greedy = greedy_table(profile.max_batch_size).tolist()
    players: dict[str, Player] = {
        "solved": real(profile, SolvedPolicy(make_bank(profile, objective=OBJECTIVE)), deadline=OBJECTIVE.deadline)
    }
    for rows in LINES:
        rule = Rule(greedy, max_waiting=rows)
        players[f"greedy, line of {rows}"] = ruled(profile, rule, deadline=OBJECTIVE.deadline)
    made = Compared(["traffic", "policy", "p99, ms", "late, % of those served", "in time, % of those that arrived"])
    for name, arrivals in traffic(profile.max_rate).items():
        for policy, seen in play_all(arrivals, players, effort).items():
            shown = partial(show, factor=100.0)
            p99 = show(of(seen, lambda each: each.p99_ms))
            made.rows.append([name, policy, p99, shown(of(seen, late)), shown(of(seen, in_time))])
    return made


COMPARISON = Comparison("overload", "A promise under overload", lambda seeds: (1 + len(LINES)) * seeds * 8, compare)
