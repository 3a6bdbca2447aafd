"""A Manager whose repository and services are the test's: nothing is imported, and workers are fakes."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from tests.serving.kit import Square

from weir import Conflict, ModelNotFound, Service
from weir.catalog.loading import apply
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.sources import ModelReading, ModelToServe, Parameters
from weir.errors import SettingsError
from weir.testing import FakeExecutor
from weir.workers.executor import Listener


class Scaled(Square):
    def __init__(self, factor: int = 1, tag: str = "") -> None:
        self.factor = factor


class SlowExecutor(FakeExecutor):
    """Starts when its workshop says so."""

    def __init__(self, shop: "Workshop", text: str) -> None:
        super().__init__(lambda batch: [text for _ in batch], start_error=shop.fails)
        self._shop = shop

    async def start(self, listener: Listener) -> None:
        if self._shop.gate is not None:
            self._shop.starting.set()
            await self._shop.gate.wait()
        await super().start(listener)

    async def add_worker(self) -> None:
        if self._shop.adding_fails:
            raise Conflict("no room")
        await super().add_worker()


class Shelf:
    """A repository in memory: the texts of the versions of each model; a text "broken" cannot be read."""

    def __init__(self, **models: dict[str, str]) -> None:
        self.models: dict[str, dict[str, str]] = dict(models)
        self.default: dict[str, str] = {}
        self.asked: list[tuple[Any, Any]] = []

    def names(self) -> list[str]:
        return list(self.models)

    def has(self, name: str) -> bool:
        return name in self.models

    def read(
        self, name: str, config: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> ModelReading:
        self.asked.append((config, files))
        if name not in self.models:
            raise ModelNotFound(f"model {name!r}: there is none to load")
        if "broken" in self.models[name].values():
            raise SettingsError(f"{name}: cannot be read")
        versions = [
            ModelToServe("shelf:Square", name, {"tag": text}, [], {}, version)
            for version, text in self.models[name].items()
        ]
        return ModelReading(versions, self.default.get(name))


class Workshop:
    """Makes services that answer with their text; `fails` and `gate` decide how their workers start."""

    def __init__(self, **models: dict[str, str]) -> None:
        self.shelf = Shelf(**models)
        self.registry = Registry([])
        self.made: list[Service] = []
        self.executors: list[FakeExecutor] = []
        self.fails: Exception | None = None
        self.adding_fails = False
        self.gate: asyncio.Event | None = None
        self.starting = asyncio.Event()
        self.threads: set[int] = set()
        self.manager = Manager(self.registry, self.shelf, self.make, allow_files=True)

    def make(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        self.threads.add(threading.get_ident())
        model = apply(parameters or {}, model, Scaled)
        text = str(model.params["tag"])
        executor = SlowExecutor(self, text)
        service = Service(
            Scaled, name=model.name, version=model.version, params=model.params, executor=executor, **model.settings
        )
        self.made.append(service)
        self.executors.append(executor)
        return service

    async def ask(self, name: str, version: str = "") -> str:
        """Return the text of the model that answers."""
        answer: str = await self.registry.get(name, version).infer(0)
        return answer

    async def states(self) -> dict[str, str]:
        """Return the index in short."""
        return {f"{each.name}/{each.version}".rstrip("/"): each.state for each in await self.manager.index()}
