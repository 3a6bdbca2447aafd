"""One owner of all that runs: every load and unload of a server goes through here, one after the other.

Two kinds of load. `load_model` reads a model anew and puts it in the place of the one that runs, without a gap. `load_worker` is
the AMD Inference Server's: the same parameters join the running endpoint, others make a new one, `name-1` and so on.
"""

import asyncio
import gc
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

from weir.catalog.chains import dependents, missing
from weir.catalog.loading import check_allowed
from weir.catalog.registry import Registry, version_order
from weir.catalog.sources import ModelReading, ModelToServe, Parameter, Parameters, Repository
from weir.errors import (
    Conflict,
    Draining,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    SettingsError,
    WeirError,
)
from weir.profiling.machine import Hardware, find_hardware
from weir.serving.delivery import logger
from weir.serving.generation import Generation
from weir.serving.service import Service

T = TypeVar("T")

MOST_CHANGES = 256  # changes that may wait; each is a caller


class ChangeQueue:
    """Makes changes one after the other, in the order in which they were requested.

    A change is made even when its caller has left, so that the state is always that of the last change.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # goes round in order of arrival
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def make(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `change` returns, or raise what it raises, once it is its turn and it has been made.

        Raises Overloaded when too many wait, Draining when it was closed before or meanwhile.
        """
        if self._closed:
            raise _changes_closed()
        if len(self._tasks) >= MOST_CHANGES:
            raise Overloaded(f"{len(self._tasks)} changes wait to be made; that is the limit", retry_after=1.0)
        task = asyncio.create_task(self._in_turn(change))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                raise _changes_closed() from None
            raise

    async def close(self) -> None:
        """Make no more changes: end the one that is being made, and those that wait. Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _in_turn(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._turn:
            return await change()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("a change was not made: %s", task.exception())


def _changes_closed() -> Draining:
    return Draining("the server is being stopped: nothing is loaded or unloaded any more")


class WorkerEndpoint(NamedTuple):
    """`model` is the requested name, `parameters` those of the call, without `share`."""

    model: str
    parameters: Parameters


class WorkerEndpoints:
    """Endpoints by name. A model that runs without having been loaded as a worker has one of its own name, with no
    parameters."""

    def __init__(self) -> None:
        self._endpoints: dict[str, WorkerEndpoint] = {}
        self._added: Counter[str] = Counter()

    def find(self, name: str) -> WorkerEndpoint | None:
        """Return the endpoint of that name."""
        return self._endpoints.get(name)

    def of(self, model: str, parameters: Parameters, running: Container[str]) -> str | None:
        """Return the endpoint where `model` runs with these parameters."""
        asked = _text(parameters)
        for name, endpoint in self._endpoints.items():
            if endpoint.model == model and _text(endpoint.parameters) == asked:
                return name
        return model if not parameters and model in running and model not in self._endpoints else None

    def new_name(self, model: str, running: Container[str], known: Container[str]) -> str:
        """Return the name of a new endpoint of `model`: its own, if nothing runs under it, or else the first with a number that
        is neither running nor the name of another model."""
        if model not in running:
            return model
        names = (f"{model}-{number}" for number in count(1))
        return next(name for name in names if name not in running and name not in known)

    def add(self, name: str, model: str, parameters: Parameters) -> None:
        """`model` runs with these parameters under `name`."""
        self._endpoints[name] = WorkerEndpoint(model, parameters)

    def remove(self, name: str) -> None:
        """Nothing runs under `name` any more."""
        self._endpoints.pop(name, None)
        self._added.pop(name, None)

    def resized(self, name: str, by: int) -> None:
        """The endpoint `name` has so many more workers, or fewer; not fewer than it was started with, as far as is noted here."""
        self._added[name] = max(0, self._added[name] + by)

    def added(self, name: str) -> int:
        """Return how many workers `name` has been given beyond those that it was started with."""
        return self._added[name]


def _text(parameters: Mapping[str, object]) -> str:
    return json.dumps(dict(parameters), sort_keys=True)


# Seconds after which the interpreter passes on to the loop's thread when it waits: an import would have it for 5 ms each time.
SWITCH = 0.0002


async def import_in_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns; one at a time. While it runs threads take turns more often than they do otherwise, and
    the collector, which would look at all that is being imported and stop every thread for it, rests."""
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(min(SWITCH, interval))
    gc.disable()
    try:
        return await asyncio.to_thread(work)
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()


_PATH = re.compile(r"(?<![\w.~:/-])/(?:[^/\s'\":,;()]+/)+(?=[^/\s'\":,;()])")

