"""The frontends and the loops that the tests of HTTP go through: the same tests run through each."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.frontends.http.servers import SERVERS, Running, Serve, running
from tests.frontends.http.sockets import LOOPS, LoopFactory

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
def loop_factory(request: pytest.FixtureRequest) -> LoopFactory:
    """Run tests that are coroutines in each kind of loop."""
    return LOOPS[request.param]
