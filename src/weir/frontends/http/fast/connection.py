"""One connection of the fast path: reads requests, writes responses, and lines of the access log if there is one."""

import asyncio
import logging
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from http import HTTPStatus
from struct import pack
from typing import TYPE_CHECKING, Any, cast

from weir.errors import Overloaded, RequestTimeout, TooLarge, WeirError, draining
from weir.frontends.http.access_log import LEFT, HttpLog
from weir.frontends.http.fast.plan import END_OF_HEAD, check_beginning
from weir.frontends.http.fast.shared import CONTINUE, BlockPlace, Buffer, Place, fill
from weir.messages import Block
from weir.protocols.account import Pace, head_bytes
from weir.protocols.response import Headers, HttpResponse
from weir.wire.cells import LARGE_BYTES
from weir.wire.status import HEAD_TOO_LARGE
from weir.workers.executor import discard

if TYPE_CHECKING:
    from weir.frontends.http.fast.plan import HotRequest, RouteHandler, RoutePlan
    from weir.frontends.http.fast.shared import HttpShared, Place
    from weir.protocols.account import Claim
    from weir.serving.handle import ModelHandle


LINGER = 2.0  # seconds; see LingeringClose


class Kept(asyncio.BufferedProtocol):
    """A connection that is not served, and kept for `patience` seconds at most: it implements OpenConnection of shared.py. What arrives is discarded."""

    busy = False

    def __init__(self, shared: "HttpShared", transport: asyncio.Transport, patience: float = LINGER) -> None:
        self.shared = shared
        self.transport = transport
        self._patience = patience
        self._since = shared.tick
        shared.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that all connections share."""
        return self.shared.view

    def buffer_updated(self, nbytes: int) -> None:
        """Discard what has arrived."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.shared.connections.discard(self)
        self.shared.ended.set()

    def sweep(self, now: float) -> None:
        """Close the connection if it was kept for too long."""
        if now - self._since > self._patience:
            self.transport.abort()

    def drain(self) -> None:
        """Nothing to do: no further request is answered here."""

    def stop(self) -> None:
        """Close the connection."""
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()


class LingeringClose(Kept):
    """Closes a connection whose client still sends: discards what arrives until the client closes, at most for LINGER seconds.

    Closing at once would reset the connection, and the client might lose the response (RFC 9112, section 9.6).
    """

    def start(self) -> None:
        """Take the connection over. The response has been written."""
        self.transport.set_protocol(self)
        self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


class Phase(IntEnum):
    """The state of a connection."""

    IDLE = 0  # waits for a request
    HEAD = 1  # receives a head
    BODY = 2  # receives a small body
    LARGE = 3  # receives a large body
    SKIP = 4  # discards the body of a refused request
    BUSY = 5  # has a request in flight
    OVER = 6  # closing, closed or handed over


IDLE, HEAD, BODY, LARGE, SKIP, BUSY, OVER = Phase

# HTTP/2 without TLS, RFC 9113: how a client begins it (section 3.4), and what tells such a client why it ends: an empty frame SETTINGS, and a
# frame GOAWAY with the code HTTP_1_1_REQUIRED and a text. A client of HTTP/2 cannot read a response of HTTP/1.1.
PRIOR_KNOWLEDGE = b"PRI * HTTP/2.0\r\n"
_WAY_OUT = b"this port speaks HTTP/1.1; for HTTP/2 put a proxy such as nginx or Envoy in front of it"
GO_AWAY = pack(">HBBBI", 0, 0, 4, 0, 0) + pack(">HBBBIII", 0, 8 + len(_WAY_OUT), 7, 0, 0, 0, 13) + _WAY_OUT

_BEGINNING = 64  # bytes of a request that contain its method and the prefix of its path


