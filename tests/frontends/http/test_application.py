"""What an application knows of its own paths: which take requests for inference, and which no model may have."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import pytest
from tests.frontends.http.models import Echo
from tests.rings import subcases

import weir
from weir import Registry, Service
from weir.errors import SettingsError
from weir.frontends.http.application import InferencePaths, inference_protocols
from weir.frontends.http.asgi import HttpEndpoint, answered
from weir.protocols import HttpSettings
from weir.protocols.kserve import V1, KserveContext
from weir.testing import FakeExecutor


class Counting(weir.Model):
    """Streams numbers."""

    streaming = True

    def predict(self, batch: list[Any]) -> Iterator[list[Any]]:
        yield [0 for _ in batch]


SERVICES = [Service(model, executor=FakeExecutor()) for model in (Echo, Counting)]
EMBED = HttpEndpoint("POST", "/embed", answered(AsyncMock()), infers=True)
PATHS = InferencePaths(
    inference_protocols(KserveContext(Registry(SERVICES, {"echo": "/own"}), HttpSettings())), [EMBED]
)


@subcases(
    "path",
    [
        "/own", "/embed", "/infer/echo", "/infer/echo/batch", "/v2/models/echo/infer", "/v2/models/echo/generate",
        "/infer/later", "/v2/models/later/versions/2/infer", "/infer/owner/later",
    ],
)  # fmt: skip
def test_an_inference_path_is_one_that_a_protocol_or_a_product_takes(path: str) -> None:
    assert path in PATHS


@subcases(
    "path",
    [
        "/other", "/v1/embeddings", "/predict_tokens", "/metrics", "/v2/repository/models/m/load", "/v1/batches", "/infer/a?b",
        "http://x/infer/echo", "", "/infer/counting", "/v2/models/counting/infer", "/v2/models/echo/generate_stream",
    ],
)  # fmt: skip
def test_an_inference_path_is_no_page_no_stream_and_not_of_another_server(path: str) -> None:
    assert path not in PATHS


@pytest.mark.parametrize("jobs", [False, True])
def test_a_route_cannot_hide_a_path_of_the_server(tmp_path_factory: pytest.TempPathFactory, jobs: bool) -> None:
    settings: dict[str, Any] = {"batch_dir": str(tmp_path_factory.mktemp("jobs"))} if jobs else {}
    app: Any = weir.asgi(Service(Echo, executor=FakeExecutor()), **settings)
    paths = [getattr(route, "path", "/") for route in app.routes]
    first = {path.split("/")[1] for path in paths if not path.startswith((V1, "/{"))} | {"infer", "v2"}
    assert first >= {"ping", "api-doc", "docs", "health", "metrics", "openapi.json"}
    assert ("v1" in first) is jobs
    for segment in first - {""}:
        for path in (f"/{segment}", f"/{segment}/mine"):
            with pytest.raises(SettingsError, match=rf"route='{path}': /{segment} is reserved"):
                weir.asgi(Service(Echo, executor=FakeExecutor()), routes={"echo": path}, **settings)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/inference", "/inference/mine"])
def test_a_route_may_be_what_no_page_is_served_at(path: str) -> None:
    weir.asgi(Service(Echo, executor=FakeExecutor()), routes={"echo": path})
