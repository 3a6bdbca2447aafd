"""The frontends and the loops that the tests of HTTP go through: the same tests run through each."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.frontends.http.servers import SERVERS, Running, Serve, running
from tests.frontends.http.sockets import LOOPS, Run

from weir.catalog.registry import Registry
from weir.frontends.http.application import RenderMetrics
from weir.protocols import HttpSettings
from weir.serving.service import Service


@pytest.fixture(params=SERVERS)
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Start servers through each frontend in turn."""
    with ExitStack() as stack:

        def start(
            *services: Service,
            routes: dict[str, str] | None = None,
            metrics: RenderMetrics | None = None,
            **settings: Any,
        ) -> Running:
            registry, http = Registry(services, routes), HttpSettings(port=0, **settings)
            return stack.enter_context(running(request.param, registry, http, metrics))

        yield start


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run a test in each kind of loop."""

    def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(test())

    yield in_loop