class ResponseWriter(asyncio.BufferedProtocol):
    """The part of a connection that writes responses, and closes it."""

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
        self.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.leave()
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
        raise NotImplementedError  # Connection implements it

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

    def respond(self, plan: "RoutePlan", response: HttpResponse) -> None:
        """Write `response` to the request in flight. Its `plan` says whether the connection stays open."""
        if self.phase is OVER:  # the client has left while the response was being compressed
            return
        close = self.shared.draining or not plan.keep_alive
        head = self.shared.heads.head(response.status, response.headers, len(response.body), close=close)
        self.transport.write(head + response.body)
        self._responded(close)

    def respond_block(self, plan: "RoutePlan", headers: Headers, block: Block) -> None:
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
        self._responded(close)

    def respond_parts(self, plan: "RoutePlan", headers: Headers, parts: Sequence[bytes | memoryview]) -> None:
        """Write the response whose body is `parts`, without copying them. They are freed when the kernel has taken them."""
        close = self.shared.draining or not plan.keep_alive
        head = self.shared.heads.head(200, headers, sum(map(len, parts)), close=close)
        self.transport.writelines((head, *parts))
        self._responded(close)

    def _responded(self, close: bool) -> None:
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
        if self._pending.startswith(PRIOR_KNOWLEDGE):
            return self._close_after(GO_AWAY)
        response = self._handler().error_response(error, None)
        self._close_with(response if status is None else response._replace(status=status))

    # Leaving.

    def _close_with(self, response: HttpResponse) -> None:
        head = self.shared.heads.head(response.status, response.headers, len(response.body), close=True)
        self._close_after(head + response.body)

    def _close_after(self, data: bytes) -> None:
        self.transport.write(data)
        self.leave()
        if (
            not self.transport.is_closing()
        ):  # TLS tells this of a loss that it has seen, whoever has the connection by then
            self.shared.connections.discard(self)
            LingeringClose(self.shared, self.transport).start()

    def _close(self) -> None:
        self.leave()
        self.transport.close()

    def leave(self) -> None:
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
            self._refuse_and_close(RequestTimeout(message))

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
        self.leave()
        self.transport.abort()


_log = logging.getLogger("weir.http")

# While a request is in flight, reading pauses after this many bytes of further requests.
_LEFTOVER_BYTES = 64 << 10

# Bytes of heads and small bodies that a connection holds, and a body in the queue, are charged to the account if they are more than this.
_FREE_BYTES = 4 << 10

# A single read of at most this many bytes is looked up in the head cache without being copied to `_pending` first.
_SMALL_READ_BYTES = _FREE_BYTES


