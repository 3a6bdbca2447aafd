"""An event loop in a thread of its own, for programs that have none."""

import asyncio
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, NamedTuple, Protocol, TypeVar

from weir.errors import ModelNotReady
from weir.manager.call import fail_all

T = TypeVar("T")
Step = Callable[[], Coroutine[Any, Any, Any]]

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
        self._awaited: set[Future[Any]] = set()  # what `run` waits for
        self._over = False  # the loop has ended
        self._running: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; return when the loop runs."""
        self._thread.start()
        self._running.result()

    @property
    def started(self) -> bool:
        """Whether the loop runs, or did."""
        return self._running.done()

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
        """Run `coroutine` on the loop and return its result; interrupting the wait (Ctrl-C) cancels it.

        Raises ModelNotReady if the loop ends before the coroutine does.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise _stopped() from None
        self._awaited.add(future)
        try:
            if self._over:  # nothing that comes this late is run any more
                future.cancel()
            return future.result()
        except BaseException as error:
            future.cancel()
            if self._over and isinstance(error, CancelledError):
                if getcoroutinestate(coroutine) == CORO_CREATED:  # the loop never came to it
                    coroutine.close()
                raise _stopped() from None
            raise
        finally:
            self._awaited.discard(future)

    def close(self, last: Step | None = None) -> None:
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
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._live())
        finally:
            self._over = True
            for future in list(self._awaited):
                future.cancel()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.create_future()
        self._running.set_result(None)
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


class Runs(Protocol):
    """What a Lifecycle starts and stops: a Service, a Manager."""

    async def start(self) -> None:
        """Return when it runs; after an exception nothing is left running."""

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Return when nothing of it runs any more."""


class Lifecycle:
    """Starts and stops what runs on the loop of a Background, for any number of threads.

    One start or stop is under way at a time. A forked process has nothing of it: the thread that ran the loop is not there.
    """

    def __init__(self, name: str, take: Callable[[Any], None], refuse: Callable[[Any], None]) -> None:
        self.running: Background | None = None
        self.forked_from: int | None = None  # the process that started it, if this one was forked from that
        self._make = partial(Background, name, take, refuse)
        self._lock = threading.Lock()
        self._last: _Change | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        _LIFECYCLES.add(self)

    def start(self, find: Callable[[], Runs]) -> bool:
        """Start what `find` returns, on a loop in a new thread; return True when that is done. It is stopped at the latest when
        nothing refers to this object any more, or the interpreter exits.

        Of several threads the first one starts it. The others wait for that, and return False, or raise what it raised; those
        that come later return False at once. After an exception nothing is left running.
        """
        while True:
            with self._lock:
                if self.running is not None:
                    return False
                last = self._last
                if last is None or last.done.done():
                    self._last = mine = _Change(self._make(), find(), Future(), starts=True)
                    self.forked_from = None
                    break
            if last.starts:
                last.done.result()
                return False
            last.done.exception()
        try:
            mine.background.start()
            try:
                mine.background.run(mine.what.start())
            except BaseException:
                mine.background.close(partial(mine.what.stop, 0.0))
                raise
        except BaseException as error:
            mine.done.set_exception(error)
            raise
        self._finalizer = weakref.finalize(self, mine.background.close, partial(mine.what.stop, 0.0))
        self.running = mine.background
        mine.done.set_result(None)
        return True

    def stop(self, drain_timeout: float | None = None) -> None:
        """Stop it, then end the loop and its thread. A start that is under way in another thread is ended; of several
        threads the first one stops it, and the others wait for that."""
        while True:
            with self._lock:
                last = self._last
                if last is None:
                    return
                if last.done.done():
                    if self.running is None:
                        return
                    self._last = mine = _Change(self.running, last.what, Future(), starts=False)
                    self.running = None
                    break
            if last.starts and last.background.started:
                with suppress(Exception):
                    last.background.run(last.what.stop(drain_timeout))
            last.done.exception()
        try:
            mine.background.run(mine.what.stop(drain_timeout))
        finally:
            mine.background.close()
            mine.done.set_result(None)

    def forget(self) -> None:
        """Begin anew in a process that was forked while it ran, or was being started or stopped."""
        self._lock = threading.Lock()
        last, self._last = self._last, None
        if last is None or (last.done.done() and self.running is None):
            return
        self.running = None
        self.forked_from = os.getppid()
        # Kept for ever: to free a loop, or what it watches, would take it from the process whose it is.
        _INHERITED.append(last)
        if self._finalizer is not None:
            self._finalizer.detach()


class _Change(NamedTuple):
    """A start or a stop. It is over when `done` is."""

    background: Background
    what: Runs
    done: Future[None]
    starts: bool


_LIFECYCLES: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
_INHERITED: list[_Change] = []


def _forget_all() -> None:
    for lifecycle in list(_LIFECYCLES):
        lifecycle.forget()
    if any(lifecycle.forked_from == os.getppid() for lifecycle in list(_LIFECYCLES)):
        fail_all(ModelNotReady(f"the call is under way in process {os.getppid()}, from which this one was forked"))


os.register_at_fork(after_in_child=_forget_all)


def _stopped() -> ModelNotReady:
    return ModelNotReady("the service was stopped")
