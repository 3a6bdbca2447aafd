"""A priority queue whose members may change their place or leave."""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)
Rank = tuple[float, float]

SLACK = 64  # outdated entries that are tolerated before the heap is built anew


class IndexedHeap(Generic[M]):
    """Members in order of rank; equal ranks in the order in which they were put. Each operation is O(log n), amortised.

    An entry that a member no longer stands for stays in the heap until it comes to the front, or until such entries
    are more than half of the heap. `entries`, by member, is not to be changed.
    """

    __slots__ = ("_heap", "_puts", "entries")

    def __init__(self) -> None:
        self.entries: dict[M, tuple[Rank, int, M]] = {}
        self._heap: list[tuple[Rank, int, M]] = []
        self._puts = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, member: M) -> bool:
        return member in self.entries

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
        """Take `member` out, if it is in."""
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
        """Return up to `count` members, those that have been in longest first."""
        return list(islice(self.entries, count))
