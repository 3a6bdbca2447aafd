"""The protocol's streams over HTTP, with a real server process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.served import Served

from weir.wire.sse import EventParser

MODELS = Path(__file__).resolve().parents[2] / "streaming_models.py"
NAMES = ("Count", "Script", "Prefixes")


@pytest.fixture(scope="module")
def streaming() -> Iterator[httpx.Client]:
    """Speak to a server of streaming models."""
    with Served(*(f"{MODELS}:{name}" for name in NAMES)) as served:
        served.until_ready()
        with httpx.Client(base_url=served.url, timeout=60) as client:
            yield client


def item(value: Any) -> dict[str, Any]:
    return {"name": "input", "datatype": "BYTES", "shape": [1], "data": [json.dumps(value)]}


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return [(event.name, json.loads(event.data)) for event in EventParser().feed(response.content)]


def test_each_answer_is_a_response(streaming: httpx.Client) -> None:
    response = streaming.post("/v2/models/count/infer_stream", json={"id": "7", "inputs": [item(2)]})
    assert events(response) == [
        ("message", {
            "model_name": "count", "id": "7",
            "outputs": [{"name": "output", "datatype": "BYTES", "shape": [1], "data": [str(number)]}],
        })
        for number in (1, 2)
    ]  # fmt: skip
    rows = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
    body = {"inputs": [rows], "outputs": [{"name": "rows"}]}
    response = streaming.post("/v2/models/prefixes/infer_stream", json=body)
    assert [event["outputs"][0]["data"] for _, event in events(response)] == [[1], [2]]


def test_generate_gives_one_answer(streaming: httpx.Client, client: httpx.Client) -> None:
    answer = client.post("/v2/models/vector/generate", json={"x": [3, 4], "id": "7"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"model_name": "vector", "model_version": "", "id": "7", "sum": 7.0, "twice": [6.0, 8.0]}
    refused = client.post("/v2/models/vector/generate", json={"y": [3, 4]})
    assert (refused.status_code, list(refused.json())) == (400, ["error"])
    assert client.post("/v2/models/nobody/generate", json={}).status_code == 404
    assert client.get("/v2/models/vector/generate").status_code == 405
    assert streaming.post("/v2/models/count/generate", json={"input": "1"}).json()["output"] == "1"
    for count, what in (("3", "several responses"), ("0", "no response")):
        refused = streaming.post("/v2/models/count/generate", json={"input": count})
        assert (refused.status_code, refused.json()["error"]) == (
            501, f"model 'count' has given {what}, and this call has one: POST generate_stream",
        )  # fmt: skip


def test_generating_takes_and_gives_flat_objects(streaming: httpx.Client) -> None:
    response = streaming.post("/v2/models/prefixes/generate_stream", json={"x": [[1, 2], [3, 4]]})
    assert events(response) == [
        ("message", {"model_name": "prefixes", "model_version": "", "sum": [1, 2], "rows": 1}),
        ("message", {"model_name": "prefixes", "model_version": "", "sum": [4, 6], "rows": 2}),
    ]


def test_what_no_stream_is_begun_for(streaming: httpx.Client) -> None:
    path = "/v2/models/script/infer_stream"
    several = {"name": "input", "datatype": "BYTES", "shape": [2], "data": ["1", "2"]}
    assert streaming.post(path, json={"inputs": [several]}).json()["error"].endswith("a stream takes one")
    assert streaming.post(path, content=b"{").status_code == 400
    request = {"inputs": [item([])], "outputs": [{"name": "output", "parameters": {"shared_memory_region": "r"}}]}
    assert streaming.post(path, json=request).status_code == 501
    assert streaming.post("/v2/models/nobody/infer_stream", json={}).status_code == 404
    assert streaming.get(path).status_code == 405


def test_one_answer_is_refused_here_and_streams_of_one_are_fine(streaming: httpx.Client) -> None:
    assert streaming.post("/v2/models/count/infer", json={"inputs": [item(2)]}).status_code == 501
    config = streaming.get("/v2/models/count/config").json()
    assert config["model_transaction_policy"] == {"decoupled": True}


def test_shared_memory_is_off_unless_allowed(streaming: httpx.Client) -> None:
    answer = streaming.get("/v2/systemsharedmemory/status")
    assert answer.status_code == 403 and "--allow-shared-memory" in answer.json()["error"]
    assert "system_shared_memory" not in streaming.get("/v2").json()["extensions"]
