"""How every model is: those that run, those that are being loaded or unloaded, and those that could be."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from weir.manager.registry import Registry, version_order
from weir.manager.service import Service
from weir.manager.spec import Repository

_PATH = re.compile(r"(?<![\w.~:/-])/(?:[^/\s'\":,;()]+/)+(?=[^/\s'\":,;()])")

READY, UNAVAILABLE = "READY", "UNAVAILABLE"
LOADING = ("loading", "not started")


class ModelState(NamedTuple):
    """One model in one version ("": it has none). `state` is READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str
    state: str
    reason: str


class States:
    """Notes what the registry and the repository do not know: what is under way, and why the last load failed."""

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
