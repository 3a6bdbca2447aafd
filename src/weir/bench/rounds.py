"""One round of load on one target: the instants of requests, the timer for them, and how they are sent.

`LoadSettings` describe the load. `make_load` makes the instants of every round, which are the same for each target. `OpenLoop`
sends each request at its instant; `ClosedLoop` sends one as soon as another is answered. `run_round` runs one of them until every
request has ended.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from weir.bench.target import Counts, Ledger, Target
from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, check, setting
from weir.errors import SettingsError
from weir.simulation.arrivals import Arrivals, parse_arrivals

Floats = NDArray[np.float64]

_SHORTEST_ROUND = 0.05  # seconds
_MAX_REQUESTS = 20_000_000  # the ledger of so many takes some gigabytes
_FINITE = (lambda value: 0 < value < inf, "must be greater than 0, and finite")


@dataclass(frozen=True)
class LoadSettings:
    """The load of a run. Durations are in seconds."""

    arrivals: str | Arrivals = setting(
        "poisson", "when requests are sent (poisson, constant, gamma:cv=2, trace:FILE, ...)"
    )
    rate: float | None = setting(None, "requests per second, unless the arrivals state a rate", rule=_FINITE)
    duration: float | None = setting(None, "seconds of load (default: 10, or the length of the trace)", rule=_FINITE)
    concurrency: int | None = setting(
        None,
        "closed loop instead: number of callers, each of which waits for a response before it sends again",
        rule=AT_LEAST_ONE,
    )
    warm_up: float = setting(
        0.1,
        "share of each round, at its start, that is not counted",
        rule=(lambda value: 0 <= value < 1, "must be 0 or more, and less than 1"),
    )
    rounds: int | None = setting(
        None, "rounds in which targets take turns (default: 5, or 1 for a single target)", rule=AT_LEAST_ONE
    )
    seed: int = setting(1, "seed of random arrivals", rule=AT_LEAST_ZERO)
    max_lag_ms: float = setting(1.0, "p99 send lag in ms above which the run fails", rule=POSITIVE)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, eq=False)
class Load:
    """The load of each target, in rounds of `round_seconds` seconds.

    In an open loop, `times[r]` has the instants of round r, in seconds from its start. In a closed loop, `times` is None, and
    there are `concurrency` callers.
    """

    arrivals: str
    rate: float | None  # intended, requests per second
    round_seconds: float
    rounds: int
    warm_up: float  # seconds of each round
    times: list[Floats] | None
    concurrency: int | None


def make_load(settings: LoadSettings, targets: int) -> Load:
    """Return the load that `settings` describe for each of `targets` targets. Raises SettingsError."""
    rounds = settings.rounds or (1 if targets == 1 else 5)
    if settings.concurrency is not None:
        if settings.rate is not None:
            raise SettingsError(
                f"rate={settings.rate:g}: a closed loop (concurrency) has no rate; give only one of them"
            )
        seconds = _round_seconds(settings.duration or 10.0, rounds)
        name = f"closed:{settings.concurrency}"
        return Load(name, None, seconds, rounds, settings.warm_up * seconds, None, settings.concurrency)
    arrivals = _arrivals(settings)
    length = arrivals.length
    if length is None:
        _check_count(arrivals.rate, settings.duration or 10.0)
    times = _times(arrivals, settings.duration or (10.0 if length is None else None), settings.seed)
    duration = settings.duration or (10.0 if length is None else float(times[-1]) + 1e-6)
    if not len(times):
        raise SettingsError(
            f"arrivals={settings.arrivals!r}: none within {duration:g} s; give a longer duration or a higher rate"
        )
    seconds = _round_seconds(duration, rounds)
    edges = np.searchsorted(times, np.arange(1, rounds) * seconds)
    parts = [part - index * seconds for index, part in enumerate(np.split(times, edges))]
    return Load(_text(settings), len(times) / duration, seconds, rounds, settings.warm_up * seconds, parts, None)


def _check_count(rate: float, duration: float) -> None:
    if rate * duration > _MAX_REQUESTS:
        raise SettingsError(
            f"rate={rate:g}, duration={duration:g}: are {rate * duration:.3g} requests; must be at most {_MAX_REQUESTS:,}"
        )


def _round_seconds(duration: float, rounds: int) -> float:
    if rounds > 1 and duration / rounds < _SHORTEST_ROUND:
        raise SettingsError(
            f"duration={duration:g}: must be at least {_SHORTEST_ROUND * rounds:g} s for {rounds} rounds"
        )
    return duration / rounds


def _times(arrivals: Arrivals, duration: float | None, seed: int) -> Floats:
    blocks = []
    for block in arrivals.stream(np.random.default_rng(seed)):
        blocks.append(block)
        if duration is not None and len(block) and block[-1] >= duration:
            break
    times = np.concatenate(blocks)
    return times if duration is None else times[times < duration]


def _text(settings: LoadSettings) -> str:
    return settings.arrivals if isinstance(settings.arrivals, str) else settings.arrivals.name


def _arrivals(settings: LoadSettings) -> Arrivals:
    """Return the process of arrivals. If its text states neither a load nor a rate, `rate` is inserted."""
    text, rate = settings.arrivals, settings.rate
    if not isinstance(text, str):
        return text
    name, _, rest = text.partition(":")
    parts = [part for part in rest.split(",") if part]
    stated = name == "trace" or any(part.startswith("rate=") or "=" not in part for part in parts)
    if stated and rate is not None:
        raise SettingsError(f"rate={rate:g}: arrivals={text!r} state their own rate; give only one of them")
    if not stated and rate is None:
        raise SettingsError(f"arrivals={text!r}: state no rate; give --rate (requests per second)")
    return parse_arrivals(text if stated else f"{name}:{','.join([f'rate={rate!r}', *parts])}")


_CLOCK_MONOTONIC = 1  # the clock of time.monotonic
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_SOONEST = 1e-9  # seconds; 0 would disarm the timer


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Waker(Protocol):
    """A timer that calls back once."""

    def set(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at `when`, in seconds of the clock, and not before; an earlier setting is forgotten."""


