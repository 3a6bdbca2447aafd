"""How far the policies are from what could be done knowing the future, on recorded traffic and one worker.

All meet the same arrivals in the real batcher and virtual time, and all costs are counted in the same way: the mean response time
in ms plus w2 times the mean power in watts.
"""

from itertools import product

import numpy as np

from benchmarks.policies.bursts import MOST, PROFILE, bank, costs, recorded
from benchmarks.policies.clairvoyant import clairvoyant
from benchmarks.policies.harness import DELAYS, SIZES, Compared, Comparison, Effort, best_size_or_delay
from weir.policy.cost import Floats, Prices
from weir.policy.decision import Policy
from weir.policy.online.adaptive import AutoPolicy, SolvedPolicy
from weir.simulation.statistics import STRETCHES, Estimate, estimate

TRACES = {"conv": "chat", "code": "code"}
LOADS, WEIGHTS = (0.3, 0.5, 0.7, 0.9), (0.0, 0.3, 1.0)
POLICIES = ("solved", "auto", "greedy", "the best size and delay")
ABOUT = "a recorded hour of each, in virtual time; `results.json` has intervals of 95 %"
COLUMNS = ["trace", "load", "w2", "clairvoyant optimum", *(f"{name}: above it" for name in POLICIES)]


def compare(effort: Effort) -> Compared:
    """Play every policy on both traces, at all loads and weights."""
    made = Compared(COLUMNS, about={"lines": ABOUT})
    above: dict[str, list[float]] = {name: [] for name in POLICIES}
    for name, load, weight in product(TRACES, LOADS, WEIGHTS):
        rate = load * PROFILE.max_rate
        times = recorded(name, rate).times(np.random.default_rng(1), min(MOST, effort.requests))
        least, seen = beside_the_optimum(times, rate, weight)
        for policy, each in seen.items():
            above[policy].append(each.value)
        cells = ["{:+.1f} % ({:+.1f} to {:+.1f})".format(*seen[policy]) for policy in POLICIES]
        made.rows.append([TRACES[name], f"{load:g}", f"{weight:g}", f"{least:.2f}", *cells])
        made.values[f"{name} {load:g} {weight:g}"] = [seen[policy].value for policy in POLICIES]
        effort.step(f"{name}, load {load:g}, w2 {weight:g}")
    cells = [f"mean {np.mean(above[policy]):+.1f} %, at most {max(above[policy]):+.1f} %" for policy in POLICIES]
    made.rows.append(["all", "", "", "", *cells])
    return made


def beside_the_optimum(times: Floats, rate: float, weight: float) -> tuple[float, dict[str, Estimate]]:
    """Return the least cost by row of rows that arrive at `times`, and by how many per cent each policy costs more: with a 95 %
    interval, over stretches of the same rows."""
    least = np.array(
        [part.mean() for part in np.array_split(clairvoyant(PROFILE, times, weight * rate / 1000.0), STRETCHES)]
    )
    auto = AutoPolicy(energy_weight=weight)
    auto.adopt(bank(weight, None))
    tuned = best_size_or_delay(PROFILE, times, Prices(1.0, weight), sizes=SIZES, delays=(0.0, *DELAYS))
    assert tuned is not None
    policies: tuple[str | Policy, ...] = (SolvedPolicy(bank(weight, rate)), auto, "greedy", tuned.policy)
    return float(least.mean()), {
        name: estimate(100.0 * (costs(PROFILE, policy, times, rate, weight) - least) / least.mean())
        for name, policy in zip(POLICIES, policies, strict=True)
    }


FORESEEN = Comparison(
    "foreseen",
    "Recorded traffic, beside what could be done knowing the future",
    lambda seeds: len(TRACES) * len(LOADS) * len(WEIGHTS),
    compare,
    exact=True,
)
