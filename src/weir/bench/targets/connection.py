"""One connection to a server under test: one request at a time, on a connection that stays."""

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

# Reads HTTP answers from bytes.


class HttpAnswer(NamedTuple):
    """One answer. `keeps`: the connection may be used again."""

    status: int
    body: bytes
    keeps: bool


class Garbage(Exception):
    """What came is no answer of HTTP/1.1."""


class AnswerReader:
    """Takes the bytes of one connection. Bodies are kept if `bodies`, or if the answer is an error."""

    def __init__(self, bodies: bool = False) -> None:
        self._bodies = bodies
        self._parser = HttpResponseParser(self)
        self._body = b""
        self._answers: list[HttpAnswer] = []
        self.begun = False  # within an answer

    def feed(self, data: bytes) -> list[HttpAnswer]:
        """Return the answers that `data` completes. Raises Garbage."""
        answers: list[HttpAnswer] = []
        self._answers = answers
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise Garbage(f"{type(error).__name__}: {error}") from error
        return answers

    # What httptools calls.

    def on_message_begin(self) -> None:
        """An answer begins."""
        self.begun = True
        self._body = b""

    def on_body(self, body: bytes) -> None:
        """Some of its body."""
        if self._bodies or self._parser.get_status_code() >= 300:
            self._body += body

    def on_message_complete(self) -> None:
        """It is whole. 1xx is none: the answer comes after it."""
        self.begun = False
        status = self._parser.get_status_code()
        if status >= 200:
            self._answers.append(HttpAnswer(status, self._body, self._parser.should_keep_alive()))


def outcome_of(answer: HttpAnswer) -> str:
    """Return "ok" for 2xx, else the code, and the type of the error where the body says it: "429 Overloaded"."""
    if 200 <= answer.status < 300:
        return "ok"
    kind = error_of(answer).get("type")
    return f"{answer.status} {kind}" if isinstance(kind, str) else str(answer.status)


def error_of(answer: HttpAnswer) -> dict[str, Any]:
    """Return the error document in the answer, or {}."""
    try:
        error = msgspec.json.decode(answer.body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError, IndexError):
        return {}
    return error if isinstance(error, dict) else {}


CLOSED, RESET, GARBAGE = "connection closed", "connection reset", "garbage"
NOBODY = -1


class ConnectionListener(Protocol):
    """Hears what becomes of a connection."""

    def answered(self, connection: "LoadConnection", index: int, answer: HttpAnswer) -> None:
        """The request `index` has its answer; the connection is free again, if `answer.keeps`."""

    def broken(self, connection: "LoadConnection", index: int, why: str) -> None:
        """The connection is gone, and with it the request `index` (NOBODY: none was under way)."""


class LoadConnection(asyncio.Protocol):
    """`direct`: bytes go to the socket itself. A transport of uvloop sends them only when the loop's turn ends, so that
    the instant of sending would not be known."""

    def __init__(self, owner: ConnectionListener, sock: socket.socket, *, direct: bool, bodies: bool = False) -> None:
        self._owner = owner
        self._sock = sock
        self._direct = direct
        self._reader = AnswerReader(bodies)
        self._transport: asyncio.Transport | None = None
        self.index = NOBODY
        self.since = 0.0  # when the request under way was sent
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, index: int, data: bytes) -> None:
        """Send a request whose bytes are `data`."""
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
        """Whether some of the last request is still to be sent, though it was answered: nothing may follow it then."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def data_received(self, data: bytes) -> None:
        """Read some of an answer."""
        if self.gone:
            return
        try:
            answers = self._reader.feed(data)
        except Garbage:
            self._end(GARBAGE)
            return
        if not answers:
            return
        if self.index == NOBODY or len(answers) > 1:  # nobody asked: a server that is about to close
            self._end(GARBAGE)
            return
        (answer,), index = answers, self.index
        self.index = NOBODY
        self._owner.answered(self, index, answer)

    def connection_lost(self, error: Exception | None) -> None:
        """The other end has closed it, or the network did."""
        self._end(CLOSED if error is None else RESET)

    def close(self) -> None:
        """Drop it, and say nothing."""
        self.gone = True
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> None:
        if not self.gone:
            self.close()
            index, self.index = self.index, NOBODY
            self._owner.broken(self, index, why)


# The parts of a target's URL.


_RULE = "must be like http://HOST:PORT/PATH, https://HOST/PATH or http://unix:SOCKET:/PATH"


class Address(NamedTuple):
    """A server and a path on it (with its query). `uds` is the path of a Unix socket, or "" for TCP."""

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
        """Return another path of the same server."""
        return self._replace(path=path)


def parse_address(url: str) -> Address:
    """Read a URL; `http://unix:/run/weir.sock:/infer/square` is a path on a Unix socket. Raises SettingsError."""
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
    """Return the context for https; `insecure` takes any certificate."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


# Opens connections to one server.


P = TypeVar("P", bound=asyncio.BaseProtocol)


class Dialler:
    """Knows where the server of `address` is, once `find` has found it."""

    def __init__(self, address: Address, *, insecure: bool = False) -> None:
        self.address = address
        self.direct = not address.tls  # bytes may be sent on the socket itself
        self._tls: ssl.SSLContext | None = tls_context(insecure) if address.tls else None
        self._family = socket.AF_UNIX
        self._place: Any = address.uds

    async def find(self) -> None:
        """Look the host up, and take its first address that accepts connections. Raises SettingsError."""
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
        """Connect, and return the protocol that `make(socket)` made for it. Raises OSError."""
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
    """Return what went wrong, in the system's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    # What the event loop says of a failed connection ("Connect call failed") is no reason.
    return (
        os.strerror(error.errno)
        if error.errno is not None and error.errno in errorcode
        else str(error) or type(error).__name__
    )


# Background tasks of a target.


class Tasks(set[asyncio.Task[None]]):
    """The tasks that run. A loop holds them only weakly: each is held here until its end."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` in the running loop."""
        task = asyncio.ensure_future(work)
        self.add(task)
        task.add_done_callback(self.discard)

    async def end(self) -> None:
        """Cancel what runs; return when all of it has ended, however that was."""
        for task in self:
            task.cancel()
        await self.wait()

    async def wait(self) -> None:
        """Return when all that runs now has ended, however that was."""
        if self:
            await asyncio.wait(self)
