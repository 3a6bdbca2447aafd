"""The doors that the tests of HTTP go through: the same tests run through each."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.protocols.doors import DOORS, Running, Serve, running

from weir.manager.registry import Registry
from weir.manager.service import Service
from weir.protocols.pages import RenderMetrics
from weir.protocols.settings import HttpSettings


@pytest.fixture(params=DOORS)
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Start servers through each door in turn."""
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
