"""Requests of one lane, also by length: for models that pad a batch to its longest.

The order of tags, and among equal ones that of arrival, says whose turn it is: the head. Besides it there is a queue for each length, and the
lengths there are, sorted, so that those nearest to a length are found without looking at the others. What was taken from the middle, or was
settled there, is dropped when it comes to a front, or with all of its kind once such are more than half.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import inf
from typing import cast

from weir.batching.group import SLACK, FairQueue, FifoQueue, SizeClass, size_class
from weir.batching.request_state import is_gone, rows_left
from weir.messages import Request


def length_of(request: Request) -> float:
    """Return the length of `request`: what one row of it costs."""
    return request.cost / request.rows


def turn_of(request: Request) -> tuple[float, float]:
    """Return what says whose turn it is: the lowest goes first."""
    return request.tag, request.arrival


class LengthQueue(FifoQueue):
    """A lane whose requests are found by length as well. `waiting` is in order of arrival. Each queue of `by_length` is in order of turns,
    and the first of it waits; of the others some may be gone. `lengths` are its keys, sorted."""

    __slots__ = ("_added", "_turns", "brief", "by_length", "lengths")

    def __init__(self) -> None:
        super().__init__()
        self._turns: list[tuple[tuple[float, float], int, Request]] = []  # sorted, and the first waits
        self._added = 0
        self.brief = 0  # those that are brief
        self.by_length: dict[float, deque[Request]] = {}
        self.lengths: list[float] = []

    @staticmethod
    def beside() -> FairQueue:
        """Return a lane for the large requests of the same priority."""
        return FairQueue(LengthSizeClass)

    @property
    def head(self) -> Request | None:
        """The request whose turn it is."""
        return self._turns[0][2] if self._turns else None

    @property
    def oldest(self) -> Request | None:
        """The request that arrived first."""
        return self.waiting[0] if self.waiting else None

    def add(self, request: Request) -> None:
        """Add a request."""
        super().add(request)
        self._added += 1
        self.brief += request.brief
        insort(self._turns, (turn_of(request), self._added, request))
        length = length_of(request)
        queue = self.by_length.get(length)
        if queue is None:
            insort(self.lengths, length)
            queue = self.by_length[length] = deque()
        if queue and turn_of(request) < turn_of(queue[-1]):
            queue.insert(bisect_right(queue, turn_of(request), key=turn_of), request)
        else:
            queue.append(request)

    def leave(self, request: Request) -> None:
        """A request somewhere in the lane was settled, or wholly taken."""
        self.dead += 1
        waiting, turns = self.waiting, self._turns
        self.brief -= request.brief
        first = 0
        while first < len(turns) and is_gone(turns[first][2]):
            first += 1
        del turns[:first]
        while self.dead > 0 and is_gone(waiting[0]):
            waiting.popleft()
            self.dead -= 1
        self._trim(length_of(request))
        if self.dead > SLACK and 2 * self.dead > len(waiting):
            self._sweep()

    def next(self, rows: float, cost: float) -> list[Request]:
        """Return those whose turn is next, in order: about so many rows, or of about so much `cost`."""
        found: list[Request] = []
        for _, _, request in self._turns:
            if rows <= 0 or cost <= 0.0:
                break
            if not is_gone(request):
                found.append(request)
                rows, cost = rows - request.rows, cost - request.cost
        return found

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
        self._turns = [turn for turn in self._turns if not is_gone(turn[2])]
        for queue in self.by_length.values():
            left = [request for request in queue if not is_gone(request)]
            queue.clear()
            queue.extend(left)


class LengthSizeClass(SizeClass):
    """The requests of one size class, which are found by length in `lane`. Sizes, and what each `had`, are in units of cost."""

    __slots__ = ("lane",)

    def __init__(self, had: float) -> None:
        super().__init__(had)
        self.lane = LengthQueue()

    @staticmethod
    def class_of(request: Request) -> int:
        """Return the size class of `request`."""
        return size_class(max(1.0, request.cost))

    def tag(self, max_rows: int, max_cost: float = inf) -> float:
        """Return what each will have had once the next of them has up to `max_rows` rows more, or `max_cost`: the lowest goes first."""
        request = cast(Request, self.lane.head)
        cost = min(rows_left(request), max_rows) * length_of(request)
        return self.had + min(cost, max_cost) / self.count

    def add(self, request: Request) -> None:
        """Add a request."""
        self.count += 1
        self.lane.add(request)

    def leave(self, request: Request) -> None:
        """`request` has gone."""
        self.count -= 1
        self.lane.leave(request)
