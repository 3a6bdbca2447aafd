"""The deadlines of the requests of one group, earliest first.

Requests of equal timeout arrive in the order of their deadlines, so a queue per distinct timeout is sorted for nothing.
Only when there are many distinct timeouts at once do the further ones share a heap. A request that has gone from the
line stays behind until it comes to the front, or until such are more than half of all.
"""

from collections import deque
from heapq import heapify, heappop, heappush
from itertools import takewhile

from weir.messages import Request

MAX_QUEUES = 8  # distinct timeouts with a queue of their own
SLACK = 64  # requests that have gone and are tolerated before they are swept out


class Deadlines:
    """Knows the earliest deadline of the waiting requests. Adding is O(1) for at most MAX_QUEUES distinct timeouts."""

    __slots__ = ("_adds", "_by_timeout", "_heap")

    def __init__(self) -> None:
        self._by_timeout: dict[float, deque[Request]] = {}
        self._heap: list[tuple[float, int, Request]] = []
        self._adds = 0

    def __len__(self) -> int:
        return len(self._heap) + sum(map(len, self._by_timeout.values()))

    def add(self, request: Request) -> None:
        """Add a waiting request."""
        queue = self._by_timeout.get(request.timeout)
        if queue is None and len(self._by_timeout) < MAX_QUEUES:
            queue = self._by_timeout[request.timeout] = deque()
        if queue is None or (queue and queue[-1].deadline > request.deadline):
            self._adds += 1
            heappush(self._heap, (request.deadline, self._adds, request))
        else:
            queue.append(request)

    def earliest(self) -> float:
        """Return the earliest deadline of those that still wait; infinity if none does."""
        first, empty = float("inf"), None
        for timeout, queue in self._by_timeout.items():
            while queue:
                request = queue[0]
                if request.settled or request.taken >= request.rows:
                    queue.popleft()
                    continue
                if request.deadline < first:
                    first = request.deadline
                break
            else:
                empty = timeout
        if empty is not None and len(self._by_timeout) > 1:
            del self._by_timeout[empty]
        heap = self._heap
        while heap:
            request = heap[0][2]
            if not request.settled and request.taken < request.rows:
                return min(first, request.deadline)
            heappop(heap)
        return first

    def within(self, until: float) -> list[Request]:
        """Return the waiting requests whose deadline is not after `until`, in no order. O(those found, and those gone among them)."""
        found: list[Request] = []
        for queue in self._by_timeout.values():
            found += takewhile(lambda request: request.deadline <= until, queue)
        heap, places = self._heap, [0]
        while places:
            place = places.pop()
            if place < len(heap) and heap[place][0] <= until:
                found.append(heap[place][2])
                places += (2 * place + 1, 2 * place + 2)
        return [request for request in found if not request.settled and request.taken < request.rows]

    def passed(self, now: float) -> list[Request]:
        """Take out and return the waiting requests whose deadline is not after `now`."""
        late: list[Request] = []
        while self.earliest() <= now:
            for queue in self._by_timeout.values():
                if queue and queue[0].deadline <= now:
                    late.append(queue.popleft())
            if self._heap and self._heap[0][0] <= now:
                late.append(heappop(self._heap)[2])
        return [request for request in late if not request.settled and request.taken < request.rows]

    def trim(self, live: int) -> None:
        """Sweep out what has gone if that is more than half, when `live` requests wait. With none nothing is kept: a request may hold much
        memory, and nobody may come after it."""
        if not live:
            self._by_timeout.clear()
            self._heap.clear()
        if len(self) <= 2 * live + SLACK:
            return
        for timeout, queue in list(self._by_timeout.items()):
            left = [request for request in queue if not request.settled and request.taken < request.rows]
            queue.clear()
            queue.extend(left)
            if not left:
                del self._by_timeout[timeout]
        self._heap = [entry for entry in self._heap if not entry[2].settled and entry[2].taken < entry[2].rows]
        heapify(self._heap)
