"""The requests that may share a batch: queues by priority and size class, each in order of arrival, and their deadlines.

Most of the time all requests of a group are small ones of priority 0 with the same timeout: their queue is then in the order of deadlines too, and
`Group.timeout` is that timeout. Only when another request joins are the deadlines kept apart, until the group is empty again.

Requests of equal timeout arrive in the order of their deadlines, so the queue of one timeout needs no sorting. Only when there are many distinct
timeouts at once do the further ones share a heap. A request that has gone stays in these queues until it comes to the front, or until such
requests are more than half of all.

The requests of one priority have two queues: one for the small ones, one for the large ones.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf, log2, nan, nextafter
from operator import attrgetter

from weir.batching.request_state import is_gone, rows_left
from weir.messages import Express, Kind, Request

MAX_QUEUES = 8  # distinct timeouts with a queue of their own
SLACK = 64  # requests that have gone and are kept before they are removed


class Deadlines:
    """The deadlines of the waiting requests. To add one is O(1) for at most MAX_QUEUES distinct timeouts."""

    __slots__ = ("_adds", "_by_timeout", "_heap")

    def __init__(self) -> None:
        self._by_timeout: dict[float, deque[Request]] = {}
        self._heap: list[tuple[float, int, Request]] = []
        self._adds = 0

    def __len__(self) -> int:
        return len(self._heap) + sum(map(len, self._by_timeout.values()))

    def add(self, request: Request) -> None:
        """Add a waiting request."""
        queue = self._by_timeout.get(request.form.timeout)
        if queue is None and len(self._by_timeout) < MAX_QUEUES:
            queue = self._by_timeout[request.form.timeout] = deque()
        if queue is None or (queue and queue[-1].deadline > request.deadline):
            self._adds += 1
            heappush(self._heap, (request.deadline, self._adds, request))
        else:
            queue.append(request)

    def earliest(self) -> float:
        """Return the earliest deadline of the requests that wait; infinity if none does."""
        first, empty = float("inf"), None
        for timeout, queue in self._by_timeout.items():
            while queue:
                request = queue[0]
                if request.settled or request.taken >= request.form.rows:
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
            if not request.settled and request.taken < request.form.rows:
                return min(first, request.deadline)
            heappop(heap)
        return first

    def within(self, until: float) -> list[Request]:
        """Return the waiting requests whose deadline is not after `until`, in no order. The cost is linear in what is found and has gone."""
        found: list[Request] = []
        for queue in self._by_timeout.values():
            found += takewhile(lambda request: request.deadline <= until, queue)
        heap, places = self._heap, [0]
        while places:
            place = places.pop()
            if place < len(heap) and heap[place][0] <= until:
                found.append(heap[place][2])
                places += (2 * place + 1, 2 * place + 2)
        return [request for request in found if not request.settled and request.taken < request.form.rows]

    def passed(self, now: float) -> list[Request]:
        """Remove and return the waiting requests whose deadline is not after `now`."""
        late: list[Request] = []
        while self.earliest() <= now:
            for queue in self._by_timeout.values():
                if queue and queue[0].deadline <= now:
                    late.append(queue.popleft())
            if self._heap and self._heap[0][0] <= now:
                late.append(heappop(self._heap)[2])
        return [request for request in late if not request.settled and request.taken < request.form.rows]

    def trim(self, live: int) -> None:
        """Remove requests that have gone if they are more than half, when `live` requests wait. If none waits, keep nothing: a request may hold much
        memory, and there may be no later one."""
        if not live:
            self._by_timeout.clear()
            self._heap.clear()
        if len(self) <= 2 * live + SLACK:
            return
        for timeout, queue in list(self._by_timeout.items()):
            left = [request for request in queue if not request.settled and request.taken < request.form.rows]
            queue.clear()
            queue.extend(left)
            if not left:
                del self._by_timeout[timeout]
        self._heap = [entry for entry in self._heap if not entry[2].settled and entry[2].taken < entry[2].form.rows]
        heapify(self._heap)


MIXED = nan  # equal to no timeout, not even to itself
CLASSES_PER_OCTAVE = 4  # size classes for each doubling: the sizes of one class differ by at most a fifth


def is_plain(request: Request) -> bool:
    """Return whether `request` is one item of one row and unit cost, so that such requests need only be counted."""
    return request.form.rows == 1 and request.form.cost == 1.0 and request.form.kind is Kind.ITEM


class FifoQueue:
    """Requests of one group, priority and size class, in order of arrival. The head, if there is one, is not settled."""

    __slots__ = ("dead", "odd", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.dead = 0  # how many of them are settled
        self.odd = 0  # how many of the others are not plain

    @staticmethod
    def for_large() -> "FairQueue":
        """Return a queue for the large requests of the same priority."""
        return FairQueue(SizeClass)

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


class SizeClass:
    """The requests of one size class, in order of arrival. `had` is how many rows each of them would have had dispatched, had it always waited."""

    __slots__ = ("count", "had", "waiting")

    def __init__(self, had: float) -> None:
        self.had = had
        self.count = 0
        self.waiting: deque[Request] = deque()  # some of them may have gone

    @property
    def head(self) -> Request:
        """The request that is next. There must be one."""
        waiting = self.waiting
        while is_gone(waiting[0]):
            waiting.popleft()
        return waiting[0]

    @staticmethod
    def class_of(request: Request) -> int:
        """Return the size class of `request`."""
        return size_class(request.form.rows)

    def tag(self, max_rows: int) -> float:
        """Return what `had` will be when the next request gets up to `max_rows` rows more: the class with the lowest tag goes first."""
        return self.had + min(rows_left(self.head), max_rows) / self.count

    def add(self, request: Request) -> None:
        """Add a request."""
        self.count += 1
        waiting = self.waiting
        if waiting and request.arrival < waiting[-1].arrival:
            waiting.insert(bisect_right(waiting, request.arrival, key=arrival_of), request)
        else:
            waiting.append(request)

    def leave(self, request: Request) -> None:
        """Remove `request`, which has gone."""
        self.count -= 1
        if len(self.waiting) > 2 * self.count + SLACK:
            self.waiting = deque(request for request in self.waiting if not is_gone(request))


class FairQueue(FifoQueue):
    """Large requests, with an equal share for each waiting request of each size class. `waiting` is in order of arrival, whatever the size.

    `clock` is the largest `had` of any size class; a size class that is new begins there. `kind` is the type of the size classes, which says
    what size is.
    """

    __slots__ = ("_away", "clock", "kind", "shares")

    def __init__(self, kind: type[SizeClass]) -> None:
        super().__init__()
        self.clock = 0.0
        self.kind = kind
        self.shares: dict[int, SizeClass] = {}
        self._away: dict[int, SizeClass] = {}  # of sizes of which no request waits

    def share_of(self, request: Request) -> SizeClass:
        """Return the size class of a request that waits."""
        return self.shares[self.kind.class_of(request)]

    def add(self, request: Request) -> None:
        """Add a request."""
        super().add(request)
        size = self.kind.class_of(request)
        share = self.shares.get(size)
        if share is None:
            share = self.shares[size] = self._away.pop(size) if size in self._away else self.kind(0.0)
            share.had = max(share.had, self.clock)
        share.add(request)

    def ahead(self, request: Request) -> int:
        """Return how many waiting requests would certainly go before `request`, if it came now."""
        share = self.shares.get(self.kind.class_of(request))
        return 0 if share is None else share.count

    def advance(self, request: Request) -> None:
        """Remove `request`, which has gone; it need not be the head."""
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Remove a request that was settled or wholly dispatched, anywhere in the queue."""
        super().leave(request)
        share = self.share_of(request)
        share.leave(request)
        if not share.count:
            size = self.kind.class_of(request)
            self._away[size] = self.shares.pop(size)


