"""A listener that remembers, and the pool that it listens to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from weir.messages import OBJECT, Batch, Events
from weir.metrics import MetricReport
from weir.model import Model
from weir.workers.process.launch import Templates
from weir.workers.process.pool import ProcessPool
from weir.workers.settings import WorkerSettings


class Recorder:
    """A Listener that remembers what an executor said; `log` has what `next` has not returned yet."""

    def __init__(self) -> None:
        self.ready: list[tuple[int, int]] = []
        self.lost: list[tuple[int, str]] = []
        self.events: dict[int, Events] = {}
        self.ended: set[int] = set()
        self.reasons: list[str] = []
        self.log: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._heard = asyncio.Event()

    def _note(self, kind: str, what: Any) -> None:
        self.log.put_nowait((kind, what))
        self._heard.set()

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        self.ready.append((worker, places))
        self._note("ready", places)

    def worker_lost(self, worker: int, reason: str) -> None:
        self.lost.append((worker, reason))
        self._note("lost", reason)

    def worker_leaves(self, worker: int) -> None:
        self._note("leaves", worker)

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        self._note("measured", reports)

    def received(self, worker: int, events: Events) -> None:
        self.events[events.batch_id] = events
        if events.final:
            self.ended.add(events.batch_id)
        self._note("events", events)

    def unavailable(self, reason: str) -> None:
        self.reasons.append(reason)
        self._note("unavailable", reason)

    async def next(self, kind: str) -> Any:
        """Wait for the next thing said, which must be of this kind; return it."""
        said, what = await self.log.get()
        assert said == kind, (said, what)
        return what

    def forget(self) -> None:
        """Let go of the results that were heard of, whose memory may be lent."""
        self.events.clear()
        self.log = asyncio.Queue()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what was heard fulfils `condition`."""
        async with asyncio.timeout(200):
            while not condition():
                self._heard.clear()
                await self._heard.wait()


class Pool:
    """A running pool and its recorder."""

    def __init__(self, pool: ProcessPool, heard: Recorder) -> None:
        self.pool = pool
        self.heard = heard
        self.batches = 0

    def send(
        self,
        *payloads: Any,
        worker: int = 0,
        content_type: str = OBJECT,
        accept: str = OBJECT,
        attempt: int = 0,
        others: int = 0,
    ) -> int:
        """Send a batch, return its id."""
        self.batches += 1
        self.pool.run(worker, Batch(self.batches, list(payloads), content_type, accept, attempt, others=others))
        return self.batches

    async def answer(self, batch_id: int) -> list[Any]:
        """Wait for a batch's outputs."""
        await self.heard.until(lambda: batch_id in self.heard.events)
        return self.heard.events[batch_id].outputs

    async def ask(self, *payloads: Any, worker: int = 0, content_type: str = OBJECT) -> list[Any]:
        """Send a batch, return its outputs."""
        return await self.answer(self.send(*payloads, worker=worker, content_type=content_type))

    async def ask_all(self, item: Any) -> list[Any]:
        """Return what each worker answers to `item`."""
        return [(await self.ask(item, worker=state.index))[0] for state in self.pool.states()]

    async def again(self, times: int = 2) -> None:
        """Wait until the workers have been ready so many times."""
        await self.heard.until(lambda: len(self.heard.ready) >= times)

    @property
    def free_bytes(self) -> int:
        """What is free in the request arena."""
        free: int = self.pool.gauges()["arena_free_bytes"]
        return free


def make_pool(
    model: type[Model] | str, params: dict[str, Any] | None = None, *, stop_grace: float = 5.0, **settings: Any
) -> ProcessPool:
    """Return a pool that was not started."""
    return ProcessPool(
        model, params or {}, WorkerSettings(**settings), name="tried", max_batch_size=64, stop_grace=stop_grace
    )


@asynccontextmanager
async def started(
    model: type[Model] | str,
    params: dict[str, Any] | None = None,
    *,
    templates: Templates | None = None,
    **settings: Any,
) -> AsyncIterator[Pool]:
    """Run a pool of `model`, whose workers are forked from `templates` if there are any."""
    pool, heard = make_pool(model, params, **settings), Recorder()
    if templates is not None:
        pool.fork_from(templates)
    await pool.start(heard)
    try:
        yield Pool(pool, heard)
    finally:
        await pool.stop()
