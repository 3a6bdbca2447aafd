"""A listening socket of the ZeroMQ frontend: it accepts connections, exchanges ZMTP with them, and enforces limits."""

import asyncio
import contextlib
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import NamedTuple, cast

from structlog.stdlib import BoundLogger

from weir.errors import WeirError
from weir.frontends.frontend import cannot_listen, listen
from weir.protocols.account import Account
from weir.text_server.bert_as_service.frames import GREETING, Event, Received, ZmtpParser, ZmtpReply, ready
from weir.workers.timer import TimeLimit

LOG_INTERVAL = 1.0  # seconds between two log lines about drops of one kind


@dataclass(eq=False)
class Drops:
    """Counts what is dropped (connections, messages, requests, responses) by kind, and logs each kind at most once in LOG_INTERVAL.

    `count` is also called with each kind and number, for metrics. `counts` are the totals by kind. `clock` returns seconds.
    """

    logger: BoundLogger
    count: Callable[[str, int], None] = lambda kind, times: None
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter)
    # By kind: the time of the last log line, and the count then.
    logged: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __call__(self, kind: str, reason: object, peer: str = "", client: str = "", *, times: int = 1) -> None:
        """Count something of this `kind` that was dropped `times` times. The log names the reason, the address `peer`, and the identity `client`."""
        self.counts[kind] += times
        self.count(kind, times)
        now = self.clock()
        when, before = self.logged.get(kind, (None, 0))
        if when is not None and now < when + LOG_INTERVAL:
            return
        self.logged[kind] = (now, self.counts[kind])
        facts = {"kind": kind, "frontend": "zeromq", "peer": peer, "client": client, "reason": str(reason)}
        self.logger.warning("dropped", **facts, since_last=self.counts[kind] - before)


_BACKLOG = 1024
MIN_RATE = 256 << 10  # bytes/s at which a message must arrive at least
MIN_READ_RATE = 16 << 10  # bytes/s at which a peer must read at least while it has unread responses
# At most so many messages and commands of one connection, and about so many bytes of them, are handled in one turn of the event loop.
_EVENTS_PER_TURN = 16
_BYTES_PER_TURN = 32 << 10
_CLOSE_TIMEOUT = 2.0  # seconds that written bytes get to leave when the socket is closed


class Limits(NamedTuple):
    """The limits of a socket. Sizes are in bytes, durations in seconds.

    Attributes:
        max_message: the size of a message.
        max_frames: the number of frames of a message.
        connections: the number of connections.
        held: the size of all incomplete messages together. Above it, or while the account is over its limit, one of these messages is received
            on, and the other connections are not read.
        handshake: the duration of a handshake.
        message: the time in which a message must arrive; a large one gets the time that it needs at MIN_RATE in addition.
    """

    max_message: int
    max_frames: int
    connections: int
    held: int
    handshake: float
    message: float


