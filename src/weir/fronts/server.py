"""The HTTP server of a dispatcher: its fronts listen, and it goes on with the connections that they hand over."""

import asyncio
import errno
import os
import resource
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from weir.errors import SettingsError
from weir.frontends.http.access_log import HttpLog
from weir.frontends.http.fast.plan import RouteHandler
from weir.frontends.http.server import BACKLOG, HttpServer, Listening, unix_socket
from weir.fronts.account import SharedAccount, SharedFigures, table_bytes
from weir.fronts.dispatcher import Catalogue, ConnectedFront
from weir.fronts.front import FrontConfig
from weir.fronts.passing import Origin, RelayedTransport
from weir.fronts.supervision import FrontProcesses, Fronts, FrontView
from weir.messages import Observer
from weir.protocols.kserve import KserveContext
from weir.protocols.settings import HttpSettings
from weir.workers.arena import create_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from weir.frontends.frontend import DispatcherProduct
    from weir.frontends.http.fast.connection import Connection
    from weir.frontends.websocket import WebSockets
    from weir.fronts.calls import DispatcherGrpc
    from weir.serving.handle import Models


class FrontFigures:
    """The figures of all processes of a server with `count` fronts, and the account of the dispatcher."""

    def __init__(self, http: HttpSettings, count: int) -> None:
        self._fd = create_memory("weir-fronts", table_bytes(count + 1))
        self.figures = SharedFigures(self._fd, count + 1)
        self.account = SharedAccount(http, self.figures, 0)

    def ended(self, front: int) -> None:
        """A front has ended: it holds nothing any more."""
        self.figures.clear(front + 1)

    @property
    def fd(self) -> int:
        """The descriptor. It is open until `close`."""
        return self._fd

    def close(self) -> None:
        """Give the memory back. The account goes on alone. Idempotent."""
        self.figures.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FrontsServer(HttpServer):
    """Serves as HttpServer does, with the fronts that `config` describes. `context` has the account of `figures`.

    Raises SettingsError for what several fronts cannot serve.
    """

    def __init__(
        self, registry: "Models", asgi_app: Any, settings: HttpSettings, observers: Sequence[Observer], *, config: FrontConfig,
        figures: FrontFigures, context: KserveContext, websockets: "WebSockets | None" = None, log: HttpLog | None = None,
        grpc: "DispatcherGrpc | None" = None, product: "DispatcherProduct | None" = None, clock: "Callable[[], float]" = time.monotonic,
        time_of_day: "Callable[[], float]" = time.time, route_handlers: Sequence[RouteHandler] = (),
    ) -> None:  # fmt: skip
        check_possible(config.fronts)
        super().__init__(
            registry, asgi_app, settings, observers, context=context, websockets=websockets, log=log, clock=clock, time_of_day=time_of_day,
            route_handlers=route_handlers,
        )  # fmt: skip
        self._config = config
        self._figures = figures
        self._grpc = grpc
        self._observers = observers
        self._log = log
        self._catalogue = Catalogue(registry, product)
        self._fronts: Fronts | None = None
        registry.changed.append(self._models_changed)

    def _load_tls(self) -> None:
        """Check the certificate. The fronts end TLS."""
        super()._load_tls()

    async def _open(self, tls: ssl.SSLContext | None) -> Listening:
        try:
            return await self._open_fronts()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise SettingsError(
                f"fronts={self._config.fronts}: this process may open {most} files (ulimit -n), too few for so many; raise that limit"
            ) from error

    async def _open_fronts(self) -> Fronts:
        grpc = None if self._grpc is None else await self._grpc.reserve(_bind_one)
        listening = await self._bind()
        # As many connections as the system allows. The path of a Unix socket is this process's to remove.
        limited = replace(self._settings, max_connections=self.account.max_connections, uds=None)
        processes = FrontProcesses(replace(self._config, http=limited, grpc=grpc), self._figures.fd, listening)
        fronts = Fronts(processes, self._make_front, self._catalogue.table, self._figures.ended, self._clock)
        try:
            await fronts.start()
        except BaseException:
            await fronts.stop()
            raise
        self._fronts = fronts
        return fronts

    async def _bind(self) -> list[list[socket.socket]]:
        """Return the listening sockets of each front. The fronts have one Unix socket in common, because the system divides only ports. Raises OSError."""
        settings, count = self._settings, self._config.fronts
        if settings.uds is None:
            return await bind_shared(settings.host, settings.port, count)
        with unix_socket(settings.uds, int(settings.uds_mode, 8)) as listener:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            return [[listener.dup()] for _ in range(count)]

    @property
    def fronts(self) -> list[FrontView]:
        """The fronts that run."""
        return [] if self._fronts is None else self._fronts.views

    def connections_of(self, front: int) -> int:
        """Return how many connections a front has, by its number."""
        return self._figures.figures.connections(front + 1)

    def _make_front(
        self, link: socket.socket, connections: socket.socket, ended: "Callable[[str], None]"
    ) -> ConnectedFront:
        return ConnectedFront(
            link, connections, self._catalogue, self.account, self._observers, self._log, self._clock, self._passed, ended, self._arena_full,
        )  # fmt: skip

    def _arena_full(self, model: int) -> None:
        if self._fronts is not None:
            self._fronts.give_back(model)

    def _models_changed(self) -> None:
        if self._fronts is not None:
            self._fronts.tell_models()

    def _passed(self, connection: socket.socket, data: bytes, origin: Origin | None) -> None:
        """Go on with a connection of which a front has read `data`, or which it relays from `origin`."""

        def make() -> "Connection":
            self._handshakes.discard(task)  # from now on it is counted as a connection
            return self._connect_any()

        task = asyncio.ensure_future(self._accept(connection, partial(_Passed, make, data, origin)))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    def sweep(self) -> None:
        """See HttpServer."""
        if self._fronts is not None:
            self._fronts.sweep()
        super().sweep()

    def refuse(self) -> None:
        """See HttpServer."""
        super().refuse()
        if self._fronts is not None:
            self._fronts.refuse()

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """See HttpServer."""
        self.refuse()
        in_time = self._fronts is None or await self._fronts.drain(drain_timeout)
        if self._grpc is not None:
            self._grpc.fronts_drained()
        return await super().drain(drain_timeout) and in_time

    def _close_listening(self) -> list[asyncio.Task[Any]]:
        """Wait for the connections that the fronts have handed over. These have accepted all that waited."""
        return list(self._handshakes)

    async def stop(self) -> None:
        """See HttpServer."""
        await super().stop()
        if self._fronts is not None:
            await self._fronts.stop()
        self._figures.close()


