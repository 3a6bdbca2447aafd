"""How many requests have been accepted and have no end yet, for who must wait for that."""

import asyncio
from contextlib import suppress

from weir.errors import Draining


class Accepted:
    """Counts, and at the end takes no more."""

    def __init__(self) -> None:
        self._count = 0
        self._closed = False
        self._emptied = asyncio.Event()

    def begin(self) -> None:
        """One more. Raises Draining if no more are taken."""
        if self._closed:
            raise Draining("the server is about to stop")
        self._count += 1

    def end(self) -> None:
        """One has its end."""
        self._count -= 1
        if not self._count:
            self._emptied.set()

    async def drained(self, timeout: float) -> bool:
        """Take no more, and return when all have their ends; False if that took longer than `timeout` seconds."""
        self._closed = True
        if self._count:
            self._emptied.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._emptied.wait()
        return not self._count
