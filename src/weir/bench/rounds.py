"""Runs one round of load on one target."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from weir.bench.alarm import Alarm
from weir.bench.batches import Counts
from weir.bench.ledger import Ledger
from weir.bench.load import Floats, Load
from weir.bench.pacing import Clock, ClosedLoop, OpenLoop
from weir.bench.target import Target

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
