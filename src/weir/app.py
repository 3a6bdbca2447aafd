"""Composes the running server from models, frontends, observers and signals; and `asgi`, the same application for any ASGI server.

A server goes through these steps: it listens (`/health/live` answers 200; `/health/ready` and inference answer 503 while models
load); it loads and warms up all models; it is ready; after a signal it answers 503 to new requests and finishes the accepted ones;
it listens no more; it stops the workers. It listens before it loads, so that a liveness probe does not kill a model that takes
minutes to load, and so that a port that is in use is noticed at once. It listens until the end of the drain, so that a load balancer
gets 503 and not a reset connection.
"""

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

from starlette.applications import Starlette
from starlette.types import ASGIApp, Lifespan

from weir.catalog.loading import FindGroup, ServiceMaker, group_finder, load_target, make_service, new_service
from weir.catalog.manager import Manager, opened_manager
from weir.catalog.registry import Registry, running
from weir.catalog.repository.folder import (
    FolderRepository,
    InlineConfigs,
    TargetWatcher,
    Watcher,
    load_library,
    read_config,
    watching,
)
from weir.catalog.residency import Residency, make_residency, to_start
from weir.catalog.sources import ModelToServe, RepositorySettings, TargetRepository, all_sources
from weir.errors import SettingsError, WeirError, brief
from weir.frontends.dashboard import ListFronts, Sections, make_dashboard, no_clients
from weir.frontends.frontend import (
    Frontend,
    FrontendContext,
    FrontendsSettings,
    Product,
    ProductInFronts,
    nothing,
    open_frontends,
)
from weir.frontends.grpc import GrpcSettings
from weir.frontends.grpc import make_frontend as make_grpc
from weir.frontends.http.access_log import HttpLog
from weir.frontends.http.application import (
    NO_ENDPOINTS,
    AddedEndpoints,
    InferencePaths,
    NumbersCollector,
    code_of,
    held,
    in_memory,
    inference_protocols,
    make_app,
    make_exposition,
)
from weir.frontends.http.server import HttpServer
from weir.frontends.websocket import WebSockets
from weir.jobs import JobSettings
from weir.jobs.routes import JobRoutes
from weir.jobs.running import Ask, JobContext, Reply, call
from weir.messages import Observer
from weir.model import Model
from weir.protocols import HttpSettings, KserveSettings
from weir.protocols.access import Access, AccessSettings, Control, ControlSettings
from weir.protocols.account import Account, allow_descriptors
from weir.protocols.kserve import KserveContext
from weir.serving import END_LIMIT
from weir.serving.service import Service
from weir.settings import ProcessSettings, Settings, read_model_table
from weir.telemetry import TelemetrySettings, open_metric_exporters, open_tracing
from weir.telemetry.exposition import NAMESPACE, Exposition
from weir.telemetry.logs import AccessLog, LogObserver, get_logger, recorders
from weir.telemetry.recorder import Metrics
from weir.wire.status import set_timeout_status
from weir.workers.cpus import cpu_count, pinned
from weir.workers.settings import SERVER_ADDRESS
from weir.workers.timer import new_loop

if TYPE_CHECKING:
    from weir.frontends.http.fast.plan import RouteHandler
    from weir.fronts.server import FrontFigures
    from weir.keywords import AsgiKeywords

# The signals that begin the drain. A second SIGHUP does not end the process at once, as the others do: a service manager sends it
# together with SIGTERM, and a shell sends it twice.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
WRITE_TIMEOUT = 5.0  # seconds for writing finished responses, at the end of a drain


FILES_OF_A_FRONT = 8  # that the server opens at most for each: sockets to it, its listening sockets, its process


