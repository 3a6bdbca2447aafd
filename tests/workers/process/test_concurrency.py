"""worker_concurrency: one worker process runs several batches at once, each with the promises that a batch alone has."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until
from tests.workers.pools import started

import weir
from weir.errors import ModelCrashed, ModelError, SettingsError
from weir.workers.settings import WorkerSettings

N = 4


@pytest.fixture
def gate(tmp_path: Path) -> tuple[dict[str, str], Callable[[], None]]:
    """Parameters of a model that waits, and what lets it go on."""
    return {"go_on": str(tmp_path / "go_on")}, (tmp_path / "go_on").touch


class Meeting(weir.Model):
    """Its batches come back once N are in `predict` at the same time; others do what their item says, or wait until there is a file `go_on`."""

    max_batch_size = 1

    def __init__(self, go_on: str = "") -> None:
        self.all_here = threading.Barrier(N)
        self.go_on = go_on
        self.waiting = 0

    def predict(self, batch: list[Any]) -> list[Any]:
        (item,) = batch
        match item:
            case "meet":
                self.all_here.wait(60)
            case "wait":
                self.waiting += 1
                while not os.path.exists(self.go_on):
                    time.sleep(0.002)
            case "raise":
                raise ValueError("cannot do that")
            case "leave":
                sys.exit(3)
            case "die":
                os.kill(os.getpid(), 9)
            case "hang":
                time.sleep(60)
            case "waiting":
                return [self.waiting]
        return [[item, os.getpid()]]


class Words(weir.Model):
    """Yields the words of a text when those of another text are asked for, too."""

    streaming = True
    max_batch_size = 1

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    def predict(self, batch: list[Any]) -> Iterator[dict[int, Any]]:
        for word in batch[0].split():
            self.both.wait(60)
            yield {0: word}


@asynccontextmanager
async def running(model: type[weir.Model] = Meeting, **settings: Any) -> AsyncIterator[weir.Service]:
    async with asyncio.timeout(60), weir.Service(model, worker_concurrency=N, spin=0.0, **settings) as service:
        yield service


async def test_as_many_batches_as_it_says_run_at_once_in_one_process() -> None:
    async with running() as service:
        answers = await asyncio.gather(*[service.infer("meet") for _ in range(3 * N)])
    assert len({pid for _, pid in answers}) == 1 and [item for item, _ in answers] == ["meet"] * 3 * N


async def waiting(service: weir.Service, count: int) -> list[asyncio.Future[Any]]:
    """Return requests that are all in `predict`, and wait there."""
    requests: list[asyncio.Future[Any]] = [asyncio.ensure_future(service.infer("wait")) for _ in range(count)]
    while await service.infer("waiting") < count:
        pass
    return requests


@pytest.mark.parametrize("how", ["die", "leave"])
async def test_a_batch_that_fails_or_ends_the_process_fails_alone(gate: Any, how: str) -> None:
    params, let_go = gate
    async with running(params=params) as service:
        innocent = await waiting(service, 2)
        with pytest.raises(ModelError, match="cannot do that"):
            await service.infer("raise")
        culprit = asyncio.ensure_future(service.infer(how))
        await until(lambda: service.state()["workers"][0]["restarts"] != 0)
        assert not any(each.done() for each in innocent)
        let_go()  # they run again, one at a time, as each might have been the cause
        assert [item for item, _ in await asyncio.gather(*innocent)] == ["wait", "wait"]
        with pytest.raises(ModelCrashed):
            await culprit


async def test_each_batch_has_the_whole_time_that_it_may_take() -> None:
    async with running(predict_timeout=1.0) as service:
        hanging = asyncio.ensure_future(service.infer("hang"))
        for _ in range(5):
            await service.infer("quick")
        with pytest.raises(ModelCrashed, match=r"longer than predict_timeout=1\.0"):
            await hanging


async def test_callers_who_leave_and_deadlines_are_as_for_one(gate: Any) -> None:
    params, let_go = gate
    async with running(params=params) as service:
        held = await waiting(service, N - 1)
        held.append(asyncio.ensure_future(service.infer("wait")))
        with pytest.raises(weir.DeadlineExceeded):
            await service.infer("late", timeout=0.01)  # no place is free
        held[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await held[0]
        let_go()
        assert [item for item, _ in await asyncio.gather(*held[1:])] == ["wait"] * (N - 1)


async def test_streams_run_at_once_and_do_not_mix() -> None:
    async def words(text: str) -> list[Any]:
        return [word async for word in service.infer_stream(text)]

    async with running(Words) as service:
        assert list(await asyncio.gather(words("a b c"), words("d e f"))) == [["a", "b", "c"], ["d", "e", "f"]]


async def test_at_the_end_it_finishes_the_batches_that_it_has() -> None:
    async with started(Meeting, worker_concurrency=N) as pool:
        assert pool.heard.ready == [(0, N)]
        batches = [pool.send("meet") for _ in range(N)]
        stopping = asyncio.ensure_future(pool.pool.stop())
        assert [(await pool.answer(batch))[0][0] for batch in batches] == ["meet"] * N
        await stopping


@pytest.mark.parametrize("more", [{"executor": "thread"}, {"executor": "inline"}, {"pipeline_depth": 2}])
def test_where_it_means_nothing_it_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"worker_concurrency=2, .*only worker processes"):
        WorkerSettings(worker_concurrency=2, **more)
