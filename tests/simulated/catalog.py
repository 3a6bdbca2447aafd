"""Models that a simulated server loads, replaces and unloads while it runs, on demand too, and chains of them: the real Manager and Residency; the disk
and the memory are not.

A model answers with its name and the state of the disk that it was loaded from, so that a request of a loaded model can be judged by what has happened.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import inf, nextafter
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

from tests.simulated.models import Items
from tests.simulated.workers import SimulatedExecutor

from weir.catalog.chains import Chain
from weir.catalog.loading import make_service
from weir.catalog.manager import Manager, ModelState
from weir.catalog.registry import Registry
from weir.catalog.residency import Residency
from weir.catalog.sources import ModelReading, ModelToServe, Parameter, Parameters
from weir.errors import ModelError, ModelNotReady, SettingsError, WeirError, unknown_model
from weir.messages import Observer, label_of
from weir.policy.residency import Key, NextStep, Presence, Resident, Residents, Room
from weir.serving.generation import Generation
from weir.serving.service import Replaced, Service
from weir.workers.executor import Listener

if TYPE_CHECKING:
    from tests.simulated.plans import Plan
    from tests.simulated.world import World

HUNG = 60.0  # seconds after which a start that hangs has failed
STOPS = (0.0, 0.0, 0.05, 1.0)  # seconds until a worker has ended
SIZES = (100, 300, 500, 1000)  # bytes: only their proportions matter
KINDS = ("write", "grow", "model_kill")
_SETTLES = 1.0  # seconds


@dataclass(frozen=True)
class ModelPlan:
    """A model of the repository. `size` is what it takes, `declared` whether it says so; it starts in `start` seconds, fails to or hangs by these shares."""

    size: int
    declared: bool
    start: float
    fails: float
    hangs: float


@dataclass(frozen=True)
class CatalogPlan:
    """The repository of a server. `reading` is how long its disk takes, and `unreadable` the share of readings that fail. `chains` are models, too: each has
    the names of its steps. `resized`: callers add workers and remove them. `versions` are those of every model, of which `default` serves who names none
    (None: the highest that is loaded)."""

    models: dict[str, ModelPlan]
    first: tuple[str, ...]
    on_demand: bool
    memory: float
    at_once: int
    reading: float
    unreadable: float
    chains: Mapping[str, tuple[str, ...]]
    resized: bool
    versions: tuple[str, ...]
    default: str | None

    @property
    def names(self) -> list[str]:
        """What callers can ask for."""
        return [*self.models, *self.chains]

    def parts(self, name: str) -> tuple[str, ...]:
        """Return which models compute a request for `name`, one after the other."""
        return self.chains.get(name, (name,))

    def versions_of(self, name: str) -> tuple[str, ...]:
        """Return the versions that a model may have; "" for one that has none."""
        return self.versions if name in self.models else ("",)

    def chains_of(self, name: str) -> list[str]:
        """Return the chains that have this step."""
        return [chain for chain, steps in self.chains.items() if name in steps]

    @property
    def easy(self) -> bool:
        """Whether every model on demand is soon there."""
        wrong = any(each.fails or each.hangs or each.start > 0.05 for each in self.models.values())
        return not (wrong or self.unreadable or self.memory < inf or self.reading > 0.01)

    def too_large(self, name: str) -> bool:
        """Return whether a model says that it takes more than there is."""
        return self.on_demand and self.models[name].declared and self.models[name].size > self.memory


def draw_catalog(plan: "Plan") -> CatalogPlan:
    """Return the repository of the server of `plan`."""
    draw = random.Random(f"{plan.seed} catalog")
    on_demand = draw.random() < 0.6
    calm = draw.random() < 0.3
    models = {}
    for number in range(draw.choice((2, 3, 6, 6))):
        start = draw.choice((0.0, 0.05) if calm else (0.0, 0.05, 0.5, 5.0))
        fails, hangs = (0.0, 0.0) if calm else (draw.choice((0.0, 0.0, 0.3, 1.0)), draw.choice((0.0, 0.0, 0.0, 0.2)))
        models[f"m{number}"] = ModelPlan(draw.choice(SIZES), draw.random() < 0.5, start, fails, hangs)
    sizes = [each.size for each in models.values()]
    memory = draw.choice((inf, max(sizes), 1.5 * max(sizes), sum(sizes) / 2, 0.7 * sum(sizes), 0.9 * max(sizes)))
    first = [name for name, each in models.items() if not (each.fails or each.hangs) and draw.random() < 0.3]
    more, chains = random.Random(f"{plan.seed} chains"), {}
    if not on_demand and more.random() < 0.6:
        chains["c0"] = tuple(more.choices(list(models), k=more.choice((1, 2, 3))))
    resized = not on_demand and more.random() < 0.5
    versioned = not (on_demand or resized)
    versions = ("1", "2", "10") if versioned else ("",)
    return CatalogPlan(
        models, () if on_demand else tuple(first), on_demand, memory, draw.choice((1, 2)),
        draw.choice((0.0, 0.01) if calm else (0.0, 0.01, 0.5)), 0.0 if calm else draw.choice((0.0, 0.0, 0.3)), chains, resized,
        versions, more.choice((None, "1", "1")) if versioned else None,
    )  # fmt: skip


class Tagged(Items):
    """Answers whose model it is, and of which state of the disk, after those that computed the item before. What it answers is an item for the next one."""

    def __init__(self, label: str, tag: int) -> None:
        self._from = f"{label}:{tag}"

    def answer(self, item: Any) -> Any:
        """See Items."""
        answer = super().answer(item)
        if type(answer) is not dict:
            return answer
        return answer | {"from": [*item.get("from", ()), self._from], "do": item.get("then", "ok")}


class CatalogExecutor(SimulatedExecutor):
    """Workers of one model, which take memory from the beginning of their start to the end of their stop."""

    def __init__(self, name: str, params: dict[str, Any], largest: int, catalog: "Catalog") -> None:
        world = catalog.world
        self.plan, self.name, self.catalog = catalog.plan.models[name], name, catalog
        self._draws = random.Random(f"{world.plan.seed} {name} {catalog.number()}")
        workers = world.plan.workers["items"]
        super().__init__(world, Tagged, workers, self._draws, largest=largest, params=params)
        self._starting: asyncio.Future[None] | None = None

    async def start(self, listener: Listener) -> None:
        """See Executor."""
        self._listener, self.stopped = listener, False
        self.catalog.takes_memory(self)
        for number, state in enumerate(self.states()):
            state.pid = self.catalog.new_pid(self) + number
        fails, hangs = (self._draws.random() < share for share in (self.plan.fails, self.plan.hangs))
        self._starting = asyncio.get_running_loop().create_future()
        timer = self._loop.call_later(HUNG if hangs else self.plan.start, self._started, fails or hangs)
        try:
            await self._starting
        except Exception:
            await self._end()
            raise
        except BaseException:
            self.catalog.gives_memory_back(self)
            raise
        finally:
            timer.cancel()
        for worker in self._workers.values():
            self._ready(worker)

    def _started(self, failed: bool) -> None:
        assert self._starting is not None
        if self._starting.done():
            return
        if failed:
            self.catalog.failed_starts.add(self.name)
            self._starting.set_exception(ModelError(f"{self.name}: no weights"))
        else:
            self._starting.set_result(None)

    def _die(self, *arguments: Any) -> None:
        self.catalog.died.add(self.name)
        super()._die(*arguments)

    async def stop(self) -> None:
        """See Executor."""
        await super().stop()
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(ModelNotReady(f"{self.name}: stopped before it was ready"))
        await self._end()

    async def _end(self) -> None:
        if self not in self.catalog.living:
            return
        try:
            await asyncio.sleep(self._draws.choice(STOPS))
        finally:
            self.catalog.gives_memory_back(self)


class SimulatedRepository:
    """The models of the server, as they are on the disk: each has a number, which a write increases."""

    def __init__(self, plan: CatalogPlan, main: Sequence[str], draw: random.Random) -> None:
        self._plan, self._main, self._draw = plan, main, draw
        self.tags = dict.fromkeys(plan.models, 0)
        self.unreadable: set[str] = set()  # which could once not be read

    def names(self) -> list[str]:
        """See Repository."""
        return [*self._main, *self._plan.names]

    def has(self, name: str) -> bool:
        """See Repository."""
        return name in self.names()

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        """See Repository."""
        if not self.has(name):
            raise unknown_model(name, self.names())
        plain = ModelReading([ModelToServe("simulated", name, {}, [], {})])
        if name in self._main:
            return plain
        if self._draw.random() < self._plan.unreadable:
            self.unreadable.add(name)
            raise SettingsError(f"{name}: the disk has no such sector")
        if name in self._plan.chains:
            return plain
        model, tag = self._plan.models[name], self.tags[name]
        settings: dict[str, Any] = {"needs_memory": model.size} if model.declared else {}
        versions = [
            ModelToServe("simulated", name, {"label": label_of(name, each), "tag": tag}, [], settings, each)
            for each in self._plan.versions
        ]
        return ModelReading(versions, self._plan.default)


class SimulatedResidency(Residency):
    """The real one, whose evictions are looked at."""

    def __init__(self, catalog: "Catalog", limits: Room, pinned: frozenset[str], at_once: int) -> None:
        super().__init__(limits, pinned, clock=catalog.world.loop.time, measure=catalog.memory_of)
        core = self.core = _Residents(limits, at_once)
        core.catalog = catalog
        self.templates = AsyncMock()  # nothing is forked here
        self._catalog = catalog

    def _evict(self, generation: Generation, reason: str, level: int = 0) -> None:
        self._catalog.evicts(generation, reason)
        super()._evict(generation, reason, level)


class _Residents(Residents):
    """The real ones, whose steps are looked at."""

    catalog: "Catalog"
    next_load: Key | None = None  # for which models leave

    def next_step(self, *arguments: Any) -> NextStep | None:
        """See Residents."""
        step = super().next_step(*arguments)
        self.next_load = None if step is None else step.load
        return step

    def begin(self, name: Key, now: float) -> None:
        """See Residents."""
        generation: Any = name
        self.catalog.begins(generation)
        if now >= self.models[name].expected[1] and not generation.driver.waiters():
            assert self.catalog.residency is not None
            if generation not in self.catalog.residency._loads:
                self.catalog.world.broken(f"{generation.label} is loaded, and nobody waits for it")
        super().begin(name, now)


IN, OUT, CHANGING = "in", "out", "changing"


class SimulatedManager(Manager):
    """The real one, whose changes are noted, and which must tell the truth."""

    catalog: "Catalog"

    async def index(self, ready_only: bool = False) -> list[ModelState]:
        """See Manager."""
        states = await super().index(ready_only)
        self.catalog.check_index(states, ready_only=ready_only)
        return states

    async def _load_model(self, name: str, version: str, *arguments: Any) -> None:
        with self.catalog.changes(name, "load", version):
            await super()._load_model(name, version, *arguments)

    def _put(self, name: str, *arguments: Any) -> list[Replaced]:
        former = super()._put(name, *arguments)
        self.catalog.swapped(name)
        return former

    async def _unload_model(self, name: str, version: str, unload_dependents: bool) -> None:
        with self.catalog.changes(name, "unload", version):
            await super()._unload_model(name, version, unload_dependents)

    async def _stopped(self, ending: Collection[Service | Replaced]) -> list[BaseException | None]:
        self.catalog.world.ends(each.generation for each in ending)
        return await super()._stopped(ending)

    async def _load_worker(self, name: str, parameters: dict[str, Parameter], share: bool) -> str:
        with self.catalog.resizes(name, "add", int(not share)):
            return await super()._load_worker(name, parameters, share)

    async def _unload_worker(self, endpoint: str) -> None:
        with self.catalog.resizes(endpoint, "remove", -1):
            await super()._unload_worker(endpoint)

    async def _read_first(self, name: str) -> None:
        with self.catalog.changes(name, "read"):
            await super()._read_first(name)


@dataclass(frozen=True)
class Phase:
    """What a model, or one version of it, was from an instant on. `version`: which one served."""

    since: float
    state: str
    tag: int
    version: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a change."""

    at: float
    name: str
    kind: str
    error: str


