"""The Manager loads and unloads the models of a running server, one change after the other.

There are two kinds of load. `load_model` reads a model again and replaces the running one without an interruption. `load_worker`
is that of the AMD Inference Server: a load with the same parameters joins the running endpoint, and one with other parameters
makes a new endpoint, called `name-1` and so on.
"""

import asyncio
import gc
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

from weir.catalog.chains import dependents, missing
from weir.catalog.loading import check_allowed
from weir.catalog.registry import Registry, version_order
from weir.catalog.residency import Residency, not_ready, without_paths
from weir.catalog.sources import (
    CombinedRepository,
    ModelReading,
    ModelToServe,
    Parameter,
    Parameters,
    Repository,
    read_models_to_start,
)
from weir.errors import (
    Conflict,
    Draining,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    SettingsError,
    WeirError,
    counted,
    draining,
    unknown_model,
)
from weir.policy.backoff import Backoff
from weir.policy.residency import Presence
from weir.serving.delivery import logger
from weir.serving.driver import NOT_STARTED
from weir.serving.generation import Generation
from weir.serving.service import Replaced, Service
from weir.workers import source
from weir.workers.timer import end_tasks, in_background, outcome_of

T = TypeVar("T")

MAX_CHANGES = 256  # changes that may wait; each has a caller that waits with it
READ_WITHIN = 30.0  # seconds that a request waits until its model has been read: changes come first that began before


class ChangeQueue:
    """Makes changes one after the other, in the order in which they were requested.

    A change is made even when its caller has left, so the state always follows from the last change requested.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # asyncio's locks are fair: first come, first served
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def make(self, change: Callable[[], Coroutine[Any, Any, T]], *, bounded: bool = True) -> T:
        """Make `change` after those requested before it. Return what it returns, and raise what it raises.

        Raises Overloaded when too many changes wait and it is `bounded`, and Draining when the queue is closed or becomes closed.
        """
        if self._closed:
            raise draining()
        if bounded and len(self._tasks) >= MAX_CHANGES:
            rule = f"{len(self._tasks)} changes are pending, which is the maximum; try again later"
            raise Overloaded(rule, retry_after=1.0)
        task = asyncio.create_task(self._in_turn(change))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await outcome_of(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                raise draining() from None
            raise

    async def close(self) -> None:
        """Cancel the change that is being made and those that wait, and accept no more. Idempotent."""
        self._closed = True
        await end_tasks(*self._tasks)

    async def _in_turn(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._turn:
            return await change()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("a change was not made: %s", task.exception())


class WorkerEndpoint(NamedTuple):
    """`model` is the requested name; `parameters` are those of the load call, without `share`."""

    model: str
    parameters: Parameters


class WorkerEndpoints:
    """The endpoints that `load_worker` has made, by name. A model that runs without having been loaded as a worker counts as
    an endpoint of its own name and without parameters."""

    def __init__(self) -> None:
        self._endpoints: dict[str, WorkerEndpoint] = {}
        self._added: Counter[str] = Counter()

    def find(self, name: str) -> WorkerEndpoint | None:
        """Return the endpoint of that name."""
        return self._endpoints.get(name)

    def of(self, model: str, parameters: Parameters, running: Collection[str]) -> str | None:
        """Return the name of the endpoint where `model` runs with these parameters, or None."""
        wanted = _text(parameters)
        for name, endpoint in self._endpoints.items():
            if endpoint.model == model and _text(endpoint.parameters) == wanted:
                return name
        return model if not parameters and model in running and model not in self._endpoints else None

    def new_name(self, model: str, running: Collection[str], known: Collection[str]) -> str:
        """Return the name of a new endpoint of `model`: the model's own name if nothing runs under it; else the first of
        `name-1`, `name-2`, ... that is neither running nor the name of another model."""
        if model not in running:
            return model
        names = (f"{model}-{number}" for number in count(1))
        return next(name for name in names if name not in running and name not in known)

    def add(self, name: str, model: str, parameters: Parameters) -> None:
        """Record that `model` runs with these parameters under `name`."""
        self._endpoints[name] = WorkerEndpoint(model, parameters)

    def remove(self, name: str) -> None:
        """Record that nothing runs under `name` any more."""
        self._endpoints.pop(name, None)
        self._added.pop(name, None)

    def resized(self, name: str, by: int) -> None:
        """Record that the endpoint `name` has `by` more workers; a negative number means fewer. `added` never falls below 0."""
        self._added[name] = max(0, self._added[name] + by)

    def added(self, name: str) -> int:
        """Return how many workers `name` has beyond those that it was started with."""
        return self._added[name]


def _text(parameters: Mapping[str, object]) -> str:
    return json.dumps(dict(parameters), sort_keys=True)


# The interpreter's switch interval during an import, in seconds. With the default of 5 ms, an importing thread would hold the
# event loop up for 5 ms at a time.
IMPORT_SWITCH_INTERVAL = 0.0002


async def import_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return what it returns. Only one call may be under way at a time.

    Meanwhile the threads switch more often than usual, and the garbage collector is off: it would examine all that is being
    imported, and stop every thread for that time.
    """
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(min(IMPORT_SWITCH_INTERVAL, interval))
    gc.disable()
    try:
        return await asyncio.to_thread(work)
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()


