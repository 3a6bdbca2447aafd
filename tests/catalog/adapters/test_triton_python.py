"""Models of Triton's Python backend run unchanged: written here in the forms of its own examples, served, and called by a client."""

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rings import subcases

import weir
from weir.catalog.adapters.triton_python import load_triton_model
from weir.catalog.adapters.triton_utils import (
    PbMetricFamily,
    PbModelConfig,
    PbRequest,
    PbResponse,
    PbSender,
    PbTensor,
    TritonError,
    TritonModelException,
    deserialize_bytes_tensor,
    make_module,
    numpy_to_triton_type,
    serialize_byte_tensor,
)
from weir.catalog.sources import ModelToServe
from weir.client import GrpcClient, HttpClient
from weir.hosting import HostedServer
from weir.metrics import ModelMetrics

IMPORTS = """
import asyncio, json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
"""
INTS = 'backend: "python" input { name: "IN" data_type: TYPE_INT32 dims: -1 } output { name: "OUT" data_type: TYPE_INT32 dims: 1 }\n'
DECOUPLED = "model_transaction_policy { decoupled: True }\n"

# As in add_sub: the output types come from the configuration; a negative number is an error of its request alone.
ADD_SUB = """
from neighbour import SIGN

class TritonPythonModel:
    def initialize(self, args):
        assert args["model_instance_name"] == "add_sub_0_0"
        self.config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(self.config, "SUM")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        self.offset = int(self.config["parameters"]["offset"]["string_value"])
        self.calls = pb_utils.MetricFamily("add_sub_requests", "Requests.", pb_utils.MetricFamily.COUNTER)
        self.counted = self.calls.Metric(labels={"of": args["model_name"]})
        pb_utils.Logger.log_info("add_sub is ready")

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
            self.counted.increment(1)
            if (a < 0).any():
                error = pb_utils.TritonError(f"negative: {request.request_id()}", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            total = pb_utils.Tensor("SUM", (a + b + self.offset).astype(self.dtype))
            less = pb_utils.Tensor("DIFFERENCE", (SIGN * (a - b)).astype(self.dtype))
            responses.append(pb_utils.InferenceResponse(output_tensors=[total, less]))
        return responses

    def finalize(self):
        print("finalized")
"""
ADD_SUB_CONFIG = """
name: "add_sub" backend: "python" max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "B" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "SUM" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "DIFFERENCE" data_type: TYPE_FP32 dims: [ 2 ] } ]
parameters: { key: "offset" value: { string_value: "10" } }
instance_group [ { kind: KIND_CPU } ]
dynamic_batching { max_queue_delay_microseconds: 2000 }
"""

# As in decoupled/repeat: as many responses as the input says, sent by a thread after execute has returned.
REPEAT = """
class TritonPythonModel:
    def initialize(self, args):
        assert pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            threading.Thread(target=self.respond, args=(request.get_response_sender(), value)).start()

    def respond(self, sender, values):
        for value in values:
            if value < 0:
                error = pb_utils.TritonError("below zero", pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=error))
            else:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
        sender.send(flags=FINAL)
"""
REPEAT_CONFIG = INTS + DECOUPLED + "max_batch_size: 0"

# Its responses come once four requests are there, in a thread or a coroutine each.
MEETING = """
class TritonPythonModel:
    def initialize(self, args):
        self.met = MODULE.Barrier(4)

    ASYNC def execute(self, requests):
        if (pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy() < 0).any():
            raise ValueError("below zero")
        senders = [request.get_response_sender() for request in requests]
        BEGIN

    ASYNC def respond(self, sender):
        WAIT
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[4]], np.int32))]), flags=FINAL)
"""
IN_THREADS = {
    "MODULE": "threading", "ASYNC ": "", "WAIT": "self.met.wait(60)",
    "BEGIN": "[threading.Thread(target=self.respond, args=(sender,)).start() for sender in senders]",
}  # fmt: skip
IN_LOOP = {
    "MODULE": "asyncio", "ASYNC": "async", "WAIT": "await asyncio.wait_for(self.met.wait(), 60)",
    "BEGIN": "await asyncio.gather(*map(self.respond, senders))",
}  # fmt: skip

