"""What a decision and a request cost, and that neither grows with the line."""

from benchmarks.children import ask_own
from benchmarks.result import Part, Result, Run, middle, rotated, spread

WAITING = (10, 1_000, 100_000)
COSTS = ("submit", "decision", "request")


def measure(run: Run) -> Result:
    """Each length of the line in a fresh process, in turn."""
    seen: dict[int, list[dict[str, float]]] = {waiting: [] for waiting in WAITING}
    for turn in range(run.rounds):
        for waiting in rotated(WAITING, turn):
            seen[waiting].append(ask_own("decisions", waiting))
            run.step(f"{waiting:,} waiting: {seen[waiting][-1]['request']:.2f} µs a request")
    result = Result(["waiting", "a submit, µs", "a decision, µs", "a request in the core, µs"])
    for waiting in WAITING:
        costs = [spread([one[cost] for one in seen[waiting]], "{:.2f}".format) for cost in COSTS]
        result.rows.append([f"{waiting:,}", *costs])
    _goals(result, seen)
    result.notes.append(
        "A decision asks the policy and takes the batch out of the line: up to 64 requests, with 10 waiting only 10. A "
        "request in the core is its submit, its share of the decision and its end. What a request costs the whole "
        "server process, kernel included, is the column *CPU µs front* under *Square over HTTP*."
    )
    return result


def _goals(result: Result, seen: dict[int, list[dict[str, float]]]) -> None:
    for cost in COSTS:
        few, many = (middle([one[cost] for one in seen[waiting]]) for waiting in (1_000, 100_000))
        result.values |= {f"{cost} 1000": few, f"{cost} 100000": many}
        result.goal(
            f"{cost}: 100,000 waiting cost no more than 1,000 (within 25 %)", f"{many / few:.2f}", many <= 1.25 * few
        )


PART = Part(
    "decisions",
    "One decision, one request",
    "The batcher driven as the service drives it, with that many requests standing in the line.",
    lambda rounds: rounds * len(WAITING),
    measure,
)