READY, UNAVAILABLE = "READY", "UNAVAILABLE"
LOADING = ("loading", NOT_STARTED)


class ModelState(NamedTuple):
    """The state of one version of a model ("": the model has no versions): READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str
    state: str
    reason: str


class ModelStates:
    """Records which loads are under way and why the last load of a model failed, which the registry does not know."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._under_way: dict[tuple[str, str], str] = {}
        self._failures: dict[tuple[str, str], str] = {}

    @contextmanager
    def during(self, name: str, versions: Iterable[str], state: str) -> Iterator[None]:
        """Record that these versions are in `state` while the block runs."""
        keys = [(name, version) for version in versions]
        self._under_way.update(dict.fromkeys(keys, state))
        self._update_loading()
        try:
            yield
        finally:
            for key in keys:
                del self._under_way[key]
            self._update_loading()

    def failed(self, name: str, version: str, reason: str) -> None:
        """Record why the last load of this version failed."""
        self._failures[name, version] = reason

    def forget(self, name: str, versions: Iterable[str]) -> None:
        """Forget earlier failures of these versions, which have since been loaded or unloaded."""
        for version in ("", *versions):
            self._failures.pop((name, version), None)

    def index(self, names: Mapping[str, str], ready_only: bool) -> list[ModelState]:
        """Return the state of every model that runs, is being loaded, failed to load or is one of `names`, which are not loaded for these reasons, by
        name and version; with `ready_only`, only of those that are ready."""
        states = {(service.name, service.version): self._of(service) for service in self._registry.all}
        noted = {key: (state, "") for key, state in self._under_way.items()}
        failed = {key: (UNAVAILABLE, reason) for key, reason in self._failures.items()}
        known = {name for name, _ in (*states, *noted, *failed)}
        idle = {(name, ""): (UNAVAILABLE, reason) for name, reason in names.items() if name not in known}
        every = {**idle, **failed, **noted, **states}
        keys = sorted(every, key=lambda key: (key[0], version_order(key[1])))
        found = [ModelState(*key, state, without_paths(reason)) for key in keys for state, reason in [every[key]]]
        return [each for each in found if each.state == READY] if ready_only else found

    def _of(self, service: Service) -> tuple[str, str]:
        key = service.name, service.version
        if (residency := service.residency) is not None and residency["state"] != Presence.LOADED.value:
            coming = residency["state"] in (Presence.WAITING.value, Presence.LOADING.value)
            return ("LOADING" if coming else UNAVAILABLE), residency["reason"] or residency["state"]
        failure = self._failures.get(key, "")
        if service.ready:
            return READY, f"load failed; the old model keeps running: {failure}" if failure else ""
        under_way = self._under_way.get(key) or ("LOADING" if service.not_ready_reason in LOADING else UNAVAILABLE)
        return under_way, service.not_ready_reason

    def _update_loading(self) -> None:
        self._registry.loading = {name for (name, _), state in self._under_way.items() if state == "LOADING"}


SHARE = "share"


