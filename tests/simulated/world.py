"""One simulated server with its clients, from a seed: what is promised of it is checked at every event and when all is at rest."""

import asyncio
import hashlib
import inspect
import logging
import math
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.simulated.asking import Ask, fault_of, number_of
from tests.simulated.channels import make_client, widen
from tests.simulated.clients import PAUSES
from tests.simulated.fronts import OrderedSharedAccount, SimulatedFronts, SimulatedFrontsServer, config_of
from tests.simulated.grpc_core import SimulatedCore, SimulatedCygrpc, simulated_core
from tests.simulated.loop import SimulatedLoop, SimulatedThreads, Stuck
from tests.simulated.models import ASKED, Items, Streams, Tensors
from tests.simulated.probing import FOLLOWS, INTERVALS, Prober, counted_requests, wrong_counts
from tests.simulated.relaying import simulated_channels
from tests.simulated.texts import SimulatedTexts, Vectors
from tests.simulated.themes import OF_FRONTS, PLAIN, Theme, draw_theme
from tests.simulated.transport import Ordered, Peer, SimulatedTransport
from tests.simulated.workers import SimulatedExecutor, WorkerPlan

from weir.catalog.registry import Registry
from weir.errors import DeadlineExceeded, Draining, WeirError
from weir.frontends.grpc import GrpcSettings
from weir.frontends.grpc.server import GrpcServer
from weir.frontends.http.application import NOTHING, make_app, make_exposition
from weir.frontends.http.server import HttpServer, Listening
from weir.frontends.websocket import WebSockets
from weir.fronts.calls import DispatcherGrpc
from weir.fronts.server import FrontFigures
from weir.messages import Dispatch, Observer, Request
from weir.model import Model
from weir.protocols import offloading
from weir.protocols.account import Account
from weir.protocols.kserve import KserveContext
from weir.protocols.settings import HttpSettings
from weir.serving.service import Service
from weir.telemetry.recorder import Metrics

BOUND = 0.03  # seconds after its deadline in which a request has its end: a timer's tick, and the threads that read and write long bodies
DRAIN = 60.0
ROUNDING = 1e-9  # seconds: sums of instants differ in the last digit
LONGEST = 20.0  # seconds of CPU time that a plan may take: no more than 5 are needed
LATENCIES = (0.0, 0.0, 0.0002, 0.01)  # seconds
_ROUND, _ROUNDS = 0.01, 100  # seconds, and how often, until a model has requests that wait
SILENCE = 1000.0  # seconds after which some client has asked for something, but for pauses
MODELS: dict[str, type[Model]] = {"items": Items, "tensors": Tensors}
OF_CHANNELS: dict[str, type[Model]] = {"streams": Streams, "texts": Vectors}  # which only some plans have


@dataclass(frozen=True)
class Fault:
    """Something that happens to the server at an instant: kill, reload, add or remove, of a model."""

    at: float
    kind: str
    model: str


@dataclass
class Plan:
    """What a seed stands for. Only `clients` and `faults` are left out of it to find a smaller plan that fails, too."""

    seed: int
    theme: Theme
    http: dict[str, Any]
    services: dict[str, dict[str, Any]]
    workers: dict[str, WorkerPlan]
    clients: list[int]
    faults: list[Fault]
    turns: int
    pace: float
    quiet: float  # seconds of a pause, on average: 0 for a plan that has none
    wrong: float
    timeout: float
    drains_at: float | None
    coarse: bool
    probes: float  # seconds between two probes of readiness
    knows_words: bool = False  # whether texts are tokenized at once
    stream_requests: int = 0  # of one stream over gRPC that may be under way; 0: there is no gRPC
    fronts: int = 0  # how many processes have the connections; 0 for the server's own
    kept_faults: list[int] = field(default_factory=list)


