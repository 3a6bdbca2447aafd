"""A fair share for each caller: who may put a text into the queue next, and in which order the queue takes texts.

This is self-clocked fair queueing (Golestani, 1994), in tokens. A caller's next text gets a tag: the tokens that the caller has had, that text included.
The lowest tag goes first. Virtual time is the lowest tag of the texts that are in the queue or run. A new caller begins at virtual time, so that nobody
saves up a share while away. A caller who had more than the others keeps that debt for a while after leaving. So a caller's share does not depend on how many
texts a request has: one text goes before the thousands of another caller. Requests of one caller take turns. Higher priority goes first.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

CREDIT = 4096.0  # tokens that a caller may catch up on who was not ready in time
REMEMBERED = 1024  # callers who are away, before those who have had no more than others are forgotten


class Sharing(Hashable, Protocol):
    """A request that waits for its caller's share."""

    @property
    def ready(self) -> bool:
        """Whether a text of it can go now."""


S = TypeVar("S", bound=Sharing)
Key = tuple[int, Hashable]  # priority and caller


class CallerShare(Generic[S]):
    """One caller: its requests, those of them that are ready, in turn, and how many tokens it has had (or would have had, had it always been
    there)."""

    __slots__ = ("had", "key", "members", "queued", "ready")

    def __init__(self, key: Key, had: float) -> None:
        self.key = key
        self.had = had
        self.members: set[S] = set()
        self.ready: OrderedDict[S, None] = OrderedDict()  # a dict is slow to find its first where many have left
        self.queued = False  # among those whose turn is sought

    def first(self) -> S | None:
        """Return the request whose turn it is; None if none is ready."""
        while self.ready:
            member = next(iter(self.ready))
            if member.ready and member in self.members:
                return member
            del self.ready[member]
        return None


class CallerQueue(Generic[S]):
    """Requests that wait, by caller. All operations are O(log callers), except `len`."""

    def __init__(self) -> None:
        self._shares: dict[Key, CallerShare[S]] = {}
        self._heap: list[tuple[int, float, int, CallerShare[S]]] = []
        self._pushes = 0
        self._tags: list[float] = []  # a heap: of texts that are under way, and of some that were
        self._ended: Counter[float] = Counter()  # tags in `_tags` whose texts are no longer under way
        self._now = 0.0
        self._away: dict[Key, float] = {}  # what callers have had who want nothing now

    def __len__(self) -> int:
        return sum(len(share.members) for share in self._shares.values())

    @property
    def now(self) -> float:
        """The virtual time."""
        tags, ended = self._tags, self._ended
        while tags and ended[tags[0]]:
            tag = heappop(tags)
            ended[tag] -= 1
            if not ended[tag]:
                del ended[tag]
        if tags and tags[0] > self._now:
            self._now = tags[0]
        return self._now

    def add(self, key: Key, member: S) -> None:
        """Let `member` wait for the share of `key`."""
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = CallerShare(key, max(self.now, self._away.pop(key, 0.0)))
        share.members.add(member)
        self.wake(key, member)

    def wake(self, key: Key, member: S) -> None:
        """Note that `member` may have become ready."""
        share = self._shares.get(key)
        if share is None or not member.ready:
            return
        share.ready.setdefault(member)
        if not share.queued:
            share.had = max(share.had, self.now - CREDIT)
            self._push(share)

    def _push(self, share: CallerShare[S]) -> None:
        share.queued = True
        self._pushes += 1
        heappush(self._heap, (-share.key[0], share.had, self._pushes, share))

    def next(self) -> S | None:
        """Return the request whose turn it is; None if none is ready. Call `charge` or `leave` next."""
        while self._heap:
            share = self._heap[0][3]
            if (member := share.first()) is not None:
                return member
            heappop(self._heap)
            share.queued = False
        return None

    @property
    def due(self) -> bool:
        """Whether the caller whose turn it is has had no more than any caller with a text under way. Call `next` before."""
        return self._heap[0][1] <= self.now

    def charge(self, cost: float) -> float:
        """Charge `cost` tokens for a text of the request whose turn it was, which goes into the queue. Return its tag, for `ended`."""
        _, _, _, share = heappop(self._heap)
        share.had += cost
        heappush(self._tags, share.had)
        share.ready.move_to_end(next(iter(share.ready)))
        self._push(share)
        return share.had

    def at_once(self) -> float:
        """Return the tag, for `ended`, of a text that goes into the queue before its turn and is not charged."""
        heappush(self._tags, self.now)
        return self._now

    def ended(self, tag: float) -> None:
        """Note that a text with this tag is no longer under way."""
        self._ended[tag] += 1

    def leave(self, key: Key, member: S) -> None:
        """Remove `member`: it waits for nothing any more."""
        share = self._shares.get(key)
        if share is None or member not in share.members:
            return
        share.members.remove(member)
        if not share.members:
            del self._shares[key]
            self._away[key] = share.had
            if len(self._away) >= REMEMBERED:
                self._forget()

    def _forget(self) -> None:
        """Forget the callers who have had no more than the others; with nobody waiting, all callers."""
        now = self.now
        self._away = {key: had for key, had in self._away.items() if had > now and self._shares}