class _FirstRead:
    """One read that is under way, and how many requests wait for it."""

    task: asyncio.Task[WeirError | None]
    waiters = 0


class FirstReads:
    """Has models read when they are needed for the first time: each once, however many requests come, and not at once again after
    it could not be read. A read whose turn comes when all who waited for it have left is dropped."""

    def __init__(
        self,
        changes: ChangeQueue,
        read: Callable[[str], Coroutine[Any, Any, None]],
        clock: Callable[[], float],
        names: Iterable[str],
    ) -> None:
        self._clock = clock
        self._changes = changes
        self._read = read
        self._under_way: dict[str, _FirstRead] = {}
        self._failed: dict[str, tuple[Backoff, float, str]] = {}  # the time until which requests are refused, and why
        # By name: why it could not be read; "" if it was not tried, or was read.
        self.reasons = dict.fromkeys(names, "")

    async def read(self, name: str) -> None:
        """Read and register the model `name`. Raises ModelNotReady if it cannot be read, or not within READ_WITHIN seconds, and ModelNotFound."""
        backoff, until, reason = self._failed.get(name) or (Backoff(), 0.0, "")
        now = self._clock()
        if now < until:
            raise not_ready(name, reason, until - now)
        first = self._under_way.get(name)
        if first is None:
            first = self._under_way[name] = _FirstRead()
            first.task = asyncio.ensure_future(self._outcome(name, backoff, first))
        first.waiters += 1
        try:
            ended, _ = await asyncio.wait([first.task], timeout=READ_WITHIN)
        except asyncio.CancelledError:
            first.waiters -= 1
            raise
        if not ended:  # its caller comes again, and is waited for
            raise not_ready(name, "it is read when other models have been loaded", 1.0)
        if (error := first.task.result()) is not None:
            raise error

    async def _in_turn(self, name: str, first: "_FirstRead") -> None:
        if first.waiters:
            await self._read(name)
        else:  # a request that comes from now on has a turn of its own
            del self._under_way[name]
            raise not_ready(name, "all who waited for it have left")

    async def _outcome(self, name: str, backoff: Backoff, first: "_FirstRead") -> WeirError | None:
        """Read the model, and note what came of it, also where nobody waits any more; return what its requests fail with."""
        try:
            await self._changes.make(lambda: self._in_turn(name, first), bounded=False)
        except (Draining, ModelNotFound, ModelNotReady) as error:
            return error
        except WeirError as error:
            pause = backoff.failed_to_load()
            self._failed[name] = backoff, self._clock() + pause, error.message
            self.reasons[name] = error.message
            logger.error("model %r: cannot be read, and is not tried again for %.3g s: %s", name, pause, error.message)
            return not_ready(name, error.message, 1.0)
        finally:
            if self._under_way.get(name) is first:
                del self._under_way[name]
        self._failed.pop(name, None)
        self.reasons[name] = ""
        return None


