"""The queue: all groups, how many rows wait in them, and which group is next.

Rows are counted as two numbers that only grow, `arrivals` and `departed`, so that an arrival touches one of them.

The group with the earliest deadline is next; among equal deadlines the oldest. A group is *awake* when the policy is to be asked about it, and
*asleep* when it is empty or the policy waits. It wakes when a request of its own arrives, at the instant until which it waits, and when a place
becomes free (at most WOKEN_AT_ONCE groups each time, in turn, so that thousands of groups cost no more than a few). Groups of express calls do not
wait behind the others: while both kinds are awake, every second batch is one of express calls.
"""

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import Generic, TypeVar

from weir.batching.compose import BatchDraft
from weir.batching.group import FifoQueue, Group
from weir.batching.request_state import settle
from weir.messages import Request
from weir.policy.decision import PolicyBase

M = TypeVar("M", bound=Hashable)
Rank = tuple[float, float]

SLACK = 64  # outdated entries that are kept before the heap is built again


class IndexedHeap(Generic[M]):
    """Members in order of rank; equal ranks in the order in which they were put. Each operation is O(log n), amortised.

    The outdated entry of a member that has moved or left stays in the heap until it comes to the front, or until such entries are more than half
    of the heap. `entries`, by member, is not to be changed.
    """

    __slots__ = ("_heap", "_puts", "entries")

    def __init__(self) -> None:
        self.entries: dict[M, tuple[Rank, int, M]] = {}
        self._heap: list[tuple[Rank, int, M]] = []
        self._puts = 0

    def __len__(self) -> int:
        return len(self.entries)

    def put(self, member: M, rank: Rank) -> None:
        """Add `member`, or move it to `rank`."""
        self._puts += 1
        entry = (rank, self._puts, member)
        self.entries[member] = entry
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > 2 * len(self.entries) + SLACK:
            heap[:] = self.entries.values()
            heapify(heap)

    def discard(self, member: M) -> None:
        """Remove `member`, if it is in the heap."""
        self.entries.pop(member, None)

    def first(self) -> tuple[Rank, M] | None:
        """Return the lowest rank and its member, or None when there is no member."""
        heap, entries = self._heap, self.entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[0], entry[2]
            heappop(heap)
        return None

    def members(self, count: int) -> list[M]:
        """Return up to `count` members, in the order in which they were put."""
        return list(islice(self.entries, count))


WOKEN_AT_ONCE = 64


class GroupScheduler:
    """Says which group is next: the awake groups by rank, and the groups that wait by the instant until which they do."""

    __slots__ = ("_awake", "_express", "express_was_last", "parked")

    def __init__(self) -> None:
        self._awake: IndexedHeap[Group] = IndexedHeap()
        self._express: IndexedHeap[Group] = IndexedHeap()  # awake groups of express calls
        self.express_was_last = False  # the last batch that was cut is of such a group
        self.parked: IndexedHeap[Group] = IndexedHeap()  # the groups that sleep

    def wake(self, group: Group) -> None:
        """Wake `group`, or give it its new place if its rank has changed."""
        if group.asleep:
            group.asleep = False
            if self.parked.entries:
                self.parked.discard(group)
        rank = group.rank()
        group.turn = rank[0]
        (self._express if group.express else self._awake).put(group, rank)

    def park(self, group: Group, until: float) -> None:
        """Have `group` sleep until then, as its policy waits."""
        group.asleep = True
        self._awake.discard(group)
        self.parked.put(group, (until, 0.0))

    def close(self, group: Group) -> None:
        """Forget `group`, which is empty."""
        (self.parked if group.asleep else self._express if group.express else self._awake).entries.pop(group, None)
        group.asleep = True

    def wake_due(self, now: float) -> None:
        """Wake the groups whose wait has ended."""
        while self.parked.entries and (first := self.parked.first()) is not None and first[0][0] <= now:
            self.wake(first[1])

    def wake_some(self) -> None:
        """Wake the groups that have slept longest, because a place is free."""
        for group in self.parked.members(WOKEN_AT_ONCE):
            self.wake(group)

    def wake_all(self) -> None:
        """Wake every group."""
        for group in self.parked.members(len(self.parked)):
            self.wake(group)

    def first(self) -> Group | None:
        """Return the group that is next; None if all sleep."""
        awake = self._awake
        if self._express.entries and not (self.express_was_last and awake.entries):
            awake = self._express
        while (first := awake.first()) is not None:
            rank, group = first
            if len(awake.entries) == 1:
                return group
            current = group.rank()
            if current <= rank:
                return group
            group.turn = current[0]
            awake.put(group, current)  # the request that gave it its rank has gone
        return None

    def next(self) -> Group | None:
        """Return the group that is next, awake or not; None if there is none."""
        first = self.parked.first()
        return self.first() or (None if first is None else first[1])

    def end_of_wait(self) -> float:
        """Return the earliest instant until which a group waits; infinity if none does."""
        first = self.parked.first()
        return inf if first is None else first[0][0]

    def earliest_deadline(self) -> float:
        """Return an instant before which no deadline of an awake group passes; infinity if all sleep."""
        earliest = inf
        for awake in (self._awake, self._express):
            if awake.entries and (first := awake.first()) is not None and first[0][0] < earliest:
                earliest = first[0][0]
        return earliest

    def passed(self, now: float) -> list[Group]:
        """Return the groups that may have a deadline not after `now`, awake."""
        self.wake_due(now)
        groups = []
        for awake in (self._awake, self._express):
            while (first := awake.first()) is not None and first[0][0] <= now:
                groups.append(first[1])
                awake.discard(first[1])
        return groups


