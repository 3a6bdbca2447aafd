"""The HTTP server of a dispatcher: its fronts listen, and it goes on with the connections that they hand over.

It starts the processes of the fronts, replaces one that has ended, and says what a server shows of them.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weir.errors import SettingsError
from weir.frontends.dashboard import Use, use_of
from weir.frontends.http.access_log import HttpLog
from weir.frontends.http.fast.plan import RouteHandler
from weir.frontends.http.fast.shared import REAL_TIME, Clocks
from weir.frontends.http.server import BACKLOG, Edge, HttpServer, Listening, tls_context, unix_socket
from weir.fronts.dispatcher import Catalogue, ConnectedFront, FrontsShared
from weir.fronts.front import FrontConfig
from weir.fronts.messages import Drain, GiveBack, ModelTable, Refuse
from weir.fronts.passing import Origin, RelayedTransport, socket_pair
from weir.messages import Observer
from weir.protocols import HttpSettings
from weir.protocols.account import SharedAccount, SharedFigures, table_bytes
from weir.protocols.kserve import KserveContext
from weir.wire.frames import Start
from weir.workers.arena import create_memory
from weir.workers.cpus import unpinned
from weir.workers.process.launch import Process, Template, python_path
from weir.workers.timer import in_background

if TYPE_CHECKING:
    from weir.frontends.frontend import DispatcherProduct
    from weir.frontends.http.fast.connection import Connection
    from weir.frontends.websocket import WebSockets
    from weir.fronts.calls import DispatcherGrpc

_log = logging.getLogger("weir")

_MODULE = "weir.fronts.front"
_SHORT_LIFE = 1.0  # seconds: a front that has lived no longer is replaced only after as many
_TRIES = 3  # starts of one front at the start of the server
_PATIENCE = 10  # seconds without a message after which a front hangs; it sends one each second
_END_TIME = 2.0  # seconds in which a killed process ends
_REPORT_TIME = 1.0  # seconds after the end of a drain in which a front reports it

# Makes the dispatcher's side of a front: of its index, its link, its socket for connections, and what is called when it has ended.
MakeFront = Callable[[int, socket.socket, socket.socket, Callable[[str], None]], ConnectedFront]


class RunningFront(NamedTuple):
    """A front that runs."""

    process: Process
    front: ConnectedFront
    since: float


class StartedFront(NamedTuple):
    """The process of a front, and the dispatcher's ends of its link and of its socket for connections."""

    process: Process
    link: socket.socket
    connections: socket.socket


class FrontView(NamedTuple):
    """A front as it is shown: its number, its process, how many connections it has, how many of its requests wait or run, and how often it was started."""

    number: int
    pid: int
    connections: int
    requests: int
    starts: int


