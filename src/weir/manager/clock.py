"""The service's clock and its single timer."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

# uvloop counts in whole milliseconds: a timer that fired early by less than one is armed again for at least this long,
# so that it does not spin.
SHORTEST_REARM = 0.001


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
    """

    def __init__(self, clock: Callable[[], float], loop: asyncio.AbstractEventLoop, due: Callable[[], None]) -> None:
        self._clock = clock
        self._loop = loop
        self._due = due
        self._armed: float | None = None
        self._handle: Cancellable | None = None
        self._fired_early = False

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
        else:
            self._handle = self._loop.call_later(max(left, SHORTEST_REARM if self._fired_early else 0.0), self._fire)

    def cancel(self) -> None:
        """Fire no more until armed again."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._armed = None

    def _fire(self) -> None:
        self._fired_early = self._armed is not None and self._clock() < self._armed
        self._handle = self._armed = None
        self._due()
