"""Workers that join a running service, and workers that leave it."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from weir.batching.batcher import Batcher
from weir.manager.clock import Timer

if TYPE_CHECKING:
    from weir.manager.driver import Driver


class Leaving:
    """The workers of one driver that are to go: they get no more batches."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._empty: dict[int, asyncio.Event] = {}

    def __contains__(self, worker: int) -> bool:
        return worker in self._empty

    def __len__(self) -> int:
        return len(self._empty)

    def finished(self, worker: int) -> None:
        """A batch of `worker` is back."""
        if worker in self._empty and self._batcher.worker_leaves(worker):
            self._empty[worker].set()

    def lost(self, worker: int) -> bool:
        """`worker` is gone; tell whether it was to go."""
        if worker not in self._empty:
            return False
        self._empty[worker].set()
        return True

    async def let_go(self, worker: int, driver: "Driver", clock: Callable[[], float], seconds: float) -> None:
        """Let `worker` finish what it has, for up to so many seconds, and end it. What it had then runs again elsewhere."""
        empty = self._empty[worker] = asyncio.Event()
        limit = Timer(clock, asyncio.get_running_loop(), empty.set)
        try:
            if not self._batcher.worker_leaves(worker):
                limit.arm(clock() + seconds)
                await empty.wait()
        finally:
            limit.cancel()
            driver.worker_lost(worker, "")
            await driver.executor.remove_worker()
            del self._empty[worker]
