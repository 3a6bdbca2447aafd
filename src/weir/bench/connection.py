"""Addresses of servers, and a connection of HTTP that carries one request at a time."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from errno import errorcode
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from weir.errors import SettingsError


class HttpAnswer(NamedTuple):
    """An HTTP response. `keeps` tells whether the connection may be used again."""

    status: int
    body: bytes
    keeps: bool


class Garbage(Exception):
    """The received bytes are not a response of HTTP/1.1."""


class AnswerReader:
    """Parses the bytes received on one connection. Bodies are kept if `bodies`, and for error responses."""

    def __init__(self, bodies: bool = False) -> None:
        self._bodies = bodies
        self._parser = HttpResponseParser(self)
        self._body = b""
        self._answers: list[HttpAnswer] = []

    def feed(self, data: bytes) -> list[HttpAnswer]:
        """Return the responses that `data` completes. Raises Garbage."""
        answers: list[HttpAnswer] = []
        self._answers = answers
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise Garbage(f"{type(error).__name__}: {error}") from error
        return answers

    # Called by httptools.

    def on_message_begin(self) -> None:
        """A response begins."""
        self._body = b""

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, if it is wanted."""
        if self._bodies or self._parser.get_status_code() >= 300:
            self._body += body

    def on_message_complete(self) -> None:
        """Add the complete response; a 1xx is ignored, as the response follows it."""
        status = self._parser.get_status_code()
        if status >= 200:
            self._answers.append(HttpAnswer(status, self._body, self._parser.should_keep_alive()))


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


CLOSED, RESET, GARBAGE = "connection closed", "connection reset", "garbage"
NO_REQUEST = -1


class ConnectionListener(Protocol):
    """Gets the reports of a connection."""

    def answered(self, connection: "LoadConnection", index: int, answer: HttpAnswer) -> None:
        """The request `index` is answered. The connection is free again if `answer.keeps`."""

    def broken(self, connection: "LoadConnection", index: int, why: str) -> None:
        """The connection is lost, and with it the request `index` (NO_REQUEST: none was under way)."""


class LoadConnection(asyncio.Protocol):
    """A connection that carries one request at a time, and reports to `owner`.

    With `direct`, bytes are written to the socket itself: a transport of uvloop sends them only at the end of the event loop's turn,
    so the instant of sending would be unknown. `bodies` tells whether response bodies are kept. `since` is set by the owner.
    """

    def __init__(self, owner: ConnectionListener, sock: socket.socket, *, direct: bool, bodies: bool = False) -> None:
        self._owner = owner
        self._sock = sock
        self._direct = direct
        self._reader = AnswerReader(bodies)
        self._transport: asyncio.Transport | None = None
        self.index = NO_REQUEST
        self.since = 0.0  # when the request under way was sent
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, index: int, data: bytes) -> None:
        """Send the bytes `data` of the request `index`."""
        self.index = index
        sent = 0
        if self._direct:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                pass
            except OSError:
                self._end(RESET)
                return
        if sent < len(data) and self._transport is not None:
            self._transport.write(data[sent:])

    @property
    def unsent(self) -> bool:
        """Whether a part of the last request is still to be sent although it was answered. No request may follow then."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and report the response that they complete."""
        if self.gone:
            return
        try:
            answers = self._reader.feed(data)
        except Garbage:
            self._end(GARBAGE)
            return
        if not answers:
            return
        if self.index == NO_REQUEST or len(answers) > 1:  # an answer without a request; the server is about to close
            self._end(GARBAGE)
            return
        (answer,), index = answers, self.index
        self.index = NO_REQUEST
        self._owner.answered(self, index, answer)

    def connection_lost(self, error: Exception | None) -> None:
        """Report the loss of the connection."""
        self._end(CLOSED if error is None else RESET)

    def close(self) -> None:
        """Close the connection without a report."""
        self.gone = True
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> None:
        if not self.gone:
            self.close()
            index, self.index = self.index, NO_REQUEST
            self._owner.broken(self, index, why)


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

    def at(self, path: str) -> "Address":
        """Return the address of another path of the same server."""
        return self._replace(path=path)


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


def tls_context(insecure: bool) -> ssl.SSLContext:
    """Return the TLS context for https; `insecure` accepts any certificate."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


P = TypeVar("P", bound=asyncio.BaseProtocol)


class Dialler:
    """Opens connections to the server of `address`. Call `find` first."""

    def __init__(self, address: Address, *, insecure: bool = False) -> None:
        self.address = address
        self.direct = not address.tls  # bytes may be written to the socket itself
        self._tls: ssl.SSLContext | None = tls_context(insecure) if address.tls else None
        self._family = socket.AF_UNIX
        self._place: Any = address.uds

    async def find(self) -> None:
        """Look the host up, and choose its first address that accepts connections. Raises SettingsError."""
        address = self.address
        places: list[tuple[Any, Any]] = [(socket.AF_UNIX, address.uds)]
        if not address.uds:
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            except OSError as error:
                raise SettingsError(f"{address.url}: {address.host}: {error.strerror}") from error
            places = [(family, place) for family, _, _, _, place in found]
        wrong: OSError = OSError("no address")
        for self._family, self._place in places:
            try:
                sock = await self._connected()
            except OSError as error:
                wrong = error
            else:
                sock.close()
                return
        raise SettingsError(f"{address.url}: no server there: {reason_of(wrong)}") from wrong

    async def dial(self, make: Callable[[socket.socket], P]) -> P:
        """Open a connection, and return its protocol, which `make(socket)` makes. Raises OSError."""
        loop = asyncio.get_running_loop()
        sock = await self._connected()
        protocol = make(sock)
        name = self.address.host if self._tls is not None else None
        await loop.create_connection(lambda: protocol, sock=sock, ssl=self._tls, server_hostname=name)
        return protocol

    async def _connected(self) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if self._family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(sock, self._place)
        except BaseException:
            sock.close()
            raise
        return sock


def reason_of(error: OSError) -> str:
    """Return the reason of a failed connection in the system's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    # The event loop's own text, "Connect call failed", gives no reason.
    known = error.errno is not None and error.errno in errorcode
    return os.strerror(error.errno or 0) if known else str(error) or type(error).__name__


class Tasks(set[asyncio.Task[None]]):
    """The running tasks of a target. They are kept here because the event loop has weak references to them only."""

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task in the running event loop, and return it."""
        task = asyncio.ensure_future(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def end(self) -> None:
        """Cancel all tasks; return when they have ended, with or without an error."""
        for task in self:
            task.cancel()
        await self.wait()

    async def wait(self) -> None:
        """Return when all present tasks have ended, with or without an error."""
        if self:
            await asyncio.wait(self)
