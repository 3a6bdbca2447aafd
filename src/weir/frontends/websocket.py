"""The WebSocket channel: many requests of the Open Inference Protocol on one connection. Responses carry the id of their request and come as requests end.

A connection may have `websocket_in_flight` requests in flight; with that many, nothing is read from its socket. When the server drains, nothing more is
read, the requests in flight are answered, and the connection is closed with code 1001 (RFC 6455, section 7.4.1).

Each request is an InferenceCall. Responses and errors go through one outbox, which one task empties; those of a stream are sent by its own task, which
waits until the client reads.
"""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from weir.errors import (
    Cancelled,
    CapacityError,
    Conflict,
    NotFound,
    Overloaded,
    WeirError,
    bounded,
    brief,
    draining,
)
from weir.frontends.http.asgi import deny, inner_path
from weir.messages import TRACEPARENT
from weir.protocols import HttpSettings
from weir.protocols.access import allowed
from weir.protocols.account import CLAIM, Account, charge_values
from weir.protocols.call import InferenceCall, Writing
from weir.protocols.data_plane import find
from weir.protocols.exchange import Exchange
from weir.protocols.offloading import off_loop
from weir.protocols.response import error_response
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_binary import binary_outputs, bytes_to_write
from weir.wire.status import kserve_code
from weir.wire.websocket import (
    FINAL,
    CancelMessage,
    ErrorMessage,
    Message,
    id_of,
    message_bytes,
    read_request,
    write_failure,
    write_response,
)

if TYPE_CHECKING:
    from weir.serving.handle import Models


FRONTEND = "websocket"
GOING_AWAY = 1001  # close codes: RFC 6455, section 7.4.1
TOO_BIG = 1009
ABNORMAL = 1006  # never sent

# A request that states a timeout does not wait for room. Up to this many times `websocket_in_flight` may be in flight; more are refused at once.
MOST_TIMED = 16
MOST_UNSENT = 256  # messages in the outbox; with more of them nothing is read
_log = logging.getLogger("weir.websocket")


class SocketCall(InferenceCall):
    """A request of `session`, for which `size_bytes` are charged to the connection."""

    def __init__(self, session: "Session", request: InferenceRequest, received_bytes: int, size_bytes: int) -> None:
        super().__init__(session.account, received_bytes)
        self._session = session
        self.request = request
        self.size_bytes = size_bytes
        self.withdrawn = False  # by its client, who gets an error

    def begin(self) -> None:
        """Find the model and have it compute the request. Raises the error that refuses it."""
        request = self.request
        service = find(self._session.registry, request.model, request.version)
        carrier = carrier_of(request)
        exchange = Exchange(service, frontend=FRONTEND, headers=self._session.headers)
        exchange.carrier = carrier or exchange.carrier
        if service.facts.streaming:
            self.stream(exchange, request, lambda part: self._writing(part.response, last=part.last))
        else:
            self.infer(exchange, request, partial(self._writing, last=True))

    def _writing(self, response: InferenceResponse, *, last: bool) -> Writing:
        trace = None if self.exchange is None else self.exchange.trace
        named = {} if trace is None else {TRACEPARENT: trace.traceparent}
        response.parameters = {**response.parameters, **named, FINAL: last}
        size = bytes_to_write(response, binary_outputs(self.request))
        return Writing(size, partial(write_response, self.request, response))

    def send(self, message: Message) -> int:
        """Put the response into the outbox."""
        self._session.post(message)
        return len(message)

    async def send_part(self, message: Message) -> int:
        """Send one response of a stream."""
        return await self._session.send_now(message)

    def fail(self, error: Exception) -> None:
        """Put the error into the outbox, unless the client has left. An exception that is not Weir's is logged and hidden."""
        if isinstance(error, WebSocketDisconnect):
            return  # the receiving task gets the disconnection too
        if not isinstance(error, WeirError):
            _log.error("a request for %s has failed", self.request.model, exc_info=error)
            error = InternalError("internal error")
        self._session.post_failure(self.request.id, error)

    def withdraw(self) -> None:
        """Cancel the request, as its client has asked."""
        self.withdrawn = True
        self.leave()

    def release(self) -> None:
        """Have the session forget the request. Confirm to its client that it was withdrawn."""
        super().release()
        if self._session.forget(self) and self.withdrawn:
            self.fail(Cancelled("the client has cancelled the request"))

    def charge(self, size_bytes: int) -> None:
        """Charge `size_bytes` to the connection until the request ends."""
        self._session.claim.take(size_bytes)
        self.size_bytes += size_bytes


def carrier_of(request: InferenceRequest) -> dict[str, str] | None:
    """Return the parameters of a message that name the caller's span, which are taken from it; None if there are none."""
    named = {name: request.parameters.pop(name, None) for name in (TRACEPARENT, "tracestate")}
    found = {name: value for name, value in named.items() if isinstance(value, str)}
    return found if TRACEPARENT in found else None


