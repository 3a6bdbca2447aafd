"""The routes of the protocol through each frontend of HTTP; models and workers that come and go, with Triton's client and AMD's requests.

The OpenAPI document tells the truth: schemathesis makes requests of it and holds the answers of a real server to it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import hypothesis
import numpy as np
import pytest
import tritonclient.http as triton
from tests.frontends.http.servers import Serve, running
from tests.late import schemathesis, triton_aio
from tests.protocols.kserve.models import Vector
from tests.rings import subcases
from tests.served import Served
from tritonclient.utils import InferenceServerException

from weir.catalog.registry import Registry
from weir.errors import Overloaded
from weir.frontends.http.application import make_app
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.testing import FakeExecutor
from weir.wire.data_plane import DATA_PLANE

INFER = "/v2/models/vector/infer"
LOAD = "/v2/repository/models/simple/load"
BODY: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


def vector(**settings: Any) -> Service:
    """Return a service that runs in this process."""
    return Service(Vector, executor="inline", **settings)


@asynccontextmanager
async def hosted(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Ask an application whose model has not been started: it is as it is while it loads."""
    transport = httpx.ASGITransport(make_app(KserveContext(Registry([vector()]), HttpSettings(**settings))))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


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


@pytest.mark.parametrize(
    ("name", "version"), [("acme/net", ""), ("acme/net", "2"), ("acme/eu/net", "v2"), ("a~b", "2")]
)
def test_a_response_names_the_model_and_its_version(serve: Serve, name: str, version: str) -> None:
    server = serve(vector(name=name, version=version))
    answer = server.client.post(f"/v2/models/{name.replace('~', '%7E')}/infer", json=BODY).json()
    assert (answer["model_name"], answer.get("model_version", "")) == (name, version)


def test_an_error_says_when_to_try_again(serve: Serve) -> None:
    error = Overloaded("full", retry_after=2.0)
    server = serve(Service(Vector, executor=FakeExecutor(lambda batch: [error for _ in batch])))
    answer = server.client.post(INFER, json=BODY, headers={"accept-encoding": "gzip"})
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (429, {"error": "full"}, "2")


def test_an_answer_that_is_none_of_ours_says_nothing_of_itself(serve: Serve) -> None:
    server = serve(Service(Vector, executor=FakeExecutor(lambda batch: [{} for _ in batch])))
    body = {**BODY, "parameters": {"binary_data_output": True}}
    answer = server.client.post(INFER, json=body)
    assert answer.status_code == 500 and list(answer.json()) == ["error"]


def test_readiness_says_that_the_server_drains(serve: Serve) -> None:
    service = vector()
    server = serve(service)
    server.run(service.drain())
    for answer in (server.client.post(INFER, json=BODY), server.client.get("/v2/models/vector/ready")):
        assert answer.status_code == 503 and list(answer.json()) == ["error"] and "retry-after" in answer.headers


async def test_readiness_says_that_a_model_loads() -> None:
    async with hosted() as client:
        assert (await client.get("/v2/health/live")).json() == {"live": True}
        ready = [await client.get(path) for path in ("/v2/health/ready", "/v2/models/vector/ready")]
        for answer in (*ready, await client.post(INFER, json=BODY)):
            assert answer.status_code == 503 and "not ready" in answer.json()["error"]
        assert (await client.get("/v2/models/vector")).status_code == 200


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


async def test_a_head_too_large_is_refused_under_any_server() -> None:
    async with hosted(max_header_size=1000) as client:
        answer = await client.post(INFER, json=BODY, headers={"x-long": "x" * 2000})
        assert (answer.status_code, list(answer.json())) == (431, ["error"])


async def test_absent_hardware_is_not_found() -> None:
    async with hosted() as client:
        answers = [await client.post("/v2/hardware", json={"name": name}) for name in ("cpu", "abacus")]
        assert [answer.status_code for answer in answers] == [200, 404] and list(answers[1].json()) == ["error"]
        assert (await client.get("/v2/hardware")).json()["hardware"][0]["kind"] == "CPU"


