import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.workers.models import Gated
from tests.workers.pools import Pool, started

from weir.errors import Cancelled


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
