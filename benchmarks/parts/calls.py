"""Concurrent calls in process, beside mpservice. The child `ITEMS LOOP` prints items/s."""

import asyncio
import json
import sys
import time
from collections import defaultdict

import uvloop

import weir
from benchmarks.harness.result import Part, Result, Run, count, middle, ratio, rotated, spread
from benchmarks.harness.servers import ask, ask_own, python_of, script
from benchmarks.models import Square

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
        return float(ask_own("parts.calls", ITEMS, loop))
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


async def call_at_once(items: int) -> float:
    """Return items/s of `items` calls at once."""
    async with weir.Service(Square, max_batch_size=64, max_queue_size=30_000, pipeline_depth=2) as service:
        await asyncio.gather(*map(service.infer, range(100)))
        start = time.perf_counter()
        answers = await asyncio.gather(*map(service.infer, range(items)))
        seconds = time.perf_counter() - start
    if answers != [x * x for x in range(items)]:
        raise RuntimeError("wrong answers")
    return items / seconds


PART = Part(
    "in-process",
    "Calls in process",
    f"{ITEMS:,} concurrent calls of square from one event loop, one worker process, batches of up to 64. mpservice waits up "
    "to 5 ms for them; Weir gives the worker its next batch while it computes (`pipeline_depth=2`).",
    lambda rounds: rounds * len(LOOPS) * 2,
    measure,
)


if __name__ == "__main__":
    run = uvloop.run if sys.argv[2] == "uvloop" else asyncio.run
    print(json.dumps(run(call_at_once(int(sys.argv[1])))))
