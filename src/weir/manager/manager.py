"""One owner of all that runs: every load and unload of a server goes through here, one after the other.

Two kinds of load. `load_model` reads a model anew and puts it in the place of the one that runs, without a gap. `load_worker` is
the AMD Inference Server's: the same parameters join the running endpoint, others make a new one, `name-1` and so on.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from weir.errors import Conflict, Forbidden, InvalidRequest, ModelNotFound, SettingsError, WeirError
from weir.manager.chains.order import dependents, missing
from weir.manager.changes import Changes
from weir.manager.delivery import logger
from weir.manager.endpoints import Endpoints
from weir.manager.hardware import Hardware, find_hardware
from weir.manager.import_in_thread import import_in_thread
from weir.manager.parameters import check_allowed
from weir.manager.registry import Registry, version_order
from weir.manager.service import Service
from weir.manager.spec import ModelReading, ModelToServe, Parameter, Parameters, Repository
from weir.manager.states import ModelState, States

SHARE = "share"


class Make(Protocol):
    """Makes services; see making.make_service, whose observers it knows."""

    def __call__(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        """Return a service that has not been started. Called in a thread."""


class Manager:
    """Runs the services of `registry`, which only it changes from the start on.

    `repository` knows what else can be loaded, and is asked for it anew with every load; `make` makes a service of what it
    says. `allow_files`: load calls may bring code and files. While a change is being made those that are asked for wait, in
    order; each caller hears what came of his own.
    """

    def __init__(self, registry: Registry, repository: Repository, make: Make, *, allow_files: bool = False) -> None:
        self.registry = registry
        self._repository = repository
        self._make = make
        self._allow_files = allow_files
        self._changes = Changes()
        self._states = States(registry, repository)
        self._endpoints = Endpoints()

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
        """Make no more changes and take no more requests; return when all that was accepted has its end, or after the timeout.
        The workers stay."""
        await self._changes.close()
        await self.registry.drain(drain_timeout)

    # What there is.

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
        """Take no more requests for a model, finish what was accepted, and end it; with `version` that one alone.

        One that does not run is none to end: that is no error. Raises ModelNotFound for a name that nothing is known of.
        Chains of which it is a step are unloaded first with `unload_dependents`; without, Conflict is raised and nothing is ended.
        """
        await self._changes.make(lambda: self._unload_model(name, version, unload_dependents))

    # Workers: the AMD Inference Server's.

    async def load_worker(self, name: str, parameters: Mapping[str, Parameter]) -> str:
        """Run a model with these parameters, and return the endpoint that it is asked under.

        Where it runs with the same parameters already that endpoint is returned; with `share` False it gets one more worker.
        Otherwise a new endpoint is made: `name`, or while that is taken `name-1` and so on. Parameters are arguments of the
        model's constructor, settings, and those of AMD's (parameters.py). Raises InvalidRequest naming the parameter, and what
        `load_model` raises.
        """
        check_allowed(parameters, self._allow_files)
        said = dict(parameters)
        share = said.pop(SHARE, True)
        if not isinstance(share, bool):
            raise InvalidRequest(f"parameter {SHARE}={share!r}: must be true or false")
        return await self._changes.make(lambda: self._load_worker(name, said, share))

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
        self._put(name, services, reading.default, reading.versions)
        await self._retire([service for key, service in running.items() if key not in kept])
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
        """Give the one that is to be asked for as many more workers as the one before it was given by calls."""
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

    def _put(self, name: str, services: Sequence[Service], default: str | None, models: Iterable[ModelToServe]) -> None:
        """Let `services` be those of `name`; what comes to those before goes to them from now on."""
        before = self._running(name)
        for model in models:
            self.registry.claim(name, model.routes)
        self.registry.put(services, default)
        after = self.registry.versions(name)
        for version, service in before.items():
            successor = after.get(version, self.registry.get(name))
            if successor is not service:
                service.replaced_by(successor)
        self._states.forget(name, after)

    def _keep(self, name: str, services: Sequence[Service]) -> None:
        if services:
            self.registry.put(services, self.registry.default_of(name))
        else:
            self.registry.remove(name)
            self._endpoints.remove(name)

    async def _retire(self, services: Sequence[Service]) -> None:
        """Have services that were replaced finish what they had accepted, and end them."""
        ends = await asyncio.gather(*[service.stop() for service in services], return_exceptions=True)
        for service, end in zip(services, ends, strict=True):
            if isinstance(end, Exception):
                logger.error("model %r: the one that was replaced did not end well", service.label, exc_info=end)


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
    """Return what the caller of a load hears of `error`."""
    message = f"failed to load {name!r}: {error.message}"
    if isinstance(error, SettingsError):
        return InvalidRequest(message, details=error.details)
    error.message = message
    error.args = (message,)
    return error
