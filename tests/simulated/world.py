"""One simulated server with its clients, from a seed: what is promised of it is checked at every event and when all is at rest."""

import asyncio
import gzip
import hashlib
import inspect
import logging
import math
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.simulated.arenas import Arenas
from tests.simulated.asking import ANYTIME, Ask, fault_of
from tests.simulated.calls import CallClient
from tests.simulated.catalog import Catalog
from tests.simulated.changing import ChangeClient
from tests.simulated.channels import FIRST, LATE
from tests.simulated.clients import Client
from tests.simulated.clocks import TOLD, fault_of_date
from tests.simulated.devices import Device
from tests.simulated.encrypted import TlsConnection
from tests.simulated.fronts import OrderedSharedAccount, SimulatedFronts, SimulatedFrontsServer
from tests.simulated.fuzzing import FuzzClient
from tests.simulated.grpc_core import SimulatedCore, SimulatedCygrpc, simulated_core
from tests.simulated.loop import SimulatedLoop, SimulatedThreads, Stuck
from tests.simulated.messages import MessageClient
from tests.simulated.models import Streams
from tests.simulated.plans import MODELS, Fault, Plan
from tests.simulated.probing import FOLLOWS, Prober, counted_requests, wrong_counts
from tests.simulated.relaying import simulated_channels
from tests.simulated.scaling import Scaling, settle
from tests.simulated.solving import SimulatedSolver, solved_policy
from tests.simulated.solving import settle as settle_tables
from tests.simulated.streams import StreamClient
from tests.simulated.texts import SimulatedTexts, TextClient, Vectors
from tests.simulated.transport import Ordered, Peer, SimulatedTransport
from tests.simulated.watching import ROUNDING, CountedService, Watch
from tests.simulated.workers import SimulatedExecutor
from tests.simulated.zeromq import ZeroMqClient

from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.errors import WeirError
from weir.frontends.grpc import GrpcSettings
from weir.frontends.grpc.server import GrpcServer
from weir.frontends.http.application import NO_ENDPOINTS, make_app, make_exposition
from weir.frontends.http.fast.shared import Clocks
from weir.frontends.http.server import Edge, HttpServer, Listening
from weir.frontends.websocket import WebSockets
from weir.fronts.calls import DispatcherGrpc
from weir.fronts.front import FrontConfig
from weir.fronts.server import FrontFigures, FrontsPlan
from weir.model import Model
from weir.protocols import HttpSettings, offloading
from weir.protocols.access import Control, ControlSettings
from weir.protocols.account import Account
from weir.protocols.kserve import KserveContext
from weir.serving.generation import Generation
from weir.serving.service import Service
from weir.telemetry.recorder import Metrics

LONGEST = 60.0  # seconds of CPU time that a plan may take: no more than 15 are needed, by quiet hours of several fronts
_UNTIL_CALLERS_LEAVE = (0.0, 0.002, 0.05)  # seconds
_MEETS_WITHIN = 5.0  # seconds
_ROUND, _ROUNDS = 0.01, 100  # seconds, and how often, until a model has requests that wait
SILENCE = 1000.0  # seconds after which some client has asked for something, but for pauses
ALL_MODELS: dict[str, type[Model]] = MODELS | {"streams": Streams, "texts": Vectors}
# By their numbers.
_CLIENTS = (Client, StreamClient, MessageClient, FuzzClient, CallClient, TextClient, ChangeClient, ZeroMqClient)


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
        super().__init__(*arguments, edge=Edge(self._nowhere), **options)
        self.listening = _Nowhere()
        self.world: World

    async def _nowhere(self, *_: object) -> Listening:
        return self.listening

    def accept(self, loop: SimulatedLoop, peer: Peer, window: int | None) -> Any:
        """Connect a client; return None if nothing listens."""
        if not self.listening.open:
            return None
        if self._tls is None:
            return SimulatedTransport(loop, peer, self._connect, window=window)
        return self.world.encrypt(peer, self._accepted, window)


