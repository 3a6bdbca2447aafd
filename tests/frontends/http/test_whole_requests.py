"""A model that takes whole requests: what the protocols make of it."""

from typing import Any

import numpy as np
from tests.frontends.http.servers import Serve

from weir.messages import Form
from weir.model import Model
from weir.protocols.entries import entries_of
from weir.serving.service import Service
from weir.wire.inference import InferenceRequest, RequestedOutput, TensorValue


class Whole(Model):
    """Declares no tensors and returns those that it gets; answers how many requests were in the batch."""

    takes_requests = True

    def predict(self, batch: list[Any]) -> list[Any]:
        parameters = {"batch": len(batch)}
        return [{"outputs": item["inputs"], "parameters": {**item["parameters"], **parameters}} for item in batch]


def test_a_model_of_whole_requests_gets_any_tensors_with_their_parameters(serve: Serve) -> None:
    tensors = [
        {"name": "q", "datatype": "BYTES", "shape": [1], "data": ["a"], "parameters": {"content_type": "str"}},
        {"name": "n", "datatype": "INT64", "shape": [2, 1], "data": [1, 2]},
    ]
    body = {"id": "r1", "parameters": {"colour": "red", "timeout": 9_000_000}, "inputs": tensors}
    document = serve(Service(Whole, executor="inline")).client.post("/v2/models/whole/infer", json=body).json()
    assert (document["id"], document["parameters"]) == ("r1", {"colour": "red", "batch": 1})
    assert document["outputs"] == tensors


def test_a_model_of_whole_requests_takes_no_items_and_lists_no_tensors(serve: Serve) -> None:
    client = serve(Service(Whole, executor="inline")).client
    for path in ("/infer/whole", "/infer/whole/batch", "/inference"):
        refused = client.post(path, content=b"[1]")
        assert refused.status_code == 501
        assert "declares no inputs, so it takes requests at /v2/models/whole/infer only" in refused.text
    described = client.get("/v2/models/whole").json()
    assert (described["inputs"], described["outputs"]) == ([], [])


def test_only_whole_requests_that_are_alike_share_a_batch() -> None:
    def request(shape: tuple[int, ...], *outputs: RequestedOutput, **parameters: Any) -> InferenceRequest:
        value = TensorValue("x", "FP32", np.zeros(shape, np.float32))
        return InferenceRequest("whole", [value], outputs=list(outputs) or None, parameters=parameters)

    service = Service(Whole, executor="inline")
    alike = [request((rows, 3), colour="red") for rows in (1, 2)]
    others = [
        request((1, 4)),
        request((1, 3)),
        request((1, 3), colour="blue"),
        request((1, 3), RequestedOutput("y", {})),
    ]
    first, second, *keys = [entries_of(service, each, Form(1.0))[0].form.key for each in (*alike, *others)]
    assert first == second and len({first, *keys}) == 5
