"""The state that all connections of a server share: settings, the cache of request heads, the heads of responses, byte counters, and memory for large bodies."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import formatdate
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weir.errors import WeirError
from weir.frontends.http.access_log import HttpLog
from weir.frontends.http.fast.plan import END_OF_HEAD, HeadReader, HttpHead, RouteHandler, RoutePlan, Tally, make_plan
from weir.messages import Block, Observer
from weir.protocols import HttpSettings
from weir.protocols.access import Access
from weir.protocols.account import Account, Claim
from weir.protocols.native import FRONTEND
from weir.protocols.offloading import HeadMemo
from weir.wire.status import phrase

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle


_LATE = 2.0  # seconds after the last sweep
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@lru_cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {phrase(status)}\r\n".encode()


class Heads:
    """Makes the heads of responses, with the Date of this second."""

    def __init__(self) -> None:
        self.date = b""
        # By content type: the head of a response with status 200, up to the value of Content-Length, which comes last.
        self.plain: dict[str, bytes] = {}
        self._alone: dict[bytes, bytes] = {}  # the same by the header's value

    def tick(self, wall_time: float) -> None:
        """Set the date to `wall_time`, in seconds since 1970."""
        self.date = formatdate(wall_time, usegmt=True).encode()
        self.plain.clear()
        self._alone.clear()

    def plain_head(self, content_type: str) -> bytes:
        """Return, and keep in `plain`, the head of a response with status 200 up to the value of Content-Length."""
        head = b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-type: %b\r\ncontent-length: " % (
            self.date,
            content_type.encode("latin-1"),
        )
        self.plain[content_type] = head
        return head

    def head(self, status: int, headers: Sequence[tuple[bytes, bytes]], length: int, *, close: bool) -> bytes:
        """Return the complete head of a response with a body of `length` bytes."""
        if status == 200 and len(headers) == 1 and headers[0][0] == b"content-type" and not close:
            content_type = headers[0][1]
            known = self._alone.get(content_type)
            if known is None:
                known = self._alone[content_type] = self.plain_head(content_type.decode("latin-1"))
            return b"%b%d\r\n\r\n" % (known, length)
        lines = [_status_line(status), b"date: %b\r\n" % self.date]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"content-length: %d\r\n%b\r\n" % (length, b"connection: close\r\n" if close else b""))
        return b"".join(lines)


READ_BYTES = 64 << 10

# When the account is full, slow clients get only this fraction of `body_timeout` to send or to read.
_PATIENCE_DIVISOR = 10

# At most this many bodies are moved out of the arena to make room for one.
_MOST_MOVED = 64


class OpenConnection(Protocol):
    """A connection of any kind, as the server checks and closes it."""

    def sweep(self, now: float) -> None:
        """Close the connection if it has been idle or slow for too long."""

    def drain(self) -> None:
        """The server is about to stop: send `Connection: close` with every response from now on."""

    def stop(self) -> None:
        """Close the connection whatever it is doing. What has been written is still sent."""

    def abort(self) -> None:
        """Close the connection at once."""

    @property
    def busy(self) -> bool:
        """Whether a request that was accepted has no response yet."""


class ConnectionTaker(Protocol):
    """Goes on with connections that the fast path leaves: see HandOver."""

    def load(self) -> None:
        """Load what is needed. Called once, before the first connection."""

    def on_second(self, date: bytes) -> None:
        """A second has begun; `date` is the value of its Date header."""

    def go_on(self, shared: "HttpShared", transport: asyncio.Transport, replay: bytes) -> None:
        """Take over a connection. `replay` is what has been read from it and has no response yet."""


class Receiver(Protocol):
    """A connection that receives a large body into shared memory."""

    @property
    def receives_for(self) -> "ModelHandle":
        """The service whose arena holds the body."""

    @property
    def arrived(self) -> int:
        """The number of bytes of the body that have arrived."""

    def move(self) -> bool:
        """Move the body to ordinary memory and receive the rest there. Return False, with nothing changed, if that has no room."""


class Clocks(NamedTuple):
    """Tells a server the time: `now` returns seconds, by which it waits, and `time_of_day` seconds since 1970."""

    now: Callable[[], float] = time.monotonic
    time_of_day: Callable[[], float] = time.time


REAL_TIME = Clocks()


class HttpShared:
    """The state that all connections of a server share. It belongs to one event loop.

    `route_handlers` answer the requests of the fast path; the first one also refuses requests that belong to no handler.
    """

    def __init__(
        self, route_handlers: Sequence[RouteHandler], settings: HttpSettings, observers: Sequence[Observer],
        hand_over: ConnectionTaker, *, clocks: Clocks, access: Access | None = None, account: Account | None = None, log: HttpLog | None = None,
    ) -> None:  # fmt: skip
        self.route_handlers = tuple(route_handlers)
        self.settings = settings
        self._access = access or Access()
        self.observers = tuple(observers)
        self.hand_over = hand_over
        # The loop calls buffer_updated directly after get_buffer, so one buffer serves all connections.
        self._buffer = bytearray(READ_BYTES)
        self.view = memoryview(self._buffer)
        self.heads = Heads()
        self.account = account or Account(settings)
        self.connections: set[OpenConnection] = self.account.connection_set()
        self.log = log
        self.account.counters.append(self.connections.__len__)
        self.patience = settings.body_timeout  # seconds that a client may take to send a body or to read a response
        self.draining = False
        self.ended = asyncio.Event()  # while draining: set when a request or a connection has ended
        # The time of the last sweep by a clock that stands still with the server, so that clients are not blamed for what it could not read meanwhile.
        self.tick = self._swept = clocks.now()
        self.receiving: set[Receiver] = set()  # connections that receive a body into shared memory
        self._clocks = clocks
        self._memo: HeadMemo[RoutePlan] = HeadMemo()
        self.remembered = self._memo.find
        self._reader = HeadReader()
        self._tallies: dict[str, Tally] = {}
        self.on_second()

    def on_second(self) -> bool:
        """Update the date, the time of the sweep and `patience`. Report the transferred bytes to the observers.

        Return whether the server has stood still: stopped, paused with its machine, or starved."""
        now = self._clocks.now()
        passed, self._swept = now - self._swept, now
        self.tick += min(passed, _LATE)
        self.patience = self.settings.body_timeout / (_PATIENCE_DIVISOR if self.account.was_full() else 1)
        self.heads.tick(self._clocks.time_of_day())
        self.tell_observers()
        self.hand_over.on_second(self.heads.date)
        return passed > _LATE

    def cut_head(self, size: int) -> tuple[bytes, memoryview]:
        """Split the first `size` bytes of the buffer: return the head at their beginning and the bytes after it. The head is b"" if it is incomplete."""
        end = self._buffer.find(END_OF_HEAD, 0, size)
        return (bytes(self.view[:end]), self.view[end + len(END_OF_HEAD) : size]) if end > 0 else (b"", self.view[:0])

    def plan(self, head: bytes) -> RoutePlan:
        """Return the plan for a request with this `head`. Raises InvalidRequest if the head is malformed or ambiguous."""
        plan = self.remembered(head)
        if plan is None:
            plan = self._make_plan(self._reader.read(head))
            plan.head_bytes = head
            if plan.memorable and not self.draining:
                self._memo.offer(head, plan)
        return plan

    def handler_of(self, target: bytes) -> RouteHandler:
        """Return the handler that writes errors for `target`, for a request whose head is malformed or incomplete: that with the longest prefix, or the first."""
        return max(self.route_handlers, key=lambda handler: _matched(target, handler.prefix))

    def _make_plan(self, head: HttpHead) -> RoutePlan:
        plan = make_plan(head, self.route_handlers, self.settings, self._access)
        if plan.service is not None:
            plan.tally = self._tallies.setdefault(plan.service.facts.label, Tally(plan.service))
            plan.tally.service = plan.service  # a service may have replaced another of the same label
        return plan

    def routes_changed(self) -> None:
        """Drop all cached plans."""
        self._memo.clear()

    def drain(self) -> None:
        """Refuse new requests from now on, and send `Connection: close` with every response."""
        self.draining = True
        self._memo.clear()  # a request with a cached plan skips the check whether the server drains
        for connection in list(self.connections):
            connection.drain()

    async def emptied(self) -> None:
        """Return when no connection is left."""
        while self.connections:
            self.ended.clear()
            await self.ended.wait()

    def block(self, service: "ModelHandle", size_bytes: int) -> Block | None:
        """Return a place in the arena of `service`, or None if the arena is full.

        If necessary, bodies that have hardly begun to arrive are moved to ordinary memory to make room.
        """
        block = service.reserve(size_bytes)
        if block is None and self.receiving and size_bytes <= service.control.arena_bytes:
            for _ in self.moved_out(service):
                block = service.reserve(size_bytes)
                if block is not None:
                    break
        return block

    def moved_out(self, service: "ModelHandle") -> Iterator[None]:
        """Move bodies that have hardly begun to arrive out of the arena of `service`, one with each step, as long as there is ordinary memory."""
        receiving = [each for each in self.receiving if each.receives_for is service]
        for each in sorted(receiving, key=lambda each: each.arrived)[:_MOST_MOVED]:
            if not each.move():
                return
            yield

    def refused(self, service: "ModelHandle | None", error: WeirError) -> None:
        """Notify the observers of the error that ends a request, unless they know it. `service` is the one that the request names, if known."""
        if service is None:
            for observer in self.observers:
                observer.refused("", FRONTEND, error)
        else:
            service.notify(FRONTEND, error)

    def tell_observers(self) -> None:
        """Notify the observers of the bytes transferred since the last call."""
        for tally in self._tallies.values():
            if tally.received or tally.sent:
                tally.service.transferred(FRONTEND, tally.received, tally.sent)
                tally.received = tally.sent = 0


# A large body is received into shared memory, where it is not copied again, or else into ordinary memory.
#
# A client that announces a large body and sends little must not keep others out. So ordinary memory is allocated as the bytes arrive, and is charged to
# the server's account. And a body in shared memory that has hardly begun to arrive can be moved to ordinary memory, to make room for another body.


# Ordinary memory is allocated in pieces: the first has this many bytes, each further one as many as have arrived before it.
_FIRST_PIECE_BYTES = 64 << 10


class Place(Protocol):
    """Memory for one body that is arriving."""

    @property
    def arrived(self) -> int:
        """The number of bytes of the body that have arrived."""

    @property
    def claim(self) -> Claim | None:
        """The bytes that are charged for the body; None if it is not charged."""

    def room(self) -> memoryview:
        """Return where the next bytes go."""

    def received(self, size: int) -> bool:
        """Note that `size` bytes have arrived in `room`. Return whether the body is complete. Raises Overloaded if there is no memory for more."""

    def payload(self) -> Any:
        """Return the complete body as the payload of a request. The request then owns the memory and the claim."""

    def give_up(self) -> None:
        """Free the memory: the rest of the body will not arrive."""


class BlockPlace:
    """A block of the arena. The body begins `lead` bytes after the block's start. It is not charged, because the arena has a limit of its own."""

    __slots__ = ("_block", "_view", "arrived")

    claim = None

    def __init__(self, block: Block, size: int, lead: int = 0) -> None:
        self._block = block
        self._view = block.view[lead : lead + size]
        self.arrived = 0

    def room(self) -> memoryview:
        """See Place."""
        return self._view[self.arrived :]

    def received(self, size: int) -> bool:
        """See Place."""
        self.arrived += size
        return self.arrived == len(self._view)

    def payload(self) -> Block:
        """Return the block itself."""
        self._view.release()
        return self._block

    def moved(self, account: Account) -> "Buffer":
        """Copy what has arrived to ordinary memory, free the block and return that memory. Raises Overloaded; then nothing has changed."""
        buffer = Buffer(len(self._view), account)
        try:
            with self._view[: self.arrived] as come:
                fill(buffer, come)
        except WeirError:
            buffer.give_up()
            raise
        self.give_up()
        return buffer

    def give_up(self) -> None:
        """Release the block."""
        self._view.release()
        self._block.release()


