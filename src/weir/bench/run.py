"""A whole run: rounds of load in which the targets take turns, and the results of each target.

`LoadSettings` describe the load. `make_load` makes the instants of every round, which are the same for each target. `send_on_time`
sends each request at its instant; `send_by_callers` sends one as soon as another has its response. `run_round` awaits one of them, and then
the end of every request.
"""

import asyncio
import ctypes
import gc
import itertools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from math import isfinite
from operator import add
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from weir.bench import LoadSettings
from weir.bench.target import OK, TIMEOUT, UNSENT, Batches, Counts, Ledger, Target, batches_of
from weir.errors import SettingsError
from weir.simulation.arrivals import Arrivals, parse_arrivals
from weir.simulation.statistics import STRETCHES, Estimate, estimate, plain

Floats = NDArray[np.float64]

_SHORTEST_ROUND = 0.05  # seconds
_MAX_REQUESTS = 20_000_000  # the ledger of this many takes some gigabytes


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
    text: str | Arrivals = settings.arrivals
    rate = settings.rate
    if not isinstance(text, str):
        return text
    name, _, rest = text.partition(":")
    parts = [part for part in rest.split(",") if part]
    stated = name == "trace" or any(part.startswith("rate=") or "=" not in part for part in parts)
    if stated and rate is not None:
        raise SettingsError(f"rate={rate:g}: arrivals={text!r} state their own rate; give only one of them")
    if not stated and rate is None:
        raise SettingsError(
            f"arrivals={text!r}: has no rate; give --rate (requests per second), or --concurrency for a closed loop"
        )
    return parse_arrivals(text if stated else f"{name}:{','.join([f'rate={rate!r}', *parts])}")


_TFD_TIMER_ABSTIME = 1
_SOONEST = 1e-9  # seconds; 0 would disarm the timer

Clock = Callable[[], float]
Send = Callable[[int], None]


class Waker(Protocol):
    """Lets a coroutine sleep until an instant."""

    async def until(self, when: float) -> None:
        """Return at `when`, in seconds of the clock, and not before; at once if that has passed."""


class Alarm:
    """A Waker for the running event loop and time.monotonic. It must be closed.

    It is a timer of the kernel (timerfd), exact to hundredths of a millisecond: an event loop's own timers count whole
    milliseconds.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._rung = self._loop.create_future()
        self._loop.add_reader(self._file, self._ring)

    async def until(self, when: float) -> None:
        """See Waker."""
        self._rung = self._loop.create_future()
        seconds, fraction = divmod(max(when, _SOONEST), 1.0)
        timer = (ctypes.c_long * 4)(0, 0, int(seconds), int(fraction * 1e9))  # a struct itimerspec
        if self._libc.timerfd_settime(self._file, _TFD_TIMER_ABSTIME, timer, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await self._rung

    def _ring(self) -> None:
        os.read(self._file, 8)
        if not self._rung.done():
            self._rung.set_result(None)

    def close(self) -> None:
        """Disarm the timer and release it. Idempotent."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1


# Seconds before an instant for which the event loop turns without sleeping: a wake-up may take this long.
SPIN = 0.0001
_BURST = 32  # requests after which the event loop turns, so that responses are read in between


async def send_on_time(ledger: Ledger, send: Send, clock: Clock, waker: Waker, spin: float = SPIN) -> None:
    """Call `send(index)` for each request of `ledger` at its intended instant, or as soon after it as possible: an open loop."""
    for index, due in enumerate(ledger.intended):
        while (left := due - clock()) > 0.0:
            await (waker.until(due - spin) if left > spin else asyncio.sleep(0))
        if index % _BURST == _BURST - 1:
            await asyncio.sleep(0)
        ledger.begun = index + 1
        send(index)


async def send_by_callers(ledger: Ledger, send: Send, clock: Clock, callers: int, end: float) -> None:
    """Call `send(index)` for as many requests as there are `callers`, and again whenever one has ended, until the instant `end`: a closed
    loop."""
    free = asyncio.Semaphore(callers)
    ledger.on_end = free.release
    while True:
        await free.acquire()
        if ledger.begun % _BURST == _BURST - 1:
            await asyncio.sleep(0)
        if (now := clock()) >= end:
            return
        ledger.begun += 1
        send(ledger.add(now))


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
    target.ledger = ledger = Ledger() if load.times is None else Ledger((load.times[index] + start).tolist())
    watch(ledger)
    sweeping = asyncio.ensure_future(_sweep(target))
    try:
        if load.times is None:
            start = clock()
            await send_by_callers(ledger, target.send, clock, load.concurrency or 1, start + load.round_seconds)
        else:
            with closing(Alarm()) as alarm:
                await send_on_time(ledger, target.send, clock, alarm)
        ended = asyncio.Event()
        ledger.on_end = ended.set
        while ledger.open:
            ended.clear()
            await ended.wait()
    finally:
        sweeping.cancel()
    after = await target.counts()
    return Round(ledger, start, None if before is None or after is None else after - before)


