"""A service in small that is run for nothing, so that the code of the real one is in the CPU's caches when it counts."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from weir.batching.batcher import Batcher
from weir.batching.settings import BatchingSettings
from weir.manager.call import Call
from weir.manager.delivery import Delivery
from weir.manager.driver import Driver
from weir.messages import Batch
from weir.policy.rules import Greedy
from weir.workers.executor import Block, FixedWorkers, Listener, WorkerState
from weir.workers.rehearsal import Frames

PATIENCE = 60.0


class Rehearsal:
    """Sends a call of its own through a driver, a batcher and the frames that a worker gets and sends. Nobody observes it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._driver = Driver(Batcher(BatchingSettings(), Greedy()), Echo(), Delivery("rehearsal", ()), clock)

    async def start(self) -> None:
        """Be ready to rehearse, on the running loop."""
        self._loop = asyncio.get_running_loop()
        await self._driver.start()

    def once(self) -> Call:
        """Begin a call; it is answered, with 0, in the next turns of the loop."""
        call = Call(0, self._clock(), PATIENCE, self._loop, self._driver.cancel)
        self._driver.enter(call, False)
        return call


class Echo(FixedWorkers):
    """An Executor without workers: the frames of a batch are written and read, and its payloads are the answers."""

    def __init__(self) -> None:
        self._frames = Frames()

    async def start(self, listener: Listener) -> None:
        """Be ready."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        listener.worker_ready(0, 1)

    def run(self, worker: int, batch: Batch) -> None:
        """Answer in the next turn."""
        self._loop.call_soon(self._listener.received, worker, self._frames.answer(batch))

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Do nothing: it is answered all the same."""

    def reserve(self, size_bytes: int) -> Block | None:
        """Return None: there is no shared memory."""
        return None

    async def stop(self) -> None:
        """Do nothing."""

    def states(self) -> Sequence[WorkerState]:
        """Return nothing: there are no workers."""
        return []

    def gauges(self) -> dict[str, Any]:
        """Return nothing worth counting."""
        return {"arena_bytes": 0, "arena_free_bytes": 0, "restarts": 0}