class _Passed(asyncio.BufferedProtocol):
    """A connection that a front has handed over, until `make` has made its protocol, which gets the bytes that were read."""

    def __init__(self, make: "Callable[[], Connection]", data: bytes, origin: Origin | None) -> None:
        self._make = make
        self._data = data
        self._origin = origin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        connection, passed = self._make(), cast(asyncio.Transport, transport)
        if self._origin is not None:
            passed = cast(asyncio.Transport, RelayedTransport(passed, self._origin))
        passed.set_protocol(connection)
        connection.connection_made(passed)
        connection.replay(self._data)


def check_possible(count: int) -> None:
    """Raise SettingsError if this system cannot have `count` fronts."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise SettingsError(f"fronts={count}: this system cannot share a port (SO_REUSEPORT); only fronts=1 works")


async def _bind_one(host: str, port: int) -> list[socket.socket]:
    """Return sockets that keep a port, at which others will listen."""
    (sockets,) = await bind_shared(host, port, 1, listens=False)
    return sockets


async def bind_shared(host: str, port: int, count: int, *, listens: bool = True) -> list[list[socket.socket]]:
    """Return `count` lists of sockets that listen at each address of `host`. The kernel divides connections among the sockets of an address.

    Raises OSError, also if another server listens there, whether it would share or not.
    """
    any_address = host == "::" and socket.has_dualstack_ipv6()
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made: list[list[socket.socket]] = [[] for _ in range(count)]
    try:
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            bound = (address[0], port, *address[2:])
            for index, sockets in enumerate(made):
                sockets.append(_bind(family, bound, alone=index == 0, dualstack=any_address, listens=listens))
                port = sockets[-1].getsockname()[1]
                bound = (address[0], port, *address[2:])
    except BaseException:
        for each in (each for sockets in made for each in sockets):
            each.close()
        raise
    return made


def _bind(family: int, address: Any, *, alone: bool, dualstack: bool, listens: bool) -> socket.socket:
    """Return a socket that listens at `address`, and from then on shares it. `alone`: nobody else may listen there yet."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dualstack)
        if not alone:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setblocking(False)
        if listens:
            made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made
