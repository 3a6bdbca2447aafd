"""The part of a connection that writes responses and closes the connection. connection.py has the part that reads."""

import asyncio
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, cast

from weir.errors import DeadlineExceeded, Draining, WeirError
from weir.protocols.account import Pace
from weir.protocols.response import Headers, HttpResponse
from weir.workers.executor import Block

if TYPE_CHECKING:
    from weir.frontends.http.fast.plan import HotRequest, RouteHandler, RoutePlan
    from weir.frontends.http.fast.shared import HttpShared, Place
    from weir.protocols.account import Claim


LINGER = 2.0  # seconds; see LingeringClose


class LingeringClose(asyncio.BufferedProtocol):
    """Closes a connection whose client still sends: discards what arrives until the client closes, at most for LINGER seconds.

    Closing at once would reset the connection, and the client might lose the response (RFC 9112, section 9.6).
    """

    busy = False

    def __init__(self, shared: "HttpShared", transport: asyncio.Transport) -> None:
        self._shared = shared
        self._transport = transport
        self._since = shared.tick

    def start(self) -> None:
        """Take the connection over. The response has been written."""
        self._shared.connections.add(self)
        self._transport.set_protocol(self)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that all connections share."""
        return self._shared.view

    def buffer_updated(self, nbytes: int) -> None:
        """Discard what has arrived."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._shared.connections.discard(self)
        self._shared.ended.set()

    def sweep(self, now: float) -> None:
        """Close the connection after LINGER seconds."""
        if now - self._since > LINGER:
            self._transport.abort()

    def drain(self) -> None:
        """Nothing to do: it is closing."""

    def stop(self) -> None:
        """Close the connection."""
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()


class Phase(IntEnum):
    """What a connection is doing."""

    IDLE = 0  # waits for a request
    HEAD = 1  # receives a head
    BODY = 2  # receives a small body
    LARGE = 3  # receives a large body
    SKIP = 4  # discards the body of a refused request
    BUSY = 5  # has a request in flight
    OVER = 6  # closing, closed or handed over


IDLE, HEAD, BODY, LARGE, SKIP, BUSY, OVER = Phase

_BEGINNING = 64  # bytes of a request that contain its method and the prefix of its path


