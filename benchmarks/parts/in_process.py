"""Calls in process: many at once, beside mpservice; and the test that the author of "Service batching from scratch" published.

The child `calls LOOP` prints items/s; the child `seed` prints the seconds of 880 items one after another, and at once.
"""

import asyncio
import gc
import json
import sys
import time

import uvloop

import weir
from benchmarks.harness.result import Result, short, spread
from benchmarks.harness.rounds import Measurements, Rounds, spreads, times
from benchmarks.harness.servers import ask, ask_own, python_of, script
from benchmarks.models import Seed, Square

ITEMS, SEED_ITEMS = 20_000, 880
LOOPS = ("asyncio", "uvloop")
WEIR, MPSERVICE = "Weir", "mpservice"
SEQUENTIAL, AT_ONCE = "one after another", "at once"


def _calls(name: str, loop: str, seconds: float) -> dict[str, float]:
    if name == WEIR:
        return {"rate": ask_own("parts.in_process", "calls", loop)}
    return {"rate": ask([python_of("mpservice"), script("mpservice_calls.py"), str(ITEMS), loop])}


def _conclude_calls(result: Result, measured: Measurements) -> None:
    result.values |= measured.values()
    for loop in LOOPS:
        better = result.values[f"times mpservice {loop}"] = measured.times(WEIR, MPSERVICE, loop)
        result.at_least(f"{loop}: at least 20 times mpservice", better, 20, "{:.1f}")
        result.at_least(f"{loop}: at least 150,000 items/s", measured.middle(WEIR, loop), 150_000, "{:,.0f}")


async def call_at_once() -> float:
    """Return items/s of ITEMS calls at once."""
    async with weir.Service(Square, max_batch_size=64, max_queue_size=30_000, pipeline_depth=2) as service:
        await asyncio.gather(*map(service.infer, range(100)))
        gc.collect()  # what was imported, not what the calls leave
        start = time.perf_counter()
        answers = await asyncio.gather(*map(service.infer, range(ITEMS)))
        seconds = time.perf_counter() - start
    if answers != [x * x for x in range(ITEMS)]:
        raise RuntimeError("wrong answers")
    return ITEMS / seconds


CALLS = Rounds(
    "in-process",
    "Calls in process",
    f"{ITEMS:,} concurrent calls of square from one event loop, one worker process, batches of up to 64; garbage is collected before. mpservice waits up "
    "to 5 ms for them; Weir gives the worker its next batch while it computes (`pipeline_depth=2`).",
    one=_calls,
    contenders=(WEIR, MPSERVICE),
    cases=LOOPS,
    heads=("event loop", "server"),
    columns=(spreads("items/s"), times("times mpservice", MPSERVICE, "{:.1f}")),
    conclude=_conclude_calls,
    progress=("rate", "{:,.0f} items/s".format),
)


def _conclude_seed(result: Result, measured: Measurements) -> None:
    sequential, at_once = (measured.of(WEIR, figure=figure) for figure in (SEQUENTIAL, AT_ONCE))
    result.rows += [
        [SEQUENTIAL, spread(sequential, short), "90.9"],
        [AT_ONCE, spread(at_once, short), "0.124"],
    ]
    values = {
        f"seed {name}": measured.middle(WEIR, figure=figure)
        for name, figure in (("sequential", SEQUENTIAL), ("at once", AT_ONCE))
    }
    result.goal("one after another in under 3 s", f"{values['seed sequential']:.2f} s", values["seed sequential"] < 3)
    result.goal("at once in under 0.1 s", f"{values['seed at once']:.4f} s", values["seed at once"] < 0.1)
    result.values |= values
    result.notes.append(
        "The published figures are from another, unnamed machine; nearly all of the 90.9 s was a timer's wait."
    )


async def take_times() -> dict[str, float]:
    """Return the two times, in seconds."""
    items = range(SEED_ITEMS)
    async with weir.Service(Seed, max_batch_size=200) as service:
        start = time.perf_counter()
        one_by_one = [await service.infer(x) for x in items]
        between = time.perf_counter()
        at_once = await asyncio.gather(*map(service.infer, items))
        end = time.perf_counter()
    if not one_by_one == at_once == [x * x for x in items]:
        raise RuntimeError("wrong answers")
    return {SEQUENTIAL: between - start, AT_ONCE: end - between}


SEED = Rounds(
    "seed",
    "880 items to a model that sleeps",
    "880 items to a model that sleeps 0.001 · ln(n + 1) seconds for a batch of n, batches of up to 200, in process.",
    one=lambda name, case, seconds: ask_own("parts.in_process", "seed"),
    contenders=(WEIR,),
    heads=("880 items", "seconds", "published in 2020"),
    conclude=_conclude_seed,
    progress=(AT_ONCE, "{:.4f} s at once".format),
)


if __name__ == "__main__":
    if sys.argv[1] == "seed":
        print(json.dumps(asyncio.run(take_times())))
    else:
        print(json.dumps((uvloop.run if sys.argv[2] == "uvloop" else asyncio.run)(call_at_once())))
