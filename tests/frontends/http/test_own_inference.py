"""A model whose requests are answered in a way of its own, and not by its queue: what the protocols make of it."""

import gzip
import json
from typing import Any

import httpx
import numpy as np
from tests.rings import subcases

from weir.catalog.registry import Registry
from weir.errors import InvalidRequest, ModelNotReady
from weir.frontends.http.application import make_app
from weir.frontends.http.server import HttpServer
from weir.messages import Form
from weir.model import Model, Tensor
from weir.protocols import HttpSettings
from weir.protocols.entries import ItemHead, entries_of
from weir.protocols.exchange import Ended, Exchange, Inference, ItemsResponse, Stop, begin_task
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

    def begin(self, exchange: Exchange, request: InferenceRequest, ended: Ended[InferenceResponse]) -> Stop:
        """Count elements."""
        return begin_task(self.infer(exchange, request), ended)

    async def infer(self, exchange: Exchange, request: InferenceRequest) -> InferenceResponse:
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


async def answer_of(inference: Inference | None, path: str, model: type[Model] = Echo, **sent: Any) -> httpx.Response:
    """Return the response of a server whose `model` is answered by `inference`."""
    service = Service(model, executor="inline")
    service.inference = inference
    context = KserveContext(Registry([service]), HttpSettings(port=0, max_body_size=1000))
    server = HttpServer(context, make_app(context))
    await server.start()
    try:
        async with service, httpx.AsyncClient(base_url=server.address) as client:
            return await client.request("POST" if sent else "GET", path, **sent)
    finally:
        await server.stop()


PACKED = {"Content-Encoding": "gzip"}


@subcases("path", ["/infer/echo", "/infer/echo/batch", "/inference"])
async def test_the_native_protocol_uses_it(path: str) -> None:
    answer = await answer_of(Counting(), path, content=b"[1, 2]", headers={"X-Request-Id": "7"})
    expected = '[{"output":6}]' if path.endswith("/batch") else "6"
    assert (answer.text, answer.headers["x-request-id"]) == (expected, "7")
    packed = await answer_of(Counting(), path, content=gzip.compress(b"[1, 2]"), headers=PACKED)
    assert packed.text == expected


async def test_a_body_that_cannot_be_read_does_not_reach_it() -> None:
    for content, says in ((gzip.compress(b""), "body: is empty"), (b"no gzip", "gzip")):
        answer = await answer_of(Counting(), "/infer/echo", content=content, headers=PACKED)
        assert answer.status_code == 400 and says in answer.text


async def test_what_it_raises_is_an_answer_and_its_metadata_are_its_own() -> None:
    own = Counting()
    own.error = ZeroDivisionError("secret")
    failed = await answer_of(own, "/infer/echo", content=b"1")
    assert failed.status_code == 500 and "internal error" in failed.text and "secret" not in failed.text
    own.error = ModelNotReady("not yet")
    tensors = {"inputs": [{"name": "bytes", "datatype": "UINT8", "shape": [2], "data": [1, 2]}]}
    refused = await answer_of(own, "/v2/models/echo/infer", json=tensors)
    assert refused.status_code == 503 and "not yet" in refused.text
    own.error = None
    assert (await answer_of(own, "/v2/models/echo/infer", json=tensors)).json()["outputs"][0]["data"] == [2]
    described = (await answer_of(own, "/v2/models/echo")).json()
    assert [each["name"] for each in described["inputs"] + described["outputs"]] == ["bytes", "count"]


async def test_a_model_of_whole_requests_gets_any_tensors_with_their_parameters() -> None:
    tensors = [
        {"name": "q", "datatype": "BYTES", "shape": [1], "data": ["a"], "parameters": {"content_type": "str"}},
        {"name": "n", "datatype": "INT64", "shape": [2, 1], "data": [1, 2]},
    ]
    body = json.dumps({"id": "r1", "parameters": {"colour": "red", "timeout": 9_000_000}, "inputs": tensors}).encode()
    for content, headers in ((body, {}), (gzip.compress(body), PACKED)):
        answer = await answer_of(None, "/v2/models/whole/infer", Whole, content=content, headers=headers)
        document = answer.json()
        assert (document["id"], document["parameters"]) == ("r1", {"colour": "red", "batch": 1})
        assert document["outputs"] == tensors


async def test_a_model_of_whole_requests_takes_no_items_and_lists_no_tensors() -> None:
    says = "declares no inputs, so it takes requests at /v2/models/whole/infer only"
    for path in ("/infer/whole", "/infer/whole/batch", "/inference"):
        refused = await answer_of(None, path, Whole, content=b"[1]")
        assert refused.status_code == 501 and says in refused.text
    described = (await answer_of(None, "/v2/models/whole", Whole)).json()
    assert (described["inputs"], described["outputs"]) == ([], [])


def test_only_whole_requests_that_are_alike_share_a_batch() -> None:
    def request(shape: tuple[int, ...], *outputs: RequestedOutput, **parameters: Any) -> InferenceRequest:
        value = TensorValue("x", "FP32", np.zeros(shape, np.float32))
        return InferenceRequest("whole", [value], outputs=list(outputs) or None, parameters=parameters)

    service = Service(Whole, executor="inline")
    alike = [entries_of(service, request((rows, 3), colour="red"), Form(1.0))[0].form.key for rows in (1, 2)]
    others = [
        request((1, 4)),
        request((1, 3)),
        request((1, 3), colour="blue"),
        request((1, 3), RequestedOutput("y", {})),
    ]

    keys = {alike[0], *(entries_of(service, other, Form(1.0))[0].form.key for other in others)}
    assert alike[0] == alike[1] and len(keys) == 5
