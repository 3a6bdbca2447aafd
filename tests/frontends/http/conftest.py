"""The server that the tests of the Open Inference Protocol ask, for the routes of it that stand here; and one of this folder's models."""

from collections.abc import Iterator

import pytest
from tests.frontends.http.models import MODELS
from tests.frontends.http.servers import SERVERS, Running, running
from tests.protocols.kserve.conftest import address, client, server

from weir.catalog.registry import Registry
from weir.protocols import HttpSettings
from weir.serving.service import Service

__all__ = ["address", "client", "server"]


@pytest.fixture(scope="session", params=SERVERS)
def all_models(request: pytest.FixtureRequest) -> Iterator[Running]:
    """All models in this process, through each frontend in turn; they must still answer when the tests are over."""
    registry = Registry([Service(model, executor="inline") for model in MODELS])
    with running(request.param, registry, HttpSettings(port=0)) as server:
        yield server
        assert server.client.post("/infer/echo", json="alive").json() == "alive"
