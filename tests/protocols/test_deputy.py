"""Who answers for a model in place of its line: what the doors make of it."""

import asyncio
import gzip
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import Receive, Scope

from weir.catalog.registry import Registry
from weir.errors import ModelNotReady
from weir.model import Model, Tensor
from weir.protocols.deputy import Deputy
from weir.protocols.native import RequestHead
from weir.protocols.response import HttpResponse
from weir.protocols.rest import make_app
from weir.protocols.server import HttpServer
from weir.protocols.settings import HttpSettings
from weir.serving.service import Service
from weir.wire.inference import InferenceRequest, InferenceResponse, TensorValue


class Echo(Model):
    """Is never asked."""

    def predict(self, batch: list[Any]) -> list[Any]:
        raise AssertionError("the line was asked")


class Counting:
    """Answers with the number of bytes, or of elements."""

    inputs = (Tensor("bytes", "UINT8", (-1,)),)
    outputs = (Tensor("count", "INT64", (-1,)),)

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def infer(
        self, service: Service, request: InferenceRequest, *, door: str, within: float | None, trace: Any
    ) -> InferenceResponse:
        """Count elements."""
        if self.error is not None:
            raise self.error
        count = np.array([request.inputs[0].array.size], np.int64)
        return InferenceResponse(service.name, [TensorValue("count", "INT64", count)])

    async def answer(
        self, ask: RequestHead, body: bytes, scope: Scope, receive: Receive, trace: Any
    ) -> HttpResponse | None:
        """Count bytes."""
        if self.error is not None:
            raise self.error
        return HttpResponse(200, [], b"%d" % len(body))


def asked(deputy: Deputy, path: str, **sent: Any) -> httpx.Response:
    """Ask a server whose model `echo` has this deputy."""

    async def main() -> httpx.Response:
        service = Service(Echo, executor="inline")
        service.deputy = deputy
        registry, settings = Registry([service]), HttpSettings(port=0, max_body_size=1000)
        server = HttpServer(registry, make_app(registry, settings), settings)
        await server.start()
        try:
            async with service, httpx.AsyncClient(base_url=server.address) as client:
                return await client.request("POST" if sent else "GET", path, **sent)
        finally:
            await server.stop()

    return asyncio.run(main())


@pytest.mark.parametrize("path", ["/infer/echo", "/infer/echo/batch", "/inference"])
def test_the_native_door_asks_it(path: str) -> None:
    answer = asked(Counting(), path, content=b"[1, 2]", headers={"X-Request-Id": "7"})
    assert (answer.text, answer.headers["x-request-id"]) == ("6", "7")
    packed = asked(Counting(), path, content=gzip.compress(b"[1, 2]"), headers={"Content-Encoding": "gzip"})
    assert packed.text == "6"


def test_a_body_that_cannot_be_read_does_not_reach_it() -> None:
    empty = asked(Counting(), "/infer/echo", content=gzip.compress(b""), headers={"Content-Encoding": "gzip"})
    assert empty.status_code == 400 and "body: is empty" in empty.text
    broken = asked(Counting(), "/infer/echo", content=b"no gzip", headers={"Content-Encoding": "gzip"})
    assert broken.status_code == 400 and "gzip" in broken.text


def test_what_it_raises_is_an_answer() -> None:
    deputy = Counting()
    deputy.error = ZeroDivisionError("secret")
    failed = asked(deputy, "/infer/echo", content=b"1")
    assert failed.status_code == 500 and "internal error" in failed.text and "secret" not in failed.text
    deputy.error = ModelNotReady("not yet")
    tensors = {"inputs": [{"name": "bytes", "datatype": "UINT8", "shape": [2], "data": [1, 2]}]}
    refused = asked(deputy, "/v2/models/echo/infer", json=tensors)
    assert refused.status_code == 503 and "not yet" in refused.text
    deputy.error = None
    assert asked(deputy, "/v2/models/echo/infer", json=tensors).json()["outputs"][0]["data"] == [2]


def test_metadata_are_its_own() -> None:
    described = asked(Counting(), "/v2/models/echo").json()
    assert [each["name"] for each in described["inputs"] + described["outputs"]] == ["bytes", "count"]
