"""The clients that speak WebSocket. Needs websockets, and httpx for all that is no inference."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from weir.client.asynchronous import AsyncClient
from weir.client.failures import ConnectionLost, Unreachable
from weir.client.http import CONNECTIONS, AsyncHttpTransport, HttpTransport
from weir.client.retrying import Retry
from weir.client.synchronous import Client
from weir.client.websocket_calls import Answer, Asked, WebSocketCalls, is_last
from weir.errors import DeadlineExceeded, InvalidRequest, WeirError
from weir.wire.websocket import read_answer, write_cancel

PATH = "/v2/ws"

# What can keep a connection from being made.
_NOT_MADE = (OSError, InvalidHandshake, TimeoutError)


class WebSocketClient(Client):
    """Asks a server over one WebSocket, such as `WebSocketClient("http://localhost:8000")`: requests of many threads are under
    way on it at a time. The arguments are those of HttpClient."""

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
        self._http = http
        self._ids = count()
        self._lock = threading.Lock()
        self._connection: ClientConnection | None = None
        self._waiting: dict[str, queue.SimpleQueue[Answer | WeirError]] = {}

    def send(self, step: Any, timeout: float) -> Any:
        """Return the answer to one step; of a request, its first."""
        if not isinstance(step, Asked):
            return self._http.send(step, timeout)
        chunks = self.chunks(step, timeout)
        try:
            return next(chunks)
        finally:
            chunks.close()

    def chunks(self, step: Asked, timeout: float) -> Generator[Answer, None, None]:
        """Yield the answers to one request; silence for `timeout` seconds ends it."""
        own, answers = str(next(self._ids)), queue.SimpleQueue[Answer | WeirError]()
        connection = self._connected(own, answers, timeout)
        ended = False
        try:
            _send(connection, step.message(own))
            while not ended:
                try:
                    answer = answers.get(timeout=timeout)
                except queue.Empty:
                    raise DeadlineExceeded(f"{self._url}: no answer within {timeout:g} s") from None
                ended = isinstance(answer, WeirError) or is_last(answer)
                if isinstance(answer, WeirError):
                    raise answer
                yield answer
        finally:
            self._waiting.pop(own, None)
            if not ended:
                with suppress(WeirError):
                    _send(connection, write_cancel(own))

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            self._thread.join()
        self._http.close()

    def _connected(self, id: str, answers: Any, timeout: float) -> ClientConnection:
        """Return the connection, on which the answers to `id` are expected."""
        with self._lock:
            if self._connection is None:
                self._waiting = {}
                opened = ExitStack()
                try:
                    connection = opened.enter_context(connect(open_timeout=timeout, **self._options))
                except _NOT_MADE as error:
                    raise Unreachable(f"{self._url}: no connection ({error})") from error
                self._connection = connection
                arguments = (opened, connection, self._waiting)
                self._thread = threading.Thread(target=self._receive, args=arguments, name="weir-client", daemon=True)
                self._thread.start()
            self._waiting[id] = answers
            return self._connection

    def _receive(
        self, opened: ExitStack, connection: ClientConnection, waiting: dict[str, queue.SimpleQueue[Answer | WeirError]]
    ) -> None:
        """Hand each answer to whoever waits for it, until the connection ends."""
        failure: WeirError = ConnectionLost(f"{self._url}: the connection ended before the answer")
        try:
            for message in connection:
                answer = read_answer(message)
                if (answers := waiting.get(answer.id)) is not None:
                    answers.put(answer)
        except ConnectionClosed:
            pass
        except InvalidRequest as error:
            failure = ConnectionLost(f"{self._url}: sent what cannot be read: {error.message}")
        finally:
            with self._lock:
                if self._connection is connection:
                    self._connection = None
                left = list(waiting.values())
            for answers in left:
                answers.put(failure)
            opened.close()


class AsyncWebSocketTransport:
    """The same from an event loop."""

    def __init__(self, url: str, tls: Any, http: AsyncHttpTransport) -> None:
        self._url = url
        self._options = _options(url, tls)
        self._http = http
        self._ids = count()
        self._lock = asyncio.Lock()
        self._connection: AsyncConnection | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Queue[Answer | WeirError]] = {}

    async def send(self, step: Any, timeout: float) -> Any:
        """Return the answer to one step; of a request, its first."""
        if not isinstance(step, Asked):
            return await self._http.send(step, timeout)
        chunks = self.chunks(step, timeout)
        try:
            return await anext(chunks)
        finally:
            await chunks.aclose()

    async def chunks(self, step: Asked, timeout: float) -> AsyncGenerator[Answer, None]:
        """Yield the answers to one request; silence for `timeout` seconds ends it."""
        own, answers = str(next(self._ids)), asyncio.Queue[Answer | WeirError]()
        connection = await self._connected(own, answers, timeout)
        ended = False
        try:
            await _send_async(connection, step.message(own))
            while not ended:
                try:
                    answer = await asyncio.wait_for(answers.get(), timeout)
                except TimeoutError:
                    raise DeadlineExceeded(f"{self._url}: no answer within {timeout:g} s") from None
                ended = isinstance(answer, WeirError) or is_last(answer)
                if isinstance(answer, WeirError):
                    raise answer
                yield answer
        finally:
            self._waiting.pop(own, None)
            if not ended:
                with suppress(WeirError):
                    await _send_async(connection, write_cancel(own))

    async def close(self) -> None:
        """Close all connections."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        if self._receiving is not None:
            await self._receiving
        await self._http.close()

    async def _connected(self, id: str, answers: Any, timeout: float) -> AsyncConnection:
        async with self._lock:
            if self._connection is None:
                self._waiting = {}
                try:
                    connection = await connect_async(open_timeout=timeout, **self._options)
                except _NOT_MADE as error:
                    raise Unreachable(f"{self._url}: no connection ({error})") from error
                self._connection = connection
                self._receiving = asyncio.create_task(self._receive(connection, self._waiting))
            self._waiting[id] = answers
            return self._connection

    async def _receive(
        self, connection: AsyncConnection, waiting: dict[str, asyncio.Queue[Answer | WeirError]]
    ) -> None:
        failure: WeirError = ConnectionLost(f"{self._url}: the connection ended before the answer")
        try:
            async for message in connection:
                answer = read_answer(message)
                if (answers := waiting.get(answer.id)) is not None:
                    answers.put_nowait(answer)
        except ConnectionClosed:
            pass
        except InvalidRequest as error:
            failure = ConnectionLost(f"{self._url}: sent what cannot be read: {error.message}")
        finally:
            if self._connection is connection:
                self._connection = None
            for answers in waiting.values():
                answers.put_nowait(failure)
            await connection.close()


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
    address = url.rstrip("/").replace("http", "ws", 1) + PATH
    options: dict[str, Any] = {"uri": address, "max_size": None, "compression": None, "proxy": None}
    return options if isinstance(tls, bool) or not address.startswith("wss") else {**options, "ssl": tls}
