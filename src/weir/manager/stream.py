"""`stream`: answers in the order of the items, however many items come, in bounded memory.

At most `window` items are under way at a time: enough to fill every place of every worker and the batch after. A sync
iterable is pulled on the event loop whenever there is room, so it must not block; an async one is pulled by a task beside,
so that answers flow while it is awaited.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from typing import Any

from weir.errors import WeirError
from weir.manager.call import Call

Infer = Callable[[Any], Call]


async def stream_sync(
    items: Iterable[Any], infer: Infer, window: int, return_inputs: bool, return_errors: bool
) -> AsyncGenerator[Any, None]:
    """Yield the answers to `items`, in order. For the options see Service.stream."""
    source = iter(items)
    under_way: deque[tuple[Any, Call]] = deque()
    ended: Exception | None = None
    try:
        while True:
            while ended is None and len(under_way) < window:
                try:
                    item = next(source)
                except Exception as error:  # also StopIteration: what came before is still answered
                    ended = error
                else:
                    under_way.append((item, infer(item)))
            if not under_way:
                break
            yield await _answer(under_way, return_inputs, return_errors)
        if not isinstance(ended, StopIteration):
            raise ended
    finally:
        _withdraw(under_way)


async def stream_async(
    items: AsyncIterable[Any], infer: Infer, window: int, return_inputs: bool, return_errors: bool
) -> AsyncGenerator[Any, None]:
    """Yield the answers to `items`, in order. For the options see Service.stream."""
    feed = _Feed(items, infer, window)
    try:
        while await feed.has_more():
            yield await _answer(feed.under_way, return_inputs, return_errors)
            feed.room.set()
        if feed.error is not None:
            raise feed.error
    finally:
        await feed.stop()


class _Feed:
    """Pulls an async iterable in a task of its own, as far as the window allows."""

    def __init__(self, items: AsyncIterable[Any], infer: Infer, window: int) -> None:
        self.under_way: deque[tuple[Any, Call]] = deque()
        self.room = asyncio.Event()
        self.error: Exception | None = None
        self._arrived = asyncio.Event()
        self._ended = False
        self._task = asyncio.ensure_future(self._pull(items, infer, window))

    async def has_more(self) -> bool:
        """Return True once something is under way, False once all has been answered and no more comes."""
        while not self.under_way and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        return bool(self.under_way)

    async def stop(self) -> None:
        """Pull no more and cancel what is under way."""
        self._task.cancel()
        await asyncio.wait([self._task])
        _withdraw(self.under_way)

    async def _pull(self, items: AsyncIterable[Any], infer: Infer, window: int) -> None:
        try:
            async for item in items:
                self.under_way.append((item, infer(item)))
                self._arrived.set()
                while len(self.under_way) >= window:
                    self.room.clear()
                    await self.room.wait()
        except Exception as error:  # raised to the caller in its place, after the answers to what came before
            self.error = error
        finally:
            self._ended = True
            self._arrived.set()


def _withdraw(under_way: deque[tuple[Any, Call]]) -> None:
    for _, call in under_way:
        call.cancel()


async def _answer(under_way: deque[tuple[Any, Call]], return_inputs: bool, return_errors: bool) -> Any:
    item, call = under_way[0]
    answer: Any
    try:
        answer = await call
    except WeirError as error:
        if not return_errors:
            raise
        answer = error
    under_way.popleft()
    return (item, answer) if return_inputs else answer
