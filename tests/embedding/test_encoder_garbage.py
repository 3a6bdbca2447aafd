"""What a request was is gone when it has its end: nothing of it waits for the garbage collector, which would go through all that lives."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.embedding.test_encoder import of, serving


@pytest.fixture
def garbage() -> Iterator[list[Any]]:
    """What only the collector finds."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("count", [1, 16, 40])
def test_a_request_leaves_no_garbage(garbage: list[Any], count: int) -> None:
    async def main() -> list[Any]:
        async with serving() as encoder:
            texts = [f"text {place}" for place in range(count)]
            await of(encoder, texts)
            gc.collect()
            garbage.clear()
            for _ in range(10):
                await of(encoder, texts)
            gc.collect()
            return list(garbage)

    assert not Counter(type(each).__name__ for each in asyncio.run(main()))
