"""The clients for WebSocket. One connection carries many inference requests at a time, each with an id; responses come as they are
ready. All other calls go to the same server over HTTP. Needs websockets and httpx."""

import asyncio
import queue
import select
import socket
import threading
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from contextlib import ExitStack, aclosing, closing, nullcontext, suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from weir.client.calls import (
    FINAL,
    ConnectionLost,
    Decoder,
    Program,
    Retry,
    Silence,
    Streaming,
    Unreachable,
    error_of_status,
)
from weir.client.http import CONNECTIONS, AsyncHttpTransport, headers_with
from weir.client.http_calls import Connections, HttpCalls, address_of, connect_unix, tls_context, with_binary_outputs
from weir.client.methods import AsyncClient, Client, PerLoop
from weir.errors import InvalidRequest, Overloaded, Unsupported, WeirError
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.websocket import ErrorMessage, Message, read_answer, write_cancel, write_request

Answer = InferenceResponse | ErrorMessage


class WebSocketRequest(NamedTuple):
    """A step: an inference request. The transport sends it under an id of its own; its responses get the caller's id again."""

    request: InferenceRequest
    binary: bool

    def message(self, id: str) -> Message:
        """Return the message to send under that id."""
        own = with_binary_outputs(self.request) if self.binary else self.request
        sent = InferenceRequest(
            own.model, own.inputs, version=own.version, id=id, outputs=own.outputs, parameters=own.parameters
        )
        return write_request(sent, binary=self.binary)


class WebSocketCalls(HttpCalls):
    """HttpCalls, except that the steps of inference are WebSocketRequests."""

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""
        (response,) = _read((yield WebSocketRequest(request, self._binary)), request.id)
        if response.parameters.get(FINAL) is False:
            raise Unsupported(f"model {request.model!r} streams its responses: call stream instead of infer")
        return response

    def stream(self, request: InferenceRequest) -> Streaming:
        """See Calls."""

        def decode(answer: Answer) -> Iterable[InferenceResponse]:
            (response,) = _read(answer, request.id)
            if response.outputs or not response.parameters.get(FINAL):
                yield response

        def decoder() -> Decoder:
            return decode

        return Streaming(WebSocketRequest(request, self._binary), decoder)


def is_last(answer: Answer) -> bool:
    """Return whether no more responses to the same request follow."""
    return isinstance(answer, ErrorMessage) or answer.parameters.get(FINAL) is not False


def _read(answer: Answer, id: str) -> tuple[InferenceResponse]:
    if isinstance(answer, ErrorMessage):
        raise error_of_status(answer.status, answer.error, name=answer.type, retry_after=answer.retry_after)
    answer.id = id
    return (answer,)


# Responses to one request that are kept for a slow reader. The connection is read on meanwhile, for the other requests.
MAX_KEPT = 4096

Received = Answer | WeirError


class AnswerQueue(Protocol):
    """A queue for the responses to one request, for threads or for an event loop."""

    def put_nowait(self, received: Received, /) -> None:
        """Add a response, or the error that ends the request."""

    def qsize(self) -> int:
        """Return the number of entries."""


class AnswerRouter:
    """Passes the messages of one connection to the requests that wait for them. `url` is for errors.

    The receiving thread calls `deliver` and `close`; any thread may call the other methods.
    """

    def __init__(self, url: str) -> None:
        self._queues: dict[str, AnswerQueue] = {}
        self._ids = count()
        self._url = url
        self._end = ConnectionLost(f"{url}: the connection ended before the response")
        self._closed = False

    def expect(self, answers: AnswerQueue) -> str:
        """Return an id for a request whose responses go to `answers`. When the connection ends, or has ended, ConnectionLost goes
        there too."""
        own = str(next(self._ids))
        self._queues[own] = answers
        if self._closed:
            answers.put_nowait(self._end)
        return own

    def forget(self, id: str) -> None:
        """Drop all further responses to a request."""
        self._queues.pop(id, None)

    def deliver(self, message: str | bytes) -> bool:
        """Pass on one message; return False if it cannot be read, after which the connection must be closed. A reader that is
        MAX_KEPT answers behind gets those, and then Overloaded."""
        try:
            answer = read_answer(message)
        except InvalidRequest as error:
            self._end = ConnectionLost(f"{self._url}: the server sent a message that cannot be read: {error.message}")
            return False
        answers = self._queues.get(answer.id)
        if answers is None:
            return True
        if answers.qsize() < MAX_KEPT:
            answers.put_nowait(answer)
        else:
            self.forget(answer.id)
            answers.put_nowait(
                Overloaded(f"{self._url}: {MAX_KEPT} responses to one request are unread, which is the maximum")
            )
        return True

    def close(self) -> None:
        """End all waiting requests with ConnectionLost: the connection has ended."""
        self._closed = True
        for answers in list(self._queues.values()):
            answers.put_nowait(self._end)


PATH = "/v2/ws"

# Seconds that a request may wait to be cancelled, by a server that reads slowly: its caller waits as long.
_CANCEL_WAIT = 0.25

# A message of at most so many bytes does not block where the socket can be written to. For each longer one, a thread watches over its time.
_SHORT = 4 << 10

