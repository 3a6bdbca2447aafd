"""An event loop without sockets whose time is virtual: it jumps to the next timer when nothing else is to do."""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_WHOLE = 0.001  # seconds: uvloop's timers count whole milliseconds


class Stuck(RuntimeError):
    """Everything waits, and no timer is set: a wake-up was lost."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """With `coarse`, timers fire at whole milliseconds, and so up to half a millisecond too early, as those of uvloop do."""

    def __init__(self, *, coarse: bool = False) -> None:
        super().__init__()
        self.now = 0.0
        self._coarse = coarse
        self._selector = _Jumping(self)

    def time(self) -> float:
        return self.now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._coarse:
            when = max(self.now, round(when / _WHOLE) * _WHOLE)
        return super().call_at(when, callback, *args, context=context)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> "asyncio.Future[T]":
        """Do the work at once, in this thread."""
        future: asyncio.Future[T] = self.create_future()
        future.set_result(func(*args))
        return future

    def jump(self) -> None:
        """Let the time pass until the next timer."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # private, and stable
        if not scheduled:
            raise Stuck(f"at {self.now:.6f}: everything waits, and no timer is set")
        self.now = max(self.now, scheduled[0].when())

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class _Jumping:
    """What the loop asks for events: there are none, but time passes."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._loop.jump()
        return []


class SimulatedThreads(Executor):
    """Threads that do their work after a while, in the loop's own thread: a piece of work can be cancelled before that."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random) -> None:
        self._loop = loop
        self._draw = draw

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._loop.call_later(self._draw.choice((0.0, 0.001, 0.02)), self._work, future, fn, args, kwargs)
        return future

    def _work(self, future: "Future[Any]", fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