class Buffer:
    """Ordinary memory for a body of `size` bytes, allocated as the bytes arrive. Raises Overloaded, now or later, if the account has no room."""

    __slots__ = ("_at", "_pieces", "_size", "arrived", "claim")

    def __init__(self, size: int, account: Account) -> None:
        self.arrived = 0
        self.claim = account.claim()
        self._size = size
        self._pieces: list[bytearray] = []
        self._at = 0  # bytes that have arrived in the last piece
        self._grow()

    def _grow(self) -> None:
        size = min(max(_FIRST_PIECE_BYTES, self.arrived), self._size - self.arrived)
        self.claim.take(size)
        self._pieces.append(bytearray(size))
        self._at = 0

    def room(self) -> memoryview:
        """See Place."""
        return memoryview(self._pieces[-1])[self._at :]

    def received(self, size: int) -> bool:
        """See Place."""
        self.arrived += size
        self._at += size
        if self.arrived == self._size:
            return True
        if self._at == len(self._pieces[-1]):
            self._grow()
        return False

    def payload(self) -> bytes:
        """See Place."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def give_up(self) -> None:
        """See Place."""
        self._pieces.clear()
        self.claim.close()


def fill(place: Place, data: memoryview) -> bool:
    """Copy `data` into `place`. Return whether the body is complete. Raises what Place.received raises."""
    complete = False
    while len(data):
        room = place.room()
        size = min(len(room), len(data))
        room[:size] = data[:size]
        room.release()
        complete = place.received(size)
        data = data[size:]
    return complete


def _matched(target: bytes, prefix: bytes | tuple[bytes, ...]) -> int:
    """Return how many bytes the longest of the prefixes that `target` begins with has."""
    prefixes = (prefix,) if isinstance(prefix, bytes) else prefix
    return max((len(each) for each in prefixes if target.startswith(each)), default=0)