class Connection(ResponseWriter):
    """One connection. `shared` is what all connections of the server share."""

    def __init__(self, shared: "HttpShared") -> None:
        super().__init__(shared)
        self._searched = 0  # the end of a head is not in this many first bytes of `_pending`
        self._left = 0  # bytes that are still to be skipped
        self._reading_paused = False
        self._advancing = False

    # Calls of the transport.

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go: the rest of a large body's place, or the buffer that all connections share."""
        return self.shared.view if self._place is None else self._place.room()

    def buffer_updated(self, nbytes: int) -> None:
        """Process `nbytes` that have arrived where `get_buffer` said."""
        if self.phase is IDLE and nbytes <= _SMALL_READ_BYTES and not self._writing_paused:
            # The hot path: one whole request whose head is known.
            data = bytes(self.shared.view[:nbytes])
            head, _, body = data.partition(END_OF_HEAD)
            plan = self.shared.remembered(head)
            if plan is not None and plan.length == len(body):
                self._dispatch(plan, body)
                return
            self._pending += data
            self._advance()
        elif self._place is not None:
            self._receive_more(self._place, nbytes)
        elif self.phase is not OVER and not self._begin_large_at_once(nbytes):
            self._pending += self.shared.view[:nbytes]
            self._advance()

    def _begin_large_at_once(self, nbytes: int) -> bool:
        """Begin a request whose head is cached and whose large body has begun to arrive: copy the body straight to its place."""
        if self.phase is not IDLE or self._writing_paused:
            return False
        head, beginning = self.shared.cut_head(nbytes)
        plan = self.shared.remembered(head)
        if plan is None or not LARGE_BYTES < plan.length >= len(beginning):
            return False
        try:
            place = self.reserve(plan)
        except WeirError:
            return False
        self._plan = plan
        self._since = self.shared.tick
        if self._fill(place, beginning):
            self.dispatch_received(place)
        return True

    def _receive_more(self, place: Place, size: int) -> None:
        try:
            if place.received(size):
                self.dispatch_received(place)
        except WeirError as error:
            self._refuse_and_close(error)

    def replay(self, data: bytes) -> None:
        """Process bytes that were read from this connection before."""
        self._pending += data
        self._advance()

    def refuse(self, data: bytes, error: WeirError) -> None:
        """Refuse the request of which `data` was read before, and close the connection."""
        self._pending += data
        self._refuse_and_close(error)

    # Reading requests.

    def _advance(self) -> None:
        """Process the bytes that have arrived. A response that is written meanwhile does not start this again."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._pending and not self._writing_paused and self._step():
                pass
        except WeirError as error:
            self._refuse_and_close(error)
        finally:
            self._advancing = False
        self.regulate_reading()

    def _step(self) -> bool:
        """Take the next step with the bytes that have arrived. Return whether another one may follow."""
        phase = self.phase
        if phase is IDLE or phase is HEAD:
            return self._read_head()
        if phase is BODY:
            return self._read_body()
        return phase is SKIP and self._skip()

    def regulate_reading(self) -> None:
        """Pause or resume reading, as the connection now needs."""
        waits = self.phase is BUSY or self._writing_paused
        full = waits and len(self._pending) >= _LEFTOVER_BYTES
        if len(self._pending) > _FREE_BYTES or self._counted:
            self._count_pending()
        if full is not self._reading_paused and self.phase is not OVER and not self.transport.is_closing():
            self._reading_paused = full
            if full:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _count_pending(self) -> None:
        more = len(self._pending) - self._counted
        if more > 0:
            try:
                self.shared.account.take(more)
            except WeirError as error:
                if self.phase is not OVER:
                    self._refuse_and_close(error)
                return
        else:
            self.shared.account.give(-more)
        self._counted += more

    def _read_head(self) -> bool:
        pending = self._pending
        if self.phase is IDLE and not self._begin_head():
            return False
        end = pending.find(END_OF_HEAD, max(0, self._searched - 3))
        if (end if end >= 0 else len(pending)) > self.shared.settings.max_header_size:
            limit = self.shared.settings.max_header_size
            self._refuse_and_close(TooLarge(f"head: must be at most {limit} bytes (max_header_size)"), HEAD_TOO_LARGE)
            return False
        if end < 0:
            check_beginning(pending, self._searched)
            self._searched = len(pending)
            return False
        head = bytes(pending[:end])
        plan = self.shared.plan(head)
        del pending[: end + len(END_OF_HEAD)]
        return self._begin(plan, head)

    def _begin_head(self) -> bool:
        pending = self._pending
        while pending.startswith(b"\r\n"):  # RFC 9112, 2.2: empty lines before a request are ignored
            del pending[:2]
        if not pending or pending == b"\r":
            return False
        self.phase = HEAD
        self._since = self.shared.tick
        self._searched = 0
        return True

    def _begin(self, plan: "RoutePlan", head: bytes) -> bool:
        if plan.hand_over:
            self._hand_over(head)
            return False
        self._plan = plan
        self.phase = BODY
        self._since = self.shared.tick
        if size := head_bytes(len(head)):
            self.charge(size)
        error = plan.error if plan.error is not None or not self.shared.draining else draining()
        if error is not None and (
            plan.expects_continue or plan.length > min(LARGE_BYTES, self.shared.settings.max_body_size)
        ):
            self._refuse_before_body(error)
            return True
        if plan.length > LARGE_BYTES:
            return self.begin_large(plan)
        if plan.expects_continue and len(self._pending) < plan.length:
            self.transport.write(CONTINUE)
        return self._read_body()

    def _read_body(self) -> bool:
        plan = self._plan
        if len(self._pending) < plan.length:
            return False
        body = bytes(self._pending[: plan.length])
        del self._pending[: plan.length]
        error = plan.error if plan.error is not None or not self.shared.draining else draining()
        if error is None and plan.length > _FREE_BYTES:
            try:
                self.charge(plan.length)
            except WeirError as refusal:  # no other local may hold it: its traceback holds this frame, and so the body
                self._refuse(refusal)
                return True
        if error is None:
            self._dispatch(plan, body)
        else:
            self._refuse(error)
        return True

    def begin_large(self, plan: "RoutePlan") -> bool:
        """Begin to receive a large body, or refuse its request. Return whether another step may follow."""
        try:
            place = self.reserve(plan)
        except WeirError as error:
            self._refuse_before_body(error)
            return True
        size = min(len(self._pending), plan.length)
        with memoryview(self._pending) as pending, pending[:size] as beginning:
            complete = self._fill(place, beginning)
        del self._pending[:size]  # before the request begins, which may end at once and close the connection
        if complete:
            self.dispatch_received(place)
        if plan.expects_continue and not complete:
            self.transport.write(CONTINUE)
        return complete

    def _fill(self, place: Place, beginning: memoryview) -> bool:
        """Receive the body of `_plan` into `place` from now on. Return whether it is complete with its `beginning`."""
        self.phase = LARGE
        self._place = place
        if place.claim is None:
            self.shared.receiving.add(self)
        return fill(place, beginning)

    def reserve(self, plan: "RoutePlan") -> Place:
        """Return a place for the body. Raises Overloaded if there is no room now, and TooLarge if there never can be."""
        if not plan.in_arena:
            return Buffer(plan.length, self.shared.account)
        service = plan.head.service
        block = self.shared.block(service, plan.lead + plan.length)
        if block is not None:
            return BlockPlace(block, plan.length, plan.lead)
        if not service.control.arena_bytes:
            return Buffer(plan.length, self.shared.account)
        if plan.length > (most := service.control.arena_bytes - plan.lead):
            raise TooLarge(f"body of {plan.length} bytes: must be at most {most} (arena_bytes)")
        self.shared.account.note_full()
        raise Overloaded(f"body: the arena has no room for {plan.length} bytes now")

    def _skip(self) -> bool:
        size = min(self._left, len(self._pending))
        del self._pending[:size]
        self._left -= size
        if self._left:
            return False
        self._release_claim()
        self.phase = IDLE
        self._since = self.shared.tick
        return True

    # Requests and their ends.

    def dispatch_received(self, place: Place) -> None:
        """Begin the request whose large body is complete in `place`."""
        self._forget_place()
        if place.claim is not None:
            self._claim = self._claim or self.shared.account.claim()
            self._claim.adopt(place.claim)
        self._dispatch(self._plan, place.payload())

    @property
    def receives_for(self) -> "ModelHandle":
        """See Receiver in shared.py."""
        service: ModelHandle = self._plan.head.service
        return service

    @property
    def arrived(self) -> int:
        """See Receiver."""
        return 0 if self._place is None else self._place.arrived

    def move(self) -> bool:
        """See Receiver."""
        if not isinstance(self._place, BlockPlace):
            return False
        try:
            self._place = self._place.moved(self.shared.account)
        except WeirError:
            return False
        self.shared.receiving.discard(self)
        return True

    def _dispatch(self, plan: "RoutePlan", payload: bytes | Block) -> None:
        self._plan = plan
        request: Any = plan.handler.request(self, plan, payload)
        self._request = request
        self.phase = BUSY
        try:
            if plan.undecoded:
                plan.head.service.submit(request, request.arrival)
            else:
                request.begin()
        except Exception as error:
            self._fail(request, plan, error)

    def _fail(self, request: "HotRequest", plan: "RoutePlan", error: Exception) -> None:
        if not isinstance(error, WeirError):
            # A bug in Weir, or in a user's policy or executor: the client must get a response, and the connection must live on.
            head = plan.head_bytes.partition(b"\r\n")[0].decode("latin-1")
            _log.error("a request cannot be taken: %s", head, exc_info=error)
        discard(request.payload)
        request.fail(error)

    def _refuse(self, error: WeirError) -> None:
        """Refuse a request whose body has been read, before a service has it."""
        self.phase = BUSY
        self.shared.refused(self._plan.service, error)
        self.respond(self._plan, self._plan.handler.error_response(error, self._plan.service))

    def _refuse_before_body(self, error: WeirError) -> None:
        plan = self._plan
        self.shared.refused(plan.service, error)
        close = self.shared.draining or not plan.keep_alive
        if close or plan.expects_continue or plan.length > self.shared.settings.max_body_size:
            self._close_with(plan.handler.error_response(error, plan.service))
            return
        self.phase = SKIP
        self._left = plan.length
        response = plan.handler.error_response(error, plan.service)
        self.transport.write(self.shared.heads.head(*response[:2], len(response.body), close=False) + response.body)

    def hand_over(self, plan: "RoutePlan", body: bytes) -> None:
        """Let the ASGI application answer the request in flight and all further requests of the connection."""
        self._request = None
        self._hand_over(plan.head_bytes, body)

    def _hand_over(self, head: bytes, body: bytes = b"") -> None:
        replay = b"".join((head, END_OF_HEAD, body, self._pending))
        self.leave()
        if self.transport.is_closing():  # see _close_after
            return
        if self._reading_paused:
            self.transport.resume_reading()
        # Before it is counted elsewhere: counted twice, it could be one too many for another process.
        self.shared.connections.discard(self)
        self.shared.hand_over.go_on(self.shared, self.transport, replay)


_CONTINUE = b"HTTP/1.1 100"
_STATUS = slice(9, 12)  # where a response has its status
_MOST = 32  # characters of a method or of a protocol's name that are logged


class _LoggedTransport:
    """The transport `inner`, which also reports each response that is written to `connection`."""

    def __init__(self, inner: asyncio.Transport, connection: "LoggedConnection") -> None:
        self.inner = inner
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: bytes) -> None:
        """Write a response."""
        self.inner.write(data)
        self._connection.wrote(data, len(data))

    def writelines(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write a response; its head is in the first part."""
        head, size = bytes(parts[0]), sum(map(len, parts))
        self.inner.writelines(parts)
        self._connection.wrote(head, size)


