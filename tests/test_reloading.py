"""A model is replaced again and again while callers ask it over HTTP: nobody notices but by the answers."""

import asyncio
import os
import signal
import time
from bisect import bisect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from weir.app import App
from weir.settings import read_settings

RATE = 500.0  # requests per second
CONNECTIONS = 16
BEHIND = 500
MODEL = """
import weir

class Generation(weir.Model):
    def predict(self, batch):
        return [{generation} for _ in batch]
"""


class Answered(NamedTuple):
    asked_at: float
    status: int
    generation: int


class Answers(list[Answered]):
    """All answers so far."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = asyncio.Event()  # another one has come

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds, asked after each answer."""
        while not condition():
            self.heard.clear()
            await self.heard.wait()


async def ask(port: int, gaps: asyncio.Semaphore, answers: Answers) -> None:
    """Send a request over one connection whenever it is somebody's turn."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            await gaps.acquire()
            asked_at = time.monotonic()
            writer.write(b"POST /infer/generation HTTP/1.1\r\nHost: test\r\nContent-Length: 1\r\n\r\n0")
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            body = await reader.readexactly(length)
            status = int(head[9:12])
            answers.append(Answered(asked_at, status, int(body) if status == 200 else -1))
            answers.heard.set()
    finally:
        writer.close()


@asynccontextmanager
async def asked_all_the_time(port: int) -> AsyncIterator[Answers]:
    """Within the block, RATE requests per second are sent, whether the ones before are answered or not; fewer where a busy machine
    has BEHIND of them to answer."""
    gaps, answers, sent, begun = asyncio.Semaphore(0), Answers(), 0, time.monotonic()
    tasks = [asyncio.create_task(ask(port, gaps, answers)) for _ in range(CONNECTIONS)]

    async def pace() -> None:
        nonlocal sent
        while True:
            while sent < min(RATE * (time.monotonic() - begun), len(answers) + BEHIND):
                sent += 1
                gaps.release()
            await asyncio.sleep(0.001)

    pacing = asyncio.create_task(pace())
    yield answers
    pacing.cancel()
    async with asyncio.timeout(60):
        await answers.until(lambda: len(answers) >= sent)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def serving(folder: Path, **flags: list[str]) -> AsyncIterator[tuple[Path, App]]:
    """Write the first generation of a model to a file, and serve that; end by a signal."""
    file = folder / "generation_model.py"
    file.write_text(MODEL.format(generation=0))
    app = App(read_settings([f"{file}:Generation"], {"port": ["0"], **flags}, {}))
    ready = asyncio.Event()
    running = asyncio.create_task(app.run(ready.set))
    await ready.wait()
    yield file, app
    os.kill(os.getpid(), signal.SIGTERM)
    await running


async def test_an_edited_model_is_loaded_again_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def failures() -> list[str]:
        return [each.getMessage() for each in caplog.records if "keeps running unchanged" in each.getMessage()]

    async with serving(tmp_path, reload=["true"]) as (file, app), asked_all_the_time(app.server.port) as answers:
        for generation in (1, 2):
            file.write_text(MODEL.format(generation=generation))
            await answers.until(lambda: bool(answers) and answers[-1].generation == generation)  # noqa: B023 - see below
            if generation == 1:
                file.write_text("no Python")
                await answers.until(lambda: bool(failures()))
                count = len(answers)
                await answers.until(lambda: len(answers) > count + 5)  # noqa: B023 - it is over before the next
                assert answers[-1].generation == 1
    assert {answer.status for answer in answers} == {200}
    (failure,) = failures()
    assert "generation_model.py" in failure and "SyntaxError" in failure


@pytest.mark.parametrize("reloads", [5, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
async def test_reloads_leave_no_gap_and_no_old_answer(tmp_path: Path, reloads: int) -> None:
    replaced_at = [0.0]
    async with serving(tmp_path, log_level=["error"]) as (file, app), asked_all_the_time(app.server.port) as answers:
        for generation in range(1, reloads + 1):
            file.write_text(MODEL.format(generation=generation))
            await app.manager.load_model("generation")
            replaced_at.append(time.monotonic())
            await answers.until(lambda: answers[-1].generation == generation)  # noqa: B023 - it is over before the next
    assert {answer.status for answer in answers} == {200}
    for answer in answers:
        assert answer.generation >= bisect(replaced_at, answer.asked_at) - 1
    assert {answer.generation for answer in answers} == set(range(reloads + 1))
