"""Keeps the event loop awake around the instants that count.

A loop that sleeps is woken late: by up to a millisecond when it is a timer that wakes it, for loops count in whole ones, and by
what it takes to get a CPU. Around the instant at which a batch is expected back, or a wait ends, it goes round without
sleeping instead. Each turn yields the CPU, so that whoever has work to do gets it.
"""

import asyncio
import os
from collections.abc import Callable

from weir.manager.clock import LOOP_TICK
from weir.workers.rehearsal import EVERY


class Alertness:
    """Polls from `seconds` before an expected instant until `seconds` after it; `rehearse` is called meanwhile, every few
    hundred microseconds, to run what will have to be quick."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        rehearse: Callable[[], object],
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._loop = loop
        self._rehearse = rehearse
        self._until = float("-inf")
        self._next_rehearsal = float("-inf")
        self._turning = False
        self._closed = False

    def expect(self, when: float, now: float) -> None:
        """Be awake around `when`. An instant that is over counts as well: more may follow it."""
        early = when - self.seconds - LOOP_TICK - now
        if early > 0.0:
            self._loop.call_later(early, self._stay, when + self.seconds)
        else:
            self._stay(when + self.seconds)

    def close(self) -> None:
        """Let the loop sleep from now on."""
        self._closed = True
        self._until = float("-inf")

    def _stay(self, until: float) -> None:
        if self._closed:
            return
        self._until = max(self._until, until)
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = self._clock()
        if now >= self._until:
            self._turning = False
            return
        if now >= self._next_rehearsal:
            self._rehearse()
            self._next_rehearsal = self._clock() + EVERY
        os.sched_yield()
        self._loop.call_soon(self._turn)
