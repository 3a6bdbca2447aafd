"""Calls in this process that wait for room in the batcher's queue. Requests of other processes are refused instead."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from weir.batching.queue import IndexedHeap
from weir.batching.request_state import settle
from weir.messages import Request


class WaitingCall(Request, Protocol):
    """A request that can wait for room in the queue, as calls in this process do. Requests of other processes are refused."""

    outside: bool  # whether it waits for room now


class BackpressureQueue:
    """The requests of one class that wait for room in the batcher's queue, in order of arrival."""

    def __init__(self, *, bulk: bool = False) -> None:
        self._bulk = bulk
        # Public, because each call in this process tests it: the truth of a dict is faster than a method.
        self.waiting: OrderedDict[int, WaitingCall] = OrderedDict()  # by id()
        self._deadlines: IndexedHeap[int] = IndexedHeap()

    def __len__(self) -> int:
        return len(self.waiting)

    def append(self, request: WaitingCall) -> None:
        """Add `request` at the end."""
        request.outside = True
        self.waiting[id(request)] = request
        self._deadlines.put(id(request), (request.deadline, 0.0))

    def pop(self, room: Callable[[int, float, bool], bool]) -> WaitingCall | None:
        """Remove and return the first request if `room` says that the batcher's queue has room for its rows and its cost; else None."""
        first = next(iter(self.waiting.values()), None)
        if first is None or not room(first.form.rows, first.form.cost, self._bulk):
            return None
        self._remove(first)
        return first

    def drop(self, request: WaitingCall) -> None:
        """Settle and remove a waiting request whose caller left."""
        settle(request)
        self._remove(request)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None if no request waits."""
        first = self._deadlines.first()
        return None if first is None else first[0][0]

    def expire(self, now: float) -> list[WaitingCall]:
        """Settle, remove and return the requests whose deadline has passed."""
        late = []
        while (first := self._deadlines.first()) is not None and first[0][0] <= now:
            late.append(self.waiting[first[1]])
            self.drop(late[-1])
        return late

    def clear(self) -> list[WaitingCall]:
        """Settle, remove and return all waiting requests."""
        left = list(self.waiting.values())
        for request in left:
            self.drop(request)
        return left

    def _remove(self, request: WaitingCall) -> None:
        request.outside = False
        del self.waiting[id(request)]
        self._deadlines.discard(id(request))
