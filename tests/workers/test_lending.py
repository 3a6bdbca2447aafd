"""Large tensors are read where they lie: by the model in the request's place in the arena, by a frontend in the worker's results."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.workers.models import Echo, Gated
from tests.workers.pools import Pool, started

from weir.errors import Cancelled
from weir.messages import LENT, OCTETS
from weir.model import Model, Tensor
from weir.wire.inference import ArenaArrays
from weir.workers.arena import SharedBlock

ROWS, WIDTH = 4, 40_000


class Where(Model):
    """Says in which file each input begins, and at which offset of it; whether it can be written to; and its sum."""

    inputs = (Tensor("x", "FP32", [-1, WIDTH]),)
    outputs = (
        Tensor("file", "BYTES", [-1]),
        Tensor("at", "INT64", [-1]),
        Tensor("writable", "BOOL", [-1]),
        Tensor("sum", "FP64", [-1]),
    )

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["x"]
        file, at = place_of(x.ctypes.data)
        rows = len(x)
        return {
            "file": [file] * rows,
            "at": [at] * rows,
            "writable": [x.flags.writeable] * rows,
            "sum": x.sum(axis=1, dtype=numpy.float64),
        }


class Owning(Where):
    owns_inputs = True


class Twice(Model):
    inputs = (Tensor("x", "FP32", [-1, WIDTH]),)
    outputs = (Tensor("y", "FP32", [-1, WIDTH]), Tensor("n", "INT64", [-1]))

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"] * 2, "n": numpy.arange(len(batch["x"]))}


class Filled(Twice):
    """Puts its answers into arrays that it asked for."""

    examples = ({"x": numpy.zeros((1, WIDTH), numpy.float32)},)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["x"]
        unused = self.output("y", len(x), WIDTH)
        unused[:] = 0
        y = self.output("y", len(x), WIDTH)
        n = self.output("n", len(x))
        if (x < 0).any():
            raise ValueError("negative")
        numpy.multiply(x, 2, out=y)
        n[:] = numpy.arange(len(x))
        return {"y": y, "n": n}


def place_of(address: int) -> tuple[str, int]:
    """Return the name of the file that is mapped at `address` in this process, and the offset there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            return (name[0] if name else ""), int(offset, 16) + address - begin
    raise AssertionError(f"{address:#x} is mapped nowhere")


def received(pool: Pool, header: int = 137, rows: int = ROWS) -> tuple[ArenaArrays, SharedBlock]:
    """Return arrays over a body that was received into the arena, after a header."""
    size = 4 * rows * WIDTH
    block = pool.pool.reserve(header + size)
    assert block is not None
    block.view[header:] = numpy.arange(rows * WIDTH, dtype=numpy.float32).tobytes()
    view = numpy.frombuffer(block.view[header:], numpy.float32).reshape(rows, WIDTH)
    view.flags.writeable = False
    return ArenaArrays({"x": view}, block), block


async def test_the_model_reads_the_very_bytes_that_were_received() -> None:
    async with started(Where) as pool:
        before = pool.free_bytes
        arrays, block = received(pool)
        taken = before - pool.free_bytes
        batch = pool.send(arrays)
        assert pool.free_bytes == before - taken  # no second place was taken
        block.release()
        assert pool.free_bytes == before - taken  # the batch has a share
        (answer,) = await pool.answer(batch)
        assert answer["file"][0].startswith(b"/memfd:weir-requests-tried")
        assert set(answer["at"].tolist()) == {block.offset + 137}
        assert not answer["writable"].any()
        assert answer["sum"].tolist() == arrays["x"].sum(axis=1, dtype=numpy.float64).tolist()
        assert pool.free_bytes == before
        del arrays, block


async def test_a_part_of_a_request_is_read_in_place_too() -> None:
    async with started(Where) as pool:
        arrays, block = received(pool)
        (answer,) = await pool.ask({"x": arrays["x"][1:3]})
        assert answer["at"].tolist() == [block.offset + 137 + 4 * WIDTH] * 2
        block.release()
        del arrays, block


async def test_several_requests_are_gathered_in_the_workers_own_memory() -> None:
    async with started(Where) as pool:
        before = pool.free_bytes
        (first, one), (second, two) = received(pool), received(pool)
        answers = await pool.ask(first, second)
        assert {answer["file"][0].startswith(b"/memfd") for answer in answers} == {False}
        assert answers[0]["sum"].tolist() == answers[1]["sum"].tolist()
        one.release()
        two.release()
        assert pool.free_bytes == before
        del first, second, one, two


async def test_rows_that_arrive_one_after_the_other_are_read_in_place() -> None:
    async with started(Where) as pool:
        before = pool.free_bytes
        bodies = [received(pool, header=136, rows=1) for _ in range(3)]
        answers = await pool.ask(*[arrays for arrays, _ in bodies])
        for answer in answers:
            assert answer["file"][0].startswith(b"/memfd:weir-requests-tried")
            assert answer["at"].tolist() == [bodies[0][1].offset + 136]
            assert not answer["writable"].any()
            assert answer["sum"].tolist() == answers[0]["sum"].tolist()
        for _, block in bodies:
            block.release()
        assert pool.free_bytes == before
        del bodies, block


async def test_a_model_that_owns_its_inputs_gets_a_copy() -> None:
    async with started(Owning) as pool:
        arrays, block = received(pool)
        (answer,) = await pool.ask(arrays)
        assert not answer["file"][0].startswith(b"/memfd")
        assert answer["writable"].all()
        block.release()
        del arrays, block


