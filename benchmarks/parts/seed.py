"""The test that the author of "Service batching from scratch" published."""

from benchmarks.children import ask_own
from benchmarks.result import Part, Result, Run, middle, short, spread


def measure(run: Run) -> Result:
    """Run it afresh in each round."""
    sequential, at_once = [], []
    for _ in range(run.rounds):
        one, other = ask_own("seed")
        sequential.append(one)
        at_once.append(other)
        run.step(f"{one:.2f} s one after another, {other * 1e3:.1f} ms at once")
    result = Result(["880 items", "seconds", "published in 2020"])
    result.rows.append(["one after another", spread(sequential, short), "90.9"])
    result.rows.append(["at once", spread(at_once, short), "0.124"])
    result.goal("one after another in under 3 s", f"{middle(sequential):.2f} s", middle(sequential) < 3)
    result.goal("at once in under 0.1 s", f"{middle(at_once):.4f} s", middle(at_once) < 0.1)
    result.values |= {"seed sequential": middle(sequential), "seed at once": middle(at_once)}
    result.notes.append(
        "The published figures are from another, unnamed machine; nearly all of the 90.9 s was a timer's wait."
    )
    return result


PART = Part(
    "seed",
    "The test this all began with",
    "880 items to a model that sleeps 0.001 · ln(n + 1) seconds for a batch of n, batches of up to 200, in process.",
    lambda rounds: rounds,
    measure,
)
