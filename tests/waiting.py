"""How tests in an event loop wait for what has no event that they could await."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any


async def turns(number: int = 3) -> None:
    """Let the loop go round."""
    for _ in range(number):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    """Return when `condition` holds: it is asked in each of the next turns of the loop, then every millisecond."""
    async with asyncio.timeout(200):
        for turn in count():
            if condition():
                return
            await asyncio.sleep(0.0 if turn < 100 else 0.001)