class Catalog:
    """The models of one world that change: what they are by what has happened, and the memory that they take."""

    def __init__(self, world: "World", plan: CatalogPlan) -> None:
        self.world, self.plan, self._broken = world, plan, world.broken
        self._draw = random.Random(f"{world.plan.seed} disk")
        self.failed_starts: set[str] = set()
        self.died: set[str] = set()  # which have lost a worker
        self.outcomes: list[Outcome] = []
        self.repository = SimulatedRepository(plan, list(world.plan.services), self._draw)
        self.sizes = {name: each.size for name, each in plan.models.items()}
        self._pids: dict[int, CatalogExecutor] = {}
        self.living: dict[CatalogExecutor, None] = {}
        self._numbers = 0
        self.changing = 0  # changes that are being made
        # When changes began that may end a model.
        self._ending: dict[str, list[float]] = {name: [] for name in plan.names}
        self._added: Counter[str] = Counter()  # workers, by callers
        self._evicted: dict[str, list[float]] = {name: [] for name in plan.names}  # when it had to leave
        self.phases: dict[str, list[Phase]] = {
            key: [Phase(0.0, OUT, -1)] for name in plan.names for key in self._keys(name)
        }
        limits = Room(plan.memory, inf)
        pinned = frozenset(world.plan.services)
        self.residency = SimulatedResidency(self, limits, pinned, plan.at_once) if plan.on_demand else None

    def open(self, registry: Registry) -> SimulatedManager:
        """Return the manager of the server."""
        self.registry = registry
        registry.changed.append(self._registry_changed)
        manager = self.manager = SimulatedManager(registry, self.repository, self.make, residency=self.residency)
        manager.catalog = self
        self.world.loop.work_takes = lambda: self._draw.choice((0.0, self.plan.reading))
        return manager

    async def start(self) -> None:
        """Start the server's models, and load the first of the repository."""
        await self.manager.start()
        for name in (*self.plan.first, *self.plan.chains):
            with suppress(WeirError):  # the disk may fail
                await self.manager.load_model(name)

    def make(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        """See MakeService."""
        world = self.world
        if model.name in world.plan.services:
            return world.make_service(model.name)

        observers: list[Observer] = [world.watch, world.metrics]
        items = world.plan.services["items"]
        if model.name in self.plan.chains:
            kind = world.kind_of(Chain, steps=self.plan.chains[model.name])
            settings = {"clock": world.loop.time} | {each: items[each] for each in ("timeout", "drain_timeout")}
            return make_service(model._replace(settings=settings), observers, parameters, kind=kind)

        def executor(_: Any, params: dict[str, Any], __: Any, *, name: str, max_batch_size: int) -> CatalogExecutor:
            return CatalogExecutor(model.name, params, max_batch_size, self)

        settings = items | model.settings | {"executor": executor, "clock": world.loop.time}
        settings["workers"] = world.plan.workers["items"].workers
        model = model._replace(settings=settings)
        kind = world.kind_of(model=Tagged)
        return make_service(model, observers, parameters, kind=kind, on_demand=self.residency)

    # Memory.

    def number(self) -> int:
        """Return a number that is new."""
        self._numbers += 1
        return self._numbers

    def new_pid(self, executor: CatalogExecutor) -> int:
        """Return the process id of the first worker of `executor`, which has all of its memory."""
        pid = 1_000_000_000 + 100 * self.number()
        self._pids[pid] = executor
        return pid

    def memory_of(self, pid: int) -> int | None:
        """See Residency."""
        executor = self._pids.get(pid)
        return self.sizes[executor.name] if executor in self.living and executor is not None else None

    def takes_memory(self, executor: CatalogExecutor) -> None:
        """Its workers begin to load."""
        if executor in self.living:
            self._broken(f"{executor.name} is started twice")
        self.living[executor] = None

    def gives_memory_back(self, executor: CatalogExecutor) -> None:
        """Its workers have ended."""
        self.living.pop(executor, None)

    def begins(self, generation: Generation) -> None:
        """A load begins. Only a model beside which no other could leave may take more than there is."""
        assert self.residency is not None
        models: dict[Any, Resident] = self.residency.core.models
        users = {each: driver.executor for each in models for driver in each.drivers if driver.executor in self.living}
        loading = [each for each in models if models[each].presence is Presence.LOADING and each not in users]
        others = [each for each in (*loading, *users) if each is not generation and not models[each].pinned]
        stopped = [each for each in self.living if each not in users.values()]
        used = sum(map(self._known, (generation, *others))) + sum(self.sizes[each.name] for each in stopped)
        if used > self.plan.memory and (others or stopped):
            names = [*(each.label for each in others), *(each.name for each in stopped)]
            self._broken(f"{generation.label} is loaded beside {names}: they take {used} of {self.plan.memory:g} bytes")

    def _known(self, generation: Generation) -> float:
        """Return what is known that a model takes."""
        assert self.residency is not None
        model = self.residency.core.models[generation]
        return max(0.0 if model.measured is None else model.measured.memory, model.declared.memory)

    def evicts(self, generation: Generation, reason: str) -> None:
        """A model must leave. One that has requests may only if those that have none and are not in use are not enough, or if it can never stay."""
        assert self.residency is not None
        core: Any = self.residency.core
        own = core.models[generation]
        if own.presence is not Presence.LOADED or own.pinned:
            self._broken(f"{generation.label} is evicted, and is {own}")
        if generation.label in self._evicted:
            self._evicted[generation.label].append(self.world.loop.now)
        if generation.driver.is_idle or own.may_load_at == inf:
            return
        needed, now = core._staying.memory, self.world.loop.now
        if reason.startswith("evicted for "):  # a label may be that of two: one that was replaced can wait, too
            needed += core._expected(core.models[core.next_load]).memory
        free = sum(
            core._expected(each).memory
            for key, each in core.models.items()
            if each.presence is Presence.LOADED and not each.pinned and key.driver.is_idle
            and not (core._is_used(key, now) or each.is_owed(now))
        )  # fmt: skip
        if needed - free <= self.plan.memory:
            self._broken(f"{generation.label} is evicted, has requests, and others have none")

    # Changes.

    def _keys(self, name: str) -> dict[str, tuple[str, str]]:
        """Return the name and the version of what has phases of a model: itself, for who names no version, and each version."""
        return {name: (name, ""), **{label_of(name, each): (name, each) for each in self.plan.versions_of(name)}}

    @contextmanager
    def changes(self, name: str, kind: str, version: str = "") -> Iterator[None]:
        """Note a change of one model, or of one version of it, from its beginning to its end."""
        began, error = self.world.loop.now, None
        self._change_begins(name, version, kind)
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._change_ends(name, version, kind, began, error)

    def _change_begins(self, name: str, version: str, kind: str) -> None:
        """A model is loaded, read or unloaded, or only a version of it, while another one is there for who names none."""
        self.changing += 1
        self.world.readiness_changed()
        if name in self.phases:
            default = self.registry.services.get(name)
            another = kind == "unload" and len(self._running(name)) > 1
            own = not version or default is None or (default.version == version and not another)
            for key, (_, each) in self._keys(name).items():
                if own if key == name else version in ("", each) or default is None:
                    self._note(key, CHANGING)
            self._ending[name].append(self.world.loop.now)

    def _running(self, name: str) -> Mapping[str, Service]:
        return self.registry.versions(name) if name in self.registry.services else {}

    def _registry_changed(self) -> None:
        """While the default version is unloaded, another one is for who names none."""
        for name, leaving in self.registry._leaving.items():
            service = self.registry.services.get(name)
            if name in self.phases and service is not None and service.version not in leaving:
                self._note(name, IN)

    def endings(self, name: str, limit: float) -> list[float]:
        """Return when that began which may end a model now, after `limit` seconds: changes, also those that were cancelled, and evictions."""
        least = self.world.loop.now - limit - _SETTLES
        names = {name, *self.plan.parts(name)}
        began = [at for each in names for at in self._ending[each]]
        return [*began, *(at for each in names for at in self._evicted[each] if at > least)]

    def swapped(self, name: str) -> None:
        """What serves under a name has just been replaced."""
        for key in self._keys(name) if name in self.phases else ():
            self._note(key, self.phases[key][-1].state)

    def _change_ends(self, name: str, version: str, kind: str, began: float, error: BaseException | None) -> None:
        cancelled = isinstance(error, asyncio.CancelledError)
        if name in self._ending and not cancelled:
            self._ending[name].remove(began)
        self.changing -= 1
        self.world.readiness_changed()
        failed = "" if error is None else type(error).__name__
        self.outcomes.append(Outcome(self.world.loop.now, label_of(name, version), kind, failed))
        if name not in self.phases:
            return
        for key, named in self._keys(name).items():
            self._note(key, IN if self.registry._find(*named) else OUT)
        running = self._running(name)
        # An unload that is cancelled goes on, and nothing changes after it.
        leaving = self.registry._leaving.get(name, ()) if kind == "unload" and cancelled else ()
        self._check_default(name, [each for each in running if each not in leaving])
        registered = version in running if version else bool(running)
        living = sum(each.name == name for each in self.living)
        state = f"a {kind} of {name} ended with {error!r}, and registered is {registered}, running {living}"
        if error is not None and not isinstance(error, (WeirError, asyncio.CancelledError)):
            self._broken(state)
        if kind == "load" and living > len(running) and not cancelled:
            self._broken(state)
        if kind == "load" and error is None:
            if not registered:
                self._broken(state)
            if name in self.plan.models and self.plan.resized:
                self._check_workers(name)
        if kind == "unload" and error is None:
            del self._added[name]
            if registered or living > len(running):
                self._broken(state)
            left = [each for each in self.plan.chains_of(name) if each in self.registry.services]
            if left and not running:
                self._broken(f"{name} was unloaded, and {left} have it as a step")

    def _check_default(self, name: str, running: Collection[str]) -> None:
        """Who names no version gets the default one while it is loaded, and else the highest."""
        highest = max(running, key=lambda each: int(each or 0), default="")
        right = self.plan.default if self.plan.default in running else highest
        if running and (found := self.registry.services[name].version) != right:
            self._broken(f"{name}: version {found} of {running} is the default")

    def _check_workers(self, name: str) -> None:
        """A model has the workers that it started with, and those that callers have added, whatever has replaced it."""
        found = self.registry.services[name].worker_count
        if found != (right := self.world.plan.workers["items"].workers + self._added[name]):
            self._broken(f"{name} has {found} workers, must have {right}")

    @contextmanager
    def resizes(self, name: str, kind: str, by: int) -> Iterator[None]:
        """A caller adds so many workers to a model, or removes one: that changes nothing for requests, but that the first loads it and the last unloads it."""
        service = self.registry.services.get(name)
        before = 0 if service is None else service.worker_count
        error = ""
        try:
            with nullcontext() if before else self.changes(name, "load"):
                yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        else:
            if before > 1 or (before and by >= 0):
                self._added[name] = max(0, self._added[name] + by)
                if service is not None and service.worker_count != before + by:
                    self._broken(f"{name} had {before} workers, {by:+} now, and has {service.worker_count}")
        finally:
            self.outcomes.append(Outcome(self.world.loop.now, name, kind, error))

    def _note(self, key: str, state: str) -> None:
        service = self.registry._find(*key.partition("/")[::2])
        tag, version = (-1, "") if service is None else (service.params.get("tag", -1), service.version)
        self.phases[key].append(Phase(self.world.loop.now, state, tag, version))

    def during(self, name: str, since: float) -> list[Phase]:
        """Return what a model was from this instant to now."""
        phases = self.phases[name]
        first = max((index for index, phase in enumerate(phases) if phase.since <= since), default=0)
        return phases[first:]

    def has_drained(self, name: str, since: float) -> bool:
        """Return whether a model has changed, or a version that served under its name has since been unloaded, which may have had no time for a request."""
        before = nextafter(since, 0.0)  # a request may have come before a change of the same instant
        served = {label_of(name, phase.version) for phase in self.during(name, before)}
        ends = [phase for each in served for phase in self.during(each, before)[1:]]  # nothing comes to one that ends
        return any(phase.state == CHANGING for phase in (*self.during(name, since), *ends))

    def read_at(self, name: str) -> float:
        """Return when a model was last read for a request."""
        return max((each.at for each in self.outcomes if (each.name, each.kind) == (name, "read")), default=0.0)

    # The index.

    def check_index(self, states: Sequence[ModelState], *, ready_only: bool) -> None:
        """Look at what callers are told."""
        told = {label_of(state.name, state.version): state for state in states}
        if len(told) != len(states):
            self._broken(f"the index has a model twice: {states}")
        missing = set(self.repository.names()) - {state.name for state in states}
        if missing and not ready_only:
            self._broken(f"the index does not have {missing}")
        for label in [label_of(name, each) for name in self.plan.names for each in self.plan.versions_of(name)]:
            service = self.registry._find(*label.partition("/")[::2])
            serves = service is not None and self._serves(service)
            ready = label in told and told[label].state == "READY"
            leaves = service is not None and serves and not self._is_loaded(service)  # it is just about to
            if ready != serves and not leaves:
                self._broken(f"the index has {told.get(label)} for {label}, and that it serves is {serves}")

    def _serves(self, service: Service) -> bool:
        """Return whether the workers of a model take requests, or would: those of all its steps, if it is a chain."""
        generation, services = service.generation, self.registry.services
        if service.name in self.plan.chains:
            steps = self.plan.chains[service.name]
            return not generation.driver.draining and all(
                step in services and self._serves(services[step]) for step in steps
            )
        executor: Any = generation.driver.executor
        return executor in self.living and not executor.unavailable and not generation.driver.draining

    @property
    def unavailable(self) -> bool:
        """Whether a model that is loaded has no worker."""
        services = [service for service in self.registry.all if service.name in self.plan.models]
        executors: list[Any] = [service.executor for service in services if self._is_loaded(service)]
        return any(each.unavailable for each in executors)

    def _is_loaded(self, service: Service) -> bool:
        residency = service.residency
        return residency is None or residency["state"] == Presence.LOADED.value

    def expects(self, error: str) -> bool:
        """Return whether the server has a reason to log this error."""
        name = error.partition("'")[2].partition("'")[0]
        if "cannot be read" in error:
            return name in self.repository.unreadable
        if "failed to load" in error:
            return name in self.failed_starts
        return "it takes" in error and name in self.plan.models and self.plan.memory < inf

    # What befalls it.

    async def write(self, name: str) -> None:
        """Somebody changes a model on the disk."""
        self.repository.tags[name] += 1

    async def grow(self, name: str) -> None:
        """A model takes more memory, or less."""
        self.sizes[name] = max(1, round(self.sizes[name] * self._draw.choice((0.5, 1.2, 1.5))))

    async def model_kill(self, name: str) -> None:
        """Kill a worker."""
        if name in self.registry.services:
            executor: Any = self.registry.services[name].executor
            if executor in self.living:
                executor.kill(0)

    # At rest.

    def left(self) -> dict[str, Any]:
        """Return what is left of models when the server has ended."""
        left: dict[str, Any] = {f"{each.name}: former generations": len(each._former) for each in self.registry.all}
        return left | {
            "models in memory": len(self.living),
            "changes": len(self.manager._changes._tasks),
            "models that are being loaded": len(self.registry.loading),
        }

    async def settle(self) -> None:
        """Wait until nothing is under way, when nobody asks any more. That takes no longer than all loads."""
        if self.residency is None:
            return
        core, on_their_way = self.residency.core, (Presence.WAITING, Presence.LOADING, Presence.LEAVING)
        for _ in range(2 + len(core.models)):
            if not core.count(*on_their_way):
                break
            await asyncio.sleep(HUNG)
        if any(core.count(each) for each in on_their_way):
            self._broken(f"nobody asks, and models are {[each.presence for each in core.models.values()]}")
        present = {each.name for each in self.living}
        told = {key.label for key, each in core.models.items() if each.presence is Presence.LOADED}  # type: ignore[attr-defined]  # a Generation
        if present != told - set(self.world.plan.services):
            self._broken(f"{present} are in memory, and should be {told}")
