"""Callers of texts beside each other: a large one and small ones, two large ones; over HTTP and over ZeroMQ."""

from benchmarks.crowd import DOORS, SMALL, cases
from benchmarks.result import Part, Result, Run


def measure(run: Run) -> Result:
    """Measure every case once, for as long as all rounds would take."""
    result = Result(["door", "case", "measured"])
    for case in cases(DOORS, run.rounds * run.seconds):
        result.rows.append([case.door, case.what, case.seen])
        result.goal(f"{case.door}, {case.what}: {case.wished}", f"{case.value:.2f}", case.met)
        result.values[f"{case.door} {case.what}"] = case.value
        run.step(f"{case.door}, {case.what}: {case.seen}")
    result.notes.append(
        "One client sends 10,000 sentences every 10 ms, or as fast as the server takes them, all-MiniLM-L6-v2 on all cores; "
        f"meanwhile {SMALL} others send one sentence a second each. Then two clients keep 256 sentences under way each. A batch is what workers took for it on average "
        "meanwhile."
    )
    return result


PART = Part(
    "crowd",
    "A crowd of callers",
    "What a large client leaves to small ones, and to another as large.",
    lambda rounds: 2 * len(DOORS),
    measure,
)
