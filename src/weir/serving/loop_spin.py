"""Keeps the event loop awake around the instants that count (the setting `loop_spin`).

A loop that sleeps is woken late: by up to a millisecond when it is a timer that wakes it, for loops count in whole ones, and by
what it takes to get a CPU. Around the instant at which a batch is expected back, or a wait ends, it goes round without
sleeping instead. Each turn yields the CPU to other processes that have work to do. Meanwhile a small service is run without a caller,
so that the code of the real one is in the CPU's caches.
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
            self._next_rehearsal = self._clock() + REHEARSAL_INTERVAL
        os.sched_yield()
        self._loop.call_soon(self._turn)


PATIENCE = 60.0


class Rehearsal:
    """Sends a call of its own through a driver, a batcher and the frames that a worker gets and sends. It has no observers."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._driver = Driver(Batcher(BatchingSettings(), Greedy()), EchoExecutor(), Delivery("rehearsal", ()), clock)

    async def start(self) -> None:
        """Be ready to rehearse, on the running loop."""
        self._loop = asyncio.get_running_loop()
        await self._driver.start()

    def once(self) -> Call:
        """Begin a call; it is answered, with 0, in the next turns of the loop."""
        call = Call(0, self._clock(), PATIENCE, self._loop, self._driver.cancel)
        self._driver.submit(call, call.arrival)
        return call


class EchoExecutor(ExecutorBase):
    """An Executor without workers: the frames of a batch are written and read, and its payloads are the answers."""

    def __init__(self) -> None:
        self._frames = FrameRehearsal()

    async def start(self, listener: Listener) -> None:
        """Be ready."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        listener.worker_ready(0, 1)

    def run(self, worker: int, batch: Batch) -> None:
        """Answer in the next turn."""
        self._loop.call_soon(self._listener.received, worker, self._frames.answer(batch))

    async def stop(self) -> None:
        """Do nothing."""

    def states(self) -> Sequence[WorkerState]:
        """Return nothing: there are no workers."""
        return []


async def stay_alert(driver: Driver, seconds: float, clock: Callable[[], float]) -> None:
    """Keep the running loop awake around what `driver` expects, `seconds` before and after, until it is stopped."""
    rehearsal = Rehearsal(clock)
    await rehearsal.start()
    driver.stay_alert(Alertness(seconds, clock, asyncio.get_running_loop(), rehearsal.once))
