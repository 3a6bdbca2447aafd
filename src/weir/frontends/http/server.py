"""The HTTP server: listening sockets, TLS, closing idle and slow connections, and draining."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from weir.errors import Overloaded, SettingsError, bounded, reason_of
from weir.frontends.frontend import cannot_listen, listen
from weir.frontends.http.access_log import HttpLog
from weir.frontends.http.asgi import OPEN
from weir.frontends.http.fast.connection import Connection, Kept, LoggedConnection
from weir.frontends.http.fast.handover import HandOver
from weir.frontends.http.fast.inference import HotKserve, HotNative
from weir.frontends.http.fast.plan import END_OF_HEAD, RouteHandler
from weir.frontends.http.fast.shared import REAL_TIME, Clocks, ConnectionTaker, HttpShared
from weir.frontends.websocket import WebSockets
from weir.messages import Observer
from weir.protocols import HttpSettings
from weir.protocols.account import RESERVED, Account
from weir.protocols.kserve import KserveContext
from weir.wire.status import http_code
from weir.workers.timer import in_background

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle

BACKLOG = 2048  # connections that wait in the kernel to be accepted
_SWEEP_INTERVAL = 1.0  # seconds
_LAST_CONNECTIONS = 0.1  # seconds in which a client that has just connected can still send a request
_HANDSHAKE_LINES = 1.0  # seconds between two log lines about failed TLS handshakes
_LONGEST_REASON = 200  # characters
_CLOSE_TIMEOUT = 2.0  # seconds for sending what has been written, when the server stops

# What a connection over the limit may ask for, within _PROBE_TIME seconds: at the limit, health and metrics matter most.
_PROBED = frozenset(path.encode() for path in (*OPEN, "/metrics"))
_PROBE_TIME = 1.0


_log = logging.getLogger("weir.http")

Connect = Callable[[], asyncio.BufferedProtocol]  # makes the protocol of a connection


class Listening(Protocol):
    """Listens for the connections of a server."""

    @property
    def sockets(self) -> Sequence[Any]:
        """The listening sockets."""

    def close(self) -> None:
        """Listen no more."""


# Opens the listening sockets that the settings state; the function makes the protocol of a connection. Raises OSError.
Listen = Callable[[HttpSettings, Callable[[], asyncio.BaseProtocol]], Awaitable[Listening]]


async def listen_at_address(settings: HttpSettings, accepted: Callable[[], asyncio.BaseProtocol]) -> Listening:
    """Listen at the address that the settings state; see Listen."""
    if settings.uds is None:
        return await listen(accepted, settings.host, settings.port, backlog=BACKLOG)
    listener = unix_socket(settings.uds, int(settings.uds_mode, 8))
    return await asyncio.get_running_loop().create_unix_server(accepted, sock=listener, backlog=BACKLOG)


def tls_context(settings: HttpSettings) -> ssl.SSLContext | None:
    """Return the context for TLS, or None if TLS is off. Raises SettingsError naming the unusable file."""
    if settings.tls_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.tls_certfile, settings.tls_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = f"tls_certfile={settings.tls_certfile!r}, tls_keyfile={settings.tls_keyfile!r}"
        rule = "must be a certificate and its private key, both PEM"
        raise SettingsError(f"{files}: {rule} ({reason_of(error)})") from error
    return context


class Edge(NamedTuple):
    """Says how connections come to a server, and leave its fast path; the fronts and the dispatcher of a server have others.

    Attributes:
        listen: opens the listening sockets.
        tls: returns the context of the connections that are accepted here. Raises SettingsError naming the unusable file.
        connections: the classes of connections, without and with a line in the log for each response.
        handlers: the classes of the handlers of Weir's own protocols.
        hand_over: goes on with a connection that the fast path leaves; None: the ASGI application of this process.
    """

    listen: Listen = listen_at_address
    tls: Callable[[HttpSettings], ssl.SSLContext | None] = tls_context
    connections: tuple[type[Connection], type[LoggedConnection]] = (Connection, LoggedConnection)
    handlers: tuple[type[HotNative], type[HotKserve]] = (HotNative, HotKserve)
    hand_over: ConnectionTaker | None = None


ONE_PROCESS = Edge()


class HttpServer:
    """Serves the models of `context` over HTTP/1.1: inference by the fast path, everything else by `asgi_app`.

    `context` is shared by the frontends of the Open Inference Protocol. `observers` are notified of requests that are refused before they reach a service;
    the services notify their own observers of all others. `clocks` measure idle and slow connections. `websockets` are those of
    `asgi_app`, to be drained. `route_handlers` answer requests of a product on the fast path. `log` gets a line for each response that `asgi_app` does not
    send. `edge` says how connections come.
    """

    asks_for_key = True

    def __init__(
        self, context: KserveContext, asgi_app: Any, observers: Sequence[Observer] = (), *, clocks: Clocks = REAL_TIME, log: HttpLog | None = None,
        websockets: WebSockets | None = None, route_handlers: Sequence[RouteHandler] = (), edge: Edge = ONE_PROCESS,
    ) -> None:  # fmt: skip
        self._settings = settings = context.http
        self._websockets = websockets
        self._asgi_app = asgi_app
        self._edge = edge
        self._hand_over = edge.hand_over or HandOver(self._asgi, settings)
        native, kserve = edge.handlers
        self._shared = HttpShared(
            (native(context.registry, settings), kserve(context), *route_handlers), settings, observers, self._hand_over,
            clocks=clocks, access=context.access, account=context.account, log=log,
        )  # fmt: skip
        self._clock = clocks.now
        self._server: Listening | None = None
        self._tls: ssl.SSLContext | None = None
        # The connections that the reserve of this process holds, oldest first.
        self._over_limit: dict[_OverLimit, None] = {}
        self._handshakes: set[asyncio.Task[Any]] = context.account.connection_set()
        self._failed_handshakes = 0  # since the last log line about one
        self._handshakes_reported = -_HANDSHAKE_LINES  # the instant of that line
        self._arriving: list[None] = []  # one for each connection that is accepted and has no transport yet
        context.account.counters.append(lambda: len(self._handshakes) + len(self._arriving))
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listen. Raises SettingsError when the address is in use or invalid, or the certificate unreadable."""
        self._hand_over.load()
        self._tls = self._edge.tls(self._settings)
        try:
            self._server = await self._edge.listen(self._settings, self._accepted)
        except OSError as error:
            raise cannot_listen(self._wanted(), error, 0 if self._settings.uds else self._settings.port) from error
        self.sweep()

    def _accepted(self) -> asyncio.BaseProtocol:
        """Return the protocol of a connection that has been accepted."""
        return self._connect() if self._tls is None else _Accepted(self._shake_hands)

    def _wanted(self) -> str:
        settings = self._settings
        return f"uds={settings.uds!r}" if settings.uds is not None else f"host={settings.host!r}, port={settings.port}"

    def _connect(self) -> asyncio.BufferedProtocol:
        """Return the protocol of a new connection, which is counted from now on."""
        self._arriving.append(None)
        asyncio.get_running_loop().call_soon(
            self._arriving.pop
        )  # just before `connection_made`, which counts it by itself
        return self._admit()

    def _admit(self) -> asyncio.BufferedProtocol:
        """Return the protocol of a connection that is counted. The oldest of the reserve gives way to one over the limit."""
        account, waiting = self._shared.account, self._over_limit
        if not account.exceeded:
            return self._connect_any()
        for each in [each for each in waiting if each.transport.is_closing()]:
            each.end()
        # Other processes, and clients that do not read, may have taken the whole reserve.
        unwanted = account.reserve_full and not waiting
        if waiting and (len(waiting) >= RESERVED or account.reserve_full):
            next(iter(waiting)).give_way()
        return _OverLimit(self._shared, waiting, self._connect_any, unwanted=unwanted)

    def _connect_any(self) -> Connection:
        """Return the protocol of a connection, whether there is room for one or not."""
        (plain, logged), shared = self._edge.connections, self._shared
        return plain(shared) if shared.log is None else logged(shared, shared.log)

    def _shake_hands(self, connection: socket.socket) -> None:
        """Begin TLS on a connection, which is counted from now on."""
        in_background(self._accept_admitted(connection), "a handshake", self._handshakes)

    async def _accept_admitted(self, connection: socket.socket) -> None:
        protocol = self._admit()
        if isinstance(protocol, _OverLimit) and protocol.unwanted:
            connection.close()  # an error would need a handshake, and the reserve has no room for one
        else:
            await self._accept(connection, lambda: protocol, hurried=isinstance(protocol, _OverLimit))

    async def _accept(
        self, connection: socket.socket, connect: Connect | None = None, *, hurried: bool = False
    ) -> None:
        tls: dict[str, Any] = {}
        if self._tls is not None:
            patience = min(self._settings.header_timeout, _PROBE_TIME) if hurried else self._settings.header_timeout
            tls = {"ssl": self._tls, "ssl_handshake_timeout": patience, "ssl_shutdown_timeout": _CLOSE_TIMEOUT}
        peer: Any = None
        with contextlib.suppress(OSError):  # the client may have left
            peer = connection.getpeername()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(connect or self._connect, connection, **tls)
        except OSError as error:  # not TLS, too slow, or the client has left
            if tls:
                self._report_failed_handshake(peer, error)

    def _report_failed_handshake(self, peer: Any, error: OSError) -> None:
        """Log a failed handshake, at most once a second. A client that just closes, as a port check does, is logged for debugging only."""
        left = isinstance(error, ConnectionError) and not isinstance(error, ConnectionAbortedError)
        if not _log.isEnabledFor(level := logging.DEBUG if left else logging.INFO):
            return
        self._failed_handshakes += 1
        if (now := self._clock()) < self._handshakes_reported + _HANDSHAKE_LINES:
            return
        client = peer[0] if isinstance(peer, tuple) else "-"
        reason = bounded(str(error) or type(error).__name__, _LONGEST_REASON)
        _log.log(level, "TLS handshake with %s failed: %s (since_last=%d)", client, reason, self._failed_handshakes)
        self._handshakes_reported, self._failed_handshakes = now, 0

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        self._shared.tell_observers()  # so that /metrics is up to date
        await self._asgi_app(scope, receive, send)

    @property
    def port(self) -> int:
        """The TCP port of the server; 0 for a Unix socket, and before `start`."""
        if self._settings.uds is not None or self._server is None or not self._server.sockets:
            return 0
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        """The address of the server: a URL or `unix:PATH`."""
        if self._settings.uds is not None:
            return f"unix:{self._settings.uds}"
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"http{'s' if self._settings.tls_certfile else ''}://{host}:{self.port}"

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._shared.connections)

    @property
    def account(self) -> Account:
        """The account of all clients' bytes and connections."""
        return self._shared.account

    @property
    def busy(self) -> int:
        """The number of connections with a request in flight."""
        return sum(connection.busy for connection in self._shared.connections)

    def routes_changed(self) -> None:
        """Drop what is cached of the registry: its models or routes have changed."""
        self._shared.routes_changed()

    def sweep(self) -> None:
        """Close connections that have been idle or slow for too long. After `start` this runs once a second."""
        loop = asyncio.get_running_loop()
        if self._shared.on_second():
            loop.call_soon(self._sweep_connections)  # what has come meanwhile is read first
        else:
            self._sweep_connections()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._sweeping = loop.call_later(_SWEEP_INTERVAL, self.sweep)

    def _sweep_connections(self) -> None:
        for connection in list(self._shared.connections):
            connection.sweep(self._shared.tick)

    def move_bodies(self, service: "ModelHandle") -> None:
        """Move bodies that have hardly begun to arrive out of the arena of `service`: others need the room."""
        for _ in self._shared.moved_out(service):
            pass

    def refuse(self) -> None:
        """Refuse new requests with 503 on all connections, and send `Connection: close` with every response."""
        self._shared.drain()
        if self._websockets is not None:
            self._websockets.refuse()

    async def drain_product(self, seconds: float) -> bool:
        """Wait until all requests have ended that a product has accepted in other processes; return whether they did within `seconds`. Call `refuse` before."""
        return True

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """Call `refuse`, accept no more connections, and wait until the requests in flight have been answered.

        Returns False if some have no response after `drain_timeout` seconds (None: no limit). Call `stop` afterwards.
        """
        self.refuse()
        last = self._close_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout):
                await asyncio.gather(*last, return_exceptions=True)
                await asyncio.sleep(_LAST_CONNECTIONS)
                while self.busy:
                    self._shared.ended.clear()
                    await self._shared.ended.wait()
                if self._websockets is not None:
                    await self._websockets.closed()
                return True
        return False

    def _close_listening(self) -> list[asyncio.Task[Any]]:
        """Stop listening. Accept the connections that still wait: they would be reset otherwise, and so they get a response that says why."""
        if self._server is None:
            return []
        accepted = [connection for each in self._server.sockets for connection in waiting_at(each.fileno())]
        self._server.close()
        return [*self._handshakes, *[asyncio.ensure_future(self._accept(connection)) for connection in accepted]]

    async def stop(self) -> None:
        """Close all connections, after a moment for sending what has been written. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self._shared.draining = True
        for task in list(self._handshakes):
            task.cancel()
        await self._all_closed()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._shared.tell_observers()
        if self._settings.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._settings.uds)

    async def _all_closed(self) -> None:
        for end in (methodcaller("stop"), methodcaller("abort")):
            for connection in list(self._shared.connections):
                end(connection)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await self._shared.emptied()


class _Accepted(asyncio.Protocol):
    """A new connection before TLS: passes its socket to `begin`."""

    def __init__(self, begin: Callable[[socket.socket], None]) -> None:
        self._begin = begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the socket on before anything is read from it."""
        try:
            connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        finally:  # also if there is no free descriptor: nothing else would close it
            cast(asyncio.Transport, transport).abort()  # closes its own descriptor; the connection stays
        connection.setblocking(False)
        self._begin(connection)