# The exceptions of a connection that cannot be made.
_NOT_MADE = (OSError, ConnectionClosed, InvalidHandshake, TimeoutError)


class WebSocketClient(Client):
    """A client of a server over one WebSocket, such as `WebSocketClient("http://localhost:8000")`. The requests of many threads may
    be under way on it at a time. The arguments are those of HttpClient."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        token: str | None = None,
        retry: Retry | None = None,
        binary: bool = True,
        connections: int = CONNECTIONS,
        tls: Any = True,
    ) -> None:
        url = _server(url)
        http = Connections(url, token, connections, tls)
        transport = WebSocketTransport(url, connect_options(url, tls, headers_with(token)), http)
        super().__init__(WebSocketCalls(binary=binary), transport, timeout=timeout, retry=retry)


class AsyncWebSocketClient(AsyncClient):
    """WebSocketClient for an event loop: the methods are to be awaited."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        token: str | None = None,
        retry: Retry | None = None,
        binary: bool = True,
        connections: int = CONNECTIONS,
        tls: Any = True,
    ) -> None:
        url, headers = _server(url), headers_with(token)
        http = AsyncHttpTransport(url, headers, connections, tls)
        transport = AsyncWebSocketTransport(url, connect_options(url, tls, headers), http)
        super().__init__(WebSocketCalls(binary=binary), transport, timeout=timeout, retry=retry)


class _Opened(NamedTuple):
    connection: ClientConnection
    router: AnswerRouter
    thread: threading.Thread  # receives
    sending: threading.Lock  # held by the thread that sends


class WebSocketTransport:
    """A Transport that sends WebSocketRequests over one WebSocket, which is opened when needed, and other steps over `http`."""

    def __init__(self, url: str, options: dict[str, Any], http: Connections) -> None:
        self._url = url
        self._options = options
        self._path = address_of(url)[1]
        self._http = http
        self._lock = threading.Lock()
        self._opened: _Opened | None = None

    def send(self, step: Any, timeout: float) -> Any:
        """Do a step and return its response; for a WebSocketRequest, its first response. See Transport."""
        if not isinstance(step, WebSocketRequest):
            return self._http.send(step, timeout)
        with closing(self.chunks(step, Silence(timeout))) as chunks:
            return next(chunks)

    def chunks(self, step: WebSocketRequest, silence: Silence) -> Generator[Answer, None, None]:
        """Send a request and yield its responses. Raises DeadlineExceeded when `silence` is over, ConnectionLost, Unreachable, and
        Overloaded for a reader that is too slow."""
        opened = self._connected(silence.seconds)
        router, answers = opened.router, queue.SimpleQueue[Received]()
        own, ended = router.expect(answers), False
        try:
            _send(opened, step.message(own), silence)
            while not ended:
                try:
                    answer = _answer(answers.get(timeout=silence.left))
                except queue.Empty:
                    raise silence.error() from None
                ended = is_last(answer)
                yield answer
        finally:
            router.forget(own)
            if not ended:
                _cancel(opened, own)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.connection.close()
            opened.thread.join()
        self._http.close()

    def _connected(self, timeout: float) -> _Opened:
        with self._lock:
            if self._opened is None:
                context = ExitStack()
                try:
                    local: dict[str, Any] = {} if self._path is None else {"sock": connect_unix(self._path, timeout)}
                    connection = context.enter_context(connect(open_timeout=timeout, **self._options, **local))
                except _NOT_MADE as error:
                    raise Unreachable(f"{self._url}: no connection ({error})") from error
                router = AnswerRouter(self._url)
                arguments = (context, connection, router)
                thread = threading.Thread(target=self._receive, args=arguments, name="weir-client", daemon=True)
                self._opened = _Opened(connection, router, thread, threading.Lock())
                thread.start()
            return self._opened

    def _receive(self, context: ExitStack, connection: ClientConnection, router: AnswerRouter) -> None:
        """Pass on all messages until the connection ends."""
        with context:
            try:
                for message in connection:
                    if not router.deliver(message):
                        break
            except ConnectionClosed:
                pass
            finally:
                with self._lock:
                    if self._opened is not None and self._opened.router is router:
                        self._opened = None
                router.close()


class AsyncWebSocketTransport:
    """WebSocketTransport for an event loop."""

    def __init__(self, url: str, options: dict[str, Any], http: AsyncHttpTransport) -> None:
        self._connections = PerLoop(partial(_AsyncConnections, url, options), _AsyncConnections.close)
        self._http = http

    async def send(self, step: Any, timeout: float) -> Any:
        """Do a step and return its response; for a WebSocketRequest, its first response. See Transport."""
        if not isinstance(step, WebSocketRequest):
            return await self._http.send(step, timeout)
        silence = Silence(timeout)
        async with aclosing(self.chunks(step, silence)) as chunks:
            return await silence.next_of(chunks)

    async def chunks(self, step: WebSocketRequest, silence: Silence) -> AsyncGenerator[Answer, None]:
        """Send a request and yield its responses. Raises ConnectionLost, Unreachable, and Overloaded for a reader that is too slow. See
        AsyncTransport."""
        connections = await self._connections.get()
        connection, router = await connections.connected(silence.seconds)
        answers = asyncio.Queue[Received]()
        own, ended = router.expect(answers), False
        try:
            await connections.send(connection, step.message(own))
            while not ended:
                answer = _answer(await answers.get())
                ended = is_last(answer)
                yield answer
        finally:
            router.forget(own)
            if not ended:
                with suppress(WeirError, TimeoutError):
                    async with asyncio.timeout(_CANCEL_WAIT):
                        await connections.send(connection, write_cancel(own))

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()
        await self._http.close()


