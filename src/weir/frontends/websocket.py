"""The WebSocket channel: many requests of the Open Inference Protocol on one connection, answered by id as they end.

A connection has at most `websocket_in_flight` requests under way; while it has, nothing is read from its socket. At a drain nothing more is read, what is under
way gets its answers, and the connection is closed with 1001. A request of a model with one answer is in the queue by itself, and whatever happens to it ends it;
one that streams, is traced or is made into several has a task. What is to be written goes through one outbox, which one task empties.
"""

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from weir.batching.request_state import RequestBase
from weir.errors import Cancelled, CapacityError, Conflict, Draining, Overloaded, WeirError, bounded, brief
from weir.messages import Dispatch
from weir.protocols.access import allowed
from weir.protocols.account import CLAIM, Account
from weir.protocols.exchange import Exchange
from weir.protocols.kserve.metadata import find
from weir.protocols.offloading import LONG_ANSWER, off_loop, written
from weir.protocols.settings import HttpSettings
from weir.protocols.status import kserve_code
from weir.serving.inference import QueueEntry, entries_for_one_answer, response_of
from weir.telemetry.tracecontext import HEADER
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_binary import binary_outputs, bytes_to_write
from weir.wire.websocket import (
    FINAL,
    CancelMessage,
    ErrorMessage,
    Message,
    id_of,
    read_request,
    write_failure,
    write_response,
)  # fmt: skip

if TYPE_CHECKING:
    from weir.catalog.registry import Registry


FRONTEND = "websocket"
GOING_AWAY = 1001
TOO_BIG = 1009
NO_WORD = 1006  # never sent

# Requests that state a timeout do not wait for room: so many times `websocket_in_flight` are taken, and others refused at once.
HASTY_TIMES = 16
MOST_UNSENT = 256  # messages; with more of them nothing is read
_log = logging.getLogger("weir.websocket")


class Queued(RequestBase):
    """A request in the queue of its service. `size_bytes` is what it holds of the connection's share, `received_bytes` its message."""

    __slots__ = ("_session", "asked", "exchange", "received_bytes", "size_bytes")

    def __init__(
        self, session: "Session", exchange: Exchange, asked: InferenceRequest, work: QueueEntry, timeout: float, priority: int,
        received_bytes: int, size_bytes: int,
    ) -> None:  # fmt: skip
        super().__init__(
            work.payload, exchange.service.now(), timeout, kind=work.kind, content_type=work.content_type, accept=work.accept,
            rows=work.rows, cost=work.cost, key=work.key, priority=priority, large=work.large, door=FRONTEND,
        )  # fmt: skip
        self._session = session
        self.exchange = exchange
        self.asked = asked
        self.received_bytes = received_bytes
        self.size_bytes = size_bytes

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Answer."""
        self._session.finish(self, output)

    def fail(self, error: WeirError) -> None:
        """Say what went wrong."""
        self._session.forget(self)
        self._session.post_failure(self.asked.id, error)


class _Outgoing:
    """A message to be sent, or what will be one when it has been written, as the answer to `request`; `charged` is what it holds of the
    connection's share."""

    __slots__ = ("charged", "message", "request")

    def __init__(
        self, message: "Message | asyncio.Future[Message]", charged: int, request: Queued | None = None
    ) -> None:  # fmt: skip
        self.message = message
        self.charged = charged
        self.request = request

    def drop(self) -> None:
        """Let go of what has not been written yet."""
        message = self.message
        if isinstance(message, asyncio.Future) and not message.cancel() and not message.cancelled():
            message.exception()  # which is looked at, so that asyncio does not log it