# As in bls: another model of the server is chosen by an input, and called in both forms; errors are passed on.
BLS = """
class TritonPythonModel:
    async def execute(self, requests):
        return [await self.respond(request) for request in requests]

    async def respond(self, request):
        name = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy().ravel()[0]
        a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
        if name == b"repeat":
            call = pb_utils.InferenceRequest(
                model_name="repeat", requested_output_names=["OUT"],
                inputs=[pb_utils.Tensor("IN", a.ravel().astype(np.int32))],
            )
            sent = [pb_utils.get_output_tensor_by_name(each, "OUT").as_numpy() for each in call.exec(decoupled=True)]
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.concatenate(sent).astype(np.float32).reshape(a.shape))])
        call = pb_utils.InferenceRequest(
            model_name=name, requested_output_names=["SUM"], inputs=[pb_utils.Tensor("A", a), pb_utils.Tensor("B", a)],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        )
        first, second = await asyncio.gather(call.async_exec(), call.async_exec())
        if first.has_error():
            raise pb_utils.TritonModelException(first.error().message())
        assert pb_utils.is_model_ready(name.decode()) and not second.has_error()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_output_tensor_by_name(first, "SUM").as_numpy())])
"""
BLS_CONFIG = """
backend: "python" output { name: "OUT" data_type: TYPE_FP32 dims: [ 1, 2 ] }
input [ { name: "MODEL" data_type: TYPE_STRING dims: 1 }, { name: "A" data_type: TYPE_FP32 dims: [ 1, 2 ] } ]
"""

# What a request has besides its tensors, as text; with MODEL it is passed on to that model.
HEADS = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        to = pb_utils.get_input_tensor_by_name(request, "MODEL")
        if to is None:
            found = [request.request_id(), json.loads(request.parameters()), request.timeout(), request.correlation_id(), request.flags(), request.trace()]
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps(found)], object))])
        answer = pb_utils.InferenceRequest(
            model_name=to.as_numpy()[0], requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", np.zeros(1, np.int32))],
            request_id="inner", correlation_id="c7", flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END, timeout=request.timeout(),
            parameters={"deep": True, **json.loads(request.parameters())}, trace=request.trace(),
        ).exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        return pb_utils.InferenceResponse(answer.output_tensors())
"""
HEADS_CONFIG = """
backend: "python" output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "MODEL" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
"""

# As in auto_complete: no configuration beside it.
COMPLETED = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        names = [each["name"] for each in config.as_dict()["input"]]
        if "X" not in names:
            config.add_input({"name": "X", "data_type": "TYPE_INT64", "dims": [-1]})
        config.add_input({"name": "MORE", "data_type": "TYPE_INT64", "dims": [-1], "optional": True})
        config.add_output({"name": "Y", "data_type": "TYPE_INT64", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        y = pb_utils.get_input_tensor_by_name(request, "X").as_numpy() * 2
        more = pb_utils.get_input_tensor_by_name(request, "MORE")
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("Y", y if more is None else y + more.as_numpy())])
"""

# OUT is the number of requests that `execute` got, and after it the sum of the request's numbers.
RAGGED = """
class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = "decoupled" in args["model_config"]

    def execute(self, requests):
        sums = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().sum() for request in requests]
        tensors = [pb_utils.Tensor("OUT", np.array([[len(requests), each]], np.int32)) for each in sums]
        responses = [pb_utils.InferenceResponse([tensor]) for tensor in tensors]
        if not self.decoupled:
            return responses
        for request, response in zip(requests, responses):
            request.get_response_sender().send(response, flags=FINAL)
"""
RAGGED_CONFIG = """
backend: "python" max_batch_size: 3
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1, -1 ] allow_ragged_batch: true } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 2 ] } ]
dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 30000000 }
"""

# OUT is how many inputs the request has.
OPTIONAL = """
class TritonPythonModel:
    def initialize(self, args):
        self.shape = [1, 1] if '"max_batch_size": 4' in args["model_config"] else [1]

    def execute(self, requests):
        counts = [np.full(self.shape, len(request.inputs()), np.int32) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", count)]) for count in counts]
"""
OPTIONAL_CONFIG = """
backend: "python" output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
input [ { name: "A" data_type: TYPE_INT32 dims: 1 optional: true }, { name: "B" data_type: TYPE_INT32 dims: 1 optional: true } ]
"""