class Session:
    """Serves one connection. The bytes of its requests and responses are charged to `account`."""

    def __init__(self, socket: WebSocket, registry: "Models", settings: HttpSettings, account: Account) -> None:
        self._socket, self.headers = socket, socket.headers.raw
        self.account = account
        self.claim = account.claim()
        self.registry = registry
        self._settings = settings
        self._under_way: dict[str, SocketCall] = {}
        self._outbox: deque[Message] = deque()
        self._posted, self._sent, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._main: asyncio.Task[Any] | None = None
        self._receiving = False
        self._refused = False  # no more requests are accepted
        self._stuck = False  # the client has not read for too long
        self._closed = False  # nothing can be written any more

    async def run(self) -> None:
        """Accept the connection and serve it until the client or the server ends it."""
        self._main = asyncio.current_task()
        CLAIM.set(self.claim)  # the connection has a context of its own
        try:
            await self._socket.accept()
        except (OSError, RuntimeError):
            return  # the client has left or has violated the protocol; which error is raised depends on the ASGI server
        writing = asyncio.ensure_future(self._write())
        try:
            code = await self._serve()
            if code is not None:
                # The client may have closed the connection at the same moment; which error is raised depends on the ASGI server.
                with suppress(OSError, RuntimeError):
                    await self._socket.close(code)
        except WebSocketDisconnect:
            pass
        except asyncio.CancelledError:
            if not self._stuck:
                raise
        finally:
            await self._leave()
            writing.cancel()
            self._end_writing()  # the task may never have run

    def refuse(self) -> None:
        """Read no more requests. Close the connection when the requests in flight have been answered."""
        self._refused = True
        self._changed.set()
        if self._receiving and self._main is not None:
            self._main.cancel()

    # Receiving.

    async def _serve(self) -> int | None:
        """Process messages. Return the code to close the connection with, or None if it is closed already."""
        while not self._refused:
            received = await self._received()
            if received is None:
                break
            if received["type"] != "websocket.receive":
                return None
            message: Message = received["text"] if received.get("text") is not None else received["bytes"]
            if len(message) > self._settings.max_body_size:
                await self._leave()
                return TOO_BIG
            failure = await self._take(message)
            del received, message  # frees them while their error waits in the outbox and the next message is awaited
            if failure is not None:
                self.post_failure(*failure)
            if len(self._outbox) >= MOST_UNSENT:
                await self._all_sent()
        while self._under_way:
            await self._change()
        await self._all_sent()
        return GOING_AWAY

    async def _received(self) -> Any:
        """Return the next ASGI event, or None if `refuse` was called."""
        self._receiving = True
        try:
            return await self._socket.receive()
        except asyncio.CancelledError:
            if not self._refused or self._stuck or self._main is None:
                raise
            self._main.uncancel()  # `refuse` has cancelled it
            return None
        finally:
            self._receiving = False

    async def _take(self, message: Message) -> tuple[str, WeirError] | None:
        """Begin the request in a message, or cancel the one that it names. Return the id and the error if that fails."""
        size = 0
        try:
            self.claim.take(len(message))
            size = len(message)
            request = await off_loop(len(message), partial(_read, message))
            if isinstance(request, CancelMessage):
                if (call := self._under_way.get(request.id)) is not None:
                    call.withdraw()
                self.claim.give(size)
                return None
            if request.id in self._under_way:
                raise Conflict(f"id {brief(request.id, 100)}: a request with this id is in flight on this connection")
            await self._room_for(request, size)
            arrays = sum([each.array.nbytes for each in request.inputs])
            self.claim.take(arrays)
            size += arrays
        except BaseException as error:  # also where `_give_up` cancels the wait for room or for a thread
            self.claim.give(size)
            if not isinstance(error, WeirError):
                raise
            return await _id_of(message), error.with_traceback(None)
        call = self._under_way[request.id] = SocketCall(self, request, len(message), size)
        call.attempt(call.begin)
        return None

    async def _room_for(self, request: InferenceRequest, size: int) -> None:
        """Wait until there is room for one more request in flight. `size` bytes are charged for it already.

        A request that states a timeout is refused instead of waiting, because nobody knows how long it has waited unread. Raises Overloaded, and Draining
        if no more requests are accepted.
        """
        if request.parameters.get("timeout"):
            if self._has_enough(size, MOST_TIMED):
                text = f"{len(self._under_way)} requests are in flight on this connection, which is the limit"
                raise Overloaded(text, retry_after=1.0)
            return
        while self._has_enough(size) and not self._refused:
            await self._change()
        if self._refused:
            raise draining(retry_after=1.0)

    def _has_enough(self, size: int, times: int = 1) -> bool:
        """Return whether the connection has as many requests in flight, or as many bytes besides `size`, as it may have. With none in flight it has room."""
        much = self.claim.held_bytes - size > self.account.max_connection_bytes
        return len(self._under_way) >= times * self._settings.websocket_in_flight or (much and bool(self._under_way))

    async def _change(self) -> None:
        """Return when a request has ended or `refuse` was called."""
        self._changed.clear()
        await self._changed.wait()

    def forget(self, call: SocketCall) -> bool:
        """Give back what `call` held, which has ended. Return False if this has been done before."""
        if self._under_way.get(call.request.id) is not call:
            return False
        del self._under_way[call.request.id]
        self.claim.give(call.size_bytes)
        self._changed.set()
        return True

    async def _leave(self) -> None:
        """Cancel all requests in flight, and return when they have ended: the connection closes."""
        for call in list(self._under_way.values()):
            call.leave()
        while self._under_way:
            await self._change()

    # Sending through the outbox.

    def post(self, message: Message) -> None:
        """Put a response into the outbox. Raises what Account.take raises."""
        self.claim.take(len(message))
        self._post(message)

    def post_failure(self, id: str, error: WeirError) -> None:
        """Put an error into the outbox."""
        message = _failure(id, error)
        self.claim.add(len(message))
        self._post(message)

    def _post(self, message: Message) -> None:
        if self._closed:
            self.claim.give(len(message))
            return
        self._outbox.append(message)
        self._posted.set()

    async def _all_sent(self) -> None:
        while self._outbox:
            self._sent.clear()
            await self._sent.wait()

    async def _write(self) -> None:
        """Send what is in the outbox until the client leaves."""
        try:
            while True:
                while self._outbox:
                    await self._send(self._outbox[0])
                    self.claim.give(len(self._outbox.popleft()))
                self._sent.set()
                self._posted.clear()
                await self._posted.wait()
        except WebSocketDisconnect:
            pass  # the receiving task gets the disconnection too
        finally:
            self._end_writing()

    def _end_writing(self) -> None:
        """Write nothing more, and give back what is left in the outbox. Idempotent."""
        self._closed = True
        for each in self._outbox:
            self.claim.give(len(each))
        self._outbox.clear()
        self._sent.set()

    async def send_now(self, message: Message) -> int:
        """Send one response of a stream, when the client reads. Return its size in bytes."""
        self.claim.take(len(message))
        try:
            return await self._send(message)
        finally:
            self.claim.give(len(message))

    async def _send(self, message: Message) -> int:
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                if isinstance(message, str):
                    await self._socket.send_text(message)
                else:
                    await self._socket.send_bytes(message)
        except TimeoutError:
            self._give_up()
            raise WebSocketDisconnect(ABNORMAL) from None
        return len(message)

    def _give_up(self) -> None:
        self._stuck = True
        if self._main is not None and self._main is not asyncio.current_task():
            self._main.cancel()


