"""Something once a second, for as long as somebody looks and a while longer."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

SECOND = 1.0
PATIENCE = 900.0  # seconds that it goes on after the last look


class Cancellable(Protocol):
    """A timer."""

    def cancel(self) -> None:
        """Never fire."""


Later = Callable[[float, Callable[[], None]], Cancellable]  # calls back after so many seconds


class Beat:
    """Calls `strike` with how late it comes, in seconds, every second from the first `look` until `patience` after the last.

    While nobody looks it costs nothing: there is no timer. It needs no end: a loop that closes forgets its timer.
    """

    def __init__(
        self, strike: Callable[[float], None], *, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:  # fmt: skip
        self._strike = strike
        self._patience = patience
        self._clock = clock
        self._later = later
        self._looked = 0.0
        self._due = 0.0
        self._timer: Cancellable | None = None

    @property
    def beating(self) -> bool:
        """Whether it goes on."""
        return self._timer is not None

    def look(self) -> None:
        """Note that somebody looks; the first time, and after a pause, strike at once."""
        self._looked = self._clock()
        if self._timer is None:
            self._due = self._looked
            self._fire()

    def stop(self) -> None:
        """Beat no more until somebody looks. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        now = self._clock()
        self._timer = None
        if now - self._looked > self._patience:
            return
        late = now - self._due
        self._strike(late)
        self._due = now + SECOND if late >= SECOND else self._due + SECOND  # what was missed is not made up for
        later = self._later or asyncio.get_running_loop().call_later
        self._timer = later(max(0.0, self._due - self._clock()), self._fire)
