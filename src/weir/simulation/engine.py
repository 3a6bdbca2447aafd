"""Drives the real Batcher in virtual time, as manager/driver.py does in real time.

What happens at one instant happens in this order: all arrivals, then one poll; batches that end, each followed by a poll;
the timer. So who arrives at the very instant at which a worker becomes free still joins its next batch.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf
from typing import cast

from weir.batching.batcher import Batcher
from weir.batching.settings import BatchingSettings
from weir.errors import DeadlineExceeded, Overloaded
from weir.messages import Dispatch, Wakeup
from weir.policy.decision import Policy
from weir.simulation.event_log import EventLog
from weir.simulation.requests import SimulatedRequest
from weir.simulation.services import Services

ARRIVAL, WORKER, TIMER = Wakeup.ARRIVAL, Wakeup.WORKER, Wakeup.TIMER


class Engine:
    """One run: a batcher, its workers, and the virtual time. Memory is bounded by what waits.

    `places` batches may be with a worker at once; it computes them one after another.
    """

    def __init__(
        self, settings: BatchingSettings, policy: Policy, services: Services, book: EventLog, *, workers: int = 1,
        places: int = 1, timeout: float = inf,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.batcher = Batcher(settings, policy)
        self._services = services
        self._book = book
        self._timeout = timeout
        self._ends: list[tuple[float, int]] = []  # a heap: when a batch ends, and its id
        self._busy_until = [0.0] * workers
        self._free = workers * places
        self._wake = inf  # when the batcher wants its timer
        self._undecided = False  # something arrived at `now` and the batcher was not yet asked
        for worker in range(workers):
            self.batcher.worker_ready(worker, places, 0.0)

    def arrive(self, first_index: int, times: Iterable[float], rows: Iterable[int] | None = None) -> None:
        """Let requests arrive, in the order of `times`; of one row each where `rows` is not given."""
        submit, timeout, book = self.batcher.submit, self._timeout, self._book
        sizes = iter(rows) if rows is not None else None
        for index, now in enumerate(times, first_index):
            if now > self.now:
                if self._undecided:
                    self._poll(ARRIVAL)
                if self._wake < now or (self._ends and self._ends[0][0] < now):
                    self._advance(now)
                self.now = now
            try:
                submit(SimulatedRequest(index, now, timeout, 1 if sizes is None else next(sizes)), now)
            except (Overloaded, DeadlineExceeded):
                book.refused.append(index)
            # With all places taken and no deadlines there is nothing to decide, as the driver would find by polling.
            self._undecided = self._free > 0 or timeout < inf

    def finish(self) -> None:
        """No more arrives. Go on until nothing would happen by time alone, then drain what still waits."""
        if self._undecided:
            self._poll(ARRIVAL)
        self._advance(inf)
        if self.batcher.has_waiting:
            self.batcher.drain()
            self._poll(ARRIVAL)
            self._advance(inf)
        self._book.hand_over()

    def _advance(self, until: float) -> None:
        """Let everything happen that happens before `until`."""
        ends, batcher = self._ends, self.batcher
        while True:
            end = ends[0][0] if ends else inf
            if self._wake < end:
                if self._wake >= until:
                    return
                self.now = max(self.now, self._wake)
                self._expire()
                self._poll(TIMER)
            else:
                if end >= until:
                    return
                self.now = end
                batcher.finished(heappop(ends)[1], end)
                self._free += 1
                if batcher.has_waiting:
                    self._poll(WORKER)

    def _expire(self) -> None:
        for request in self.batcher.expire(self.now):
            if request.taken < request.rows:  # the others are running; that they end too late is seen from their end
                self._book.lost(cast(SimulatedRequest, request).index)

    def _poll(self, wakeup: Wakeup) -> None:
        self._undecided = False
        for cut in self.batcher.poll(self.now, wakeup):
            self._start(cut)
        self._wake = inf
        # The timer matters for decisions, which need a free place, and for deadlines.
        if (self._free or self._timeout < inf) and (wake := self.batcher.next_wakeup) is not None:
            self._wake = wake

    def _start(self, cut: Dispatch) -> None:
        requests = cast("list[SimulatedRequest]", cut.requests)
        busy_until = self._busy_until[cut.worker]
        start = cut.at if cut.at > busy_until else busy_until
        end = start + self._services.time(cut.rows, requests[0].index)
        self._busy_until[cut.worker] = end
        self._free -= 1
        heappush(self._ends, (end, cut.batch_id))
        self._book.started(cut, requests, start, end)
