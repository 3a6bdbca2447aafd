"""What solving takes, beside what was wished."""

from benchmarks.children import ask_own
from benchmarks.result import Part, Result, Run, middle, milliseconds, spread

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
        seen.append(ask_own("solving"))
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


PART = Part(
    "solver",
    "Solving",
    "The tables of a solved policy, computed on one core.",
    lambda rounds: rounds,
    measure,
)