async def _sweep(target: Target) -> None:
    while True:
        await asyncio.sleep(_SWEEP_INTERVAL)
        target.give_up()


_FEWEST = 10  # an interval needs at least this many stretches
_ROUNDING = 1e-9  # seconds; instants are differences of times on a clock that may have run for months


class Lag(NamedTuple):
    """The delay with which requests were sent, in ms: that of this program, not of the server. A request that was never
    sent, for lack of a connection, counts with the time until it was given up."""

    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results of one target, without the warm-up (which only `batches` includes).

    Response times are in ms, from the instant at which a request was *to be* sent. A request that was given up counts with the
    time until then. Estimates have 95 % intervals (batch means; infinite if there are too few requests).
    """

    target: str
    rate: float | None  # intended, requests per second; None in a closed loop
    sent_rate: float  # requests sent per second of load
    throughput: float  # successful responses per second of load
    requests: int
    answered: int  # successfully
    timeouts: int
    unfinished: int  # never sent, for lack of a connection, or never ended
    errors: dict[str, int]  # other failed requests by what went wrong
    response_time_ms: Estimate
    p50_ms: Estimate
    p90_ms: Estimate
    p95_ms: Estimate
    p99_ms: Estimate
    p999_ms: Estimate
    max_ms: float
    lag: Lag
    connections: int | None
    held: int  # requests that waited for a connection because no more were allowed
    batches: Batches | None
    times_ms: Floats  # each response time, in the order of the intended instants
    instants: Floats  # the intended instants, in seconds from the start of the run (rounds laid end to end)


def make_outcome(target: str, load: Load, rounds: Sequence[Round], connections: int | None, held: int) -> Outcome:
    """Return the results of all `rounds` of one target together."""
    intended, sent, ended = (_instants(rounds, name) for name in ("intended", "sent", "ended"))
    kinds = np.array([outcome for each in rounds for outcome in each.ledger.outcomes], object)
    begun = np.repeat(np.arange(len(rounds)) * load.round_seconds, [len(each.ledger.intended) for each in rounds])
    counted = intended >= load.warm_up - _ROUNDING
    timed = counted & ((kinds == OK) | (kinds == TIMEOUT) | (kinds == UNSENT))
    left, unsent = counted & ~np.isnan(sent), counted & (kinds == UNSENT)
    in_time = (kinds == OK) & (ended >= load.warm_up) & (ended < load.round_seconds)
    lags = np.concatenate([(sent - intended)[left], (ended - intended)[unsent]]) * 1000.0
    times = (ended - intended)[timed] * 1000.0
    seconds = (load.round_seconds - load.warm_up) * len(rounds)
    ends = dict(sorted(Counter(kinds[counted]).items()))
    counts = [each.counts for each in rounds if each.counts is not None]
    return Outcome(
        target=target,
        rate=load.rate,
        sent_rate=float((left & (sent < load.round_seconds)).sum()) / seconds,
        throughput=float(in_time.sum()) / seconds,
        requests=int(counted.sum()),
        answered=ends.pop(OK, 0),
        timeouts=ends.pop(TIMEOUT, 0),
        unfinished=ends.pop(UNSENT, 0) + ends.pop("", 0),
        errors=ends,
        response_time_ms=_estimate(times, np.mean),
        **{name: _quantile(times, q) for name, q in QUANTILES.items()},
        max_ms=float(times.max()) if len(times) else np.nan,
        lag=Lag(*(np.percentile(lags, (50, 99, 100)).tolist() if len(lags) else (0.0, 0.0, 0.0))),
        connections=connections,
        held=held,
        batches=batches_of(reduce(add, counts)) if len(counts) == len(rounds) else None,
        times_ms=times,
        instants=(intended + begun)[timed],
    )


QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}


def _instants(rounds: Sequence[Round], name: str) -> Floats:
    """Return the instants of all requests, in seconds from the start of their rounds."""
    return np.concatenate([np.array(getattr(each.ledger, name)) - each.start for each in rounds])


def _quantile(times: Floats, q: float) -> Estimate:
    return _estimate(times, lambda part: np.quantile(part, q), least=10.0 / (1.0 - q))


def _estimate(times: Floats, of: Callable[[Floats], Any], least: float = 10.0) -> Estimate:
    """Return `of(times)` with an interval from stretches of at least `least` requests each; without an interval if there are too
    few requests."""
    if not len(times):
        return Estimate(np.nan, np.nan, np.nan)
    stretches = min(STRETCHES, int(len(times) / least))
    parts = np.array_split(times, stretches) if stretches >= _FEWEST else []
    return estimate(np.array([float(of(part)) for part in parts]), float(of(times)))


@dataclass(frozen=True, eq=False)
class Report:
    """The results of a run. `outcomes` has those of each target by name. `failures` has one line for each reason why the measurement
    is invalid; it is empty for a valid one. `warnings` has one for each target whose requests were sent late."""

    arrivals: str
    rate: float | None  # intended, requests per second; None in a closed loop
    duration: float  # seconds of load on each target
    rounds: int
    warm_up: float  # seconds of each round
    seed: int
    max_lag_ms: float | None
    outcomes: dict[str, Outcome]
    failures: list[str]
    warnings: list[str]

    @property
    def outcome(self) -> Outcome:
        """The results of the first target, which is usually the only one."""
        return next(iter(self.outcomes.values()))


@dataclass(frozen=True)
class TargetTurn:
    """A round of one target: number `index` (from 0) of `count` turns of `seconds` seconds each."""

    target: str
    index: int
    count: int
    seconds: float


Watch = Callable[[TargetTurn, Ledger], None]


async def run_bench(
    targets: Sequence[Target],
    settings: LoadSettings,
    *,
    clock: Clock = time.monotonic,
    watch: Watch = lambda turn, ledger: None,
) -> Report:
    """Put the same load on each of `targets`, in turns, and return the results.

    `watch(turn, ledger)` is called at the start of each round. Raises SettingsError for a wrong setting or a target that does not
    respond. All targets are closed at the end, also after an error.
    """
    names = [target.name for target in targets]
    if not names or len(set(names)) < len(names):
        raise SettingsError(f"targets {', '.join(names) or 'none'}: must be one or more, of different names")
    load = make_load(settings, len(targets))
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    async with AsyncExitStack() as opened:
        for target in targets:
            opened.push_async_callback(target.close)
        for target in targets:
            await target.open()
        numbers, count = itertools.count(), load.rounds * len(targets)
        with _without_pauses():
            for index in range(load.rounds):
                first = index % len(targets)
                # Another one begins in each round: the first may find the machine in another state.
                for target in (*targets[first:], *targets[:first]):
                    shown = partial(watch, TargetTurn(target.name, next(numbers), count, load.round_seconds))
                    rounds[target.name].append(await run_round(target, load, index, clock=clock, watch=shown))
    outcomes = {
        target.name: make_outcome(target.name, load, rounds[target.name], target.connections, target.held)
        for target in targets
    }
    return _report(load, settings, outcomes)


@contextmanager
def _without_pauses() -> Iterator[None]:
    """Hide all present objects from the garbage collector while the block runs: examining them takes longer than a request."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _report(load: Load, settings: LoadSettings, outcomes: dict[str, Outcome]) -> Report:
    late = list(_late(outcomes.values(), settings.max_lag_ms or LATE_MS))
    unanswered = [
        f"{each.target}: no request was answered ({max(each.errors, key=each.errors.__getitem__, default='timeout')})"
        for each in outcomes.values()
        if not each.answered
    ]
    return Report(
        arrivals=load.arrivals,
        rate=load.rate,
        duration=load.round_seconds * load.rounds,
        rounds=load.rounds,
        warm_up=load.warm_up,
        seed=settings.seed,
        max_lag_ms=settings.max_lag_ms,
        outcomes=outcomes,
        failures=[*(late if settings.max_lag_ms else ()), *unanswered],
        warnings=[] if settings.max_lag_ms else late,
    )