class FrontProcesses:
    """Forks the processes of fronts, which listen at the addresses of the sockets `kept`.

    Each process alone has the sockets on which it listens. So they end with it, and the kernel gives connections only to fronts that live. `kept` do not
    listen, and only keep the addresses; a Unix socket does, since all fronts have it in common. `config` is a FrontConfig, and `figures` the descriptor of
    the account's memory.
    """

    def __init__(self, config: Any, figures: int, kept: Sequence[socket.socket]) -> None:
        self.kept = kept
        self._config = config
        self._figures = figures
        self._template: Template | None = None
        self._starting = asyncio.Lock()

    async def start(self, index: int) -> StartedFront | None:
        """Start a front; return None if that is not possible now. Raises OSError if the system refuses what it needs."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            pairs = []
            for make in (socket.socketpair, socket_pair):
                end, its_end = make()
                pairs.append((ours.enter_context(end), theirs.enter_context(its_end)))
            (link, its_link), (connections, its_connections) = pairs
            listening = [theirs.enter_context(listening_at(each)) for each in self.kept]
            descriptors = [each.fileno() for each in (its_link, its_connections)] + [self._figures]
            process = await self._fork(index, [*descriptors, *[each.fileno() for each in listening]])
            if process is None:
                return None
            ours.pop_all()
        return StartedFront(process, link, connections)

    async def _fork(self, index: int, descriptors: Sequence[int]) -> Process | None:
        async with self._starting:
            template = self._template
            if template is None:
                template = self._template = Template(_MODULE)
                environment = {**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))}
                start = Start("", {"name": "fronts", "config": self._config})
                loaded = False
                try:
                    loaded = await template.start(start, environment, unpinned())
                finally:
                    if not loaded:
                        self._template = None
                        template.close()
                if not loaded:
                    return None
            done: asyncio.Future[Process | OSError | None] = asyncio.get_running_loop().create_future()
            template.fork({"index": index + 1}, descriptors, done.set_result)
            started = await done
        if started is None:  # the template has ended, and its fronts with it
            self._template = None
        if isinstance(started, OSError):
            _log.warning("the system refuses a process for front %d: %s", index, started)
            return None
        return started

    def kill(self, process: Process) -> None:
        """Kill the process of a front, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Start none any more."""
        template, self._template = self._template, None
        if template is not None:
            template.close()
            await template.closed


class Fronts:
    """The `count` fronts of a server, which are started by `processes`. `table` returns what the fronts must know of the models. `cleared` is called with
    the index of a front that has ended, from 0.
    """

    def __init__(
        self,
        count: int,
        processes: FrontProcesses,
        make: MakeFront,
        table: Callable[[], ModelTable],
        cleared: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count
        self._processes = processes
        self._make = make
        self._table = table
        self._cleared = cleared
        self._clock = clock
        self._running: dict[int, RunningFront] = {}
        self._starts: Counter[int] = Counter()
        self._closing = False
        self._refusing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_gone = asyncio.Event()

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """See frontends.http.server.Listening."""
        return () if self._closing else self._processes.kept

    def views(self, connections: Callable[[int], int]) -> list[FrontView]:
        """Return the fronts that run, in order. `connections` returns how many a front has, by its number."""
        return [
            FrontView(index, process.pid, connections(index), len(front.open), self._starts[index])
            for index, (process, front, _) in sorted(self._running.items())
        ]

    async def start(self) -> None:
        """Start all fronts; return when all listen. Raises SettingsError if one cannot."""
        await asyncio.gather(*[self._start_patiently(index) for index in range(self._count)])

    async def _start_patiently(self, index: int) -> None:
        for _ in range(_TRIES):
            if await self._start(index):
                return
        raise SettingsError(f"fronts={self._count}: front {index} does not start; what it has written says why")

    async def _start(self, index: int) -> bool:
        """Start a front; return whether it listens."""
        started = await self._processes.start(index)
        if started is None:
            return False
        process, link, connections = started
        if self._closing:
            self._processes.kill(process)
            link.close()
            connections.close()
            return False
        front = self._make(index, link, connections, partial(self._ended, index))
        self._starts[index] += 1
        self._running[index] = RunningFront(process, front, self._clock())
        front.put(self._table())
        if self._refusing:
            front.put(Refuse())
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([front.listening])
        return not front.listening.cancelled()

    def _ended(self, index: int, reason: str) -> None:
        """A front has ended, or has sent what it must not send."""
        running = self._running.pop(index, None)
        if running is None:
            return
        had_started = running.front.listening.done()
        self._processes.kill(running.process)  # first of all: what it listens on ends with it
        running.process.reap(lambda code: None)
        if had_started and not self._closing:  # else who waits for it to listen starts the next one
            replacing = self._replace(index, self._clock() - running.since)
            in_background(replacing, f"the replacement of front {index}", self._tasks)
        if not self._running:
            self._all_gone.set()
        running.front.close()
        self._cleared(index)
        if not self._closing:
            _log.warning("front %d has ended (%s): its connections are lost, and another one starts", index, reason)

    async def _replace(self, index: int, lived: float) -> None:
        while not self._closing:
            if lived < _SHORT_LIFE:
                await asyncio.sleep(_SHORT_LIFE)
            lived = 0.0
            try:
                if await self._start(index):
                    return
            except OSError as error:
                _log.warning("front %d cannot start now, and is tried again: %s", index, error)

    def sweep(self) -> None:
        """Replace fronts that hang; called once a second. Seconds in which this process did not run either do not count."""
        for index, running in list(self._running.items()):
            running.front.sweep()
            if running.front.silent > _PATIENCE:
                self._ended(index, f"it has not reported for {_PATIENCE} s")

    def tell(self, message: ModelTable | GiveBack | Refuse | Drain) -> None:
        """Send all fronts `message`."""
        for running in self._running.values():
            running.front.put(message)

    def refuse(self) -> None:
        """Let all fronts refuse new requests."""
        self._refusing = True
        self.tell(Refuse())

    async def drain_product(self, seconds: float) -> bool:
        """Let the product in all fronts finish what it has accepted; return whether it did so within `seconds`. Call `refuse` before."""
        waiting = [running.front.product_drained for running in self._running.values()]
        _, late = await asyncio.wait(waiting, timeout=seconds) if waiting else ((), ())
        return not late

    def close(self) -> None:
        """Keep the addresses no more; the fronts still listen there. Replace no front from now on. Idempotent."""
        self._closing = True
        for each in self._processes.kept:
            each.close()

    async def drain(self, seconds: float | None) -> bool:
        """Let all fronts accept no more connections, and send all responses; return whether they did so within `seconds`."""
        self.close()
        self.tell(Drain(seconds))
        waiting = [running.front.drained for running in self._running.values()]
        if not waiting:
            return True
        await asyncio.wait(waiting, timeout=None if seconds is None else seconds + _REPORT_TIME)
        return all(each.done() and not each.cancelled() and each.result() for each in waiting)

    async def stop(self) -> None:
        """End all fronts. Those that have drained still send what they relay, and end by themselves. Idempotent."""
        self.close()
        for task in list(self._tasks):
            task.cancel()
        if self._running and all(each.front.drained.done() for each in self._running.values()):
            await self._gone()
        for running in list(self._running.values()):
            self._processes.kill(running.process)
        await self._gone()
        await self._processes.close()

    async def _gone(self) -> None:
        """Return when no front is left, at the latest after _END_TIME."""
        self._all_gone.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_TIME):
                if self._running:
                    await self._all_gone.wait()


# What is shown of a front: the kind of metric, its name, what it says, and its value; None if nobody knows it.
_SHOWN: tuple[tuple[Any, str, str, Callable[[FrontView, Use | None], float | None]], ...] = (
    (CounterMetricFamily, "starts", "Starts of its processes.", lambda view, use: view.starts),
    (
        CounterMetricFamily,
        "cpu_seconds",
        "CPU time of its present process.",
        lambda view, use: None if use is None else use.cpu,
    ),
    (GaugeMetricFamily, "connections", "Connections that a front has.", lambda view, use: view.connections),
    (GaugeMetricFamily, "requests", "Its requests that wait or run.", lambda view, use: view.requests),
    (
        GaugeMetricFamily,
        "memory_bytes",
        "Its resident memory.",
        lambda view, use: None if use is None else use.memory_bytes,
    ),
)


class FrontMetrics(Collector):
    """Shows each of the fronts that `views` returns."""

    def __init__(self, views: Callable[[], Sequence[FrontView]]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        views = [(view, use_of(view.pid)) for view in self._views()]
        for kind, name, text, value in _SHOWN:
            family = kind(f"weir_front_{name}", text, labels=["front"])
            for view, use in views:
                if (number := value(view, use)) is not None:
                    family.add_metric([str(view.number)], number)
            yield family


class FrontFigures:
    """The figures of all processes of a server with `count` fronts, and the account of the dispatcher."""

    def __init__(self, http: HttpSettings, count: int) -> None:
        self.fd = create_memory("weir-fronts", table_bytes(count + 1))  # open until `close`
        self.figures = SharedFigures(self.fd, count + 1)
        self.account = SharedAccount(http, self.figures, 0)

    def connections(self, front: int) -> int:
        """Return how many connections a front has."""
        return self.figures.connections(front + 1)

    def ended(self, front: int) -> None:
        """A front has ended: it holds nothing any more."""
        self.figures.clear(front + 1)

    def close(self) -> None:
        """Give the memory back. The account goes on alone. Idempotent."""
        self.figures.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class FrontsPlan:
    """The fronts that a server shall have: `config` describes them. `grpc` and `product` are the dispatcher's parts of what else they serve."""

    config: FrontConfig
    figures: FrontFigures
    grpc: "DispatcherGrpc | None" = None
    product: "DispatcherProduct | None" = None


