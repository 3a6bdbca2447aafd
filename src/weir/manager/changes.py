"""The one line in which everything waits that changes what runs."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from weir.errors import Draining, Overloaded
from weir.manager.delivery import logger

T = TypeVar("T")

MOST = 256  # changes that may wait; each is a caller


class Changes:
    """Makes changes one after the other, in the order in which they were asked for.

    A change that was asked for is made, also when whoever asked has left: nobody is to wonder what is true now.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # goes round in order of arrival
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def make(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `change` returns, or raise what it raises, once it is its turn and it has been made.

        Raises Overloaded when too many wait, Draining when the line was closed before or meanwhile.
        """
        if self._closed:
            raise _closed()
        if len(self._tasks) >= MOST:
            raise Overloaded(f"{len(self._tasks)} changes wait to be made; that is the limit", retry_after=1.0)
        task = asyncio.create_task(self._in_turn(change))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                raise _closed() from None
            raise

    async def close(self) -> None:
        """Make no more changes: end the one that is being made, and those that wait. Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _in_turn(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._turn:
            return await change()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("a change was not made: %s", task.exception())


def _closed() -> Draining:
    return Draining("the server is being stopped: nothing is loaded or unloaded any more")
