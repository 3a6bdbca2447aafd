"""HTTP/1.1 to one server: what is written and read, and the connections that carry it, for threads and for an event loop.

httptools parses responses. Both kinds of connection share the server, the reader of responses and the errors; they differ in how they
wait. Connections are kept for later requests, and a request is sent in one piece, so that the server wakes up once.
"""

import asyncio
import base64
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from weir.client.calls import ConnectionLost, Silence, Unreachable, error_of_status
from weir.errors import Cancelled, DeadlineExceeded, InvalidRequest, SettingsError, WeirError, reason_of
from weir.wire.inference import ERROR_NAME


class OutgoingRequest(NamedTuple):
    """An HTTP request to send."""

    method: str
    path: str
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""


class HttpReply(NamedTuple):
    """The HTTP response. The names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def checked(reply: HttpReply) -> HttpReply:
    """Return `reply` if its status is 200. Raises the error that it stands for otherwise."""
    if reply.status != 200:
        raise error_of(reply)
    return reply


def error_of(reply: HttpReply) -> WeirError:
    """Return the error that `reply` stands for, in the protocol's form, in ours (docs/reference/errors.md), or in that of /encode."""
    text, name = error_text(reply.body)
    after = reply.headers.get("retry-after", "")
    name, seconds = reply.headers.get(ERROR_NAME, name), float(after) if after.isdecimal() else None
    return error_of_status(reply.status, text, name=name, retry_after=seconds)


def error_text(body: bytes) -> tuple[str, str]:
    """Return the text and the class name in an error's body; where it has none, the body itself and ""."""
    try:
        document = msgspec.json.decode(body)
        error = document["error"] if "error" in document else document["description"]
        name = str(document.get("type", ""))
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        return body[:1000].decode(errors="replace"), ""
    return (str(error.get("message", "")) if isinstance(error, dict) else str(error)), name


CLOSED, RESET, GARBAGE = "connection closed", "connection reset", "garbage"
_PIECE = 1 << 18  # bytes that a thread reads at a time
_MAX_HEAD = 1 << 18  # bytes of a response before its body, about
_SHORTEST = 1e-3  # seconds: a timeout of 0 would make the socket non-blocking
_URL_RULE = "must be http://HOST:PORT, https://HOST:PORT or unix:PATH"


class NotConnected(OSError):
    """No connection could be made; the text is the reason in the system's words."""


class ServerAddress:
    """A server at `url`: http://, https:// or unix:PATH. It gets `headers` with each request; `tls` is as for HttpClient.

    Raises SettingsError for a URL of another form.
    """

    def __init__(self, url: str, headers: Mapping[str, str], tls: bool | ssl.SSLContext = True) -> None:
        self.url = url
        base, self.uds = address_of(url)
        parts = _parsed(base)
        is_tls = parts.scheme == "https"
        self.host = str(parts.hostname).encode("idna").decode()
        self.port = parts.port or (443 if is_tls else 80)
        self.tls = tls_context(tls) if is_tls else None
        host = f"[{self.host}]" if ":" in self.host else self.host
        authority = host if self.port == (443 if is_tls else 80) else f"{host}:{self.port}"
        self._prefix = parts.path.rstrip("/")
        self._headers = {"host": authority, **_basic(parts), **{name.lower(): text for name, text in headers.items()}}

    def written(self, request: OutgoingRequest) -> bytes:
        """Return the bytes of `request`. Raises InvalidRequest for a header that would break the head."""
        headers = {name.lower(): text for name, text in request.headers.items()} | self._headers
        if request.body or request.method == "POST":
            headers["content-length"] = str(len(request.body))
        lines = [f"{request.method} {self._prefix}{request.path} HTTP/1.1", *map(": ".join, headers.items())]
        head = "\r\n".join(lines)
        wrong = []
        if len(f"{head}.".splitlines()) != len(lines):
            wrong = [line for line in lines if len(f"{line}.".splitlines()) != 1]
        try:
            encoded = head.encode("latin-1")
        except UnicodeEncodeError as error:
            wrong = [head[error.start :]]
        if wrong:
            raise InvalidRequest(f"header {wrong[0]!r:.80}: must be Latin-1 text in one line")
        return b"%b\r\n\r\n%b" % (encoded, request.body)