class App:
    """One server: its models and its frontends, the first of which is HTTP.

    `observers` are notified of what happens, besides metrics and logs. `product` adds routes and frontends; `settings` include its models.
    `kinds` has the classes and functions that a program has passed, by the target of their model. Raises SettingsError for a wrong target or setting; nothing has been started then.
    """

    def __init__(
        self,
        settings: Settings,
        observers: Sequence[Observer] = (),
        product: Product | None = None,
        kinds: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.settings = settings
        self._product = product
        self._logger = get_logger("weir")
        record = settings.telemetry.record
        recorded = recorders(record, [model.label for model in settings.models]) if record is not None else []
        metrics = Metrics() if settings.telemetry.metrics else None
        tracing = open_tracing(settings.telemetry, settings.kserve.server_name, metrics)
        self._exporters = [] if metrics is None else open_metric_exporters()
        self._listeners: list[Any] = [*recorded, *tracing]
        notified = _notified(settings.telemetry, metrics, [*recorded, *tracing, *observers], product)
        residency = make_residency(settings.repository, settings.models)
        folder = folder_of(settings)
        self._watched = folder if settings.repository.watch else None
        self.manager = _manager_of(settings, notified.observers, kinds, folder, residency)
        self.registry = self.manager.registry
        self._front_rows: ListFronts = no_clients
        in_fronts = None if product is None else product.in_fronts()
        self.fronts = self._count_fronts(one=product is not None and in_fronts is None)
        figures = None
        if self.fronts > 1:
            from weir.fronts.server import FrontFigures  # most servers have one front: themselves

            figures = FrontFigures(settings.http, self.fronts)
        account = None if figures is None else figures.account
        context = _context(self.registry, settings, Control(settings.control), self.manager, account)
        self.site = site = Site(
            context, settings, notified, product=product, end=self.end, residency=residency, fronts=self._show_fronts
        )
        added = None if product is None else partial(product.grpc_calls, site.context)
        grpc: Any = make_grpc(site.kserve, settings.grpc, settings.http, added, None if figures is None else _of_fronts)
        handlers = () if product is None else product.fast_routes(site.context)
        self.server = self._make_server(figures, notified, grpc, in_fronts, handlers)
        self.registry.changed.append(self.server.routes_changed)
        self.frontends: list[Frontend] = [self.server, *([] if grpc is None else [grpc])]
        self.frontends += open_frontends(settings.frontends.frontends, site.context)
        self.frontends += () if product is None else product.frontends(site.context)
        self._signalled = asyncio.Event()
        self._own_process = False
        self._last_resort: threading.Timer | None = None

    def _count_fronts(self, *, one: bool) -> int:
        """Return how many fronts there shall be; with `one` the server can have only one."""
        wanted = self.settings.process.fronts
        cpus = cpu_count()
        if wanted == "auto":
            wanted = 1 if one else cpus - sum(each.worker_count for each in self.registry.all)
        count = max(1, int(wanted))
        if count > 1 and one:
            raise SettingsError(f"fronts={count}: this kind of server has one front; only fronts=1 works")
        if count > cpus:
            self._logger.warning("more fronts than CPUs: they compete for CPU time", fronts=count, cpus=cpus)
        return count

    def _make_server(
        self, figures: "FrontFigures | None", notified: "Notified", grpc: Any, product: "ProductInFronts | None",
        handlers: "Sequence[RouteHandler]",
    ) -> HttpServer:  # fmt: skip
        """Return the HTTP server, which has front processes if there are `figures` of them."""
        settings, site = self.settings, self.site
        given: dict[str, Any] = {"log": notified.log, "websockets": site.websockets, "route_handlers": handlers}
        if figures is None:
            return HttpServer(site.kserve, site.asgi, notified.observers, **given)
        from weir.fronts.front import FrontConfig
        from weir.fronts.server import FrontMetrics, FrontsPlan, FrontsServer

        level = logging.getLevelNamesMapping()[settings.telemetry.log_level.upper()]
        config = FrontConfig(
            settings.http,
            site.access,
            notified.log is not None,
            level,
            self.fronts,
            product=None if product is None else product.front,
        )
        plan = FrontsPlan(config, figures, grpc, None if product is None else product.dispatcher)
        server = FrontsServer(site.kserve, site.asgi, plan, notified.observers, **given)
        self._front_rows = lambda: [each._asdict() for each in server.fronts]
        if site.exposition is not None:
            site.exposition.registry.register(FrontMetrics(lambda: server.fronts))
        return server

    def _show_fronts(self) -> Sequence[Mapping[str, Any]]:
        return self._front_rows()

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        """While the block runs, have all models ready for `site.call`, with nothing listening. Raises what `run` raises for a model."""
        try:
            await self._start()
            yield
        finally:
            await self.manager.stop(0.0)
            if self._product is not None:
                await self._product.stop()

    async def run(self, ready: Callable[[], None] = lambda: None, *, signals: bool = True) -> None:
        """Serve until a signal of ENDING, then finish what was accepted. A second signal ends the process at once.

        `ready` is called when all models are ready. With `signals`, this must run in the main thread. The process then ends in any
        case END_LIMIT seconds after the longest `drain_timeout` if this has not returned, and as long after the end of the main
        thread. Without `signals`, only `end` ends the server.

        Raises SettingsError if the address cannot be used, and ModelError with the worker's traceback if a model cannot be
        loaded; nothing is left running then.
        """
        self._own_process = signals
        if isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            self._logger.info("serving on asyncio's event loop: with uvloop, where it is installed, it is faster")
        if signals:
            self._catch_signals()
        try:
            async with AsyncExitStack() as listening:
                await self._observe(listening)
                await self._serve(ready)
        finally:
            if self._last_resort is not None:  # what the program does now may take long
                self._last_resort.cancel()
                threading.Thread(target=_end_with_the_program, name="weir-end", daemon=True).start()
        self._logger.info("stopped")

    async def _observe(self, listening: AsyncExitStack) -> None:
        """Start what observes the server, until the end of `listening`."""
        listening.enter_context(pinned(self.settings.process.server_cpu_affinity))
        for listener in self._listeners:
            listener.__enter__()
            # Its end may wait for a receiver; a second signal is heard meanwhile.
            listening.push_async_callback(asyncio.to_thread, listener.__exit__, None, None, None)
        of_fronts = FILES_OF_A_FRONT * self.fronts if self.fronts > 1 else 0
        # A front has the connection and its end of the relay. gRPC has as many connections of its own.
        each = 2 if of_fronts and self.settings.http.tls_certfile is not None else 1
        each += self.settings.grpc.grpc_port is not None
        if warning := allow_descriptors(self.site.kserve.account, others=of_fronts, each=each):
            self._logger.warning(warning)
        if self.site.exposition is not None and self._exporters:
            from weir.telemetry.otlp import pushing  # its library is optional

            scheme = "http" if self.settings.http.tls_certfile is None else "https"
            name = self.settings.kserve.server_name
            await listening.enter_async_context(pushing(self.site.exposition, self._exporters, name, scheme))

    def end(self) -> None:
        """Begin the drain, as the first signal does. This must be called on the event loop of `run`."""
        if self._own_process and not self._signalled.is_set():
            self._last_resort = threading.Timer(self._longest_drain + END_LIMIT, _end_process)
            self._last_resort.daemon = True
            self._last_resort.start()
        self._signalled.set()

    @property
    def _longest_drain(self) -> float:
        return max((service.facts.settings.drain_timeout for service in self.registry.all), default=0.0)

    async def _serve(self, ready: Callable[[], None]) -> None:
        try:
            for frontend in self.frontends:
                await frontend.start()
                self._logger.info("listening", address=frontend.address)
            # Workers inherit it: models may call others of this server.
            os.environ[SERVER_ADDRESS] = self.server.address
            self.site.begin()
            if await self._load():
                self.site.start_jobs()
                ready()
                async with watching(self._watchers()):
                    await self._signalled.wait()
                await self._drain()
            else:
                self._refuse()
                await asyncio.gather(*[frontend.drain(WRITE_TIMEOUT) for frontend in self.frontends])
        finally:
            if os.environ.get(SERVER_ADDRESS) == self.server.address:
                del os.environ[SERVER_ADDRESS]
            await self.site.stop_jobs()
            await self.manager.stop(0.0)
            await asyncio.gather(*[frontend.stop() for frontend in self.frontends])
            if self._product is not None:
                await self._product.stop()

    def _watchers(self) -> list[Watcher | TargetWatcher]:
        found: list[Watcher | TargetWatcher] = []
        if self._watched is not None:
            found.append(Watcher(self._watched, self.manager))
        if self.settings.repository.reload:
            found.append(TargetWatcher({model.name: model.target for model in self.settings.models}, self.manager))
        return found

    async def _load(self) -> bool:
        """Load all models; return False if a signal came first."""
        loading = asyncio.ensure_future(self._start())
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait((loading, signalled), return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if not loading.done():
            await self.manager.stop(0.0)
            loading.cancel()  # stopping the manager does not end what a product begins
            with suppress(WeirError, asyncio.CancelledError):
                await loading
            return False
        loading.result()
        gc.collect()
        gc.freeze()  # the present objects stay: the collector need not visit them again
        models = list(self.registry.services)
        self._logger.info("ready", models=models)
        given = self.settings.repository
        if given.model_repository and not (models or given.on_demand or given.load):
            self._logger.warning(f"model_repository={given.model_repository!r}: has no model; each folder in it is one")
        return True

    async def _start(self) -> None:
        await self.manager.start()
        if self._product is not None:
            await self._product.start()

    async def _drain(self) -> None:
        """Finish what was accepted, within each model's own drain_timeout."""
        self._logger.info("draining", **self._unfinished())
        self._refuse()
        await self.site.stop_jobs()
        in_time = self._product is None or all(
            await asyncio.gather(self._product.drain(), self.server.drain_product(self._longest_drain))
        )
        await self.manager.drain(None if in_time else 0.0)
        unfinished = self._unfinished()
        if any(unfinished.values()):
            self._logger.warning("unfinished after drain_timeout", **unfinished)
        await self.manager.stop(0.0)  # fails what is unfinished
        if not all(await asyncio.gather(*[frontend.drain(WRITE_TIMEOUT) for frontend in self.frontends])):
            self._logger.warning("some clients did not read their responses in time")

    def _refuse(self) -> None:
        self.registry.ending = True
        for frontend in self.frontends:
            frontend.refuse()

    def _unfinished(self) -> dict[str, int]:
        states = self.registry.state().values()
        return {
            "waiting_rows": sum(state["waiting"] for state in states),
            "running_rows": sum(state["in_flight"] for state in states),
        }

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                loop.add_signal_handler(number, self._on_signal, number)
        for number in IGNORED:
            loop.add_signal_handler(number, partial(self._logger.info, "signal ignored", signal=number.name))

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._signalled.is_set():
            self.end()
        elif number != signal.SIGHUP:
            os._exit(128 + number)  # the workers end together with this process


def _of_fronts() -> Any:
    from weir.fronts.calls import DispatcherGrpc  # grpcio is optional

    return DispatcherGrpc


def _end_with_the_program() -> None:
    """Give what the server has left END_LIMIT seconds from the end of the main thread."""

    def wait() -> None:
        threading.main_thread().join()
        time.sleep(END_LIMIT)

    _end_process(wait)


def _end_process(wait: Callable[[], None] = lambda: None) -> None:
    """End the process when `wait` has returned, although something hangs, and log what hangs."""
    hangs = threading.Event()
    # The log's destination may hang as well. It begins before the wait: Python 3.12 starts no thread once the program has ended.
    threading.Thread(target=_log_what_hangs, args=(hangs,), daemon=True).start()
    wait()
    hangs.set()
    time.sleep(1.0)  # a log's outlet writes in a thread of its own
    os._exit(1)


def _log_what_hangs(hangs: threading.Event) -> None:
    hangs.wait()
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    processes = [int(pid) for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()]
    get_logger("weir").error("not everything ends: leaving it behind", threads=threads, processes=processes)


class Notified(NamedTuple):
    """Hears what happens: the observers of all models, with the metrics among them, and the log of HTTP."""

    observers: Sequence[Observer]
    metrics: Metrics | None
    log: HttpLog | None


def _notified(
    settings: TelemetrySettings, metrics: Metrics | None, more: Sequence[Observer], product: Product | None = None
) -> Notified:
    observers: list[Observer] = [LogObserver(get_logger("weir")), *more]
    log = None
    if metrics is not None:
        observers.insert(0, metrics)
    if settings.access_log:
        observers.append(AccessLog(get_logger("weir.access"), code_of))
        log = HttpLog(get_logger("weir.access"))
    observers += () if product is None else product.observers()
    return Notified(observers, metrics, log)


def _manager_of(
    settings: Settings,
    observers: Sequence[Observer],
    kinds: Mapping[str, Any],
    folder: FolderRepository | None,
    residency: Residency | None,
) -> Manager:
    """Return the manager of the models of `settings` and of `folder`, the model repository. None is started."""
    make = ServiceMaker(
        observers,
        kinds,
        allow_remote_workers=settings.control.allow_control,
        allow_tcp_workers=settings.control.control_token_file is None,
        on_demand=residency,
    )
    known = TargetRepository(settings.models, partial(read_config, read_settings=read_model_table))
    sources = all_sources(known, folder, InlineConfigs(read_model_table, settings.complete))
    load = to_start(settings.repository, residency)
    return opened_manager(sources, load, make, settings.control.allow_model_files, residency)


def _context(
    models: Registry, settings: Settings, control: Control, manager: Manager | None, account: Account | None = None
) -> KserveContext:
    """Return what the frontends of a server share."""
    access = Access(settings.access, control)
    return KserveContext(
        models, settings.http, control, settings=settings.kserve, manager=manager, access=access, account=account
    )


class Site:
    """The HTTP application of one server and what it is made of. App and `asgi` have it alike.

    Attributes:
        asgi: the application.
        access: who may call it.
        kserve: what its frontends of the Open Inference Protocol share.
        context: what other frontends are made from.
        exposition: the metrics, or None.
        websockets: its WebSockets.
        endpoints: its paths of inference.
    """

    def __init__(
        self, kserve: KserveContext, settings: Settings, notified: Notified, *, product: Product | None = None, end: Callable[[], None] = nothing,
        lifespan: Lifespan[Any] | None = None, residency: Residency | None = None, fronts: ListFronts = no_clients,
    ) -> None:  # fmt: skip
        registry, http, metrics = kserve.registry, settings.http, notified.metrics
        set_timeout_status(http.timeout_status)
        self.kserve, self.access = kserve, kserve.access
        manager = kserve.manager if kserve.has_manager else None
        self.context = FrontendContext(
            registry, settings, notified.observers, kserve.control, kserve, manager, end, self.access
        )
        own = NO_ENDPOINTS if product is None else product.added(self.context)
        collectors = () if product is None else product.collectors()
        self.exposition: Exposition | None = None
        if metrics is not None:
            triton, namespace = settings.telemetry.triton_metrics, settings.telemetry.metrics_namespace
            self.exposition = make_exposition(metrics, registry, triton_names=triton, namespace=namespace)
            residents = [] if residency is None else [NumbersCollector(partial(in_memory, residency.core))]
            for collector in (NumbersCollector(partial(held, kserve.account)), *residents, *collectors):
                self.exposition.registry.register(collector)
        self.websockets = WebSockets(registry, http, kserve.account)
        protocols = inference_protocols(kserve)
        self.endpoints = InferencePaths(protocols, own.endpoints)
        self._jobs = jobs = _batch_jobs(settings.jobs, http, self.call, kserve.account, self.endpoints)
        of_jobs = NO_ENDPOINTS if jobs is None else AddedEndpoints(jobs.endpoints(), jobs.begin)
        clients = no_clients if product is None else product.clients
        memory = (lambda: None) if residency is None else residency.memory
        shown = (lambda: None) if jobs is None else jobs.overview
        sections = Sections(collectors, clients, shown, fronts, memory)
        self._added = _joined(of_jobs, make_dashboard(registry, metrics, sections), own)
        self.asgi = make_app(
            kserve,
            metrics=None if self.exposition is None else self.exposition.render,
            lifespan=lifespan,
            websockets=self.websockets,
            added=self._added,
            log=notified.log,
            protocols=protocols,
        )

    def begin(self) -> None:
        """Begin to serve what is added to the models; this is called on the event loop."""
        self._added.begin()

    def start_jobs(self) -> None:
        """Begin to run batch jobs: the models are ready."""
        if self._jobs is not None:
            self._jobs.start()

    async def stop_jobs(self) -> None:
        """Stop running batch jobs; they go on at the next start. Idempotent."""
        if self._jobs is not None:
            await self._jobs.stop()

    async def call(self, path: str, body: bytes) -> Reply:
        """Return the response of the application to a POST of JSON to `path`, as bulk work."""
        return await call(self.asgi, path, body, self.access.own_key)


def _batch_jobs(
    settings: JobSettings, http: HttpSettings, ask: Ask, account: Account, endpoints: InferencePaths
) -> JobRoutes | None:
    """Return the routes of batch jobs, whose requests go to `ask`; None without a directory for them. Raises SettingsError."""
    if settings.batch_dir is None:
        return None
    context = JobContext(settings, ask, http.max_body_size, account, get_logger("weir").log)
    return JobRoutes(context, http, endpoints)


def _joined(*parts: AddedEndpoints) -> AddedEndpoints:
    """Return what all `parts` add. The endpoints of batch jobs come first: a product may answer every other path below /v1."""

    def begin() -> None:
        for part in parts:
            part.begin()

    return AddedEndpoints([each for part in parts for each in part.endpoints], begin)


def folder_of(settings: Settings) -> FolderRepository | None:
    """Return the repository of the setting `model_repository`, if there is one. Raises SettingsError."""
    where = settings.repository.model_repository
    if where is None:
        if settings.repository.watch:
            raise SettingsError("watch: there is nothing to watch without --model-repository")
        return None
    if settings.repository.watch:
        load_library()
    return FolderRepository(where, read_model_table, settings.complete, settings.repository.trust)


def run(app: App, ready: Callable[[], None] = lambda: None) -> None:
    """Run `app` on an event loop of its own until a signal ends it. Raises what App.run raises."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(app.run(ready))


Target = str | type[Model] | type[Service] | Service | ModelToServe

# The environment variable of prometheus_client: the folder in which several processes share their metrics.
SHARED = "PROMETHEUS_MULTIPROC_DIR"
SHARE_INTERVAL = 1.0  # seconds; the shown counts of another process may be so old

# Settings that the hosting server has, not the application.
OF_THE_HOST = ("host", "port", "uds", "uds_mode", "idle_timeout", "header_timeout", "tls_certfile", "tls_keyfile")
_PARTS: Mapping[str, type[Any]] = {
    "http": HttpSettings,
    "control": ControlSettings,
    "access": AccessSettings,
    "kserve": KserveSettings,
    "jobs": JobSettings,
}
_OF_ASGI = {
    name: (kind, {declared.name for declared in fields(kind)}.difference(OF_THE_HOST)) for name, kind in _PARTS.items()
}
# The settings of `asgi` besides those of its models.
OF_ASGI = {each for _, names in _OF_ASGI.values() for each in names}


class ServerThread:
    """A server in a thread of this program, once: from its start to its end, or in a `with` block."""

    def __init__(self, app: App, name: str) -> None:
        self._app = app
        self._error: BaseException | None = None
        self._runner: asyncio.Runner | None = None
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready_or_ended = threading.Event()
        self.is_ready = threading.Event()

    @property
    def addresses(self) -> list[str]:
        """The address of each frontend, that of HTTP first."""
        return [frontend.address for frontend in self._app.frontends]

    def begin(self) -> bool:
        """Start the server, without waiting for the models. Return False if it was started before."""
        if self._runner is not None:
            return False
        self._runner = asyncio.Runner(loop_factory=new_loop)
        self._loop = self._runner.get_loop()
        self._thread.start()
        return True

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until all models are loaded. Raises the error with which the start failed, and TimeoutError after `timeout` seconds."""
        if not self._ready_or_ended.wait(timeout):
            raise TimeoutError(f"the models are not loaded after {timeout:g} s")
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Finish all accepted requests, and end the server. Idempotent."""
        if self._runner is None:
            return
        with suppress(RuntimeError):  # the event loop is closed, so the server has ended already
            self._loop.call_soon_threadsafe(self._app.end)
        self._thread.join()

    def loaded(self) -> Self:
        """Return the server when all models are loaded; end it if that fails or is interrupted. Raises what `wait_until_ready` raises."""
        try:
            self.wait_until_ready()
        except BaseException:
            self.end()
            raise
        return self

    def _run(self) -> None:
        assert self._runner is not None, "begin makes it first: this is a bug"
        try:
            with self._runner:
                self._runner.run(self._app.run(self._ready, signals=False))
        except BaseException as error:
            self._error = error
        finally:
            self._ready_or_ended.set()

    def _ready(self) -> None:
        self.is_ready.set()
        self._ready_or_ended.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def asgi(
    *models: Target,
    routes: Mapping[str, str | Sequence[str]] | None = None,
    metrics: bool = True,
    metrics_namespace: str = NAMESPACE,
    access_log: bool = False,
    observers: Sequence[Observer] = (),
    **settings: "Unpack[AsgiKeywords]",
) -> ASGIApp:
    """Return an ASGI application that serves `models`, for any ASGI server: uvicorn, gunicorn, hypercorn.

        app = weir.asgi(Square, max_batch_size=64)  # run it with: uvicorn module:app

    Its lifespan starts the models and, at the end, drains and stops them, so the hosting server must support lifespan events. Each
    process of that server has its own models and workers.

    Arguments:
        models: classes, texts like "module:Class", Services, or models with settings of their own.
        routes: maps a model's name to its own path or paths.
        metrics: whether metrics are collected and served at /metrics. A Service that was passed is included only if its own
            observers count. With the variable PROMETHEUS_MULTIPROC_DIR, the metrics are those of all processes that share it.
        metrics_namespace: the prefix of the metrics' names.
        access_log: whether to log each HTTP request, and each request for a model, to the logger `weir.access`.
        observers: are notified of what happens.
        settings: those of HTTP except the hosting server's own (address, TLS, idle connections), of access, of control, of batch
            jobs, of the Open Inference Protocol, and of Service; the latter hold for all models that are not Services already.

    Callers may change models and policies only with `allow_control=True` or the token of `control_token_file`, as only the hosting
    server knows where a caller is. Raises SettingsError for an unusable model, setting or route; nothing has been started then.
    """
    given: dict[str, Any] = dict(settings)
    own = {
        name: kind(**{each: given.pop(each) for each in sorted(names & given.keys())})
        for name, (kind, names) in _OF_ASGI.items()
    }
    telemetry = TelemetrySettings(metrics=metrics, metrics_namespace=metrics_namespace, access_log=access_log)
    composed = Settings(
        models=[],
        grpc=GrpcSettings(),
        frontends=FrontendsSettings(),
        repository=RepositorySettings(),
        telemetry=telemetry,
        process=ProcessSettings(),
        **own,
    )
    notified = _notified(telemetry, Metrics() if metrics else None, observers)
    group_of = group_finder()
    registry = Registry([_service(model, notified.observers, given, group_of) for model in models], routes)

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with sharing_counts(site.exposition), running(registry):
            site.begin()
            site.start_jobs()
            try:
                yield
            finally:
                await site.stop_jobs()

    context = _context(registry, composed, Control(composed.control, trusts_local=False), manager=None)
    site = Site(context, composed, notified, lifespan=lifespan)
    return site.asgi


def lifespan(*parts: Any) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Return a lifespan for FastAPI or Starlette, which runs `parts` while the application runs.

        app = FastAPI(lifespan=weir.lifespan(service))
        app = Starlette(routes=[Mount("/models", models)], lifespan=weir.lifespan(models))

    A part is a Service, or what `weir.asgi` returned and you mount: a mounted application's own lifespan does not run. They
    start in order and stop in the reverse one. In a lifespan of your own, write `async with weir.lifespan(service)(app)`.
    """
    for part in parts:
        if not isinstance(part, (Service, Starlette)):
            raise SettingsError(f"lifespan({brief(part)}): must be a weir.Service, or what weir.asgi returned")

    @asynccontextmanager
    async def run(_: object) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for part in parts:
                own = part if isinstance(part, Service) else part.router.lifespan_context(part)
                await stack.enter_async_context(own)
            yield

    return run


@asynccontextmanager
async def sharing_counts(exposition: Exposition | None) -> AsyncIterator[None]:
    """While the block runs, let `exposition` show the counts of all processes of the hosting server, if the variable SHARED is
    set."""
    folder = os.environ.get(SHARED)
    if exposition is None or not folder:
        yield
        return
    shared = exposition.share(folder)

    async def write() -> None:
        while True:
            shared.write()
            await asyncio.sleep(SHARE_INTERVAL)

    writing = asyncio.create_task(write())
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.wait([writing])
        shared.close()
        if not writing.cancelled():
            writing.result()  # it has ended early: raise its error


def _service(model: Target, observers: Sequence[Observer], settings: dict[str, Any], group_of: FindGroup) -> Service:
    if isinstance(model, Service):
        return model
    if isinstance(model, ModelToServe):
        return make_service(model, observers, group_of=group_of)
    found = load_target(model) if isinstance(model, str) else model
    return new_service(found, group_of=group_of, observers=observers, **settings)
