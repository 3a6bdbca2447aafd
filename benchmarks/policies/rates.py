"""The bank: what follows from estimating the rate, and what happens to a table at a rate it was not made for."""

from benchmarks.policies.lines import Effort, Player, of, percent, play_all, real, saved, show, tuned_delay, tuned_limit
from benchmarks.policies.table import Compared, Comparison
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import solve_bank
from weir.simulation.arrivals import Poisson
from weir.simulation.rounds import Figures

LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)
PRICES = Prices(1.0, 1.0)


def cost(figures: Figures) -> float:
    """What it costs beyond the unavoidable."""
    return figures.excess_cost(1.0, 1.0)


def compare(effort: Effort) -> Compared:
    """Play the bank, an oracle that knows the rate, and the best fixed rules."""
    profile = GOOGLENET_P4
    bank = solve_bank(profile, PRICES)
    made = Compared([
        "load", "bank, rate estimated", "p99, ms", "oracle: the table of the true rate", "estimating costs", "best limit",
        "bank saves", "best size and delay", "bank saves",
    ])  # fmt: skip
    for load in LOADS:
        rate = load * profile.max_rate
        players: dict[str, Player] = {
            "bank": real(profile, SolvedPolicy(bank)),
            "oracle": real(profile, SolvedPolicy(solve_bank(profile, PRICES, rates=[rate]))),
            "limit": tuned_limit(profile, PRICES),
            "delay": tuned_delay(profile, PRICES),
        }
        seen = play_all(Poisson(rate), players, effort)
        ours, oracle, limit, delay = (seen[name] for name in players)
        made.rows.append([
            f"{load:g}", show(of(ours, cost), 3), show(of(ours, lambda each: each.p99_ms)), show(of(oracle, cost), 3),
            percent(saved(oracle, ours, cost)), show(of(limit, cost), 3), percent(saved(ours, limit, cost)),
            show(of(delay, cost), 3), percent(saved(ours, delay, cost)),
        ])  # fmt: skip
    return made


COMPARISON = Comparison(
    "rates", "Poisson arrivals of a rate that must be estimated", lambda seeds: 4 * seeds * len(LOADS), compare
)
