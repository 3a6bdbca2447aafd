"""What all connections of a server share: settings, the cache of heads, the heads of answers, the counts of bytes."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from weir.errors import WeirError
from weir.frontends.http.access_log import HttpLog
from weir.frontends.http.fast.handover import HandOver
from weir.frontends.http.fast.plan import (
    END_OF_HEAD,
    Head,
    HeadMemo,
    HeadReader,
    RouteHandler,
    RoutePlan,
    Tally,
    make_plan,
)
from weir.messages import Observer
from weir.protocols.access import Access
from weir.protocols.account import Account, Claim
from weir.protocols.native import FRONTEND
from weir.protocols.settings import HttpSettings
from weir.workers.executor import Block

if TYPE_CHECKING:
    from weir.serving.service import Service


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Heads:
    """The heads of answers, with the Date of this second."""

    def __init__(self) -> None:
        self.date = b""
        # Content type -> everything of a 200 answer's head up to the value of Content-Length, which is last.
        self.plain: dict[str, bytes] = {}

    def tick(self, wall_time: float) -> None:
        """Take `wall_time`, in seconds since 1970, as the date."""
        self.date = formatdate(wall_time, usegmt=True).encode()
        self.plain.clear()

    def plain_head(self, content_type: str) -> bytes:
        """Return (and keep in `plain`) the head of a 200 answer up to the value of Content-Length."""
        head = b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-type: %b\r\ncontent-length: " % (
            self.date,
            content_type.encode("latin-1"),
        )
        self.plain[content_type] = head
        return head

    def head(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int, *, close: bool) -> bytes:
        """Return the complete head of an answer with a body of `length` bytes."""
        lines = [_STATUS_LINES[status], b"date: %b\r\n" % self.date]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"content-length: %d\r\n%b\r\n" % (length, b"connection: close\r\n" if close else b""))
        return b"".join(lines)


READ_BYTES = 64 << 10

# While memory is short, slow senders and readers get so many times less time.
_HASTE = 10

# Bodies that are moved out of an arena for one that needs a place: so much work at most.
_MOST_MOVED = 64


class Swept(Protocol):
    """A connection, as the sweep and the end of the server see it."""

    def sweep(self, now: float) -> None:
        """Close it if it has been idle or slow for too long."""

    def drain(self) -> None:
        """The server is about to stop: answer `Connection: close` from now on."""

    def stop(self) -> None:
        """Close it, whatever it is doing; what has been written is still sent."""

    def abort(self) -> None:
        """Close it at once."""

    @property
    def busy(self) -> bool:
        """Whether a request that was accepted has no answer yet."""


class Receiver(Protocol):
    """A connection that receives a large body into shared memory."""

    @property
    def receives_for(self) -> "Service":
        """Whose arena it is."""

    @property
    def arrived(self) -> int:
        """How many bytes have come."""

    def move(self) -> bool:
        """Go on in ordinary memory; False if there is no room."""


class HttpShared:
    """What all connections of a server share; one event loop, one thread."""

    def __init__(
        self, route_handlers: Sequence[RouteHandler], settings: HttpSettings, observers: Sequence[Observer],
        hand_over: HandOver, *, clock: Callable[[], float], access: Access | None = None, account: Account | None = None,
        log: HttpLog | None = None,
    ) -> None:  # fmt: skip
        self.route_handlers = tuple(route_handlers)  # the first one answers what belongs to none
        self.settings = settings
        self._access = access or Access()
        self.observers = tuple(observers)
        self.hand_over = hand_over
        # get_buffer and buffer_updated run back to back, so one buffer serves all connections.
        self._buffer = bytearray(READ_BYTES)
        self.view = memoryview(self._buffer)
        self.heads = Heads()
        self.connections: set[Swept] = set()
        self.account = account or Account(settings)
        self.log = log
        self.account.counters.append(self.connections.__len__)
        self.patience = settings.body_timeout  # seconds that a body, or the reading of an answer, may take
        self.draining = False
        self.ended = asyncio.Event()  # while draining: a request had its end, or a connection did
        self.tick = 0.0  # the instant of the last sweep
        self.receiving: set[Receiver] = set()  # connections that receive a body into shared memory
        self._clock = clock
        self._memo: HeadMemo[RoutePlan] = HeadMemo()
        self.remembered = self._memo.find
        self._reader = HeadReader()
        self._tallies: dict[str, Tally] = {}
        self.on_second()

    def on_second(self) -> None:
        """Move the date and the sweep's clock on; tell the observers what was transferred."""
        self.tick = self._clock()
        self.patience = self.settings.body_timeout / (_HASTE if self.account.pressed() else 1)
        self.heads.tick(time.time())
        self.hand_over.on_second(self.heads.date)
        self.tell_observers()

    def cut_head(self, size: int) -> tuple[bytes, memoryview]:
        """Return the head that the first `size` bytes of the buffer begin with, and what follows it; no head: b""."""
        end = self._buffer.find(END_OF_HEAD, 0, size)
        return (bytes(self.view[:end]), self.view[end + len(END_OF_HEAD) : size]) if end > 0 else (b"", self.view[:0])

    def plan(self, head: bytes) -> RoutePlan:
        """Return what `head` means. Raises InvalidRequest if it means nothing certain."""
        plan = self.remembered(head)
        if plan is None:
            plan = self._make_plan(self._reader.read(head))
            plan.head = head
            if plan.memorable and not self.draining:
                self._memo.offer(head, plan)
        return plan

    def handler_of(self, target: bytes) -> RouteHandler:
        """Return how a request to `target` is refused whose head means nothing, or is not there yet."""
        return next(
            (handler for handler in self.route_handlers[1:] if target.startswith(handler.prefix)),
            self.route_handlers[0],
        )

    def _make_plan(self, head: Head) -> RoutePlan:
        plan = make_plan(head, self.route_handlers, self.settings, self._access)
        if plan.service is not None:
            plan.tally = self._tallies.setdefault(plan.service.label, Tally(plan.service))
            plan.tally.service = plan.service  # which may have taken the place of another
        return plan

    def routes_changed(self) -> None:
        """Forget what heads mean."""
        self._memo.clear()

    def drain(self) -> None:
        """Say `Connection: close` and refuse new requests from now on."""
        self.draining = True
        self._memo.clear()  # what is remembered is not asked whether the server drains
        for connection in list(self.connections):
            connection.drain()

    async def emptied(self) -> None:
        """Return when no connection is left."""
        while self.connections:
            self.ended.clear()
            await self.ended.wait()

    def block(self, service: "Service", size_bytes: int) -> Block | None:
        """Return a place in the arena of `service`, if need be that of a body of which hardly anything has come: that one goes
        on in ordinary memory. None where the arena is full of what has come whole."""
        block = service.reserve(size_bytes)
        if block is None and self.receiving and size_bytes <= service.arena_bytes:
            others = [each for each in self.receiving if each.receives_for is service]
            for each in sorted(others, key=lambda each: each.arrived)[:_MOST_MOVED]:
                if not each.move():
                    break
                block = service.reserve(size_bytes)
                if block is not None:
                    break
        return block

    def refused(self, service: "Service | None", error: WeirError) -> None:
        """Tell the observers of a request that was refused before it reached a service."""
        if service is not None:
            service.tell_refused(FRONTEND, error)
            return
        for observer in self.observers:
            observer.refused("", FRONTEND, error)

    def tell_observers(self) -> None:
        """Tell the observers the bytes transferred since the last time."""
        for tally in self._tallies.values():
            if tally.received or tally.sent:
                for observer in tally.service.observers:
                    observer.transferred(tally.service.label, FRONTEND, tally.received, tally.sent)
                tally.received = tally.sent = 0


