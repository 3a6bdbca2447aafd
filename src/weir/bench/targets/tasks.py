"""What a target does in the background."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks(set[asyncio.Task[None]]):
    """The tasks that run. A loop holds them only weakly: each is held here until its end."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` in the running loop."""
        task = asyncio.ensure_future(work)
        self.add(task)
        task.add_done_callback(self.discard)

    async def end(self) -> None:
        """Cancel what runs; return when all of it has ended, however that was."""
        for task in self:
            task.cancel()
        await self.wait()

    async def wait(self) -> None:
        """Return when all that runs now has ended, however that was."""
        if self:
            await asyncio.wait(self)
