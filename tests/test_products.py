"""A product in a server: its routes, frontends and counts are there, and its parts are called in order."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from weir.app import App
from weir.errors import SettingsError
from weir.frontends.frontend import Frontend, FrontendContext
from weir.frontends.grpc.services import NO_CALLS, AddedCalls
from weir.frontends.http.application import AddedEndpoints
from weir.frontends.http.asgi import HttpEndpoint, answered
from weir.frontends.http.fast.plan import RouteHandler
from weir.messages import Observer
from weir.serving.handle import Models
from weir.settings import read_settings
from weir.telemetry.recorder import SilentObserver

TARGET = "tests.served_models:Square"


class Ladder:
    """A frontend that notes what is asked of it."""

    address = "ladder:"

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    async def start(self) -> None:
        self._heard.append("frontend start")

    def refuse(self) -> None:
        self._heard.append("frontend refuse")

    async def drain(self, drain_timeout: float | None = None) -> bool:
        self._heard.append("frontend drain")
        return True

    async def stop(self) -> None:
        self._heard.append("frontend stop")


class Count(Collector):
    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily("weir_shelves", "Shelves.", labels=["model"])
        gauge.add_metric(("square",), 3)
        yield gauge


class Shop:
    """A product that greets."""

    def __init__(self, wrong: str = "") -> None:
        self.heard: list[str] = []
        self.registry: Models | None = None
        self.unready: tuple[bool, dict[str, str]] | None = None
        self._wrong = wrong

    def observers(self) -> Sequence[Observer]:
        return [SilentObserver()]

    def added(self, context: FrontendContext) -> AddedEndpoints:
        self.registry = context.registry

        async def greet(request: Request) -> PlainTextResponse:
            return PlainTextResponse(f"welcome to {', '.join(context.registry.services)}")

        described = {"operationId": "greet", "summary": "Greet", "responses": {}}
        return AddedEndpoints([HttpEndpoint("GET", "/welcome", answered(greet), described)])

    def in_fronts(self) -> None:
        return None

    def grpc_calls(self, context: FrontendContext, most: int) -> AddedCalls:
        return NO_CALLS

    def fast_routes(self, context: FrontendContext) -> Sequence[RouteHandler]:
        return []

    def frontends(self, context: FrontendContext) -> Sequence[Frontend]:
        return [Ladder(self.heard)]

    def to_try(self, curl: str, url: str) -> Sequence[str]:
        return [f"{curl} {url}/welcome"]

    def collectors(self) -> Sequence[Collector]:
        return [Count()]

    def clients(self) -> Sequence[Mapping[str, Any]]:
        return [{"client": "somebody", "requests": 3}]

    async def start(self) -> None:
        self.heard.append("start")
        if self._wrong:
            raise SettingsError(self._wrong)

    async def drain(self) -> bool:
        self.heard.append("drain")
        assert self.registry is not None
        self.unready = (self.registry.ready, self.registry.not_ready_reasons)
        return True

    async def stop(self) -> None:
        self.heard.append("stop")


def make(shop: Shop) -> App:
    return App(read_settings([TARGET], {"port": ["0"], "executor": ["inline"]}, {}), product=shop)


async def test_its_routes_metrics_and_description_are_those_of_the_server() -> None:
    shop = Shop()
    app = make(shop)
    ready = asyncio.Event()
    running = asyncio.ensure_future(app.run(ready.set, signals=False))
    await ready.wait()
    async with httpx.AsyncClient(base_url=app.server.address) as client:
        paths = ("/welcome", "/metrics", "/openapi.json", "/")
        welcome, metrics, described, index = [await client.get(path) for path in paths]
    app.end()
    await running
    assert welcome.text == "welcome to square"
    assert 'weir_shelves{model="square"} 3.0' in metrics.text
    assert described.json()["paths"]["/welcome"]["get"]["operationId"] == "greet"
    assert index.json()["pages"]["/welcome"] == "Greet"
    ended = ["frontend refuse", "drain", "frontend drain", "frontend stop", "stop"]
    assert shop.heard == ["frontend start", "start", *ended]
    assert shop.unready == (False, {"square": "draining"})


def test_one_that_cannot_begin_ends_the_start() -> None:
    shop = Shop("shelves='': must be there")
    with pytest.raises(SettingsError, match="shelves"):
        asyncio.run(make(shop).run(signals=False))
    assert shop.heard == ["frontend start", "start", "frontend stop", "stop"]
