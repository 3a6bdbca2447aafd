"""A limit on how long something may take, cheap to begin and end once per batch."""

import asyncio
from collections.abc import Callable


class TimeLimit:
    """Calls `exceeded` when what was begun has not ended within `seconds` (None: never).

    Ending it leaves the loop's timer armed; one that fires too early is armed again for the rest. So a batch costs no
    timer of its own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float | None, exceeded: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._exceeded = exceeded
        self._due: float | None = None  # None while nothing is limited
        self._timer: asyncio.TimerHandle | None = None

    @property
    def counting(self) -> bool:
        """Whether something has begun that has neither ended nor exceeded the limit."""
        return self._due is not None

    def begin(self) -> None:
        """Start counting, from now."""
        if self._seconds is None:
            return
        self._due = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._fired, self._due)

    def end(self) -> None:
        """Stop counting."""
        self._due = None

    def close(self) -> None:
        """Stop counting and let go of the loop."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fired(self, armed_for: float) -> None:
        self._timer = None
        if self._due is None:
            return
        # Compared with what armed the timer, not with the clock: loops fire a little early.
        if self._due <= armed_for:
            self._due = None
            self._exceeded()
        else:
            self._timer = self._loop.call_at(self._due, self._fired, self._due)
