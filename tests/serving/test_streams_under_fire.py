"""Streams whose readers leave, dawdle and run late, on workers that die: each ends once, in order, and nothing is left over."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from tests.serving.kit import Watch
from tests.streaming_models import Fire

from weir import DeadlineExceeded, Overloaded, Service, WorkerLost

pytestmark = pytest.mark.usefixtures("nothing_is_left")
STREAMS = 120


async def reader(service: Service, chance: random.Random, counts: Counter[str]) -> None:
    """Read one stream in one of the ways in which streams are read."""
    count, size = chance.randint(0, 40), chance.choice([0, 0, 100, 50_000])
    death = chance.randint(0, 5) if chance.random() < 0.04 else -1
    leaves_after = chance.randint(0, 10) if chance.random() < 0.3 else 1000
    timeout = chance.choice([0.0, 0.02]) if chance.random() < 0.1 else 30.0
    stream = service.infer_stream([count, size, death], timeout=timeout)
    await asyncio.sleep(chance.random() * 0.3)
    read = 0
    try:
        async for number, text in stream:
            assert (number, len(text)) == (read, size)
            read += 1
            if read >= leaves_after:
                counts["left"] += 1
                return
            if chance.random() < 0.05:
                await asyncio.sleep(chance.random() * 0.3)
        assert read == count
        counts["whole"] += 1
    except (DeadlineExceeded, Overloaded, WorkerLost) as error:
        counts[type(error).__name__] += 1
    finally:
        await stream.aclose()


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_stream_has_its_end(seed: int) -> None:
    watch, counts, chance = Watch(), Counter[str](), random.Random(seed)
    async with Service(Fire, workers=2, stream_buffer=2, observers=[watch]) as service:
        async with asyncio.timeout(200):
            readers = [reader(service, random.Random(chance.random()), counts) for _ in range(STREAMS)]
            await asyncio.gather(*readers)
            await watch.until(lambda: service.state()["in_flight"] == 0)
        gauges: dict[str, Any] = service.executor.gauges()
        assert gauges["results_held_bytes"] == 0
        assert gauges["arena_free_bytes"] == gauges["arena_bytes"]
    assert counts.total() == STREAMS
    assert watch.ends + len(watch.refusals) == STREAMS
    assert counts["whole"] > STREAMS / 4
    assert counts["left"]
    assert counts["WorkerLost"]
