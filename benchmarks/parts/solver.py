"""What solving takes, beside what was wished. The child prints the processor seconds of each piece of work, the least of some runs."""

import json
import time
from collections.abc import Callable

from reproduction.truncated import solve_truncated

from benchmarks.harness.result import Part, Result, Run, middle, milliseconds, spread
from benchmarks.harness.servers import ask_own
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.solve.bank import default_rates, solve_bank

WORK = {
    "policy iteration 32": "policy iteration, batches up to 32, s_max 100",
    "value iteration 32": "relative value iteration of the same model, span below 0.01",
    "value iteration 32, to 1e-6": "relative value iteration of the same model, span below 0.000001",
    "policy iteration 256": "policy iteration, batches up to 256, s_max 1000",
    "value iteration 256": "relative value iteration of the same model, span below 0.01",
    "bank 128": "a bank of 24 rates, batches up to 128, with all predictions",
    "whole bank 128": "the bank that `weir solve` makes of it, with rates between where the limit moves",
}
GOALS = (("policy iteration 32", 0.005), ("policy iteration 256", 0.5), ("bank 128", 1.0))
TIMES = 50.0


def measure(run: Run) -> Result:
    """Each round in a fresh process, on one core."""
    seen = []
    for _ in range(run.rounds):
        seen.append(ask_own("parts.solver", one_thread=True))
        run.step(f"policy iteration {milliseconds(seen[-1]['policy iteration 32'])} ms")
    result = Result(["work", "ms"])
    for name, text in WORK.items():
        result.rows.append([text, spread([one[name] for one in seen], milliseconds)])
        result.values[name] = middle([one[name] for one in seen])
    for name, most in GOALS:
        taken = result.values[name]
        result.goal(f"{WORK[name]}: under {milliseconds(most)} ms", milliseconds(taken), taken < most)
    for slow, size in (("32", "32"), ("32, to 1e-6", "32"), ("256", "256")):
        times = middle([one[f"value iteration {slow}"] / one[f"policy iteration {size}"] for one in seen])
        result.goal(
            f"policy iteration at least {TIMES:g} times faster than value iteration, batches up to {slow}",
            f"{times:.0f} times",
            times >= TIMES,
        )
    result.notes.append(
        "The paper's profile at 0.9 of its capacity, continued to larger batches; the best of each process, as processor time of its one thread."
    )
    return result


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


def solve_all() -> None:
    """Measure, and print."""
    larger_128, larger_256 = larger(128), larger(256)
    rates = default_rates(larger_128.max_rate)
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
        "policy iteration 256": seconds(lambda: solve_truncated(larger_256, LOAD * larger_256.max_rate, s_max=1000)),
        "value iteration 256": seconds(
            lambda: solve_truncated(larger_256, LOAD * larger_256.max_rate, s_max=1000, method="value-iteration"), 1
        ),
        "bank 128": seconds(lambda: solve_bank(larger_128, rates=rates)),
        "whole bank 128": seconds(lambda: solve_bank(larger_128)),
    }
    print(json.dumps(found))


PART = Part(
    "solver",
    "Solving",
    "The tables of a solved policy, computed on one core.",
    lambda rounds: rounds,
    measure,
)


if __name__ == "__main__":
    solve_all()
