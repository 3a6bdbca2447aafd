"""How many requests a core simulates a second: prints JSON, of each policy and load how many requests there were in a batch
and how many requests were simulated per second of processor time, the most of some runs."""

import json
import os
import time

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # before numpy is loaded

from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.decision import Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import solve_bank
from weir.simulation.simulator import simulate

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


def main() -> None:
    """Measure, and print."""
    policies: dict[str, str | Policy] = {"greedy": "greedy", "solved policy": SolvedPolicy(solve_bank(GOOGLENET_P4))}
    simulate(GOOGLENET_P4, policies, "poisson:0.5", requests=1_000)  # what is loaded once
    print(json.dumps([[name, load, *simulated(policy, load)] for name, policy in policies.items() for load in LOADS]))


if __name__ == "__main__":
    main()
