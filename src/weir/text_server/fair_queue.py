"""Fair shares among callers: whose text enters the queue next.

This is self-clocked fair queueing (Golestani, 1994), in tokens. A caller's next text gets a tag: the number of tokens that the caller has had, that text
included. The caller with the lowest tag is next. Virtual time is the lowest tag of the texts that are under way, which means in the queue or being
computed. A new caller begins at virtual time, so that nobody saves up a share while away. A caller who has had more than the others keeps that debt for a
while after leaving.

So a caller's share does not depend on the number of texts in a request: one text goes before the thousands of another caller. Requests of one caller take
turns. A higher priority goes before a lower one.
"""

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heappop, heappush, nlargest
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

# The most tokens by which a caller without a ready text may fall behind virtual time and catch up later.
CREDIT = 4096.0
REMEMBERED = 1024  # absent callers; of twice as many those who have had least are forgotten


class Sharing(Hashable, Protocol):
    """A request in a CallerQueue."""

    @property
    def ready(self) -> bool:
        """Whether the request has a text that can enter the queue now."""


S = TypeVar("S", bound=Sharing)
Key = tuple[int, Hashable]  # priority, caller


class CallerShare(Generic[S]):
    """One caller at one priority.

    Attributes:
        had: the tokens that the caller has had, counted as if it had always been present.
        members: the caller's requests.
        ready: the requests that may be ready, in turn.
        queued: whether the caller is in the heap of those who may be next.
    """

    __slots__ = ("had", "key", "members", "queued", "ready")

    def __init__(self, key: Key, had: float) -> None:
        self.key = key
        self.had = had
        self.members: set[S] = set()
        self.ready: OrderedDict[S, None] = OrderedDict()  # a dict finds its first key slowly after many removals
        self.queued = False

    def first(self) -> S | None:
        """Return the caller's request whose turn it is; None if none is ready."""
        while self.ready:
            member = next(iter(self.ready))
            if member.ready and member in self.members:
                return member
            del self.ready[member]
        return None


class CallerQueue(Generic[S]):
    """The requests that have texts to send, by caller. All operations take O(log callers), except `len`, which takes O(callers)."""

    def __init__(self) -> None:
        self._shares: dict[Key, CallerShare[S]] = {}
        self._heap: list[tuple[int, float, int, CallerShare[S]]] = []
        self._pushes = 0
        self._tags: list[float] = []  # a heap of the tags of texts under way, and of some that are no longer
        self._ended: dict[float, int] = {}  # how many texts of each tag in `_tags` are no longer under way, if any
        self._held = 0  # texts under way that entered out of turn; all have the tag `_now`
        self._now = 0.0
        self._away: dict[Key, float] = {}  # the tokens that absent callers have had

    def __len__(self) -> int:
        return sum(len(share.members) for share in self._shares.values())

    @property
    def now(self) -> float:
        """Virtual time, in tokens. It never decreases."""
        tags, ended = self._tags, self._ended
        while tags and tags[0] in ended:
            tag = heappop(tags)
            ended[tag] -= 1
            if not ended[tag]:
                del ended[tag]
        if tags and tags[0] > self._now and not self._held:
            self._now = tags[0]
        return self._now

    def add(self, key: Key, member: S) -> None:
        """Add the request `member` of the caller `key`."""
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = CallerShare(key, max(self.now, self._away.pop(key, 0.0)))
        share.members.add(member)
        self.wake(key, member)

    def wake(self, key: Key, member: S) -> None:
        """Note that `member` may have become ready. A request that was removed is ignored."""
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
        """Return the request whose turn it is; None if none is ready. Follow it with `charge` or `leave`, or the answer stays the same."""
        while self._heap:
            share = self._heap[0][3]
            if (member := share.first()) is not None:
                return member
            heappop(self._heap)
            share.queued = False
        return None

    @property
    def due(self) -> bool:
        """Whether the caller whose turn it is has had no more than any caller with a text under way. Call `next` before it."""
        return self._heap[0][1] <= self.now

    def charge(self, cost: float) -> float:
        """Charge `cost` tokens for a text of the request that `next` returned. Return the text's tag, to be passed to `ended` later."""
        _, _, _, share = heappop(self._heap)
        share.had += cost
        heappush(self._tags, share.had)
        share.ready.move_to_end(next(iter(share.ready)))
        self._push(share)
        return share.had

    def at_once(self) -> float:
        """Return a tag, to be passed to `ended` later, for a text that enters the queue out of turn and is not charged."""
        heappush(self._tags, self.now)
        return self._now

    def at(self, ahead: float) -> float:
        """Return a tag, to be passed to `ended` later, for a text that is so many tokens `ahead` of virtual time and is not charged."""
        tag = self.now + ahead
        heappush(self._tags, tag)
        return tag

    def hold(self) -> float:
        """Return a tag as `at_once` does, and let virtual time stand still until `release`. Most texts are such, and this takes no heap."""
        tag = self._now if self._held else self.now
        self._held += 1
        return tag

    def release(self) -> None:
        """Note that a text for which `hold` was called is no longer under way."""
        self._held -= 1

    def ended(self, tag: float) -> None:
        """Note that a text with this tag is no longer under way."""
        self._ended[tag] = self._ended.get(tag, 0) + 1

    def leave(self, key: Key, member: S) -> None:
        """Remove the request `member`, which has no more texts to send. Idempotent."""
        share = self._shares.get(key)
        if share is None or member not in share.members:
            return
        share.members.remove(member)
        if not share.members:
            del self._shares[key]
            self._away[key] = share.had
            if len(self._away) >= 2 * REMEMBERED:
                self._forget()

    def _forget(self) -> None:
        """Forget the absent callers who have had no more than virtual time, and of the others all but the REMEMBERED who have had most; if nobody is
        present, all of them.

        At least half of them go, so that it is done once for many who leave: tens of thousands may leave at once.
        """
        now = self.now
        owing = [(key, had) for key, had in self._away.items() if had > now and self._shares]
        self._away = dict(nlargest(REMEMBERED, owing, key=itemgetter(1)) if len(owing) > REMEMBERED else owing)
