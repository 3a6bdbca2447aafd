"""The clients for HTTP, which speak the Open Inference Protocol with tensors as raw bytes or JSON. Needs httpx."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from weir.client.calls import ConnectionLost, Retry, Silence, Unreachable
from weir.client.http_calls import Connections, HttpCalls, HttpReply, OutgoingRequest, address_of, error_of, tls_context
from weir.client.methods import AsyncClient, Client, PerLoop
from weir.errors import DeadlineExceeded

CONNECTIONS = 64


class HttpClient(Client):
    """A client of a server over HTTP, such as `HttpClient("http://localhost:8000")`. Many threads may use it at a time.

    Arguments:
        url: http://HOST:PORT, https://HOST:PORT, or unix:PATH for a Unix socket.
        timeout: seconds for each call that has no timeout of its own.
        token: the control token, for the calls that need it.
        retry: which calls are sent again; by default Retry().
        binary: whether tensors travel as raw bytes; otherwise as JSON.
        connections: largest number of open connections, which are kept for later calls.
        tls: an ssl.SSLContext, or whether certificates are verified.
    """

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
        transport = Connections(url, token, connections, tls)
        super().__init__(HttpCalls(binary=binary), transport, timeout=timeout, retry=retry)


class AsyncHttpClient(AsyncClient):
    """HttpClient for an event loop: the methods are to be awaited."""

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
        transport = AsyncHttpTransport(url, headers_with(token), connections, tls)
        super().__init__(HttpCalls(binary=binary), transport, timeout=timeout, retry=retry)


class AsyncHttpTransport:
    """An AsyncTransport for OutgoingRequests."""

    def __init__(self, url: str, headers: Mapping[str, str], connections: int, tls: Any) -> None:
        self._url = url
        base, path = address_of(url)
        verify = tls_context(tls)

        def make() -> httpx.AsyncClient:
            transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=_limits(connections), uds=path)
            return httpx.AsyncClient(base_url=base, headers=headers, transport=transport, trust_env=False)

        self._clients = PerLoop(make, httpx.AsyncClient.aclose)

    async def send(self, step: OutgoingRequest, timeout: float) -> HttpReply:
        """Send a request and return the response. Raises DeadlineExceeded after `timeout` seconds, Unreachable or
        ConnectionLost."""
        client = await self._clients.get()
        with _failing(self._url):
            async with asyncio.timeout(timeout):
                answer = await client.request(
                    step.method, step.path, headers=step.headers, content=step.body, timeout=timeout
                )
        return HttpReply(answer.status_code, answer.headers, answer.content)

    async def chunks(self, step: OutgoingRequest, silence: Silence) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the response's body as it arrives. Raises Unreachable, ConnectionLost, or the error that the
        response stands for. See AsyncTransport."""
        client = await self._clients.get()
        options: dict[str, Any] = {"headers": step.headers, "content": step.body}
        options["timeout"] = httpx.Timeout(silence.seconds, read=None)  # the caller limits the wait for each piece
        with _failing(self._url):
            async with client.stream(step.method, step.path, **options) as answer:
                if answer.status_code != 200:
                    raise error_of(HttpReply(answer.status_code, answer.headers, await answer.aread()))
                async for chunk in answer.aiter_bytes():
                    yield chunk

    async def close(self) -> None:
        """Close all connections."""
        await self._clients.close()


@contextmanager
def _failing(url: str) -> Generator[None, None, None]:
    """Translate errors of httpx in the block into ours."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unreachable(f"{url}: no connection ({error})") from error
    except (httpx.TimeoutException, TimeoutError) as error:
        raise (
            error if isinstance(error, DeadlineExceeded) else DeadlineExceeded(f"{url}: no response in time")
        ) from error
    except httpx.TransportError as error:
        raise ConnectionLost(f"{url}: the connection ended before the response ({error})") from error


def headers_with(token: str | None) -> Mapping[str, str]:
    """Return the headers that carry `token`."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def _limits(connections: int) -> httpx.Limits:
    return httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