def test_errors_are_texts_where_clients_of_the_protocol_may_come_by(client: httpx.Client) -> None:
    for path, code in (("//v2/models", 404), ("//v2", 404), ("/models/infer", 405)):
        answer = client.post(f"{client.base_url}".rstrip("/") + path)
        assert (answer.status_code, type(answer.json()["error"])) == (code, str)
    assert client.get("/v2/").json() == client.get("/v2").json()


FIRST = np.arange(16, dtype=np.int32).reshape(1, 16)


@pytest.fixture
def stock(address: str) -> Iterator[triton.InferenceServerClient]:
    """Triton's client."""
    with triton.InferenceServerClient(address) as client:
        yield client


def infer(stock: triton.InferenceServerClient) -> None:
    """Have `simple` compute."""
    tensors = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in tensors:
        tensor.set_data_from_numpy(FIRST)
    np.testing.assert_array_equal(stock.infer("simple", tensors).as_numpy("OUTPUT0"), 2 * FIRST)


def test_unload_and_load(stock: triton.InferenceServerClient) -> None:
    index = {each["name"]: each["state"] for each in stock.get_model_repository_index()}
    assert index["simple"] == index["square"] == "READY"
    stock.unload_model("simple", unload_dependents=True)
    assert not stock.is_model_ready("simple") and stock.is_server_ready()
    (left,) = [each for each in stock.get_model_repository_index() if each["name"] == "simple"]
    assert (left["version"], left["state"]) == ("", "UNAVAILABLE")
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'simple'"):
        infer(stock)
    stock.load_model("simple")
    infer(stock)
    stock.load_model("simple")  # once more: it is replaced
    infer(stock)


@pytest.mark.parametrize("size", [3, 0])
def test_a_loaded_configuration_goes_before_earlier_settings(stock: triton.InferenceServerClient, size: int) -> None:
    stock.load_model("simple", config=json.dumps({"max_batch_size": size}))
    assert stock.get_model_config("simple")["max_batch_size"] == size
    infer(stock)
    stock.load_model("simple")
    assert stock.get_model_config("simple")["max_batch_size"] == 64


def test_a_model_takes_its_own_configuration_back(stock: triton.InferenceServerClient) -> None:
    for name in ("simple", "square", "vector"):
        before = stock.get_model_config(name)
        stock.load_model(name, config=json.dumps({**before, "max_batch_size": str(before["max_batch_size"])}))
        assert stock.get_model_config(name) == before
    infer(stock)


