"""Runs one round of load on one target."""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from weir.bench.load import Floats, Load
from weir.bench.target import Counts, Ledger, Target

# A timer exact to hundredths of a millisecond: the event loop's own timers count whole milliseconds.


_CLOCK_MONOTONIC = 1  # the clock of time.monotonic
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_SOONEST = 1e-9  # 0 would disarm it


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Waker(Protocol):
    """Calls back once, not before the instant that it was last set to."""

    def set(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at `when`, seconds of the clock; what was set before is forgotten."""


class Alarm:
    """A Waker for the running event loop and time.monotonic: a timer of the kernel's (timerfd). Close it."""

    def __init__(self) -> None:
        self._callback: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._value = _Itimerspec()
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop.add_reader(self._file, self._fire)

    def set(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at `when`; at once if that is over."""
        self._callback = callback
        seconds, fraction = divmod(max(when, _SOONEST), 1.0)
        self._value.value.seconds, self._value.value.nanoseconds = int(seconds), int(fraction * 1e9)
        if self._libc.timerfd_settime(self._file, _TFD_TIMER_ABSTIME, ctypes.byref(self._value), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fire(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # it was set anew since
            return
        self._callback()

    def close(self) -> None:
        """Never call back again. Idempotent."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Sends requests, each at its own time (open loop) or as soon as an answer has come (closed loop).


# Seconds before an instant that the loop turns without sleeping: to be woken takes up to about so long.
SPIN = 0.0001
# Requests that leave in one turn of the loop, so that answers are read in between.
_BURST = 32

Clock = Callable[[], float]
Send = Callable[[int], None]


class OpenLoop:
    """Calls `send(index)` for each request of the ledger at its intended instant, or as soon after as can be.

    `tick` begins; it sees itself to be called again. `soon(callback)` calls back in the next turn of
    the event loop. `finished()` is called when the last request was begun.
    """

    def __init__(
        self, ledger: Ledger, send: Send, *, clock: Clock, waker: Waker, soon: Callable[[Callable[[], None]], object],
        finished: Callable[[], None], spin: float = SPIN,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._send = send
        self._clock = clock
        self._waker = waker
        self._soon = soon
        self._finished = finished
        self._spin = spin

    def tick(self) -> None:
        """Let leave what is due, then wait for the next."""
        ledger = self._ledger
        intended = ledger.intended
        index, count = ledger.begun, len(intended)
        last = index + _BURST
        while index < count:
            due = intended[index]
            now = self._clock()
            if now < due:
                if due - now <= self._spin:
                    self._soon(self.tick)
                else:
                    self._waker.set(due - self._spin, self.tick)
                return
            if index == last:
                self._soon(self.tick)
                return
            ledger.begun = index + 1
            self._send(index)
            index += 1
        self._finished()


class ClosedLoop:
    """Keeps `concurrency` requests under way until the instant `end`: each leaves when another has its answer."""

    def __init__(
        self, ledger: Ledger, send: Send, *, clock: Clock, soon: Callable[[Callable[[], None]], object],
        finished: Callable[[], None], concurrency: int, end: float,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._send = send
        self._clock = clock
        self._soon = soon
        self._finished = finished
        self._end = end
        self._under_way = concurrency
        ledger.hear = self._ended

    def start(self) -> None:
        """Begin all callers."""
        for _ in range(self._under_way):
            self._next()

    def _ended(self, index: int) -> None:
        self._soon(self._next)  # not from within: an end may come while the next request is being sent

    def _next(self) -> None:
        now = self._clock()
        if now >= self._end:
            self._under_way -= 1
            if not self._under_way:
                self._finished()
            return
        index = self._ledger.add(now)
        self._ledger.begun += 1
        self._send(index)


_LEAD = 0.02  # seconds before the first request
_SWEEP_INTERVAL = 0.05  # seconds


class Round(NamedTuple):
    """What came of a round: its books, when it began (on the books' clock), and what the server counted meanwhile."""

    ledger: Ledger
    start: float
    counts: Counts | None


async def run_round(
    target: Target, load: Load, index: int, *, clock: Clock = time.monotonic,
    watch: Callable[[Ledger], None] = lambda ledger: None,
) -> Round:  # fmt: skip
    """Run round `index` of `load` until each of its requests has its end; `watch` is shown the books at the start."""
    before = await target.counts()
    if load.times is not None:
        ledger, start = await _run_open(target, load.times[index], clock, watch)
    else:
        ledger, start = await _run_closed(target, load, clock, watch)
    after = await target.counts()
    return Round(ledger, start, None if before is None or after is None else after - before)


async def _run_open(
    target: Target, times: Floats, clock: Clock, watch: Callable[[Ledger], None]
) -> tuple[Ledger, float]:
    loop = asyncio.get_running_loop()
    start = clock() + _LEAD
    ledger = Ledger((times + start).tolist())
    await target.start_round(ledger)
    watch(ledger)
    finished = loop.create_future()
    with Alarm() as alarm:
        pace = OpenLoop(
            ledger, target.send, clock=clock, waker=alarm, soon=loop.call_soon,
            finished=lambda: finished.set_result(None),
        )  # fmt: skip
        pace.tick()
        await _settled(target, ledger, finished)
    return ledger, start


async def _run_closed(
    target: Target, load: Load, clock: Clock, watch: Callable[[Ledger], None]
) -> tuple[Ledger, float]:
    loop = asyncio.get_running_loop()
    ledger = Ledger()
    await target.start_round(ledger)
    watch(ledger)
    finished = loop.create_future()
    start = clock()
    closed = ClosedLoop(
        ledger, target.send, clock=clock, soon=loop.call_soon, finished=lambda: finished.set_result(None),
        concurrency=load.concurrency or 1, end=start + load.round_seconds,
    )  # fmt: skip
    closed.start()
    await _settled(target, ledger, finished)
    return ledger, start


async def _settled(target: Target, ledger: Ledger, finished: asyncio.Future[None]) -> None:
    """Wait until all have been sent and have their ends."""
    while not (finished.done() and ledger.open == 0):
        if finished.done():
            await asyncio.sleep(_SWEEP_INTERVAL / 10)
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(finished), _SWEEP_INTERVAL)
        target.give_up()