# What it returns is wrong in the way that X says.
BAD = """
class TritonPythonModel:
    def execute(self, requests):
        kind = int(requests[0].inputs()[0].as_numpy()[0, 0])
        y = pb_utils.Tensor("Y", np.zeros((2, 1), np.float32))
        return [[], None, ["x"], [pb_utils.InferenceResponse([y])], [pb_utils.InferenceResponse([])],
                [requests[0].get_response_sender() if kind == 5 else 0], [kind == 6 and pb_utils.PreferredMemory(2)]][kind]
"""
BAD_CONFIG = """
backend: "python" max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 1 } output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""


def write(root: Path, name: str, code: str, config: str = "", **replaced: str) -> Path:
    """Write a model, with words of its code `replaced`; return its file."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    for word, text in replaced.items():
        code = code.replace(word, text)
    (folder / "model.py").write_text(IMPORTS + code)
    (folder / "neighbour.py").write_text("SIGN = 1\n")
    if config:
        (root / name / "config.pbtxt").write_text(config)
    return folder / "model.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedServer]:
    root = tmp_path_factory.mktemp("triton")
    for name, code, config in (
        ("add_sub", ADD_SUB, ADD_SUB_CONFIG),
        ("repeat", REPEAT, REPEAT_CONFIG),
        ("bls", BLS, BLS_CONFIG),
        ("heads", HEADS, HEADS_CONFIG),
        ("inner", HEADS, HEADS_CONFIG),
        ("completed", COMPLETED, ""),
        ("ragged", RAGGED, RAGGED_CONFIG),
        ("ragged_decoupled", RAGGED, RAGGED_CONFIG + DECOUPLED),
        ("batched", OPTIONAL, OPTIONAL_CONFIG + "max_batch_size: 4"),
        ("single", OPTIONAL, OPTIONAL_CONFIG),
        ("bad", BAD, BAD_CONFIG),
    ):
        write(root, name, code, config)
    write(root, "threads", MEETING, INTS + DECOUPLED + "max_batch_size: 8", **IN_THREADS)
    write(root, "loop", MEETING, INTS + DECOUPLED + "max_batch_size: 8", **IN_LOOP)
    with weir.running(model_repository=str(root), workers=1, grpc_port=0, allow_model_files=True) as running:
        yield running


@pytest.fixture(scope="module")
def clients(server: HostedServer) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        yield {
            "binary": stack.enter_context(HttpClient(server.address, timeout=60)),
            "text": stack.enter_context(HttpClient(server.address, timeout=60, binary=False)),
            "grpc": stack.enter_context(GrpcClient(server.addresses[1].removeprefix("grpc://"))),
        }


@pytest.fixture
def client(clients: dict[str, Any]) -> HttpClient:
    client: HttpClient = clients["binary"]
    return client


def test_add_sub(server: HostedServer, client: HttpClient) -> None:
    a, b = np.array([[1, 2]], np.float32), np.array([[3, 5]], np.float32)
    answer = client.infer("add_sub", {"A": a, "B": b})
    assert answer["SUM"].tolist() == [[14, 17]] and answer["DIFFERENCE"].tolist() == [[-2, -3]]
    both = client.infer("add_sub", {"A": np.concatenate([a, b]), "B": np.concatenate([b, a])}, outputs=["DIFFERENCE"])
    assert list(both) == ["DIFFERENCE"] and both["DIFFERENCE"].tolist() == [[-2, -3], [2, 3]]
    with urllib.request.urlopen(f"{server.address}/metrics") as response:
        assert b'add_sub_requests_total{model="add_sub",of="add_sub",version="1"}' in response.read()


def test_an_error_of_a_request_is_its_own(clients: dict[str, Any]) -> None:
    a = np.array([[1, 2]], np.float32)

    def call(place: int) -> Any:
        try:
            found = clients["text"].infer("add_sub", {"A": -a if place % 2 else a, "B": a}, id=f"r{place}")
            return found["SUM"].tolist()
        except weir.InvalidRequest as error:
            return error.message

    with ThreadPoolExecutor(6) as callers:
        found = list(callers.map(call, range(6)))
    assert found == [[[12, 14]], "negative: r1", [[12, 14]], "negative: r3", [[12, 14]], "negative: r5"]


def test_a_decoupled_model_sends_any_number_of_responses(clients: dict[str, Any]) -> None:
    for each in ("grpc", "binary"):
        parts = clients[each].stream("repeat", {"IN": np.array([4, 2, 1], np.int32)})
        assert [part["OUT"].tolist() for part in parts] == [[4], [2], [1]]
    assert list(clients["grpc"].stream("repeat", {"IN": np.array([], np.int32)})) == []
    with pytest.raises(weir.InvalidRequest, match="below zero"):
        list(clients["grpc"].stream("repeat", {"IN": np.array([7, -1], np.int32)}))


