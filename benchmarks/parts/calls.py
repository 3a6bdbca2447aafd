"""Concurrent calls in process, beside mpservice."""

from collections import defaultdict

from benchmarks.children import ask, ask_own
from benchmarks.peer_setup import python_of, script
from benchmarks.result import Part, Result, Run, count, middle, ratio, rotated, spread

ITEMS = 20_000
LOOPS = ("asyncio", "uvloop")
WEIR, MPSERVICE = "Weir", "mpservice"


def measure(run: Run) -> Result:
    """Alternate the two, on both event loops."""
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(run.rounds):
        for loop in LOOPS:
            for name in rotated((WEIR, MPSERVICE), turn):
                rate = _one(name, loop)
                rates[name, loop].append(rate)
                run.step(f"{name} on {loop}: {count(rate)} items/s")
    return _result(rates)


def _one(name: str, loop: str) -> float:
    if name == WEIR:
        return float(ask_own("calls", ITEMS, loop))
    return float(ask([python_of("mpservice"), script("mpservice_calls.py"), str(ITEMS), loop]))


def _result(rates: dict[tuple[str, str], list[float]]) -> Result:
    result = Result(["event loop", "server", "items/s", "times mpservice"])
    for loop in LOOPS:
        for name in (WEIR, MPSERVICE):
            times = ratio(rates[name, loop], rates[MPSERVICE, loop])
            result.rows.append([loop, name, spread(rates[name, loop], count), f"{times:.1f}"])
            result.values[f"{name} {loop}"] = middle(rates[name, loop])
        times, rate = ratio(rates[WEIR, loop], rates[MPSERVICE, loop]), middle(rates[WEIR, loop])
        result.values[f"times mpservice {loop}"] = times
        result.goal(f"{loop}: at least 20 times mpservice", f"{times:.1f}", times >= 20)
        result.goal(f"{loop}: at least 150,000 items/s", count(rate), rate >= 150_000)
    return result


PART = Part(
    "in-process",
    "Calls in process",
    f"{ITEMS:,} concurrent calls of square from one event loop, one worker process, batches of up to 64. mpservice waits up "
    "to 5 ms for them; Weir gives the worker its next batch while it computes (`pipeline_depth=2`).",
    lambda rounds: rounds * len(LOOPS) * 2,
    measure,
)
