"""The models of one server, by name and by path."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from weir.errors import ModelNotFound, SettingsError
from weir.manager.service import Service

# Paths that belong to Weir's own doors. A model's route must not begin with one of these segments.
RESERVED = ("docs", "health", "infer", "inference", "metrics", "models", "openapi.json", "v1", "v2")


PLAIN = re.compile(r"(/[A-Za-z0-9._~-]+)+")


class Registry:
    """Owns the services of a server: finds one by name or route, starts and stops them together.

    `routes` maps a model's name to one path or several of its own. Raises SettingsError for a name given twice, a route of a
    model that is not there, a route that two models claim, and a reserved path.
    """

    def __init__(self, services: Sequence[Service], routes: Mapping[str, str | Sequence[str]] | None = None) -> None:
        self.services: dict[str, Service] = {}
        for service in services:
            if service.name in self.services:
                raise SettingsError(f"name={service.name!r}: two models have this name; give one of them another")
            self.services[service.name] = service
        self.routes: dict[str, Service] = {}
        for name, paths in (routes or {}).items():
            for path in [paths] if isinstance(paths, str) else paths:
                self._add_route(name, path)
        for path in self.routes:
            if path.removesuffix("/batch") in self.routes.keys() - {path}:
                raise SettingsError(f"route={path!r}: is where the route {path.removesuffix('/batch')!r} takes lists")

    @property
    def sole(self) -> Service | None:
        """The service, if there is exactly one."""
        return next(iter(self.services.values())) if len(self.services) == 1 else None

    @property
    def ready(self) -> bool:
        """Whether every model takes requests."""
        return bool(self.services) and all(service.ready for service in self.services.values())

    @property
    def not_ready_reasons(self) -> dict[str, str]:
        """Why each model that takes no requests does not, by name."""
        return {name: service.not_ready_reason for name, service in self.services.items() if not service.ready}

    def get(self, name: str) -> Service:
        """Return the service of that name. Raises ModelNotFound, which names those there are."""
        service = self.services.get(name)
        if service is None:
            raise ModelNotFound(f"model {name!r}: there is none of this name; there are {', '.join(self.services)}")
        return service

    async def start(self) -> None:
        """Start all models at the same time; return when all are ready.

        When one fails, the others are stopped and its error is raised.
        """
        starts = [asyncio.ensure_future(service.start()) for service in self.services.values()]
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
        """Drain and stop all models at the same time; see Service.stop. Idempotent."""
        await asyncio.gather(*[service.stop(drain_timeout) for service in self.services.values()])

    async def drain(self, drain_timeout: float | None = None) -> None:
        """Take no more; return when all that was accepted has its end, or after the timeout. Workers stay."""
        await asyncio.gather(*[service.drain(drain_timeout) for service in self.services.values()])

    def state(self) -> dict[str, Any]:
        """Return the state of every model, by name, as a JSON-able dict."""
        return {name: service.state() for name, service in self.services.items()}

    def _add_route(self, name: str, path: str) -> None:
        service = self.services.get(name)
        if service is None:
            raise SettingsError(f"route={path!r}: there is no model {name!r}; there are {', '.join(self.services)}")
        check_route(path)
        claimed = self.routes.setdefault(path, service)
        if claimed is not service:
            raise SettingsError(
                f"route={path!r}: both {claimed.name!r} and {name!r} claim it; a path leads to one model"
            )


def check_route(path: str) -> None:
    """Raise SettingsError unless `path` can be a model's own."""
    if not path.startswith("/") or len(path) < 2 or path.endswith("/") or not PLAIN.fullmatch(path) or "/." in path:
        raise SettingsError(
            f"route={path!r}: must be like /name or /some/name, of letters, digits and . _ ~ - (no segment begins with a dot)"
        )
    first = path.split("/")[1]
    if first in RESERVED:
        raise SettingsError(f"route={path!r}: /{first} is reserved for Weir's own pages; choose another")
