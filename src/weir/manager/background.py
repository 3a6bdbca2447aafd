"""An event loop in a thread of its own, for programs that have none."""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

# A loop that has not ended by then is left to die with the process: it is a daemon's.
LONGEST_CLOSE = 10.0

# Values taken in one turn of the loop: threads that post without pause must not keep it from everything else.
MOST_PER_TURN = 1000


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of uvloop's where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    return new_event_loop()


class Background:
    """Runs an event loop in a daemon thread from `start` to `close`.

    Values posted by any thread are handed to `take` on the loop, all that came since the last turn with one wake-up;
    `refuse` gets those that come too late, in the thread that posts them.
    """

    def __init__(self, name: str, take: Callable[[Any], None], refuse: Callable[[Any], None]) -> None:
        self._take = take
        self._refuse = refuse
        self._posted: deque[Any] = deque()
        self._waking = False
        self._closed = False
        self._running: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; return when the loop runs."""
        self._thread.start()
        self._loop = self._running.result()

    def post(self, value: Any) -> None:
        """Hand `value` to `take` on the loop, soon."""
        self._posted.append(value)
        if self._closed:
            self._empty(self._refuse)
        elif not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._take_posted)
            except RuntimeError:  # the loop was closed in between
                self._empty(self._refuse)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and return its result; interrupting the wait (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]] | None = None) -> None:
        """Run `last` on the loop, then end the loop and the thread. Idempotent.

        Waits until it has ended, but not longer than LONGEST_CLOSE, and not at all when called on the loop itself (by the
        garbage collector).
        """
        if self._closed:
            return
        self._closed = True
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._end.set_result, last)
        if threading.current_thread() is not self._thread:
            self._thread.join(LONGEST_CLOSE)
        self._empty(self._refuse)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._running.set_result(loop)
        last = await self._end
        if last is not None:
            await last()

    def _take_posted(self) -> None:
        self._waking = False  # first: whoever posts from here on wakes the loop again
        self._empty(self._take, MOST_PER_TURN)
        if self._posted and not self._waking:
            self._waking = True
            self._loop.call_soon(self._take_posted)

    def _empty(self, use: Callable[[Any], None], most: int = sys.maxsize) -> None:
        for _ in range(most):
            try:
                value = self._posted.popleft()
            except IndexError:
                return
            use(value)
