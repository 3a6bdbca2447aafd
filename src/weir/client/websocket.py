"""The clients that speak WebSocket. Needs websockets, and httpx for all that is no inference."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, aclosing, closing, suppress
from typing import Any

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from weir.client.asynchronous import AsyncClient
from weir.client.blocking_http import connect_unix
from weir.client.failures import ConnectionLost, Unreachable
from weir.client.http import CONNECTIONS, AsyncHttpTransport, HttpTransport
from weir.client.http_calls import address_of
from weir.client.retrying import Retry
from weir.client.synchronous import Client
from weir.client.websocket_calls import Answer, WebSocketCalls, WebSocketRequest, is_last
from weir.client.websocket_mail import Got, Mail
from weir.errors import DeadlineExceeded, WeirError
from weir.wire.websocket import write_cancel

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
                    answer = _read(box.get(timeout=timeout))
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
                    answer = _read(await asyncio.wait_for(box.get(), timeout))
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


def _read(got: Got) -> Answer:
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
