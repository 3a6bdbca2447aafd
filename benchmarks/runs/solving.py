"""What solving takes of one core: prints JSON, seconds of processor time by name, the least of some runs of each."""

import json
import os
import time
from collections.abc import Callable

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # before numpy is loaded

from reproduction.truncated import solve_truncated

from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.solve.bank import default_rates, solve_bank

LOAD = 0.9


def larger(max_batch_size: int) -> Profile:
    """Return the paper's profile with larger batches."""
    fit = GOOGLENET_P4.fit()
    return Profile.linear(
        alpha_ms=fit.alpha_ms, tau0_ms=fit.tau0_ms, beta_mj=fit.beta_mj, zeta0_mj=fit.zeta0_mj,
        max_batch_size=max_batch_size,
    )  # fmt: skip


def seconds(work: Callable[[], object], runs: int = 3) -> float:
    """Return what the quickest of some runs took, of this process alone."""
    taken = []
    for _ in range(runs):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def main() -> None:
    """Measure, and print."""
    middle, large = larger(128), larger(256)
    rates = default_rates(middle.max_rate)
    found = {
        "policy iteration 32": seconds(
            lambda: solve_truncated(GOOGLENET_P4, LOAD * GOOGLENET_P4.max_rate, s_max=100), 20
        ),
        "value iteration 32": seconds(
            lambda: solve_truncated(GOOGLENET_P4, LOAD * GOOGLENET_P4.max_rate, s_max=100, method="value-iteration")
        ),
        "value iteration 32, to 1e-6": seconds(
            lambda: solve_truncated(
                GOOGLENET_P4, LOAD * GOOGLENET_P4.max_rate, s_max=100, method="value-iteration", epsilon=1e-6
            )
        ),
        "policy iteration 256": seconds(lambda: solve_truncated(large, LOAD * large.max_rate, s_max=1000)),
        "value iteration 256": seconds(
            lambda: solve_truncated(large, LOAD * large.max_rate, s_max=1000, method="value-iteration"), 1
        ),
        "bank 128": seconds(lambda: solve_bank(middle, rates=rates)),
        "whole bank 128": seconds(lambda: solve_bank(middle)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
