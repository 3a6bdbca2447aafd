"""Models that cannot batch, on a real server: each request runs whole and alone, and gets what onnxruntime answers to it."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from onnx import TensorProto, helper
from tests.catalog.repository.graphs import node
from tests.catalog.repository.shelf import write
from tests.client import kit
from tests.late import onnxruntime
from tests.rings import subcases
from tests.served import Served

from weir.wire.kserve_grpc import message

WAYS = ("http", "http-json", "grpc")
FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
Arrays = dict[str, Any]
Shapes = Mapping[str, tuple[int, tuple[int | str, ...]]]


def onnx_file(nodes: list[Any], inputs: Shapes, outputs: Shapes, constants: Arrays | None = None) -> bytes:
    """Return a file with these nodes; `inputs` and `outputs` are (type, shape) by name."""
    made = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
        [helper.make_tensor(name, INT64, array.shape, array) for name, array in (constants or {}).items()],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(made, opset_imports=opset, ir_version=8).SerializeToString())


FLOATS = np.random.default_rng(3)


def floats(*shape: int) -> Any:
    return FLOATS.standard_normal(shape).astype(np.float32)


ALONE = "max_batch_size: 0\n"
# Each: the file, its configuration, and requests for it.
CASES: dict[str, tuple[bytes, str, list[Arrays]]] = {
    # Over all that it gets: what is cut up or joined gives something else.
    "softmax": (
        onnx_file([node("Softmax", "x", "y", axis=0)], {"x": (FLOAT, (3,))}, {"y": (FLOAT, (3,))}),
        ALONE, [{"x": floats(3)} for _ in range(6)],
    ),
    "image": (
        onnx_file([node("ReduceMean", "x", "y", axes=[0], keepdims=1)], {"x": (FLOAT, (3, 8, 8))}, {"y": (FLOAT, (1, 8, 8))}),
        "", [{"x": floats(3, 8, 8)} for _ in range(6)],
    ),
    "scalar": (
        onnx_file([node("Add", "x x", "y")], {"x": (FLOAT, ())}, {"y": (FLOAT, ())}),
        "", [{"x": np.array(number, np.float32)} for number in (1, 2, 3)],
    ),
    # The protocol's own example: inputs and outputs of their own lengths.
    "example": (
        onnx_file(
            [node("Identity", "input0", "output0"), node("ReduceSum", "input1", "output1", keepdims=1)],
            {"input0": (FLOAT, (2, 2)), "input1": (FLOAT, (3,))}, {"output0": (FLOAT, (2, 2)), "output1": (FLOAT, (1,))},
        ),
        "", [{"input0": floats(2, 2), "input1": floats(3)} for _ in range(4)],
    ),
    "repeat": (
        onnx_file(
            [node("Concat", "IN DELAY", "OUT", axis=0), node("Shape", "IN", "IDX")],
            {"IN": (INT64, ("a",)), "DELAY": (INT64, ("b",))}, {"OUT": (INT64, ("c",)), "IDX": (INT64, (1,))},
        ),
        ALONE, [{"IN": np.arange(n, dtype=np.int64), "DELAY": np.arange(m, dtype=np.int64)} for n, m in ((1, 2), (4, 1), (2, 2))],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, (data, config, _) in CASES.items():
        write(root, {f"{name}/1/model.onnx": data, f"{name}/config.pbtxt": config})
    amd = """
        platform = "onnx_onnxv1"
        inputs = [{name = "x", datatype = "FP32", shape = [3]}]
        outputs = [{name = "y", datatype = "FP32", shape = [3]}]
    """
    double = onnx_file([node("Add", "x x", "y")], {"x": (FLOAT, ("n", 3))}, {"y": (FLOAT, ("n", 3))})
    write(root, {"amd/1/model.onnx": double, "amd/config.toml": amd})
    reshaped = """
        max_batch_size: 0
        input { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [8, 8, 3] reshape { shape: [3, 8, 8] } }
        output { name: "y" data_type: TYPE_FP32 dims: [64] reshape { shape: [1, 8, 8] } }
    """
    write(root, {"reshaped/1/model.onnx": CASES["image"][0], "reshaped/config.pbtxt": reshaped})
    chain = """
        platform = "ensemble"
        max_batch_size = 0
        inputs = [{name = "x", datatype = "FP32", dims = [3]}]
        outputs = [{name = "z", datatype = "FP32", dims = [3]}]
        steps = [{model = "softmax"}, {model = "softmax", inputs = {x = "y"}, outputs = {y = "z"}}]
    """
    write(root, {"chain/1/nothing": "", "chain/config.toml": chain})
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Served]:
    with Served("--model-repository", repository, "--grpc-port", "0", "--allow-shared-memory") as served:
        served.until_grpc().until_ready()
        yield served


@cache
def session_of(repository: Path, name: str) -> Any:
    file = repository / name / "1" / "model.onnx"
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def truth(repository: Path, name: str, given: Arrays) -> Arrays:
    session = session_of(repository, name)
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, given), strict=True))


def check(name: str, given: Arrays, found: Arrays, repository: Path) -> None:
    expected = truth(repository, name, given)
    assert {key: array.shape for key, array in found.items()} == {
        key: np.shape(array) for key, array in expected.items()
    }
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_each_request_gets_what_onnxruntime_answers_to_it(server: Served, repository: Path, way: str) -> None:
    requests = [(name, given) for name, case in CASES.items() for given in case[2]] * 3
    with kit.asking(way, server) as client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda each: client.infer(*each), requests))
    for (name, given), found in zip(requests, answers, strict=True):
        check(name, given, found, repository)


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@subcases("name", CASES)
def test_the_metadata_and_the_configuration_say_so(client: httpx.Client, repository: Path, name: str) -> None:
    session = session_of(repository, name)
    metadata, config = client.get(f"/v2/models/{name}").json(), client.get(f"/v2/models/{name}/config").json()
    for key, ours, theirs in (("inputs", "input", session.get_inputs()), ("outputs", "output", session.get_outputs())):
        shapes = [[length if isinstance(length, int) else -1 for length in each.shape] for each in theirs]
        assert [each["shape"] for each in metadata[key]] == [each["dims"] for each in config[ours]] == shapes
    assert config["max_batch_size"] == 0
    assert config["parameters"]["unbatched"]["string_value"]


@subcases("name", ["softmax", "image", "scalar", "repeat"])
def test_the_native_endpoints_do_so_too(client: httpx.Client, repository: Path, name: str) -> None:
    requests = CASES[name][2]
    items = [{key: array.tolist() for key, array in given.items()} for given in requests]
    single = [client.post(f"/infer/{name}", json=item).json() for item in items]
    together = [each["output"] for each in client.post(f"/infer/{name}/batch", json=items).json()]
    for given, alone, beside in zip(requests, single, together, strict=True):
        for found in (alone, beside):
            check(name, given, {key: np.array(value) for key, value in found.items()}, repository)


def test_a_chain_of_them_does_not_batch_either(client: httpx.Client, repository: Path) -> None:
    x = floats(3)
    answer = client.post("/infer/chain", json={"x": x.tolist()}).json()
    once = truth(repository, "softmax", {"x": x})["y"]
    np.testing.assert_allclose(answer["z"], truth(repository, "softmax", {"x": once})["y"], rtol=1e-6)
    assert client.get("/v2/models/chain/config").json()["max_batch_size"] == 0


@pytest.mark.parametrize("way", WAYS)
def test_amd_clients_leave_the_batch_out_and_are_batched_all_the_same(server: Served, way: str) -> None:
    requests = [floats(3), floats(1, 3), floats(3), floats(5, 3), floats(3), floats(3)] * 4
    with kit.asking(way, server) as client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda x: client.infer("amd", {"x": x})["y"], requests))
    for given, found in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(found, given + given)  # of the same shape too


def test_the_native_endpoint_takes_what_a_model_declares(client: httpx.Client) -> None:
    assert client.post("/infer/amd", json={"x": [[1, 2, 3]]}).json() == {"y": [[2.0, 4.0, 6.0]]}
    assert client.get("/v2/models/amd").json()["inputs"][0]["shape"] == [-1, 3]
    said = {"x": [1, 2, 3]}
    assert client.post("/infer/amd", json=said).status_code == 400


def test_requests_have_the_shapes_that_the_configuration_says(
    server: Served, client: httpx.Client, repository: Path
) -> None:
    x = floats(8, 8, 3)
    expected = truth(repository, "image", {"x": x.reshape(3, 8, 8)})["y"].ravel()
    for way in WAYS:
        with kit.asking(way, server) as asking:
            np.testing.assert_allclose(asking.infer("reshaped", {"x": x})["y"], expected, rtol=1e-6)
    said = client.get("/v2/models/reshaped/config").json()
    assert said["input"][0]["reshape"] == {"shape": [3, 8, 8]}
    asked, answered = (message(f"inference.ModelConfig{side}") for side in ("Request", "Response"))
    channel: Any
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelConfig")
        found = answered.FromString(call(asked(name="reshaped").SerializeToString()))
    over_grpc = MessageToDict(found, preserving_proto_field_name=True)["config"]  # as Triton's client writes it
    for one, other in zip(over_grpc["input"], said["input"], strict=True):
        assert one == {**other, "dims": ["8", "8", "3"], "reshape": {"shape": ["3", "8", "8"]}}
    answer = client.post("/v2/repository/models/reshaped/load", json={"parameters": {"config": json.dumps(over_grpc)}})
    assert answer.status_code == 200, answer.text
    after = client.get("/v2/models/reshaped/config").json()
    assert {**after, "parameters": None} == {**said, "parameters": None}
