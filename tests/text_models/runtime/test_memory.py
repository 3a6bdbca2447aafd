"""Worker processes of one model share its weights; what they hold does not grow."""

import asyncio
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.text_models.opening import params_of

import weir
from weir.text_models.model import TextEncoder
from weir.text_server.server_settings import INSTALL, installed_model
from weir.workers.process.pool import ProcessPool

WORDS = "the a river weir flows over stone when water rises and falls again in the long dry summer of that year"


@pytest.fixture(scope="module")
def model() -> Path:
    """The small real model, 91 MB of weights."""
    directory = installed_model()
    if directory is None:
        pytest.skip(f"the model is not installed: {INSTALL}")
    return directory


def texts(count: int) -> list[str]:
    chance, words = random.Random(4), WORDS.split()
    return [" ".join(chance.choices(words, k=chance.randint(1, 60))) for _ in range(count)]


def memory(service: "weir.Service") -> int:
    """Return the bytes that the service's workers and what they were forked from have together: each page counts once.

    The kernel's own share of a page (PSS) is right for memory that only they can have. It is too small for pages of
    files, such as a library's code, which other processes map, too: tests that run beside this one.
    """
    pool = service.executor
    assert isinstance(pool, ProcessPool)
    own, files = 0, dict[str, int]()
    for pid in pool.pids():
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        own += 1024 * next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss_Anon:"))
        for each in psutil.Process(pid).memory_maps():
            files[each.path] = max(files.get(each.path, 0), each.rss - each.anonymous)
    return own + sum(files.values())


def served(model: Path, cache: Path, workers: int, **more: Any) -> "weir.Service":
    params = params_of(model, cache, **more)
    return weir.Service(
        TextEncoder, params=params, workers=workers, max_batch_size=4, max_queue_size=100_000, name="texts"
    )


def test_four_workers_have_at_most_half_as_much_again_as_one(model: Path, tmp_path: Path) -> None:
    async def measure(workers: int) -> tuple[int, list[Any]]:
        async with served(model, tmp_path, workers) as service:
            vectors = list(await asyncio.gather(*map(service.infer, texts(24))))
            return memory(service), vectors

    one, vectors = asyncio.run(measure(1))
    four, again = asyncio.run(measure(4))
    assert four <= 1.5 * one
    assert all(float(a @ b) > 0.99999 for a, b in zip(vectors, again, strict=True))


def test_the_threads_of_idle_workers_take_at_most_ten_megabytes(model: Path, tmp_path: Path) -> None:
    async def measure(lone_threads: int) -> list[int]:
        async with served(model, tmp_path, 2, lone_threads=lone_threads) as service:
            for text in texts(24):  # alone, so with all threads
                await service.infer(text)
            await asyncio.gather(*map(service.infer, texts(24)))
            return [own_memory(state.pid) for state in service.executor.states() if state.pid is not None]

    narrow, wide = (asyncio.run(measure(threads)) for threads in (1, 2))
    assert max(wide) <= max(narrow) + 10e6


def own_memory(pid: int) -> int:
    """Return the bytes that only this process has, and no file."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss_Anon:"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_memory_does_not_grow_over_a_hundred_thousand_requests(model: Path, tmp_path: Path) -> None:
    async def measure() -> tuple[int, int]:
        async with served(model, tmp_path, 2) as service:
            some = texts(200)
            for _ in range(10):
                await asyncio.gather(*map(service.infer, some))
            before = memory(service)
            for _ in range(500):
                await asyncio.gather(*map(service.infer, some))
            return before, memory(service)

    before, after = asyncio.run(measure())
    assert after < before + 8e6