class RequestQueue:
    """The requests that wait, by group.

    An empty group is forgotten, except for the group of requests without a key, and for the last one: where callers are few, a request often
    finds the queue empty and has the key of the one before it.
    """

    __slots__ = (
        "_last_empty", "_queue_type", "again", "arrivals", "capacity", "ceiling", "cost", "departed", "divided", "groups", "last_arrival", "max_cost", "max_rows",
        "running", "scheduler",
    )  # fmt: skip

    def __init__(
        self,
        max_rows: int,
        queue_type: type[FifoQueue] = FifoQueue,
        capacity: int | None = None,
        max_cost: float | None = None,
    ) -> None:
        self._queue_type = queue_type
        self.max_cost = inf if max_cost is None else max_cost  # how much what waits may cost
        self.cost = 0.0  # what the waiting requests cost; counted only with `max_cost`
        self.max_rows = max_rows  # how many may wait; negative once closed
        self.capacity = inf if capacity is None else capacity  # rows that may wait or run
        self.running = 0  # rows that are with workers
        self.again = 0  # rows that are to run again because their worker died
        self._last_empty: Group | None = None
        self.divided: dict[int, Request] = {}  # by id(): dispatched in part; the rest still waits
        self.groups: dict[Hashable, Group] = {}
        self.scheduler = GroupScheduler()
        self.arrivals = 0
        self.departed = 0
        self.ceiling: float = 0  # `arrivals` from which on the queue is full
        self.last_arrival = -inf
        self._raise_ceiling()

    @property
    def waiting(self) -> int:
        """The number of waiting rows."""
        return self.arrivals - self.departed

    def room(self, rows: int, cost: float = 0.0) -> bool:
        """Return whether a request of these `rows` and this `cost` fits. One that is larger than the whole queue fits when nothing waits; one that is
        larger than the capacity fits when nothing runs either."""
        if self.arrivals >= self.ceiling or (self.cost + cost > self.max_cost and self.waiting):
            return False
        waiting, under_way = self.waiting, self.waiting + self.running + self.again
        return (waiting + rows <= self.max_rows or not waiting) and (under_way + rows <= self.capacity or not under_way)

    def ran(self, rows: int) -> None:
        """Add `rows`, which may be negative, to the rows that run."""
        self.running += rows
        if self.capacity < inf:
            self._raise_ceiling()

    def run_again(self, rows: int) -> None:
        """Note that `rows` rows must run again now."""
        self.again = rows
        if self.capacity < inf:
            self._raise_ceiling()

    def _raise_ceiling(self) -> None:
        if self.max_rows >= 0:
            self.ceiling = self.departed + min(self.max_rows, self.capacity - self.running - self.again)

    def resize(self, max_rows: int) -> None:
        """Let at most `max_rows` rows wait from now on. Those that wait already stay."""
        if self.max_rows >= 0:
            self.max_rows = max_rows
            self._raise_ceiling()

    def close(self) -> None:
        """Have no room for any request from now on."""
        self.max_rows = self.ceiling = -1

    def enter(self, request: Request) -> None:
        """Add a request of any kind, and wake its group."""
        group = self.groups.get(request.form.key)
        if group is None:
            group = self.groups[request.form.key] = self._new_group(request.form.key)
        group.add(request)
        self.arrivals += request.form.rows
        self.cost += request.form.cost
        self.last_arrival = max(self.last_arrival, request.arrival)
        if group.asleep or request.deadline < group.turn:
            self.scheduler.wake(group)

    def enter_alike(self, requests: Sequence[Request]) -> None:
        """Add `requests`, which are ordinary, of one key and one timeout, and in order of arrival."""
        first, last = requests[0], requests[-1]
        group = self.groups.get(first.form.key)
        if group is None or first.form.timeout != group.timeout:
            self.enter(first)
            requests = requests[1:]
            group = self.groups[first.form.key]
        if first.form.timeout != group.timeout:
            for request in requests:
                self.enter(request)
            return
        group.main.add_alike(requests)
        group.arrived += len(requests)
        self.arrivals += len(requests)
        self.last_arrival = max(self.last_arrival, last.arrival)
        if group.asleep or first.deadline < group.turn:
            self.scheduler.wake(group)

    def _new_group(self, key: Hashable) -> Group:
        group, self._last_empty = self._last_empty, None
        return group if group is not None and group.key == key else Group(key, self._queue_type)

    def leave(self, request: Request) -> None:
        """Take the rest of a waiting request out, which was settled."""
        group = self.groups[request.form.key]
        self._remove(group, request)
        self.divided.pop(id(request), None)
        if not group.waiting:
            self.reconsider(group)

    def _remove(self, group: Group, request: Request) -> None:
        rows = group.remove(request)
        self.depart(rows, rows / request.form.rows * request.form.cost)

    def depart(self, rows: int, cost: float) -> None:
        """Note that `rows` rows, which have the `cost` together, have left a group."""
        self.departed += rows
        if self.max_cost < inf:
            self.cost = self.cost - cost if self.waiting else 0.0  # so that rounding does not add up
        if self.capacity < inf:
            self._raise_ceiling()
        elif self.max_rows >= 0:
            self.ceiling += rows

    def account(self, group: Group, draft: BatchDraft) -> None:
        """Note what `draft` has taken from `group`."""
        self.depart(draft.departed, draft.departed_cost)
        for request in draft.late:
            self.divided.pop(id(request), None)
        for request in draft.divided:
            self.divided[id(request)] = request
        self.reconsider(group)

    def sweep(self) -> None:
        """Take the rest of divided requests out that were settled while it waited."""
        for key, request in list(self.divided.items()):
            if request.taken >= request.form.rows:
                del self.divided[key]
            elif request.settled:
                self.leave(request)

    def reconsider(self, group: Group) -> None:
        """Give `group`, which requests have left, its new place among the groups, or forget it if it is empty."""
        if group.arrived != group.departed:
            self.scheduler.wake(group)
            return
        self.scheduler.close(group)
        if group.key is not None:
            self._last_empty = self.groups.pop(group.key)

    def passed(self, now: float) -> list[Request]:
        """Take out, settle and return the requests whose deadline is not after `now`."""
        late: list[Request] = []
        for group in self.scheduler.passed(now):
            for request in group.passed(now):
                settle(request)
                late.append(request)
                self._remove(group, request)
                self.divided.pop(id(request), None)
            self.reconsider(group)
        return late

    def clear(self) -> None:
        """Take all requests out."""
        for group in self.groups.values():
            self.scheduler.close(group)
        self.groups.clear()
        self.divided.clear()
        self.depart(self.waiting, self.cost)


class Bound:
    """The policy's bound on the length of the queue, which is never above that of the settings. `rows` is None if the policy has none."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._largest = queue.max_rows
        self.rows: int | None = None

    def move(self, rows: int | None, least: int) -> None:
        """Let at most `rows` wait, and at least `least`; None: as many as the settings allow."""
        self._queue.resize(self._largest if rows is None else min(max(least, rows), self._largest))
        self.rows = rows

    def ask(self, policy: PolicyBase, now: float) -> None:
        """Let more rows wait if the policy, which is notified that the queue is full, allows it. Raises whatever the policy raises.

        While no batch runs, one row may wait: the policy is asked to decide only if one does.
        """
        if self.rows is not None:
            self.move(policy.full(now), 0 if self._queue.running else 1)