async def test_a_result_is_lent_until_its_last_array_is_gone() -> None:
    async with started(Twice) as pool:
        x = numpy.ones((ROWS, WIDTH), numpy.float32)
        (answer,) = await pool.answer(pool.send({"x": x}, accept=LENT))
        assert (answer["y"] == 2).all()
        assert not answer["y"].flags.writeable
        assert answer["n"].tolist() == [0, 1, 2, 3]
        assert place_of(answer["y"].ctypes.data)[0].startswith("/memfd:weir-results-tried")
        part = memoryview(answer["y"][1:])
        pool.heard.forget()
        del answer
        assert held(pool) == x.nbytes
        del part
        assert held(pool) == 0


async def test_lent_results_come_back_to_the_worker() -> None:
    async with started(Twice, arena_bytes=1 << 20) as pool:  # there is room for one result
        x = numpy.ones((1, WIDTH), numpy.float32)
        for _ in range(30):
            (answer,) = await pool.answer(pool.send({"x": x}, accept=LENT))
            assert place_of(answer["y"].ctypes.data)[0].startswith("/memfd:weir-results-tried")
            pool.heard.forget()
            del answer


def held(pool: Pool) -> int:
    gc.collect()
    size: int = pool.pool.gauges()["results_held_bytes"]
    return size


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_model_writes_its_answers_where_the_server_reads_them(depth: int) -> None:
    async with started(Filled, arena_bytes=2 << 20, pipeline_depth=depth) as pool:
        for number in range(30):  # there is room for few at a time
            x = numpy.full((2, WIDTH), number, numpy.float32)
            one, two = await pool.answer(pool.send({"x": x}, {"x": x[:1]}, accept=LENT))
            assert (one["y"] == 2 * number).all()
            assert (two["y"] == 2 * number).all()
            assert two["n"].tolist() == [2]
            files, offsets = zip(*[place_of(answer["y"].ctypes.data) for answer in (one, two)], strict=True)
            assert all(file.startswith("/memfd:weir-results-tried") for file in files)
            assert offsets[1] == offsets[0] + x.nbytes  # parts of one array: nothing was copied
            pool.heard.forget()
            del one, two


async def test_what_a_failed_batch_was_given_is_taken_back() -> None:
    async with started(Filled, arena_bytes=1 << 20) as pool:
        for _ in range(5):
            (error,) = await pool.ask({"x": numpy.full((1, WIDTH), -1, numpy.float32)})
            assert "ValueError: negative" in error.message
        (answer,) = await pool.answer(pool.send({"x": numpy.ones((1, WIDTH), numpy.float32)}, accept=LENT))
        assert place_of(answer["y"].ctypes.data)[0].startswith("/memfd:weir-results-tried")
        pool.heard.forget()
        del answer


async def test_without_room_a_model_is_given_ordinary_memory() -> None:
    for arena_bytes in (0, 64 << 10):
        async with started(Filled, arena_bytes=arena_bytes) as pool:
            (answer,) = await pool.ask({"x": numpy.ones((1, WIDTH), numpy.float32)})
            assert (answer["y"] == 2).all()


# Large payloads and results: through shared memory while it has room, and in the frame when it has not.


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
            pool.heard.forget()
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
        pool.heard.forget()
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


class Gate:
    """The test's side of Gated."""

    def __init__(self, folder: Path) -> None:
        self.entered, self.go = folder / "entered", folder / "go"
        os.mkfifo(self.entered)
        os.mkfifo(self.go)

    async def wait(self) -> None:
        """Wait until the model stands at the gate."""
        await asyncio.to_thread(self.entered.read_text)

    async def open(self) -> None:
        """Let it go on."""
        await asyncio.to_thread(self.go.write_text, "go")


@asynccontextmanager
async def gated(folder: Path, step: str, depth: int) -> AsyncIterator[tuple[Pool, Gate]]:
    gate = Gate(folder)
    params = {"entered": str(gate.entered), "go": str(gate.go), "step": step}
    async with started(Gated, params, pipeline_depth=depth) as pool:
        yield pool, gate


@pytest.mark.parametrize(("depth", "cancelled"), [(1, [0]), (2, [1]), (1, [2]), (2, [0, 2])])
async def test_what_is_cancelled_before_predict_is_left_out_of_it(
    tmp_path: Path, depth: int, cancelled: list[int]
) -> None:
    async with gated(tmp_path, "preprocess", depth) as (pool, gate):
        batch = pool.send("gate", "b", "c")
        await gate.wait()
        pool.pool.cancel(0, batch, cancelled)
        await gate.open()
        outputs = await pool.answer(batch)

    size = 3 - len(cancelled)
    for index, (item, output) in enumerate(zip(("gate", "b", "c"), outputs, strict=True)):
        if index in cancelled:
            assert isinstance(output, Cancelled)
        else:
            assert output == (item, size)


async def test_what_is_cancelled_too_late_is_answered(tmp_path: Path) -> None:
    async with gated(tmp_path, "predict", 1) as (pool, gate):
        batch = pool.send("gate", "b")
        await gate.wait()
        pool.pool.cancel(0, batch, [1])
        await gate.open()
        assert await pool.answer(batch) == [("gate", 2), ("b", 2)]
        pool.pool.cancel(0, batch, [0])
        assert await pool.ask("c", "d") == [("c", 2), ("d", 2)]
