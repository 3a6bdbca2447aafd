"""The requests that may share a batch: queues by priority and size class, each in order of arrival, and their deadlines.

Most of the time all requests of a group are small ones of priority 0 with the same timeout: their queue is then in the order of deadlines too, and
`Group.timeout` is that timeout. Only when another request joins are the deadlines kept apart, until the group is empty again.

The requests of one priority have two queues: one for the small ones, one for the large ones. The large ones are divided by size too. The small ones,
and the large ones of each size class, are a Share: what takes turns with the others when a batch is filled.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf, log2, nextafter
from operator import attrgetter
from typing import cast

from weir.batching.request_state import is_gone, rows_left
from weir.messages import Express, Kind, Request

SLACK = 64  # requests that have gone and are kept before they are removed


class Deadlines:
    """The deadlines of waiting requests. To add one takes a single comparison where they come in the order of their deadlines.

    A request that has gone stays until it comes to the front, or until such requests are more than half of all.
    """

    __slots__ = ("_adds", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._adds = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Add a waiting request."""
        self._adds += 1
        heappush(self._heap, (request.deadline, self._adds, request))

    def earliest(self) -> float:
        """Return the earliest deadline of the requests that wait; infinity if none does."""
        heap = self._heap
        while heap and is_gone(heap[0][2]):
            heappop(heap)
        return heap[0][0] if heap else inf

    def within(self, until: float) -> list[Request]:
        """Return the waiting requests whose deadline is not after `until`, in no order. The cost is linear in what is found and has gone."""
        found: list[Request] = []
        heap, indices = self._heap, [0]
        while indices:
            index = indices.pop()
            if index < len(heap) and heap[index][0] <= until:
                found.append(heap[index][2])
                indices += (2 * index + 1, 2 * index + 2)
        return [request for request in found if not is_gone(request)]

    def passed(self, now: float) -> list[Request]:
        """Remove and return the waiting requests whose deadline is not after `now`."""
        late: list[Request] = []
        while self.earliest() <= now:
            late.append(heappop(self._heap)[2])
        return late

    def trim(self, live: int) -> None:
        """Remove requests that have gone if they are more than half, when `live` requests wait. If none waits, keep nothing: a request may hold much
        memory, and there may be no later one."""
        if not live:
            self._heap.clear()
        elif len(self._heap) > 2 * live + SLACK:
            self._heap = [entry for entry in self._heap if not is_gone(entry[2])]
            heapify(self._heap)


CLASSES_PER_OCTAVE = 4  # size classes for each doubling: the sizes of one class differ by at most a fifth


def is_plain(request: Request) -> bool:
    """Return whether `request` is one item, or one row of tensors, of unit cost, so that such requests need only be counted."""
    form = request.form
    return form.rows == 1 and form.cost == 1.0 and form.kind is not Kind.ITEMS


