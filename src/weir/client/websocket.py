"""The clients for WebSocket. One connection carries many inference requests at a time, each with an id; responses come as they are
ready. All other calls go to the same server over HTTP. Needs websockets and httptools."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from itertools import count
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from weir.client.calls import (
    FINAL,
    ConnectionLost,
    Decoder,
    Program,
    Silence,
    Streaming,
    Unreachable,
    error_of_status,
)
from weir.client.http import AsyncHttpTransport, HttpCalls, OverHttp, with_binary_outputs
from weir.client.http_connection import address_of, tls_context
from weir.client.methods import AsyncClient, BlockingTransport, Client, PerLoop
from weir.errors import InvalidRequest, Overloaded, Unsupported, WeirError
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.websocket import ErrorMessage, WrittenMessage, read_response, write_cancel, write_request

Response = InferenceResponse | ErrorMessage


class WebSocketCalls(HttpCalls):
    """HttpCalls, except that the steps of inference are WrittenMessages. The transport sends each under an id of its own; the responses get
    the caller's id again."""

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""
        (response,) = _read((yield self._written(request)), request.id)
        if response.parameters.get(FINAL) is False:
            raise Unsupported(f"model {request.model!r} streams its responses: call stream instead of infer")
        return response

    def stream(self, request: InferenceRequest) -> Streaming:
        """See Calls."""

        def decode(message: Response) -> Iterable[InferenceResponse]:
            (response,) = _read(message, request.id)
            if response.outputs or not response.parameters.get(FINAL):
                yield response

        def decoder() -> Decoder:
            return decode

        return Streaming(self._written(request), decoder)

    def _written(self, request: InferenceRequest) -> WrittenMessage:
        return write_request(with_binary_outputs(request) if self._binary else request, binary=self._binary)


def is_last(message: Response) -> bool:
    """Return whether no more responses to the same request follow."""
    return isinstance(message, ErrorMessage) or message.parameters.get(FINAL) is not False


def _read(message: Response, id: str) -> tuple[InferenceResponse]:
    if isinstance(message, ErrorMessage):
        raise error_of_status(message.status, message.error, name=message.type, retry_after=message.retry_after)
    message.id = id
    return (message,)


# Responses to one request that are kept for a slow reader. The connection is read on meanwhile, for the other requests.
MAX_KEPT = 4096

Received = Response | WeirError


class ResponseRouter:
    """Passes the messages of one connection to the requests that wait for them. `url` is for errors."""

    def __init__(self, url: str) -> None:
        self._queues: dict[str, asyncio.Queue[Received]] = {}
        self._ids = count()
        self._url = url
        self._end = ConnectionLost(f"{url}: the connection ended before the response")
        self._closed = False

    def expect(self, responses: asyncio.Queue[Received]) -> str:
        """Return an id for a request whose responses go to `responses`. When the connection ends, or has ended, ConnectionLost goes
        there too."""
        own = str(next(self._ids))
        self._queues[own] = responses
        if self._closed:
            responses.put_nowait(self._end)
        return own

    def forget(self, id: str) -> None:
        """Drop all further responses to a request."""
        self._queues.pop(id, None)

    def deliver(self, message: str | bytes) -> bool:
        """Pass on one message; return False if it cannot be read, after which the connection must be closed. A reader that is
        MAX_KEPT responses behind gets those, and then Overloaded."""
        try:
            received = read_response(message)
        except InvalidRequest as error:
            self._end = ConnectionLost(f"{self._url}: the server sent a message that cannot be read: {error.message}")
            return False
        responses = self._queues.get(received.id)
        if responses is None:
            return True
        if responses.qsize() < MAX_KEPT:
            responses.put_nowait(received)
        else:
            self.forget(received.id)
            responses.put_nowait(
                Overloaded(f"{self._url}: {MAX_KEPT} responses to one request are unread, which is the maximum")
            )
        return True

    def close(self) -> None:
        """End all waiting requests with ConnectionLost: the connection has ended."""
        self._closed = True
        for responses in self._queues.values():
            responses.put_nowait(self._end)


PATH = "/v2/ws"

# Seconds that a request may wait to be cancelled, by a server that reads slowly: its caller waits as long.
_CANCEL_WAIT = 0.25

# The exceptions of a connection that cannot be made.
_NOT_MADE = (OSError, ConnectionClosed, InvalidHandshake, TimeoutError)