def draw_plan(seed: int, *, turns: int | None = None) -> Plan:
    """Return the plan of `seed`."""
    theme = draw_theme(seed)
    draw = random.Random(f"{seed} plan")
    workers, services = {}, {}
    timeout = draw.choice((30.0, 30.0, 3.0, 0.5))
    for name in MODELS:
        base = draw.choice((0.001, 0.005, 0.05, 0.5))
        workers[name] = WorkerPlan(
            workers=draw.choice((1, 1, 2, 4)), places=draw.choice((1, 2, 2)), base=base, per_row=base / 10, spread=draw.choice((0.0, 0.5)),
            start=draw.choice((0.0, 0.3, 3.0)), hang_limit=draw.choice((1.0, 5.0)), failing_starts=draw.choice((0.0, 0.0, 0.5)),
        )  # fmt: skip
        services[name] = {
            "max_batch_size": draw.choice((1, 4, 16, 64)), "max_queue_size": draw.choice((8, 64, 1024)), "timeout": timeout,
            "policy": draw.choice(("greedy", "greedy", "full", "size-or-delay:delay=20ms", "control-limit:1")),
            "small_request_size": draw.choice((0, 16)), "drain_timeout": DRAIN,
        }  # fmt: skip
    _draw_workers(random.Random(f"{seed} workers"), workers, services)
    if (loading := random.Random(f"{seed} loading")).random() < 0.2:  # models that hardly ever load again
        name = loading.choice(list(MODELS))
        workers[name] = replace(workers[name], failing_starts=0.9)
    http: dict[str, Any] = {"explain": draw.random() < 0.2, "idle_timeout": draw.choice((5.0, 75.0))}
    if draw.random() < 0.2:
        http["max_waiting_bytes"] = draw.choice((20_000, 100_000, 400_000, 2_000_000))
    if draw.random() < 0.1:
        http["max_connections"] = 6
    pace = draw.choice((0.005, 0.05, 1.0))
    turns = turns or theme.turns
    quiet = draw.choice((*(0.0,) * 14, 300.0, 3000.0))
    if quiet:  # it is long, not busy
        turns = max(turns, 200 // sum(theme.clients.values()))
    length = turns * (pace + 0.05 + PAUSES * quiet)
    faults = drawn_faults(random.Random(f"{seed} faults"), theme.faults, list(MODELS), (0, 2, 6), length)
    plan = Plan(
        seed, theme, http, services, workers, list(range(theme.clients.get(PLAIN, 0))), faults, turns, pace, quiet,
        draw.choice((0.0, 0.05, 0.3, 0.5)), timeout, _drains_at(draw, faults, length) if draw.random() < 0.3 else None, draw.random() < 0.5,
        draw.choice(INTERVALS),
    )  # fmt: skip
    widen(plan, length)
    plan.kept_faults = list(range(len(plan.faults)))
    return plan


def _draw_workers(draw: random.Random, workers: dict[str, WorkerPlan], services: dict[str, dict[str, Any]]) -> None:
    """Add to the workers of each model how far they are, and with what their batches coincide; and how long its drains may take."""
    for name, plan in workers.items():
        workers[name] = replace(plan, latency=draw.choice(LATENCIES), aimed=draw.choice((0.0, 0.4)))
        services[name]["drain_timeout"] = draw.choice((DRAIN, DRAIN, DRAIN, DRAIN, 1.0, 0.05))


def drawn_faults(
    draw: random.Random, kinds: Sequence[str], models: Sequence[str], incidents: Sequence[int], length: float
) -> list[Fault]:
    """Return faults of `kinds`. They come as incidents, of one model and soon one after another: what has begun is to be met by the next."""
    faults = []
    for _ in range(draw.choice(incidents)):
        at, model = draw.uniform(0.0, length), draw.choice(models)
        for _ in range(draw.choice((1, 1, 2, 4))):
            faults.append(Fault(at, draw.choice(kinds), model))
            at += draw.expovariate(1.0 / draw.choice((0.01, 0.3)))
    return sorted(faults, key=lambda each: each.at)


def _drains_at(draw: random.Random, faults: list[Fault], length: float) -> float:
    """Return when a server drains: at any time, or just after something has befallen it."""
    if faults and draw.random() < 0.5:
        return max(0.1, draw.choice(faults).at + draw.expovariate(1.0 / 0.1))
    return draw.uniform(0.1, length)


class CountedService(Service):
    """A service that notes which requests it has accepted."""

    watch: "Watch"

    def submit(self, request: Request, now: float | None = None) -> None:
        """See Service."""
        self.watch.submitting(request)
        try:
            super().submit(request, now)
            self.watch.taken(self, request)
        except BaseException:
            self.watch.not_taken(request)
            raise

    def submit_all(self, requests: Sequence[Request], now: float) -> list[tuple[Request, WeirError]]:
        """See Service."""
        for request in requests:
            self.watch.submitting(request)
        refused = super().submit_all(requests, now)
        for request, _ in refused:
            self.watch.not_taken(request)
        return refused


class Watch(Observer):
    """Sees every accepted request end exactly once, and every batch begin in time."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.open: dict[int, Request] = {}
        self.accepted = 0
        self.ended: Counter[str] = Counter()
        self._gone: dict[int, float] = {}  # when the callers left, by the number of the request

    def gone(self, asks: Iterable[Ask]) -> None:
        """The connection of these has gone before they had their ends."""
        self._gone.update((ask.n, self._world.loop.now) for ask in asks)

    def submitting(self, request: Request) -> None:
        """A request comes to the queue."""
        if id(request) in self.open:
            self._world.broken("a request was submitted twice")
        self.open[id(request)] = request
        self.accepted += 1

    def taken(self, service: Service, request: Request) -> None:
        """The queue has taken it; bulk work has one of its own. Only a request that is larger than the queue may exceed it, alone."""
        batcher, most = service.generation.driver.batcher, service.facts.batching.max_queue_size
        for waiting in (batcher.waiting_rows - batcher.waiting_bulk, batcher.waiting_bulk):
            if waiting > max(most, request.rows):
                self._world.broken(f"{waiting} rows wait, and at most {most} may")

    def not_taken(self, request: Request) -> None:
        """The queue has refused it."""
        if self.open.pop(id(request), None) is None:
            self._world.broken("a request was refused after it had ended")
        self.accepted -= 1

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        for request in requests:
            if self.open.pop(id(request), None) is None:
                self._world.broken(f"a request ended twice, or was never accepted: {error!r}")
            if now > request.deadline + BOUND:
                self._world.broken(f"a request ended {now - request.deadline:.3f} s after its deadline ({error!r})")
            if error is None and now > request.deadline + ROUNDING:
                self._world.broken(f"a request was answered {now - request.deadline:.3g} s after its deadline")
        if isinstance(error, DeadlineExceeded):
            self._check_expired(model, requests)
        self.ended["" if error is None else type(error).__name__] += len(requests)
        if isinstance(error, Draining) and not error.message.startswith(ASKED):
            self._world.check_cut_off(model.partition(":")[0])

    def _check_expired(self, model: str, requests: Sequence[Request]) -> None:
        """A greedy policy lets no request expire before a worker that has nothing to do, of any generation. How long streams take nobody knows."""
        plan, name = self._world.plan, model.partition(":")[0]
        if plan.services[name]["policy"] != "greedy" or name not in MODELS:
            return
        idle = self._world.idle_since(name)
        for request in requests:
            if not request.taken and idle < request.arrival and request.timeout > plan.workers[name].longest:
                self._world.broken(f"a request expired before an idle worker, after {request.timeout:g} s")

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        if len({request.key for request in dispatch.requests}) > 1:
            self._world.broken("requests of different keys are in one batch")
        for request in dispatch.requests:
            if request.deadline < dispatch.at - ROUNDING:
                self._world.broken(f"a request began {dispatch.at - request.deadline:.3g} s after its deadline")
            since = self._gone.get(number_of(request.payload), math.inf) if self._gone else math.inf
            if dispatch.at > since + BOUND and request.arrival < since + 1.0:  # a damaged request may have any number
                self._world.broken(f"a request began {dispatch.at - since:.3g} s after its caller had left")

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        pass

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        if any(id(request) not in self.open for request in requests):
            self._world.broken("a request got a part after its end")

    def computed(self, model: str, dispatch: Dispatch, timing: Any, now: float) -> None:
        pass

    def failed(self, model: str, errors: Sequence[Any], now: float) -> None:
        pass

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        pass

    def transferred(self, model: str, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        pass


class OrderedAccount(Account):
    """An account whose connections are swept in their order."""

    def connection_set(self) -> Any:
        """See Account."""
        return Ordered()


class _Nowhere:
    """Listens at no socket."""

    sockets: Sequence[Any] = ()

    def __init__(self) -> None:
        self.open = True

    def close(self) -> None:
        self.open = False


class SimulatedServer(HttpServer):
    """The real server, but for its sockets."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.listening = _Nowhere()

    async def _listen(self, tls: Any) -> Listening:
        return self.listening

    def accept(self, loop: SimulatedLoop, peer: Peer, window: int | None) -> SimulatedTransport | None:
        """Connect a client; return None if nothing listens."""
        return SimulatedTransport(loop, peer, self._connect, window=window) if self.listening.open else None


class World:
    """Runs one plan. It is the Site of its clients."""

    def __init__(self, plan: Plan, loop: SimulatedLoop, cygrpc: SimulatedCygrpc) -> None:
        self.plan = plan
        self.cygrpc = cygrpc
        self.loop = loop
        self._ending: dict[str, list[float]] = {name: [] for name in plan.services}  # when drains and reloads began
        self.responses: Counter[str] = Counter()
        self.judged = 0
        self._draw = random.Random(f"{plan.seed} world")
        self._executors: list[SimulatedExecutor] = []
        self.faults: list[str] = []
        self.over = False
        self._reloading: set[asyncio.Task[None]] = set()
        self._draining = False
        self._drain_began = math.inf
        self._vectors = 0  # how many responses with vectors clients have got
        self._changed_at = 0.0  # when what readiness depends on changed last

    def broken(self, what: str) -> None:
        """Note a broken promise. Nothing is raised: that would be taken for an error of the server's own."""
        if self.over:
            return
        self.faults.append(f"at {self.loop.now:.6f} s: {what}")
        self.loop.stop()

    def readiness_changed(self) -> None:
        """What readiness depends on has changed: it may follow a little later."""
        self._changed_at = self.loop.now

    @property
    def ready(self) -> bool | None:
        """See Site."""
        if self._reloading or self.loop.now < self._changed_at + FOLLOWS:
            return None
        executors: list[Any] = [service.executor for service in self.services.values()]
        return not self._draining and not any(executor.unavailable for executor in executors)

    def idle_since(self, model: str) -> float:
        """Return the instant since which each generation of a model has a worker with nothing to do; infinity if one has none."""
        kind = MODELS[model]
        return max(each.idle_since for each in self._executors if each.model is kind and not each.stopped)

    @property
    def crashed(self) -> bool:
        """See Place."""
        return any(each.deaths for each in self._executors)

    def connect(self, peer: Peer, window: int | None) -> SimulatedTransport | None:
        """See Site."""
        return self.server.accept(self.loop, peer, window)

    def listening(self, peer: str) -> Any:
        """See Place."""
        servers = self.cygrpc.listening()
        found = [each for each in servers if peer in each.connections] or servers
        return self._draw.choice(found) if len(found) > 1 else next(iter(found), None)

    def hang_up(self, peer: str) -> None:
        """See Place."""
        for server in self.cygrpc.servers:
            server.disconnect(peer)

    def gone(self, asks: Iterable[Ask]) -> None:
        """See Site."""
        if not (
            self.plan.fronts and self.fronts.stood_still(self.loop.now)
        ):  # a front that is stopped does not know it
            self.watch.gone(asks)

    def stood_still(self, since: float) -> bool:
        """See Site."""
        return bool(self.plan.fronts) and self.fronts.stood_still(since)

    def judge(self, ask: Ask, status: int, headers: dict[str, str], body: bytes, *, on_time: bool) -> None:
        """See Site."""
        self.judged += 1
        self._vectors += status == 200 and ask.judged_by is not None
        self.responses[str(status)] += 1
        fault = fault_of(ask, status, headers, body, also=self._excuses(ask, body))
        late = self.loop.now - ask.since - ask.timeout
        if not fault and on_time and late > BOUND and not self.stood_still(ask.since):
            fault = f"it ended {late:.3f} s after its deadline"
        if fault:
            self.broken(f"n={ask.n}: {fault}")

    def _excuses(self, ask: Ask, body: bytes) -> frozenset[str]:
        """Return the errors that a request may have for what it and the server are."""
        name = "tensors" if ask.kserve else "items" if ask.judged_by is None else "texts"
        large = ask.rows > self.plan.services[name]["max_queue_size"]
        large |= "max_waiting_bytes" in self.plan.http
        wrong = {"ModelError"} if self.plan.wrong and not ask.kserve and b"must be one for each" in body else {}
        return (
            frozenset(wrong)
            | frozenset({"ModelCrashed"} if self.crashed else ())
            | frozenset({"TooLarge"} if large else ())
        )

    async def run(self) -> None:
        """Run the plan, and check what is left of it."""
        plan = self.plan
        self.watch = Watch(self)
        self.metrics = Metrics()
        self.services = {name: self._service(name) for name in plan.services}
        registry = self.registry = Registry(list(self.services.values()))
        settings = HttpSettings(port=0, **plan.http)
        self.server = self._server(registry, settings)
        self.frontends: list[Any] = [self.server, *self._grpc]
        await registry.start()
        for frontend in self.frontends:
            await frontend.start()
        self.clients = self.make_clients()
        self.prober = Prober(self, interval=plan.probes, scrapes=60)
        self.prober.begin()
        for client in self.clients:
            client.begin()
        for fault in plan.faults:
            self.loop.call_at(fault.at, self._happen, fault)
        if plan.drains_at is not None:
            await asyncio.sleep(plan.drains_at)
        else:
            await self._finished()
            self._check_fronts()
        await self._drain(registry)
        await self._finished()
        self.prober.stop()
        await asyncio.sleep(1.0)
        self._check_rest()

    def make_clients(self) -> list[Any]:
        """Return the clients, before they begin."""
        return [make_client(self, index) for index in self.plan.clients]

    def _server(self, registry: Registry, settings: HttpSettings) -> "SimulatedServer | SimulatedFrontsServer":
        clock = self.loop.time
        figures = FrontFigures(settings, self.plan.fronts) if self.plan.fronts else None
        account = OrderedAccount(settings) if figures is None else OrderedSharedAccount(settings, figures.figures, 0)
        context = KserveContext(registry, settings, account=account)
        self.websockets = websockets = WebSockets(registry, settings, context.account)
        render = partial(counted_requests, make_exposition(self.metrics, registry))
        self._grpc: list[Any] = []
        if self.plan.stream_requests:
            grpc = GrpcSettings(grpc_port=0, grpc_stream_requests=self.plan.stream_requests)
            kind = GrpcServer if figures is None else DispatcherGrpc
            self._grpc.append(kind(context, grpc, settings, SimulatedCore))
        texts = self.services.get("texts")
        self.texts: SimulatedTexts | None = None
        if texts is not None:
            words = self.plan.knows_words
            self.texts = SimulatedTexts(texts, settings, knows_words=words, cut_off=self._texts_cut_off)
        added = self.texts.added if self.texts else NOTHING
        app = make_app(registry, settings, metrics=render, context=context, websockets=websockets, added=added)
        handlers = self.texts.routes if self.texts else ()
        if figures is None:
            return SimulatedServer(
                registry, app, settings, context=context, websockets=websockets, clock=clock, time_of_day=clock,
                route_handlers=handlers,
            )  # fmt: skip
        server = SimulatedFrontsServer(
            registry, app, settings, [self.watch, self.metrics], config=config_of(settings, context.access, self.plan.fronts, self.texts and self.texts.in_fronts()),
            figures=figures, context=context, websockets=websockets, clock=clock, time_of_day=clock, route_handlers=handlers,
            grpc=self._grpc[0] if self._grpc else None, product=self.texts,
        )  # fmt: skip
        server.simulate(self.loop, random.Random(f"{self.plan.seed} machines"), self.broken)
        return server

    @property
    def fronts(self) -> SimulatedFronts:
        """The fronts of a plan that has some."""
        assert isinstance(self.server, SimulatedFrontsServer)
        return self.server.listening

    async def _finished(self) -> None:
        asked, since = -1, 0.0
        while waiting := [client for client in self.clients if not client.done]:
            await asyncio.sleep(
                1.0 + self.plan.quiet / 100.0
            )  # a round now and then costs less than an event of each client
            if (now_asked := sum(client.asked for client in self.clients)) != asked:
                asked, since = now_asked, self.loop.now
            elif self.loop.now > since + SILENCE + 30.0 * self.plan.quiet:
                self.broken(f"{len(waiting)} clients wait without end")
        await asyncio.sleep(5.0 if self.plan.drains_at is None else 0.0)

    def _service(self, name: str) -> CountedService:
        plan = self.plan
        executor = SimulatedExecutor(
            (MODELS | OF_CHANNELS)[name], plan.workers[name], self.loop, random.Random(f"{plan.seed} {name} {len(self._executors)}"),
            largest=plan.services[name]["max_batch_size"], changed=self.readiness_changed, broken=self.broken,
        )  # fmt: skip
        self._executors.append(executor)
        service = CountedService(
            (MODELS | OF_CHANNELS)[name],
            name=name,
            executor=executor,
            observers=[self.watch, self.metrics],
            clock=self.loop.time,
            **plan.services[name],
        )
        service.watch = self.watch
        return service

    # What happens to the server.

    def _happen(self, fault: Fault) -> None:
        if self.server.listening.open:
            task = asyncio.ensure_future(getattr(self, f"_{fault.kind}")(fault.model))
            self._reloading.add(task)
            task.add_done_callback(self._happened)

    def _happened(self, task: "asyncio.Task[None]") -> None:
        self._reloading.discard(task)
        self.readiness_changed()
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, WeirError):
            self.broken(f"an operation raised {error!r}")

    async def _loaded(self, name: str) -> None:
        """Wait a while for requests that wait: what befalls a model that has nothing to do shows little."""
        for _ in range(_ROUNDS):
            if self.services[name].generation.driver.batcher.waiting_rows:
                return
            await asyncio.sleep(_ROUND)

    async def _kill(self, name: str) -> None:
        await self._loaded(name)
        executor: Any = self.services[name].executor
        executor.kill(self._draw.choice(range(self.plan.workers[name].workers)))

    async def _add(self, name: str) -> None:
        await self.services[name].add_worker()

    async def _remove(self, name: str) -> None:
        await self.services[name].remove_worker()
        self._check_workers()

    def _check_workers(self) -> None:
        """What the server takes for running must be with workers."""
        for name, service in self.services.items():
            driver = service.generation.driver
            executor: Any = driver.executor
            for batch in driver.batcher.running.values():
                if not executor.has(batch.worker, batch.batch_id):
                    self.broken(f"{name}: batch {batch.batch_id} runs, and worker {batch.worker} does not have it")

    async def _front_kill(self, _: str) -> None:
        await self.fronts.kill()

    async def _front_stop(self, _: str) -> None:
        await self.fronts.hold()

    async def _reload(self, name: str) -> None:
        other = self._service(name)
        await other.start()
        await self._loaded(name)
        if self._draining or not self.server.listening.open:  # the manager makes no changes then
            await other.stop(0.0)
            return
        began = self.loop.now
        self._ending[name].append(began)
        replaced = self.services[name].replace_with(other)
        self.registry.put([self.services[name]])
        await replaced.stop()
        self._ending[name].remove(began)

    async def _drain(self, registry: Registry) -> None:
        self._drain_began = self.loop.now
        for each in self._ending.values():
            each.append(self.loop.now)
        self._draining = True
        self.readiness_changed()
        registry.ending = True
        for frontend in self.frontends:
            frontend.refuse()
        if self.texts:
            await asyncio.gather(self.texts.encoder.drain(), self.server.drain_product(self._longest_drain))
        await registry.drain()
        self._check_workers()
        await registry.stop(0.0)
        await asyncio.gather(*[frontend.drain(5.0) for frontend in self.frontends])
        for frontend in self.frontends:
            await frontend.stop()
        if self.texts:
            self.texts.encoder.close()
        if self._reloading:
            await asyncio.wait(self._reloading)

    def check_cut_off(self, name: str) -> None:
        """A request that was accepted has failed with Draining: right only if a drain or a reload of its model has given it all its time."""
        limit = self.plan.services[name]["drain_timeout"]
        given = self.loop.now - min(self._ending[name], default=math.inf)
        if given < limit - ROUNDING:
            self.broken(f"{name}: a request was cut off after {given:.3f} s, and must get {limit:g} s")

    @property
    def _longest_drain(self) -> float:
        return max(float(each["drain_timeout"]) for each in self.plan.services.values())

    def _texts_cut_off(self, began: float) -> None:
        """A request for vectors that began at this instant fails because the server drains: right if it did not know that yet."""
        now, since = self.loop.now, self._drain_began
        if (
            began < since - BOUND
            and now < since + self.plan.services["texts"]["drain_timeout"]
            and not self.stood_still(began)
        ):
            self.broken(f"a drain cut off texts after {now - since:.3f} s")

    # At rest.

    def _check_fronts(self) -> None:
        """Check that fronts that run have nothing left of clients that have gone."""
        server = self.server
        if isinstance(server, SimulatedFrontsServer) and (
            left := {what: count for what, count in server.left().items() if count}
        ):
            self.broken(f"the clients have gone, and there are left: {left}")

    def _check_rest(self) -> None:
        account = self.server.account
        left = {
            "bytes in the account": account.held_bytes,
            "connections": account.connections,
            "requests without an end": len(self.watch.open),
            "WebSockets": self.websockets.open,
            "bodies that arrive": len(self.server._shared.receiving),
            "servers of gRPC": len(self.cygrpc.servers),
        }
        if isinstance(self.server, SimulatedFrontsServer):
            left |= self.server.left() | {"processes of fronts": self.fronts.alive}
        if self.texts:
            left |= self.texts.left()
        for name, service in self.services.items():
            batcher = service.generation.driver.batcher
            left |= {
                f"{name}: waiting rows": batcher.waiting_rows,
                f"{name}: waiting outside": service.generation.driver.waiting_outside,
                f"{name}: former generations": len(service._former),
            }
        wrong = {what: count for what, count in left.items() if count}
        if wrong:
            self.broken(f"at rest there are left: {wrong}")
        if self.watch.accepted != sum(self.watch.ended.values()):
            self.broken(f"{self.watch.accepted} requests were accepted, and {dict(self.watch.ended)} ended")
        elif self.texts and self.texts.answered < self._vectors and not self._lost_counts:
            self.broken(f"clients got {self._vectors} answers with vectors, and {self.texts.answered} are counted")
        elif wrong_count := wrong_counts(self.metrics, self.watch.accepted, self.watch.ended):
            self.broken(wrong_count)

    @property
    def _lost_counts(self) -> bool:
        """Whether a front may have ended with counts that it had not reported."""
        return any(fault.kind in OF_FRONTS for fault in self.plan.faults)

    @property
    def trace(self) -> str:
        """The hash of all that all clients have received, and of when."""
        return hashlib.blake2b("".join(client.trace for client in self.clients).encode(), digest_size=8).hexdigest()


