"""The silence guard: what a pure table does when traffic stops, and what the guard costs when it does not."""

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
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.rate import SILENCE
from weir.policy.solve.bank import solve_bank
from weir.simulation.arrivals import Arrivals, OnOff, Poisson
from weir.simulation.rounds import Figures, Rule

LOAD, ON, OFF = 0.3, 0.1, 1.0  # of the busy times; seconds
PRICES = Prices(1.0, 10.0)


def cost(figures: Figures) -> float:
    """What it costs beyond the unavoidable."""
    return figures.excess_cost(PRICES.latency_weight, PRICES.energy_weight)


def compare(effort: Effort) -> Compared:
    """Play the same table with and without the guard, and the whole policy, on both kinds of traffic."""
    profile = GOOGLENET_P4
    rate = LOAD * profile.max_rate
    table = solve_bank(profile, PRICES, rates=[rate]).tables[0].tolist()
    traffic: dict[str, Arrivals] = {
        "Poisson": Poisson(rate),
        f"on for {ON:g} s, off for {OFF:g} s": OnOff(rate * ON / (ON + OFF), on=ON, off=OFF),
    }
    made = Compared(
        [
            "traffic",
            "policy",
            "mean response, ms",
            "p99, ms",
            "power, W",
            "cost beyond the unavoidable",
            "the guard saves",
        ]
    )
    for name, arrivals in traffic.items():
        players: dict[str, Player] = {
            "the table alone": ruled(profile, Rule(table)),
            "the table with the guard": ruled(profile, Rule(table, silence=SILENCE / rate)),
            "solved policy (bank, estimated rate, guards)": real(profile, SolvedPolicy(solve_bank(profile, PRICES))),
            "best limit": tuned_limit(profile, PRICES),
            "best size and delay": tuned_delay(profile, PRICES),
        }
        seen = play_all(arrivals, players, effort)
        alone, guarded = seen["the table alone"], seen["the table with the guard"]
        for policy, found in seen.items():
            made.rows.append([
                name, policy, show(of(found, lambda each: each.response_time_ms)), show(of(found, lambda each: each.p99_ms), 1),
                show(of(found, lambda each: each.power_w)), show(of(found, cost)),
                percent(saved(guarded, alone, cost)) if found is guarded else "",
            ])  # fmt: skip
    return made


COMPARISON = Comparison("silence", "When traffic stops", lambda seeds: 5 * seeds * 2, compare)