class ResponseWriter(asyncio.BufferedProtocol):
    """The part of a connection that writes."""

    transport: asyncio.Transport
    _plan: "RoutePlan"

    def __init__(self, shared: "HttpShared") -> None:
        self.shared = shared
        self.phase = IDLE
        self._since = shared.tick  # when the phase began, or the client stopped reading
        self._pending = bytearray()  # arrived, but not yet parsed
        self._request: HotRequest | None = None
        self._counted = 0  # bytes of `_pending` that are charged
        self._unread = 0  # bytes written that the client has not read
        self._place: Place | None = None  # memory for a large body that is arriving
        self._claim: Claim | None = None  # the bytes of the request in flight
        self._pace: Pace | None = None  # of the body that arrives
        self._pace_since = 0.0  # `_since` of that body
        self._block: Block | None = None  # a response that the kernel has not taken completely
        self._writing_paused = False

    # Calls of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: the client has connected."""
        self.transport = cast(asyncio.Transport, transport)
        self.shared.connections.add(self)

    @cached_property
    def peer(self) -> str | None:
        """The caller's address; None for a Unix socket."""
        host = self.transport.get_extra_info("peername")
        return host[0] if isinstance(host, tuple) else None

    def eof_received(self) -> None:
        """The client sends no more, which counts as having left. The transport closes itself."""
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._leave()
        self._forget_unread()
        self._release_block()
        self.shared.connections.discard(self)
        self.shared.ended.set()

    def pause_writing(self) -> None:
        """The client does not read its responses: begin no further request."""
        self._writing_paused = True
        self._since = self.shared.tick
        self._unread = self.transport.get_write_buffer_size()
        self.shared.account.add(self._unread)

    def resume_writing(self) -> None:
        """The client has read its responses."""
        self._writing_paused = False
        self._forget_unread()
        self._since = self.shared.tick
        if self._block is not None:
            self._release_block()
            self.transport.set_write_buffer_limits()
        self._advance()

    def _forget_unread(self) -> None:
        self.shared.account.give(self._unread)
        self._unread = 0

    def _advance(self) -> None:
        """Process the bytes that have arrived."""
        raise NotImplementedError  # implemented in connection.py

    # Responses.

    def request_ended(self) -> None:
        """The response to the request in flight has been written, and the connection stays open."""
        self._request = None
        if self._claim is not None:
            self._release_claim()
        self.phase = IDLE
        self._since = self.shared.tick
        if self._pending:
            self._advance()

    def answer(self, plan: "RoutePlan", answer: HttpResponse) -> None:
        """Write `answer` to the request in flight. Its `plan` says whether the connection stays open."""
        if self.phase is OVER:  # the client has left while the response was being compressed
            return
        close = self.shared.draining or not plan.keep_alive
        head = self.shared.heads.head(answer.status, answer.headers, len(answer.body), close=close)
        self.transport.write(head + answer.body)
        self._answered(close)

    def answer_block(self, plan: "RoutePlan", headers: Headers, block: Block) -> None:
        """Write the response whose body is in `block`. Release the block when the kernel has taken all of it."""
        close = self.shared.draining or not plan.keep_alive
        head = self.shared.heads.head(200, headers, len(block.view), close=close)
        # uvloop does not copy what it cannot send at once. With a limit of 0 it sends at once, and calls `resume_writing` when all is sent.
        self.transport.set_write_buffer_limits(0)
        self._block = block
        self.transport.writelines((head, block.view))
        if not self.transport.get_write_buffer_size():
            self._release_block()
            self.transport.set_write_buffer_limits()
        self._answered(close)

    def answer_parts(self, plan: "RoutePlan", headers: Headers, parts: Sequence[bytes | memoryview]) -> None:
        """Write the response whose body is `parts`, without copying them. They are freed when the kernel has taken them."""
        close = self.shared.draining or not plan.keep_alive
        head = self.shared.heads.head(200, headers, sum(map(len, parts)), close=close)
        self.transport.writelines((head, *parts))
        self._answered(close)

    def _answered(self, close: bool) -> None:
        if close:
            self._request = None
            self._close()
        else:
            self.request_ended()
        self.shared.ended.set()

    def _handler(self) -> "RouteHandler":
        """Return the handler of the request that is in flight or arriving."""
        if self.phase in (BODY, LARGE, SKIP, BUSY):
            return self._plan.handler
        return self.shared.handler_of(bytes(self._pending[:_BEGINNING]).partition(b" ")[2])

    def _refuse_and_close(self, error: WeirError, status: int | None = None) -> None:
        """Refuse a malformed or incomplete request, and close the connection: the start of the next request is unknown."""
        self.shared.refused(None, error)
        answer = self._handler().error_answer(error, None)
        self._close_with(answer if status is None else answer._replace(status=status))

    # Leaving.

    def _close_with(self, answer: HttpResponse) -> None:
        head = self.shared.heads.head(answer.status, answer.headers, len(answer.body), close=True)
        self.transport.write(head + answer.body)
        self._leave()
        self.shared.connections.discard(self)
        LingeringClose(self.shared, self.transport).start()

    def _close(self) -> None:
        self._leave()
        self.transport.close()

    def _leave(self) -> None:
        """Cancel the request in flight and free what the connection holds, except the transport and a block that it may still send."""
        self.phase = OVER
        self._since = self.shared.tick
        self._pending.clear()
        request, self._request = self._request, None
        if request is not None:
            request.leave()
        place = self._place
        if place is not None:
            self._forget_place()
            place.give_up()
        self._release_claim()
        self.shared.account.give(self._counted)
        self._counted = 0

    def _forget_place(self) -> None:
        if self._place is not None and self._place.claim is None:
            self.shared.receiving.discard(self)
        self._place = None

    def charge(self, size_bytes: int) -> None:
        """Charge `size_bytes` to the request in flight, until it ends. Raises what Account.take raises."""
        if self._claim is None:
            self._claim = self.shared.account.claim()
        self._claim.take(size_bytes)

    def _release_claim(self) -> None:
        """Give back what the request in flight holds, and forget its head: one that is long is charged."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.close()
            vars(self).pop("_plan", None)

    def _release_block(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.release()

    # The sweep and the end of the server.

    @property
    def busy(self) -> bool:
        """Whether a request is in flight."""
        return self.phase is BUSY

    def sweep(self, now: float) -> None:
        """Close the connection if it has been idle or slow for too long."""
        age = now - self._since
        settings = self.shared.settings
        if self._writing_paused or self.phase is OVER:  # it closes when the client has read everything
            if age > self.shared.patience:
                self.abort()
        elif self.phase is IDLE:
            if age > settings.idle_timeout:
                self._close()
        elif self.phase is HEAD:
            if age > settings.header_timeout:
                self._too_slow(f"head: must arrive within {settings.header_timeout:g} s (header_timeout)")
        elif self.phase in (BODY, LARGE, SKIP) and self._arrives_too_slowly(now):
            self._too_slow(
                f"body: arrives too slowly; must arrive within {self.shared.patience:g} s, or as many for each MiB "
                "(body_timeout, less while memory is short)"
            )

    def _arrives_too_slowly(self, now: float) -> bool:
        if self._pace is None or self._pace_since != self._since:  # of an earlier body
            self._pace, self._pace_since = Pace(self._since), self._since
        arrived = 0 if self._place is None else self._place.arrived
        return self._pace.too_slow(now, arrived, self.shared.patience)

    def _too_slow(self, message: str) -> None:
        if self.phase is SKIP:  # the request has been answered
            self._close()
        else:
            self._refuse_and_close(DeadlineExceeded(message))

    def drain(self) -> None:
        """Nothing to do: each response checks whether the server drains."""

    def stop(self) -> None:
        """Close the connection. A request that has not arrived completely is refused with Draining."""
        if self.phase in (HEAD, BODY, LARGE) and self._block is None:
            self._refuse_and_close(draining())
        elif self.phase is not OVER:
            self._close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._leave()
        self.transport.abort()


def draining() -> Draining:
    """Return the error for a request to a server that is being stopped."""
    return Draining("the server is shutting down and accepts no new requests")
