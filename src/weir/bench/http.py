"""Targets of load over HTTP: any path that accepts POST, and models behind the Open Inference Protocol.

The connections are made here: with httpx, a request takes tens of times as much of this process's time, which would be measured too.
"""

import asyncio
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from errno import errorcode
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from weir.bench.target import (
    CallTarget,
    Counts,
    HttpOptions,
    ServerPages,
    TargetEndpoint,
    Tasks,
    example_of,
    given_requests,
    read_payloads,
)
from weir.client.http_calls import HttpCalls, HttpReply, OutgoingRequest, tls_context
from weir.errors import SettingsError

USER_AGENT = "weir-bench"
CLOSED, RESET, GARBAGE = "connection closed", "connection reset", "garbage"


class HttpAnswer(NamedTuple):
    """An HTTP response. `keeps` tells whether the connection may be used again."""

    status: int
    parts: list[bytes]
    keeps: bool

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(self.parts)


def outcome_of(answer: HttpAnswer) -> str:
    """Return "ok" for 2xx, else the code, followed by the type of the error if the body has it: "429 Overloaded"."""
    if 200 <= answer.status < 300:
        return "ok"
    kind = error_of(answer).get("type")
    return f"{answer.status} {kind}" if isinstance(kind, str) else str(answer.status)


def error_of(answer: HttpAnswer) -> dict[str, Any]:
    """Return the error object in the response's body, or {}."""
    try:
        error = msgspec.json.decode(answer.body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError, IndexError):
        return {}
    return error if isinstance(error, dict) else {}


class LoadConnection(asyncio.Protocol):
    """A connection that carries one request at a time.

    With `direct`, bytes are written to the socket itself: a transport of uvloop sends them only at the end of the event loop's turn,
    so the instant of sending would be unknown.
    """

    def __init__(self, sock: socket.socket, *, direct: bool) -> None:
        self._sock = sock
        self._direct = direct
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpAnswer] | None = None  # of the request under way
        self._parts: list[bytes] = []
        self._keeps = True

    def send(self, data: bytes) -> "asyncio.Future[HttpAnswer]":
        """Send the bytes `data` of a request, and return the future response. It fails with an OSError if the connection is lost."""
        self._answer = answer = asyncio.get_running_loop().create_future()
        sent = 0
        if self._direct:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                pass
            except OSError:
                self._end(RESET)
                return answer
        if sent < len(data) and self._transport is not None:
            self._transport.write(data[sent:])
        return answer

    @property
    def is_free(self) -> bool:
        """Whether another request may follow: the last one is wholly sent and answered, and the connection is open."""
        sent = self._transport is not None and not self._transport.get_write_buffer_size()
        return self._keeps and self._answer is None and sent

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._keeps = False
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> None:
        answer, self._answer = self._answer, None
        self.close()
        if answer is not None and not answer.done():
            answer.set_exception(OSError(why))

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. What is not a response to a request ends the connection."""
        if self._answer is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self._end(GARBAGE)

    def connection_lost(self, error: Exception | None) -> None:
        """End the request under way."""
        self._end(CLOSED if error is None else RESET)

    # Called by httptools.

    def on_message_begin(self) -> None:
        """A response begins."""
        self._parts = []

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Pass the complete response on; a 1xx is ignored, as the response follows it."""
        status = self._parser.get_status_code()
        if status < 200:
            return
        answer, self._answer = self._answer, None
        self._keeps = self._keeps and answer is not None and self._parser.should_keep_alive()
        if answer is not None and not answer.done():
            answer.set_result(HttpAnswer(status, self._parts, self._keeps))


_RULE = "must be like http://HOST:PORT/PATH, https://HOST/PATH or http://unix:SOCKET:/PATH"


class Address(NamedTuple):
    """A server, and a path on it with its query. `uds` is the path of a Unix socket, or "" for TCP."""

    url: str
    host: str
    port: int
    path: str
    uds: str
    tls: bool

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        if self.uds:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def parse_address(url: str) -> Address:
    """Return the address that `url` names; `http://unix:/run/weir.sock:/infer/square` is a path on a Unix socket. Raises
    SettingsError."""
    if url.startswith("http://unix:"):
        uds, colon, path = url.removeprefix("http://unix:").partition(":")
        if not (uds and colon and path.startswith("/")):
            raise SettingsError(f"target {url!r}: {_RULE}")
        return Address(url, "", 0, path, uds, False)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"target {url!r}: {error}; {_RULE}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"target {url!r}: {_RULE}")
    tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or any(character <= " " for character in path):
        raise SettingsError(f"target {url!r}: the path must be percent-encoded")
    return Address(url, parts.hostname, port or (443 if tls else 80), path, "", tls)


