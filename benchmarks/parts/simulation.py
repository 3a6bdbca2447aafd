"""How fast policies are simulated.

The child prints of each policy and load how many requests there were in a batch and how many requests were simulated per second of
processor time, the most of some runs.
"""

import json
import time

from benchmarks.harness.result import Part, Result, Run, count, middle, spread
from benchmarks.harness.servers import ask_own
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.decision import Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import solve_bank
from weir.simulation.simulator import simulate

WISHED = 100_000  # requests a second


def measure(run: Run) -> Result:
    """Each round in a fresh process, on one core."""
    seen = []
    for _ in range(run.rounds):
        seen.append(ask_own("parts.simulation", one_thread=True))
        run.step(f"the slowest: {count(min(rate for *_, rate in seen[-1]))} a second")
    result = Result(["policy", "share of capacity", "requests in a batch", "requests simulated a second"])
    for of_one in zip(*seen, strict=True):
        policy, load, size, _ = of_one[0]
        rates = [rate for *_, rate in of_one]
        result.rows.append([policy, f"{load:g}", f"{size:.1f}", spread(rates, count)])
        result.values[f"{policy} {load:g}"] = middle(rates)
    slowest = min(result.values.values())
    result.goal(f"at least {count(WISHED)} simulated requests a second", count(slowest), slowest >= WISHED)
    result.notes.append(
        "The paper's profile and Poisson arrivals, with all that `weir simulate` measures; the best of each process, as processor "
        "time of its one thread. What costs time is the batcher's decision: one for each batch, and for each wait."
    )
    return result


LOADS = (0.1, 0.3, 0.7)
REQUESTS = 200_000
RUNS = 3


def simulated(policy: str | Policy, load: float) -> tuple[float, float]:
    """Return the requests in a batch, and the requests per second."""
    taken, size = [], 0.0
    for _ in range(RUNS):
        began = time.process_time()
        seen = simulate(GOOGLENET_P4, {"policy": policy}, f"poisson:{load}", requests=REQUESTS)
        taken.append(time.process_time() - began)
        size = seen.outcomes["policy"].batch_size
    return size, REQUESTS / min(taken)


def simulate_all() -> None:
    """Measure, and print."""
    policies: dict[str, str | Policy] = {"greedy": "greedy", "solved policy": SolvedPolicy(solve_bank(GOOGLENET_P4))}
    simulate(GOOGLENET_P4, policies, "poisson:0.5", requests=1_000)  # what is loaded once
    print(json.dumps([[name, load, *simulated(policy, load)] for name, policy in policies.items() for load in LOADS]))


PART = Part(
    "simulation",
    "Simulating",
    "Policies in virtual time, with the server's own batcher, on one core.",
    lambda rounds: rounds,
    measure,
)


if __name__ == "__main__":
    simulate_all()
