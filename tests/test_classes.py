"""X-Weir-Class, the metadata, the parameter and the clients' arguments: each makes bulk work of a request to a real server."""

import re
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy
import pytest
from tests.client.kit import REMOTE, Running, asking, serving

from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_grpc import write_request


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def bulk_rows(server: Running, model: str) -> int:
    """Return how many rows of bulk work the model was given."""
    page = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf'weir_bulk_rows_total{{model="{model}"[^}}]*}} (\S+)', page)
    return 0 if found is None else int(float(found[1]))


def test_the_header_says_it_in_our_own_protocol(server: Running) -> None:
    before = bulk_rows(server, "moody")
    answers = [
        httpx.post(f"{server.url}/infer/moody", json=1, headers={"X-Weir-Class": stated, **more})
        for stated, more in (("bulk", {}), ("Bulk", {"X-Request-Priority": "7"}), ("interactive", {}))
    ]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert bulk_rows(server, "moody") == before + 2
    wrong = httpx.post(f"{server.url}/infer/moody", json=1, headers={"X-Weir-Class": "urgent"})
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (
        400, "X-Weir-Class 'urgent': must be interactive or bulk",
    )  # fmt: skip


def test_the_header_and_the_parameter_say_it_in_the_open_inference_protocol(server: Running) -> None:
    before = bulk_rows(server, "scale")
    tensor: dict[str, Any] = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}
    path = f"{server.url}/v2/models/scale/infer"
    metadata = httpx.get(f"{server.url}/v2/models/scale").json()["inputs"][0]
    tensor |= {"name": metadata["name"], "datatype": metadata["datatype"]}
    rows = tensor["shape"][0]
    first = httpx.post(path, json={"inputs": [tensor]}, headers={"X-Weir-Class": "bulk"})
    second = httpx.post(path, json={"inputs": [tensor], "parameters": {"class": "bulk"}})
    third = httpx.post(path, json={"inputs": [tensor]})
    assert [answer.status_code for answer in (first, second, third)] == [200] * 3, first.text
    assert bulk_rows(server, "scale") == before + 2 * rows
    wrong = httpx.post(path, json={"inputs": [tensor], "parameters": {"class": 3}})
    assert wrong.status_code == 400
    assert "parameter 'class' 3: must be interactive or bulk" in wrong.text


def test_the_metadata_say_it_over_grpc(server: Running) -> None:
    metadata = httpx.get(f"{server.url}/v2/models/scale").json()["inputs"][0]
    value = TensorValue(metadata["name"], metadata["datatype"], numpy.ones((2, 2), numpy.float32))
    body = write_request(InferenceRequest("scale", [value]))
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", bytes, bytes)
        before = bulk_rows(server, "scale")
        for _ in range(3):  # the server learns the form of requests that come again
            call(body)
        call(body, metadata=(("x-weir-class", "bulk"),))
        assert bulk_rows(server, "scale") == before + 2
        with pytest.raises(grpc.RpcError) as raised:
            call(body, metadata=(("x-weir-class", "urgent"),))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "x-weir-class 'urgent': must be interactive or bulk" in str(raised.value.details())


@pytest.mark.parametrize("name", REMOTE)
def test_the_clients_have_an_argument(server: Running, name: str) -> None:
    before = bulk_rows(server, "moody")
    with asking(name, server) as client:
        client.infer("moody", 3, bulk=True)
        client.infer("moody", 3)
    assert bulk_rows(server, "moody") == before + 1
