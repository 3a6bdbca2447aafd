"""An executor in virtual time whose service times are known, and what is measured with it."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from weir.errors import WeirError
from weir.messages import Batch
from weir.policy.cost import Profile
from weir.profiling import Entry, Items, ProfilingSettings
from weir.profiling.measure import measure
from weir.profiling.sampling import Measuring
from weir.testing import FakeClock, FakeExecutor, whole

Duration = Callable[[int], float]


class TimedExecutor(FakeExecutor):
    """Computes a batch of b entries for `duration(b)` seconds of `clock`, one after the other, having prepared it for
    `ahead` seconds, which goes on beside the computing of the batch before. `fail` is every entry's answer."""

    def __init__(
        self,
        clock: FakeClock,
        duration: Duration,
        *,
        places: int = 1,
        ahead: float = 0.0,
        fail: WeirError | None = None,
    ) -> None:
        super().__init__(places=places)
        for state in self.states():
            state.pid = None  # nothing waits for a CPU in virtual time, as this process may for others
        self.clock = clock
        self.busy = 0.0  # seconds of computing so far
        self._duration = duration
        self._ahead = ahead
        self._fail = fail
        self._prepared_at = self._computed_at = 0.0
        self._ends: deque[tuple[float, Batch]] = deque()

    def run(self, worker: int, batch: Batch) -> None:
        super().run(worker, batch)
        seconds = self._duration(len(batch.payloads))
        self._prepared_at = max(self.clock(), self._prepared_at) + self._ahead
        self._computed_at = max(self._prepared_at, self._computed_at) + seconds
        self.busy += seconds
        self._ends.append((self._computed_at, batch))
        if len(self._ends) == 1:
            self._soon()

    def _soon(self) -> None:
        # A few turns later, when whoever waits for the batch before has sent the next one.
        self._wait(4)

    def _wait(self, turns: int) -> None:
        step = self._end if not turns else lambda: self._wait(turns - 1)
        asyncio.get_running_loop().call_soon(step)

    def _end(self) -> None:
        end, batch = self._ends.popleft()
        self.clock.advance(max(0.0, end - self.clock()))
        if self._ends:
            self._soon()
        self.reply(0, whole(batch.batch_id, [self._fail or payload for payload in batch.payloads]))


async def started(executor: TimedExecutor) -> Measuring:
    """Start `executor` with a listener that measures in its time."""

    async def sleep(seconds: float) -> None:
        executor.clock.advance(seconds)

    measuring = Measuring(executor, executor.clock, sleep)
    await executor.start(measuring)
    return measuring


def items(count: int = 3) -> Items:
    """Items of one row each."""
    return Items([Entry(value) for value in range(count)])


def profiled(
    duration: Duration, max_batch_size: int, *, places: int = 1, ahead: float = 0.0, **settings: Any
) -> Profile:
    """Return the profile of a worker whose service times are `duration`, in seconds."""

    async def story() -> Profile:
        clock = FakeClock()
        executor = TimedExecutor(clock, duration, places=places, ahead=ahead)
        measuring = Measuring(executor, clock)
        await executor.start(measuring)
        return await measure(measuring, items(), max_batch_size, ProfilingSettings(**settings))

    return asyncio.run(story())