_LOG = logging.getLogger("weir")
_UVICORN = [logging.getLogger("uvicorn.error")]


def _hear(*, uvicorn: bool) -> None:
    """Whether to log what uvicorn does: what clients send is no news."""
    for log in _UVICORN:
        log.disabled = not uvicorn


class _Errors(logging.Handler):
    """What Weir logs as an error is one: nothing here gives it a reason."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._world.broken(f"it logged an error: {record.getMessage()} ({error!r})")


@dataclass(frozen=True)
class Result:
    """What became of a plan: `fault` is "" if all promises were kept."""

    plan: Plan
    fault: str
    trace: str
    requests: int
    seconds: float
    responses: Counter[str]


def simulate(plan: Plan, kind: type[World] = World) -> Result:
    """Run `plan` from its beginning to its end in virtual time."""
    loop = SimulatedLoop(coarse=plan.coarse)
    with simulated_core(loop) as cygrpc, simulated_channels(cygrpc, random.Random(f"{plan.seed} relays")):
        return _simulated(plan, kind(plan, loop, cygrpc), loop)


def _simulated(plan: Plan, world: World, loop: SimulatedLoop) -> Result:
    log = _Errors(world)
    threads, running, fault = dict(offloading._threads), threading.active_count(), ""
    simulated: Any = SimulatedThreads(loop, random.Random(f"{plan.seed} threads"))
    offloading._threads.update(dict.fromkeys(threads, simulated))
    try:
        _LOG.addHandler(log)
        _hear(uvicorn=False)
        asyncio.set_event_loop(loop)
        task = loop.create_task(world.run())
        unraised: list[str] = []

        def raised(_: Any, context: dict[str, Any]) -> None:
            unraised.append(repr(context.get("exception") or context["message"]))
            loop.stop()

        loop.set_exception_handler(raised)
        try:
            with _limited():
                loop.run_until_complete(task)
        except (Exception, Standing) as error:
            fault = (world.faults or unraised or [f"{type(error).__name__}: {error}"])[0]
        fault = fault or (world.faults or unraised or [""])[0]
        loop.set_exception_handler(lambda *_: None)
        world.over = True
        _wind_up(loop)
    finally:
        _LOG.removeHandler(log)
        _hear(uvicorn=True)
        offloading._threads.update(threads)
        asyncio.set_event_loop(None)
        loop.close()
    if threading.active_count() > running:
        fault = fault or "it started a thread, which lives in the real time"
    trace = world.trace if hasattr(world, "clients") else ""
    asked = sum(client.asked for client in world.clients) if hasattr(world, "clients") else 0
    return Result(plan, fault, trace, asked, loop.now, world.responses)


class Standing(BaseException):
    """Something does not come to its end, and so virtual time stands."""


@contextmanager
def _limited() -> Iterator[None]:
    """Raise Standing where the program is after the block has taken LONGEST seconds of CPU time. Only the main thread of a process can watch itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_: int, frame: object) -> None:
        raise Standing(f"it has taken {LONGEST:g} s of CPU time, at {frame}")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _wind_up(loop: SimulatedLoop) -> None:
    """End the tasks that a fault has left. Those of killed processes may have no step left that would end them."""
    loop.has_processes = False
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        with suppress(Stuck, RuntimeError):  # it may be stopped once more
            loop.run_until_complete(asyncio.wait(left, timeout=60.0))
    for task in left:
        coroutine: Any = task.get_coro()
        if not task.done() and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            coroutine.close()  # of a process that was killed before it began