READY, UNAVAILABLE = "READY", "UNAVAILABLE"
LOADING = ("loading", "not started")


class ModelState(NamedTuple):
    """One model in one version ("": it has none). `state` is READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str
    state: str
    reason: str


class ModelStates:
    """Keeps what the registry and the repository do not know: which loads are under way, and why the last one of each model failed."""

    def __init__(self, registry: Registry, repository: Repository) -> None:
        self._registry = registry
        self._repository = repository
        self._under_way: dict[tuple[str, str], str] = {}
        self._failures: dict[tuple[str, str], str] = {}

    @contextmanager
    def during(self, name: str, versions: Iterable[str], state: str) -> Iterator[None]:
        """Within the block these versions are in `state`."""
        keys = [(name, version) for version in versions]
        self._under_way.update(dict.fromkeys(keys, state))
        self._tell()
        try:
            yield
        finally:
            for key in keys:
                del self._under_way[key]
            self._tell()

    def failed(self, name: str, version: str, reason: str) -> None:
        """Its last load failed."""
        self._failures[name, version] = reason

    def forget(self, name: str, versions: Iterable[str]) -> None:
        """These versions were loaded, or unloaded: what failed before is of no interest any more."""
        for version in ("", *versions):
            self._failures.pop((name, version), None)

    def index(self, ready_only: bool) -> list[ModelState]:
        """Return the state of each."""
        states = {(service.name, service.version): self._of(service) for service in self._registry.all}
        noted = {key: (state, "") for key, state in self._under_way.items()}
        failed = {key: (UNAVAILABLE, reason) for key, reason in self._failures.items()}
        known = {name for name, _ in (*states, *noted, *failed)}
        idle = {(name, ""): (UNAVAILABLE, "not loaded") for name in self._repository.names() if name not in known}
        every = {**idle, **failed, **noted, **states}
        keys = sorted(every, key=lambda key: (key[0], version_order(key[1])))
        found = [ModelState(*key, state, without_paths(reason)) for key in keys for state, reason in [every[key]]]
        return [each for each in found if each.state == READY] if ready_only else found

    def _of(self, service: Service) -> tuple[str, str]:
        key = service.name, service.version
        failure = self._failures.get(key, "")
        if service.ready:
            return READY, f"the last load failed, the one before goes on: {failure}" if failure else ""
        under_way = self._under_way.get(key) or ("LOADING" if service.not_ready_reason in LOADING else UNAVAILABLE)
        return under_way, service.not_ready_reason

    def _tell(self) -> None:
        self._registry.loading = {name for (name, _), state in self._under_way.items() if state == "LOADING"}


def without_paths(text: str) -> str:
    """Return `text` with the last name alone of every absolute path in it: anybody may ask for the index."""
    return _PATH.sub("", text)


SHARE = "share"


class MakeService(Protocol):
    """Makes services; see making.make_service, whose observers it knows."""

    def __call__(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        """Return a service that has not been started. Called in a thread."""


class Manager:
    """Runs the services of `registry`, which only it changes from the start on.

    `repository` knows what else can be loaded, and is read anew for every load; `make` makes a service of what it
    returns. `allow_files`: load calls may bring code and files. Changes are made one after the other, in the order in which they were
    requested; each caller gets the result of its own.
    """

    def __init__(
        self, registry: Registry, repository: Repository, make: MakeService, *, allow_files: bool = False
    ) -> None:
        self.registry = registry
        self._repository = repository
        self._make = make
        self._allow_files = allow_files
        self._changes = ChangeQueue()
        self._states = ModelStates(registry, repository)
        self._endpoints = WorkerEndpoints()

    # The life of the whole.

    async def start(self) -> None:
        """Start all models that the registry has, and the steps of its chains, at the same time; return when all are ready.

        When one fails, the others are stopped and its error is raised.
        """
        await self._changes.make(self._start)

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Make no more changes, drain and stop all models; see Service.stop. Idempotent."""
        await self._changes.close()
        await self.registry.stop(drain_timeout)

    async def drain(self, drain_timeout: float | None = None) -> None:
        """Make no more changes and accept no more requests; return when all accepted ones have ended, or after the timeout.
        The workers stay."""
        await self._changes.close()
        await self.registry.drain(drain_timeout)

    # What runs, and what could be loaded.

    def index(self, ready_only: bool = False) -> list[ModelState]:
        """Return the state of every model that runs or could be loaded, by name and version."""
        return self._states.index(ready_only)

    def hardware(self) -> list[Hardware]:
        """Return the CPUs and GPUs of this machine."""
        return find_hardware()

    # Models: the repository extension of the Open Inference Protocol.

    async def load_model(
        self, name: str, *, version: str = "", config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None, parameters: Mapping[str, Parameter] | None = None,
    ) -> None:  # fmt: skip
        """Read a model anew and run it; what ran under its name has been replaced when this returns, and has answered all that
        it had accepted. While it loads the old one serves, and goes on if it fails.

        `version` loads that one alone, beside those that run. The steps of a chain that do not run are loaded first, and stay.
        `config` goes before what the model's own file says, `files`
        (VERSION/PATH) are its files instead of its own, and `parameters`, those of `load_worker`, go before both. Raises ModelNotFound, InvalidRequest for what cannot be served,
        ModelError when it does not load, Conflict when it lacks a version that a chain names, Forbidden for files if they are
        not allowed; Overloaded, Draining.
        """
        if files and not self._allow_files:
            raise Forbidden(
                f"model {name!r}: files may come with a load call only if the server allows them (--allow-model-files)"
            )
        check_allowed(config or {}, self._allow_files, "target")
        check_allowed(parameters or {}, self._allow_files)
        await self._changes.make(lambda: self._load_model(name, version, config, files, parameters or {}))

    async def unload_model(self, name: str, *, version: str = "", unload_dependents: bool = False) -> None:
        """Accept no more requests for a model, finish the accepted ones, and end it; with `version` that version alone.

        It is no error if the model does not run. Raises ModelNotFound for an unknown name.
        Chains of which it is a step are unloaded first with `unload_dependents`; without, Conflict is raised and nothing is ended.
        """
        await self._changes.make(lambda: self._unload_model(name, version, unload_dependents))

    # Workers: the AMD Inference Server's.

    async def load_worker(self, name: str, parameters: Mapping[str, Parameter]) -> str:
        """Run a model with these parameters, and return the name of its endpoint.

        Where it runs with the same parameters already that endpoint is returned; with `share` False it gets one more worker.
        Otherwise a new endpoint is made: `name`, or while that is taken `name-1` and so on. Parameters are arguments of the
        model's constructor, settings, and those of AMD's (loading.py). Raises InvalidRequest naming the parameter, and what
        `load_model` raises.
        """
        check_allowed(parameters, self._allow_files)
        own = dict(parameters)
        share = own.pop(SHARE, True)
        if not isinstance(share, bool):
            raise InvalidRequest(f"parameter {SHARE}={share!r}: must be true or false")
        return await self._changes.make(lambda: self._load_worker(name, own, share))

    async def unload_worker(self, endpoint: str) -> None:
        """Let one worker of `endpoint` finish what it has, and end it; with the last one the endpoint goes. Raises
        ModelNotFound."""
        await self._changes.make(lambda: self._unload_worker(endpoint))

    # How it is done, one at a time.

    async def _start(self) -> None:
        while wanted := await self._missing(self.registry.all):
            for name in wanted:
                reading = await self._read(name, "", None, None)
                services = [await import_in_thread(partial(self._make, model)) for model in reading.versions]
                self.registry.join(services)
                self._put(name, services, reading.default, reading.versions)
        await self.registry.start()

    async def _missing(self, services: Sequence[Service]) -> list[str]:
        """Return the steps of `services` that do not run and could be loaded."""
        names = missing(services, self.registry.services)
        return [name for name in names if name in await asyncio.to_thread(self._repository.names)]

    async def _load_model(
        self, name: str, version: str, config: Mapping[str, Any] | None, files: Mapping[str, bytes] | None,
        parameters: Mapping[str, Parameter],
    ) -> None:  # fmt: skip
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
        logger.info("model %r: loaded, %d versions run", name, len(services))

    async def _check_chains(
        self, name: str, new: Sequence[Service], kept: Mapping[str, Service], default: str | None
    ) -> None:
        """See that the chains that run can have `new` and `kept` for a step, the versions of `name` that are about to be found.
        Stops the new ones if not."""
        versions = {**kept, **{service.version: service for service in new}}
        asked = default if default in versions else max(versions, key=version_order)

        def find(model: str, version: str) -> Service:
            if model == name and (version or asked) in versions:
                return versions[version or asked]
            return self.registry.get(model, version)

        try:
            for chain in dependents(name, self.registry.all):
                chain.check(find)
        except SettingsError as error:
            await asyncio.gather(*[service.stop(0.0) for service in new])
            self._states.failed(name, new[0].version, error.message)
            raise _failed(name, error) from error

    async def _unload_model(self, name: str, version: str, unload_dependents: bool) -> None:
        running = self._running(name)
        if not running and name not in await asyncio.to_thread(self._repository.names):
            self.registry.get(name, version)  # which raises, naming those that there are
        ending = {key: service for key, service in running.items() if not version or key == version}
        if version and running and not ending:
            self.registry.get(name, version)
        if unload_dependents:
            for chain in self._dependents(name, ending):
                await self._unload_model(chain, "", True)
        self._check_dependents(name, ending)
        with self._states.during(name, ending, "UNLOADING"):
            await asyncio.gather(*[service.stop() for service in ending.values()])
        self._keep(name, [service for key, service in running.items() if key not in ending])
        self._states.forget(name, ending)

    def _dependents(self, name: str, ending: Collection[str]) -> list[str]:
        """Return the chains of which `name` is a step that would not be there without the versions `ending`."""
        versions = ending if self._running(name).keys() - ending else None
        return sorted({chain.name for chain in dependents(name, self.registry.all, versions)}) if ending else []

    def _check_dependents(self, name: str, ending: Collection[str]) -> None:
        if chains := self._dependents(name, ending):
            raise Conflict(
                f"model {name!r} is a step of {', '.join(map(repr, chains))}: unload that first, or with it (unload_dependents)"
            )

    async def _load_worker(self, name: str, parameters: dict[str, Parameter], share: bool) -> str:
        found = self._endpoints.of(name, parameters, self.registry.services)
        if found is not None:
            if not share:
                await self.registry.get(found).add_worker()
                self._endpoints.resized(found, 1)
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
        if service.workers.workers > 1:
            await service.remove_worker()
            self._endpoints.resized(endpoint, -1)
        else:
            await self._unload_model(endpoint, "", False)

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
        """Return services of all `models`, running. When one fails the others are stopped and its error is raised."""
        services: list[Service] = []
        name, versions = models[0].name, [model.version for model in models]
        try:
            with self._states.during(name, versions, "LOADING"):
                for model in models:
                    self.registry.check_claim(name, model.routes)
                for model in models:
                    services.append(await import_in_thread(partial(self._make, model, parameters, fresh=True)))
                self.registry.join(services)
                await self._load_steps(services)
                await asyncio.gather(*[service.start() for service in services])
        except BaseException as error:
            await asyncio.gather(*[service.stop(0.0) for service in services])
            if isinstance(error, WeirError):
                for version in versions:
                    self._states.failed(name, version, error.message)
                raise _failed(name, error) from error
            raise
        return services

    async def _give_workers(self, name: str, reading: ModelReading, new: Sequence[Service]) -> None:
        """Give the default version as many more workers as calls had added to the one before it."""
        highest = _version(reading, None).version
        asked = highest if reading.default is None else reading.default
        try:
            for service in new:
                for _ in range(self._endpoints.added(name) if service.version == asked else 0):
                    await service.add_worker()
        except BaseException as error:
            await asyncio.gather(*[service.stop(0.0) for service in new])
            if isinstance(error, WeirError):
                self._states.failed(name, asked, error.message)
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
    ) -> list[Generation]:
        """Let `services` be those of `name`. One of a version that runs gives its generation to the service that is registered; a version
        that is not among them passes what still comes to it on to the default one. Return the generations that are to be stopped."""
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

    async def _retire(self, former: Sequence[Generation]) -> None:
        """Have generations that were replaced finish what they had accepted, and end them."""
        ends = await asyncio.gather(*[generation.stop() for generation in former], return_exceptions=True)
        for generation, end in zip(former, ends, strict=True):
            if isinstance(end, Exception):
                logger.error("model %r: the one that was replaced did not end well", generation.label, exc_info=end)


def _version(reading: ModelReading, version: str | None) -> ModelToServe:
    """Return that version, or (None) the highest."""
    if version is None:
        return max(reading.versions, key=lambda model: version_order(model.version))
    for model in reading.versions:
        if model.version == version:
            return model
    there = ", ".join(model.version for model in reading.versions if model.version) or "none"
    raise ModelNotFound(
        f"model {reading.versions[0].name!r}: there is no version {version!r} to load; there are {there}"
    )


def _failed(name: str, error: WeirError) -> WeirError:
    """Return the error for the caller of a load that failed with `error`."""
    message = f"failed to load {name!r}: {error.message}"
    if isinstance(error, SettingsError):
        return InvalidRequest(message, details=error.details)
    error.message = message
    error.args = (message,)
    return error
