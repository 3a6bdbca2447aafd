"""The WebSocket channel: many requests of the Open Inference Protocol on one connection. Responses carry the id of their request and come as requests end.

A connection may have `websocket_in_flight` requests in flight; with that many, nothing is read from its socket. When the server drains, nothing more is
read, the requests in flight are answered, and the connection is closed with code 1001 (RFC 6455, section 7.4.1).

A request with one response waits in the queue without a task (_Waiting). A request that streams, is traced or becomes several queue entries has a task.
Their responses and all errors go through one outbox, which one task empties.
"""

import asyncio
import logging
from collections import deque
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from weir.errors import (
    Cancelled,
    CapacityError,
    Conflict,
    Draining,
    ModelNotReady,
    Overloaded,
    WeirError,
    bounded,
    brief,
)
from weir.messages import TRACE_FIELDS, TRACEPARENT, carry
from weir.protocols import HttpSettings
from weir.protocols.access import allowed, caller_in
from weir.protocols.account import CLAIM, Account, charge_values
from weir.protocols.data_plane import find
from weir.protocols.entries import QueueEntry, response_of
from weir.protocols.exchange import Exchange, QueuedRequest, inference_of, once_read
from weir.protocols.offloading import LONG_ANSWER, off_loop, written
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
HASTY_TIMES = 16
MOST_UNSENT = 256  # messages in the outbox; with more of them nothing is read
_log = logging.getLogger("weir.websocket")


class _Waiting:
    """A request of `session` that waits in the queue without a task. `received_bytes` is the size of its message, `size_bytes` what is charged for it."""

    __slots__ = ("_queued", "_session", "exchange", "inference_request", "received_bytes", "size_bytes")

    def __init__(
        self, session: "Session", exchange: Exchange, request: InferenceRequest, received_bytes: int, size_bytes: int
    ) -> None:
        self._session = session
        self._queued: QueuedRequest | None = None
        self.exchange = exchange
        self.inference_request = request
        self.received_bytes = received_bytes
        self.size_bytes = size_bytes

    def submit(self, entry: QueueEntry) -> None:
        """Put the request into the queue. Raises what Exchange.submit raises."""
        self._queued = self.exchange.submit(entry, self._ended)

    def cancel(self) -> None:
        """Cancel the request. Its end is not reported: the session forgets it."""
        if self._queued is not None:
            self.exchange.cancel(self._queued)

    def _ended(self, queued: QueuedRequest) -> None:
        if queued.error is None:
            self._session.finish(self, queued)
        else:
            self.fail(queued.error)

    def fail(self, error: WeirError) -> None:
        """Send the error."""
        self._session.forget(self)
        self._session.post_failure(self.inference_request.id, error)


class _Outgoing:
    """A message in the outbox, or the future of a message that a thread is writing for `queued`. `charged` is the number of bytes charged for it."""

    __slots__ = ("charged", "message", "queued")

    def __init__(
        self, message: "Message | asyncio.Future[Message]", charged: int, queued: _Waiting | None = None
    ) -> None:
        self.message = message
        self.charged = charged
        self.queued = queued

    def drop(self) -> None:
        """Cancel the writing of the message, if it has not been written yet."""
        message = self.message
        if isinstance(message, asyncio.Future) and not message.cancel() and not message.cancelled():
            message.exception()  # marks the exception as retrieved, so that asyncio does not log it