@subcases(
    ("name", "options", "message", "status"),
    [
        ("nobody", {}, "'nobody'", "404"),
        ("simple", {"config": "no"}, "JSON", "400"),
        ("simple", {"config": "[]"}, "'config'", "400"),
        ("simple", {"config": '{"max_batch_size": -1}'}, "max_batch_size", "400"),
        ("simple", {"config": '{"max_batch_size": "many"}'}, "max_batch_size", "400"),
        ("simple", {"config": '{"instance_group": [{"count": "x"}]}'}, "count", "400"),
        ("simple", {"config": '{"input": 3}'}, "input", "400"),
        ("simple", {"config": '{"file": "x.py"}'}, "file: is for models of a repository", "400"),
        ("simple", {"config": '{"platform": "onnx"}'}, "platform", "400"),
    ],
)
def test_a_failed_load_leaves_the_old_one(
    stock: triton.InferenceServerClient, name: str, options: dict[str, str], message: str, status: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        stock.load_model(name, **options)
    assert message in caught.value.message() and caught.value.status() == status
    infer(stock)


@subcases(
    ("path", "bodies"),
    [
        ("repository/index", [b"", b"null", b"{}", b'{"parameters": null}', b'{"ready": null}']),
        ("systemsharedmemory/unregister", [b"", b" null ", b"{}", b'{"parameters": null}', b'{"ready": null}']),
        ("repository/models/simple/unload", [b"", b"null", b"{}", b'{"parameters": null}', b'{"ready": null}']),
        ("repository/models/simple/load", [b"", b"null", b"{}", b'{"parameters": null}']),
        ("workers/square/load", [b"", b"null", b"{}"]),
    ],
)
def test_a_body_that_is_optional_may_be_null(client: httpx.Client, path: str, bodies: list[bytes]) -> None:
    for body in bodies:
        assert client.post(f"/v2/{path}", content=body).status_code == 200, body


def test_a_load_takes_the_parameters_of_amds_client_as_they_are(
    client: httpx.Client, stock: triton.InferenceServerClient
) -> None:
    own = {"batch_size": 4, "timeout": 20, "share": True, "batchers": 1, "pipeline_depth": 2}
    config = {"parameters": {"config": json.dumps({"max_batch_size": 9})}}
    assert client.post(LOAD, json={**own, **config}).status_code == 200
    answer = client.get("/models/simple").json()["settings"]
    assert (answer["max_batch_size"], answer["max_queue_delay"], answer["pipeline_depth"]) == (4, 0.02, 2)
    infer(stock)
    stock.load_model("simple")
    assert stock.get_model_config("simple")["max_batch_size"] == 64


@subcases(
    ("body", "status", "message"),
    [
        ({"btch_size": 4}, 400, "parameter 'btch_size': is not a setting, and the constructor of Simple takes nothing"),
        ({"batch_size": "x"}, 400, "parameter batch_size='x': must be of type int"),
        ({"batch_size": None}, 400, "parameter 'batch_size'=None: must be a text, a number, true or false"),
        ({"share": False}, 400, "parameter 'share': a loaded model replaces the one that runs"),
        ({"env": "A=b"}, 403, "env='A=b': may bring files or code into the server"),
        ({"parameters": {"config": "{}", "file:1/model.py": "eA=="}}, 403, "allow_model_files"),
        ({"parameters": {"file:1/model.py": 3}}, 400, "parameter"),
        ({"parameters": {"file:1/model.py": "%"}}, 400, "parameter"),
        ({"parameters": {"other": 1}}, 400, "parameter"),
        ({"parameters": []}, 400, "parameters=[]: must be an object or null"),
        ({"parameters": {"config": {}}}, 400, "parameter"),
        ({"parameters": {"config": "x" * (5 << 20)}}, 413, "4194304"),
    ],
)
def test_what_a_load_does_not_know_is_refused(
    client: httpx.Client, body: dict[str, object], status: int, message: str
) -> None:
    answer = client.post(LOAD, json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_null_is_no_value_where_one_is_needed(client: httpx.Client) -> None:
    answer = client.post("/v2/hardware", content=b"null")
    assert (answer.status_code, answer.json()["error"]) == (400, "name: is missing, must be a text")


@subcases(
    ("path", "body", "says"),
    [
        ("repository/index", {"ready": 1}, "ready=1: must be true or false or null"),
        (
            "repository/models/simple/unload", {"parameters": {"unload_dependents": "yes"}},
            "parameters.unload_dependents='yes': must be true or false or null",
        ),
        ("workers/square/load", {"batch_size": 2, "next": [1]}, "next=[1]: must be "),
        ("hardware", {"name": "cpu", "num": "2"}, "num='2': must be an integer or null"),
        ("systemsharedmemory/region/r/register", {"byte_size": 8}, "key: is missing, must be a text"),
        (
            "systemsharedmemory/region/r/register", {"key": "k", "byte_size": 8, "offset": -1},
            "shared memory region 'r': offset=-1, byte_size=8: offset must be at least 0",
        ),
        ("systemsharedmemory/region/r/register", [8], "body: must be an object as JSON, is [8]"),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_is_named_with_its_value_and_the_rule(
    client: httpx.Client, path: str, body: object, says: str
) -> None:
    answer = client.post(f"/v2/{path}", json=body)
    assert answer.status_code == 400 and answer.json()["error"].startswith(says)


def test_workers_join_and_leave(client: httpx.Client) -> None:
    def load(**parameters: object) -> str:
        answer = client.post("/v2/workers/square/load", json=parameters)
        assert answer.status_code == 200, answer.text
        return answer.text

    assert load() == "square"
    other = load(batch_size=2)
    assert other == "square-1" == load(batch_size=2, share=False)
    for _ in range(2):
        assert client.post(f"/v2/workers/{other}/unload").status_code == 200
    assert client.get(f"/v2/models/{other}/ready").status_code == 404
    assert client.post("/v2/workers/nobody/unload").status_code == 404


@subcases(("method", "path"), [route for call in DATA_PLANE.values() if call.controls for route in call.routes()])
def test_from_elsewhere_it_is_forbidden(client: httpx.Client, method: str, path: str) -> None:
    filled = path.format(model="simple", version="1", worker="simple", region="r")
    answer = client.request(method, filled, headers={"x-forwarded-for": "192.0.2.7"})
    assert (answer.status_code, list(answer.json())) == (403, ["error"])
    assert client.get("/v2/models/simple/ready").status_code == 200


async def test_large_requests_survive_a_reload(address: str, stock: triton.InferenceServerClient) -> None:
    """Their bodies are received for one service, and some come to its successor."""
    x = np.ones((1, 40_000), np.float32)
    tensor = triton.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    async with triton_aio.InferenceServerClient(address, conn_limit=4) as client:
        over = asyncio.Event()

        async def infer_again_and_again() -> int:
            count = 0
            while not over.is_set():
                assert (await client.infer("vector", [tensor])).as_numpy("sum").tolist() == [40_000]
                count += 1
            return count

        calls = [asyncio.create_task(infer_again_and_again()) for _ in range(3)]
        for _ in range(2):
            await client.load_model("vector")
        over.set()
        assert min(await asyncio.gather(*calls)) > 0


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    """The document of the server."""
    document: dict[str, Any] = client.get("/openapi.json").json()
    return document


def test_the_paths_of_the_protocol_are_there(document: dict[str, Any]) -> None:
    assert {
        "/v2", "/v2/health/ready", "/v2/models/{model}/versions/{version}/ready", "/v2/models/simple/infer",
        "/v2/repository/models/{model}/load", "/v2/workers/{worker}/load",
        "/v2/systemsharedmemory/region/{region}/register",
    } <= set(document["paths"])  # fmt: skip
    assert not any("trace" in path or "logging" in path for path in document["paths"])


def test_the_examples_work(client: httpx.Client, document: dict[str, Any]) -> None:
    count = 0
    for path, operations in document["paths"].items():
        if path.startswith("/v2/models/") and path.endswith("/infer"):
            body = operations["post"]["requestBody"]["content"]["application/json"]
            for example in body.get("examples", {}).values():
                assert client.post(path, json=example["value"]).status_code == 200, path
                count += 1
    assert count >= 4


@pytest.mark.parametrize("examples", [1, pytest.param(10, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_what_it_says_of_the_protocol_is_so(server: Served, document: dict[str, Any], mode: str, examples: int) -> None:
    """Whatever is sent, by the schema or against it: codes, content types and bodies are those described."""
    generated = schemathesis.GenerationMode(mode)
    from schemathesis.specs.openapi import checks as rules

    def no_server_error(*checked: Any) -> bool | None:
        raised = "predict raised" in checked[1].text  # the model cannot square every JSON that a string may hold
        return None if raised else schemathesis.checks.not_a_server_error(*checked)

    checks = (
        no_server_error,
        rules.status_code_conformance,
        rules.content_type_conformance,
        rules.response_schema_conformance,
    )
    schema = schemathesis.openapi.from_dict({**document, "servers": []}).include(path_regex="^/v2")
    schema.config.update(base_url=server.url)
    seen: set[int] = set()
    for found in schema.get_all_operations():
        assert isinstance(found, schemathesis.core.result.Ok), found
        operation: Any = found.ok()
        has_effects = operation.method == "post" and operation.path.endswith("load")  # felt by the others
        if has_effects or (mode == "negative" and not operation.body):
            continue

        @hypothesis.given(case=operation.as_strategy(generation_mode=generated))
        @hypothesis.settings(
            max_examples=examples, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        def holds(case: Any) -> None:
            seen.add(case.call_and_validate(checks=checks).status_code)

        holds()
    assert 400 in seen and (mode == "negative" or {200, 404} <= seen), seen
