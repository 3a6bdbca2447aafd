"""What it costs a solved policy not to know the arrival rate. Simulated: the real batcher, in virtual time.

`python -m benchmarks.following [--requests N] [--starts N]` prints the tables of docs/explanation/following-the-rate.md.
"""

import argparse
from bisect import bisect
from collections.abc import Callable

import numpy as np
from rich.console import Console

from benchmarks.harness.result import markdown
from weir.policy.cost import GOOGLENET_P4, Floats, Prices
from weir.policy.decision import Decision, Observation, Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.rate import SILENCE, RateBand, RateBands
from weir.policy.solve.bank import Bank, solve_bank
from weir.simulation.arrivals import RecordedArrivals
from weir.simulation.results import Comparison
from weir.simulation.simulator import run, simulate

PROFILE = GOOGLENET_P4
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
Law = tuple[Floats, Floats]  # the edges of segments in seconds, and the rate within each


class Knowing:
    """An oracle: looks up as the solved policy does, but is told the rate of each instant."""

    def __init__(self, bank: Bank, law: Law, start: float) -> None:
        self._stages = RateBands(bank)
        self._edges, self._rates = (law[0] - start).tolist(), law[1].tolist()

    def decide(self, seen: Observation) -> Decision:
        """Look up; wait for a silence at most."""
        rate = max(self._rates[bisect(self._edges, seen.now) - 1], 1e-9)
        stage: RateBand = self._stages.at(rate)
        answer = stage.decisions[min(seen.waiting, len(stage.decisions) - 1)]
        if answer is not None:
            return answer
        until = seen.last_arrival + SILENCE / rate
        return Decision(0, until=until) if seen.now < until else Decision(min(seen.waiting, seen.max_batch_size))


def steady(rate: float, seconds: float, rng: np.random.Generator) -> Law:
    """Return a rate that never changes."""
    return np.array([0.0, seconds]), np.array([rate])


def swinging(period: float) -> Callable[[float, float, np.random.Generator], Law]:
    """Return the law of a rate that swings by 80 % around its mean."""

    def law(rate: float, seconds: float, rng: np.random.Generator) -> Law:
        edges = np.arange(0.0, seconds + period, period / 400.0)
        return edges, rate * (1.0 + 0.8 * np.sin(2.0 * np.pi * (edges[:-1] + edges[1:]) / 2.0 / period))

    return law


def bursting(burst: float, period: float, share: float = 0.2) -> Callable[[float, float, np.random.Generator], Law]:
    """Return the law of two phases of exponential length, the busy one `burst` times as fast."""

    def law(rate: float, seconds: float, rng: np.random.Generator) -> Law:
        count = int(2.0 * seconds / period) + 10
        lengths = rng.exponential(np.tile([period * (1.0 - share), period * share], count))
        quiet = rate / (1.0 - share + share * burst)
        return np.concatenate(([0.0], np.cumsum(lengths))), np.tile([quiet, burst * quiet], count)

    return law


TRAFFIC = {
    "Poisson, load 0.3": (steady, 0.3),
    "Poisson, load 0.7": (steady, 0.7),
    "swings by 80 % in 10 s, load 0.5": (swinging(10.0), 0.5),
    "swings by 80 % in 1 s, load 0.5": (swinging(1.0), 0.5),
    "swings by 80 % in 0.1 s, load 0.5": (swinging(0.1), 0.5),
    "bursts of 5 times, 0.2 s of each 1 s, load 0.4": (bursting(5.0, 1.0), 0.4),
    "bursts of 5 times, 20 ms of each 0.1 s, load 0.4": (bursting(5.0, 0.1), 0.4),
    "bursts of 20 times, 0.2 s of each 1 s, load 0.15": (bursting(20.0, 1.0), 0.15),
}


def arrivals(law: Law, count: int, rng: np.random.Generator) -> Floats:
    """Return Poisson arrivals of that rate."""
    sums = np.concatenate(([0.0], np.cumsum(np.diff(law[0]) * law[1])))
    targets = np.cumsum(rng.exponential(1.0, count))
    return np.asarray(np.interp(targets[targets < sums[-1]], sums, law[0]), dtype=np.float64)