class _AsyncConnections:
    """The connection to `url` in one event loop. It is made when it is needed, and again when it has ended."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._url = url
        self._options = options
        self._path = address_of(url)[1]
        self._lock = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._opened: tuple[AsyncConnection, AnswerRouter, asyncio.Task[None]] | None = None

    async def close(self) -> None:
        """Close the connection."""
        opened, self._opened = self._opened, None
        if opened is not None:
            connection, _, receiving = opened
            await _close(connection)
            await receiving

    async def send(self, connection: AsyncConnection, message: str | bytes) -> None:
        """Send `message` after those before it: a server that does not read holds no more than one of them in memory here. Raises ConnectionLost."""
        try:
            async with self._sending:
                await connection.drain()
                await connection.send(message)
        except (ConnectionClosed, ConnectionError) as error:
            raise ConnectionLost(f"the connection ended before the response ({error})") from error

    async def connected(self, timeout: float) -> tuple[AsyncConnection, AnswerRouter]:
        """Return the connection, and the router of its responses. Raises Unreachable."""
        async with self._lock:
            if self._opened is None:
                try:
                    local: dict[str, Any] = {} if self._path is None else {"unix": True, "path": self._path}
                    connection = await connect_async(open_timeout=timeout, **self._options, **local)
                except _NOT_MADE as error:
                    raise Unreachable(f"{self._url}: no connection ({error})") from error
                router = AnswerRouter(self._url)
                self._opened = connection, router, asyncio.create_task(self._receive(connection, router))
            return self._opened[:2]

    async def _receive(self, connection: AsyncConnection, router: AnswerRouter) -> None:
        try:
            async for message in connection:
                if not router.deliver(message):
                    break
        except ConnectionClosed:
            pass
        finally:
            if self._opened is not None and self._opened[1] is router:
                self._opened = None
            router.close()
            await _close(connection)


def _answer(received: Received) -> Answer:
    """Return the response. Raises the error if it is one."""
    if isinstance(received, WeirError):
        raise received
    return received


def _send(opened: _Opened, message: str | bytes, silence: Silence) -> None:
    """Send `message`. Raises DeadlineExceeded if the server does not read it before `silence` is over, and ConnectionLost."""
    connection = opened.connection
    if not opened.sending.acquire(timeout=silence.left):
        raise silence.error()
    try:
        is_short = len(message) <= _SHORT and _is_writable(connection, 0.0)
        with nullcontext() if is_short else silence.ending(partial(_shut, connection)):
            _pass_on(connection, message)
    finally:
        opened.sending.release()


def _pass_on(connection: ClientConnection, message: str | bytes) -> None:
    try:
        connection.send(message)
    except ConnectionClosed as error:
        raise ConnectionLost(f"the connection ended before the response ({error})") from error


def _cancel(opened: _Opened, id: str) -> None:
    """Cancel a request, unless the server does not read."""
    if opened.sending.acquire(timeout=_CANCEL_WAIT):
        try:
            with suppress(ConnectionClosed):
                if _is_writable(opened.connection, _CANCEL_WAIT):
                    opened.connection.send(write_cancel(id))
        finally:
            opened.sending.release()


def _is_writable(connection: ClientConnection, timeout: float) -> bool:
    """Return whether a short message can be sent within `timeout` seconds; also for a connection that has ended, which `send` reports."""
    poll = select.poll()
    try:
        poll.register(connection.socket, select.POLLOUT)
    except ValueError:  # closed
        return True
    return bool(poll.poll(1000.0 * timeout))


def _shut(connection: ClientConnection) -> None:
    with suppress(OSError):  # it has ended
        connection.socket.shutdown(socket.SHUT_RDWR)


async def _close(connection: AsyncConnection) -> None:
    """Close the connection. One whose server does not read would never be closed in the usual way."""
    if connection.transport.get_write_buffer_size():
        connection.transport.abort()
    await connection.close()


def _server(url: str) -> str:
    """Return the address of the server, which ws:// and wss:// name as well as http:// and https://."""
    return url.replace("ws", "http", 1) if url.startswith(("ws://", "wss://")) else url


def connect_options(url: str, tls: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of websockets' `connect` for the server at `url`; `tls` is as for HttpClient."""
    address = address_of(url)[0].rstrip("/").replace("http", "ws", 1) + PATH
    options: dict[str, Any] = {"uri": address, "max_size": None, "compression": None, "proxy": None}
    options["additional_headers"] = headers
    if address.startswith("wss"):
        options["ssl"] = tls_context(tls)
    return options
