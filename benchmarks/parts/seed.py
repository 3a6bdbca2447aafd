"""The test that the author of "Service batching from scratch" published. The child prints the seconds one after another and at once."""

import asyncio
import json
import time

import weir
from benchmarks.harness.result import Part, Result, Run, middle, short, spread
from benchmarks.harness.servers import ask_own
from benchmarks.models import Seed


def measure(run: Run) -> Result:
    """Run it afresh in each round."""
    sequential, at_once = [], []
    for _ in range(run.rounds):
        one, other = ask_own("parts.seed")
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


ITEMS = range(880)


async def take_times() -> tuple[float, float]:
    """Return the two times, in seconds."""
    async with weir.Service(Seed, max_batch_size=200) as service:
        start = time.perf_counter()
        one_by_one = [await service.infer(x) for x in ITEMS]
        between = time.perf_counter()
        at_once = await asyncio.gather(*map(service.infer, ITEMS))
        end = time.perf_counter()
    if not one_by_one == at_once == [x * x for x in ITEMS]:
        raise RuntimeError("wrong answers")
    return between - start, end - between


PART = Part(
    "seed",
    "The test this all began with",
    "880 items to a model that sleeps 0.001 · ln(n + 1) seconds for a batch of n, batches of up to 200, in process.",
    lambda rounds: rounds,
    measure,
)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(take_times())))
