"""A latency objective: the energy beyond the unavoidable, against plain limits and timeouts that keep the same tail."""

from math import isnan

from reproduction.response import response_time

from benchmarks.policies.lines import (
    Effort,
    Player,
    of,
    percent,
    play_all,
    real,
    ruled,
    saved,
    show,
    tuned_delay,
    tuned_limit,
)
from benchmarks.policies.table import Compared, Comparison
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.tables import Table, limit_table
from weir.simulation.arrivals import Poisson
from weir.simulation.banks import make_bank
from weir.simulation.rounds import Figures, Rule

LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
OBJECTIVE = LatencySLO.parse("p99=20ms")
# Finer than any hand would: the rival must not lose for want of a setting.
SIZES = (8, 16, 24, 32)
DELAYS = tuple(half / 2000.0 for half in range(10, 38))


def excess(figures: Figures) -> float:
    """The power beyond what no policy can avoid."""
    return figures.excess_w


def late_share(figures: Figures) -> float:
    """Of those served."""
    return figures.late_share


def refused_share(figures: Figures) -> float:
    """Of those that arrived."""
    return figures.refused_share


def exact_limit(rate: float) -> Table | None:
    """Return the table of the largest control limit that keeps the objective, by the exact law of its response time."""
    for limit in range(GOOGLENET_P4.max_batch_size, 0, -1):
        table = limit_table(limit, GOOGLENET_P4.max_batch_size)
        if response_time(GOOGLENET_P4, rate, table).beyond(1000.0 * OBJECTIVE.deadline) <= OBJECTIVE.late_share:
            return table
    return None


def exact(rate: float) -> Player:
    """That limit; it cannot where none keeps the objective."""
    table = exact_limit(rate)
    if table is None:
        return lambda times, seed: None
    return ruled(GOOGLENET_P4, Rule(table.tolist()))


def compare(effort: Effort) -> Compared:
    """Play the solved policy, the best limit and the best size and delay at each load."""
    bank = make_bank(GOOGLENET_P4, objective=OBJECTIVE)
    made = Compared([
        "load", "solved: excess, W", "late, %", "refused, %", "best limit, by its exact law: excess, W", "saved",
        "best limit on the line: excess, W", "saved", "best size and delay on the line: excess, W", "saved",
    ])  # fmt: skip
    for load in LOADS:
        arrivals = Poisson(load * GOOGLENET_P4.max_rate)
        players: dict[str, Player] = {
            "solved": real(GOOGLENET_P4, SolvedPolicy(bank), deadline=OBJECTIVE.deadline),
            "exact": exact(load * GOOGLENET_P4.max_rate),
            "limit": tuned_limit(GOOGLENET_P4, Prices(), objective=OBJECTIVE),
            "delay": tuned_delay(GOOGLENET_P4, Prices(), DELAYS, sizes=SIZES, objective=OBJECTIVE),
        }
        seen = play_all(arrivals, players, effort)
        ours, lawful, limit, delay = (seen[name] for name in players)
        row = [f"{load:g}", show(of(ours, excess))]
        row += [show(of(ours, share), 2, 100.0) for share in (late_share, refused_share)]
        for rival in (lawful, limit, delay):
            row += [show(of(rival, excess)), percent(saved(ours, rival, excess))]
        made.rows.append(row)
        for name, each in seen.items():
            found = of(each, excess)
            made.values.setdefault(name, []).append(found.value if found is not None else float("nan"))
    made.values["load"] = list(LOADS)
    assert not any(isnan(value) for value in made.values["solved"])  # it can everywhere
    return made


COMPARISON = Comparison("promise", "A latency objective", lambda seeds: 4 * seeds * len(LOADS), compare)
