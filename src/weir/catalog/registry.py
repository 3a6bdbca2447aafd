"""The models of one server, by name, version and path."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from weir.catalog.chains import chain_of, waves
from weir.errors import ModelNotFound, ModelNotReady, SettingsError
from weir.serving.service import Service

# What the paths of Weir's own pages begin with on every server. A model's route must begin with none of these segments.
RESERVED = ("dashboard", "docs", "health", "infer", "metrics", "models", "openapi.json", "v2")


PLAIN = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_DIGITS = re.compile(r"(\d+)")


class Registry:
    """Owns the services of a server: finds one by name and version or by route, starts and stops them together.

    `services` are the models by name, each in its default version; `routes` are those of them that have paths of their own,
    by path. Both are new dicts after a change, so a loop over them may be interrupted by a change. `changed` are called after
    every change. `loading` are models that are being loaded and do not run yet.

    `routes` maps a model's name to one path or several of its own, `defaults` to the version that is asked for when none is
    named (without it: the highest). Raises SettingsError for a name and version given twice,
    a route of a model that is not there, a route that two models claim, and a reserved path.
    """

    def __init__(
        self, services: Sequence[Service], routes: Mapping[str, str | Sequence[str]] | None = None,
        defaults: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.services: dict[str, Service] = {}
        self.routes: dict[str, Service] = {}
        self.changed: list[Callable[[], None]] = []
        self.loading: set[str] = set()
        self.ending = False  # the server accepts no more requests; models may still finish accepted ones
        self._versions: dict[str, dict[str, Service]] = {}
        self._default: dict[str, str] = dict(defaults or {})  # versions that were named as such
        self._reserved = set(RESERVED)
        self._paths: dict[str, str] = {}  # to the names of models, which need not be there all the time
        for service in services:
            versions = self._versions.setdefault(service.name, {})
            if service.version in versions:
                raise SettingsError(f"name={service.label!r}: two models have this name; give one of them another")
            versions[service.version] = service
        for name, paths in (routes or {}).items():
            if name not in self._versions:
                raise SettingsError(
                    f"route={paths!r}: there is no model {name!r}; there are {', '.join(self._versions)}"
                )
            self.claim(name, paths)
        self._renew()
        self.join(services)

    # Models by name.

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
        """Whether every model takes requests."""
        return not self.ending and all(service.ready for service in self.all)

    @property
    def not_ready_reasons(self) -> dict[str, str]:
        """Why each model that takes no requests does not, by label."""
        reasons = {service.label: service.not_ready_reason for service in self.all}
        return {label: reason or "draining" for label, reason in reasons.items() if reason or self.ending}

    def get(self, name: str, version: str = "") -> Service:
        """Return the service of that name and version; without a version, the default one. Raises ModelNotFound, which names
        those there are, or ModelNotReady while it is being loaded."""
        service = self._versions.get(name, {}).get(version) if version else self.services.get(name)
        if service is not None:
            return service
        if name in self.services:
            there = ", ".join(filter(None, self._versions[name])) or "no versions"
            raise ModelNotFound(f"model {name!r}: there is no version {version!r}; there are {there}")
        if name in self.loading:
            raise ModelNotReady(f"model {name!r} is not ready: loading")
        raise ModelNotFound(f"model {name!r}: there is none of this name; there are {', '.join(self.services)}")

    def default_of(self, name: str) -> str | None:
        """Return the version of that name that was named as the default; None if that is the highest."""
        return self._default.get(name)

    def versions(self, name: str) -> dict[str, Service]:
        """Return the services of that name by version, the oldest first. Raises ModelNotFound."""
        self.get(name)
        return dict(sorted(self._versions[name].items(), key=lambda each: version_order(each[0])))

    def state(self) -> dict[str, Any]:
        """Return the state of every model, by label, as a JSON-able dict."""
        return {service.label: service.state() for service in self.all}

    # The life of all of them.

    async def start(self) -> None:
        """Start all models at the same time; return when all are ready.

        When one fails, the others are stopped and its error is raised.
        """
        starts = [asyncio.ensure_future(service.start()) for service in self.all]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            # A start is not interrupted in the middle but ended by stop, which the executors are made for.
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop(0.0)
            raise

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Drain and stop all models at the same time, chains before their steps; see Service.stop. Idempotent."""
        for wave in waves(self.all):
            await asyncio.gather(*[service.stop(drain_timeout) for service in wave])

    async def drain(self, drain_timeout: float | None = None) -> None:
        """Accept no more requests; return when all accepted ones have ended, or after the timeout. Workers stay."""
        for wave in waves(self.all):
            await asyncio.gather(*[service.drain(drain_timeout) for service in wave])

    # Changes: the Manager's alone.

    def join(self, services: Iterable[Service]) -> None:
        """Have the chains among `services` find their steps here."""
        for service in services:
            if (chain := chain_of(service)) is not None:
                chain.find = self.get

    def put(self, services: Iterable[Service], default: str | None = None) -> None:
        """Let these services, all of one name, be those of that name from now on, and no others. `default` names the version
        that is asked for when none is named; without it that is the highest."""
        there = {service.version: service for service in services}
        name = next(iter(there.values())).name
        self._versions[name] = there
        self._default.pop(name, None)
        if default is not None:
            self._default[name] = default
        self._changed()

    def remove(self, name: str) -> None:
        """Serve no model of this name any more."""
        self._versions.pop(name, None)
        self._changed()

    def claim(self, name: str, paths: str | Sequence[str]) -> None:
        """Let these paths lead to the model `name`, whenever it is there. Raises SettingsError; see the class."""
        self._paths = self.check_claim(name, paths)

    def check_claim(self, name: str, paths: str | Sequence[str]) -> dict[str, str]:
        """Raise what `claim` would; return all paths as they would be then."""
        found = dict(self._paths)
        for path in [paths] if isinstance(paths, str) else paths:
            check_route(path, self._reserved)
            claimed = found.setdefault(path, name)
            if claimed != name:
                raise SettingsError(
                    f"route={path!r}: both {claimed!r} and {name!r} claim it; a path leads to one model"
                )
        for path in found:
            if path.removesuffix("/batch") in found.keys() - {path}:
                raise SettingsError(f"route={path!r}: is where the route {path.removesuffix('/batch')!r} takes lists")
        return found

    def reserve(self, segments: Iterable[str]) -> None:
        """Keep paths that begin with one of these segments for pages of the server. Raises SettingsError for a route that
        begins so already."""
        self._reserved.update(segments)
        for path in self._paths:
            check_route(path, self._reserved)

    def _changed(self) -> None:
        self._renew()
        for changed in self.changed:
            changed()

    def _renew(self) -> None:
        self.services = {
            name: versions.get(self._default.get(name, ""), versions[max(versions, key=version_order)])
            for name, versions in self._versions.items()
        }  # fmt: skip
        self.routes = {path: self.services[name] for path, name in self._paths.items() if name in self.services}


def version_order(version: str) -> list[tuple[int, str]]:
    """Return what versions are sorted by: 2 comes before 10, 1.9 before 1.10, and words before numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(version) if part]


def check_route(path: str, reserved: Collection[str] = RESERVED) -> None:
    """Raise SettingsError unless `path` can be a model's own: it begins with none of the segments in `reserved`."""
    if not path.startswith("/") or len(path) < 2 or path.endswith("/") or not PLAIN.fullmatch(path) or "/." in path:
        raise SettingsError(
            f"route={path!r}: must be like /name or /some/name, of letters, digits and . _ ~ - (no segment begins with a dot)"
        )
    first = path.split("/")[1]
    if first in reserved:
        raise SettingsError(f"route={path!r}: /{first} is reserved for Weir's own pages; choose another")


@asynccontextmanager
async def running(registry: Registry, drain_timeout: float | None = None) -> AsyncIterator[Registry]:
    """Start all models before the block and drain and stop them after it, also when it raises.

    Raises what Registry.start raises; nothing is left running then.
    """
    await registry.start()
    try:
        yield registry
    finally:
        await registry.stop(drain_timeout)
