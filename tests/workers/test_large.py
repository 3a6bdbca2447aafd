"""Large payloads and results: through shared memory while it has room, and in the frame when it has not."""

import os
import signal

import numpy
import pytest
from tests.workers.models import Echo
from tests.workers.pools import started

from weir.messages import OCTETS
from weir.workers.arena import SharedBlock

LARGE = 600_000


async def test_arrays_travel_out_of_band_and_belong_to_whoever_gets_them() -> None:
    async with started(Echo) as pool:
        before = pool.free_bytes
        sent = numpy.arange(LARGE // 8, dtype=numpy.float64).reshape(3, -1)
        batch = pool.send(sent, 5)
        assert pool.free_bytes <= before - LARGE
        received, five = await pool.answer(batch)
        assert numpy.array_equal(received, sent)
        assert five == 5
        assert received.flags.writeable
        assert pool.free_bytes == before
        assert pool.pool.gauges()["results_held_bytes"] == 0


async def test_a_reserved_place_stays_until_the_batch_is_answered() -> None:
    async with started(Echo) as pool:
        before = pool.free_bytes
        block = pool.pool.reserve(LARGE)
        assert block is not None
        block.view[:] = b"z" * LARGE
        batch = pool.send(block, content_type=OCTETS)
        block.release()
        assert pool.free_bytes < before

        assert await pool.answer(batch) == [b"z" * LARGE]
        assert pool.free_bytes == before
        del block


async def test_an_encoded_result_stays_with_the_worker_until_it_is_released() -> None:
    async with started(Echo, arena_bytes=1 << 20) as pool:
        for number in range(10):  # there is room for one at a time
            batch = pool.send(bytes([number]) * LARGE, accept=OCTETS)
            (block,) = await pool.answer(batch)
            assert isinstance(block, SharedBlock)
            assert pool.pool.gauges()["results_held_bytes"] == LARGE
            assert bytes(block.view) == bytes([number]) * LARGE
            block.release()
            pool.heard.events.clear()
            del block


async def test_a_result_outlives_the_worker_that_it_is_from() -> None:
    async with started(Echo, arena_bytes=1 << 20) as pool:
        (block,) = await pool.answer(pool.send(b"z" * LARGE, accept=OCTETS))
        os.kill(pool.pool.states()[0].pid or 0, signal.SIGKILL)
        await pool.again()
        assert bytes(block.view) == b"z" * LARGE
        block.release()
        assert pool.pool.gauges()["results_held_bytes"] == 0
        assert await pool.ask(1) == [1]
        pool.heard.events.clear()
        del block


@pytest.mark.parametrize("arena_bytes", [64 << 10, 1 << 20])
async def test_what_finds_no_room_travels_in_the_frame(arena_bytes: int) -> None:
    async with started(Echo, arena_bytes=arena_bytes) as pool:
        sent = [bytes([number]) * LARGE for number in range(4)]
        for _ in range(5):
            received = await pool.ask(*sent)
            assert received == sent
        assert pool.pool.reserve(2 * arena_bytes) is None
        assert pool.free_bytes == arena_bytes
