"""The clients that speak WebSocket. Needs websockets, and httpx for all that is no inference."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import ExitStack, aclosing, closing, suppress
from itertools import count
from typing import Any, NamedTuple, Protocol

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from weir.client.blocking_http import connect_unix
from weir.client.calls import FINAL, ConnectionLost, Decoder, Program, Retry, Streaming, Unreachable, error_of_status
from weir.client.http import CONNECTIONS, AsyncHttpTransport, HttpTransport
from weir.client.http_calls import HttpCalls, address_of, asking_binary
from weir.client.methods import AsyncClient, Client
from weir.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unsupported, WeirError
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.websocket import ErrorMessage, Message, read_answer, write_cancel, write_request

# Inference over WebSocket: messages with ids, many under way on one connection, whose answers come as they end.
#
# All other calls go over HTTP, to the same server.


Answer = InferenceResponse | ErrorMessage


class WebSocketRequest(NamedTuple):
    """A request to be sent. Its id is the connection's business; the answers are given back with the caller's own."""

    request: InferenceRequest
    binary: bool

    def message(self, id: str) -> Message:
        """Return what is sent, under that id."""
        asked = asking_binary(self.request) if self.binary else self.request
        sent = InferenceRequest(
            asked.model, asked.inputs, version=asked.version, id=id, outputs=asked.outputs, parameters=asked.parameters
        )
        return write_request(sent, binary=self.binary)


class WebSocketCalls(HttpCalls):
    """HttpCalls, but for inference, whose steps are Asked."""

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""
        (response,) = _read((yield WebSocketRequest(request, self._binary)), request.id)
        if response.parameters.get(FINAL) is False:
            raise Unsupported(f"model {request.model!r} streams its answers: ask it with stream")
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
    """Tell whether no more answers to the same request follow."""
    return isinstance(answer, ErrorMessage) or answer.parameters.get(FINAL) is not False


def _read(answer: Answer, id: str) -> tuple[InferenceResponse]:
    if isinstance(answer, ErrorMessage):
        raise error_of_status(answer.status, answer.error, name=answer.type, retry_after=answer.retry_after)
    answer.id = id
    return (answer,)


# The answers that come on one WebSocket, handed to those who wait for them.


# Answers to one request that are kept while nobody reads them. The connection is read on meanwhile, for all others.
MOST_KEPT = 4096

Got = Answer | WeirError


class Box(Protocol):
    """Where the answers to one request are kept: a queue, of threads or of an event loop."""

    def put_nowait(self, got: Got, /) -> None:
        """Add one."""

    def qsize(self) -> int:
        """How many there are."""


class Mail:
    """The requests that wait for answers on one connection. The receiving thread calls `deliver` and `close`; other threads may call the rest."""

    def __init__(self, url: str) -> None:
        self._boxes: dict[str, Box] = {}
        self._ids = count()
        self._url = url
        self._end = ConnectionLost(f"{url}: the connection ended before the answer")
        self._closed = False

    def expect(self, box: Box) -> str:
        """Return the id of a request whose answers go to `box`; so does the end of the connection, even if it has come."""
        own = str(next(self._ids))
        self._boxes[own] = box
        if self._closed:
            box.put_nowait(self._end)
        return own

    def forget(self, id: str) -> None:
        """Forget a request that is not waited for any more."""
        self._boxes.pop(id, None)

    def deliver(self, message: str | bytes) -> bool:
        """Hand on one message; False if it cannot be read, and nothing can that comes after it. A reader who is too far behind
        gets no more than what was kept, and an error then."""
        try:
            answer = read_answer(message)
        except InvalidRequest as error:
            self._end = ConnectionLost(f"{self._url}: sent what cannot be read: {error.message}")
            return False
        box = self._boxes.get(answer.id)
        if box is None:
            return True
        if box.qsize() < MOST_KEPT:
            box.put_nowait(answer)
        else:
            self.forget(answer.id)
            box.put_nowait(
                Overloaded(f"{self._url}: {MOST_KEPT} answers to one request were not read: no more are kept")
            )
        return True

    def close(self) -> None:
        """The connection has ended: tell all who wait."""
        self._closed = True
        for box in list(self._boxes.values()):
            box.put_nowait(self._end)


PATH = "/v2/ws"

# What can keep a connection from being made.
_NOT_MADE = (OSError, InvalidHandshake, TimeoutError)


class WebSocketClient(Client):
    """Asks a server over one WebSocket, such as `WebSocketClient("http://localhost:8000")`, or "unix:weir.sock": requests of many threads are
    under way on it at a time. The arguments are those of HttpClient."""

    def __init__(
        self, url: str, *, timeout: float = 60.0, token: str | None = None, retry: Retry | None = None,
        binary: bool = True, connections: int = CONNECTIONS, tls: Any = True,
    ) -> None:  # fmt: skip
        transport = WebSocketTransport(url, tls, HttpTransport(url, token, connections, tls))
        super().__init__(WebSocketCalls(binary=binary), transport, timeout=timeout, retry=retry)


class AsyncWebSocketClient(AsyncClient):
    """The same for an event loop; see WebSocketClient."""

    def __init__(
        self, url: str, *, timeout: float = 60.0, token: str | None = None, retry: Retry | None = None,
        binary: bool = True, connections: int = CONNECTIONS, tls: Any = True,
    ) -> None:  # fmt: skip
        transport = AsyncWebSocketTransport(url, tls, AsyncHttpTransport(url, token, connections, tls))
        super().__init__(WebSocketCalls(binary=binary), transport, timeout=timeout, retry=retry)


class WebSocketTransport:
    """Sends what is Asked over one connection, which is made when it is needed, and all else over HTTP."""

    def __init__(self, url: str, tls: Any, http: HttpTransport) -> None:
        self._url = url
        self._options = _options(url, tls)
        self._path = address_of(url)[1]
        self._http = http
        self._lock = threading.Lock()
        self._opened: tuple[ClientConnection, Mail, threading.Thread] | None = None

    def send(self, step: Any, timeout: float) -> Any:
        """Return the answer to one step; of a request, its first."""
        if not isinstance(step, WebSocketRequest):
            return self._http.send(step, timeout)
        with closing(self.chunks(step, timeout)) as chunks:
            return next(chunks)

    def chunks(self, step: WebSocketRequest, timeout: float) -> Generator[Answer, None, None]:
        """Yield the answers to one request; silence for `timeout` seconds ends it."""
        connection, mail = self._connected(timeout)
        box = queue.SimpleQueue[Got]()
        own, ended = mail.expect(box), False
        try:
            _send(connection, step.message(own))
            while not ended:
                try:
                    answer = _received(box.get(timeout=timeout))
                except queue.Empty:
                    raise _silent(self._url, timeout) from None
                ended = is_last(answer)
                yield answer
        finally:
            mail.forget(own)
            if not ended:
                with suppress(WeirError):
                    _send(connection, write_cancel(own))

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            connection, _, thread = opened
            connection.close()
            thread.join()
        self._http.close()

    def _connected(self, timeout: float) -> tuple[ClientConnection, Mail]:
        with self._lock:
            if self._opened is None:
                context = ExitStack()
                try:
                    local: dict[str, Any] = {} if self._path is None else {"sock": connect_unix(self._path, timeout)}
                    connection = context.enter_context(connect(open_timeout=timeout, **self._options, **local))
                except _NOT_MADE as error:
                    raise Unreachable(f"{self._url}: no connection ({error})") from error
                mail = Mail(self._url)
                arguments = (context, connection, mail)
                thread = threading.Thread(target=self._receive, args=arguments, name="weir-client", daemon=True)
                self._opened = connection, mail, thread
                thread.start()
            return self._opened[:2]

    def _receive(self, context: ExitStack, connection: ClientConnection, mail: Mail) -> None:
        """Hand on what comes, until the connection ends."""
        with context:
            try:
                for message in connection:
                    if not mail.deliver(message):
                        break
            except ConnectionClosed:
                pass
            finally:
                with self._lock:
                    if self._opened is not None and self._opened[1] is mail:
                        self._opened = None
                mail.close()


class AsyncWebSocketTransport:
    """The same from an event loop."""

    def __init__(self, url: str, tls: Any, http: AsyncHttpTransport) -> None:
        self._url = url
        self._options = _options(url, tls)
        self._path = address_of(url)[1]
        self._http = http
        self._lock = asyncio.Lock()
        self._opened: tuple[AsyncConnection, Mail, asyncio.Task[None]] | None = None

    async def send(self, step: Any, timeout: float) -> Any:
        """Return the answer to one step; of a request, its first."""
        if not isinstance(step, WebSocketRequest):
            return await self._http.send(step, timeout)
        async with aclosing(self.chunks(step, timeout)) as chunks:
            return await anext(chunks)

    async def chunks(self, step: WebSocketRequest, timeout: float) -> AsyncGenerator[Answer, None]:
        """Yield the answers to one request; silence for `timeout` seconds ends it."""
        connection, mail = await self._connected(timeout)
        box = asyncio.Queue[Got]()
        own, ended = mail.expect(box), False
        try:
            await _send_async(connection, step.message(own))
            while not ended:
                try:
                    answer = _received(await asyncio.wait_for(box.get(), timeout))
                except TimeoutError:
                    raise _silent(self._url, timeout) from None
                ended = is_last(answer)
                yield answer
        finally:
            mail.forget(own)
            if not ended:
                with suppress(WeirError):
                    await _send_async(connection, write_cancel(own))

    async def close(self) -> None:
        """Close all connections."""
        opened, self._opened = self._opened, None
        if opened is not None:
            connection, _, receiving = opened
            await connection.close()
            await receiving
        await self._http.close()

    async def _connected(self, timeout: float) -> tuple[AsyncConnection, Mail]:
        async with self._lock:
            if self._opened is None:
                try:
                    local: dict[str, Any] = {} if self._path is None else {"unix": True, "path": self._path}
                    connection = await connect_async(open_timeout=timeout, **self._options, **local)
                except _NOT_MADE as error:
                    raise Unreachable(f"{self._url}: no connection ({error})") from error
                mail = Mail(self._url)
                self._opened = connection, mail, asyncio.create_task(self._receive(connection, mail))
            return self._opened[:2]

    async def _receive(self, connection: AsyncConnection, mail: Mail) -> None:
        try:
            async for message in connection:
                if not mail.deliver(message):
                    break
        except ConnectionClosed:
            pass
        finally:
            if self._opened is not None and self._opened[1] is mail:
                self._opened = None
            mail.close()
            await connection.close()


def _received(got: Got) -> Answer:
    """Return the answer. Raises the error that came in its place."""
    if isinstance(got, WeirError):
        raise got
    return got


def _silent(url: str, timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{url}: no answer within {timeout:g} s")


def _send(connection: ClientConnection, message: str | bytes) -> None:
    try:
        connection.send(message)
    except ConnectionClosed as error:
        raise ConnectionLost(f"the connection ended before the answer ({error})") from error


async def _send_async(connection: AsyncConnection, message: str | bytes) -> None:
    try:
        await connection.send(message)
    except ConnectionClosed as error:
        raise ConnectionLost(f"the connection ended before the answer ({error})") from error


def _options(url: str, tls: Any) -> dict[str, Any]:
    address = address_of(url)[0].rstrip("/").replace("http", "ws", 1) + PATH
    options: dict[str, Any] = {"uri": address, "max_size": None, "compression": None, "proxy": None}
    return options if isinstance(tls, bool) or not address.startswith("wss") else {**options, "ssl": tls}
