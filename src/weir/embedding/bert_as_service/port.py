"""One of the two listening sockets of the door: accepts connections, speaks ZMTP with them, and keeps them within limits."""

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, cast

from structlog.stdlib import BoundLogger

from weir.embedding.bert_as_service.zmtp import GREETING, Event, Received, ZmtpParser, ZmtpReply, ready
from weir.errors import SettingsError, WeirError
from weir.protocols.account import Account

# What is thrown away is counted and logged, however much of it there is.


INTERVAL = 1.0  # seconds between two lines about the same


class Drops:
    """Counts what was dropped, by kind, here and in `counted`, and logs each kind once a second at most."""

    def __init__(
        self, logger: BoundLogger, counted: Callable[[str, int], None] = lambda kind, times: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._counted = counted
        self.counts: Counter[str] = Counter()
        self._logger = logger
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}  # when, and how many there were

    def __call__(self, kind: str, reason: object, peer: str = "", client: str = "", *, times: int = 1) -> None:
        """Something of this `kind`, one of a few, was dropped so many `times`: it came from the address `peer`, or was asked for by `client`."""
        self.counts[kind] += times
        self._counted(kind, times)
        now = self._clock()
        when, before = self._logged.get(kind, (None, 0))
        if when is not None and now < when + INTERVAL:
            return
        self._logged[kind] = (now, self.counts[kind])
        self._logger.warning(
            "dropped", kind=kind, door="zeromq", peer=peer, client=client, reason=str(reason),
            since_last=self.counts[kind] - before,
        )  # fmt: skip


_BACKLOG = 1024
SLOWEST = 256 << 10  # bytes of a message that must come in a second
SLOWEST_READER = 16 << 10  # bytes that who is written to must read in a second
# Messages and commands of one connection that are heard in one turn of the event loop, and their bytes but for the last one's.
_EVENTS = 16
_EVENT_BYTES = 32 << 10
_CLOSE_TIMEOUT = 2.0  # seconds that what is written gets to leave, at the end


class Limits(NamedTuple):
    """What peers may take. Sizes are in bytes, durations in seconds; `held` is of all messages that have not come whole: when it is
    reached, or the account is over its limit, one of them is read on, and the others wait."""

    max_message: int
    max_frames: int
    connections: int
    held: int
    handshake: float
    message: float  # for a message to come whole; a large one has as much more as it takes at SLOWEST