@dataclass(eq=False)
class Port:
    """Listens as a socket of the type "PULL" or "PUB".

    Incomplete messages are charged to `account`, which also counts the connections. While the socket is `paused`, no peer is read; events of bytes
    that have been read are still handled.

    Args:
        on_event: called with each peer and event. A WeirError that it raises ends the connection.
        on_lost: called with each peer whose connection has ended.
        on_caught_up: called with each peer that has read all that was sent to it after it was slow.
        clock: returns seconds.
    """

    socket_type: str
    limits: Limits
    drops: Drops
    account: Account
    on_event: "Callable[[Peer, Event], None]"
    on_lost: "Callable[[Peer], None]" = lambda peer: None
    on_caught_up: "Callable[[Peer], None]" = lambda peer: None
    held: int = 0
    paused: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.peers: dict[Peer, None] = {}
        self._held_back: deque[Peer] = deque()  # peers that are not read until the messages of others are complete
        self._server: asyncio.Server | None = None
        self._emptied = asyncio.Event()
        self.account.counters.append(lambda: len(self.peers))

    async def start(self, host: str, port: int, key: str) -> None:
        """Listen. Raises SettingsError naming the setting `key` of the port if the address is in use or invalid."""
        try:
            self._server = await listen(lambda: Peer(self), host, port, backlog=_BACKLOG)
        except OSError as error:
            raise cannot_listen(f"host={host!r}, {key}={port}", error, port) from error

    @property
    def number(self) -> int:
        """The TCP port; 0 before `start` and after `stop`."""
        return 0 if self._server is None or not self._server.sockets else int(self._server.sockets[0].getsockname()[1])

    def pause(self) -> None:
        """Stop reading from all peers."""
        self.paused = True
        for peer in self.peers:
            if not peer.transport.is_closing():
                peer.transport.pause_reading()

    def resume(self) -> None:
        """Read from the peers again. The time limit of an incomplete message begins again."""
        self.paused = False
        for peer in self.peers:
            if not peer.is_held_back:
                self._resume(peer)

    def _resume(self, peer: "Peer") -> None:
        if peer.message_since is not None:
            peer.message_since = self.clock()
        if not (self.paused or peer.has_pending_events or peer.transport.is_closing()):
            peer.transport.resume_reading()

    def hold_back(self, peer: "Peer") -> None:
        """Stop reading from `peer`, which has sent a part of a message, if there are too many such parts. One such peer is always read."""
        if self._has_room or peer.is_held_back:
            return
        if any(each.message_since is not None and each is not peer and not each.is_held_back for each in self.peers):
            peer.is_held_back = True
            self._held_back.append(peer)
            peer.transport.pause_reading()

    def release_held_back(self) -> None:
        """Read again from peers that were held back, as far as there is room now; from one of them if no other peer is being read."""
        while self._held_back and (
            self._has_room or all(peer.message_since is None or peer.is_held_back for peer in self.peers)
        ):
            peer = self._held_back.popleft()
            peer.is_held_back = False
            self._resume(peer)

    @property
    def _has_room(self) -> bool:
        return self.held <= self.limits.held and not self.account.over

    def sweep(self, now: float) -> None:
        """End the connections whose message takes too long to arrive, and those that read their responses too slowly. Call it twice a second."""
        for peer in [peer for peer in self.peers if peer.slow_since is not None]:
            if peer.reads_slowly(now, self.limits.message):
                peer.end(f"has read too slowly for {self.limits.message:g} s")
        for peer in [peer for peer in self.peers if peer.message_since is not None and not peer.is_held_back]:
            within = self.limits.message + peer.held / MIN_RATE
            if not self.paused and peer.message_since is not None and now > peer.message_since + within:
                peer.end(f"a message has not arrived completely within {within:g} s")
        self.release_held_back()  # other frontends may have made room in the account

    def close(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
            self._server.close()

    async def stop(self) -> None:
        """Close the socket and all connections. Written bytes get _CLOSE_TIMEOUT seconds to leave. Idempotent."""
        self.close()
        self._server = None
        for end in ("close", "abort"):
            for peer in list(self.peers):
                getattr(peer.transport, end)()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    while self.peers:
                        self._emptied.clear()
                        await self._emptied.wait()

    def remove(self, peer: "Peer") -> None:
        """Forget a peer whose connection has ended."""
        del self.peers[peer]
        if peer.is_held_back:
            self._held_back.remove(peer)
        self.release_held_back()
        self._emptied.set()


class Peer(asyncio.Protocol):
    """A connection.

    Attributes:
        held: bytes of its incomplete message.
        charged: bytes of unread responses that are charged to the account.
        address: the peer's IP address.
        message_since: when its incomplete message began to arrive; None if there is none.
        topics: its subscriptions, at a PUB socket.
        is_held_back: it is not read until messages of other peers are complete.
        slow_since: since when it has read more slowly than it is written to; None if it has caught up.
        has_pending_events: events of bytes that have been read are left for the next turn of the event loop.
    """

    transport: asyncio.Transport

    def __init__(self, port: Port) -> None:
        self._port = port
        self._parser = ZmtpParser(port.socket_type, port.limits.max_message, port.limits.max_frames)
        self.held = 0
        self.charged = 0
        self._handshake: TimeLimit | None = None
        self.address = ""
        self.message_since: float | None = None
        self.topics: set[bytes] = set()
        self.is_held_back = False
        self.slow_since: float | None = None
        self._sent, self._read_before = 0, 0  # bytes written, and bytes read by the peer before it was slow
        self.has_pending_events = False
        self._events: Iterator[Event] = iter(())  # the events that have not been handled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send greeting and READY, or close the connection if there are too many."""
        self.transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.address = str(name[0]) if name else ""
        port = self._port
        port.peers[self] = None
        if len(port.peers) > port.limits.connections or port.account.exceeded:
            del port.peers[self]
            port.drops("connection", f"{port.limits.connections} are open (max_connections)", self.address)
            self.transport.abort()
            return
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        within, loop = port.limits.handshake, asyncio.get_running_loop()
        too_slow = partial(self.end, f"no handshake within {within:g} s")
        self._handshake = TimeLimit(loop, within, too_slow, port.clock)
        self._handshake.begin()
        self.transport.write(GREETING + ready(port.socket_type))

    def data_received(self, data: bytes) -> None:
        """Parse `data` and handle its events. Bytes that break the protocol end the connection."""
        self._events = chain(self._events, self._parser.feed(data))
        if not self.has_pending_events:
            self._handle_events()

    def _handle_events(self) -> None:
        """Handle some events. If more are left, they are handled in the next turn of the loop, and nothing is read until then."""
        self.has_pending_events = False
        if self.transport.is_closing():
            return
        try:
            count = self._handle_some()
            if count < _EVENTS_PER_TURN:
                self._events = iter(())
                self._count_held()
        except WeirError as error:
            self.end(error.message)
            return
        self._end_handshake()
        if count == _EVENTS_PER_TURN:
            self.has_pending_events = True
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._handle_events)
        elif not (self._port.paused or self.is_held_back or self.transport.is_closing()):
            self.transport.resume_reading()

    def _handle_some(self) -> int:
        """Handle at most _EVENTS_PER_TURN events. Return how many there were, or _EVENTS_PER_TURN if there may be more."""
        count, size, replies = 0, 0, []
        try:
            for event in islice(self._events, _EVENTS_PER_TURN):
                count += 1
                if isinstance(event, ZmtpReply):
                    replies.append(event.data)
                else:
                    self.message_since = None
                    self._port.on_event(self, event)
                    size += sum(map(len, event.frames)) if isinstance(event, Received) else 0
                    if size > _BYTES_PER_TURN:
                        return _EVENTS_PER_TURN
        finally:
            if replies:
                self._reply(b"".join(replies))
        return count

    def _end_handshake(self) -> None:
        if self._handshake is not None and self._parser.ready:
            self._handshake.close()
            self._handshake = None
            if self._port.paused:
                self.transport.pause_reading()

    def _reply(self, data: bytes) -> None:
        if self.slow_since is None:  # a peer that does not read gets no replies, which would pile up
            self.transport.write(data)

    def _count_held(self) -> None:
        before, self.held = self.held, self._parser.held
        self._port.held += self.held - before
        self._port.account.add(self.held - before)
        if not self._parser.unfinished:
            self.message_since = None
        elif self.message_since is None:
            self.message_since = self._port.clock()
        if self.held > before:
            self._port.hold_back(self)
        elif self.held < before:
            self._port.release_held_back()

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send `buffers` in order."""
        self._sent += sum(map(len, buffers))
        self.transport.writelines(buffers)

    @property
    def unread(self) -> int:
        """How many bytes have been written here and not yet sent."""
        return self.transport.get_write_buffer_size()

    def reads_slowly(self, now: float, patience: float) -> bool:
        """Return whether the peer has been slow for more than `patience` seconds, and read less than MIN_READ_RATE in that time."""
        seconds = 0.0 if self.slow_since is None else now - self.slow_since
        return seconds > patience and self._sent - self.unread - self._read_before < MIN_READ_RATE * seconds

    def pause_writing(self) -> None:
        """Note that the peer reads more slowly than it is written to."""
        self.slow_since = self._port.clock()
        self._read_before = self._sent - self.unread

    def resume_writing(self) -> None:
        """Note that the peer has caught up."""
        self.slow_since = None
        self._port.on_caught_up(self)

    def end(self, reason: str) -> None:
        """Close the connection, and count and log why."""
        self._port.drops("connection", reason, self.address)
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection and return what it was charged."""
        if self._handshake is not None:
            self._handshake.close()
        self._port.held -= self.held
        self._port.account.give(self.held)
        self.held, self.message_since = 0, None
        if self in self._port.peers:
            self._port.remove(self)
            self._port.on_lost(self)
