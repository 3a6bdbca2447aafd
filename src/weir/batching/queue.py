"""The line: all groups, whose turn it is among them, and how many rows wait.

Rows are counted as two numbers that only grow, `arrivals` and `departed`, so that an arrival touches one of them.
"""

from collections.abc import Hashable
from math import inf

from weir.batching.compose import BatchDraft
from weir.batching.group import FifoQueue, Group
from weir.batching.group_scheduler import GroupScheduler
from weir.batching.request_state import settle
from weir.messages import Request


class RequestQueue:
    """The requests that wait, by group. A group that is empty is forgotten, but for the one of requests without a key, and for the last
    one: where callers are few, each request finds no other, and its key is that of the one before."""

    __slots__ = (
        "_divided", "_lane", "_last_empty", "again", "arrivals", "capacity", "ceiling", "departed", "groups", "last_arrival", "max_rows", "running", "turns",
    )  # fmt: skip

    def __init__(self, max_rows: int, lane: type[FifoQueue] = FifoQueue, capacity: int | None = None) -> None:
        self._lane = lane
        self.max_rows = max_rows  # that may wait; negative once closed
        self.capacity = inf if capacity is None else capacity  # rows that may wait or run
        self.running = 0  # rows that are with workers
        self.again = 0  # rows that wait to be run again, as their worker died
        self._last_empty: Group | None = None
        self._divided: dict[int, Request] = {}  # by id(): dispatched in part, the rest still waits
        self.groups: dict[Hashable, Group] = {}
        self.turns = GroupScheduler()
        self.arrivals = 0
        self.departed = 0
        self.ceiling: float = 0  # `arrivals` from which on the line is full
        self.last_arrival = -inf
        self._raise_ceiling()

    @property
    def waiting(self) -> int:
        """Rows waiting."""
        return self.arrivals - self.departed

    def room(self, rows: int) -> bool:
        """Tell whether a request of so many rows fits; one larger than the whole line does when nothing waits, one larger than
        the capacity when nothing runs either."""
        if self.arrivals >= self.ceiling:
            return False
        waiting, under_way = self.waiting, self.waiting + self.running + self.again
        return (waiting + rows <= self.max_rows or not waiting) and (under_way + rows <= self.capacity or not under_way)

    def ran(self, rows: int) -> None:
        """So many rows more run; fewer, if it is negative."""
        self.running += rows
        if self.capacity < inf:
            self._raise_ceiling()

    def run_again(self, rows: int) -> None:
        """So many rows wait to be run again now."""
        self.again = rows
        if self.capacity < inf:
            self._raise_ceiling()

    def _raise_ceiling(self) -> None:
        if self.max_rows > 0:
            self.ceiling = self.departed + min(self.max_rows, self.capacity - self.running - self.again)

    def resize(self, max_rows: int) -> None:
        """Let so many rows wait from now on. Those that wait already stay."""
        if self.max_rows > 0:
            self.max_rows = max_rows
            self._raise_ceiling()

    def close(self) -> None:
        """Have no room from now on."""
        self.max_rows = self.ceiling = -1

    def enter(self, request: Request) -> None:
        """Add a request of any kind, and wake its group."""
        group = self.groups.get(request.key)
        if group is None:
            group = self.groups[request.key] = self._new_group(request.key)
        group.add(request)
        self.arrivals += request.rows
        self.last_arrival = max(self.last_arrival, request.arrival)
        if group.asleep or request.deadline < group.turn:
            self.turns.wake(group)

    def _new_group(self, key: Hashable) -> Group:
        group, self._last_empty = self._last_empty, None
        return group if group is not None and group.key == key else Group(key, self._lane)

    def leave(self, request: Request) -> None:
        """A waiting request was settled: take the rest of it out."""
        group = self.groups[request.key]
        self.depart(group.remove(request))
        self._divided.pop(id(request), None)
        if not group.waiting:
            self.reconsider(group)

    def depart(self, rows: int) -> None:
        """So many rows have left a group."""
        self.departed += rows
        if self.capacity < inf:
            self._raise_ceiling()
        elif self.max_rows > 0:
            self.ceiling += rows

    def account(self, group: Group, load: BatchDraft) -> None:
        """Bring the books up to date with what was taken from `group`.

        Should a request of which a part was dispatched have its end meanwhile, the rest is swept out.
        """
        self.depart(load.departed)
        for request in load.late:
            self._divided.pop(id(request), None)
        for request in load.divided:
            self._divided[id(request)] = request
        self.reconsider(group)

    def sweep(self) -> None:
        """Take the rest of requests out that had their end, by a part, while it waited."""
        if not self._divided:
            return
        for key, request in list(self._divided.items()):
            if request.taken >= request.rows:
                del self._divided[key]
            elif request.settled:
                self.leave(request)

    def reconsider(self, group: Group) -> None:
        """Something has left `group`: give it its new place among the groups, or forget it."""
        if group.arrived != group.departed:
            self.turns.wake(group)
            return
        self.turns.close(group)
        if group.key is not None:
            self._last_empty = self.groups.pop(group.key)

    def passed(self, now: float) -> list[Request]:
        """Take out, settle and return the requests whose deadline is not after `now`."""
        late: list[Request] = []
        for group in self.turns.passed(now):
            for request in group.passed(now):
                settle(request)
                late.append(request)
                self.depart(group.remove(request))
                self._divided.pop(id(request), None)
            self.reconsider(group)
        return late

    def clear(self) -> None:
        """Take out all that wait."""
        for group in self.groups.values():
            self.turns.close(group)
        self.groups.clear()
        self._divided.clear()
        self.depart(self.waiting)
