"""Where calls in this process wait while the queue is full. Requests of other processes are refused instead."""

from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from weir.batching.group import Deadlines
from weir.batching.request_state import settle
from weir.messages import Request

# Settled requests may stay in the containers until they are more than this many.
SWEEP_ABOVE = 64


class WaitingCall(Request, Protocol):
    """A request that can wait for room in the queue, as calls in this process do. Requests of other processes are refused."""

    outside: bool  # whether it waits for room now


class BackpressureQueue:
    """The requests of one class that wait for room in the batcher's queue, in order of arrival. `waiting` is falsy when there are none."""

    def __init__(self, *, bulk: bool = False) -> None:
        self._bulk = bulk
        # Public, because each call in this process tests it: the truth of a deque is faster than a method.
        self.waiting: deque[WaitingCall] = deque()
        self._deadlines = Deadlines()
        self._settled = 0  # how many in `waiting` are settled; the first one never is
        self._entered = 0  # requests that have entered the batcher's queue since the last sweep

    def __len__(self) -> int:
        return len(self.waiting) - self._settled

    def append(self, request: WaitingCall) -> None:
        """Add `request` at the end."""
        request.outside = True
        self.waiting.append(request)
        self._deadlines.add(request)

    def pop(self, room: Callable[[int, float, bool], bool]) -> WaitingCall | None:
        """Remove and return the first request if `room` says that the batcher's queue has room for its rows and its cost; else None."""
        waiting = self.waiting
        if not waiting or not room(waiting[0].rows, waiting[0].cost, self._bulk):
            return None
        request = waiting.popleft()
        request.outside = False
        if self._settled:
            self._drop_settled_heads()
        self._entered += 1
        if self._entered > len(waiting) + SWEEP_ABOVE:
            self._sweep()
        return request

    def drop(self, request: WaitingCall) -> None:
        """Settle a waiting request whose caller left."""
        settle(request)
        self._note_settled(1)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None if no request waits. It may be that of a request that no longer waits here."""
        return self._deadlines.earliest() if self.waiting else None

    def expire(self, now: float) -> list[WaitingCall]:
        """Settle and return the requests whose deadline has passed."""
        passed = cast(list[WaitingCall], self._deadlines.passed(now))  # `append` adds nothing else
        late = [request for request in passed if request.outside]
        for request in late:
            settle(request)
        self._note_settled(len(late))
        return late

    def clear(self) -> list[WaitingCall]:
        """Settle and return all waiting requests."""
        left = [request for request in self.waiting if not request.settled]
        for request in left:
            settle(request)
        self._note_settled(len(left))
        return left

    def _note_settled(self, count: int) -> None:
        self._settled += count
        self._drop_settled_heads()
        if self._settled > SWEEP_ABOVE and self._settled * 2 > len(self.waiting):
            self.waiting = deque(request for request in self.waiting if not request.settled)
            self._settled = 0
            self._sweep()

    def _drop_settled_heads(self) -> None:
        waiting = self.waiting
        while waiting and waiting[0].settled:
            waiting.popleft()
            self._settled -= 1

    def _sweep(self) -> None:
        self._entered = 0
        self._deadlines.trim(len(self.waiting))