class _OverLimit(Kept):
    """A connection over the limit, which the reserve holds. It may ask for one page of _PROBED, and goes on with what `make` returns for that; all else
    is refused, also silence, and at once if it is `unwanted`. It is one of `waiting` until then, and until it is closed if it is refused."""

    def __init__(
        self, shared: HttpShared, waiting: "dict[_OverLimit, None]", make: Callable[[], Connection], *, unwanted: bool
    ) -> None:
        self.unwanted = unwanted
        self._make = make
        self._data = bytearray()
        self._refused = False
        self._waiting = waiting
        self._shared = shared

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the head of a request."""
        super().__init__(self._shared, cast(asyncio.Transport, transport), _PROBE_TIME)
        self._waiting[self] = None
        if self.unwanted:
            self.give_way()

    def buffer_updated(self, nbytes: int) -> None:
        """Go on as soon as the head is complete."""
        self._data += self.shared.view[:nbytes]
        head, end, rest = bytes(self._data).partition(END_OF_HEAD)
        method, target, *_ = [*head.partition(b"\r\n")[0].split(b" "), b""]
        if end and method in (b"GET", b"HEAD") and target.partition(b"?")[0] in _PROBED:
            del self._waiting[self]
            # Whoever answers closes the connection then, wherever that is.
            self._go_on().replay(head + b"\r\nconnection: close" + end + rest)
        elif end or len(head) > self.shared.settings.max_header_size:
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        self._waiting.pop(self, None)

    def sweep(self, now: float) -> None:
        """Refuse it if it is silent."""
        if now - self._since > _PROBE_TIME:
            self._refuse()

    def stop(self) -> None:
        """Close the connection. A request that has not arrived completely is refused, as on every connection."""
        self._waiting.pop(self, None)
        if not self.transport.is_closing():
            connection = self._go_on()
            connection.replay(bytes(self._data))
            connection.stop()

    def give_way(self) -> None:
        """Close the connection: a newer one needs its place."""
        self._refuse()
        self.end()

    def end(self) -> None:
        """Close the connection, which the reserve holds no more. TLS would wait for the client's end, and the place is needed now."""
        self._waiting.pop(self, None)
        self.transport.close()
        if not self.transport.can_write_eof():
            asyncio.get_running_loop().call_soon(self.transport.abort)  # when uvloop has sent what was written

    def _refuse(self) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        log, limit = self.shared.log, self.shared.account.max_connections
        if log is not None:
            peer = self.transport.get_extra_info("peername")
            log.answered(peer, "-", b"-", http_code(Overloaded()), 0, log.clock(), "-")
        error = Overloaded(f"{limit} connections are open; that is the limit (max_connections)")
        self._go_on().refuse(bytes(self._data), error)

    def _go_on(self) -> Connection:
        connection = Connection(self.shared) if self._refused else self._make()  # a refusal has its line already
        self.transport.set_protocol(connection)
        connection.connection_made(self.transport)
        self.shared.connections.discard(self)
        return connection


def waiting_at(listening: int) -> Iterator[socket.socket]:
    """Accept and yield, one by one, all connections that wait at the listening socket with this descriptor."""
    with socket.socket(fileno=os.dup(listening)) as own, contextlib.suppress(OSError):
        own.setblocking(False)
        while True:
            connection, _ = own.accept()
            connection.setblocking(False)
            yield connection


def unix_socket(path: str, mode: int) -> socket.socket:
    """Return a Unix socket at `path`, which has the permissions `mode` from the start. The socket of a server that has ended is replaced.

    Raises OSError.
    """
    check_unclaimed(path)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o777 & ~mode)
    try:
        listener.bind(path)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def check_unclaimed(path: str) -> None:
    """Raise OSError if a server listens on the Unix socket `path`. A socket that a server has left behind is ignored."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            pass  # a server listens, and its backlog is full
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
