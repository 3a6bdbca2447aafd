"""mpservice 0.16.8: square, one worker process, batches up to 64, 5 ms wait. Prints items/s. Arguments: ITEMS LOOP."""

import asyncio
import gc
import json
import sys
import time

import uvloop
from mpservice.mpserver import AsyncServer, ProcessServlet, Worker


class Square(Worker):
    def call(self, x):
        return [item * item for item in x]


async def measure(items):
    servlet = ProcessServlet(Square, cpus=1, batch_size=64, batch_wait_time=0.005)
    async with AsyncServer(servlet, capacity=30000) as server:
        await asyncio.gather(*(server.call(x, backpressure=False) for x in range(100)))
        gc.collect()  # what was imported, not what the calls leave
        start = time.perf_counter()
        answers = await asyncio.gather(*(server.call(x, backpressure=False) for x in range(items)))
        seconds = time.perf_counter() - start
    assert answers == [x * x for x in range(items)]
    return items / seconds


if __name__ == "__main__":
    run = uvloop.run if sys.argv[2] == "uvloop" else asyncio.run
    print(json.dumps(run(measure(int(sys.argv[1])))))
