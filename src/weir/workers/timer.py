"""Makes event loops, and has them do things later or besides: timers, on its clock or another one (an instant that may be brought forward, a limit, a pause), tasks
in the background, and the end of tasks and futures.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")

# Seconds. uvloop's timers count whole milliseconds, and asyncio sleeps for whole ones. A timer that fired early by less than a
# millisecond is armed again for at least this long, so that it does not fire again and again.
LOOP_TICK = 0.001


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop if that is installed, which it may not be on the newest Pythons, else of asyncio."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.new_event_loop()
    return new_event_loop()


class Cancellable(Protocol):
    """The handle of a timer."""

    def cancel(self) -> None:
        """Stop the timer from firing."""


@runtime_checkable
class TimekeepingClock(Protocol):
    """A clock that keeps its own timers, such as virtual time (testing.FakeClock)."""

    def __call__(self) -> float:
        """Return the present time in seconds."""

    def call_at(self, when: float, callback: Callable[[], Any]) -> Cancellable:
        """Call `callback` when the time is `when`, in seconds of this clock. Return the timer's handle."""


class Timer:
    """Calls `due` at the given instant or a little earlier; `due` must look at the clock and arm the timer again if needed. It is `armed` for this
    instant, or infinity.

    Arming it for a later instant than it is already armed for does nothing. It then fires once too early, which costs less than
    cancelling and arming a timer for every batch.
    """

    def __init__(self, clock: Callable[[], float], loop: asyncio.AbstractEventLoop, due: Callable[[], object]) -> None:
        self._clock = clock
        self._loop = loop
        self._due = due
        self.armed = inf
        self._call_at = clock.call_at if isinstance(clock, TimekeepingClock) else None
        self._handle: Cancellable | None = None
        self._fired_early = False

    def arm(self, when: float | None) -> None:
        """Fire at `when` at the latest, in seconds of the clock; None changes nothing."""
        if when is None or self.armed <= when:
            return
        if self._handle is not None:
            self._handle.cancel()
        self.armed = when
        left = when - self._clock()
        if left <= 0.0:
            self._handle = self._loop.call_soon(self._fire)
        elif self._call_at is not None:
            self._handle = self._call_at(when, self._fire)
        else:
            self._handle = self._loop.call_later(max(left, LOOP_TICK if self._fired_early else 0.0), self._fire)

    def cancel(self) -> None:
        """Disarm the timer."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.armed = None, inf

    def _fire(self) -> None:
        self._fired_early = self._clock() < self.armed
        self._handle, self.armed = None, inf
        self._due()


class TimeLimit:
    """Calls `exceeded` when what has begun does not end within `seconds` of `clock`, by default the loop's (None: there is no limit).

    It may be begun and ended once per batch, so that must be cheap: to end it leaves the timer armed, and a timer that fires too
    early is armed again for the rest. A batch has no timer of its own.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float | None,
        exceeded: Callable[[], object],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock or loop.time
        self._seconds = seconds
        self._exceeded = exceeded
        self._due: float | None = None  # None while nothing is limited
        self._left: float | None = None  # seconds, at the pause
        self._timer = Timer(self._clock, loop, self._look)

    @property
    def counting(self) -> bool:
        """Whether something has begun that has neither ended nor exceeded the limit."""
        return self._due is not None

    def begin(self) -> None:
        """Start counting, from now."""
        if self._seconds is not None:
            self._due = self._clock() + self._seconds
            self._timer.arm(self._due)

    def end(self) -> None:
        """Stop counting."""
        self._due = None

    def pause(self) -> None:
        """Stop counting until `go_on`."""
        if self._due is not None:
            self._left, self._due = self._due - self._clock(), None

    def go_on(self) -> None:
        """Count on from the pause."""
        if self._left is not None:
            self._due, self._left = self._clock() + self._left, None
            self._timer.arm(self._due)

    def close(self) -> None:
        """Stop counting, and disarm the timer."""
        self._due = None
        self._timer.cancel()

    def _look(self) -> None:
        if self._due is None:
            return
        if self._clock() < self._due:
            self._timer.arm(self._due)
        else:
            self._due = None
            self._exceeded()


async def sleep(clock: Callable[[], float], seconds: float) -> None:
    """Return after `seconds` seconds of `clock`."""
    over = asyncio.Event()
    limit = TimeLimit(asyncio.get_running_loop(), seconds, over.set, clock)
    limit.begin()
    try:
        await over.wait()
    finally:
        limit.close()


async def end_tasks(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel the tasks that are not done, and wait until they are. What they raise is dropped."""
    given = [task for task in tasks if task is not None]
    running = [task for task in given if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in given:
        _ = task.cancelled() or task.exception()  # which marks it as read


async def outcome_of(future: "asyncio.Future[T]") -> T:
    """Return the result of `future`, which goes on if this is cancelled.

    Unlike asyncio.shield, which from Python 3.14 on then logs the error that it ends with, whoever else reads that.
    """
    await asyncio.wait((future,))
    return future.result()


def resolve(future: "asyncio.Future[Any]", outcome: Any) -> None:
    """Give `future`, unless it is done, its result, or the error that `outcome` is. Nobody need wait for it any more."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
        future.exception()  # which marks it as read
    else:
        future.set_result(outcome)


def in_background(
    work: Coroutine[Any, Any, Any], what: str, tasks: "set[asyncio.Task[Any]] | None" = None
) -> "asyncio.Task[Any]":
    """Run `work` in a task that nobody awaits, and which is in `tasks` until it ends. An error that ends it is logged at once, as one of `what`."""
    task = asyncio.ensure_future(work)
    tasks = set() if tasks is None else tasks

    def ended(task: "asyncio.Task[Any]") -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.getLogger("weir").error("%s has failed: %s: %s", what, type(error).__name__, error, exc_info=error)

    tasks.add(task)
    task.add_done_callback(ended)
    return task