class LoggedConnection(Connection):
    """A connection that writes a line to `log` for each of its responses."""

    def __init__(self, shared: "HttpShared", log: HttpLog) -> None:
        super().__init__(shared)
        self._log = log
        self._began = 0.0
        self._logged = False  # whether the request in flight has its line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._began = self._log.clock()
        super().connection_made(cast(asyncio.Transport, _LoggedTransport(cast(asyncio.Transport, transport), self)))

    def buffer_updated(self, nbytes: int) -> None:
        """Note when a request begins to arrive."""
        if self.phase is IDLE:
            self._began = self._log.clock()
        super().buffer_updated(nbytes)

    def request_ended(self) -> None:
        """Note when the next request begins, which may have arrived already."""
        self._began = self._log.clock()
        super().request_ended()

    def wrote(self, data: bytes, size_bytes: int) -> None:
        """Log a response of `size_bytes` bytes including its head, which `data` begins with."""
        if data == GO_AWAY:
            self._write_line(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, size_bytes)
        elif not data.startswith(_CONTINUE):
            self._logged = True
            self._write_line(int(data[_STATUS]), size_bytes - data.find(END_OF_HEAD) - len(END_OF_HEAD))

    def _write_line(self, status: int, size_bytes: int) -> None:
        if self.phase in (IDLE, HEAD):  # what has arrived is not a request, or not a whole one
            line = bytes(self._pending).partition(b"\r\n")[0]
        else:
            line = self._plan.head_bytes.partition(b"\r\n")[0]
        method, _, rest = line.partition(b" ")
        target, _, protocol = rest.partition(b" ")
        client = self.transport.get_extra_info("peername")
        entry = method[:_MOST].decode("latin-1") or "-", target or b"-", status, size_bytes, self._began
        self._log.answered(client, *entry, protocol[:_MOST].decode("latin-1") or "-")

    def _dispatch(self, plan: "RoutePlan", payload: "bytes | Block") -> None:
        self._plan = plan
        self._logged = False
        super()._dispatch(plan, payload)

    def leave(self) -> None:
        """Log a request that gets no response."""
        if self._request is not None and not self._logged:
            self._write_line(LEFT, 0)
        super().leave()

    def _hand_over(self, head: bytes, body: bytes = b"") -> None:
        self.transport = cast(_LoggedTransport, self.transport).inner
        super()._hand_over(head, body)
