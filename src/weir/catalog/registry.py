"""The models of one server, by name, version and path."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from weir.catalog.chains import chain_of, stop_order
from weir.errors import ModelNotReady, SettingsError, WeirError, unknown_model, unread_model
from weir.messages import label_of, parts_of
from weir.serving.service import Service
from weir.workers.timer import end_tasks

_ROUTE = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_DIGITS = re.compile(r"(\d+)")


class Registry:
    """Owns the services of a server: finds one by name and version or by route, and starts and stops all of them.

    Arguments:
        services: the models; several may have one name and different versions.
        routes: maps a model's name to its own path or paths.
        defaults: maps a model's name to the version that serves requests which name no version. Without an entry, the
            highest version does.
        aliases: maps a further name to the model's name. A model's own name goes before a further name of another.

    Attributes:
        services: the default version of each model, by name.
        routes: the services that have paths of their own, by path. Each change makes new dicts of both, so a loop over
            one of them may go on across a change.
        changed: functions that are called after every change.
        loading: names of models that are being loaded.
        aliases: as given. The models need not be loaded.

    Raises SettingsError for a name and version given twice, a route of an unknown model, a route that two models claim,
    and a reserved path.
    """

    def __init__(
        self,
        services: Sequence[Service],
        routes: Mapping[str, str | Sequence[str]] | None = None,
        defaults: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.aliases = aliases
        self.services: dict[str, Service] = {}
        self.routes: dict[str, Service] = {}
        self.changed: list[Callable[[], None]] = []
        self.loading: set[str] = set()
        # Models that are read when they are needed for the first time, and what reads one of them: the Manager's.
        self.on_demand: Mapping[str, str] = {}
        self.read: Callable[[str], Awaitable[None]] | None = None
        self.ending = False  # the server accepts no more requests; models may still finish accepted ones
        self._versions: dict[str, dict[str, Service]] = {}
        self._default: dict[str, str] = dict(defaults or {})  # default versions that were set explicitly
        self._leaving: dict[str, Collection[str]] = {}  # versions that are about to be stopped
        self._reserved = set[str]()  # first segments of paths that the server has itself
        self._paths: dict[str, str] = {}  # the name of a model by path; the model need not be loaded
        for service in services:
            self.check_label(service.name, service.version)
            versions = self._versions.setdefault(service.name, {})
            if service.version in versions:
                raise SettingsError(f"name={service.label!r}: two models have this name; rename one of them")
            versions[service.version] = service
        for name, paths in (routes or {}).items():
            if name not in self._versions:
                raise SettingsError(f"route={paths!r}: unknown model {name!r}; available: {', '.join(self._versions)}")
            self.claim(name, paths)
        self._renew()
        self.join(services)

    @property
    def sole(self) -> Service | None:
        """The service, if there is exactly one."""
        return next(iter(self.services.values())) if len(self.services) == 1 else None

    @property
    def all(self) -> list[Service]:
        """Every service, of all versions."""
        return [service for versions in self._versions.values() for service in versions.values()]

    @property
    def ready(self) -> bool:
        """Whether every model takes requests, or would but for a load that failed when one came."""
        return not self.not_ready_reasons and not self.ending

    @property
    def not_ready_reasons(self) -> dict[str, str]:
        """The reason why a model takes no requests, by label, for each such model."""
        needed = [service for service in self.all if not service.generation.failed_on_demand]
        reasons = {service.label: service.not_ready_reason for service in needed}
        return {label: reason or "draining" for label, reason in reasons.items() if reason or self.ending}

    def get(self, name: str, version: str = "") -> Service:
        """Return the service of that name and version; without a version, the default one, or that with this label.

        Raises ModelNotFound, which names the models or versions that exist, or ModelNotReady while the model is loading.
        """
        if not version and (service := self.services.get(name)) is not None:
            return service  # nearly always
        name = self.name_of(name)
        if (service := self._find(name, version)) is not None:
            return service
        if name in self.services:
            raise unknown_model(name, filter(None, self._versions[name]), version)
        if name in self.loading:
            raise ModelNotReady(f"model {name!r} is not ready: loading")
        if name in self.on_demand and self.read is not None:
            raise unread_model(name, partial(self.read, name))
        raise unknown_model(name, (*self.services, *self.on_demand))

    def _find(self, name: str, version: str) -> Service | None:
        if not version:
            if (default := self.services.get(name)) is not None:
                return default
            name, version = parts_of(name)
        return self._versions[name].get(version) if version and name in self.services else None

    def name_of(self, name: str) -> str:
        """Return the own name of the model that answers to `name`; `name` if there is none."""
        return name if name in self._versions or name in self.loading else self.aliases.get(name, name)

    def knows(self, name: str) -> bool:
        """Return whether a model that runs or is being loaded answers to `name`."""
        own = self.name_of(name)
        return own in self._versions or own in self.loading

    def default_of(self, name: str) -> str | None:
        """Return the version that was set as the default of that name; None if the highest version is the default."""
        return self._default.get(name)

    def versions(self, name: str) -> dict[str, Service]:
        """Return the services of that name by version, the lowest version first. Raises ModelNotFound."""
        name = self.get(name).name
        return dict(sorted(self._versions[name].items(), key=lambda each: version_order(each[0])))

    def state(self) -> dict[str, Any]:
        """Return the state of every model, by label, as a JSON-able dict."""
        return {service.label: service.state() for service in self.all}

    async def start(self, services: "Sequence[Service] | None" = None) -> None:
        """Start all models, or only `services`, at the same time; return when all are ready.

        When one fails, all models are stopped and its error is raised, which names the model if there are several.
        """
        starting = self.all if services is None else services
        starts = [asyncio.ensure_future(self._start(service)) for service in starting]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            # Executors are made to be stopped while they start; `stop` below cleans up what a cancelled start has left.
            await end_tasks(*starts)
            await self.stop(0.0)
            raise

    async def _start(self, service: Service) -> None:
        try:
            await service.start()
        except WeirError as error:
            labels = [each.label for each in self.all]
            names = any(error.message.startswith(f"{label}: ") or repr(label) in error.message for label in labels)
            if len(labels) > 1 and not names:  # of models that share workers, the error is that of one
                error.message = f"{service.label}: {error.message}"
                error.args = (error.message,)
            raise

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Drain and stop all models: chains first, then their steps. See Service.stop. Idempotent."""
        await self._end_all(drain_timeout, lambda service, seconds: service.stop(seconds))

    async def drain(self, drain_timeout: float | None = None) -> None:
        """Accept no more requests; return when all accepted ones have ended, or after `drain_timeout` seconds. The workers
        keep running."""
        await self._end_all(drain_timeout, lambda service, seconds: service.drain(seconds))

    async def _end_all(self, limit: float | None, end: Callable[[Service, float], Awaitable[None]]) -> None:
        """Await `end` of chains first, then of their steps, which have as many seconds as these have left."""
        limits = {each: each.facts.settings.drain_timeout if limit is None else limit for each in self.all}
        ends = {each: each.now() + seconds for each, seconds in limits.items()}
        for group in stop_order(list(ends)):
            await asyncio.gather(*[end(each, max(0.0, ends[each] - each.now())) for each in group])

    # Changes. Only the Manager makes them once the server runs.

    def join(self, services: Iterable[Service]) -> None:
        """Let the chains among `services` look their steps up in this registry."""
        for service in services:
            if (chain := chain_of(service)) is not None:
                chain.find = self.get

    def put(self, services: Iterable[Service], default: str | None = None) -> None:
        """Replace all services of one name by `services`, which all have that name. `default` is the version for requests
        that name none; without it, the highest version is."""
        versions = {service.version: service for service in services}
        name = next(iter(versions.values())).name
        self._versions[name] = versions
        self._leaving.pop(name, None)
        self._default.pop(name, None)
        if default is not None:
            self._default[name] = default
        self._changed()

    def remove(self, name: str) -> None:
        """Forget all services of this name."""
        self._versions.pop(name, None)
        self._leaving.pop(name, None)
        self._changed()

    def leave(self, name: str, versions: Collection[str]) -> None:
        """Let requests that name no version go to others than `versions`, which are about to be stopped, if there are others. If
        there are none, and the model is on demand, requests wait as for one that has not been read."""
        self._leaving[name] = versions
        self._changed()

    def check_label(self, name: str, version: str) -> None:
        """Raise SettingsError if another name is that of this version: a name may have slashes."""
        label = label_of(name, version)
        for other, versions in self._versions.items():
            if other != name and any(service.label == label for service in versions.values()):
                raise SettingsError(f"name={label!r}: a version of {min(name, other)!r} is called so; choose another")

    def claim(self, name: str, paths: str | Sequence[str]) -> None:
        """Route these paths to the model `name` whenever it is loaded. Raises SettingsError, as the class says, and changes
        nothing then."""
        self._paths = self.check_claim(name, paths)

    def check_claim(self, name: str, paths: str | Sequence[str]) -> dict[str, str]:
        """Return the paths that would be routed after `claim`, and change nothing. Raises what `claim` raises."""
        found = dict(self._paths)
        for path in [paths] if isinstance(paths, str) else paths:
            check_route(path, self._reserved)
            claimed = found.setdefault(path, name)
            if claimed != name:
                rule = f"route={path!r}: both {claimed!r} and {name!r} claim it; a path leads to one model"
                raise SettingsError(rule)
        for path in found:
            if path.removesuffix("/batch") in found.keys() - {path}:
                raise SettingsError(f"route={path!r}: is where the route {path.removesuffix('/batch')!r} takes lists")
        return found

    def reserve(self, segments: Iterable[str]) -> None:
        """Reserve paths that begin with one of these segments for the server. Raises SettingsError if a model's route
        already begins with one."""
        self._reserved.update(segments)
        for path in self._paths:
            check_route(path, self._reserved)

    def _changed(self) -> None:
        self._renew()
        for changed in self.changed:
            changed()

    def _renew(self) -> None:
        self.services = {}
        for name, every in self._versions.items():
            versions = {each: every[each] for each in every if each not in self._leaving.get(name, ())}
            if versions := versions or ({} if name in self.on_demand else every):
                highest = versions[max(versions, key=version_order)]
                self.services[name] = versions.get(self._default.get(name, ""), highest)
        self.routes = {path: self.services[name] for path, name in self._paths.items() if name in self.services}


def version_order(version: str) -> list[tuple[int, str]]:
    """Return the sort key of a version: 2 comes before 10, 1.9 before 1.10, and words before numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(version) if part]


def check_route(path: str, reserved: Collection[str]) -> None:
    """Raise SettingsError unless `path` is well formed and does not begin with one of the segments in `reserved`."""
    if not _ROUTE.fullmatch(path) or "/." in path:
        raise SettingsError(
            f"route={path!r}: must be like /name or /some/name, of letters, digits and . _ ~ - (no segment begins with a dot)"
        )
    first = path.split("/")[1]
    if first in reserved:
        raise SettingsError(f"route={path!r}: /{first} is reserved for Weir's own pages; choose another")


@asynccontextmanager
async def running(registry: Registry, drain_timeout: float | None = None) -> AsyncIterator[Registry]:
    """Start all models before the block; drain and stop them after it, even if it raises.

    Raises what Registry.start raises; all models are stopped then.
    """
    await registry.start()
    try:
        yield registry
    finally:
        await registry.stop(drain_timeout)
