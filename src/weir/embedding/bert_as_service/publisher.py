"""Brings answers to those who listen for them.

A message goes to every peer that has subscribed to the beginning of its first frame, its topic. libzmq throws away what nobody listens
to yet, or for a moment; here it is kept for as long as a client may take to come, or to come back: until a peer has subscribed to the whole topic, as the
client that asked does. One that listens to all topics takes no answer away from others.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from weir.embedding.bert_as_service.port import Drops, Peer
from weir.embedding.bert_as_service.zmtp import Subscribed, pack
from weir.errors import TooLarge
from weir.protocols.account import Account

MAX_TOPICS = 256  # that one peer listens to
OVERHEAD = 4096  # bytes that a message counts beside its own: there may be many small ones
_SWEPT_AT_ONCE = 128  # topics that are looked at in one turn of the event loop
_TOGETHER = 4  # times what one client may leave unread: what all may

Frames = Sequence[bytes | memoryview]


class Publisher:
    """Publishes. Who listens may leave `max_unread` bytes unread: no more is made for it (`room`) until it has read, and of several who listen to
    the same, those that read more slowly are left out. What nobody listens to may be as large; more is dropped.

    What nobody listens to is given up after `grace` seconds. All of it is charged to `account`; while that is over its limit, each client has one
    answer at a time.
    """

    def __init__(self, max_unread: int, grace: float, drops: Drops, account: Account) -> None:
        self._account = account
        self._max_unread = max_unread
        self._grace = grace
        self._drops = drops
        self._peers: dict[bytes, set[Peer]] = {}
        self._lengths: Counter[int] = Counter()  # of the topics
        self._clogged: set[Peer] = set()
        self._kept: dict[bytes, list[_Kept]] = defaultdict(list)
        self._kept_sizes: Counter[bytes] = Counter()  # by topic
        self._kept_bytes = 0
        self._missed: dict[bytes, float] = {}  # topics that nobody listens to, and since when
        self._making: Counter[bytes] = Counter()  # bytes of answers that are being made, by topic
        self._waiting: dict[bytes, deque[tuple[int, asyncio.Future[None]]]] = {}  # for room, by topic

    # Who listens.

    def subscribe(self, peer: Peer, said: Subscribed) -> None:
        """Add or remove a subscription of `peer`. Raises TooLarge for a peer with too many."""
        if not said.wanted:
            self._remove(peer, said.topic)
        elif said.topic not in peer.topics:
            if len(peer.topics) >= MAX_TOPICS:
                raise TooLarge(f"subscriptions: more than {MAX_TOPICS}")
            peer.topics.add(said.topic)
            if said.topic not in self._peers:
                self._peers[said.topic] = set()
                self._lengths[len(said.topic)] += 1
            self._peers[said.topic].add(peer)
            self._send_kept(said.topic)  # what it hears of beside its own topic comes with the next sweep

    def forget(self, peer: Peer) -> None:
        """Forget `peer`, whose connection has ended."""
        self._clogged.discard(peer)
        self._account.give(peer.charged)
        peer.charged = 0
        for topic in list(peer.topics):
            self._remove(peer, topic)

    def _remove(self, peer: Peer, topic: bytes) -> None:
        if topic not in peer.topics:
            return
        peer.topics.discard(topic)
        self._peers[topic].discard(peer)
        if not self._peers[topic]:
            del self._peers[topic]
            self._lengths[len(topic)] -= 1
            if not self._lengths[len(topic)]:
                del self._lengths[len(topic)]

    def is_heard(self, topic: bytes) -> bool:
        """Tell whether somebody listens to `topic`."""
        return bool(self._listeners(topic))

    def _listeners(self, topic: bytes) -> set[Peer]:
        found: set[Peer] = set()
        for length in self._lengths:
            if length <= len(topic):
                found |= self._peers.get(topic[:length], set())
        return found

    # Room for answers.

    async def room(self, topic: bytes, size: int) -> None:
        """Return when an answer of `size` bytes may be made for `topic`: as soon as one of those who listen has read so much that it may
        be left unread. One that is larger is made when there is no other. To be followed by `made`."""
        if topic not in self._waiting and self._has_room(topic, size):
            self._make(topic, size)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, deque()).append((size, future))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # it had its room already
                self._make(topic, -size)
            self._admit(topic)
            raise

    def made(self, topic: bytes, size: int) -> None:
        """Give back the room of an answer that was published, or will not be."""
        self._make(topic, -size)
        self._admit(topic)

    def _make(self, topic: bytes, size: int) -> None:
        self._making[topic] += size  # charged by who makes it

    def has_read(self, peer: Peer) -> None:
        """Note that `peer` has read all that it was sent."""
        for topic in peer.topics:
            if topic in self._waiting:
                self._admit(topic)

    def _has_room(self, topic: bytes, size: int) -> bool:
        taken = self._making[topic] + min((peer.unread for peer in self._listeners(topic)), default=0)
        return not taken or (taken + size <= self._max_unread and not self._account.over)

    def _admit(self, topic: bytes) -> None:
        """Wake those that wait for room, in order, for as many as there is room."""
        waiting = self._waiting.get(topic, deque())
        while waiting:
            size, future = waiting[0]
            if not future.done():
                if not self._has_room(topic, size):
                    return
                self._make(topic, size)
                future.set_result(None)
            waiting.popleft()
        self._waiting.pop(topic, None)
        if not self._making[topic]:
            del self._making[topic]

    # Answers.

    def publish(self, frames: Frames) -> None:
        """Send a message to all who listen to its first frame; keep it if nobody does."""
        topic = bytes(frames[0])
        listeners = self._listeners(topic)
        for peer in listeners:
            self._write(peer, frames)
        if topic not in self._peers:  # who asked is not among them: a client subscribes to its own topic
            self._keep(topic, _Kept(frames, heard=bool(listeners)))

    def _write(self, peer: Peer, frames: Frames) -> None:
        unread = peer.unread
        if unread > self._max_unread or self._has_its_share(unread):
            self._drops("answer", f"{unread} bytes of answers are unread (zmq_max_unread)", peer.address)
            return
        peer.write(pack(frames))
        if peer.unread:
            self._clogged.add(peer)
            self._charge(peer)

    def _has_its_share(self, unread: int) -> bool:
        """Whether all peers together may leave no more unread, and a peer with so many bytes has at least an equal part of that."""
        most = _TOGETHER * self._max_unread
        return unread * len(self._clogged) >= most and self.unread > most

    def _charge(self, peer: Peer) -> None:
        """Charge what `peer` has not read now."""
        self._account.add(peer.unread - peer.charged)
        peer.charged = peer.unread

    def _keep(self, topic: bytes, kept: "_Kept") -> None:
        size = size_of(kept.frames) + OVERHEAD
        if self._kept_bytes + size > self._max_unread or self._account.over:
            if not kept.heard:
                self._drops("answer", "nobody listens, and too many are kept for such (zmq_max_unread)")
            return
        self._kept[topic].append(kept)
        self._kept_sizes[topic] += size
        self._kept_bytes += size
        self._account.add(size)

    def _send_kept(self, topic: bytes) -> None:
        """Send what is kept for `topic`, to which somebody has subscribed, also to others who have not heard it."""
        for kept in self._take(topic):
            for peer in self._peers[topic] if kept.heard else self._listeners(topic):
                self._write(peer, kept.frames)

    def _send_unheard(self, topic: bytes, listeners: set[Peer]) -> None:
        """Send what is kept for `topic` to those who listen to its beginning, once; it stays for who asked."""
        for kept in self._kept.get(topic, ()):
            if not kept.heard:
                kept.heard = True
                for peer in listeners:
                    self._write(peer, kept.frames)

    def _take(self, topic: bytes) -> "list[_Kept]":
        size = self._kept_sizes.pop(topic, 0)
        self._kept_bytes -= size
        self._account.give(size)
        return self._kept.pop(topic, [])

    @property
    def unread(self) -> int:
        """Bytes of answers that were sent and have not left."""
        self._recharge()
        return sum(peer.charged for peer in self._clogged)

    def _recharge(self) -> None:
        """Charge what has not left now."""
        for peer in self._clogged:
            self._charge(peer)
        self._clogged = {peer for peer in self._clogged if peer.charged}

    @property
    def waiting(self) -> bool:
        """Whether there are answers that have not left."""
        return any(not kept.heard for each in self._kept.values() for kept in each) or self.unread > 0

    # Time.

    def sweep(self, topics: Iterable[bytes], now: float) -> Iterator[list[bytes]]:
        """Yield those of `topics` that nobody has listened to for the grace; what was kept for such is dropped.

        There may be tens of thousands of topics: they are looked at a few at a time, between which others can have their turn.
        """
        asked = {*topics, *self._kept, *self._waiting}
        left = iter(asked)
        while some := list(islice(left, _SWEPT_AT_ONCE)):
            yield self._sweep_some(some, now)
        self._recharge()
        self._missed = {topic: since for topic, since in self._missed.items() if topic in asked}

    def _sweep_some(self, topics: Iterable[bytes], now: float) -> list[bytes]:
        given_up, dropped = [], 0
        for topic in topics:
            self._admit(topic)
            listeners = self._listeners(topic)
            if topic in self._peers:
                self._send_kept(topic)
            elif listeners:
                self._send_unheard(topic, listeners)
            if listeners and topic not in self._kept:
                self._missed.pop(topic, None)
            elif now >= self._missed.setdefault(topic, now) + self._grace:
                if not listeners:
                    given_up.append(topic)
                dropped += sum(not kept.heard for kept in self._take(topic))
        if dropped:
            self._drops("answer", f"nobody has listened for {self._grace:g} s", times=dropped)
        return given_up


@dataclass(slots=True)
class _Kept:
    """A message that nobody who subscribed to just its topic has got; `heard`: others, who listen to the beginning of the topic, have."""

    frames: Frames
    heard: bool


def size_of(frames: Frames) -> int:
    """Return how many bytes there are in `frames`."""
    return sum(map(len, frames))