class Port:
    """Listens as a socket of type `own`. `heard` gets what peers send, `lost` those that went, `has_read` those that have caught up. What has not
    come whole is charged to `account`, and connections count in it.

    While `paused`, nothing is read; what has been read already is still heard.
    """

    def __init__(
        self, own: str, limits: Limits, drops: Drops, account: Account, heard: "Callable[[Peer, Event], None]",
        lost: "Callable[[Peer], None]" = lambda peer: None, has_read: "Callable[[Peer], None]" = lambda peer: None,
    ) -> None:  # fmt: skip
        self.has_read = has_read
        self.own = own
        self.limits = limits
        self.drops = drops
        self.account = account
        self.heard = heard
        self.lost = lost
        self.peers: set[Peer] = set()
        self.held = 0
        self.paused = False
        self._crowded: deque[Peer] = deque()  # peers whose messages wait until others have come whole
        self._server: asyncio.Server | None = None
        self._emptied = asyncio.Event()
        account.counters.append(lambda: len(self.peers))

    async def start(self, host: str, port: int, key: str) -> None:
        """Listen. Raises SettingsError naming `key` if the address is taken or unusable."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Peer(self), host, port, backlog=_BACKLOG)
        except socket.gaierror as error:
            raise SettingsError(f"host={host!r}, {key}={port}: cannot listen there: {error.strerror}") from error
        except OSError as error:
            text = os.strerror(error.errno) if error.errno else error
            raise SettingsError(f"host={host!r}, {key}={port}: cannot listen there: {text}") from error

    @property
    def number(self) -> int:
        """The TCP port; 0 before the start and after the stop."""
        return 0 if self._server is None or not self._server.sockets else int(self._server.sockets[0].getsockname()[1])

    def pause(self) -> None:
        """Read nothing more, from nobody."""
        self.paused = True
        for peer in self.peers:
            if not peer.transport.is_closing():
                peer.transport.pause_reading()

    def resume(self) -> None:
        """Read again. A message that began to come before has its time from now on."""
        self.paused = False
        for peer in self.peers:
            if not peer.waits:
                self._resume(peer)

    def _resume(self, peer: "Peer") -> None:
        if peer.since is not None:
            peer.since = time.monotonic()
        if not (self.paused or peer.hears or peer.transport.is_closing()):
            peer.transport.resume_reading()

    def crowd(self, peer: "Peer") -> None:
        """A part of a message has come from `peer`: have it wait if there are too many such parts, unless all others wait."""
        if self._has_room or peer.waits:
            return
        if any(other.since is not None and other is not peer and not other.waits for other in self.peers):
            peer.waits = True
            self._crowded.append(peer)
            peer.transport.pause_reading()

    def uncrowd(self) -> None:
        """A message has come whole, or will never: let those go on that waited for that, one at least."""
        while self._crowded and (self._has_room or all(peer.since is None or peer.waits for peer in self.peers)):
            peer = self._crowded.popleft()
            peer.waits = False
            self._resume(peer)

    @property
    def _has_room(self) -> bool:
        return self.held <= self.limits.held and not self.account.over

    def sweep(self, now: float) -> None:
        """End the connections whose message has been under way for too long, and those that hardly read what they are sent."""
        for peer in [peer for peer in self.peers if peer.clogged is not None]:
            if peer.reads_slowly(now, self.limits.message):
                peer.end(f"has hardly read anything for {self.limits.message:g} s")
        for peer in [peer for peer in self.peers if peer.since is not None and not peer.waits]:
            within = self.limits.message + peer.held / SLOWEST
            if not self.paused and peer.since is not None and now > peer.since + within:
                peer.end(f"a message that has not come whole within {within:g} s")
        self.uncrowd()  # others may have made room in the account

    def close(self) -> None:
        """Accept nothing more."""
        if self._server is not None:
            self._server.close()

    async def stop(self) -> None:
        """Close everything. What has been written gets a moment to leave. Idempotent."""
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

    def gone(self, peer: "Peer") -> None:
        """A connection has ended."""
        self.peers.discard(peer)
        if peer.waits:
            self._crowded.remove(peer)
        self.uncrowd()
        self._emptied.set()


class Peer(asyncio.Protocol):
    """A connection."""

    transport: asyncio.Transport

    def __init__(self, port: Port) -> None:
        self._port = port
        self._parser = ZmtpParser(port.own, port.limits.max_message, port.limits.max_frames)
        self.held = 0  # bytes of a message that has not come whole
        self.charged = 0  # bytes of answers that it has not read, as they are in the account
        self._handshake: asyncio.TimerHandle | None = None
        self.address = ""
        self.since: float | None = None  # when the message under way began to come
        self.topics: set[bytes] = set()  # what it listens to, at the port that publishes
        self.waits = False  # it is not read from until the messages of others have come whole
        self.clogged: float | None = None  # since when it reads more slowly than it is written to
        self._sent, self._read_before = 0, 0  # bytes
        self.hears = False  # more has come than is heard in one turn of the loop
        self._events: Iterator[Event] = iter(())  # what has come and was not heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, or refuse a connection too many."""
        self.transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.address = str(name[0]) if name else ""
        port = self._port
        if len(port.peers) >= port.limits.connections or port.account.full:
            port.drops("connection", f"{port.limits.connections} are open (max_connections)", self.address)
            self.transport.abort()
            return
        port.peers.add(self)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._handshake = asyncio.get_running_loop().call_later(
            port.limits.handshake, self.end, f"no handshake within {port.limits.handshake:g} s"
        )
        self.transport.write(GREETING + ready(port.own))

    def data_received(self, data: bytes) -> None:
        """Read what came; end the connection if it is nothing that may come here."""
        self._events = chain(self._events, self._parser.feed(data))
        if not self.hears:
            self._hear()

    def _hear(self) -> None:
        """Hear some of what has come; what is left is heard in the next turn of the loop, and until then nothing is read."""
        self.hears = False
        if self.transport.is_closing():
            return
        try:
            count = self._hear_some()
            if count < _EVENTS:
                self._events = iter(())
                self._count_held()
        except WeirError as error:
            self.end(error.message)
            return
        self._end_handshake()
        if count == _EVENTS:
            self.hears = True
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._hear)
        elif not (self._port.paused or self.waits or self.transport.is_closing()):
            self.transport.resume_reading()

    def _hear_some(self) -> int:
        """Hear at most _EVENTS; return how many there were, _EVENTS where there may be more."""
        count, size, replies = 0, 0, []
        try:
            for event in islice(self._events, _EVENTS):
                count += 1
                if isinstance(event, ZmtpReply):
                    replies.append(event.data)
                else:
                    self.since = None
                    self._port.heard(self, event)
                    size += sum(map(len, event.frames)) if isinstance(event, Received) else 0
                    if size > _EVENT_BYTES:
                        return _EVENTS
        finally:
            if replies:
                self._reply(b"".join(replies))
        return count

    def _end_handshake(self) -> None:
        if self._handshake is not None and self._parser.ready:
            self._handshake.cancel()
            self._handshake = None
            if self._port.paused:
                self.transport.pause_reading()

    def _reply(self, data: bytes) -> None:
        if self.clogged is None:  # who sends without reading gets no replies: they would pile up
            self.transport.write(data)

    def _count_held(self) -> None:
        before, self.held = self.held, self._parser.held
        self._port.held += self.held - before
        self._port.account.add(self.held - before)
        if not self._parser.unfinished:
            self.since = None
        elif self.since is None:
            self.since = time.monotonic()
        if self.held > before:
            self._port.crowd(self)
        elif self.held < before:
            self._port.uncrowd()

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send `buffers`, one after the other."""
        self._sent += sum(map(len, buffers))
        self.transport.writelines(buffers)

    @property
    def unread(self) -> int:
        """Bytes that have been written and have not left."""
        return self.transport.get_write_buffer_size()

    def reads_slowly(self, now: float, patience: float) -> bool:
        """Tell whether it has read less than SLOWEST_READER bytes a second since it was found to read slowly, `patience` seconds ago."""
        since = now if self.clogged is None else now - self.clogged
        return since > patience and self._sent - self.unread - self._read_before < SLOWEST_READER * since

    def pause_writing(self) -> None:
        """It reads slowly."""
        self.clogged = time.monotonic()
        self._read_before = self._sent - self.unread

    def resume_writing(self) -> None:
        """It has caught up."""
        self.clogged = None
        self._port.has_read(self)

    def end(self, reason: str) -> None:
        """End the connection, and say why."""
        self._port.drops("connection", reason, self.address)
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget it."""
        if self._handshake is not None:
            self._handshake.cancel()
        self._port.held -= self.held
        self._port.account.give(self.held)
        self.held, self.since = 0, None
        if self in self._port.peers:
            self._port.gone(self)
            self._port.lost(self)