class TargetServer:
    """The server of `address`, which is sent `headers` with each request. Call `find` first."""

    def __init__(self, address: Address, headers: Mapping[str, str], *, insecure: bool = False) -> None:
        self._address = address
        self._headers = headers
        self._tls: ssl.SSLContext | None = None
        if address.tls:
            self._tls = tls_context(not insecure)
            self._tls.set_alpn_protocols(["http/1.1"])
        self._family = socket.AF_UNIX
        self._name: Any = address.uds  # of the socket

    async def find(self) -> None:
        """Look the host up, and choose its first address that accepts connections. Raises SettingsError."""
        address = self._address
        names: list[tuple[Any, Any]] = [(socket.AF_UNIX, address.uds)]
        if not address.uds:
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            except OSError as error:
                raise SettingsError(f"{address.url}: {address.host}: {error.strerror}") from error
            names = [(family, name) for family, _, _, _, name in found]
        wrong: OSError = OSError("no address")
        for self._family, self._name in names:
            try:
                (await self._connected()).close()
            except OSError as error:
                wrong = error
            else:
                return
        raise SettingsError(f"{address.url}: no server there: {reason_of(wrong)}") from wrong

    async def dial(self) -> LoadConnection:
        """Open a connection. Raises OSError."""
        sock = await self._connected()
        connection = LoadConnection(sock, direct=self._tls is None)
        name = self._address.host if self._tls is not None else None
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: connection, sock=sock, ssl=self._tls, server_hostname=name)
        return connection

    async def _connected(self) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if self._family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(sock, self._name)
        except BaseException:
            sock.close()
            raise
        return sock

    def written(self, request: OutgoingRequest) -> bytes:
        """Return the bytes of `request`; the target's headers override its own."""
        headers = {"host": self._address.authority, "user-agent": USER_AGENT}
        if request.method == "POST":
            headers |= {"content-length": str(len(request.body)), "content-type": "application/json"}
        headers |= {name.lower(): value for name, value in (*request.headers.items(), *self._headers.items())}
        lines = [f"{request.method} {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + request.body

    async def fetch(self, data: bytes, within: float) -> HttpAnswer:
        """Send the request `data` on a new connection and return the response. Raises SettingsError if the connection fails, or if
        there is no response within `within` seconds."""
        url, connection = self._address.url, None
        try:
            async with asyncio.timeout(within):
                connection = await self.dial()
                return await connection.send(data)
        except TimeoutError as error:
            raise SettingsError(f"{url}: no response within {within:g} s") from error
        except OSError as error:
            raise SettingsError(f"{url}: {reason_of(error)}") from error
        finally:
            if connection is not None:
                connection.close()

    async def send(self, step: OutgoingRequest, within: float) -> HttpReply:
        """Send a step of a call, as transports of weir.client do. Raises SettingsError."""
        answer = await self.fetch(self.written(step), within)
        return HttpReply(answer.status, {}, answer.body)


def reason_of(error: OSError) -> str:
    """Return the reason of a failed connection in the system's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    # The event loop's own text, "Connect call failed", gives no reason.
    known = error.errno is not None and error.errno in errorcode
    return os.strerror(error.errno or 0) if known else str(error) or type(error).__name__


class Pool:
    """The connections to `server`, which are kept for later requests. At most `limit` are open, and up to `spare` before they are
    needed. `held` counts the requests that waited because of the limit, and `most` is the largest number open at a time."""

    def __init__(self, server: TargetServer, *, limit: int, spare: int) -> None:
        self._server = server
        self._limit = limit
        self._spare = spare
        self._idle: asyncio.LifoQueue[LoadConnection | OSError] = asyncio.LifoQueue()
        self._open: set[LoadConnection] = set()
        self._opening = Tasks()
        self._waiting = 0
        self.held = 0
        self.most = 0

    async def warm(self) -> None:
        """Open the first spare connections."""
        self._grow()
        await self._opening.wait()

    async def take(self) -> LoadConnection:
        """Return a free connection: the one used last, whose memory is in the caches. Raises OSError if none could be made."""
        self._waiting += 1
        try:
            if self._size < self._limit:
                self._grow()
            else:
                self.held += self._idle.empty()
            while True:
                found = await self._idle.get()
                if isinstance(found, OSError):
                    raise OSError(f"connect: {reason_of(found)}")
                if found.is_free:
                    return found
                self._drop(found)  # the server has closed it
        finally:
            self._waiting -= 1

    def give_back(self, connection: LoadConnection) -> None:
        """Keep the connection if another request may follow on it, else close it."""
        if connection.is_free:
            self._idle.put_nowait(connection)
        else:
            self._drop(connection)

    async def close(self) -> None:
        """Close all connections."""
        await self._opening.end()
        for connection in self._open:
            connection.close()
        self._open.clear()
        await asyncio.sleep(0)  # the event loop closes the sockets in its next turn

    @property
    def _size(self) -> int:
        return len(self._open) + len(self._opening)

    def _drop(self, connection: LoadConnection) -> None:
        connection.close()
        self._open.discard(connection)
        if self._waiting:
            self._grow()

    def _grow(self) -> None:
        wanted = self._waiting + self._spare - self._idle.qsize() - len(self._opening)
        for _ in range(min(wanted, self._limit - self._size)):
            self._opening.start(self._add())

    async def _add(self) -> None:
        try:
            connection = await self._server.dial()
        except OSError as error:
            if self._waiting:  # each failure ends one waiting request, so that the attempts come to an end
                self._idle.put_nowait(error)
            return
        self._open.add(connection)
        self.most = max(self.most, len(self._open))
        self._idle.put_nowait(connection)


_SPARE = 16  # connections that are open before they are needed
_OTHER_FILES = 100  # files that this process may have open besides its connections
_PASSING = (408, 429, 503, 504)  # codes of a server that works but is overloaded


class HttpTarget(CallTarget):
    """Sends POST requests to `url`. `data` are the bodies (see `read_payloads`); None sends the server's example for this path."""

    def __init__(
        self,
        url: str,
        data: str | Sequence[Any] | None = None,
        options: HttpOptions | None = None,
        *,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name or url, options or HttpOptions(), clock)
        self._data = data
        self._address = parse_address(url)
        self._server = TargetServer(self._address, self._options.headers, insecure=self._options.insecure)
        self._site = ServerPages(self._server.send, self._options.timeout)
        self._requests: list[bytes] = []
        self._model: str | None = None  # the name under which the server counts these requests
        limit = self._options.max_connections
        self._pool = Pool(self._server, limit=limit, spare=min(_SPARE, limit))

    @property
    def connections(self) -> int:
        """See Target."""
        return self._pool.most

    @property
    def held(self) -> int:
        """See Target."""
        return self._pool.held

    async def open(self) -> None:
        """Find the server, check that it answers, and open the first connections. Raises SettingsError."""
        _allow_files(self._options.max_connections)
        await self._server.find()
        self._requests = [self._server.written(request) for request in await self._made()]
        answer = await self._server.fetch(self._requests[0], self._options.timeout)
        if outcome_of(answer) != "ok" and answer.status not in _PASSING:
            raise SettingsError(f"{self._address.url}: {_error_text(answer)}")
        self._model = await self._served_model()
        await self._pool.warm()

    async def _call(self, index: int) -> str:
        connection = await self._pool.take()
        try:
            answer = connection.send(self._requests[index % len(self._requests)])
            self._ledger.sent[index] = self._clock()
            return outcome_of(await answer)
        finally:
            self._pool.give_back(connection)

    async def close(self) -> None:
        """Close the connections."""
        await super().close()
        await self._pool.close()

    async def counts(self) -> Counts | None:
        """See Target."""
        return None if self._model is None else await self._site.counts(self._model)

    async def _made(self) -> list[OutgoingRequest]:
        """Return the requests to send in turn."""
        bodies = [await self._example()] if self._data is None else read_payloads(self._data)
        return [OutgoingRequest("POST", self._address.path, body=body) for body in bodies]

    async def _example(self) -> bytes:
        """Return the first example in the server's OpenAPI document for this path. Raises SettingsError if there is none."""
        document = await self._site.json("/openapi.json")
        path = self._address.path.partition("?")[0]
        example = example_of(document, path)
        if example is None:
            known = _paths(document)
            wrong = "describes no example to send; give something with --data"
            if known and path not in known:
                wrong = f"accepts no requests at this path, but at {', '.join(known)}"
            raise SettingsError(f"{self._address.url}: the server {wrong}")
        return msgspec.json.encode(example)

    async def _served_model(self) -> str | None:
        """Return the name under which the server counts these requests; None if it is not a Weir server."""
        path = self._address.path.partition("?")[0]
        names = [name for name, paths in (await self._site.models()).items() if path in paths]
        return names[0] if len(names) == 1 else None


def _allow_files(connections: int) -> None:
    """Raise this process's limit of open files for `connections` connections. Raises SettingsError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        rule = f"must be at most {hard - _OTHER_FILES}, as this process may open {hard} files (ulimit -Hn)"
        raise SettingsError(f"max_connections={connections}: {rule}")
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _paths(document: Any) -> list[str]:
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(paths, dict):
        return []
    return [path for path, methods in paths.items() if isinstance(methods, dict) and "post" in methods]


def _error_text(answer: HttpAnswer) -> str:
    message = error_of(answer).get("message")
    text = message if isinstance(message, str) else " ".join(answer.body[:200].decode("latin-1").split())
    return f"{outcome_of(answer)}: {text}" if text else outcome_of(answer)


class KserveTarget(HttpTarget):
    """Sends requests of the Open Inference Protocol, with tensors as JSON or raw bytes. `data` are the requests as JSON (see
    target.given_requests); without it, a request is made from the model's metadata."""

    def __init__(
        self,
        url: str,
        endpoint: TargetEndpoint,
        data: str | Sequence[Any] | None = None,
        options: HttpOptions | None = None,
    ) -> None:
        super().__init__(url.partition("#")[0], None, options, name=url)
        self._endpoint = endpoint
        self._calls = HttpCalls(binary=endpoint.binary)
        self._given = None if data is None else given_requests(data, endpoint)

    async def _made(self) -> list[OutgoingRequest]:
        requests = self._given or [await self._site.example(self._calls, self._endpoint, self._options.rows)]
        return [next(self._calls.infer(request))._replace(path=self._address.path) for request in requests]

    async def _served_model(self) -> str | None:
        return self._endpoint.model if self._endpoint.model in await self._site.models() else None
