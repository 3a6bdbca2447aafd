"""What belongs to one event loop: connections of the asynchronous clients, which may be used in several loops one after the other or at
once."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerLoop(Generic[T]):
    """A value for each event loop, made by `make` in that loop when it is first needed.

    `end` closes it in the same loop: at `close`, or when the loop ends as asyncio.run ends it.
    """

    def __init__(self, make: Callable[[], T], end: Callable[[T], Awaitable[None]]) -> None:
        self._make = make
        self._end = end
        # The loop closes asynchronous generators that still run when it ends, so each value lives in one.
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[T, None]]] = WeakKeyDictionary()

    async def get(self) -> T:
        """Return the value of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._of:
            living = self._living()
            self._of[loop] = await anext(living), living
        return self._of[loop][0]

    async def close(self) -> None:
        """Close the value of the running event loop, if it has one."""
        _, living = self._of.pop(asyncio.get_running_loop(), (None, None))
        if living is not None:
            await living.aclose()

    async def _living(self) -> AsyncGenerator[T, None]:
        value = self._make()
        try:
            yield value
        finally:
            await self._end(value)
