"""The driver in its plainest form: one event after another, a poll after each, nothing left out. What the engine must equal."""

from math import inf
from typing import Any, NamedTuple

from weir.batching.batcher import Batcher
from weir.batching.request_state import RequestBase
from weir.batching.settings import BatchingSettings
from weir.errors import DeadlineExceeded, Overloaded, WeirError
from weir.messages import Dispatch, Wakeup
from weir.policy.cost.profile import Profile
from weir.policy.decision import Policy
from weir.simulation.arrivals import Floats
from weir.simulation.engine import ServiceTimes


class Numbered(RequestBase):
    """A request with a number."""

    def __init__(self, number: int, arrival: float, timeout: float) -> None:
        super().__init__(None, arrival, timeout)
        self.number = number

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Nobody waits."""

    def fail(self, error: WeirError) -> None:
        """Nobody waits."""


class Cut(NamedTuple):
    """A batch."""

    at: float
    end: float
    members: tuple[int, ...]
    worker: int
    reason: int


class Naive:
    """One run."""

    def __init__(
        self, profile: Profile, policy: Policy, settings: BatchingSettings, *, workers: int = 1, timeout: float = inf
    ) -> None:
        self.batcher = Batcher(settings, policy)
        self.services = ServiceTimes(profile, 1)
        self.timeout = timeout
        self.now = 0.0
        self.cuts: list[Cut] = []
        self.refused: list[int] = []
        self.expired: list[int] = []
        self._running: list[tuple[float, int]] = []
        for worker in range(workers):
            self.batcher.worker_ready(worker, 1, 0.0)

    def run(self, times: Floats) -> None:
        """Let requests arrive, then drain when nothing happens by itself any more."""
        left = [(time, number) for number, time in enumerate(times.tolist())]
        while left or self._running or self.batcher.next_wakeup is not None:
            wake = self.batcher.next_wakeup
            now = min(
                left[0][0] if left else inf,
                min(self._running)[0] if self._running else inf,
                inf if wake is None else wake,
            )
            self.now = now
            if left and left[0][0] == now:
                while left and left[0][0] == now:
                    self._submit(left.pop(0)[1], now)
                self._poll(now, Wakeup.ARRIVAL)
            elif self._running and min(self._running)[0] == now:
                self._running.remove(ended := min(self._running))
                self.batcher.finished(ended[1], now)
                self._poll(now, Wakeup.WORKER)
            else:
                late = self.batcher.expire(now)
                self.expired += [each.number for each in late if isinstance(each, Numbered) and not each.taken]
                self._poll(now, Wakeup.TIMER)
        if not self.batcher.draining:
            self.batcher.drain()
            self._poll(self.now, Wakeup.ARRIVAL)
            self.run(times[:0])

    def _submit(self, number: int, now: float) -> None:
        try:
            self.batcher.submit(Numbered(number, now, self.timeout), now)
        except (Overloaded, DeadlineExceeded):
            self.refused.append(number)

    def _poll(self, now: float, wakeup: Wakeup) -> None:
        for cut in self.batcher.poll(now, wakeup):
            self._start(cut, now)

    def _start(self, cut: Dispatch, now: float) -> None:
        members = tuple(each.number for each in cut.requests if isinstance(each, Numbered))
        end = now + self.services.time(cut.rows, members[0])
        self._running.append((end, cut.batch_id))
        self.cuts.append(Cut(now, end, members, cut.worker, cut.reason))