class MakeService(Protocol):
    """Makes services, as loading.ServiceMaker does."""

    def __call__(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        """Return a service that has not been started. Called in a thread; see loading.make_service."""


def opened_manager(
    sources: CombinedRepository,
    load: Sequence[str],
    make: MakeService,
    allow_files: bool,
    residency: Residency | None = None,
) -> "Manager":
    """Return a manager of the models of `sources` that `load` names, none of which is started. With `residency`, the others are
    read and loaded by their first requests. Raises SettingsError."""
    opened = read_models_to_start(sources, load, make)
    registry = Registry(opened.services, opened.routes, opened.defaults, opened.aliases)
    return Manager(registry, sources, make, allow_files=allow_files, residency=residency)


class Manager:
    """Starts, loads, unloads and stops the services of `registry`. From the start on, nothing else may change the registry.

    Changes are made one after the other, in the order in which they were requested; each caller gets the result of its own.

    Arguments:
        registry: the services to start with.
        repository: knows what else can be loaded; it is read again for every load.
        make: makes a service of what the repository returns.
        allow_files: whether load calls may bring code and files.
        residency: decides which models are in memory; without it, all that are registered.
    """

    def __init__(
        self,
        registry: Registry,
        repository: Repository,
        make: MakeService,
        *,
        allow_files: bool = False,
        residency: Residency | None = None,
    ) -> None:
        self.registry = registry
        self._first = registry.all
        self._repository = repository
        self._make = make
        self._allow_files = allow_files
        self._changes = ChangeQueue()
        self._states = ModelStates(registry)
        self._endpoints = WorkerEndpoints()
        self._residency = residency
        self._stops: set[asyncio.Task[Any]] = set()  # that are under way
        if residency is not None:
            self._reads = FirstReads(self._changes, self._read_first, residency.clock, repository.names())
            registry.on_demand, registry.read = self._reads.reasons, self._reads.read

    async def start(self) -> None:
        """Start all models that the registry had when this was made, and the steps of their chains, at the same time; return when
        all are ready. Requests may have called others meanwhile, which are loaded for these.

        When one fails, all are stopped and its error is raised.
        """
        await self._changes.make(self._start)

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Make no more changes, drain and stop all models; see Service.stop. Idempotent."""
        await self._changes.close()
        await self.registry.stop(drain_timeout)
        await asyncio.gather(*self._stops)
        if self._residency is not None:
            await self._residency.close()
        _release(service.generation for service in self.registry.all)

    async def drain(self, drain_timeout: float | None = None) -> None:
        """Make no more changes and accept no more requests; return when all accepted ones have ended, or after `drain_timeout` seconds. Workers run on."""
        await self._changes.close()
        await self.registry.drain(drain_timeout)

    async def index(self, ready_only: bool = False) -> list[ModelState]:
        """Return the state of every model that runs or could be loaded, by name and version."""
        names = [] if ready_only else await asyncio.to_thread(self._repository.names)
        unread = self.registry.on_demand
        return self._states.index({name: unread.get(name) or "not loaded" for name in names}, ready_only)

    # Models: the repository extension of the Open Inference Protocol.

    async def load_model(
        self,
        name: str,
        *,
        version: str = "",
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        """Read a model again, run it, and replace what runs under its name.

        The former model serves until the new one is ready. When this returns, the former one has responded to all that it had
        accepted. If the load fails, the former model goes on. Steps of a chain that do not run are loaded first, and keep
        running.

        Arguments:
            name: the model.
            version: loads this version only, in addition to the versions that run; "" loads all that are to be served.
            config: settings that override those of the model's own file.
            files: contents by path VERSION/PATH, which replace the model's own files.
            parameters: parameters as of `load_worker`, which override both.

        Raises:
            ModelNotFound: nothing of this name can be loaded.
            InvalidRequest: the model cannot be served as it is described.
            ModelError: it fails while it loads.
            Conflict: a version is missing that a chain names.
            Forbidden: the call brings files or code, and the server does not allow that.
            Overloaded, Draining: see ChangeQueue.make.
        """
        if files and not self._allow_files:
            rule = "files may come with a load call only if the server allows them (--allow-model-files)"
            raise Forbidden(f"model {name!r}: {rule}")
        check_allowed(config or {}, self._allow_files, "target")
        check_allowed(parameters or {}, self._allow_files)
        own = self.registry.name_of(name)
        await self._changes.make(lambda: self._load_model(own, version, config, files, parameters or {}))

    async def unload_model(self, name: str, *, version: str = "", unload_dependents: bool = False) -> None:
        """Accept no more requests for a model, finish the accepted ones, and stop it; with `version`, that version only.

        A known model that does not run is not an error. With `unload_dependents`, the chains that have it as a step are unloaded
        first. Raises ModelNotFound for an unknown name; and without `unload_dependents` Conflict for a step of a chain, when
        nothing has been stopped.
        """
        own = self.registry.name_of(name)
        await self._changes.make(lambda: self._unload_model(own, version, unload_dependents))

    # Workers, as the AMD Inference Server has them.

    async def load_worker(self, name: str, parameters: Mapping[str, Parameter]) -> str:
        """Run a model with these parameters, and return the name of its endpoint.

        If the model already runs with the same parameters, that endpoint is returned; if `share` is False it first gets one
        more worker. Otherwise a new endpoint is made: `name`, or `name-1` and so on while that is in use.

        Parameters may be arguments of the model's constructor, settings, and the AMD server's own (see loading.apply).
        Raises InvalidRequest naming the parameter, and what `load_model` raises.
        """
        check_allowed(parameters, self._allow_files)
        own = dict(parameters)
        share = own.pop(SHARE, True)
        if not isinstance(share, bool):
            raise InvalidRequest(f"parameter {SHARE}={share!r}: must be true or false")
        model = self.registry.name_of(name)
        return await self._changes.make(lambda: self._load_worker(model, own, share))

    async def unload_worker(self, endpoint: str) -> None:
        """Let one worker of `endpoint` finish its batches, and stop it; the last worker takes the endpoint with it. Raises ModelNotFound."""
        await self._changes.make(lambda: self._unload_worker(endpoint))

    async def resize(self, name: str, by: int) -> None:
        """Give a running model one worker more (1) or less (-1). Raises ModelNotFound if it does not run, and what adding or removing raises."""
        await self._changes.make(lambda: self._resize(name, by))

    # The changes themselves. They run one at a time.

    async def _start(self) -> None:
        if self._residency is not None:
            self._residency.open()
        starting = list(self._first)
        while names := await self._missing(starting):
            for name in names:
                reading = await self._read(name, "", None, None)
                async with self._made(reading.versions) as services:
                    self._put(name, services, reading.default, reading.versions)
                starting += services
        await self.registry.start(starting)

    async def _read_first(self, name: str) -> None:
        """Register a model that is not loaded before a request comes for it."""
        if name in self.registry.services:
            return
        try:
            reading = await self._read(name, "", None, None)
        except ModelNotFound:  # its folder has gone since the start
            self._reads.reasons.pop(name, None)
            raise
        async with self._made(reading.versions) as services:
            for step in await self._missing(services):
                await self._read_first(step)
            for service in services:
                service.open()
            self._put(name, services, reading.default, reading.versions)

    @asynccontextmanager
    async def _made(
        self, models: Sequence[ModelToServe], parameters: Parameters | None = None, *, fresh: bool = False
    ) -> AsyncIterator[list[Service]]:
        """Make services of all `models` for the block. When it fails, or one cannot be made, stop them and raise the error. Raises SettingsError
        for a route or a name that another model has."""
        for model in models:
            self.registry.check_claim(model.name, model.routes)
            self.registry.check_label(model.name, model.version)
        services: list[Service] = []
        try:
            for model in models:
                services.append(await import_in_thread(partial(self._make, model, parameters, fresh=fresh)))
            self.registry.join(services)
            yield services
        except BaseException:
            await _discard(services)
            raise

    async def _missing(self, services: Sequence[Service]) -> list[str]:
        """Return the steps of `services` that do not run and could be loaded."""
        names = missing(services, self.registry.services)
        return [name for name in names if await asyncio.to_thread(self._repository.has, name)]

    async def _load_model(
        self,
        name: str,
        version: str,
        config: Mapping[str, Any] | None,
        files: Mapping[str, bytes] | None,
        parameters: Mapping[str, Parameter],
    ) -> None:
        endpoint = self._endpoints.find(name)
        parameters = parameters if endpoint is None else {**endpoint.parameters, **parameters}
        source = name if endpoint is None else endpoint.model
        reading = await self._read(source, version, config, files)
        if endpoint is not None:
            reading = reading._replace(versions=[_version(reading, version or reading.default)])
        models = [model._replace(name=name) for model in reading.versions]
        running = self._running(name)
        if not version:
            self._check_dependents(name, running.keys() - {model.version for model in models})
        new = await self._started(models, parameters)
        kept = {key: service for key, service in running.items() if version and key != version}
        await self._check_chains(name, new, kept, reading.default)
        if running and version in ("", self.registry.get(name).version):
            await self._give_workers(name, reading, new)
        services = [*kept.values(), *new]
        await self._retire(self._put(name, services, reading.default, reading.versions))
        logger.info("model %r: loaded, serving %s", name, counted(len(services), "version"))

    async def _check_chains(
        self, name: str, new: Sequence[Service], kept: Mapping[str, Service], default: str | None
    ) -> None:
        """Check that the running chains can use `new` and `kept`, which are about to be the versions of `name`. If not, stop
        the new ones and raise InvalidRequest."""
        versions = {**kept, **{service.version: service for service in new}}
        preferred = default if default in versions else max(versions, key=version_order)

        def find(model: str, version: str) -> Service:
            if model == name and (version or preferred) in versions:
                return versions[version or preferred]
            return self.registry.get(model, version)

        try:
            for chain in dependents(name, self.registry.all):
                chain.check(find)
        except SettingsError as error:
            await _discard(new)
            self._states.failed(name, new[0].version, error.message)
            raise _failed(name, error) from error

    async def _unload_model(self, name: str, version: str, unload_dependents: bool) -> None:
        running = self._running(name)
        if not running and not await asyncio.to_thread(self._repository.has, name):
            raise unknown_model(name, self.registry.services)
        ending = {key: service for key, service in running.items() if not version or key == version}
        if version and running and not ending:
            self.registry.get(name, version)
        if unload_dependents:
            for chain in self._dependents(name, ending):
                await self._unload_model(chain, "", True)
        self._check_dependents(name, ending)
        if ending:
            self.registry.leave(name, ending)
        with self._states.during(name, ending, "UNLOADING"):
            for error in filter(None, await self._stopped(ending.values())):
                raise error
        self._keep(name, [service for key, service in running.items() if key not in ending])
        self._states.forget(name, ending)

    def _dependents(self, name: str, ending: Collection[str]) -> list[str]:
        """Return the names of the chains that need `name` as a step and would miss it without the versions `ending`."""
        versions = ending if self._running(name).keys() - ending else None
        return sorted({chain.name for chain in dependents(name, self.registry.all, versions)}) if ending else []

    def _check_dependents(self, name: str, ending: Collection[str]) -> None:
        if chains := self._dependents(name, ending):
            rule = f"is a step of {', '.join(map(repr, chains))}: unload that first, or with it (unload_dependents)"
            raise Conflict(f"model {name!r} {rule}")

    async def _load_worker(self, name: str, parameters: dict[str, Parameter], share: bool) -> str:
        found = self._endpoints.of(name, parameters, self.registry.services)
        if found is not None:
            if not share:
                await self._resize(found, 1)
            return found
        reading = await self._read(name, "", None, None)
        known = await asyncio.to_thread(self._repository.names)
        endpoint = self._endpoints.new_name(name, self.registry.services, known)
        model = _version(reading, reading.default)
        try:
            services = await self._started([model._replace(name=endpoint)], parameters)
        except WeirError:
            if endpoint not in known:  # there is nothing that this name could be loaded from
                self._states.forget(endpoint, [model.version])
            raise
        self._endpoints.add(endpoint, name, parameters)
        self._put(endpoint, services, None, [model])
        return endpoint

    async def _unload_worker(self, endpoint: str) -> None:
        service = self.registry.get(endpoint)
        if service.worker_count > 1:
            await self._resize(service.name, -1)
        else:
            await self._unload_model(service.name, "", False)

    async def _resize(self, name: str, by: int) -> None:
        service = self.registry.get(name)
        await (service.add_worker() if by > 0 else service.remove_worker())
        self._endpoints.resized(name, by)

    async def _read(
        self, name: str, version: str, config: Mapping[str, Any] | None, files: Mapping[str, bytes] | None
    ) -> ModelReading:
        try:
            reading = await asyncio.to_thread(self._repository.read, name, config, files)
        except SettingsError as error:
            self._states.failed(name, version, error.message)
            raise _failed(name, error) from error
        if version:
            return reading._replace(versions=[_version(reading, version)])
        return reading

    async def _started(self, models: Sequence[ModelToServe], parameters: Parameters | None) -> list[Service]:
        """Start services of all `models` and return them. When one fails, stop the others and raise its error."""
        name, versions = models[0].name, [model.version for model in models]
        try:
            with self._states.during(name, versions, "LOADING"):
                async with self._made(models, parameters, fresh=True) as services:
                    await self._load_steps(services)
                    await asyncio.gather(*[service.start() for service in services])
                return services
        except WeirError as error:
            for version in versions:
                self._states.failed(name, version, error.message)
            raise _failed(name, error) from error

    async def _give_workers(self, name: str, reading: ModelReading, new: Sequence[Service]) -> None:
        """Add as many workers to the new default version as load calls had added to the former one. Shared workers are there already."""
        highest = _version(reading, None).version
        default = highest if reading.default is None else reading.default
        try:
            for service in new:
                has_them = service.generation.shares_workers or service.version != default
                for _ in range(0 if has_them else self._endpoints.added(name)):
                    await service.add_worker()
        except BaseException as error:
            await _discard(new)
            if isinstance(error, WeirError):
                self._states.failed(name, default, error.message)
                raise _failed(name, error) from error
            raise

    async def _load_steps(self, services: Sequence[Service]) -> None:
        for name in await self._missing(services):
            if name in self.registry.loading:
                raise SettingsError(f"{services[0].label}: steps lead in a circle, by {name!r}")
            await self._load_model(name, "", None, None, {})

    def _running(self, name: str) -> dict[str, Service]:
        return self.registry.versions(name) if name in self.registry.services else {}

    def _put(
        self, name: str, services: Sequence[Service], default: str | None, models: Iterable[ModelToServe]
    ) -> list[Replaced]:
        """Make `services` the versions of `name`, and return the generations that are to be stopped.

        Where a version is already registered, the registered service takes over the new one's generation. A version that is
        not among `services` gets the generation of the default version, which answers the requests that still reach it.
        """
        before = self._running(name)
        for model in models:
            self.registry.claim(name, model.routes)
        former = []
        entries = []
        for service in services:
            entry = before.pop(service.version, service)
            if entry is not service:
                former.append(entry.replace_with(service))
            entries.append(entry)
        self.registry.put(entries, default)
        former += [entry.replace_with(self.registry.get(name)) for entry in before.values()]
        self._states.forget(name, self.registry.versions(name))
        return former

    def _keep(self, name: str, services: Sequence[Service]) -> None:
        if services:
            self.registry.put(services, self.registry.default_of(name))
        else:
            self.registry.remove(name)
            self._endpoints.remove(name)

    async def _retire(self, former: Sequence[Replaced]) -> None:
        """Drain and stop generations that were replaced; log what fails."""
        for each, end in zip(former, await self._stopped(former), strict=True):
            if isinstance(end, Exception):
                logger.error("model %r: its old generation did not stop cleanly", each.generation.label, exc_info=end)

    async def _stopped(self, ending: Collection[Service | Replaced]) -> list[BaseException | None]:
        """Drain and stop them, and return what each has raised. That goes on if the change is cancelled: the server that drains waits for the same requests."""

        async def stopped() -> list[BaseException | None]:
            ends = await asyncio.gather(*[each.stop() for each in ending], return_exceptions=True)
            _release(each.generation for each in ending)
            return ends

        return await outcome_of(in_background(stopped(), "the end of a model", self._stops))


async def _discard(services: Sequence[Service]) -> None:
    """Stop services that were made and are not going to be used."""
    await asyncio.gather(*[service.stop(0.0) for service in services])
    _release(service.generation for service in services)


def _release(ended: Iterable[Generation]) -> None:
    """Let other models have the names of the modules of generations that have ended."""
    for generation in ended:
        source.release(generation)


def _version(reading: ModelReading, version: str | None) -> ModelToServe:
    """Return that version, or the highest for None. Raises ModelNotFound."""
    if version is None:
        return max(reading.versions, key=lambda model: version_order(model.version))
    for model in reading.versions:
        if model.version == version:
            return model
    there = (model.version for model in reading.versions if model.version)
    raise unknown_model(reading.versions[0].name, there, version)


def _failed(name: str, error: WeirError) -> WeirError:
    """Return `error` as the caller of a failed load gets it; SettingsError becomes InvalidRequest."""
    message = f"failed to load {name!r}: {error.message}"
    if isinstance(error, SettingsError):
        return InvalidRequest(message, details=error.details)
    error.message = message
    error.args = (message,)
    return error