def compare(name: str, weight: float, count: int) -> list[str]:
    """Return a row: what the solved policy, one table for the mean rate and greedy cost beyond the oracle."""
    make, load = TRAFFIC[name]
    rate, rng = load * PROFILE.max_rate, np.random.default_rng(5)
    law = make(rate, 1.3 * count / rate, rng)
    times = arrivals(law, count, rng)
    prices = Prices(1.0, weight, rate)
    bank = solve_bank(PROFILE, prices)
    policies: dict[str, str | Policy] = {
        "oracle": Knowing(bank, law, float(times[0])),
        "solved": SolvedPolicy(bank),
        "mean": SolvedPolicy(one_table(bank, rate)),
        "greedy": "greedy",
    }
    seen = simulate(PROFILE, policies, RecordedArrivals(times), prices=prices)
    rest = [beyond(seen, each) for each in ("solved", "mean", "greedy")]
    late = [f"{seen.outcomes[each].p99_ms.value:.1f}" for each in policies]
    return [name, f"{weight:g}", *rest, *late]


def one_table(bank: Bank, rate: float) -> Bank:
    """Return a bank that has the table of one rate for all rates."""
    found = solve_bank(PROFILE, bank.prices, rates=[rate]).tables
    tables = np.tile(found, (len(bank.rates), 1))
    return Bank(**{**vars(bank), "tables": tables})


def beyond(seen: Comparison, name: str) -> str:
    """Return the extra cost over the oracle's, in per cent, with its 95 % interval."""
    extra, base = seen.difference(name, "oracle"), seen.outcomes["oracle"].cost.value
    return "{:+.2f} % ({:+.2f} to {:+.2f})".format(*(100.0 * each / base for each in extra))


def start(load: float, prices: Prices, starts: int, requests: int) -> tuple[float, float]:
    """Return the extra cost over greedy's of the first requests after a cold start, and its upper bound (95 %), in per cent."""
    rate = load * PROFILE.max_rate
    policy, greedy, more = SolvedPolicy(solve_bank(PROFILE, prices)), [], []
    for seed in range(starts):
        times = np.cumsum(np.random.default_rng([seed, 7]).exponential(1.0 / rate, requests))
        costs = []
        for each in (policy, "greedy"):
            done = run(PROFILE, each, times)
            energy = float(PROFILE.energy_mj[done.batches.rows - 1].sum()) / 1000.0
            response = float(done.response_time_ms.mean())
            costs.append(prices.latency_weight_at(rate) * response + prices.energy_weight * energy / float(times[-1]))
        greedy.append(costs[1])
        more.append(costs[0] - costs[1])
    scale = 100.0 / float(np.mean(greedy))
    mean, spread = float(np.mean(more)), float(np.std(more, ddof=1)) / starts**0.5
    return scale * mean, scale * (mean + 1.96 * spread)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser("benchmarks.following", description=__doc__)
    parser.add_argument("--requests", type=int, default=60_000, help="of each traffic")
    parser.add_argument("--starts", type=int, default=200, help="cold starts, of 200 requests each")
    asked = parser.parse_args()
    console = Console(soft_wrap=True)
    columns = ["traffic", "w2", "solved", "one table", "greedy", "p99 ms: oracle", "solved", "one table", "greedy"]
    rows = [compare(name, weight, asked.requests) for weight in (1.0, 10.0) for name in TRAFFIC]
    console.print(markdown(columns, rows), markup=False)
    prices = [Prices(1.0, 0.0), Prices(1.0, 1.0), Prices(1.0, 10.0), Prices(1.0, 1.0, 1000.0)]
    lines = []
    for load in LOADS:
        found = [start(load, each, asked.starts, 200) for each in prices]
        lines.append([f"{load:g}", *(f"{mean:+.2f} % (at most {most:+.2f})" for mean, most in found)])
    columns = ["load", "w2 = 0", "w2 = 1", "w2 = 10", "w2 = 1, prices constant"]
    console.print("\n" + markdown(columns, lines), markup=False)


if __name__ == "__main__":
    main()