class ResponseReader:
    """Reads the responses that arrive on a connection, one for each `begin`.

    Attributes:
        status: the status, or 0 before the head has been read.
        parts: the pieces of the body that `take` has not returned.
        is_complete: whether the whole response has been read.
        keeps: whether another request may follow.
    """

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        self.keeps = True
        self.begin()

    def begin(self) -> None:
        """Expect the response to another request."""
        self.status = 0
        self.parts: list[bytes] = []
        self.is_complete = False
        self._head_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []

    @property
    def headers(self) -> dict[str, str]:
        """The headers; their names are in lower case."""
        return {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in self._headers}

    @property
    def reply(self) -> HttpReply:
        """The response, with the part of the body that `take` has not returned."""
        return HttpReply(self.status, self.headers, self.take())

    def take(self) -> bytes:
        """Return what has arrived of the body since the last call."""
        parts, self.parts = self.parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def feed(self, data: bytes) -> None:
        """Read `data`, or b"" at the end of the connection. Raises OSError if that is not a response or ends one too early."""
        if not data:
            self.keeps = False
            if not self.is_complete and not (self.status and self._ends_with_connection):
                raise OSError(CLOSED)
            self.is_complete = True
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.keeps = False
            if not self.is_complete:
                raise OSError(GARBAGE) from error
        if not self.status:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD:
                raise OSError(f"headers of more than {_MAX_HEAD} bytes")

    @property
    def _ends_with_connection(self) -> bool:
        return self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))

    # Called by httptools. Bytes after a complete response were not asked for: the connection is of no more use.

    def on_message_begin(self) -> None:
        """A response begins."""
        self.keeps = self.keeps and not self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, unless it follows the body."""
        if not self.status:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Keep the status."""
        if not self.is_complete:
            self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body."""
        if not self.is_complete:
            self.parts.append(body)

    def on_message_complete(self) -> None:
        """The response is complete, unless it is a 1xx, which the response follows."""
        if self.status < 200:
            self.begin()
            return
        self.is_complete = True
        self.keeps = self.keeps and self._parser.should_keep_alive()


class PooledConnection(Protocol):
    """A connection of a thread or of an event loop, as ConnectionPool sees it."""

    @property
    def is_free(self) -> bool: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=PooledConnection)


class ConnectionPool(Generic[C]):
    """The open connections of a client, at most `limit`, of which those that are free are used again: the one used last first, whose memory
    is in the caches."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open: set[C] = set()
        self._free: list[C] = []

    def take(self) -> C | None:
        """Return a free connection if there is one."""
        with suppress(IndexError):
            while True:
                connection = self._free.pop()
                if connection.is_free:
                    return connection
                self.drop(connection)  # the server has closed it
        return None

    def put(self, connection: C) -> None:
        """Keep a connection after its request, unless no other may follow."""
        if connection.is_free:
            self._free.append(connection)
            if connection in self.open:  # and not closed meanwhile, perhaps by another thread
                return
        self.drop(connection)

    def drop(self, connection: C) -> None:
        """Close a connection."""
        self.open.discard(connection)
        connection.close()

    def close(self) -> None:
        """Close those that are free, and end what is under way on the others."""
        busy, self.open = self.open, set()
        for connection in list(busy):
            connection.abort()
        with suppress(IndexError):
            while True:
                self._free.pop().close()


class _Connection:
    """A connection of a thread, on which one request is under way at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = ResponseReader()

    @property
    def is_free(self) -> bool:
        """Whether another request may follow: the response has been read, and the server has sent nothing since, nor closed."""
        if not (self.reader.is_complete and self.reader.keeps):
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def write(self, data: bytes) -> None:
        """Send the bytes of a request. A server may respond and close before it has read all."""
        self.reader.begin()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(data)

    def read(self) -> None:
        """Read what arrives next. Raises OSError."""
        self.reader.feed(self.sock.recv(_PIECE))

    def limit(self, deadline: float) -> None:
        """Let the socket wait until `deadline` at most. Raises TimeoutError if it has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.sock.settimeout(max(_SHORTEST, left))

    def abort(self) -> None:
        """End the connection, so that a thread that reads from it returns."""
        with suppress(OSError):  # the thread may be closing it just now
            # That of a socket with TLS may not be called from another thread.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.sock.close()