class FrontsServer(HttpServer):
    """Serves as HttpServer does, with the fronts of `plan`. `context` has the account of its figures.

    Raises SettingsError for what several fronts cannot serve.
    """

    def __init__(
        self, context: KserveContext, asgi_app: Any, plan: FrontsPlan, observers: Sequence[Observer] = (), *, clocks: Clocks = REAL_TIME,
        log: HttpLog | None = None, websockets: "WebSockets | None" = None, route_handlers: Sequence[RouteHandler] = (),
    ) -> None:  # fmt: skip
        check_possible(plan.config.fronts)
        super().__init__(
            context,
            asgi_app,
            observers,
            clocks=clocks,
            log=log,
            websockets=websockets,
            route_handlers=route_handlers,
            edge=Edge(self._listen_with_fronts, check_certificate),
        )
        self._plan = plan
        self._catalogue = Catalogue(context.registry, plan.product)
        self._of_fronts = FrontsShared(self._catalogue, self.account, observers, log, clocks.now, self._arena_full)
        self._fronts: Fronts | None = None
        context.registry.changed.append(self._models_changed)

    async def _listen_with_fronts(self, settings: HttpSettings, accepted: Callable[[], object]) -> Listening:
        try:
            return await self._open_fronts()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise SettingsError(
                f"fronts={self._plan.config.fronts}: this process may open {most} files (ulimit -n), too few for so many; raise that limit"
            ) from error

    async def _open_fronts(self) -> Fronts:
        plan = self._plan
        grpc = None if plan.grpc is None else await plan.grpc.reserve(keep)
        kept = await self._bind()
        # As many connections as the system allows. The path of a Unix socket is this process's to remove.
        limited = replace(self._settings, max_connections=self.account.max_connections, uds=None)
        processes = FrontProcesses(replace(plan.config, http=limited, grpc=grpc), plan.figures.fd, kept)
        fronts = Fronts(
            plan.config.fronts, processes, self._make_front, self._catalogue.table, plan.figures.ended, self._clock
        )
        try:
            await fronts.start()
        except BaseException:
            await fronts.stop()
            raise
        self._fronts = fronts
        return fronts

    async def _bind(self) -> list[socket.socket]:
        """Return the sockets that keep the addresses. The fronts have one Unix socket in common, because the system divides only ports. Raises OSError."""
        settings = self._settings
        if settings.uds is None:
            return await keep(settings.host, settings.port)
        listener = unix_socket(settings.uds, int(settings.uds_mode, 8))
        listener.setblocking(False)
        listener.listen(BACKLOG)
        return [listener]

    @property
    def fronts(self) -> list[FrontView]:
        """The fronts that run."""
        return [] if self._fronts is None else self._fronts.views(self._plan.figures.connections)

    def _make_front(
        self, index: int, link: socket.socket, connections: socket.socket, ended: Callable[[str], None]
    ) -> ConnectedFront:
        return ConnectedFront(link, connections, self._of_fronts, partial(self._passed, index), ended)

    def _arena_full(self, model: int) -> None:
        if self._fronts is not None:
            self._fronts.tell(GiveBack(model))

    def _models_changed(self) -> None:
        if self._fronts is not None:
            self._fronts.tell(self._catalogue.table())

    def _passed(self, front: int, connection: socket.socket | None, data: bytes, origin: Origin | None) -> None:
        """Go on with a connection of which a front has read `data`, or which it relays from `origin`. None: it was lost."""

        def make() -> "Connection":
            self._handshakes.discard(task)  # from now on it is counted as a connection
            return self._connect_any()

        self._plan.figures.figures.took(front + 1)  # before it is counted here
        if connection is not None:
            accepting = self._accept(connection, partial(_Passed, make, data, origin))
            task = in_background(accepting, "a connection that a front has handed over", self._handshakes)

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

    async def drain_product(self, seconds: float) -> bool:
        """See HttpServer."""
        if self._fronts is None or self._catalogue.product is None:
            return True
        return await self._fronts.drain_product(seconds)

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """See HttpServer."""
        self.refuse()
        in_time = self._fronts is None or await self._fronts.drain(drain_timeout)
        if self._plan.grpc is not None:
            self._plan.grpc.fronts_drained()
        return await super().drain(drain_timeout) and in_time

    async def stop(self) -> None:
        """See HttpServer."""
        await super().stop()
        if self._fronts is not None:
            await self._fronts.stop()
        self._plan.figures.close()


def check_certificate(settings: HttpSettings) -> None:
    """Raise SettingsError for a certificate that cannot be used. The fronts end TLS."""
    tls_context(settings)


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


async def keep(host: str, port: int) -> list[socket.socket]:
    """Return sockets that keep each address of `host`, at which others of this server will listen. The kernel divides connections among these.

    Raises OSError, also if another server listens there, whether it would share or not.
    """
    any_address = host == "::" and socket.has_dualstack_ipv6()
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            made.append(stack.enter_context(socket.socket(family, socket.SOCK_STREAM)))
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not any_address)
            made[-1].bind((address[0], port, *address[2:]))
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # from now on: nobody else may be there yet
            made[-1].setblocking(False)
            port = made[-1].getsockname()[1]
        stack.pop_all()
    return made


def listening_at(kept: socket.socket) -> socket.socket:
    """Return a socket that listens at the address of one of `keep`, or shares a Unix socket. Raises OSError."""
    if kept.family == socket.AF_UNIX:
        return kept.dup()
    dualstack = kept.family == socket.AF_INET6 and not kept.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    made = socket.create_server(
        kept.getsockname(), family=kept.family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=dualstack
    )
    made.setblocking(False)
    return made
