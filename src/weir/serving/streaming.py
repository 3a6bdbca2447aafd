"""`stream`: answers in the order of the items, however many items come, in bounded memory.

At most `size` items are under way at a time: enough to fill every place of every worker and the batch after. A sync
iterable is pulled on the event loop whenever there is room, so it must not block; an async one is pulled by a task beside,
so that answers flow while it is awaited.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable
from typing import Any, Generic, TypeVar

from weir.batching.request_state import refuse
from weir.errors import InvalidRequest, RequestError, WeirError
from weir.serving.calls import Call, ThreadCall

C = TypeVar("C", Call, ThreadCall)


class Window(Generic[C]):
    """The items under way, in order, and how their answers are given out."""

    def __init__(self, infer: Callable[[Any], C], size: int, return_inputs: bool, return_errors: bool) -> None:
        self._infer: Callable[[Any], C] = infer
        self._size = size
        self._return_inputs = return_inputs
        self._return_errors = return_errors
        self._under_way: deque[tuple[Any, C]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def full(self) -> bool:
        """Whether no more items may come in."""
        return len(self._under_way) >= self._size

    @property
    def head(self) -> C:
        """The call whose answer is next."""
        return self._under_way[0][1]

    def put(self, item: Any) -> None:
        """Send one more item on its way."""
        self._under_way.append((item, self._infer(item)))

    def take(self, answer: Any) -> Any:
        """Let the head go; return what the caller gets of it. Raises the head's error unless errors are wanted."""
        if isinstance(answer, WeirError) and not self._return_errors:
            raise answer
        item, _ = self._under_way.popleft()
        return (item, answer) if self._return_inputs else answer

    def withdraw(self) -> None:
        """Cancel all that is under way."""
        for _, call in self._under_way:
            if not call.cancel() and not call.cancelled():
                call.exception()  # nobody will look at it any more: asyncio need not complain of that


def preprocessing(
    preprocessor: Callable[[Any], Any] | None, infer: Callable[[Any], C], refused: Callable[[Any], C]
) -> Callable[[Any], C]:
    """Return an `infer` that gives each item to `preprocessor` before. `refused` returns the call of an item for which that
    raises; it fails with the RequestError that was raised, or InvalidRequest."""
    if preprocessor is None:
        return infer

    def infer_preprocessed(item: Any) -> C:
        try:
            prepared = preprocessor(item)
        except Exception as error:
            call = refused(item)
            refuse(call, error if isinstance(error, RequestError) else _unprepared(error))
            return call
        return infer(prepared)

    return infer_preprocessed


def _unprepared(error: Exception) -> InvalidRequest:
    wrong = InvalidRequest(f"the preprocessor of the stream raised {error!r:.200}")
    wrong.__cause__ = error
    return wrong


class Source:
    """A sync iterable that is pulled as far as a window allows."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = iter(items)
        self._end: Exception | None = None

    def fill(self, window: Window[C]) -> bool:
        """Pull; return whether anything is under way. When nothing is, raises the iterable's own error if it had one:
        what came before it has been answered.

        Pulls one item at least, so that the window stays full, and more only while no answer is there to be given out: a
        slow iterable does not hold up answers.
        """
        while self._end is None and not window.full:
            try:
                item = next(self._items)
            except Exception as end:
                self._end = end
            else:
                window.put(item)
                if window.head.done():
                    break
        if not window and self._end is not None and not isinstance(self._end, StopIteration):
            raise self._end
        return bool(window)


async def stream_sync(items: Iterable[Any], window: Window[Call]) -> AsyncGenerator[Any, None]:
    """Yield the answers to `items`, in order."""
    source = Source(items)
    try:
        while source.fill(window):
            yield window.take(await _answer(window.head))
    finally:
        window.withdraw()


async def stream_async(items: AsyncIterable[Any], window: Window[Call]) -> AsyncGenerator[Any, None]:
    """Yield the answers to `items`, in order."""
    feed = _Feed(items, window)
    try:
        while await feed.has_more():
            answer = window.take(await _answer(window.head))
            feed.room.set()
            yield answer
        if feed.error is not None:
            raise feed.error
    finally:
        await feed.stop()


def stream_blocking(items: Iterable[Any], window: Window[ThreadCall]) -> Generator[Any, None, None]:
    """Yield the answers to `items`, in order, in a program without an event loop."""
    source = Source(items)
    try:
        while source.fill(window):
            try:
                answer = window.head.result()
            except WeirError as error:
                answer = error
            yield window.take(answer)
    finally:
        window.withdraw()


async def _answer(call: Call) -> Any:
    try:
        return await call
    except WeirError as error:
        return error


class _Feed:
    """Pulls an async iterable in a task of its own, as far as the window allows."""

    def __init__(self, items: AsyncIterable[Any], window: Window[Call]) -> None:
        self.room = asyncio.Event()
        self.error: Exception | None = None
        self._window = window
        self._arrived = asyncio.Event()
        self._ended = False
        self._task = asyncio.ensure_future(self._pull(items))

    async def has_more(self) -> bool:
        """Return True once something is under way, False once all has been answered and no more comes."""
        while not self._window and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        return bool(self._window)

    async def stop(self) -> None:
        """Pull no more and cancel what is under way."""
        self._task.cancel()
        try:
            await asyncio.wait(
                [self._task]
            )  # the iterable may take its time to end, and whoever leaves may leave this too
        finally:
            self._window.withdraw()

    async def _pull(self, items: AsyncIterable[Any]) -> None:
        try:
            async for item in items:
                self._window.put(item)
                self._arrived.set()
                while self._window.full:
                    self.room.clear()
                    await self.room.wait()
        except Exception as error:  # raised to the caller in its place, after the answers to what came before
            self.error = error
        finally:
            self._ended = True
            self._arrived.set()