# Where a large body is received: in shared memory, where it is not copied again, or, without that, in ordinary memory.
#
# A client that announces much and sends little must not keep others out. So ordinary memory is taken as the bytes come, and
# charged to the server's account; and a body in shared memory that has hardly begun to arrive can be moved to ordinary
# memory, for one that needs its place.


# Ordinary memory is taken in pieces: of this many bytes at first, then of as many as have arrived.
_FIRST_PIECE_BYTES = 64 << 10


class Place(Protocol):
    """Memory for one body, which fills up."""

    @property
    def arrived(self) -> int:
        """How many bytes of the body have come."""

    @property
    def claim(self) -> Claim | None:
        """What the body holds of the account; None where it is not charged."""

    def room(self) -> memoryview:
        """Return where the next bytes go."""

    def received(self, size: int) -> bool:
        """Note that so many bytes have come there; tell whether the body is complete. Raises Overloaded where there is no room for
        more."""

    def payload(self) -> Any:
        """Return the complete body as the payload of a request; the place, and the claim, are the request's then."""

    def give_up(self) -> None:
        """Free it: the body will not be completed."""


class BlockPlace:
    """A block of the arena; the body begins `lead` bytes after it. The arena has its own bound: it is not charged."""

    __slots__ = ("_block", "_view", "arrived")

    claim = None

    def __init__(self, block: Block, size: int, lead: int = 0) -> None:
        self._block = block
        self._view = block.view[lead : lead + size]
        self.arrived = 0

    def room(self) -> memoryview:
        """Return the part that has not arrived."""
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
        """Return ordinary memory with what has come, and free the block. Raises Overloaded; nothing has changed then."""
        buffer = Buffer(len(self._view), account)
        with self._view[: self.arrived] as come:
            fill(buffer, come)
        self.give_up()
        return buffer

    def give_up(self) -> None:
        """Release the block."""
        self._view.release()
        self._block.release()


class Buffer:
    """Ordinary memory, as much as has arrived or twice that. Raises Overloaded, also when more arrives, where the account has no room."""

    __slots__ = ("_at", "_pieces", "_size", "arrived", "claim")

    def __init__(self, size: int, account: Account) -> None:
        self.arrived = 0
        self.claim = account.claim()
        self._size = size
        self._pieces: list[bytearray] = []
        self._at = 0  # where the last piece goes on
        self._grow()

    def _grow(self) -> None:
        size = min(max(_FIRST_PIECE_BYTES, self.arrived), self._size - self.arrived)
        self.claim.take(size)
        self._pieces.append(bytearray(size))
        self._at = 0

    def room(self) -> memoryview:
        """Return the rest of the last piece."""
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
        """Return the bytes."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def give_up(self) -> None:
        """Give the bytes back to the account."""
        self._pieces.clear()
        self.claim.close()


def fill(place: Place, data: memoryview) -> bool:
    """Put `data`, which has come elsewhere, into `place`; tell whether the body is complete. Raises what Place.received raises."""
    complete = False
    while len(data):
        room = place.room()
        size = min(len(room), len(data))
        room[:size] = data[:size]
        room.release()
        complete = place.received(size)
        data = data[size:]
    return complete
