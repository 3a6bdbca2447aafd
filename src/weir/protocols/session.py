"""One WebSocket connection: its requests under way, each a task, and their answers."""

import asyncio
import logging
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from weir.errors import Cancelled, CapacityError, Conflict, WeirError, bounded, brief
from weir.protocols import inferring
from weir.protocols.account import Account
from weir.protocols.offloading import off_loop
from weir.protocols.settings import HttpSettings
from weir.protocols.status import kserve_code
from weir.telemetry.tracecontext import CURRENT, HEADER, Trace
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.websocket import (
    FINAL,
    Cancel,
    Failure,
    Message,
    id_of,
    read_request,
    write_failure,
    write_response,
)  # fmt: skip

if TYPE_CHECKING:
    from weir.manager.registry import Registry
    from weir.manager.service import Service

DOOR = "websocket"
GOING_AWAY = 1001
TOO_BIG = 1009
NO_WORD = 1006  # never sent
_log = logging.getLogger("weir.websocket")


class Session:
    """Serves one connection. `refusing` is set when the server takes nothing more; requests and answers are charged to `account`."""

    def __init__(
        self, socket: WebSocket, registry: "Registry", settings: HttpSettings, refusing: asyncio.Event, account: Account
    ) -> None:  # fmt: skip
        self._socket = socket
        self._account = account
        self._claim = account.claim()
        self._registry = registry
        self._settings = settings
        self._refusing = refusing
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._withdrawn: set[str] = set()
        self._main: asyncio.Task[Any] | None = None
        self._stuck = False  # the client has not read for too long

    async def run(self) -> None:
        """Accept the connection and serve it until one of the two leaves."""
        self._main = asyncio.current_task()
        await self._socket.accept()
        refusing = asyncio.ensure_future(self._refusing.wait())
        try:
            code = await self._serve(refusing)
            if code is not None:
                await self._socket.close(code)
        except WebSocketDisconnect:
            pass
        except asyncio.CancelledError:
            if not self._stuck:
                raise
        finally:
            refusing.cancel()
            await self._leave()

    async def _serve(self, refusing: "asyncio.Future[Any]") -> int | None:
        """Take messages; return the code to close the connection with, or None if it is closed."""
        while await self._has_room(refusing):
            received = await self._received(refusing)
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
                await self._send_failure(*failure)
        await self._answered()
        return GOING_AWAY

    async def _received(self, refusing: "asyncio.Future[Any]") -> Any:
        """Return the next event, or None if no more is taken."""
        receiving = asyncio.ensure_future(self._socket.receive())
        try:
            await asyncio.wait((receiving, refusing), return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else None
        finally:
            receiving.cancel()

    async def _has_room(self, refusing: "asyncio.Future[Any]") -> bool:
        """Wait until one more request may come; False if none is taken any more."""
        while self._has_enough and not refusing.done():
            await asyncio.wait((*self._under_way.values(), refusing), return_when=asyncio.FIRST_COMPLETED)
        return not refusing.done()

    @property
    def _has_enough(self) -> bool:
        """Whether as much is under way as one connection may have; where nothing is, one more may always come."""
        much = self._claim.held_bytes > self._account.max_connection_bytes
        return len(self._under_way) >= self._settings.websocket_in_flight or (much and bool(self._under_way))

    async def _answered(self) -> None:
        if self._under_way:
            await asyncio.wait(list(self._under_way.values()))

    async def _leave(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        await self._answered()

    async def _take(self, message: Message) -> tuple[str, WeirError] | None:
        """Begin what a message asks for, or return its id and what is wrong with it."""
        size = 0
        try:
            self._claim.take(len(message))
            size = len(message)
            asked = await off_loop(len(message), partial(read_request, message))
            if isinstance(asked, Cancel):
                self._withdraw(asked.id)
                self._claim.give(size)
                return None
            if asked.id in self._under_way and not self._under_way[asked.id].done():
                raise Conflict(f"id {brief(asked.id, 100)}: is that of a request under way on this connection")
            arrays = sum([each.array.nbytes for each in asked.inputs])
            self._claim.take(arrays)
            size += arrays
        except WeirError as error:
            self._claim.give(size)
            return await off_loop(len(message), partial(id_of, message)), error.with_traceback(None)
        task = asyncio.ensure_future(self._answer(asked, len(message)))
        self._under_way[asked.id] = task
        task.add_done_callback(lambda ended: self._ended(asked.id, ended, size))
        return None

    def _ended(self, id: str, task: "asyncio.Task[None]", size: int) -> None:
        self._claim.give(size)
        if self._under_way.get(id) is task:
            del self._under_way[id]

    def _withdraw(self, id: str) -> None:
        task = self._under_way.get(id)
        if task is not None and id not in self._withdrawn:
            self._withdrawn.add(id)
            task.cancel()

    async def _answer(self, asked: InferenceRequest, received: int) -> None:
        """Bring the answers to one request, or its error."""
        try:
            try:
                await self._stream(asked, received)
            except asyncio.CancelledError:
                if asked.id not in self._withdrawn:
                    raise
                raise Cancelled("the client has cancelled it") from None
            except (WebSocketDisconnect, WeirError):
                raise
            except Exception as error:
                _log.exception("an answer of %s cannot be written", asked.model)
                raise WeirError("internal error") from error
        except WeirError as error:
            await self._fail(asked.id, error)
        except WebSocketDisconnect:
            pass  # whoever receives hears of it too
        finally:
            self._withdrawn.discard(asked.id)

    async def _fail(self, id: str, error: WeirError) -> None:
        with suppress(WebSocketDisconnect):
            await self._send_failure(id, error)

    async def _stream(self, asked: InferenceRequest, received: int) -> None:
        service = inferring.find(self._registry, asked.model, asked.version)
        trace = self._trace(service, asked)
        sent, last = 0, False
        async with aclosing(inferring.stream(service, asked, door=DOOR, trace=trace)) as parts:
            async for part in parts:
                last = part.last
                sent += await self._send_response(asked, part.response, trace, last=last)
        if not last:
            end = InferenceResponse(service.name, [], version=service.version, id=asked.id)
            sent += await self._send_response(asked, end, trace, last=True)
        for observer in service.observers:
            observer.transferred(service.label, DOOR, received, sent)

    def _trace(self, service: "Service", asked: InferenceRequest) -> Trace | None:
        """Begin the trace of a request: within the caller's, who named it in the message or when the connection was opened."""
        said = asked.parameters.pop(HEADER, None)
        if service.tracing is None:
            return None
        trace = service.tracing.new(said if isinstance(said, str) else self._socket.headers.get(HEADER))
        CURRENT.set(trace)  # of the task that answers this request
        return trace

    async def _send_response(
        self, asked: InferenceRequest, response: InferenceResponse, trace: Trace | None, *, last: bool
    ) -> int:
        named = {} if trace is None else {HEADER: trace.traceparent}
        response.parameters = {**response.parameters, **named, FINAL: last}
        message = write_response(asked, response)
        self._claim.take(len(message))
        try:
            return await self._send(message)
        finally:
            self._claim.give(len(message))

    async def _send_failure(self, id: str, error: WeirError) -> None:
        wait = (error.retry_after or 0.0) if isinstance(error, CapacityError) else None
        kind = "InternalError" if type(error) is WeirError else type(error).__name__
        await self._send(write_failure(Failure(bounded(error.message), id, kind, kserve_code(error), wait)))

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
