"""The test of "Service batching from scratch": prints the seconds one after another and at once."""

import asyncio
import json
import time

import weir
from benchmarks.models import Seed

ITEMS = range(880)


async def measure() -> tuple[float, float]:
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


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure())))