class AsyncWebSocketTransport:
    """An AsyncTransport that sends WrittenMessages over one WebSocket, which is opened when needed, and other steps over HTTP. The
    arguments are those of AsyncHttpTransport."""

    def __init__(self, url: str, headers: Mapping[str, str], connections: int, tls: Any) -> None:
        server = url.replace("ws", "http", 1) if url.startswith(("ws://", "wss://")) else url
        options = connect_options(server, tls, headers)
        self._connections = PerLoop(partial(_AsyncConnections, server, options), _AsyncConnections.close)
        self._http = AsyncHttpTransport(server, headers, connections, tls)

    async def send(self, step: Any, timeout: float) -> Any:
        """Do a step and return its response; for a WrittenMessage, its first response. See Transport."""
        if not isinstance(step, WrittenMessage):
            return await self._http.send(step, timeout)
        silence = Silence(timeout)
        async with aclosing(self.chunks(step, silence)) as chunks:
            return await silence.next_of(chunks)

    async def chunks(self, step: WrittenMessage, silence: Silence) -> AsyncGenerator[Response, None]:
        """Send a request and yield its responses. Raises ConnectionLost, Unreachable, and Overloaded for a reader that is too slow. See
        AsyncTransport."""
        connections = await self._connections.get()
        connection, router = await connections.connected(silence.seconds)
        responses = asyncio.Queue[Received]()
        own, ended = router.expect(responses), False
        try:
            await connections.send(connection, step.message(own))
            while not ended:
                message = _response(await responses.get())
                ended = is_last(message)
                yield message
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


class WebSocketClient(OverHttp, Client):
    """A client of a server over one WebSocket, such as `WebSocketClient("http://localhost:8000")`. The requests of many threads may
    be under way on it at a time. See OverHttp for the arguments."""

    calls = WebSocketCalls

    @staticmethod
    def transport(*arguments: Any) -> BlockingTransport:
        """Return the transport, which runs in a thread of its own."""
        return BlockingTransport(AsyncWebSocketTransport(*arguments))


class AsyncWebSocketClient(OverHttp, AsyncClient):
    """WebSocketClient for an event loop: the methods are to be awaited."""

    calls = WebSocketCalls
    transport = AsyncWebSocketTransport


class _AsyncConnections:
    """The connection to `url` in one event loop. It is made when it is needed, and again when it has ended."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._url = url
        self._options = options
        self._path = address_of(url)[1]
        self._lock = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._opened: tuple[ClientConnection, ResponseRouter, asyncio.Task[None]] | None = None

    async def close(self) -> None:
        """Close the connection."""
        opened, self._opened = self._opened, None
        if opened is not None:
            connection, _, receiving = opened
            await _close(connection)
            await receiving

    async def send(self, connection: ClientConnection, message: str | bytes) -> None:
        """Send `message` after those before it: a server that does not read holds no more than one of them in memory here. Raises ConnectionLost."""
        try:
            async with self._sending:
                await connection.drain()
                await connection.send(message)
        except (ConnectionClosed, ConnectionError) as error:
            raise ConnectionLost(f"the connection ended before the response ({error})") from error

    async def connected(self, timeout: float) -> tuple[ClientConnection, ResponseRouter]:
        """Return the connection, and the router of its responses. Raises Unreachable."""
        async with self._lock:
            if self._opened is None:
                try:
                    local: dict[str, Any] = {} if self._path is None else {"unix": True, "path": self._path}
                    connection = await connect(open_timeout=timeout, **self._options, **local)
                except _NOT_MADE as error:
                    raise Unreachable(f"{self._url}: no connection ({error})") from error
                router = ResponseRouter(self._url)
                self._opened = connection, router, asyncio.create_task(self._receive(connection, router))
            return self._opened[:2]

    async def _receive(self, connection: ClientConnection, router: ResponseRouter) -> None:
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


def _response(received: Received) -> Response:
    """Return the response. Raises the error if it is one."""
    if isinstance(received, WeirError):
        raise received
    return received


async def _close(connection: ClientConnection) -> None:
    """Close the connection. One whose server does not read would never be closed in the usual way."""
    if connection.transport.get_write_buffer_size():
        connection.transport.abort()
    await connection.close()


def connect_options(url: str, tls: Any, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of websockets' `connect` for the server at `url`; `tls` is as for HttpClient."""
    address = address_of(url)[0].rstrip("/").replace("http", "ws", 1) + PATH
    options: dict[str, Any] = {"uri": address, "max_size": None, "compression": None, "proxy": None}
    options["additional_headers"] = headers
    if address.startswith("wss"):
        options["ssl"] = tls_context(tls)
    return options
