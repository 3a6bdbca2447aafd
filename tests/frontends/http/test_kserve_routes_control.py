"""Models and workers come and go while the server runs: Triton's client, and what the AMD Inference Server's sends."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

FIRST = np.arange(16, dtype=np.int32).reshape(1, 16)
REMOTE = {"x-forwarded-for": "192.0.2.7"}


@pytest.fixture
def stock(address: str) -> Iterator[triton.InferenceServerClient]:
    """Triton's client."""
    with triton.InferenceServerClient(address) as client:
        yield client


def ask(stock: triton.InferenceServerClient) -> None:
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
    assert {"name": "simple", "version": "", "state": "UNAVAILABLE"}.items() <= {
        key: value
        for each in stock.get_model_repository_index()
        if each["name"] == "simple"
        for key, value in each.items()
    }.items()
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'simple'"):
        ask(stock)
    stock.load_model("simple")
    ask(stock)
    stock.load_model("simple")  # once more: it is replaced
    ask(stock)


def test_a_configuration_goes_before_what_was_said(stock: triton.InferenceServerClient) -> None:
    stock.load_model("simple", config=json.dumps({"max_batch_size": 3}))
    assert stock.get_model_config("simple")["max_batch_size"] == 3
    ask(stock)
    stock.load_model("simple")
    assert stock.get_model_config("simple")["max_batch_size"] == 64


def test_a_model_takes_its_own_configuration_back(stock: triton.InferenceServerClient) -> None:
    for name in ("simple", "square", "vector"):
        before = stock.get_model_config(name)
        stock.load_model(name, config=json.dumps({**before, "max_batch_size": str(before["max_batch_size"])}))
        assert stock.get_model_config(name) == before
    ask(stock)


def test_a_model_that_is_not_to_batch_does_not(stock: triton.InferenceServerClient) -> None:
    stock.load_model("simple", config='{"max_batch_size": 0}')
    assert stock.get_model_config("simple")["max_batch_size"] == 0
    ask(stock)
    stock.load_model("simple")


@pytest.mark.parametrize(
    ("name", "options", "said", "status"),
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
    stock: triton.InferenceServerClient, name: str, options: dict[str, str], said: str, status: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        stock.load_model(name, **options)
    assert said in caught.value.message() and caught.value.status() == status
    ask(stock)


def test_files_need_a_flag_of_their_own(client: httpx.Client) -> None:
    parameters = {"config": "{}", "file:1/model.py": "eA=="}
    answer = client.post("/v2/repository/models/simple/load", json={"parameters": parameters})
    assert answer.status_code == 403 and "allow_model_files" in answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"null", b" null ", b"{}", b'{"parameters": null}', b'{"ready": null}'])
@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index", "/v2/repository/models/simple/unload", "/v2/repository/models/simple/load",
        "/v2/workers/square/load", "/v2/systemsharedmemory/unregister",
    ],
)  # fmt: skip
def test_a_body_that_is_optional_may_be_null(client: httpx.Client, path: str, body: bytes) -> None:
    if path.endswith("/load") and b":" in body and not (b"parameters" in body and "repository" in path):
        return  # no key but one is known there, or each is a parameter
    answer = client.post(path, content=body)
    assert answer.status_code == 200, answer.text
    if path.endswith("/unload"):
        client.post("/v2/repository/models/simple/load")


def test_a_load_takes_the_parameters_of_amds_client_as_they_are(
    client: httpx.Client, stock: triton.InferenceServerClient
) -> None:
    load = "/v2/repository/models/simple/load"
    own = {"batch_size": 4, "timeout": 20, "share": True, "batchers": 1, "pipeline_depth": 2}
    config = {"parameters": {"config": json.dumps({"max_batch_size": 9})}}
    assert client.post(load, json={**own, **config}).status_code == 200
    said = client.get("/models/simple").json()["settings"]
    assert (said["max_batch_size"], said["max_queue_delay"], said["pipeline_depth"]) == (4, 0.02, 2)
    ask(stock)
    stock.load_model("simple")
    assert stock.get_model_config("simple")["max_batch_size"] == 64


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"btch_size": 4}, 400, "parameter 'btch_size': is no setting, and the constructor of Simple takes nothing"),
        ({"batch_size": "x"}, 400, "parameter batch_size='x': must be of type int"),
        ({"batch_size": None}, 400, "parameter 'batch_size'=None: must be a text, a number, true or false"),
        ({"share": False}, 400, "parameter 'share': a model that is loaded takes the place of the one that runs"),
        ({"env": "A=b"}, 403, "env='A=b': may bring files or code into the server"),
    ],
)
def test_what_a_load_does_not_know_is_refused(
    client: httpx.Client, body: dict[str, object], status: int, said: str
) -> None:
    answer = client.post("/v2/repository/models/simple/load", json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]