class Connections:
    """A Transport for OutgoingRequests to `url`, which is http://, https:// or unix:PATH. Many threads may use it at a time.

    At most `limit` connections are open; they are kept for later requests. `headers` go with each request; `tls` is as for HttpClient.
    Raises SettingsError for a URL of another form.
    """

    def __init__(self, url: str, headers: Mapping[str, str], limit: int, tls: bool | ssl.SSLContext = True) -> None:
        self._server = ServerAddress(url, headers, tls)
        self._places = BoundedSemaphore(limit)
        self._kept = ConnectionPool[_Connection](limit)
        self._closed = False

    def send(self, step: OutgoingRequest, timeout: float) -> HttpReply:
        """Send a request and return the response. Raises DeadlineExceeded after `timeout` seconds, Unreachable if nothing could
        be sent, ConnectionLost if the connection ended before the response, and Cancelled after `close`."""
        deadline = time.monotonic() + timeout
        with self._begun(step, deadline) as connection:
            while not connection.reader.is_complete:
                connection.limit(deadline)
                connection.read()
            return connection.reader.reply

    def chunks(self, step: OutgoingRequest, silence: Silence) -> Generator[bytes, None, None]:
        """Send a request and yield the response's body as it arrives. Raises DeadlineExceeded when `silence` is over, what `send` raises,
        or the error that the response stands for."""
        with self._begun(step, time.monotonic() + silence.seconds) as connection:
            reader = connection.reader
            while not reader.is_complete:
                if reader.status == 200 and reader.parts:
                    yield reader.take()
                    continue
                try:
                    connection.limit(time.monotonic() + silence.left)
                    connection.read()
                except TimeoutError:
                    raise silence.error() from None
            if reader.status != 200:
                raise error_of(reader.reply)
            if reader.parts:
                yield reader.take()

    @contextmanager
    def _begun(self, step: OutgoingRequest, deadline: float) -> Iterator[_Connection]:
        """Send a request and yield its connection, from which the block must read the response. It is kept if the block has read all."""
        data, url = self._server.written(step), self._server.url
        if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _late(url)
        try:
            with failing(url):
                connection = self._kept.take() or _connect(self._server, max(_SHORTEST, deadline - time.monotonic()))
                self._kept.open.add(connection)
                try:
                    if self._closed:
                        self._kept.drop(connection)
                        raise Cancelled(f"{url}: this client has been closed")
                    connection.limit(deadline)
                    connection.write(data)
                    yield connection
                finally:
                    self._kept.put(connection)
        except ConnectionLost as error:
            if self._closed:
                raise Cancelled(f"{url}: this client has been closed") from error
            raise
        finally:
            self._places.release()

    def close(self) -> None:
        """Close all connections: requests that are under way fail with Cancelled. Idempotent."""
        self._closed = True
        self._kept.close()


