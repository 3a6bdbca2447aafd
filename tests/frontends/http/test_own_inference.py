"""A model whose requests are answered in a way of its own, and not by its queue: what the protocols make of it."""

import asyncio
import gzip
from typing import Any

import httpx
import numpy as np
import pytest

from weir.catalog.registry import Registry
from weir.errors import InvalidRequest, ModelNotReady
from weir.frontends.http.application import make_app
from weir.frontends.http.server import HttpServer
from weir.model import Model, Tensor
from weir.protocols.settings import HttpSettings
from weir.serving.handle import ModelHandle
from weir.serving.inference import Inference, InferenceCall, ItemHead, ItemsResponse
from weir.serving.service import Service
from weir.wire.inference import InferenceRequest, InferenceResponse, TensorValue


class Echo(Model):
    """Is never asked."""

    def predict(self, batch: list[Any]) -> list[Any]:
        raise AssertionError("the line was asked")


class Counting:
    """Answers with the number of bytes, or of elements."""

    queues_items = False

    def __init__(self) -> None:
        self.error: Exception | None = None

    def queues_tensors(self, service: ModelHandle) -> bool:
        """Never."""
        return False

    def inputs(self, service: ModelHandle) -> tuple[Tensor, ...]:
        """Take bytes."""
        return (Tensor("bytes", "UINT8", (-1,)),)

    def outputs(self, service: ModelHandle) -> tuple[Tensor, ...]:
        """Return a number."""
        return (Tensor("count", "INT64", (-1,)),)

    async def infer(self, service: ModelHandle, request: InferenceRequest, call: InferenceCall) -> InferenceResponse:
        """Count elements."""
        if self.error is not None:
            raise self.error
        count = np.array([request.inputs[0].array.size], np.int64)
        return InferenceResponse(service.facts.name, [TensorValue("count", "INT64", count)])

    async def infer_items(self, head: ItemHead, body: bytes, call: InferenceCall) -> ItemsResponse:
        """Count bytes."""
        if self.error is not None:
            raise self.error
        read = await call.read(len(body), lambda: check(body))
        return ItemsResponse(0, lambda: [b"%d" % len(read)])


def check(body: bytes) -> bytes:
    """Refuse an empty body."""
    if not body:
        raise InvalidRequest("body: is empty")
    return body


def answer_of(inference: Inference, path: str, **sent: Any) -> httpx.Response:
    """Ask a server whose model `echo` is answered by this."""

    async def main() -> httpx.Response:
        service = Service(Echo, executor="inline")
        service.inference = inference
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
def test_the_native_protocol_uses_it(path: str) -> None:
    answer = answer_of(Counting(), path, content=b"[1, 2]", headers={"X-Request-Id": "7"})
    expected = '[{"output":6}]' if path.endswith("/batch") else "6"
    assert (answer.text, answer.headers["x-request-id"]) == (expected, "7")
    packed = answer_of(Counting(), path, content=gzip.compress(b"[1, 2]"), headers={"Content-Encoding": "gzip"})
    assert packed.text == expected


def test_a_body_that_cannot_be_read_does_not_reach_it() -> None:
    empty = answer_of(Counting(), "/infer/echo", content=gzip.compress(b""), headers={"Content-Encoding": "gzip"})
    assert empty.status_code == 400 and "body: is empty" in empty.text
    broken = answer_of(Counting(), "/infer/echo", content=b"no gzip", headers={"Content-Encoding": "gzip"})
    assert broken.status_code == 400 and "gzip" in broken.text


def test_what_it_raises_is_an_answer() -> None:
    own = Counting()
    own.error = ZeroDivisionError("secret")
    failed = answer_of(own, "/infer/echo", content=b"1")
    assert failed.status_code == 500 and "internal error" in failed.text and "secret" not in failed.text
    own.error = ModelNotReady("not yet")
    tensors = {"inputs": [{"name": "bytes", "datatype": "UINT8", "shape": [2], "data": [1, 2]}]}
    refused = answer_of(own, "/v2/models/echo/infer", json=tensors)
    assert refused.status_code == 503 and "not yet" in refused.text
    own.error = None
    assert answer_of(own, "/v2/models/echo/infer", json=tensors).json()["outputs"][0]["data"] == [2]


def test_metadata_are_its_own() -> None:
    described = answer_of(Counting(), "/v2/models/echo").json()
    assert [each["name"] for each in described["inputs"] + described["outputs"]] == ["bytes", "count"]
