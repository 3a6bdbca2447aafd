"""Several workers: one line for all, with one limit, against random splitting and against the best hand-tuned rules."""

import numpy as np

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
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Floats
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import solve_bank
from weir.policy.solve.tables import multi_worker_table, start_limit
from weir.simulation.arrivals import Poisson
from weir.simulation.banks import make_bank
from weir.simulation.rounds import Figures, Rule

CREWS = (2, 4)
LOADS = (0.3, 0.5, 0.7, 0.9)
PRICES = Prices(1.0, 1.0)


def cost(figures: Figures) -> float:
    """What it costs beyond the unavoidable; power is that of all workers."""
    return figures.excess_cost(1.0, 1.0)


def split(workers: int, rate: float) -> Player:
    """Each worker has a line of its own, rows choose theirs by chance, and each line has the table that is best for it.

    The line of one worker draws 1/workers of the power, so its energy weighs `workers` times as much against latency.
    """
    profile = GOOGLENET_P4
    bank = solve_bank(profile, Prices(1.0, float(workers)), rates=[rate / workers])
    play_one = real(profile, SolvedPolicy(bank))

    def player(times: Floats, seed: int) -> Figures:
        chosen = np.random.default_rng([seed, 7]).integers(workers, size=len(times))
        parts = [play_one(times[chosen == worker], seed) for worker in range(workers)]
        return _together([part for part in parts if part is not None])

    return player


def _together(parts: list[Figures]) -> Figures:
    """Return the means over the lines; power is their sum."""
    columns = np.mean(np.array(parts, dtype=np.float64), axis=0).tolist()
    middle = Figures(*columns)
    return middle._replace(power_w=middle.power_w * len(parts), excess_w=middle.excess_w * len(parts))


def compare(effort: Effort) -> Compared:
    """Play every way at each load."""
    profile = GOOGLENET_P4
    made = Compared([
        "workers", "load", "solved, one line", "limit by closed form alone", "random splitting", "solved saves", "best limit",
        "solved saves", "best size and delay", "solved saves",
    ])  # fmt: skip
    for workers in CREWS:
        bank = make_bank(profile, PRICES, workers=workers)
        for load in LOADS:
            rate = load * workers * profile.max_rate
            first = multi_worker_table(profile, start_limit(profile, rate, PRICES)).tolist()
            players: dict[str, Player] = {
                "solved": real(profile, SolvedPolicy(bank), workers=workers),
                "closed form": ruled(profile, Rule(first), workers=workers),
                "split": split(workers, rate),
                "limit": tuned_limit(profile, PRICES, workers=workers),
                "delay": tuned_delay(profile, PRICES, workers=workers),
            }
            seen = play_all(Poisson(rate), players, effort)
            ours, closed, apart, limit, delay = seen.values()
            made.rows.append([
                str(workers), f"{load:g}", show(of(ours, cost)), show(of(closed, cost)), show(of(apart, cost)),
                percent(saved(ours, apart, cost)), show(of(limit, cost)), percent(saved(ours, limit, cost)),
                show(of(delay, cost)), percent(saved(ours, delay, cost)),
            ])  # fmt: skip
            for name, found in seen.items():
                value = of(found, cost)
                made.values.setdefault(f"{workers} {name}", []).append(value.value if value else float("nan"))
    made.values["load"] = list(LOADS)
    return made


COMPARISON = Comparison("crew", "Several workers, one line", lambda seeds: 5 * seeds * len(LOADS) * len(CREWS), compare)