class Session:
    """Serves one connection. The bytes of its requests and responses are charged to `account`."""

    def __init__(self, socket: WebSocket, registry: "Models", settings: HttpSettings, account: Account) -> None:
        self._socket, self._caller = socket, caller_in(socket.headers.raw)
        self._account = account
        self._claim = account.claim()
        self._registry = registry
        self._settings = settings
        self._under_way: dict[str, asyncio.Task[None] | _Waiting] = {}
        self._withdrawn: set[str] = set()
        self._outbox: deque[_Outgoing] = deque()
        self._posted, self._sent, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._main: asyncio.Task[Any] | None = None
        self._receiving = False
        self._refused = False  # no more requests are accepted
        self._stuck = False  # the client has not read for too long
        self._closed = False  # nothing can be written any more

    async def run(self) -> None:
        """Accept the connection and serve it until the client or the server ends it."""
        self._main = asyncio.current_task()
        CLAIM.set(self._claim)  # the connection has a context of its own
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
            self._claim.take(len(message))
            size = len(message)
            request = await off_loop(len(message), partial(_read, message))
            if isinstance(request, CancelMessage):
                self._withdraw(request.id)
                self._claim.give(size)
                return None
            if request.id in self._under_way:
                raise Conflict(f"id {brief(request.id, 100)}: a request with this id is in flight on this connection")
            await self._room_for(request, size)
            arrays = sum([each.array.nbytes for each in request.inputs])
            self._claim.take(arrays)
            size += arrays
        except BaseException as error:  # also where `_give_up` cancels the wait for room or for a thread
            self._claim.give(size)
            if not isinstance(error, WeirError):
                raise
            return await _id_of(message), error.with_traceback(None)
        self._begin(request, len(message), size)
        return None

    async def _room_for(self, request: InferenceRequest, size: int) -> None:
        """Wait until there is room for one more request in flight. `size` bytes are charged for it already.

        A request that states a timeout is refused instead of waiting, because nobody knows how long it has waited unread. Raises Overloaded, and Draining
        if no more requests are accepted.
        """
        if request.parameters.get("timeout"):
            if self._has_enough(size, HASTY_TIMES):
                text = f"{len(self._under_way)} requests are in flight on this connection, which is the limit"
                raise Overloaded(text, retry_after=1.0)
            return
        while self._has_enough(size) and not self._refused:
            await self._change()
        if self._refused:
            raise Draining("the server is shutting down and accepts no new requests", retry_after=1.0)

    def _has_enough(self, size: int, times: int = 1) -> bool:
        """Return whether the connection has as many requests in flight, or as many bytes besides `size`, as it may have. With none in flight it has room."""
        much = self._claim.held_bytes - size > self._account.max_connection_bytes
        return len(self._under_way) >= times * self._settings.websocket_in_flight or (much and bool(self._under_way))

    async def _change(self) -> None:
        """Return when a request has ended or `refuse` was called."""
        self._changed.clear()
        await self._changed.wait()

    def _begin(self, request: InferenceRequest, received: int, size: int) -> None:
        """Submit a request, or start its task."""
        try:
            service = find(self._registry, request.model, request.version)
            if (
                service.tracing is None
                and not service.facts.streaming
                and inference_of(service).queues_tensors(service)
            ):
                request.parameters.pop(TRACEPARENT, None)
                exchange = Exchange(service, frontend=FRONTEND)
                exchange.caller = self._caller
                (entry,) = exchange.entries(request)
                waiting = self._under_way[request.id] = _Waiting(self, exchange, request, received, size)
                waiting.submit(entry)
                return
        except Exception as error:
            if not (isinstance(error, ModelNotReady) and error.read is not None):
                self._under_way.pop(request.id, None)
                self._claim.give(size)
                if not isinstance(error, WeirError):
                    _log.exception("a request for %s cannot be taken", request.model)
                    error = InternalError("internal error")
                self.post_failure(request.id, error)
                return
        task = asyncio.ensure_future(self._answer(request, received))
        self._under_way[request.id] = task
        task.add_done_callback(lambda _: self._ended(request.id, size))

    def _ended(self, id: str, size: int) -> None:
        self._claim.give(size)
        del self._under_way[id]
        self._changed.set()

    def _withdraw(self, id: str) -> None:
        current = self._under_way.get(id)
        if isinstance(current, _Waiting):
            current.cancel()
            current.fail(_given_up())
        elif current is not None and id not in self._withdrawn:
            self._withdrawn.add(id)
            current.cancel()

    async def _leave(self) -> None:
        """Cancel all requests in flight, and return when they have ended: the connection closes."""
        for current in list(self._under_way.values()):
            current.cancel()
            if isinstance(current, _Waiting):
                self.forget(current)
        while self._under_way:
            await self._change()

    # Sending through the outbox.

    def forget(self, waiting: _Waiting) -> None:
        """Release what `waiting` held: it has ended."""
        self._ended(waiting.inference_request.id, waiting.size_bytes)

    def finish(self, waiting: _Waiting, queued: QueuedRequest) -> None:
        """Answer `waiting`, whose request has its output. A long response is written in a thread, and the responses after it wait until it has been sent."""
        self.forget(waiting)
        service, request = waiting.exchange.service, waiting.inference_request
        try:
            response = response_of(service, request, [queued.form.kind], [queued.output], queued.waited)
            response.parameters = {**response.parameters, FINAL: True}
            size = bytes_to_write(response, binary_outputs(request))
            write = partial(write_response, request, response)
            if size > LONG_ANSWER:
                self._claim.take(size)
                self._post(_Outgoing(asyncio.ensure_future(off_loop(size, write, writes=True)), size, waiting))
                return
            message = write()
            self._claim.take(len(message))
        except Exception as error:
            if isinstance(error, WeirError):
                waiting.exchange.refused(error)
            self.post_failure(request.id, _shown(request, error))
        else:
            self._post(_Outgoing(message, len(message)))
            waiting.exchange.transferred(waiting.received_bytes, len(message))

    def post_failure(self, id: str, error: WeirError) -> None:
        """Put an error into the outbox."""
        self._post(_Outgoing(_failure(id, error), 0))

    def _post(self, outgoing: _Outgoing) -> None:
        if self._closed:
            self._drop(outgoing)
            return
        self._outbox.append(outgoing)
        self._posted.set()

    def _drop(self, outgoing: _Outgoing) -> None:
        self._claim.give(outgoing.charged)
        outgoing.drop()

    async def _all_sent(self) -> None:
        while self._outbox:
            self._sent.clear()
            await self._sent.wait()

    async def _write(self) -> None:
        """Send what is in the outbox until the client leaves."""
        try:
            while True:
                while self._outbox:
                    await self._send_next(self._outbox[0])
                    self._claim.give(self._outbox.popleft().charged)
                self._sent.set()
                self._posted.clear()
                await self._posted.wait()
        except WebSocketDisconnect:
            pass  # the receiving task gets the disconnection too
        finally:
            self._closed = True
            for each in self._outbox:
                self._drop(each)
            self._outbox.clear()
            self._sent.set()

    async def _send_next(self, outgoing: _Outgoing) -> None:
        """Send the next message of the outbox, once it has been written."""
        message, queued = outgoing.message, outgoing.queued
        if isinstance(message, asyncio.Future):
            assert queued is not None  # only its responses are written in a thread
            try:
                message = await message
                self._claim.give(outgoing.charged)
                outgoing.charged = 0
                self._claim.take(len(message))
                outgoing.charged = len(message)
                queued.exchange.transferred(queued.received_bytes, len(message))
            except Exception as error:
                message = _failure(queued.inference_request.id, _shown(queued.inference_request, error))
            outgoing.message = message
        await self._send(message)

    # Requests that have a task.

    async def _answer(self, request: InferenceRequest, received: int) -> None:
        """Send the responses to one request, or its error."""
        with self._account.claim() as claim:
            CLAIM.set(claim)
            await self._answer_counted(request, received)

    async def _answer_counted(self, request: InferenceRequest, received: int) -> None:
        try:
            try:
                await self._stream(request, received)
            except asyncio.CancelledError:
                if request.id not in self._withdrawn:
                    raise
                raise _given_up() from None
            except (WebSocketDisconnect, WeirError):
                raise
            except Exception as error:
                _log.exception("a response of %s cannot be written", request.model)
                raise InternalError("internal error") from error
        except WeirError as error:
            self.post_failure(request.id, error)
        except WebSocketDisconnect:
            pass  # the receiving task gets the disconnection too
        finally:
            self._withdrawn.discard(request.id)

    async def _stream(self, request: InferenceRequest, received: int) -> None:
        service = await once_read(partial(find, self._registry, request.model, request.version))
        exchange = Exchange(service, frontend=FRONTEND, carrier=self._carrier(request))
        exchange.caller = self._caller
        sent, last = 0, False
        async with aclosing(exchange.stream(request)) as parts:
            async for part in parts:
                last = part.last
                sent += await self._send_response(exchange, request, part.response, last=last)
        if not last:
            end = InferenceResponse(service.facts.name, [], version=service.facts.version, id=request.id)
            sent += await self._send_response(exchange, request, end, last=True)
        exchange.transferred(received, sent)

    def _carrier(self, request: InferenceRequest) -> dict[str, str]:
        """Return what names the caller's span: parameters of the message, which are taken from it, or else headers of the opening request."""
        named = {name: request.parameters.pop(name, None) for name in (TRACEPARENT, "tracestate")}
        if isinstance(named[TRACEPARENT], str):
            return {name: value for name, value in named.items() if isinstance(value, str)}
        carrier: dict[str, str] = {}
        for name, value in self._socket.headers.items():
            if name in TRACE_FIELDS:
                carry(carrier, name, value)
        return carrier

    async def _send_response(
        self, exchange: Exchange, request: InferenceRequest, response: InferenceResponse, *, last: bool
    ) -> int:
        named = {} if exchange.trace is None else {TRACEPARENT: exchange.trace.traceparent}
        response.parameters = {**response.parameters, **named, FINAL: last}
        size = bytes_to_write(response, binary_outputs(request))
        message = await written(size, partial(write_response, request, response))
        self._claim.take(len(message))
        try:
            return await self._send(message)
        finally:
            self._claim.give(len(message))

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
    """What a client hears of an exception that is not Weir's."""


def _given_up() -> Cancelled:
    return Cancelled("the client has cancelled the request")


def _shown(request: InferenceRequest, error: Exception) -> WeirError:
    """Return the error to send for a response that could not be written. An exception that is not Weir's is logged and hidden."""
    if isinstance(error, WeirError):
        return error
    _log.error("a response of %s cannot be written", request.model, exc_info=error)
    return InternalError("internal error")


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
        return [WebSocketRoute(path, self.serve) for path in PATHS]

    @property
    def open(self) -> int:
        """How many connections are open."""
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