LATE_MS = 1.0  # a p99 send lag above which response times say more about this machine than about the server


def _late(outcomes: Iterable[Outcome], most_ms: float) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.rate is not None and outcome.lag.p99_ms > most_ms:
            held = f", {outcome.held} of them for lack of a connection (max_connections)" if outcome.held else ""
            yield (
                f"{outcome.target}: requests were sent late: {outcome.lag.p99_ms:.2f} ms at p99, which should be at most"
                f" {most_ms:g} ms (max_lag_ms){held}; lower the rate, or use another machine"
            )


Row = tuple[str, list[str]]

_HIDDEN = ("times_ms", "instants")
_ESTIMATES = {"response time, ms: mean": "response_time_ms"} | dict(
    zip(("p50", "p90", "p95", "p99", "p99.9"), QUANTILES, strict=True)
)


def to_dict(report: Report) -> dict[str, Any]:
    """Return the report without the individual response times as a JSON-able dict; unknown values are None."""
    outcomes = {
        name: {key: plain(value) for key, value in vars(outcome).items() if key not in _HIDDEN}
        for name, outcome in report.outcomes.items()
    }
    return {**vars(report), "outcomes": outcomes}


def headline(report: Report) -> str:
    """Return one line of text that describes the load."""
    rate = "" if report.rate is None else f", {report.rate:,.6g} requests/s"
    rounds = "" if report.rounds == 1 else f" in {report.rounds} rounds, taking turns"
    warm_up = report.warm_up * report.rounds
    return f"{report.arrivals}{rate}, {report.duration:g} s{rounds}; {warm_up:g} s of these are the warm-up and not counted"