def _connect(server: ServerAddress, timeout: float) -> _Connection:
    """Return a connection to `server`. Raises NotConnected."""
    sock: socket.socket | None = None
    try:
        if server.uds is not None:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout)
            sock.connect(server.uds)
            return _Connection(sock)
        sock = socket.create_connection((server.host, server.port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(sock if server.tls is None else server.tls.wrap_socket(sock, server_hostname=server.host))
    except OSError as error:
        if sock is not None:
            sock.close()
        raise NotConnected(reason_of(error)) from error


class AsyncConnection(asyncio.Protocol):
    """A connection of an event loop, on which one request is under way at a time.

    With `direct`, bytes are written to the socket's descriptor: a transport of uvloop sends them only at the end of the event loop's turn,
    which makes each request later and hides when it was sent. The descriptor is the transport's: a socket object beside it would close the
    number a second time, perhaps when another connection has it.
    """

    def __init__(self, *, direct: bool) -> None:
        self._direct = direct
        self._descriptor = -1
        self._reader = ResponseReader()
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[HttpReply] | None = None  # to the request under way
        self._more: asyncio.Future[None] | None = None  # is done when something has arrived for a stream

    def send(self, data: bytes) -> "asyncio.Future[HttpReply]":
        """Send the bytes `data` of a request, and return the future response. It fails with an OSError if the connection is lost."""
        self._reply = reply = asyncio.get_running_loop().create_future()
        self._reader.begin()
        sent, transport = 0, self._transport
        if transport is None or transport.is_closing():
            self._end(RESET)
            return reply
        if self._direct:
            try:
                sent = os.write(self._descriptor, data)
            except BlockingIOError:
                pass
            except OSError:  # the server may have responded and closed before it has read all
                return reply
        if sent < len(data):
            transport.write(data[sent:])
        return reply

    async def chunks(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """Send the bytes `data` of a request, and yield the response's body as it arrives. Nothing more is received while the caller
        works. Raises OSError if the connection is lost, and the error that the response stands for."""
        reply, reader = self.send(data), self._reader
        try:
            while not reply.done():
                transport = self._transport
                if reader.status == 200 and reader.parts and transport is not None:
                    transport.pause_reading()
                    try:
                        yield reader.take()
                    finally:
                        if not transport.is_closing():
                            transport.resume_reading()
                else:
                    self._more = asyncio.get_running_loop().create_future()
                    await self._more
            last = reply.result()
            if last.status != 200:
                raise error_of(last)
            if last.body:
                yield last.body
        finally:
            reply.cancel()

    @property
    def is_free(self) -> bool:
        """Whether another request may follow: the last one is wholly sent and answered, and the connection is open."""
        sent = self._transport is not None and not self._transport.get_write_buffer_size()
        return self._reader.keeps and self._reply is None and sent

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._reader.keeps = False
        if self._transport is not None:
            self._transport.abort()

    abort = close

    def _end(self, why: str) -> None:
        reply, self._reply = self._reply, None
        self.close()
        if reply is not None and not reply.done():
            reply.set_exception(OSError(why))
        self._wake()

    def _read(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except OSError as error:
            self._end(str(error))
            return
        if self._reader.is_complete and self._reply is not None:
            reply, self._reply = self._reply, None
            if not reply.done():
                reply.set_result(self._reader.reply)
        self._wake()

    def _wake(self) -> None:
        more, self._more = self._more, None
        if more is not None and not more.done():
            more.set_result(None)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        if self._direct:
            self._descriptor = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        """Read received bytes. What no request has asked for ends the connection."""
        if self._reply is None:
            self.close()
        else:
            self._read(data)

    def connection_lost(self, error: Exception | None) -> None:
        """End the request under way, unless its response lasts until the connection ends."""
        if error is None and self._reply is not None:
            self._read(b"")
        self._end(RESET)


class AsyncConnections:
    """The connections of an event loop to `server`, at most `limit`, which are kept for later requests.

    `held` counts the requests that waited because of the limit, and `most` is the largest number open at a time.
    """

    def __init__(self, server: ServerAddress, limit: int) -> None:
        self._server = server
        self._kept = ConnectionPool[AsyncConnection](limit)
        self._opening = 0
        self._turns: deque[asyncio.Future[None]] = deque()  # of those who wait for a connection
        self.held = 0
        self.most = 0

    def start(self, data: bytes, sent: Callable[[], object] = lambda: None) -> "asyncio.Future[HttpReply]":
        """Send the bytes `data` of a request as soon as a connection is free, and return the future response; `sent` is called when they
        are sent. The future fails with NotConnected, or with another OSError if the connection is lost; cancelling it ends the request."""
        connection = None if self._turns else self._kept.take()
        if connection is None:
            return asyncio.ensure_future(self._exchange(data, sent))
        reply = connection.send(data)
        sent()
        reply.add_done_callback(lambda _: self.give_back(connection))
        return reply

    async def _exchange(self, data: bytes, sent: Callable[[], object]) -> HttpReply:
        connection = await self.take()
        try:
            reply = connection.send(data)
            sent()
            return await reply
        finally:
            self.give_back(connection)

    async def take(self) -> AsyncConnection:
        """Return a free connection, or a new one. Raises NotConnected."""
        was_held = False
        while (connection := self._kept.take()) is None:
            if len(self._kept.open) + self._opening < self._kept.limit:
                return await self._dialled()
            self.held, was_held = self.held + (not was_held), True
            turn = asyncio.get_running_loop().create_future()
            self._turns.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._next()  # whose turn is it instead
                raise
        return connection

    def give_back(self, connection: AsyncConnection) -> None:
        """Keep the connection if another request may follow on it, else close it."""
        self._kept.put(connection)
        self._next()

    async def warm(self, count: int) -> None:
        """Open `count` connections before they are needed. Raises NotConnected."""
        for connection in await asyncio.gather(*[self._dialled() for _ in range(count)]):
            self.give_back(connection)

    async def close(self) -> None:
        """Close all connections."""
        self._kept.close()
        await asyncio.sleep(0)  # the event loop closes the sockets in its next turn

    async def _dialled(self) -> AsyncConnection:
        self._opening += 1
        try:
            connection = await dial(self._server)
        except BaseException:
            self._next()
            raise
        finally:
            self._opening -= 1
        self._kept.open.add(connection)
        self.most = max(self.most, len(self._kept.open))
        return connection

    def _next(self) -> None:
        """Let the first of those who wait for a connection try again."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return


async def dial(server: ServerAddress) -> AsyncConnection:
    """Return a new connection to the first address of `server` that accepts one. Raises NotConnected."""
    wrong = OSError("no address")
    for family, address in await _addresses(server):
        try:
            return await _dialled(server, family, address)
        except OSError as error:
            wrong = error
    raise NotConnected(reason_of(wrong)) from wrong


async def _dialled(server: ServerAddress, family: int, address: Any) -> AsyncConnection:
    loop, tls = asyncio.get_running_loop(), server.tls
    connection = AsyncConnection(direct=tls is None)
    name = None if tls is None else server.host
    if server.uds is not None:
        await loop.create_unix_connection(lambda: connection, address, ssl=tls, server_hostname=name)
    else:
        await loop.create_connection(lambda: connection, *address[:2], family=family, ssl=tls, server_hostname=name)
    return connection


async def _addresses(server: ServerAddress) -> list[tuple[int, Any]]:
    if server.uds is not None:
        return [(socket.AF_UNIX, server.uds)]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NotConnected(f"{server.host}: {error.strerror}") from error
    return [(family, address) for family, _, _, _, address in found]


@contextmanager
def failing(url: str) -> Iterator[None]:
    """Translate the errors of a connection to `url` in the block into ours."""
    try:
        yield
    except WeirError:
        raise
    except NotConnected as error:
        raise Unreachable(f"{url}: no connection ({error})") from error
    except TimeoutError as error:
        raise _late(url) from error
    except OSError as error:
        raise ConnectionLost(f"{url}: the connection ended before the response ({error})") from error


def _late(url: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{url}: no response in time")


def headers_with(token: str | None) -> dict[str, str]:
    """Return the headers that carry `token`."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


def address_of(url: str) -> tuple[str, str | None]:
    """Return the base of all URLs, and the path of the Unix socket if `url` is unix:PATH. A url without a scheme is of http. Raises
    SettingsError for unix: without a path."""
    if not url.startswith("unix:"):
        return url if "://" in url else f"http://{url}", None
    path = url.removeprefix("unix:").removeprefix("//")
    if not path:
        raise SettingsError(f"url={url!r}: {_URL_RULE}")
    return "http://localhost", path


def tls_context(tls: bool | ssl.SSLContext) -> ssl.SSLContext:
    """Return `tls` itself, or a context that verifies certificates if `tls`, and else accepts any."""
    if isinstance(tls, ssl.SSLContext):
        return tls
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if not tls:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _parsed(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna") and parts.port != 0
    except ValueError as error:
        raise SettingsError(f"url={url!r}: {error}") from None
    if not known or parts.query or parts.fragment:
        raise SettingsError(f"url={url!r}: {_URL_RULE}")
    return parts


def _basic(parts: SplitResult) -> dict[str, str]:
    """Return the header with the name and the password of a URL, if it has them."""
    if parts.username is None:
        return {}
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return {"authorization": "Basic " + base64.b64encode(credentials).decode()}