class Session:
    """Serves one connection. Requests and answers are charged to `account`."""

    def __init__(
        self, socket: WebSocket, registry: "Registry", settings: HttpSettings, account: Account
    ) -> None:  # fmt: skip
        self._socket = socket
        self._account = account
        self._claim = account.claim()
        self._registry = registry
        self._settings = settings
        self._under_way: dict[str, asyncio.Task[None] | Queued] = {}
        self._withdrawn: set[str] = set()
        self._outbox: deque[_Outgoing] = deque()
        self._posted, self._sent, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._main: asyncio.Task[Any] | None = None
        self._receiving = False
        self._refused = False  # nothing more is taken
        self._stuck = False  # the client has not read for too long
        self._deaf = False  # nothing can be written any more

    async def run(self) -> None:
        """Accept the connection and serve it until one of the two leaves."""
        self._main = asyncio.current_task()
        try:
            await self._socket.accept()
        except (OSError, RuntimeError):
            return  # the client has left, or has sent what is no WebSocket: ASGI servers raise either
        writing = asyncio.ensure_future(self._write())
        try:
            code = await self._serve()
            if code is not None:
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
        """Read no more requests; close the connection when what is under way has been answered."""
        self._refused = True
        self._changed.set()
        if self._receiving and self._main is not None:
            self._main.cancel()

    # What comes.

    async def _serve(self) -> int | None:
        """Take messages; return the code to close the connection with, or None if it is closed."""
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
            del received, message  # nor are they kept while their error waits to be read, or the next one is awaited
            if failure is not None:
                self.post_failure(*failure)
            if len(self._outbox) >= MOST_UNSENT:
                await self._all_sent()
        while self._under_way:
            await self._change()
        await self._all_sent()
        return GOING_AWAY

    async def _received(self) -> Any:
        """Return the next event, or None if no more is taken."""
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
        """Begin what a message asks for, or return its id and what is wrong with it."""
        size = 0
        try:
            self._claim.take(len(message))
            size = len(message)
            asked = await off_loop(len(message), partial(read_request, message))
            if isinstance(asked, CancelMessage):
                self._withdraw(asked.id)
                self._claim.give(size)
                return None
            if asked.id in self._under_way:
                raise Conflict(f"id {brief(asked.id, 100)}: is that of a request under way on this connection")
            await self._room_for(asked, size)
            arrays = sum([each.array.nbytes for each in asked.inputs])
            self._claim.take(arrays)
            size += arrays
        except WeirError as error:
            self._claim.give(size)
            return await _id_of(message), error.with_traceback(None)
        self._begin(asked, len(message), size)
        return None

    async def _room_for(self, asked: InferenceRequest, size: int) -> None:
        """Wait until one more, which holds `size` bytes already, may be under way. One that states a timeout is refused at once where it would have to wait: how
        long it has waited already, unread, is unknown. Raises Overloaded, and Draining when no more are taken."""
        if asked.parameters.get("timeout"):
            if self._has_enough(size, HASTY_TIMES):
                text = f"{len(self._under_way)} requests are under way on this connection, as many as it may have"
                raise Overloaded(text, retry_after=1.0)
            return
        while self._has_enough(size) and not self._refused:
            await self._change()
        if self._refused:
            raise Draining("the server is being stopped and accepts no more requests", retry_after=1.0)

    def _has_enough(self, size: int, times: int = 1) -> bool:
        """Tell whether as much is under way, beside one of `size` bytes, as one connection may have; where nothing is, one may come."""
        much = self._claim.held_bytes - size > self._account.max_connection_bytes
        return len(self._under_way) >= times * self._settings.websocket_in_flight or (much and bool(self._under_way))

    async def _change(self) -> None:
        """Return when less is under way, or nothing more is taken."""
        self._changed.clear()
        await self._changed.wait()

    def _begin(self, asked: InferenceRequest, received: int, size: int) -> None:
        """Bring a request on its way."""
        try:
            service = find(self._registry, asked.model, asked.version)
            queued = service.tracing is None and not service.streaming
            if queued and service.inference.queues_tensors(service):
                asked.parameters.pop(HEADER, None)
                (work,), timeout, priority = entries_for_one_answer(service, asked, FRONTEND, None)
                request = Queued(self, Exchange(service, door=FRONTEND), asked, work, timeout, priority, received, size)
                self._under_way[asked.id] = request
                service.submit(request, request.arrival)
                return
        except Exception as error:
            self._under_way.pop(asked.id, None)
            self._claim.give(size)
            if not isinstance(error, WeirError):
                _log.exception("a request for %s cannot be taken", asked.model)
            self.post_failure(asked.id, error if isinstance(error, WeirError) else WeirError("internal error"))
            return
        task = asyncio.ensure_future(self._answer(asked, received))
        self._under_way[asked.id] = task
        task.add_done_callback(lambda _: self._ended(asked.id, size))

    def _ended(self, id: str, size: int) -> None:
        self._claim.give(size)
        del self._under_way[id]
        self._changed.set()

    def _withdraw(self, id: str) -> None:
        entry = self._under_way.get(id)
        if isinstance(entry, Queued):
            entry.exchange.service.cancel(entry)
            entry.fail(_given_up())
        elif entry is not None and id not in self._withdrawn:
            self._withdrawn.add(id)
            entry.cancel()

    async def _leave(self) -> None:
        """End all that is under way: its caller has left."""
        for entry in list(self._under_way.values()):
            if isinstance(entry, Queued):
                entry.exchange.service.cancel(entry)
                self.forget(entry)
            else:
                entry.cancel()
        while self._under_way:
            await self._change()

    # What goes out, of requests in the queue.

    def forget(self, request: Queued) -> None:
        """`request` has had its end."""
        self._ended(request.asked.id, request.size_bytes)

    def finish(self, request: Queued, output: Any) -> None:
        """Answer `request`; a long answer is written in a thread, and those that end after it wait for it."""
        self.forget(request)
        service, asked = request.exchange.service, request.asked
        try:
            response = response_of(service, asked, [request.kind], [output])
            response.parameters = {**response.parameters, FINAL: True}
            size = bytes_to_write(response, binary_outputs(asked))
            write = partial(write_response, asked, response)
            if size > LONG_ANSWER:
                self._claim.take(size)
                self._post(_Outgoing(asyncio.ensure_future(off_loop(size, write, writes=True)), size, request))
                return
            message = write()
            self._claim.take(len(message))
        except Exception as error:
            self.post_failure(asked.id, _shown(asked, error))
        else:
            self._post(_Outgoing(message, len(message)))
            request.exchange.transferred(request.received_bytes, len(message))

    def post_failure(self, id: str, error: WeirError) -> None:
        """Send an error as soon as what is before it has been read."""
        self._post(_Outgoing(_failure(id, error), 0))

    def _post(self, outgoing: _Outgoing) -> None:
        if self._deaf:
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
        """Empty the outbox, again and again, until the client leaves."""
        try:
            while True:
                while self._outbox:
                    await self._send_next(self._outbox[0])
                    self._claim.give(self._outbox.popleft().charged)
                self._sent.set()
                self._posted.clear()
                await self._posted.wait()
        except WebSocketDisconnect:
            pass  # the task that receives is told too
        finally:
            self._deaf = True
            for each in self._outbox:
                self._drop(each)
            self._outbox.clear()
            self._sent.set()

    async def _send_next(self, outgoing: _Outgoing) -> None:
        """Send what is next in the outbox, once it has been written."""
        message, request = outgoing.message, outgoing.request
        if isinstance(message, asyncio.Future):
            assert request is not None  # whose answer it is
            try:
                message = await message
                self._claim.give(outgoing.charged)
                outgoing.charged = 0
                self._claim.take(len(message))
                outgoing.charged = len(message)
                request.exchange.transferred(request.received_bytes, len(message))
            except Exception as error:
                message = _failure(request.asked.id, _shown(request.asked, error))
            outgoing.message = message
        await self._send(message)

    # Requests that have a task.

    async def _answer(self, asked: InferenceRequest, received: int) -> None:
        """Bring the answers to one request, or its error."""
        with self._account.claim() as claim:
            CLAIM.set(claim)
            await self._answer_counted(asked, received)

    async def _answer_counted(self, asked: InferenceRequest, received: int) -> None:
        try:
            try:
                await self._stream(asked, received)
            except asyncio.CancelledError:
                if asked.id not in self._withdrawn:
                    raise
                raise _given_up() from None
            except (WebSocketDisconnect, WeirError):
                raise
            except Exception as error:
                _log.exception("an answer of %s cannot be written", asked.model)
                raise WeirError("internal error") from error
        except WeirError as error:
            self.post_failure(asked.id, error)
        except WebSocketDisconnect:
            pass  # the task that receives is told too
        finally:
            self._withdrawn.discard(asked.id)

    async def _stream(self, asked: InferenceRequest, received: int) -> None:
        service = find(self._registry, asked.model, asked.version)
        # The caller names his span in the message, or did so when the connection was opened.
        named = asked.parameters.pop(HEADER, None)
        traceparent = named if isinstance(named, str) else self._socket.headers.get(HEADER)
        exchange = Exchange(service, door=FRONTEND, traceparent=traceparent)
        sent, last = 0, False
        async with aclosing(exchange.stream(asked)) as parts:
            async for part in parts:
                last = part.last
                sent += await self._send_response(exchange, asked, part.response, last=last)
        if not last:
            end = InferenceResponse(service.name, [], version=service.version, id=asked.id)
            sent += await self._send_response(exchange, asked, end, last=True)
        exchange.transferred(received, sent)

    async def _send_response(
        self, exchange: Exchange, asked: InferenceRequest, response: InferenceResponse, *, last: bool
    ) -> int:
        named = {} if exchange.trace is None else {HEADER: exchange.trace.traceparent}
        response.parameters = {**response.parameters, **named, FINAL: last}
        size = bytes_to_write(response, binary_outputs(asked))
        message = await written(size, partial(write_response, asked, response))
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
            raise WebSocketDisconnect(NO_WORD) from None
        return len(message)

    def _give_up(self) -> None:
        self._stuck = True
        if self._main is not None and self._main is not asyncio.current_task():
            self._main.cancel()


