"""Large tensors are read where they lie: by the model in the request's place in the arena, by a frontend in the worker's results."""

import gc
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.workers.pools import Pool, started

from weir.messages import LENT
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
        pool.heard.events.clear()
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
            pool.heard.events.clear()
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
            pool.heard.events.clear()
            del one, two


async def test_what_a_failed_batch_was_given_is_taken_back() -> None:
    async with started(Filled, arena_bytes=1 << 20) as pool:
        for _ in range(5):
            (error,) = await pool.ask({"x": numpy.full((1, WIDTH), -1, numpy.float32)})
            assert "ValueError: negative" in error.message
        (answer,) = await pool.answer(pool.send({"x": numpy.ones((1, WIDTH), numpy.float32)}, accept=LENT))
        assert place_of(answer["y"].ctypes.data)[0].startswith("/memfd:weir-results-tried")
        pool.heard.events.clear()
        del answer


async def test_without_room_a_model_is_given_ordinary_memory() -> None:
    for arena_bytes in (0, 64 << 10):
        async with started(Filled, arena_bytes=arena_bytes) as pool:
            (answer,) = await pool.ask({"x": numpy.ones((1, WIDTH), numpy.float32)})
            assert (answer["y"] == 2).all()
