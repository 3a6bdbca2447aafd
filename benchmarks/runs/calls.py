"""Concurrent calls in process, to one worker process: prints items/s. Arguments: ITEMS LOOP."""

import asyncio
import json
import sys
import time

import uvloop

import weir
from benchmarks.models import Square


async def measure(items: int) -> float:
    """Return items/s of `items` calls at once."""
    async with weir.Service(Square, max_batch_size=64, max_queue_size=30_000, pipeline_depth=2) as service:
        await asyncio.gather(*map(service.infer, range(100)))
        start = time.perf_counter()
        answers = await asyncio.gather(*map(service.infer, range(items)))
        seconds = time.perf_counter() - start
    if answers != [x * x for x in range(items)]:
        raise RuntimeError("wrong answers")
    return items / seconds


if __name__ == "__main__":
    run = uvloop.run if sys.argv[2] == "uvloop" else asyncio.run
    print(json.dumps(run(measure(int(sys.argv[1])))))