def test_null_is_no_value_where_one_is_needed(client: httpx.Client) -> None:
    answer = client.post("/v2/hardware", content=b"null")
    assert (answer.status_code, answer.json()["error"]) == (400, "name: is missing, must be a text")
    assert client.post("/v2/hardware", json={"name": "cpu", "num": None}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("repository/index", {"ready": 1}, "ready=1: must be true or false or null"),
        ("repository/models/simple/load", {"parameters": []}, "parameters=[]: must be an object or null"),
        (
            "repository/models/simple/unload", {"parameters": {"unload_dependents": "yes"}},
            "parameters.unload_dependents='yes': must be true or false or null",
        ),
        ("workers/square/load", {"batch_size": 2, "next": [1]}, "next=[1]: must be "),
        ("hardware", {"name": "cpu", "num": "2"}, "num='2': must be an integer or null"),
        ("systemsharedmemory/region/r/register", {"byte_size": 8}, "key: is missing, must be a text"),
        ("systemsharedmemory/region/r/register", {"key": "k", "byte_size": 0}, "byte_size=0: must be an integer >= 1"),
        (
            "systemsharedmemory/region/r/register", {"key": "k", "byte_size": 8, "offset": -1},
            "offset=-1: must be an integer >= 0",
        ),
        ("systemsharedmemory/region/r/register", [8], "body: must be an object as JSON, is [8]"),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_is_named_with_its_value_and_the_rule(
    client: httpx.Client, path: str, body: object, says: str
) -> None:
    answer = client.post(f"/v2/{path}", json=body)
    assert answer.status_code == 400 and answer.json()["error"].startswith(says)


@pytest.mark.parametrize(
    "parameters", [{"file:1/model.py": 3}, {"file:1/model.py": "%"}, {"other": 1}, [], {"config": {}}]
)
def test_parameters_of_a_load_that_cannot_be(client: httpx.Client, parameters: object) -> None:
    answer = client.post("/v2/repository/models/simple/load", json={"parameters": parameters})
    assert answer.status_code == 400 and "parameter" in answer.json()["error"]


def test_a_parameter_larger_than_a_body_may_be(client: httpx.Client) -> None:
    answer = client.post("/v2/repository/models/simple/load", json={"parameters": {"config": "x" * (5 << 20)}})
    assert answer.status_code == 413 and "4194304" in answer.json()["error"]


def test_workers_join_and_leave(client: httpx.Client) -> None:
    def load(**parameters: object) -> str:
        answer = client.post("/v2/workers/square/load", json=parameters)
        assert answer.status_code == 200, answer.text
        return answer.text

    assert load() == "square"
    other = load(batch_size=2)
    assert other == "square-1" == load(batch_size=2)
    assert client.get("/v2/models/square-1/config").json()["max_batch_size"] == 2
    assert load(batch_size=2, share=False) == other
    assert client.get("/v2/models/square-1/config").json()["instance_group"][0]["count"] == 2
    for _ in range(2):
        assert client.post(f"/v2/workers/{other}/unload").status_code == 200
    assert client.get(f"/v2/models/{other}/ready").status_code == 404
    refused = client.post("/v2/workers/square/load", json={"next": "x"})
    assert refused.status_code == 400 and "'next'" in refused.json()["error"]
    assert client.post("/v2/workers/nobody/unload").status_code == 404


def test_hardware(client: httpx.Client) -> None:
    [cpus, *_] = client.get("/v2/hardware").json()["hardware"]
    assert cpus["kind"] == "CPU" and cpus["count"] >= 1
    assert client.post("/v2/hardware", json={"name": "cpu", "num": 1}).status_code == 200
    for said in ({"name": "cpu", "num": 1 << 40}, {"name": "abacus"}):
        answer = client.post("/v2/hardware", json=said)
        assert answer.status_code == 404 and list(answer.json()) == ["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/models/simple/load", "/v2/repository/models/simple/unload", "/v2/workers/simple/load",
        "/v2/workers/simple/unload", "/v2/systemsharedmemory/unregister", "/v2/systemsharedmemory/region/r/register",
    ],
)  # fmt: skip
def test_from_elsewhere_it_is_forbidden(client: httpx.Client, path: str) -> None:
    answer = client.post(path, headers=REMOTE)
    assert (answer.status_code, list(answer.json())) == (403, ["error"])
    assert client.get("/v2/models/simple/ready").status_code == 200


def test_large_requests_survive_a_reload(address: str, stock: triton.InferenceServerClient) -> None:
    """Their bodies are received for one service, and some come to its successor."""

    async def main() -> None:
        x = np.ones((1, 40_000), np.float32)
        tensor = triton.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        async with triton_aio.InferenceServerClient(address, conn_limit=4) as client:
            over = asyncio.Event()

            async def ask_on() -> int:
                count = 0
                while not over.is_set():
                    assert (await client.infer("vector", [tensor])).as_numpy("sum").tolist() == [40_000]
                    count += 1
                return count

            asking = [asyncio.create_task(ask_on()) for _ in range(3)]
            for _ in range(2):
                await client.load_model("vector")
            over.set()
            assert min(await asyncio.gather(*asking)) > 0

    asyncio.run(main())
