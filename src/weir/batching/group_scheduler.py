"""Whose turn it is: the group with the earliest deadline, then the oldest.

A group is *awake* when its policy is to be asked, *asleep* when it is empty or its policy waits. It wakes at an arrival of
its own, at the instant until which it waits, and when a place becomes free (at most WOKEN_AT_ONCE groups each time, in
turn, so that thousands of groups cost no more than a few).

The groups of express calls do not wait behind the others: theirs is every second batch, while both kinds are awake.
"""

from math import inf

from weir.batching.group import Group
from weir.batching.indexed_heap import IndexedHeap

WOKEN_AT_ONCE = 64


class GroupScheduler:
    """The groups that wait for something."""

    __slots__ = ("_awake", "_express", "_express_was_last", "_parked")

    def __init__(self) -> None:
        self._awake: IndexedHeap[Group] = IndexedHeap()
        self._express: IndexedHeap[Group] = IndexedHeap()  # those of express calls; no policy lets them wait
        self._express_was_last = False
        self._parked: IndexedHeap[Group] = IndexedHeap()

    def wake(self, group: Group) -> None:
        """`group` is to be asked; also when its rank has changed."""
        if group.asleep:
            group.asleep = False
            self._parked.discard(group)
        rank = group.rank()
        group.turn = rank[0]
        (self._express if group.express else self._awake).put(group, rank)

    def park(self, group: Group, until: float) -> None:
        """The policy of `group` waits until then."""
        group.asleep = True
        self._awake.discard(group)
        self._parked.put(group, (until, 0.0))

    def close(self, group: Group) -> None:
        """`group` is empty."""
        (self._parked if group.asleep else self._express if group.express else self._awake).discard(group)
        group.asleep = True

    def led(self, group: Group) -> None:
        """A batch of `group` was cut."""
        self._express_was_last = group.express

    def wake_due(self, now: float) -> None:
        """Wake the groups whose wait is over."""
        while self._parked.entries and (first := self._parked.first()) is not None and first[0][0] <= now:
            self.wake(first[1])

    def wake_some(self) -> None:
        """Wake those that have slept longest: a place is free for them."""
        if self._parked.entries:
            for group in self._parked.members(WOKEN_AT_ONCE):
                self.wake(group)

    def wake_all(self) -> None:
        """Wake every group."""
        for group in self._parked.members(len(self._parked)):
            self.wake(group)

    def first(self) -> Group | None:
        """Return the group whose turn it is, or None if all sleep."""
        awake = self._awake
        if self._express.entries and not (self._express_was_last and awake.entries):
            awake = self._express
        while (first := awake.first()) is not None:
            rank, group = first
            if len(awake.entries) == 1:
                return group
            current = group.rank()
            if current <= rank:
                return group
            group.turn = current[0]
            awake.put(group, current)  # what gave it the turn has gone
        return None

    def end_of_wait(self) -> float:
        """Return the earliest instant until which a group waits; infinity if none does."""
        first = self._parked.first()
        return inf if first is None else first[0][0]

    def earliest_deadline(self) -> float:
        """Return an instant before which no deadline of an awake group passes; infinity if all sleep."""
        first = self._awake.first()
        earliest = inf if first is None else first[0][0]
        if self._express.entries and (express := self._express.first()) is not None:
            earliest = min(earliest, express[0][0])
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