@subcases("model", ["ragged", "ragged_decoupled"])
def test_requests_of_different_lengths_share_a_batch_of_a_ragged_model(
    server: HostedServer, client: HttpClient, model: str
) -> None:
    with urllib.request.urlopen(f"{server.address}/v2/models/{model}/config") as response:
        declared = json.load(response)["input"][0]
    assert declared["allow_ragged_batch"] and declared["dims"] == [-1, -1]
    arrays = [np.ones((1, 2, count), np.int32) for count in (1, 2, 3)]
    with ThreadPoolExecutor(3) as callers:
        found = list(callers.map(lambda each: next(iter(client.stream(model, {"IN": each})))["OUT"].tolist(), arrays))
    assert found == [[[3, 2]], [[3, 4]], [[3, 6]]]


def test_a_request_may_leave_out_all_inputs_if_they_are_optional(clients: dict[str, Any]) -> None:
    for model, ones in (("batched", np.ones((1, 1), np.int32)), ("single", np.ones(1, np.int32))):
        for client in clients.values():
            for given in ({}, {"B": ones}, {"A": ones, "B": ones}):
                assert client.infer(model, given)["OUT"].tolist() == (ones * len(given)).tolist()


def test_a_load_call_brings_a_new_model_and_its_configuration(server: HostedServer, client: HttpClient) -> None:
    def called(change: str, **parameters: str) -> int:
        body = json.dumps({"parameters": parameters}).encode()
        try:
            with urllib.request.urlopen(f"{server.address}/v2/repository/models/new/{change}", body) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    table = {"name": "IN", "dataType": "TYPE_INT32", "dims": ["-1", "-1"]}
    tables = {"input": [table], "output": [{**table, "name": "OUT", "dims": ["2"]}]}
    config = json.dumps({"backend": "python", "maxBatchSize": 5, **tables})
    files = {"file:1/model.py": base64.b64encode((IMPORTS + RAGGED).encode()).decode()}
    ones = np.ones((1, 2, 3), np.int32)
    assert called("load", config=config) == 404  # it brings no files
    assert called("load", config=config, **files) == 200
    assert client.infer("new", {"IN": ones})["OUT"].tolist() == [[1, 6]]
    assert client.model_metadata("new")["inputs"][0]["shape"] == [-1, -1, -1]
    assert called("load", config="{}", **files) == 400  # it declares nothing
    assert client.infer("new", {"IN": ones})["OUT"].tolist() == [[1, 6]]
    assert called("unload") == 200
    assert called("load") == 404  # the files counted for that load


@subcases("model", ["threads", "loop"])
def test_requests_of_a_decoupled_model_are_answered_at_the_same_time(client: HttpClient, model: str) -> None:
    def sent(value: int) -> list[Any]:
        parts = client.stream(model, {"IN": np.array([[value]], np.int32)})
        return [part["OUT"].tolist() for part in parts]

    with ThreadPoolExecutor(4) as callers:
        assert list(callers.map(sent, [1] * 4)) == [[[[4]]]] * 4
    with pytest.raises(weir.ModelError, match="below zero"):
        sent(-1)