def table(report: Report) -> Table:
    """Return the table for a terminal."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    for name in report.outcomes:
        drawn.add_column(name, justify="right", overflow="fold")
    for label, cells in rows(report):
        drawn.add_row(label, *cells)
    return drawn


def rows(report: Report) -> list[Row]:
    """Return the rows of the table: a label, and a cell for each target. Rows without any content are left out."""
    outcomes = list(report.outcomes.values())
    found = [*_requests(outcomes), *_time_rows(outcomes), *_batches([each.batches for each in outcomes])]
    return [(label, cells) for label, cells in found if any(cells)]


def _requests(outcomes: list[Outcome]) -> Iterator[Row]:
    yield "requests", [f"{each.requests:,}" for each in outcomes]
    yield "answered", [f"{each.answered:,}" for each in outcomes]
    for kind in sorted({kind for each in outcomes for kind in each.errors}):
        yield f"failed: {kind}", [f"{each.errors.get(kind, 0):,}" for each in outcomes]
    for label, name in (("timed out", "timeouts"), ("unfinished", "unfinished")):
        numbers = [getattr(each, name) for each in outcomes]
        yield label, [f"{number:,}" if any(numbers) else "" for number in numbers]
    yield "sent, 1/s", [f"{each.sent_rate:,.1f}" for each in outcomes]
    yield "answered, 1/s", [f"{each.throughput:,.1f}" for each in outcomes]


def _time_rows(outcomes: list[Outcome]) -> Iterator[Row]:
    for label, name in _ESTIMATES.items():
        yield label, [_interval(getattr(each, name)) for each in outcomes]
    yield "max", [_number(each.max_ms) for each in outcomes]
    lags = [each.lag if each.rate is not None else () for each in outcomes]
    yield "send lag, ms: p50 / p99 / max", [" / ".join(map(_number, lag)) for lag in lags]
    yield "connections", [str(each.connections or "") for each in outcomes]
    yield "waited for a connection", [f"{each.held:,}" if each.held else "" for each in outcomes]


def _batches(batches: list[Batches | None]) -> Iterator[Row]:
    yield "batches", [f"{each.count:,}" if each else "" for each in batches]
    yield "mean batch size", [f"{each.mean_rows:.2f}" if each else "" for each in batches]
    for reason in sorted({reason for each in batches if each for reason in each.reasons}):
        yield f"cut by {reason}", [_share(each, reason) if each else "" for each in batches]
    for label, name in (("queue time, ms", "queue_time_ms"), ("predict of a batch, ms", "predict_time_ms")):
        yield label, [_number(getattr(each, name)) if each else "" for each in batches]


def _share(batches: Batches, reason: str) -> str:
    return f"{batches.reasons.get(reason, 0) / batches.count:.1%}" if batches.count else ""


def _interval(value: Estimate) -> str:
    half = value.half_width
    return f"{_number(value.value)} ± {_number(half)}" if isfinite(half) else _number(value.value)


def _number(value: float) -> str:
    if not isfinite(value):
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


_INTERVAL = 0.25  # seconds


@asynccontextmanager
async def progress_shown() -> AsyncIterator[Watch]:
    """Show several times a second how far a run is, in one line on stderr, until the block ends. It gives the yielded Watch to the run."""
    turns: list[tuple[TargetTurn, Ledger, float]] = []

    async def show() -> None:
        while True:
            await asyncio.sleep(_INTERVAL)
            for turn, ledger, since in turns[-1:]:
                line = progress_line(turn, ledger, time.monotonic() - since)
                await asyncio.to_thread(show_line, line)  # a terminal may be slow to take it

    showing = asyncio.ensure_future(show())
    try:
        yield lambda turn, ledger: turns.append((turn, ledger, time.monotonic()))
    finally:
        showing.cancel()


def show_line(line: str) -> None:
    """Put `line` in the place of the last line on stderr."""
    with suppress(OSError):  # the terminal is gone
        sys.stderr.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()


def progress_line(turn: TargetTurn, ledger: Ledger, elapsed: float) -> str:
    """Return the line to show `elapsed` seconds after the start of a turn."""
    done, whole = turn.index * turn.seconds + min(elapsed, turn.seconds), turn.count * turn.seconds
    text = f"{done / whole:4.0%}, {whole - done:.0f} s left: {ledger.begun:,} sent"
    text += f", {ledger.over - ledger.failed:,} ok, {ledger.failed:,} failed"
    return f"{text}, {turn.target}"