def _given_up() -> Cancelled:
    return Cancelled("the client has cancelled it")


def _shown(asked: InferenceRequest, error: Exception) -> WeirError:
    """Return the error for an answer that could not be written; an exception that is not Weir's is logged."""
    if isinstance(error, WeirError):
        return error
    _log.error("an answer of %s cannot be written", asked.model, exc_info=error)
    return WeirError("internal error")


def _failure(id: str, error: WeirError) -> str:
    """Return the message that a request failed."""
    wait = (error.retry_after or 0.0) if isinstance(error, CapacityError) else None
    kind = "InternalError" if type(error) is WeirError else type(error).__name__
    return write_failure(ErrorMessage(bounded(error.message), id, kind, kserve_code(error), wait))


async def _id_of(message: Message) -> str:
    try:
        return await off_loop(len(message), partial(id_of, message))
    except WeirError:  # there is no memory even for that
        return ""


PATHS = ("/v2/ws", "/models/infer")


class WebSockets:
    """All the WebSockets of a server; what their requests and answers hold is charged to `account`."""

    def __init__(self, registry: "Registry", settings: HttpSettings, account: Account | None = None) -> None:
        self._account = account or Account(settings)
        self._registry = registry
        self._settings = settings
        self._sessions: set[Session] = set()
        self._refusing = False
        self._none_left = asyncio.Event()

    def routes(self) -> list[WebSocketRoute]:
        """Return Starlette's routes to them."""
        return [WebSocketRoute(path, self.serve) for path in PATHS]

    @property
    def open(self) -> int:
        """How many there are."""
        return len(self._sessions)

    async def serve(self, socket: WebSocket) -> None:
        """Serve one connection to its end. One that a page of another origin opens is refused with 403."""
        if not allowed(socket.headers.getlist("origin"), socket.headers.get("host", ""), self._settings.cors_origins):
            await socket.close()
            return
        session = Session(socket, self._registry, self._settings, self._account)
        if self._refusing:
            session.refuse()
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._none_left.set()

    def refuse(self) -> None:
        """Read no more requests. Every connection closes when what is under way has been answered."""
        self._refusing = True
        for session in self._sessions:
            session.refuse()

    async def closed(self) -> None:
        """Return when no connection is open."""
        while self._sessions:
            self._none_left.clear()
            await self._none_left.wait()