class InternalError(WeirError):
    """The error that a client gets for an exception that is not Weir's."""


def _failure(id: str, error: WeirError) -> str:
    """Return the message that reports the error of the request `id`."""
    wait = (error.retry_after or 0.0) if isinstance(error, CapacityError) else None
    return write_failure(ErrorMessage(bounded(error.message), id, type(error).__name__, kserve_code(error), wait))


def _read(message: Message) -> InferenceRequest | CancelMessage:
    charge_values(len(message), partial(message_bytes, message))
    return read_request(message)


async def _id_of(message: Message) -> str:
    try:
        return await off_loop(len(message), partial(id_of, message))
    except WeirError:  # there is not enough memory to read the id
        return ""


PATHS = ("/v2/ws", "/models/infer")


class WebSockets:
    """All WebSockets of a server. The bytes of their requests and responses are charged to `account`."""

    def __init__(self, registry: "Models", settings: HttpSettings, account: Account | None = None) -> None:
        self._account = account or Account(settings)
        self._registry = registry
        self._settings = settings
        self._sessions: dict[Session, None] = {}  # in their order
        self._refusing = False
        self._none_left = asyncio.Event()

    def routes(self) -> list[WebSocketRoute]:
        """Return the Starlette routes of the WebSockets."""
        return [*(WebSocketRoute(path, self.serve) for path in PATHS), WebSocketRoute("/{path:path}", _refuse)]

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._sessions)

    async def serve(self, socket: WebSocket) -> None:
        """Serve one connection to its end. A connection from a page of another origin is refused with 403."""
        if not allowed(socket.headers.getlist("origin"), socket.headers.get("host", ""), self._settings.cors_origins):
            await socket.close()
            return
        session = Session(socket, self._registry, self._settings, self._account)
        if self._refusing:
            session.refuse()
        self._sessions[session] = None
        try:
            await session.run()
        finally:
            del self._sessions[session]
            if not self._sessions:
                self._none_left.set()

    def refuse(self) -> None:
        """Read no more requests. Each connection closes when its requests in flight have been answered."""
        self._refusing = True
        for session in self._sessions:
            session.refuse()

    async def closed(self) -> None:
        """Return when no connection is open."""
        while self._sessions:
            self._none_left.clear()
            await self._none_left.wait()


async def _refuse(socket: WebSocket) -> None:
    error = NotFound(f"{inner_path(socket.scope)}: no WebSocket has this path; available: {', '.join(PATHS)}")
    await deny(error_response(error), socket.scope, socket.send)
