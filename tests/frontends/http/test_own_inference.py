"""A model whose requests are answered in a way of its own, and not by its queue: what the protocols make of it."""

import asyncio
import gzip
import json
from typing import Any

import httpx
import numpy as np
import pytest

from weir.catalog.registry import Registry
from weir.errors import InvalidRequest, ModelNotReady
from weir.frontends.http.application import make_app
from weir.frontends.http.server import HttpServer
from weir.model import Model, Tensor
from weir.protocols import HttpSettings
from weir.protocols.entries import ItemHead, entries_of
from weir.protocols.exchange import Exchange, Inference, ItemsResponse
from weir.protocols.kserve import KserveContext
from weir.serving.handle import ModelHandle
from weir.serving.service import Service
from weir.wire.inference import InferenceRequest, InferenceResponse, RequestedOutput, TensorValue


class Echo(Model):
    """Is never asked."""

    def predict(self, batch: list[Any]) -> list[Any]:
        raise AssertionError("the line was asked")


class Counting:
    """Answers with the number of bytes, or of elements."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def queues_items(self, service: ModelHandle) -> bool:
        """Never."""
        return False

    def queues_tensors(self, service: ModelHandle) -> bool:
        """Never."""
        return False

    def inputs(self, service: ModelHandle) -> tuple[Tensor, ...]:
        """Take bytes."""
        return (Tensor("bytes", "UINT8", (-1,)),)

    def outputs(self, service: ModelHandle) -> tuple[Tensor, ...]:
        """Return a number."""
        return (Tensor("count", "INT64", (-1,)),)

    async def infer(self, exchange: Exchange, request: InferenceRequest) -> InferenceResponse:
        """Count elements."""
        if self.error is not None:
            raise self.error
        count = np.array([request.inputs[0].array.size], np.int64)
        return InferenceResponse(exchange.service.facts.name, [TensorValue("count", "INT64", count)])

    async def infer_items(self, exchange: Exchange, head: ItemHead, body: bytes) -> ItemsResponse:
        """Count bytes."""
        if self.error is not None:
            raise self.error
        read = await exchange.read(len(body), lambda: check(body))
        return ItemsResponse(0, lambda: [b"%d" % len(read)])


def check(body: bytes) -> bytes:
    """Refuse an empty body."""
    if not body:
        raise InvalidRequest("body: is empty")
    return body


class Whole(Model):
    """Declares no tensors and returns those that it gets; answers how many requests were in the batch."""

    takes_requests = True

    def predict(self, batch: list[Any]) -> list[Any]:
        parameters = {"batch": len(batch)}
        return [{"outputs": item["inputs"], "parameters": {**item["parameters"], **parameters}} for item in batch]


def answer_of(inference: Inference | None, path: str, model: type[Model] = Echo, **sent: Any) -> httpx.Response:
    """Return the response of a server whose `model` is answered by `inference`."""

    async def main() -> httpx.Response:
        service = Service(model, executor="inline")
        service.inference = inference
        registry, settings = Registry([service]), HttpSettings(port=0, max_body_size=1000)
        context = KserveContext(registry, settings)
        server = HttpServer(context, make_app(context))
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


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_of_whole_requests_gets_any_tensors_with_their_parameters(packed: bool) -> None:
    tensors = [
        {"name": "q", "datatype": "BYTES", "shape": [1], "data": ["a"], "parameters": {"content_type": "str"}},
        {"name": "n", "datatype": "INT64", "shape": [2, 1], "data": [1, 2]},
    ]
    sent = {"id": "r1", "parameters": {"colour": "red", "timeout": 9_000_000}, "inputs": tensors}
    body = json.dumps(sent).encode()
    content, headers = (gzip.compress(body), {"Content-Encoding": "gzip"}) if packed else (body, {})

    answer = answer_of(None, "/v2/models/whole/infer", Whole, content=content, headers=headers).json()

    assert (answer["id"], answer["parameters"]) == ("r1", {"colour": "red", "batch": 1})
    assert answer["outputs"] == tensors


@pytest.mark.parametrize("path", ["/infer/whole", "/infer/whole/batch", "/inference"])
def test_a_model_of_whole_requests_takes_no_items(path: str) -> None:
    refused = answer_of(None, path, Whole, content=b"[1]")
    assert (
        refused.status_code == 501
        and "declares no inputs, so it takes requests at /v2/models/whole/infer only" in refused.text
    )


def test_a_model_of_whole_requests_lists_no_tensors() -> None:
    described = answer_of(None, "/v2/models/whole", Whole).json()
    assert (described["inputs"], described["outputs"]) == ([], [])


def test_only_whole_requests_that_are_alike_share_a_batch() -> None:
    def request(shape: tuple[int, ...], *outputs: RequestedOutput, **parameters: Any) -> InferenceRequest:
        value = TensorValue("x", "FP32", np.zeros(shape, np.float32))
        return InferenceRequest("whole", [value], outputs=list(outputs) or None, parameters=parameters)

    service = Service(Whole, executor="inline")
    alike = [entries_of(service, request((rows, 3), colour="red"))[0].key for rows in (1, 2)]
    others = [
        request((1, 4)),
        request((1, 3)),
        request((1, 3), colour="blue"),
        request((1, 3), RequestedOutput("y", {})),
    ]

    keys = {alike[0], *(entries_of(service, other)[0].key for other in others)}
    assert alike[0] == alike[1] and len(keys) == 5
