"""The service's clock and its single timer."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

# Seconds: uvloop counts in whole milliseconds, and asyncio sleeps for whole ones. A timer that fired early by less than one
# is armed again for at least this long, so that it does not spin unless it is asked to.
LOOP_TICK = 0.001


class Cancellable(Protocol):
    """What arming a timer returns."""

    def cancel(self) -> None:
        """Make the timer never fire."""


@runtime_checkable
class TimekeepingClock(Protocol):
    """A clock that keeps timers of its own: virtual time (testing.FakeClock)."""

    def __call__(self) -> float:
        """Return the time now, in seconds."""

    def call_at(self, when: float, callback: Callable[[], Any]) -> Cancellable:
        """Call `callback` once the time is `when`."""


class Timer:
    """Calls `due` at the instant asked for, or a little earlier: `due` looks at the clock and arms the timer again.

    Arming it for a later instant than it is armed for does nothing: it fires early once, which costs less than to cancel
    and arm a timer for every batch.

    `spin`: seconds before an instant from which on the loop goes round without sleeping, so that the timer is not late by
    the millisecond that loops count in.
    """

    def __init__(self, clock: Callable[[], float], loop: asyncio.AbstractEventLoop, due: Callable[[], None]) -> None:
        self._clock = clock
        self._loop = loop
        self._due = due
        self._armed: float | None = None
        self._handle: Cancellable | None = None
        self._fired_early = False
        self.spin = 0.0

    def arm(self, when: float | None) -> None:
        """Fire not later than at `when`; None asks for nothing."""
        if when is None or (self._armed is not None and self._armed <= when):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._armed = when
        left = when - self._clock()
        if left <= 0.0:
            self._handle = self._loop.call_soon(self._fire)
        elif isinstance(self._clock, TimekeepingClock):
            self._handle = self._clock.call_at(when, self._fire)
        elif self.spin:
            self._handle = self._approach(left)
        else:
            self._handle = self._loop.call_later(max(left, LOOP_TICK if self._fired_early else 0.0), self._fire)

    def _approach(self, left: float) -> Cancellable:
        early = left - self.spin - LOOP_TICK
        return self._loop.call_later(early, self._come_near) if early > 0.0 else self._loop.call_soon(self._come_near)

    def _come_near(self) -> None:
        assert self._armed is not None  # whoever disarms it cancels this
        left = self._armed - self._clock()
        if left > 0.0:
            self._handle = self._approach(left)
        else:
            self._fire()

    def cancel(self) -> None:
        """Fire no more until armed again."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._armed = None

    def _fire(self) -> None:
        self._fired_early = self._armed is not None and self._clock() < self._armed
        self._handle = self._armed = None
        self._due()


async def sleep(clock: Callable[[], float], seconds: float) -> None:
    """Return after so many seconds of `clock`."""
    over = asyncio.Event()
    end = clock() + seconds
    timer = Timer(clock, asyncio.get_running_loop(), lambda: over.set() if clock() >= end else timer.arm(end))
    timer.arm(end)
    try:
        await over.wait()
    finally:
        timer.cancel()
