"""Keeps the event loop awake around expected events (the setting `loop_spin`).

A sleeping event loop wakes up late: by up to a millisecond if a timer wakes it, as timers count whole milliseconds, and by the
time that it takes to get a CPU. So around the instant when a batch is expected back, or a wait ends, the loop polls without
sleeping. Each turn yields the CPU to other processes that have work to do. Meanwhile a small service of its own answers calls,
which keeps the code of the real service in the CPU's caches.
"""

import asyncio
import os
from collections.abc import Callable, Sequence

from weir.batching.batcher import Batcher
from weir.batching.settings import BatchingSettings
from weir.messages import Batch
from weir.policy.rules import Greedy
from weir.serving.calls import Call
from weir.serving.delivery import Delivery
from weir.serving.driver import LOOP_TICK, Driver
from weir.workers.executor import ExecutorBase, Listener, WorkerState
from weir.workers.process.channel import REHEARSAL_INTERVAL, FrameRehearsal


class Alertness:
    """Makes the event loop poll from `seconds` before an expected instant until `seconds` after it. Meanwhile it calls
    `rehearse` every few hundred microseconds, which should run the code that must be fast."""

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
        """Poll around the instant `when`, in seconds of the clock. It may lie in the past: more events may follow it."""
        early = when - self.seconds - LOOP_TICK - now
        if early > 0.0:
            self._loop.call_later(early, self._stay, when + self.seconds)
        else:
            self._stay(when + self.seconds)

    def close(self) -> None:
        """Let the event loop sleep from now on."""
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
            self._next_rehearsal = self._clock() + REHEARSAL_INTERVAL
        os.sched_yield()
        self._loop.call_soon(self._turn)


REHEARSAL_TIMEOUT = 60.0  # seconds


class Rehearsal:
    """Sends calls through a driver, a batcher and the frames of worker processes, all of its own and without observers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._driver = Driver(Batcher(BatchingSettings(), Greedy()), EchoExecutor(), Delivery("rehearsal", ()), clock)

    async def start(self) -> None:
        """Start its driver, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        await self._driver.start()

    def once(self) -> Call:
        """Begin a call and return it; the next turns of the event loop answer it with 0."""
        call = Call(loop=self._loop).prepare(0, self._clock(), REHEARSAL_TIMEOUT, self._driver.cancel)
        self._driver.submit(call, call.arrival)
        return call


class EchoExecutor(ExecutorBase):
    """An Executor without workers. It writes and reads the frames of each batch, and answers with the payloads."""

    def __init__(self) -> None:
        self._frames = FrameRehearsal()

    async def start(self, listener: Listener) -> None:
        """Report one ready worker."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        listener.worker_ready(0, 1)

    def run(self, worker: int, batch: Batch) -> None:
        """Answer `batch` in the next turn of the event loop."""
        self._loop.call_soon(self._listener.received, worker, self._frames.answer(batch))

    async def stop(self) -> None:
        """Do nothing."""

    def states(self) -> Sequence[WorkerState]:
        """Return an empty list: there are no workers."""
        return []


async def stay_alert(driver: Driver, seconds: float, clock: Callable[[], float]) -> None:
    """Keep the running event loop awake from `seconds` before to `seconds` after each event that `driver` expects, until the
    driver is stopped."""
    rehearsal = Rehearsal(clock)
    await rehearsal.start()
    driver.stay_alert(Alertness(seconds, clock, asyncio.get_running_loop(), rehearsal.once))