class FifoQueue:
    """Requests of one group, priority and size class, in order of arrival. The head, if there is one, is not settled."""

    __slots__ = ("dead", "odd", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.dead = 0  # how many of them are settled
        self.odd = 0  # how many of the others are not plain

    @staticmethod
    def size(request: Request) -> float:
        """Return the size of `request` by which large requests are divided into classes."""
        return request.form.rows

    @staticmethod
    def portion(request: Request, max_rows: int, max_cost: float) -> float:
        """Return how much of `request`, in the unit of its size, a batch of up to `max_rows` rows and `max_cost` takes."""
        return min(rows_left(request), max_rows)

    def __len__(self) -> int:
        return len(self.waiting) - self.dead

    @property
    def head(self) -> Request | None:
        """The request that is next; None if none waits."""
        return self.waiting[0] if self.waiting else None

    def add(self, request: Request) -> None:
        """Add a request: at the end, unless it arrived earlier than others (and waited for room)."""
        if not is_plain(request):
            self.odd += 1
        self._line_up(request)

    def add_alike(self, requests: Sequence[Request]) -> None:
        """Add plain requests in order of arrival, some of which may have arrived earlier than others that wait."""
        waiting, later = self.waiting, deque[Request]()
        while requests and waiting and waiting[-1].arrival > requests[0].arrival:
            later.appendleft(waiting.pop())
        waiting.extend(sorted((*later, *requests), key=arrival_of) if later else requests)

    def _line_up(self, request: Request) -> None:
        waiting = self.waiting
        if waiting and request.arrival < waiting[-1].arrival:
            waiting.insert(bisect_right(waiting, request.arrival, key=arrival_of), request)
        else:
            waiting.append(request)

    def advance(self, request: Request) -> None:
        """Remove `request`, which is the head and has gone."""
        if not is_plain(self.waiting.popleft()):
            self.odd -= 1
        self._drop_dead_heads()

    def ahead(self, request: Request) -> int:
        """Return how many waiting requests would go before `request`, if it came now."""
        return len(self)

    def pop(self, count: int) -> list[Request]:
        """Remove and return the first `count` requests of a queue whose requests are all plain."""
        waiting, popleft = self.waiting, self.waiting.popleft
        popped: list[Request] = []
        if not self.dead:
            if count < len(waiting):
                return [popleft() for _ in range(count)]
            popped += waiting
            waiting.clear()
            return popped
        while len(popped) < count:
            request = popleft()
            if request.settled:
                self.dead -= 1
            else:
                popped.append(request)
        self._drop_dead_heads()
        return popped

    def leave(self, request: Request) -> None:
        """Remove a request that was settled, anywhere in the queue."""
        self.dead += 1
        if not is_plain(request):
            self.odd -= 1
        self._drop_dead_heads()
        waiting = self.waiting
        if self.dead > SLACK and 2 * self.dead > len(waiting):
            alive = [request for request in waiting if not is_gone(request)]
            waiting.clear()
            waiting.extend(alive)
            self.dead = 0

    def _drop_dead_heads(self) -> None:
        waiting = self.waiting
        while self.dead and is_gone(waiting[0]):
            waiting.popleft()
            self.dead -= 1


arrival_of: Callable[[Request], float] = attrgetter("arrival")


def size_class(size: float) -> int:
    """Return the number of the size class of requests of `size` rows, or units of cost."""
    return round(CLASSES_PER_OCTAVE * log2(size))


class Share:
    """Requests that take turns as one: the small ones of a priority, or the large ones of one size class.

    `had` is how much each of them would have had dispatched, had it always waited: rows, or cost where batches are padded.
    """

    __slots__ = ("had", "queue")

    def __init__(self, queue: FifoQueue) -> None:
        self.had = 0.0
        self.queue = queue

    @property
    def count(self) -> int:
        """The number of waiting requests."""
        return len(self.queue)

    def tag(self, max_rows: int, max_cost: float = inf) -> float:
        """Return what `had` will be when the next request, which there must be, gets up to `max_rows` rows or `max_cost` more: the share with the
        lowest tag goes first."""
        head = cast(Request, self.queue.head)
        return self.had + self.queue.portion(head, max_rows, max_cost) / len(self.queue)


class FairQueue(FifoQueue):
    """Large requests, with an equal share for each waiting request of each size class. `waiting` is in order of arrival, whatever the size.

    `clock` is the largest `had` of any size class; a size class that is new begins there. `queue_type` is the type of the queues of the size classes.
    """

    __slots__ = ("_away", "_queue_type", "clock", "shares")

    def __init__(self, queue_type: type[FifoQueue]) -> None:
        super().__init__()
        self.clock = 0.0
        self._queue_type = queue_type
        self.shares: dict[int, Share] = {}  # by size class
        self._away: dict[int, Share] = {}  # of sizes of which no request waits

    def _class_of(self, request: Request) -> int:
        return size_class(self._queue_type.size(request))

    def share_of(self, request: Request) -> Share:
        """Return the share of a request that waits."""
        return self.shares[self._class_of(request)]

    def add(self, request: Request) -> None:
        """Add a request."""
        super().add(request)
        size = self._class_of(request)
        share = self.shares.get(size)
        if share is None:
            share = self.shares[size] = self._away.pop(size) if size in self._away else Share(self._queue_type())
            share.had = max(share.had, self.clock)
        share.queue.add(request)

    def ahead(self, request: Request) -> int:
        """Return how many waiting requests would certainly go before `request`, if it came now."""
        share = self.shares.get(self._class_of(request))
        return 0 if share is None else share.count

    def advance(self, request: Request) -> None:
        """Remove `request`, which has gone; it need not be the head."""
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Remove a request that was settled or wholly dispatched, anywhere in the queue."""
        super().leave(request)
        size = self._class_of(request)
        share = self.shares[size]
        share.queue.leave(request)
        if not share.count:
            self._away[size] = self.shares.pop(size)


class PriorityLevel:
    """The requests of one priority: the share of the small ones, and the queue of the large ones."""

    __slots__ = ("is_away", "large", "priority", "small")

    def __init__(self, priority: int, queue_type: type[FifoQueue] = FifoQueue) -> None:
        self.priority = priority
        self.small = Share(queue_type())
        self.large = FairQueue(queue_type)
        self.is_away = True  # no small request was left when the last batch was taken

    @property
    def queues(self) -> tuple[FifoQueue, FifoQueue]:
        """The queue of the small requests and that of the large ones."""
        return self.small.queue, self.large

    def come_back(self) -> None:
        """Before a batch is taken, have small requests that are new begin at the clock: they save nothing up while none waits."""
        if self.is_away:
            self.small.had = max(self.small.had, self.large.clock)

    def share_of(self, request: Request) -> Share:
        """Return the share of `request`, which waits here."""
        return self.large.share_of(request) if request.large else self.small

    def queue_of(self, request: Request) -> FifoQueue:
        """Return the queue of `request`, which need not wait."""
        return self.large if request.large else self.small.queue

    def __bool__(self) -> bool:
        return bool(self.small.queue.waiting or self.large.waiting)


class Group:
    """The requests that may share a batch: equal batch key and shape.

    `arrived` and `departed` count rows; their difference waits. `levels` are in order of falling priority. The level of priority 0 always exists;
    `main` is its queue of small requests, and `append` adds to that. `queue_type` is the type of the queues.
    """

    __slots__ = (
        "_by_priority", "_deadlines", "_queue_type", "append", "arrived", "asleep", "departed", "express", "key", "levels", "main",
        "timeout", "turn",
    )  # fmt: skip

    def __init__(self, key: object, queue_type: type[FifoQueue] = FifoQueue) -> None:
        self.key = key
        self.express = isinstance(key, Express)
        self._queue_type = queue_type
        level = PriorityLevel(0, queue_type)
        self._by_priority = {0: level}
        self.levels = [level]
        self.main = level.small.queue
        self.append = self.main.waiting.append
        self._deadlines = Deadlines()
        self.timeout: float | None = None  # that of all, if all are in `main`; None: deadlines are kept apart
        self.arrived = 0
        self.departed = 0
        self.asleep = True  # it is empty, or the policy waits: it is not among the groups to be asked about
        self.turn = inf  # the deadline that gave it its place among the groups

    @property
    def waiting(self) -> int:
        """The number of waiting rows."""
        return self.arrived - self.departed

    def __len__(self) -> int:
        return sum(len(queue) for level in self.levels for queue in level.queues)

    def __iter__(self) -> Iterator[Request]:
        for level in self.levels:
            for queue in level.queues:
                yield from (each for each in queue.waiting if not is_gone(each))

    def queue_of(self, request: Request) -> FifoQueue:
        """Return the queue of `request`, which need not wait."""
        level = self._by_priority.get(request.form.priority)
        if level is None:
            level = self._by_priority[request.form.priority] = PriorityLevel(request.form.priority, self._queue_type)
            self.levels = sorted(self._by_priority.values(), key=lambda each: -each.priority)
        return level.queue_of(request)

    def add(self, request: Request) -> None:
        """Add a request of any kind."""
        queue = self.queue_of(request) if request.form.priority or request.large else self.main
        if not self.waiting and queue is self.main:
            self.timeout = request.form.timeout
        elif request.form.timeout != self.timeout or queue is not self.main:
            if self.timeout is not None:
                self._keep_deadlines_apart()
            self._deadlines.add(request)
        queue.add(request)
        self.arrived += request.form.rows

    def _keep_deadlines_apart(self) -> None:
        self.timeout = None
        self._deadlines = Deadlines()
        for request in self.main.waiting:
            if not request.settled:
                self._deadlines.add(request)

    def remove(self, request: Request) -> int:
        """Remove a waiting request that was settled, and return how many rows that are."""
        rows = rows_left(request)
        self.queue_of(request).leave(request)
        self.departed += rows
        self.tidy()
        return rows

    def oldest(self) -> float:
        """Return the earliest arrival of the requests that wait; infinity if none does."""
        oldest = inf
        for level in self.levels:
            for queue in level.queues:
                if queue.waiting and queue.waiting[0].arrival < oldest:
                    oldest = queue.waiting[0].arrival
        return oldest

    def earliest(self) -> float:
        """Return the earliest deadline of those that wait; infinity if none does."""
        if self.timeout is None:
            return self._deadlines.earliest()
        waiting = self.main.waiting
        return waiting[0].deadline if waiting else inf

    def last_deadline(self, rows: int) -> float:
        """Return an instant before the deadlines of the last `rows` small requests that came; -infinity if there are fewer."""
        waiting = self.main.waiting
        return nextafter(waiting[-rows].deadline, -inf) if len(waiting) >= rows else -inf

    def rank(self) -> tuple[float, float]:
        """Return the earliest deadline and the earliest arrival, infinity if none waits: the group with the lowest pair is next."""
        if self.timeout is None:
            return self._deadlines.earliest(), self.oldest()
        waiting = self.main.waiting
        return (waiting[0].deadline, waiting[0].arrival) if waiting else (inf, inf)

    def passed(self, now: float) -> list[Request]:
        """Return the waiting requests whose deadline is not after `now`; the caller settles and removes each."""
        if self.timeout is None:
            return self._deadlines.passed(now)
        due = takewhile(lambda request: request.deadline <= now, self.main.waiting)
        return [request for request in due if not request.settled and request.taken < request.form.rows]

    def tight(self, until: float) -> Sequence[Request]:
        """Return the waiting requests whose deadline is not after `until`; none if the order of arrival is that of deadlines."""
        return () if self.timeout is not None else self._deadlines.within(until)

    def tidy(self) -> None:
        """Forget levels and deadlines that are no longer needed, after requests have left."""
        if len(self.levels) > 1 and not all(self.levels):
            self._by_priority = {level.priority: level for level in self.levels if level or not level.priority}
            self.levels = list(self._by_priority.values())
        if self.timeout is None:
            self._deadlines.trim(len(self))
