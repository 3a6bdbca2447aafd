"""To each caller a fair share: who may put a text into the line next, where more wants to go in than has room.

Fair queueing by virtual time: whoever has had least goes next, counted in tokens, and whoever comes anew begins where the others are, so that
nobody saves up a share while away. Higher priority goes first.
"""

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

CREDIT = 4096.0  # tokens that who was not ready in time may have later


class Sharing(Hashable, Protocol):
    """What waits for its caller's share."""

    @property
    def ready(self) -> bool:
        """Whether a text of it can go now."""


S = TypeVar("S", bound=Sharing)
Key = tuple[int, Hashable]  # priority and caller


class Share(Generic[S]):
    """One caller's: what waits, in order, and how much it has had (or would have, had it always been there)."""

    __slots__ = ("had", "key", "queued", "waiting")

    def __init__(self, key: Key, had: float) -> None:
        self.key = key
        self.had = had
        self.waiting: OrderedDict[S, None] = (
            OrderedDict()
        )  # a plain dict is slow to find its first where many have left
        self.queued = False  # among those whose turn is sought


def _first(share: Share[S]) -> S:
    return next(iter(share.waiting))


class Shares(Generic[S]):
    """What waits, by caller. All operations are O(log callers), but for `len`."""

    def __init__(self) -> None:
        self._shares: dict[Key, Share[S]] = {}
        self._heap: list[tuple[int, float, int, Share[S]]] = []
        self._pushes = 0
        self._now = 0.0  # what those have had whose turn it is

    def __len__(self) -> int:
        return sum(len(share.waiting) for share in self._shares.values())

    def add(self, key: Key, member: S) -> None:
        """Let `member` wait for the share of `key`."""
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = Share(key, self._now)
        share.waiting[member] = None
        self.wake(key)

    def wake(self, key: Key) -> None:
        """Something of `key` may be ready that was not."""
        share = self._shares.get(key)
        if share is not None and not share.queued and _first(share).ready:
            share.had = max(share.had, self._now - CREDIT)
            self._push(share)

    def _push(self, share: Share[S]) -> None:
        share.queued = True
        self._pushes += 1
        heappush(self._heap, (-share.key[0], share.had, self._pushes, share))

    def next(self) -> S | None:
        """Return the one whose turn it is; None if nothing is ready. Say `charge` or `leave` then."""
        while self._heap:
            share = self._heap[0][3]
            if share.waiting and (first := _first(share)).ready:
                return first
            heappop(self._heap)
            share.queued = False
        return None

    def charge(self, cost: float) -> None:
        """The one whose turn it was has had so much."""
        _, had, _, share = heappop(self._heap)
        self._now = max(self._now, had)
        share.had += cost
        self._push(share)

    def leave(self, key: Key, member: S) -> None:
        """`member` wants nothing any more."""
        share = self._shares.get(key)
        if share is None or member not in share.waiting:
            return
        del share.waiting[member]
        if not share.waiting:
            del self._shares[key]
        else:
            self.wake(key)
