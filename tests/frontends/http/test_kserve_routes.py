"""The routes of the protocol through each HTTP door, with executors that answer on command."""

import asyncio
import json
import zlib
from typing import Any

import httpx
import numpy as np
import pytest
from tests.frontends.http.doors import Serve, running
from tests.protocols.kserve.models import Vector

from weir.catalog.registry import Registry
from weir.errors import Conflict, ModelCrashed, ModelError, Overloaded, ValidationFailed, WeirError
from weir.frontends.http.application import make_app
from weir.model import Model
from weir.protocols.settings import HttpSettings
from weir.serving.service import Service
from weir.testing import FakeExecutor

INFER = "/v2/models/vector/infer"
BODY: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


class Echo(Model):
    """Items."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


def vector(**settings: Any) -> Service:
    """Return a service that runs in this process."""
    return Service(Vector, executor="inline", **settings)


def failing(error: WeirError) -> Service:
    """Return a service whose every answer is `error`."""
    return Service(Vector, executor=FakeExecutor(lambda batch: [error for _ in batch]))


def test_versions_in_paths(serve: Serve) -> None:
    server = serve(vector(version="1"), vector(version="2"))
    client = server.client
    assert client.get("/v2/models/vector").json()["versions"] == ["1", "2"]
    assert client.post(INFER, json=BODY).json()["model_version"] == "2"
    assert client.post("/v2/models/vector/versions/1/infer", json=BODY).json()["model_version"] == "1"
    for ending in ("", "/ready", "/config"):
        assert client.get(f"/v2/models/vector/versions/1{ending}").status_code == 200
        answer = client.get(f"/v2/models/vector/versions/3{ending}")
        assert answer.status_code == 404 and answer.json()["error"].startswith("Request for unknown model: 'vector'")


def test_a_name_may_be_quoted(serve: Serve) -> None:
    client = serve(vector(name="a~b")).client
    assert client.post("/v2/models/a%7Eb/infer", json=BODY).json()["model_name"] == "a~b"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("it broke"), 500), (ModelCrashed("it died"), 500), (ValidationFailed("refused"), 400),
        (Conflict("not so"), 400), (Overloaded("full", retry_after=2.0), 429),
    ],
)  # fmt: skip
def test_the_codes_of_errors(serve: Serve, error: WeirError, code: int) -> None:
    answer = serve(failing(error)).client.post(INFER, json=BODY, headers={"accept-encoding": "gzip"})
    assert (answer.status_code, answer.json()) == (code, {"error": error.message})
    assert answer.headers.get("retry-after") == ("2" if code == 429 else None)


def test_an_answer_that_is_none_of_ours_says_nothing_of_itself(serve: Serve) -> None:
    server = serve(Service(Vector, executor=FakeExecutor(lambda batch: [{} for _ in batch])))
    body = {**BODY, "parameters": {"binary_data_output": True}}
    answer = server.client.post(INFER, json=body)
    assert answer.status_code == 500 and list(answer.json()) == ["error"]


def test_a_document_that_the_model_refuses_names_its_place(serve: Serve) -> None:
    server = serve(Service(Echo, executor="inline"))
    body = {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [2], "data": ["1", "]"]}]}
    answer = server.client.post("/v2/models/echo/infer", json=body)
    assert answer.status_code == 400 and answer.json()["error"].startswith("tensor 'input'[1]: ")


def test_draining_is_said(serve: Serve) -> None:
    service = vector()
    server = serve(service)
    server.run(service.drain())
    for answer in (server.client.post(INFER, json=BODY), server.client.get("/v2/models/vector/ready")):
        assert answer.status_code == 503 and list(answer.json()) == ["error"] and "retry-after" in answer.headers


def test_loading_is_said() -> None:
    """Before its start a service is as it is while it loads."""

    async def main() -> None:
        registry = Registry([vector()])
        transport = httpx.ASGITransport(make_app(registry, HttpSettings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/v2/health/live")).json() == {"live": True}
            for path in ("/v2/health/ready", "/v2/models/vector/ready"):
                answer = await client.get(path)
                assert answer.status_code == 503 and "not ready" in answer.json()["error"]
            answer = await client.post(INFER, json=BODY)
            assert answer.status_code == 503 and "not ready" in answer.json()["error"]
            assert (await client.get("/v2/models/vector")).status_code == 200

    asyncio.run(main())


def test_a_raw_body_is_the_one_input(serve: Serve) -> None:
    client = serve(vector()).client
    raw = np.array([1, 2, 3], np.float32).tobytes()
    answer = client.post(INFER, content=raw, headers={"inference-header-content-length": "0"})
    length = int(answer.headers["inference-header-content-length"])
    header, rest = json.loads(answer.content[:length]), answer.content[length:]
    assert [output["parameters"] for output in header["outputs"]] == [{"binary_data_size": 4}, {"binary_data_size": 12}]
    assert np.frombuffer(rest, np.float32).tolist() == [6, 2, 4, 6]
    assert answer.headers["content-type"] == "application/octet-stream"


def test_what_is_compressed_and_what_not(serve: Serve) -> None:
    client = serve(vector(), compress_above=400).client
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 200], "data": [1] * 200}]}
    for coding in ("gzip", "deflate"):
        answer = client.post(INFER, json=body, headers={"accept-encoding": coding})
        assert answer.headers["content-encoding"] == coding and answer.json()["outputs"][0]["data"] == [200]
    # Triton's asyncio client asks for more than it can read.
    zstd = client.post(INFER, json=body, headers={"accept-encoding": "zstd"})
    small = client.post(INFER, json=BODY, headers={"accept-encoding": "gzip"})
    page = client.get("/v2/models/vector", headers={"accept-encoding": "gzip"})
    assert all("content-encoding" not in answer.headers for answer in (zstd, small, page))


def test_a_zlib_stream_without_a_header_is_read(serve: Serve) -> None:
    answer = serve(vector()).client.post(INFER, content=zlib.compress(json.dumps(BODY).encode()))
    assert answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [3]


def test_a_request_of_more_rows_than_a_batch_is_divided(serve: Serve) -> None:
    client = serve(vector(max_batch_size=4)).client
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [10, 1], "data": list(range(10))}]}
    assert client.post(INFER, json=body).json()["outputs"][0]["data"] == list(range(10))


def test_what_the_door_and_a_worker_decode_shares_a_batch(serve: Serve) -> None:
    executor = FakeExecutor()
    service = Service(Vector, executor=executor, policy="control-limit:2", max_queue_delay=60.0)
    server = serve(service)
    first = server.start(_post(server.url, BODY))
    server.until(lambda: service.state()["waiting"] == 1)
    second = server.start(_post(server.url, {**BODY, "parameters": {"binary_data_output": True}}))
    server.until(lambda: len(executor.batches) == 1)
    assert executor.sizes == [2]
    first.cancel()
    second.cancel()


async def _post(url: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url) as client:
        return await client.post(INFER, json=body)


def test_who_leaves_is_forgotten(serve: Serve) -> None:
    service = Service(Vector, executor=FakeExecutor(), policy="control-limit:8", max_queue_delay=60.0)
    server = serve(service)
    for body in (BODY, {**BODY, "parameters": {"binary_data_output": True}}):
        content = json.dumps(body).encode()
        with server.connect() as connection:
            head = f"POST {INFER} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            server.until(lambda: service.state()["waiting"] == 1)
        server.until(lambda: service.state()["waiting"] == 0)


def test_paths_that_belong_to_no_extension(serve: Serve) -> None:
    client = serve(vector()).client
    for method, path, code in (
        ("GET", "/v2/x", 404), ("GET", "/v2//", 404), ("POST", "/v2/logging", 501), ("GET", "/v2/trace/setting", 501),
        ("POST", "/v2", 405), ("POST", "/v2/cudasharedmemory/region/r/register", 501),
        ("POST", "/v2/repository/index", 501), ("POST", "/v2/workers/vector/load", 501),
    ):  # fmt: skip
        answer = client.request(method, path)
        assert (answer.status_code, list(answer.json())) == (code, ["error"]), (path, answer.text)
    assert client.get("/v2x").json()["error"]["type"] == "NotFound"  # Weir's own page says it in its own way


def test_on_the_fast_lane_the_worker_reads_the_body_and_writes_the_answer() -> None:
    written = b'{"model_name":"vector","outputs":[]}'
    executor = FakeExecutor(lambda batch: [written for _ in batch])
    with running("fastlane", Registry([Service(Vector, executor=executor)]), HttpSettings(port=0)) as server:
        answer = server.client.post(INFER, json=BODY)
        assert (answer.content, answer.headers["content-type"]) == (written, "application/json")
        assert json.loads(executor.payloads[0][0]) == BODY


def test_a_head_too_large_is_refused_under_any_server() -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(make_app(Registry([vector()]), HttpSettings(max_header_size=1000)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post(INFER, json=BODY, headers={"x-long": "x" * 2000})
            assert (answer.status_code, list(answer.json())) == (431, ["error"])

    asyncio.run(main())


def test_without_a_manager_models_do_not_change_and_the_rest_is_there() -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(make_app(Registry([vector()]), HttpSettings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/v2/hardware")).json()["hardware"][0]["kind"] == "CPU"
            assert (await client.post("/v2/hardware", json={"name": "cpu"})).status_code == 200
            assert "model_repository" not in (await client.get("/v2")).json()["extensions"]
            answer = await client.post("/v2/repository/index")
            assert (answer.status_code, list(answer.json())) == (501, ["error"])

    asyncio.run(main())


@pytest.mark.parametrize(("path", "code"), [("//v2/models", 404), ("//v2", 404), ("/models/infer", 405)])
def test_errors_are_texts_where_clients_of_the_protocol_may_come_by(client: httpx.Client, path: str, code: int) -> None:
    answer = client.post(f"{client.base_url}".rstrip("/") + path)
    assert (answer.status_code, type(answer.json()["error"])) == (code, str)


def test_the_metadata_are_at_the_slash_too(client: httpx.Client) -> None:
    assert client.get("/v2/").json() == client.get("/v2").json()
