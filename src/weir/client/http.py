"""The clients for HTTP, which speak the Open Inference Protocol with tensors as raw bytes or JSON. Needs httptools."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from weir.client.calls import Retry, Silence
from weir.client.http_calls import HttpCalls, HttpReply, OutgoingRequest
from weir.client.http_connection import AsyncConnections, Connections, ServerAddress, failing, headers_with
from weir.client.methods import AsyncClient, Client, PerLoop

CONNECTIONS = 64


class AsyncHttpTransport:
    """An AsyncTransport for OutgoingRequests."""

    def __init__(self, url: str, headers: Mapping[str, str], connections: int, tls: Any) -> None:
        self._server = ServerAddress(url, headers, tls)
        self._pools = PerLoop(partial(AsyncConnections, self._server, connections), AsyncConnections.close)

    async def send(self, step: OutgoingRequest, timeout: float) -> HttpReply:
        """Send a request and return the response. Raises DeadlineExceeded after `timeout` seconds, Unreachable or
        ConnectionLost."""
        pool = await self._pools.get()
        with failing(self._server.url):
            async with asyncio.timeout(timeout):
                return await pool.start(self._server.written(step))

    async def chunks(self, step: OutgoingRequest, silence: Silence) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the response's body as it arrives. Raises Unreachable, ConnectionLost, or the error that the
        response stands for. See AsyncTransport."""
        pool = await self._pools.get()
        with failing(self._server.url):
            connection = await pool.take()
            try:
                async with aclosing(connection.chunks(self._server.written(step))) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                pool.give_back(connection)

    async def close(self) -> None:
        """Close all connections."""
        await self._pools.close()


class OverHttp:
    """The base class of the clients of a server's HTTP address. Each has the class of its calls, and the `transport` for the arguments.

    Arguments:
        url: http://HOST:PORT, https://HOST:PORT, or unix:PATH for a Unix socket.
        timeout: seconds for each call that has no timeout of its own.
        token: the control token, for the calls that need it.
        retry: which calls are sent again; by default Retry().
        binary: whether tensors travel as raw bytes; otherwise as JSON.
        connections: largest number of open connections, which are kept for later calls.
        tls: an ssl.SSLContext, or whether certificates are verified.
    """

    calls: type[HttpCalls] = HttpCalls
    transport: Callable[..., Any]

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
        kind = type(self)
        made: Any = super()
        transport = kind.transport(url, headers_with(token), connections, tls)
        made.__init__(kind.calls(binary=binary), transport, timeout=timeout, retry=retry)


class HttpClient(OverHttp, Client):
    """A client of a server over HTTP, such as `HttpClient("http://localhost:8000")`. Many threads may use it at a time. See OverHttp for the
    arguments."""

    transport = Connections


class AsyncHttpClient(OverHttp, AsyncClient):
    """HttpClient for an event loop: the methods are to be awaited."""

    transport = AsyncHttpTransport
