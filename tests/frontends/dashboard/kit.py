"""A server of fakes that counts, for the tests of the dashboard."""

import asyncio
from typing import Any, Self

from tests.fakes import FakeRequest
from tests.frontends.http.fast.kit import Square

from weir.catalog.registry import Registry
from weir.errors import WeirError
from weir.frontends.dashboard import ONLY_MODELS, DashboardSampler, Sections
from weir.serving.service import Service
from weir.telemetry.recorder import Metrics
from weir.testing import FakeExecutor


class Scene:
    """Services that are counted, a sampler of them, and the clock that it goes by."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.metrics = Metrics()
        self.now = 100.0
        self.services = [
            Service(Square, name=name, executor=FakeExecutor(list), observers=[self.metrics], **settings) for name in names
        ]  # fmt: skip
        self.registry = Registry(self.services)
        self.sampler = DashboardSampler(
            self.registry, self.metrics, clock=lambda: self.now, time_of_day=lambda: 1_000_000 + self.now
        )

    async def infer(self, name: str, *items: Any) -> None:
        """Ask the service of that name for each of `items` at once."""
        await asyncio.gather(*[self.registry.get(name).infer(item) for item in items])

    def end(self, model: str, frontend: str = "http", error: WeirError | None = None, times: int = 1) -> None:
        """Count so many requests that came by `frontend` and were answered, or ended with `error`."""
        self.metrics.own(model).answered(
            model, [FakeRequest(1, arrival=self.now, frontend=frontend)] * times, error, self.now
        )

    def present(self, sections: Sections = ONLY_MODELS) -> dict[str, Any]:
        """Return what there is now, with these sections."""
        _, present = DashboardSampler(self.registry, self.metrics, sections).sample()
        return present

    async def __aenter__(self) -> Self:
        await self.registry.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.registry.stop()
