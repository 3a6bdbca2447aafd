"""How fast policies are simulated."""

from benchmarks.children import ask_own
from benchmarks.result import Part, Result, Run, count, middle, spread

WISHED = 100_000  # requests a second


def measure(run: Run) -> Result:
    """Each round in a fresh process, on one core."""
    seen = []
    for _ in range(run.rounds):
        seen.append(ask_own("simulating"))
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


PART = Part(
    "simulation",
    "Simulating",
    "Policies in virtual time, with the server's own batcher, on one core.",
    lambda rounds: rounds,
    measure,
)