class Alarm:
    """A Waker for the running event loop and time.monotonic. It must be closed.

    It is a timer of the kernel (timerfd), exact to hundredths of a millisecond: an event loop's own timers count whole
    milliseconds.
    """

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
        """See Waker. An instant in the past calls back at once."""
        self._callback = callback
        seconds, fraction = divmod(max(when, _SOONEST), 1.0)
        self._value.value.seconds, self._value.value.nanoseconds = int(seconds), int(fraction * 1e9)
        if self._libc.timerfd_settime(self._file, _TFD_TIMER_ABSTIME, ctypes.byref(self._value), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fire(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # the alarm has been set again since
            return
        self._callback()

    def close(self) -> None:
        """Disarm the timer and release it. Idempotent."""
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


# Seconds before an instant for which the event loop turns without sleeping: a wake-up takes up to about so long.
SPIN = 0.0001
_BURST = 32  # requests that are sent in one turn of the event loop, so that answers are read in between

Clock = Callable[[], float]
Send = Callable[[int], None]


class OpenLoop:
    """Calls `send(index)` for each request of the ledger at its intended instant, or as soon after it as possible.

    Call `tick` once to begin. `soon(callback)` must call back in the next turn of the event loop. `finished()` is called when the
    last request has begun.
    """

    def __init__(
        self,
        ledger: Ledger,
        send: Send,
        *,
        clock: Clock,
        waker: Waker,
        soon: Callable[[Callable[[], None]], object],
        finished: Callable[[], None],
        spin: float = SPIN,
    ) -> None:
        self._ledger = ledger
        self._send = send
        self._clock = clock
        self._waker = waker
        self._soon = soon
        self._finished = finished
        self._spin = spin

    def tick(self) -> None:
        """Send the requests that are due, and arrange the next call of this method."""
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
    """Keeps `concurrency` requests under way until the instant `end`: it sends one whenever another has ended."""

    def __init__(
        self,
        ledger: Ledger,
        send: Send,
        *,
        clock: Clock,
        soon: Callable[[Callable[[], None]], object],
        finished: Callable[[], None],
        concurrency: int,
        end: float,
    ) -> None:
        self._ledger = ledger
        self._send = send
        self._clock = clock
        self._soon = soon
        self._finished = finished
        self._end = end
        self._under_way = concurrency
        ledger.on_end = self._ended

    def start(self) -> None:
        """Send the first request of each caller."""
        for _ in range(self._under_way):
            self._next()

    def _ended(self, index: int) -> None:
        self._soon(self._next)  # not at once: a request may end while it is being sent

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
    """The results of a round: its ledger, its start in seconds of the ledger's clock, and what the server counted meanwhile."""

    ledger: Ledger
    start: float
    counts: Counts | None


async def run_round(
    target: Target,
    load: Load,
    index: int,
    *,
    clock: Clock = time.monotonic,
    watch: Callable[[Ledger], None] = lambda ledger: None,
) -> Round:
    """Run round `index` of `load` until every request has ended. `watch` is called with the ledger at the start."""
    before = await target.counts()
    start = clock() + _LEAD
    ledger = Ledger() if load.times is None else Ledger((load.times[index] + start).tolist())
    await target.start_round(ledger)
    watch(ledger)
    if load.times is None:
        start = clock()
        await _run_closed(target, ledger, load.concurrency or 1, start + load.round_seconds, clock)
    else:
        await _run_open(target, ledger, clock)
    after = await target.counts()
    return Round(ledger, start, None if before is None or after is None else after - before)


async def _run_open(target: Target, ledger: Ledger, clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    finished = loop.create_future()
    with Alarm() as alarm:
        OpenLoop(
            ledger,
            target.send,
            clock=clock,
            waker=alarm,
            soon=loop.call_soon,
            finished=lambda: finished.set_result(None),
        ).tick()
        await _settled(target, ledger, finished)


async def _run_closed(target: Target, ledger: Ledger, concurrency: int, end: float, clock: Clock) -> None:
    loop = asyncio.get_running_loop()
    finished = loop.create_future()
    ClosedLoop(
        ledger,
        target.send,
        clock=clock,
        soon=loop.call_soon,
        finished=lambda: finished.set_result(None),
        concurrency=concurrency,
        end=end,
    ).start()
    await _settled(target, ledger, finished)


async def _settled(target: Target, ledger: Ledger, finished: asyncio.Future[None]) -> None:
    """Wait until `finished` is done and every request has ended."""
    while not (finished.done() and ledger.open == 0):
        if finished.done():
            await asyncio.sleep(_SWEEP_INTERVAL / 10)
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(finished), _SWEEP_INTERVAL)
        target.give_up()
