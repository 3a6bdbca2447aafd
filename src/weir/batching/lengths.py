"""Requests of one lane, also by length: for models that pad a batch to its longest.

Order of arrival still says whose turn it is: the head. Besides it there is a queue for each length, and the lengths there are, sorted,
so that those nearest to a length are found without looking at the others. What was taken from the middle, or was
settled there, is dropped when it comes to a front, or with all of its kind once such are more than half.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque

from weir.batching.group import SLACK, Lane
from weir.messages import Request


def length_of(request: Request) -> float:
    """Return the length of `request`: what one row of it costs."""
    return request.cost / request.rows


def is_gone(request: Request) -> bool:
    """Tell whether nothing of `request` waits any more."""
    return request.settled or request.taken >= request.rows


class LengthLane(Lane):
    """A lane whose requests are found by length as well. Each queue of `by_length` is in order of arrival, and the first of it
    waits; of the others some may be gone. `lengths` are its keys, sorted."""

    __slots__ = ("by_length", "lengths")

    def __init__(self) -> None:
        super().__init__()
        self.by_length: dict[float, deque[Request]] = {}
        self.lengths: list[float] = []

    def add(self, request: Request) -> None:
        """Add a request: in order of arrival."""
        super().add(request)
        length = length_of(request)
        queue = self.by_length.get(length)
        if queue is None:
            insort(self.lengths, length)
            queue = self.by_length[length] = deque()
        if queue and request.arrival < queue[-1].arrival:
            queue.insert(bisect_right(queue, request.arrival, key=_arrival), request)
        else:
            queue.append(request)

    def leave(self, request: Request) -> None:
        """A request somewhere in the lane was settled, or wholly taken."""
        self.dead += 1
        waiting = self.waiting
        while self.dead > 0 and is_gone(waiting[0]):
            waiting.popleft()
            self.dead -= 1
        self._trim(length_of(request))
        if self.dead > SLACK and 2 * self.dead > len(waiting):
            self._sweep()

    def _trim(self, length: float) -> None:
        """Have one that waits at the front of the queue of this length, or no such queue."""
        queue = self.by_length.get(length)
        if queue is None:
            return
        while queue and is_gone(queue[0]):
            queue.popleft()
        if not queue:
            del self.by_length[length]
            del self.lengths[bisect_left(self.lengths, length)]

    def _sweep(self) -> None:
        alive = [request for request in self.waiting if not is_gone(request)]
        self.dead -= len(self.waiting) - len(
            alive
        )  # less than 0 as long as some are gone whose leaving is still to be told
        self.waiting.clear()
        self.waiting.extend(alive)
        for queue in self.by_length.values():
            left = [request for request in queue if not is_gone(request)]
            queue.clear()
            queue.extend(left)


def _arrival(request: Request) -> float:
    return request.arrival