class World:
    """Runs one plan: what its clients see of the simulation."""

    def __init__(self, plan: Plan, loop: SimulatedLoop, cygrpc: SimulatedCygrpc) -> None:
        self.plan, self.loop, self.cygrpc = plan, loop, cygrpc
        self._ending: dict[str, list[float]] = {name: [] for name in plan.services}  # when drains and reloads began
        self.responses: Counter[str] = Counter()
        self._draw, self._losses = random.Random(f"{plan.seed} world"), random.Random(f"{plan.seed} memory")
        self._handshakes = random.Random(f"{plan.seed} handshakes")
        self._encrypted: list[TlsConnection] = []
        self.relays = bool(plan.fronts) and "tls_certfile" in plan.http  # fronts relay what they pass on
        self._executors: list[SimulatedExecutor] = []
        self.faults: list[str] = []
        self.over = False
        self._reloading: set[asyncio.Task[None]] = set()
        self.draining = False
        self._meets = asyncio.Event()  # a model begins to end that has requests
        self._drain_began = math.inf
        self._vectors: list[float] = []  # when clients got responses with vectors
        self.catalog: Catalog | None = None
        self.server: Any = None
        self._changed_at = 0.0  # when what readiness depends on changed last
        self.clients: list[Any] = []
        self.device = self.new_device()

    def new_device(self) -> Device | None:
        """Return the device on which models take turns; None if there is none."""
        return None if self.plan.device is None else Device(self, self.plan.device)

    def broken(self, what: str) -> None:
        """Note a broken promise. Nothing is raised: that would be taken for an error of the server's own."""
        if not self.over:
            self.faults.append(f"at {self.loop.now:.6f} s: {what}")
            self.loop.stop()

    def readiness_changed(self) -> None:
        """What readiness depends on has changed: it may follow a little later."""
        self._changed_at = self.loop.now

    @property
    def ready(self) -> bool | None:
        """Whether the server must say that it is ready; None while it may say either."""
        catalog = self.catalog
        if self._reloading or self.loop.now < self._changed_at + FOLLOWS or (catalog and catalog.changing):
            return None
        executors: list[Any] = [service.executor for service in self.services.values()]
        unavailable = any(executor.unavailable for executor in executors) or bool(catalog and catalog.unavailable)
        return not self.draining and not unavailable

    def idle_since(self, model: str) -> float:
        """Return the instant since which each generation of a model has a worker with nothing to do; infinity if one has none."""
        kind = MODELS[model]
        return max(each.idle_since for each in self._executors if each.model is kind and not each.stopped)

    def scaling_of(self, model: str) -> Scaling:
        """Return what watches the number of a model's workers, in its last generation."""
        found = [each.scaling for each in self._executors if each.model is ALL_MODELS[model]]
        assert found[-1] is not None
        return found[-1]

    @property
    def crashed(self) -> bool:
        """Whether a worker has died: then any request may have been with it."""
        return any(each.deaths for each in self._executors)

    def connect(self, peer: Peer, window: int | None) -> SimulatedTransport | None:
        """Connect a client to the server; return None if it does not listen."""
        transport: SimulatedTransport | None = self.server.accept(self.loop, peer, window)
        return transport

    def encrypt(
        self, peer: Peer, accepted: Callable[[], Any], window: int | None, process: Any = None
    ) -> TlsConnection:  # fmt: skip
        """Connect a client with TLS to a server, or to a front, which is a process."""
        odd, draw = type(getattr(peer, "_client", None)) in (Client, TextClient), self._handshakes
        self._encrypted.append(TlsConnection(self.loop, peer, accepted, window, draw, odd=odd, process=process))
        return self._encrypted[-1]

    def listening(self, peer: str) -> Any:
        """Return the core of a gRPC server that listens, to which this client is connected or connects; None if there is none."""
        servers = self.cygrpc.listening()
        found = [each for each in servers if peer in each.connections] or servers
        return self._draw.choice(found) if len(found) > 1 else next(iter(found), None)

    def hang_up(self, peer: str) -> None:
        """Close the connection of a client of gRPC."""
        for server in self.cygrpc.servers:
            server.disconnect(peer)

    def gone(self, asks: Iterable[Ask]) -> None:
        """The connection of these has gone before they had their ends. A front that is stopped does not know it, nor does who does not read what it relays."""
        if not self.relays and not self.stood_still(self.loop.now):
            self.watch.gone(asks)

    def stood_still(self, since: float) -> bool:
        """Whether a process of the server was stopped since then, which then answers nobody, or all of them were."""
        return self.loop.leapt_at + LATE > since or self.front_stood_still(since)

    def front_stood_still(self, since: float) -> bool:
        """Whether a front was stopped since then."""
        return isinstance(self.server, SimulatedFrontsServer) and self.fronts.stood_still(since)

    def _leap(self, seconds: float) -> None:
        self.loop.leap(seconds)
        self.readiness_changed()

    def judge(self, ask: Ask, status: int, headers: dict[str, str], body: bytes, *, on_time: bool) -> None:
        """A response has come. `on_time`: its time is bounded."""
        if status == 200 and ask.judged_by is not None:
            self.vectors_came()
        self.responses[str(status)] += 1
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        also = self.excused(ask)
        if self.plan.wrong and not ask.kserve and b"must be one for each" in body:
            also |= {"ModelError"}
        fault = fault_of(ask, status, headers, body, also)
        late = self.loop.now - ask.since - ask.timeout
        if not fault and on_time and late > LATE and not self.stood_still(ask.since):
            fault = f"it ended {late:.3f} s after its deadline"
        if not fault and self.plan.jumps and ask.sent < math.inf and not self.stood_still(ask.sent - TOLD):
            fault = fault_of_date(self.loop, headers["date"], min(ask.began, ask.sent))
        if fault:
            self.broken(f"n={ask.n}: {fault}")

    def vectors_came(self) -> None:
        """A client has got a response with vectors."""
        self._vectors.append(self.loop.now)

    def excused(self, ask: Ask) -> frozenset[str]:
        """Return the errors that a request may have for what it and the server are, and for what has befallen that."""
        name = "tensors" if ask.kserve else "items" if ask.judged_by is None else "texts"
        large = ask.rows > self.plan.services[name]["max_queue_size"] or "max_waiting_bytes" in self.plan.http
        large |= self.plan.arenas is not None and len(ask.data) > self.plan.arenas.size
        return ANYTIME | ({"ModelCrashed"} if self.crashed else set()) | ({"TooLarge"} if large else set())

    async def run(self) -> None:
        """Run the plan, and check what is left of it."""
        plan = self.plan
        self.watch, self.metrics = Watch(self), Metrics()
        if plan.catalog is not None:
            self.catalog = Catalog(self, plan.catalog)
        self.services = {name: self.make_service(name) for name in plan.services}
        registry = self.registry = Registry(list(self.services.values()))
        manager = None if self.catalog is None else self.catalog.open(registry)
        self.server = self._server(registry, HttpSettings(port=0, **plan.http), manager)
        self.frontends: list[Any] = [self.server, *self._others]
        registry.changed.append(self.server.routes_changed)
        await (registry.start() if self.catalog is None else self.catalog.start())
        for frontend in self.frontends:
            await frontend.start()
        self.clients = self.make_clients()
        self.prober = Prober(self, interval=plan.probes, scrapes=60)
        for client in (self.prober, *self.clients):
            client.begin()
        for fault in plan.faults:
            self.loop.call_at(fault.at, self._happen, fault)
        for jump in plan.jumps:
            self.loop.happen_at(jump.at, self.loop.jump, jump.seconds)
        for leap in plan.leaps:
            self.loop.happen_at(leap.at, self._leap, leap.seconds)
        if plan.drains_at is not None:
            await asyncio.sleep(plan.drains_at)
            await self._busy()
        else:
            await self._finished()
            if isinstance(self.server, SimulatedFrontsServer):
                self._check_nothing_left("the clients have gone", self.server.left())
            if self.catalog is not None:
                await self.catalog.settle()
            if plan.ranges:
                await settle(self)
            if plan.solving:
                await settle_tables(self)
        await self._drain(manager or registry)
        await self._finished()
        self.prober.stop()
        await asyncio.sleep(5.0 if "tls_certfile" in plan.http else 1.0)  # the end of TLS may take a while
        self._check_rest()

    def make_clients(self) -> list[Any]:
        """Return the clients, before they begin."""
        return [_CLIENTS[index // FIRST](self, index) for index in self.plan.clients]

    def _server(
        self, registry: Registry, settings: HttpSettings, manager: Manager | None
    ) -> "SimulatedServer | SimulatedFrontsServer":
        plan = self.plan
        figures = FrontFigures(settings, plan.fronts) if plan.fronts else None
        account = OrderedAccount(settings) if figures is None else OrderedSharedAccount(settings, figures.figures, 0)
        control = Control(ControlSettings(allow_control=True))
        context = KserveContext(registry, settings, control, account=account, manager=manager)
        self.websockets = WebSockets(registry, settings, account)
        self._others: list[Any] = []
        grpc_server: Any = None
        if plan.stream_requests:
            grpc = GrpcSettings(grpc_port=0, grpc_stream_requests=plan.stream_requests)
            kind = GrpcServer if figures is None else DispatcherGrpc
            grpc_server = kind(context, grpc, settings, SimulatedCore)
            self._others.append(grpc_server)
        self.texts: SimulatedTexts | None = None
        if (texts := self.services.get("texts")) is not None:
            words = plan.knows_words
            self.texts = SimulatedTexts(texts, settings, knows_words=words, cut_off=self._texts_cut_off)
            self._others += self.texts.zeromq(plan.zeromq, control, account, self.loop.time)
        render = partial(counted_requests, make_exposition(self.metrics, registry))
        added = self.texts.added if self.texts else NO_ENDPOINTS
        app = make_app(context, metrics=render, websockets=self.websockets, added=added)
        options: dict[str, Any] = {
            "clocks": Clocks(self.loop.time, self.loop.wall),
            "websockets": self.websockets,
            "route_handlers": self.texts.routes if self.texts else (),
        }
        if figures is None:
            one = SimulatedServer(context, app, **options)
            one.world = self
            return one
        product = None if self.texts is None else self.texts.in_fronts()
        config = FrontConfig(settings, context.access, False, 0, plan.fronts, product=product)
        parts = FrontsPlan(config, figures, grpc_server, self.texts)
        server = SimulatedFrontsServer(context, app, parts, [self.watch, self.metrics], **options)
        server.world, server.draw = self, random.Random(f"{plan.seed} machines")
        return server

    def loses_memory(self) -> bool:
        """Return whether the descriptor of an arena is lost on its way to a front."""
        arenas = self.plan.arenas
        return arenas is not None and arenas.lost > 0.0 and self._losses.random() < arenas.lost

    @property
    def fronts(self) -> SimulatedFronts:
        """The fronts of a plan that has some."""
        assert isinstance(self.server, SimulatedFrontsServer)
        return self.server.listening

    async def _finished(self) -> None:
        asked, since = -1, 0.0
        while waiting := [client for client in self.clients if not client.done]:
            await asyncio.sleep(1.0 + self.plan.quiet / 100.0)  # it costs less than an event of each client
            if (now_asked := sum(client.asked for client in self.clients)) != asked:
                asked, since = now_asked, self.loop.now
            elif self.loop.now > since + SILENCE + 30.0 * self.plan.quiet:
                self.broken(f"{len(waiting)} clients wait without end")
        await asyncio.sleep(5.0 if self.plan.drains_at is None else 0.0)

    def make_service(self, name: str) -> CountedService:
        """Return a service of one of the models that the server always has."""
        plan = self.plan
        number = f"{plan.seed} {name} {len(self._executors)}"
        arenas = None if plan.arenas is None else Arenas(plan.arenas, random.Random(f"{number} arenas"))
        largest, draw = plan.services[name]["max_batch_size"], random.Random(number)
        device = self.device if plan.device is not None and name in plan.device.models else None
        limits = plan.ranges.get(name)
        scaling = None if limits is None else Scaling(self, limits, random.Random(f"{number} scaling"))
        shared: dict[str, Any] = {"arenas": arenas, "device": device, "scaling": scaling}
        executor = SimulatedExecutor(self, ALL_MODELS[name], plan.workers[name], draw, largest=largest, **shared)
        self._executors.append(executor)
        demand = None if self.catalog is None else self.catalog.residency
        options: dict[str, Any] = {
            "observers": [self.watch, self.metrics],
            "clock": self.loop.time,
            "on_demand": demand,
        }
        if device is not None:
            device.add(executor)
            options["device"] = device.group
        settings = plan.services[name]
        if name in plan.solving:
            settings = settings | {"policy": solved_policy(plan, name)}
        service = CountedService(ALL_MODELS[name], name=name, executor=executor, **options, **settings)
        service.watch = self.watch
        if service.generation.tuner is not None:
            solver: Any = SimulatedSolver(plan.solving[name], random.Random(f"{number} solver"))
            service.generation.tuner._solver = solver
        if scaling is not None:
            scaling.attach(service.generation.scaler)
        return service

    def kind_of(self, *kinds: type[Service], **attributes: Any) -> type[CountedService]:
        """Return a class of services, of these kinds and with these attributes, whose requests are noted."""
        return type("Counted", (CountedService, *kinds), attributes | {"watch": self.watch})

    # What happens to the server.

    def _happen(self, fault: Fault) -> None:
        if self.server.listening.open:
            owners = self, self.catalog, self.server.listening
            step = next(step for owner in owners if (step := getattr(owner, fault.kind, None)))
            task = asyncio.ensure_future(step(fault.model))
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
            if self._waits(name):
                return
            await asyncio.sleep(_ROUND)

    async def _busy(self) -> None:
        """Wait a while for what a drain must not cut off: requests that wait for some model, or those of one that ends."""
        name = self._draw.choice([each for each in self.services if self._waits(each)] or list(self.services))
        if self.plan.fronts and self.texts is not None and self._draw.random() < 0.7:
            name = "texts"  # which wait in the fronts
        await self._loaded(name)
        if self._draw.random() < (0.5 if self.catalog is None else 0.2):
            return
        self._meets.clear()
        self._happen(Fault(self.loop.now, "reload", name))
        with suppress(TimeoutError):
            async with asyncio.timeout(_MEETS_WITHIN):
                await self._meets.wait()

    def ends(self, generations: Iterable[Generation]) -> None:
        """These have been replaced, or are unloaded: from now on they finish what they have."""
        if any(not each.driver.batcher.is_empty for each in generations):
            self._meets.set()

    def _waits(self, name: str) -> bool:
        """Return whether requests wait for a model in its queue; texts, for their turns to come there."""
        if self.texts is None or name != "texts":
            service = self.services[name]
            return any(each.driver.batcher.waiting_rows for each in (service.generation, *service._former))
        encoders = [self.texts.encoder]
        if isinstance(self.server, SimulatedFrontsServer):
            encoders += self.server.encoders()
        return any(each._held > sum(each._under_way.values()) for each in encoders)

    async def kill(self, name: str) -> None:
        await self._loaded(name)
        executor: Any = self.services[name].executor
        workers = executor.states() if name in self.plan.ranges else range(self.plan.workers[name].workers)
        if workers:
            worker = self._draw.choice(workers)
            executor.kill(getattr(worker, "index", worker))

    async def add(self, name: str) -> None:
        await self.services[name].add_worker()

    async def remove(self, name: str) -> None:
        service = self.services[name]
        if service.worker_count == 1 and self._draw.random() < 0.5:
            await service.add_worker()
        await self._loaded(name)
        await service.remove_worker()
        self._check_workers()

    def _check_workers(self) -> None:
        """What the server takes for running must be with workers, or else its requests must have ended with its service."""
        for name, service in self.services.items():
            driver = service.generation.driver
            executor: Any = driver.executor
            for batch in driver.batcher.running.values():
                ended = executor.stopped and all(request.settled for request in batch.requests)
                if not ended and not executor.has(batch.worker, batch.batch_id):
                    self.broken(f"{name}: batch {batch.batch_id} runs, and worker {batch.worker} does not have it")

    async def callers_leave(self, name: str) -> None:
        """Callers leave at once, as those behind one proxy do."""
        await self._loaded(name)
        await asyncio.sleep(self._draw.choice(_UNTIL_CALLERS_LEAVE))
        share = self._draw.choice((0.5, 1.0))
        for client in self.clients:
            if isinstance(client, Client) and self._draw.random() < share:
                client.walk_away()

    async def reload(self, name: str) -> None:
        """Replace a model by another one of its name."""
        if self.catalog is None:
            other = self.make_service(name)
            await other.start()
            await self._loaded(name)
            if self.draining or not self.server.listening.open:  # the manager makes no changes then
                await other.stop(0.0)
                return
        began = self.loop.now
        self._ending[name].append(began)
        if self.catalog is None:
            replaced = self.services[name].replace_with(other)
            self.registry.put([self.services[name]])
            self.ends([replaced.generation])
            await replaced.stop()
        else:
            await self.catalog.manager.load_model(name)
        self._ending[name].remove(began)

    async def _drain(self, models: Registry | Manager) -> None:
        self._drain_began = self.loop.now
        for each in self._ending.values():
            each.append(self.loop.now)
        self.draining = self.registry.ending = True
        self.readiness_changed()
        for frontend in self.frontends:
            frontend.refuse()
        if self.texts:
            longest = max(float(each["drain_timeout"]) for each in self.plan.services.values())
            await asyncio.gather(self.texts.encoder.drain(), self.server.drain_product(longest))
        await models.drain()
        self._check_workers()
        await models.stop(0.0)
        await asyncio.gather(*[frontend.drain(5.0) for frontend in self.frontends])
        for frontend in self.frontends:
            await frontend.stop()
        if self.texts:
            self.texts.encoder.close()
        if self._reloading:
            await asyncio.wait(self._reloading)

    def check_cut_off(self, name: str) -> None:
        """A request that was accepted has failed with Draining: right only if a drain or a reload of its model has given it all its time."""
        own = name in self.plan.services
        limit = self.plan.services[name if own else "items"]["drain_timeout"]  # models of the repository are like items
        endings = self._ending.get(name, [])
        if not own and self.catalog is not None:
            endings = [self._drain_began, *self.catalog.endings(name, limit)]
        given = self.loop.now - min(endings, default=math.inf)
        if given < limit - ROUNDING:
            self.broken(f"{name}: a request was cut off after {given:.3f} s, and must get {limit:g} s")

    def _texts_cut_off(self, began: float) -> None:
        """A request for vectors that began at this instant fails because the server drains: right if it did not know that yet."""
        now, since = self.loop.now, self._drain_began
        if began < since and now < since + self.plan.services["texts"]["drain_timeout"] and not self.stood_still(began):
            self.broken(f"a drain cut off texts after {now - since:.3f} s")

    # At rest.

    def _check_nothing_left(self, when: str, left: dict[str, Any]) -> None:
        if wrong := {what: count for what, count in left.items() if count}:
            self.broken(f"{when}, and there are left: {wrong}")

    def _check_rest(self) -> None:
        account, plan = self.server.account, self.plan
        left = {
            "bytes in the account": account.held_bytes,
            "connections": account.connections,
            "requests without an end": len(self.watch.open),
            "WebSockets": self.websockets.open,
            "bodies that arrive": len(self.server._shared.receiving),
            "servers of gRPC": len(self.cygrpc.servers),
            "sockets of TLS": sum(each.left for each in self._encrypted),
        }
        if isinstance(self.server, SimulatedFrontsServer):
            left |= self.server.left() | {"processes of fronts": self.fronts.alive}
        parts: tuple[Any, ...] = self.texts, self.catalog
        for part in filter(None, parts):
            left |= part.left()
        for each in self._executors:
            if each.arenas is not None:
                left |= {f"{each.model.__name__}: {what}": count for what, count in each.arenas.left().items()}
        for name, service in self.services.items():
            driver = service.generation.driver
            left[f"{name}: waiting rows"] = driver.batcher.waiting_rows
            left[f"{name}: waiting outside"] = driver.waiting_outside
            left[f"{name}: former generations"] = len(service._former)
        self._check_nothing_left("all is at rest", left)
        accepted, ended = self.watch.accepted, self.watch.ended
        if accepted != ended.total():
            self.broken(f"{accepted} requests were accepted, and {dict(ended)} ended")
        counted = sum(not plan.fronts or self.fronts.counts(at) for at in self._vectors)
        if self.texts and self.texts.answered < counted:
            self.broken(f"clients got {counted} answers with vectors, and {self.texts.answered} are counted")
        if self.texts and not plan.zeromq:  # damaged messages of ZeroMQ may hold more requests than one
            asked = sum(client.asked for client in self.clients if isinstance(client, TextClient))
            if asked < (received := self.texts._clients.data_requests):
                self.broken(f"clients sent {asked} requests for texts, and {received} are counted")
        if wrong_count := wrong_counts(self.metrics, accepted, ended):
            self.broken(wrong_count)

    def close(self) -> None:
        """Give back what is real: the memory, and sockets of TLS."""
        for connection in self._encrypted:
            connection.forget()
        for each in self._executors:
            if each.arenas is not None:
                each.arenas.close()

    @property
    def trace(self) -> str:
        """The hash of all that all clients have received, and of when."""
        return hashlib.blake2b("".join(client.trace for client in self.clients).encode(), digest_size=8).hexdigest()


_LOG, _UVICORN = logging.getLogger("weir"), logging.getLogger("uvicorn.error")


class _Errors(logging.Handler):
    """What Weir logs as an error is one: nothing here gives it a reason."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if self._world.catalog is not None and self._world.catalog.expects(record.getMessage()):
            return
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
    random.seed(plan.seed)  # uvicorn draws what it pings with
    loop = SimulatedLoop(coarse=plan.coarse)
    with simulated_core(loop) as cygrpc, simulated_channels(cygrpc, random.Random(f"{plan.seed} relays")):
        return run_in(loop, kind(plan, loop, cygrpc))


def run_in(loop: SimulatedLoop, world: World) -> Result:
    """Run a world in its loop, to its end or to the first fault."""
    plan, log, fault = world.plan, _Errors(world), ""
    threads, running = dict(offloading._threads), threading.active_count()
    simulated: Any = SimulatedThreads(loop, random.Random(f"{plan.seed} threads"))
    offloading._threads.update(dict.fromkeys(threads, simulated))

    def raised(_: Any, context: dict[str, Any]) -> None:
        world.faults.append(repr(context.get("exception") or context["message"]))
        loop.stop()

    try:
        _LOG.addHandler(log)
        _UVICORN.disabled = True  # what clients send is no news
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(raised)
        try:
            with _limited():
                loop.run_until_complete(loop.create_task(world.run()))
        except (Exception, Standing) as error:
            fault = f"{type(error).__name__}: {error}"
        fault = next(iter(world.faults), fault)
        loop.set_exception_handler(lambda *_: None)
        world.over = True
        _wind_up(loop)
        world.close()
    finally:
        _LOG.removeHandler(log)
        _UVICORN.disabled = False
        offloading._threads.update(threads)
        asyncio.set_event_loop(None)
        loop.close()
    if threading.active_count() > running:
        fault = fault or "it started a thread, which lives in the real time"
    asked = sum(client.asked for client in world.clients)
    return Result(plan, fault, world.trace, asked, loop.now, world.responses)


class Standing(BaseException):
    """Something does not come to its end, and so virtual time stands."""


@contextmanager
def _limited() -> Iterator[None]:
    """Raise Standing where the program is after the block has taken LONGEST seconds of CPU time."""

    def stop(_: int, frame: object) -> None:
        raise Standing(f"it has taken {LONGEST:g} s of CPU time, at {frame}")

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _wind_up(loop: SimulatedLoop) -> None:
    """End the tasks that a fault has left. Those of killed processes may have no step left that would end them."""
    loop.has_processes = False
    for _ in range(3):  # what is cancelled may begin more
        if not (left := asyncio.all_tasks(loop)):
            return
        for task in left:
            task.cancel()
        with suppress(Stuck, RuntimeError):  # it may be stopped once more
            loop.run_until_complete(asyncio.wait(left, timeout=60.0))
    for task in asyncio.all_tasks(loop):
        _close(task.get_coro())


def _close(coroutine: Any) -> None:
    """Close a coroutine that no step will end: whoever collected it later would hear what it then complains of, inner ones first and without a loop."""
    for _ in range(10):  # what it does about that may wait once more
        if inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED:
            return
        with suppress(BaseException):
            coroutine.close()
