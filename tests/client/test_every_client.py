"""Every method on every client, against one real server process and in process."""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from tests.client import kit
from tests.client.models import item

from weir import errors
from weir.client import TensorValue
from weir.client.methods import AsyncClient, Client

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
ONES = {"x": np.ones((1, 2), np.float32)}
SIXTEEN = {"INPUT0": np.arange(16, dtype=np.int32)[None], "INPUT1": np.ones((1, 16), np.int32)}


@pytest.fixture(scope="module")
def server() -> Iterator[kit.Running]:
    with kit.serving() as running:
        yield running


@pytest.fixture(scope="module", params=kit.MAKE)
def client(request: pytest.FixtureRequest, server: kit.Running) -> Iterator[Any]:
    with kit.asking(request.param, server) as made:
        yield made


def test_the_server_says_what_it_is(client: Any) -> None:
    assert client.server_metadata()["name"] == "weir"
    assert client.has_extension("binary_tensor_data") is True
    assert client.has_extension("telepathy") is False
    assert client.server_live() is True
    assert client.server_ready() is True
    client.wait_until_server_ready(60)


def test_models_are_described(client: Any) -> None:
    assert {"simple", "simple_string", "every", "count"} <= set(client.models())
    said = client.model_metadata("simple")
    assert said["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 16]}
    assert [output["name"] for output in said["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    assert said["versions"] == ["1"]
    assert client.model_ready("simple") is True
    assert client.model_ready("simple", "1") is True
    assert client.model_ready("nothing") is False


def test_hardware_is_requested(client: Any) -> None:
    assert client.has_hardware("CPU") is True
    assert client.has_hardware("CPU", 100_000) is False


def test_arrays_go_and_come(client: Any) -> None:
    result = client.infer("simple", SIXTEEN, id="7")
    assert (result.model, result.id, list(result)) == ("simple", "7", ["OUTPUT0", "OUTPUT1"])
    assert np.array_equal(result["OUTPUT0"], SIXTEEN["INPUT0"] + 1)
    assert result["OUTPUT0"].dtype == np.int32
    only = client.infer("simple", SIXTEEN, version="1", outputs=["OUTPUT1"], priority=1, timeout=20.0)
    assert list(only) == ["OUTPUT1"]
    assert only.version == "1"


def test_texts_are_bytes(client: Any) -> None:
    result = client.infer("simple_identity", {"INPUT0": np.array([["hello", "wörld"]])})
    assert result["OUTPUT0"].tolist() == [[b"hello", "wörld".encode()]]


def test_every_kind_of_datatype_survives(client: Any, request: pytest.FixtureRequest) -> None:
    if "http-json" in request.node.callspec.id:
        pytest.skip("FP16 and BF16 have no form in JSON")
    bits = np.array([[1, 65535]], np.uint16)
    given: dict[str, Any] = {
        "half": np.array([[1.5, -2.0, 3.25]], np.float16), "brain": TensorValue("brain", "BF16", bits), "flag": np.array([True]),
        "text": np.array([b"\x00\xff"], object), "big": np.array([2**64 - 1], np.uint64),
    }  # fmt: skip
    result = client.infer("every", given)
    assert np.array_equal(result["half"], given["half"])
    assert np.array_equal(result["brain"], bits)
    assert result.outputs["brain"].datatype == "BF16"
    assert (result["flag"].tolist(), result["text"].tolist()) == ([True], [b"\x00\xff"])
    assert result["big"].tolist() == [2**64 - 1]


def test_many_are_answered_in_order(client: Any) -> None:
    many = [{"x": np.array([[number, 0]], np.float32)} for number in range(20)]
    for results in (client.infer_ordered("scale", many), client.infer_ordered_batched("scale", many, 7)):
        assert [result["y"][0, 0] for result in results] == [2 * number for number in range(20)]
    assert client.infer_ordered("scale", []) == []


def test_streams_have_several_answers(client: Any) -> None:
    assert [json.loads(result["output"][0]) for result in client.stream("count", item(3), id="s")] == [1, 2, 3]
    (sole,) = client.stream("simple", SIXTEEN, outputs=["OUTPUT0"])
    assert list(sole) == ["OUTPUT0"]


def test_a_stream_may_be_left(client: Any) -> None:
    answers = client.stream("count", item(100_000))
    assert json.loads(next(answers)["output"][0]) == 1
    answers.close()
    assert client.infer("scale", ONES)["y"].tolist() == [[2, 2]]


def test_an_error_inside_a_stream_comes_after_the_parts(client: Any) -> None:
    answers = client.stream("script", item([1, {"error": "no more"}]))
    assert json.loads(next(answers)["output"][0]) == 1
    with pytest.raises(errors.WeirError, match="no more"):
        next(answers)


def test_errors_are_those_in_process(client: Any) -> None:
    asked: list[tuple[type[errors.WeirError], str, Callable[[], object]]] = [
        (errors.ModelNotFound, "nothing", lambda: client.infer("nothing", SIXTEEN)),
        (errors.ModelNotFound, "nothing", lambda: list(client.stream("nothing", SIXTEEN))),
        (errors.ModelNotFound, "nothing", lambda: client.model_metadata("nothing")),
        (errors.InvalidRequest, "INPUT1", lambda: client.infer("simple", {"INPUT0": SIXTEEN["INPUT0"]})),
        (errors.Unsupported, "streams", lambda: client.infer("count", item(3))),
        (errors.ModelError, "not today", lambda: client.infer("moody", item("fail"))),
        (errors.ModelCrashed, "crashed its worker", lambda: client.infer("moody", item("die"))),
    ]
    for kind, rule, ask in asked:
        with pytest.raises(kind, match=rule):
            ask()


def test_models_are_loaded_and_unloaded(client: Any) -> None:
    client.unload_models(["simple_string"])
    client.wait_until_model_not_ready("simple_string", 60)
    client.load_model("simple_string")
    client.wait_until_model_ready("simple_string", 60)
    client.load_model("simple_string", {"max_batch_size": 3})
    client.unload_model("simple_string", version="1")
    assert client.model_ready("simple_string") is False
    client.load_model("simple_string", version="1")
    for change in (client.load_model, client.unload_model):
        with pytest.raises(errors.ModelNotFound, match="7"):
            change("simple_string", version="7")
    client.load_model("simple_string")
    with pytest.raises(errors.ModelNotFound, match="nothing"):
        client.load_model("nothing")
    with pytest.raises(errors.DeadlineExceeded, match="'nothing' ready"):
        client.wait_until_model_ready("nothing", 0.05, interval=0.01)


def test_an_ensemble_is_made_of_models_that_run(client: Any) -> None:
    tensor = {"datatype": "FP32", "shape": [-1, 2]}
    tensors = {"inputs": [{"name": "x", **tensor}], "outputs": [{"name": "y", **tensor}]}
    client.load_ensemble("twice", ["scale", {"model": "scale", "inputs": {"x": "y"}}], **tensors)
    before = client.infer("scale", ONES)["y"]
    np.testing.assert_allclose(client.infer("twice", ONES)["y"], client.infer("scale", {"x": before})["y"])
    client.unload_models(["twice"])
    client.load_model("twice")
    assert "twice" in client.models()
    client.load_ensemble("twice", ["scale"], **tensors)
    np.testing.assert_allclose(client.infer("twice", ONES)["y"], before)
    with pytest.raises(errors.InvalidRequest, match="nobody"):
        client.load_ensemble("thrice", ["scale", "nobody"], **tensors)
    assert "thrice" not in client.models()
    client.unload_model("twice")


def test_workers_are_loaded_under_endpoints(client: Any) -> None:
    endpoint = client.load_worker("scale", {"factor": 3.0})
    assert endpoint == "scale-1"
    assert client.load_worker("scale", {"factor": 3.0}) == endpoint
    assert client.infer(endpoint, ONES)["y"].tolist() == [[3, 3]]
    client.unload_worker(endpoint)
    assert endpoint not in client.models()
    with pytest.raises(errors.InvalidRequest, match="colour"):
        client.load_worker("scale", {"colour": "red"})


def test_plain_items_get_plain_answers(client: Any) -> None:
    for plain in ({"text": "good"}, "good", 3.5, [1, 2], None, {"values": [1, 2]}):
        assert client.infer("moody", plain) == plain
    assert client.infer_ordered("moody", ["a", {"b": 1}], at_once=2) == ["a", {"b": 1}]
    assert list(client.stream("moody", "good")) == ["good"]
    with pytest.raises(errors.ModelError, match="not today"):
        client.infer("moody", "fail")
    with pytest.raises(errors.InvalidRequest, match="cannot be written as JSON"):
        client.infer("moody", {"text": object()})


def test_a_plain_item_is_no_tensor(client: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="model 'scale' takes tensors, must be arrays by name"):
        client.infer("scale", 3)
    assert client.infer("scale", {"x": [np.array([1.0, 2.0], np.float32)]})["y"].tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize("name", kit.REMOTE)
def test_no_client_asks_a_proxy_of_the_environment(
    name: str, server: kit.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in PROXIES:
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with kit.asking(name, server, timeout=60.0) as client:
        assert len(list(client.stream("count", item(2)))) == 2
        assert client.model_ready("scale")


ASYNC = [name for name in kit.REMOTE if name.endswith("-async")]


async def ask(client: Any) -> None:
    """Make a call of each kind, two of them at once."""
    answers = await asyncio.gather(*[client.infer("scale", {"x": np.ones((1, 2), np.float32)}) for _ in range(2)])
    assert [answer["y"].tolist() for answer in answers] == [[[2.0, 2.0]]] * 2
    assert len([part async for part in client.stream("count", item(2))]) == 2
    assert await client.model_ready("scale")


@pytest.mark.parametrize("name", ASYNC)
def test_a_client_serves_one_loop_after_the_other(name: str, server: kit.Running) -> None:
    client = kit.MAKE[name](server)
    for _ in range(4):
        asyncio.run(ask(client))

    async def use_and_close() -> None:
        async with client:
            await ask(client)

    asyncio.run(use_and_close())
    asyncio.run(client.close())


@pytest.mark.parametrize("name", ASYNC)
def test_a_client_serves_two_loops_at_once(name: str, server: kit.Running) -> None:
    client, both = kit.MAKE[name](server), Barrier(2)

    async def use() -> None:
        for _ in range(5):
            both.wait(60)
            await ask(client)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(asyncio.run, use()) for _ in range(2)]:
            done.result()


def test_both_have_the_same_methods_which_take_the_same_and_say_so() -> None:
    one, other = ({name: each for name, each in vars(kind).items() if name[0] != "_"} for kind in (Client, AsyncClient))
    assert one.keys() == other.keys()
    for name, awaited in other.items():
        assert inspect.signature(one[name]).parameters == inspect.signature(awaited).parameters
        assert inspect.iscoroutinefunction(awaited) or inspect.isasyncgenfunction(awaited)
        # Who awaits can withdraw what others still do; threads cannot.
        assert name == "infer_ordered" or inspect.getdoc(one[name]) == inspect.getdoc(awaited)