def test_requests_that_wait_for_execute_go_on_together_in_one_batch(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            tensor = pb_utils.Tensor("OUT", np.array([[len(requests)]], np.int32))
            request.get_response_sender().send(pb_utils.InferenceResponse([tensor]), flags=FINAL)
        while not os.path.exists(GO_ON):
            time.sleep(0.002)
"""
    go_on = tmp_path / "go_on"
    path = write(tmp_path, "held", code, INTS + DECOUPLED + "max_batch_size: 8", GO_ON=repr(str(go_on)))
    described = ModelToServe("", "held", {}, [], {}, version="1", folder=path.parent)
    model: Any = load_triton_model(described)()
    model.load()

    def sent(length: int) -> Any:
        return next(model.predict([{"IN": np.zeros((1, length), np.int32)}]))[0].result["OUT"].tolist()

    with ThreadPoolExecutor(4) as callers:
        assert sent(1) == [[1]]  # `execute` has not returned
        each = [callers.submit(sent, length) for length in (2, 3, 2, 2)]
        while len(model._waiting) < 4:
            time.sleep(0.001)
        go_on.touch()
        found = [one.result() for one in each]
    model.unload()
    assert found.pop(1) == [[1]]  # another form
    assert found in ([[[3]]] * 3, [[[1]], [[2]], [[2]]], [[[2]], [[1]], [[2]]], [[[2]], [[2]], [[1]]])  # as they came


def test_other_models_of_the_server_are_called(client: HttpClient) -> None:
    def call(model: str, values: list[float]) -> Any:
        arrays = {"MODEL": np.array([model.encode()], object), "A": np.array([values], np.float32)}
        return client.infer("bls", arrays)["OUT"].tolist()

    assert call("add_sub", [1, 2]) == [[12, 14]]
    assert call("repeat", [3, 4]) == [[3, 4]]
    with pytest.raises(weir.ModelError, match="TritonModelException: negative"):
        call("add_sub", [-1, 2])
    with pytest.raises(weir.ModelError, match="nowhere"):
        call("nowhere", [1, 2])


def test_requests_come_with_their_id_parameters_and_timeout(clients: dict[str, Any]) -> None:
    def heads(given: Any, **more: Any) -> Any:
        arrays = {"IN": np.zeros(1, np.int32), **more.pop("arrays", {})}
        return json.loads(given.infer("heads", arrays, **more)["OUT"][0])

    sequence = {"who": "me", "n": 2, "sequence_id": 5, "sequence_start": True}
    for each in clients.values():
        assert heads(each) == ["", {}, 0, 0, 0, None]
        found = heads(each, id="r1", parameters=sequence, timeout=9.0)
        assert found == ["r1", {"who": "me", "n": 2}, 9_000_000, 5, 1, None]
        for place in range(3):  # requests of one form, one after the other
            assert heads(each, parameters={"place": place})[1] == {"place": place}
            assert heads(each)[1] == {}
    inner = {"MODEL": np.array([b"inner"], object)}
    called = heads(clients["binary"], parameters={"who": "me"}, timeout=8.0, arrays=inner)
    assert called == ["inner", {"deep": True, "who": "me"}, 8_000_000, "c7", 2, None]


def test_a_configuration_is_completed_by_the_model(client: HttpClient) -> None:
    x = np.array([[1, 2, 3]])
    assert client.infer("completed", {"X": x})["Y"].tolist() == [[2, 4, 6]]
    assert client.infer("completed", {"X": x, "MORE": x})["Y"].tolist() == [[3, 6, 9]]
    metadata = client.model_metadata("completed")
    assert [(each["name"], each["shape"]) for each in metadata["inputs"]] == [("X", [-1, -1]), ("MORE", [-1, -1])]


ENVIRONMENT = 'parameters: { key: "EXECUTION_ENV_PATH" value: { string_value: "e.tar.gz" } }'
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 1 }"


@pytest.mark.parametrize(
    ("code", "config", "why"),
    [
        (COMPLETED.replace("return config", "raise KeyError('no')"), "", "auto_complete_config: KeyError: 'no'"),
        (COMPLETED.replace('"dims": [-1]}', '"dims": [-1], "kind": 1}'), "", "auto_complete_config: ValueError: input"),
        (COMPLETED, "max_batch_size: 9", "max_batch_size=4: the configuration says 9"),
        (ADD_SUB, 'backend: "python"', "config.pbtxt or auto_complete_config must declare inputs"),
        (ADD_SUB, ADD_SUB_CONFIG + ENVIRONMENT, "run in the server's env"),
        (ADD_SUB, ADD_SUB_CONFIG.partition("dynamic")[0] + SEQUENCES, "sequences of requests"),
        ("json = pb_utils =" + REPEAT, REPEAT_CONFIG, "1/model.py"),
    ],
)
def test_what_cannot_be_served_is_said_before_it_starts(code: str, config: str, why: str, tmp_path: Path) -> None:
    write(tmp_path, "wrong", code, config.replace("add_sub", "wrong"))
    with pytest.raises(weir.WeirError, match=why.replace("(", r"\(")):
        weir.running(model_repository=str(tmp_path), executor="inline").start()


def test_what_execute_returns_is_checked(client: HttpClient) -> None:
    for kind, why in enumerate(
        ("0 results for 1 item", r"\(None\) for 1 item", "a str, must be an InferenceResponse", "2 rows for a request of 1",
         "'Y': is missing", "no decoupled transaction policy", "PreferredMemory: tensors are in the memory of the CPU")
    ):  # fmt: skip
        with pytest.raises(weir.ModelError, match=why):
            client.infer("bad", {"X": np.array([[kind]], np.float32)})


# pb_utils itself.


def test_tensors_and_types() -> None:
    tensor = PbTensor("t", np.array(["a", "bc"]))
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("t", [2], 13, True)
    floats = np.arange(3, dtype=np.float32)
    for source in (PbTensor("t", floats), floats, PbTensor("t", floats).to_dlpack()):
        assert PbTensor.from_dlpack("u", source).as_numpy().tolist() == [0, 1, 2]
    for kind in (np.bool_, np.int8, np.float64, np.object_):
        assert make_module("/").triton_to_numpy_type(numpy_to_triton_type(kind)) is kind
    assert numpy_to_triton_type(np.complex64) is None
    texts = np.array([b"", "é", b"\0x"], object)
    packed = serialize_byte_tensor(texts)
    assert packed is not None and deserialize_bytes_tensor(packed).tolist() == [b"", "é".encode(), b"\0x"]
    assert serialize_byte_tensor(texts[:0]) is None
    for cut in (packed[:2], packed[:-1]):
        with pytest.raises(ValueError, match="is cut off"):
            deserialize_bytes_tensor(cut)


def test_requests_responses_and_senders() -> None:
    request = PbRequest([PbTensor("X", [1])], ["Y"], request_id="7", parameters={"a": 1}, timeout=3)
    assert (request.request_id(), json.loads(request.parameters()), request.timeout()) == ("7", {"a": 1}, 3)
    assert (request.correlation_id(), request.flags(), request.is_cancelled()) == (0, 0, False)
    request.set_release_flags(1)
    sent: list[Any] = []
    sender = PbSender(3, lambda *each: sent.append(each), lambda index: index == 3)
    assert sender.is_cancelled()
    sender.send(flags=1)
    for wrong, why in (
        (lambda: request.set_release_flags(2), "not rescheduled"),
        (lambda: PbRequest(flags=4), "flags=4: must be of a start and an end"),
        (request.exec, "model_name must be given"),
        (lambda: PbResponse(kind=1), "InferenceResponse: kind"),
        (PbSender(3, print, bool).send, "must be provided"),
        (lambda: sender.send(PbResponse()), "closed"),
    ):
        with pytest.raises(TritonModelException, match=why):
            wrong()
    assert sent == [(3, None, True)]


def test_codes_of_errors_there_and_back() -> None:
    for code in range(8):
        error = TritonError("why", code)
        assert (str(error), error.message(), error.code()) == ("why", "why", code)
        back = TritonError.of(error.as_weir())
        assert back.code() == (TritonError.INTERNAL if code == TritonError.UNKNOWN else code)


def test_the_rest_is_refused_by_name() -> None:
    module = make_module("/models/m/1")
    assert module.get_model_dir() == "/models/m/1"
    for name, why in (
        ("load_model", "a model does not load others"), ("nothing_like_it", "is not supported by Weir"),
        ("TRITONSERVER_REQUEST_RELEASE_RESCHEDULE", "not rescheduled"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=f"triton_python_backend_utils.{name}: .*{why}"):
            getattr(module, name)


def test_metrics_of_all_kinds() -> None:
    metrics = ModelMetrics()
    PbMetricFamily.owner = metrics
    counter = PbMetricFamily("tokens").Metric(labels={"kind": "x"})
    counter.increment(2)
    gauge = PbMetricFamily("level", kind=PbMetricFamily.GAUGE).Metric()
    gauge.set(3)
    gauge.increment(-1)
    PbMetricFamily("size", kind=PbMetricFamily.HISTOGRAM).Metric(buckets=[1, 2]).observe(1.5)
    assert (counter.value(), gauge.value()) == (2, 2)
    with pytest.raises(TritonModelException, match="only a gauge"):
        counter.set(1)
    found = {report.definition.name: report.changes[0] for report in metrics.take() or []}
    assert (found["tokens"].number, found["level"].number, found["size"].counts) == (2, 2, [0, 1, 0])


def test_a_configuration_is_completed_only_where_it_says_nothing_else() -> None:
    x = {"name": "X", "data_type": "TYPE_FP32", "dims": [1]}
    config = PbModelConfig({"max_batch_size": 0, "input": [x], "output": []})
    config.add_input(x)
    with pytest.raises(ValueError, match="the configuration has another one"):
        config.add_input({**x, "dims": [2]})
    config.set_model_transaction_policy({"decoupled": True})
    for wrong in ({"decoupled": False}, {"coupled": True}):
        with pytest.raises(ValueError, match="must be decoupled"):
            config.set_model_transaction_policy(wrong)
    assert len(config.as_dict()["input"]) == 1 and config.as_dict()["model_transaction_policy"] == {"decoupled": True}
