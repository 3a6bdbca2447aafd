"""Constant prices: a day's rate swings, and a row·millisecond costs the same at noon as at night."""

from benchmarks.policies.lines import Effort, Player, of, percent, play_all, real, saved, show, tuned_delay, tuned_limit
from benchmarks.policies.table import Compared, Comparison
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import solve_bank
from weir.simulation.arrivals import Sine
from weir.simulation.rounds import Figures

MEAN_LOAD, DEPTH, SWINGS = 0.45, 0.95, 4
ENERGY_WEIGHTS = (1.0, 10.0)


def compare(effort: Effort) -> Compared:
    """Play tables with constant prices, with the paper's, the one of the mean rate, and the best fixed rules."""
    profile = GOOGLENET_P4
    rate = MEAN_LOAD * profile.max_rate
    made = Compared(
        [
            "energy weight",
            "policy",
            "mean response, ms",
            "p99, ms",
            "power, W",
            "cost beyond the unavoidable",
            "solved saves",
        ]
    )
    for weight in ENERGY_WEIGHTS:
        constant, paper = Prices(1.0, weight, reference_rate=rate), Prices(1.0, weight)
        players: dict[str, Player] = {
            "solved, constant prices": real(profile, SolvedPolicy(solve_bank(profile, constant))),
            "solved, the paper's prices at each rate": real(profile, SolvedPolicy(solve_bank(profile, paper))),
            "table of the mean rate": real(profile, SolvedPolicy(solve_bank(profile, paper, rates=[rate]))),
            "best limit": tuned_limit(profile, constant),
            "best size and delay": tuned_delay(profile, constant),
            "greedy": real(profile, "greedy"),
        }
        arrivals = Sine(rate, depth=DEPTH, period=effort.requests / rate / SWINGS)
        seen = play_all(arrivals, players, effort)

        def cost(each: Figures, weight: float = weight) -> float:
            return each.excess_cost(1.0, weight)

        ours = seen["solved, constant prices"]
        for name, found in seen.items():
            made.rows.append([
                f"{weight:g}", name, show(of(found, lambda each: each.response_time_ms)), show(of(found, lambda each: each.p99_ms), 1),
                show(of(found, lambda each: each.power_w)), show(of(found, cost)), "" if found is ours else percent(saved(ours, found, cost)),
            ])  # fmt: skip
    return made


COMPARISON = Comparison("day", "A day of varying rate", lambda seeds: 6 * seeds * len(ENERGY_WEIGHTS), compare)