class PriorityLevel:
    """The two queues of one priority. `had` is how many rows each small request has had, as in a SizeClass."""

    __slots__ = ("had", "is_away", "large", "priority", "small")

    def __init__(self, priority: int, queue_type: type[FifoQueue] = FifoQueue) -> None:
        self.priority = priority
        self.had = 0.0
        self.small = queue_type()
        self.large = queue_type.for_large()
        self.is_away = True  # no small request was left when the last batch was taken

    @property
    def count(self) -> int:
        """How many small requests wait."""
        return len(self.small)

    def come_back(self) -> None:
        """Before a batch is taken, have small requests that are new begin at the clock: they save nothing up while none waits."""
        if self.is_away:
            self.had = max(self.had, self.large.clock)

    def share_of(self, request: Request) -> "PriorityLevel | SizeClass":
        """Return what `request`, which waits here, shares its turns with: all small requests, or the large ones of its size class."""
        return self.large.share_of(request) if request.large else self

    def leave(self, request: Request) -> None:
        """Remove a request that was settled or wholly dispatched, from its queue."""
        (self.large if request.large else self.small).leave(request)

    def __bool__(self) -> bool:
        return bool(self.small.waiting or self.large.waiting)


class Group:
    """The requests that may share a batch: equal batch key and shape.

    `arrived` and `departed` count rows; their difference waits. `levels` are in order of falling priority. The level of priority 0 always exists;
    `plain` is its queue of small requests, and `append` adds to that. `queue_type` is the type of the queues.
    """

    __slots__ = (
        "_by_priority", "_deadlines", "_queue_type", "append", "arrived", "asleep", "departed", "express", "key", "levels", "plain",
        "timeout", "turn",
    )  # fmt: skip

    def __init__(self, key: object, queue_type: type[FifoQueue] = FifoQueue) -> None:
        self.key = key
        self.express = isinstance(key, Express)
        self._queue_type = queue_type
        level = PriorityLevel(0, queue_type)
        self._by_priority = {0: level}
        self.levels = [level]
        self.plain = level.small
        self.append = level.small.waiting.append
        self._deadlines = Deadlines()
        self.timeout = MIXED  # the timeout of all, if all are in `plain`
        self.arrived = 0
        self.departed = 0
        self.asleep = True  # it is empty, or the policy waits: it is not among the groups to be asked about
        self.turn = inf  # the deadline that gave it its place among the groups

    @property
    def waiting(self) -> int:
        """How many rows wait."""
        return self.arrived - self.departed

    def __len__(self) -> int:
        return sum(len(level.small) + len(level.large) for level in self.levels)

    def __iter__(self) -> Iterator[Request]:
        for level in self.levels:
            for queue in (level.small, level.large):
                yield from (each for each in queue.waiting if not each.settled and each.taken < each.form.rows)

    def queue_of(self, request: Request) -> FifoQueue:
        """Return the queue of `request`, which need not wait."""
        level = self._by_priority.get(request.form.priority)
        if level is None:
            level = self._by_priority[request.form.priority] = PriorityLevel(request.form.priority, self._queue_type)
            self.levels = sorted(self._by_priority.values(), key=lambda each: -each.priority)
        return level.large if request.large else level.small

    def add(self, request: Request) -> None:
        """Add a request of any kind."""
        queue = self.queue_of(request) if request.form.priority or request.large else self.plain
        if not self.waiting and queue is self.plain:
            self.timeout = request.form.timeout
        elif request.form.timeout != self.timeout or queue is not self.plain:
            if self.timeout == self.timeout:
                self._keep_deadlines_apart()
            self._deadlines.add(request)
        queue.add(request)
        self.arrived += request.form.rows

    def _keep_deadlines_apart(self) -> None:
        self.timeout = MIXED
        self._deadlines = Deadlines()
        for request in self.plain.waiting:
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
            for queue in (level.small, level.large):
                if queue.waiting and queue.waiting[0].arrival < oldest:
                    oldest = queue.waiting[0].arrival
        return oldest

    def earliest(self) -> float:
        """Return the earliest deadline of those that wait; infinity if none does."""
        if self.timeout != self.timeout:
            return self._deadlines.earliest()
        waiting = self.plain.waiting
        return waiting[0].deadline if waiting else inf

    def last_deadline(self, rows: int) -> float:
        """Return an instant before the deadlines of the last `rows` small requests that came; -infinity if there are fewer."""
        waiting = self.plain.waiting
        return nextafter(waiting[-rows].deadline, -inf) if len(waiting) >= rows else -inf

    def rank(self) -> tuple[float, float]:
        """Return the earliest deadline and the earliest arrival, infinity if none waits: the group with the lowest pair is next."""
        if self.timeout != self.timeout:
            return self._deadlines.earliest(), self.oldest()
        waiting = self.plain.waiting
        return (waiting[0].deadline, waiting[0].arrival) if waiting else (inf, inf)

    def passed(self, now: float) -> list[Request]:
        """Return the waiting requests whose deadline is not after `now`; the caller settles and removes each."""
        if self.timeout != self.timeout:
            return self._deadlines.passed(now)
        due = takewhile(lambda request: request.deadline <= now, self.plain.waiting)
        return [request for request in due if not request.settled and request.taken < request.form.rows]

    def tight(self, until: float) -> Sequence[Request]:
        """Return the waiting requests whose deadline is not after `until`; none if the order of arrival is that of deadlines."""
        return () if self.timeout == self.timeout else self._deadlines.within(until)

    def tidy(self) -> None:
        """Forget levels and deadlines that are no longer needed, after requests have left."""
        if len(self.levels) > 1 and not all(self.levels):
            self._by_priority = {level.priority: level for level in self.levels if level or not level.priority}
            self.levels = list(self._by_priority.values())
        if self.timeout != self.timeout:
            self._deadlines.trim(len(self))
