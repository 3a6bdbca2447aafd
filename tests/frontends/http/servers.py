"""Running servers for the tests of the HTTP frontend: each way to serve, in a thread with a loop of its own, on a free port."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import httpx
import uvicorn
import uvloop
from anyio.from_thread import start_blocking_portal
from tests.served import TEST_FRONTS, until

from weir.catalog.registry import Registry
from weir.frontends.http.application import RenderMetrics, make_app
from weir.frontends.http.server import HttpServer
from weir.fronts.front import FrontConfig
from weir.fronts.server import FrontFigures, FrontsPlan, FrontsServer
from weir.protocols import HttpSettings
from weir.protocols.access import Access
from weir.protocols.kserve import KserveContext

T = TypeVar("T")
Start = Callable[[Registry, HttpSettings, RenderMetrics | None], AbstractAsyncContextManager[tuple[str, int]]]


class Running:
    """A server that runs, at `host` and `port`, its services started."""

    def __init__(self, registry: Registry, address: tuple[str, int], loop: asyncio.AbstractEventLoop) -> None:
        self.registry = registry
        self.host, self.port = address
        self.url = f"http://{self.host}:{self.port}"
        # Without a limit of time: what takes long on a busy machine is no failure, and a test that hangs is ended by pytest.
        self.client = httpx.Client(base_url=self.url, timeout=None, headers={"accept-encoding": "identity"})
        self._loop = loop

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start `coroutine` in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` in the server's loop."""
        return self.start(coroutine).result(60)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` in the server's loop."""

        async def called() -> T:
            return function(*arguments)

        return self.run(called())

    def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition`, asked again and again in the server's loop, holds."""
        until(lambda: self.call(condition), 30.0)

    def connect(self) -> socket.socket:
        """Return a new connection."""
        return socket.create_connection((self.host, self.port), timeout=60)

    def exchange(self, *parts: bytes) -> bytes:
        """Send `parts` one by one on a new connection and return all that comes until the server closes it."""
        with self.connect() as connection:
            for part in parts:
                connection.sendall(part)
            return read_all(connection)


Serve = Callable[
    ..., Running
]  # serves services for a test, with settings of HttpSettings; it is stopped after the test


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and the type of an error."""
    return answer.status_code, answer.json()["error"]["type"]


def read_all(connection: socket.socket) -> bytes:
    """Return everything until the other side closes."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


@asynccontextmanager
async def uvicorn_server(app: Any, *, lifespan: Any = "off", ws: Any = "none") -> AsyncIterator[tuple[str, int]]:
    """Serve an application with uvicorn."""
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio sets it for sockets that it has made itself.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(app, lifespan=lifespan, log_config=None, timeout_graceful_shutdown=5, ws=ws)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])  # Server.serve does this too, but looks only ten times a second whether to end
    try:
        yield listener.getsockname()
    finally:
        await _ended(server)
        await server.lifespan.shutdown()
        listener.close()


@asynccontextmanager
async def asgi_server(
    registry: Registry, settings: HttpSettings, metrics: RenderMetrics | None
) -> AsyncIterator[tuple[str, int]]:
    """Serve with uvicorn alone."""
    async with uvicorn_server(make_app(KserveContext(registry, settings), metrics=metrics)) as address:
        yield address


async def _ended(server: uvicorn.Server) -> None:
    """Shut `server` down. Server.shutdown does this too, but looks only ten times a second whether all is over."""
    state = server.server_state
    for each in server.servers:
        each.close()
    for connection in list(state.connections):
        connection.shutdown()
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn tells nobody
                await asyncio.sleep(0)
    for task in state.tasks:
        task.cancel()


@asynccontextmanager
async def fastlane_server(
    registry: Registry, settings: HttpSettings, metrics: RenderMetrics | None
) -> AsyncIterator[tuple[str, int]]:
    """Serve as `weir serve` does: inference on the fast path, the rest handed over."""
    context = KserveContext(registry, settings)
    server = HttpServer(context, make_app(context, metrics=metrics))
    await server.start()
    try:
        yield settings.host, server.port
    finally:
        await server.stop()


def fronts_know(settings: HttpSettings, count: int = 2) -> FrontConfig:
    """Return what so many fronts must know of a server."""
    return FrontConfig(settings, Access(), False, logging.WARNING, count)


@asynccontextmanager
async def running_fronts(
    registry: Registry, settings: HttpSettings, metrics: RenderMetrics | None = None, count: int = 2
) -> AsyncIterator[FrontsServer]:
    """Serve as `weir serve --fronts 2` does, or with another `count` of fronts."""
    figures = FrontFigures(settings, count)
    context = KserveContext(registry, settings, account=figures.account)
    plan = FrontsPlan(fronts_know(settings, count), figures)
    server = FrontsServer(context, make_app(context, metrics=metrics), plan)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def fronts_server(
    registry: Registry, settings: HttpSettings, metrics: RenderMetrics | None
) -> AsyncIterator[tuple[str, int]]:
    """Serve with two fronts."""
    async with running_fronts(registry, settings, metrics) as server:
        yield settings.host, server.port


SERVERS: dict[str, Start] = {"asgi": asgi_server, "fastlane": fastlane_server}
if TEST_FRONTS:  # a server with fronts takes most of a second to start
    SERVERS["fronts"] = fronts_server
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "fastlane": uvloop.new_event_loop,
    "fronts": uvloop.new_event_loop,
}


@asynccontextmanager
async def _serving(
    kind: str, registry: Registry, settings: HttpSettings, metrics: RenderMetrics | None
) -> AsyncIterator[Running]:
    try:
        await registry.start()
        async with SERVERS[kind](registry, settings, metrics) as address:
            yield Running(registry, address, asyncio.get_running_loop())
    finally:
        await registry.stop(0.0)


@contextmanager
def running(
    kind: str, registry: Registry, settings: HttpSettings, metrics: RenderMetrics | None = None
) -> Iterator[Running]:
    """Serve `registry` through `kind` while the block runs."""
    options = {"loop_factory": LOOPS.get(kind, asyncio.new_event_loop)}
    with (
        start_blocking_portal(backend_options=options) as portal,
        portal.wrap_async_context_manager(_serving(kind, registry, settings, metrics)) as server,
        server.client,
    ):
        yield server
