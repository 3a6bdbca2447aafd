"""Configurations in the words of Triton: what they mean here, what is refused by name, and what comes back as it was said."""

import ast
import importlib.util
import json
import logging
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from onnx import TensorProto, helper
from tests.catalog.repository.graphs import ask, double, onnx_file
from tests.catalog.repository.shelf import plain, services, write
from tests.rings import subcases

from weir import Service, SettingsError
from weir.catalog.loading import make_service
from weir.catalog.repository.folder import FolderRepository
from weir.catalog.repository.triton import is_default, read_pbtxt, translated
from weir.protocols.data_plane import config
from weir.settings import read_model_table
from weir.wire.kserve_grpc import POOL

TENSORS = """
import weir

class Double(weir.Model):
    inputs = [weir.Tensor("x", "FP32", (-1, 3))]
    outputs = [weir.Tensor("y", "FP32", (-1, 3))]

    def predict(self, batch):
        return {"y": batch["x"] * 2}
"""


def one(folder: Path, said: str, data: bytes | str) -> Service:
    """Return the service of a model with the configuration `said`."""
    name = "model.onnx" if isinstance(data, bytes) else "model.py"
    (service,) = services(write(folder, {f"one/1/{name}": data, "one/config.pbtxt": said}), "one")
    return service


def tensor(more: str, dims: str = "[3]", name: str = "x", key: str = "input") -> str:
    return f'{key} [{{ name: "{name}" data_type: TYPE_FP32 dims: {dims} {more} }}]\n'


def reshaped(shape: str, dims: str = "[3]") -> str:
    """Return the part of a configuration in which x and y are reshaped."""
    more = f"reshape {{ shape: {shape} }}"
    return tensor(more, dims) + tensor(more, dims, "y", "output")


def refused(said: dict[str, Any]) -> str:
    with pytest.raises(SettingsError) as error:
        translated(said, "one")
    return error.value.message


def test_numbers_may_be_texts_and_keys_in_camel_case() -> None:
    said = {
        "maxBatchSize": "16",
        "dynamicBatching": {"maxQueueDelayMicroseconds": "100", "preferredBatchSize": ["4", 8]},
        "instanceGroup": [{"count": "2", "kind": "KIND_CPU"}],
        "input": [{"name": "xInput", "dataType": "TYPE_FP32", "dims": ["16", "-1"], "reshape": {"shape": ["4", "4", "-1"]}}],
        "versionPolicy": {"specific": {"versions": ["1", 3]}},
        "defaultModelFilename": "some.onnx",
        "parameters": {"intra_op_thread_count": {"stringValue": "2"}},
    }  # fmt: skip
    own = translated(said, "one")
    (table,) = own.pop("inputs")
    assert (table["name"], table["shape"], table["reshape"]) == ("xInput", [16, -1], [4, 4, -1])
    assert own == {
        "max_batch_size": 16, "batch_dimension": "required", "policy": "size-or-delay:size=8,delay=0.0001",
        "max_queue_delay": 0.0001, "workers": 2, "versions": ["1", "3"], "file": "some.onnx", "params": {"intra_op": 2},
    }  # fmt: skip


@subcases(
    ("said", "message"),
    [
        ({"max_batch_size": "many"}, "one: max_batch_size='many': must be a whole number"),
        ({"max_batch_size": True}, "one: max_batch_size=True: must be a whole number"),
        ({"max_batch_size": "9" * 30}, "must be a whole number"),
        ({"instance_group": [{"count": "x"}]}, "one: instance_group.count='x': must be a whole number"),
        ({"instance_group": [{"count": 1 << 40}]}, "one: instance_group.count=1099511627776: must be at most 1024"),
        ({"instance_group": 3}, "one: instance_group: must be a table, not 3"),
        ({"instance_group": [{"kind": "KIND_TPU"}]}, "one: instance_group.kind='KIND_TPU': must be"),
        ({"instance_group": [{"threads": 3}]}, "one: instance_group.threads: unknown field"),
        ({"dynamic_batching": {"max_queue_delay_microseconds": []}}, "max_queue_delay_microseconds=[]: must be a whole"),
        ({"dynamic_batching": {"default_queue_policy": {"max_size": 3}}}, "default_queue_policy.max_size: unknown field"),
        ({"dynamic_batching": {"default_queue_policy": {"default_timeout_microseconds": 1, "timeout_action": "DELAY"}}}, "default_queue_policy.timeout_action='DELAY': must be REJECT"),
        ({"dynamic_batching": {"priority_queue_policy": {"1": {"max_queue_size": 3}}}}, "priority_queue_policy[1]: must be as default_queue_policy"),
        ({"model_warmup": [{"inputs": {"x": {"input_data_file": "f"}}}]}, "model_warmup.inputs['x'].input_data_file: files of data"),
        ({"model_warmup": [{"inputs": {"x": {"data_type": "FP4"}}}]}, "inputs['x'].data_type='FP4': must be a type"),
        ({"model_warmup": [{"inputs": {"x": {"data_type": "TYPE_INT8", "dims": [1 << 25]}}}]}, "inputs['x'].dims=[33554432]: must be 1 or more"),
        ({"ensemble_scheduling": {"step": [{"input_map": {"x": "t"}, "output_map": {"y": "t"}}]}}, "step: the steps need each other's"),
        ({"ensemble_scheduling": {"step": [{"model_namespace": "n"}]}}, "step.model_namespace: all models"),
        ({"version_policy": {"latest": {"num_versions": "x"}}}, "num_versions='x': must be a whole number"),
        ({"version_policy": {"specific": {"versions": ["x"]}}}, "specific.versions='x': must be a whole number"),
        ({"input": [{"name": "x", "dims": ["a"]}]}, "one: input['x'].dims='a': must be a whole number"),
        ({"input": [{"name": "x", "reshape": 3}]}, "one: input['x'].reshape: must be a table"),
        ({"input": [{"name": "x", "optional": 1}]}, "one: input['x'].optional=1: must be true or false"),
        ({"input": [{"name": "x", "size": 1}]}, "one: input['x'].size: unknown field"),
        ({"input": [{"name": "x", "is_shape_tensor": True}]}, "one: input['x'].is_shape_tensor: shapes are not given"),
        ({"instance_group": [{"gpus": ["a"]}]}, "one: instance_group.gpus='a': must be a whole number"),
        ({"instance_group": [{"passive": True}]}, "one: instance_group.passive"),
        ({"input": [{"name": "x", "format": "NCHW"}]}, "one: input['x'].format='NCHW': must be FORMAT_NHWC, FORMAT_NCHW"),
        ({"output": [{"name": "y", "optional": True}]}, "one: output['y'].optional: is for inputs"),
        ({"outputs": [{"name": "y", "format": "FORMAT_NCHW"}]}, "one: outputs['y'].format: is for inputs"),
        ({"platform": ["onnx"]}, "one: platform=['onnx']: must be text"),
        ({"platform": "tensorrt_plan"}, "one: platform='tensorrt_plan': unknown platform"),
        ({"sequence_batching": {"max_sequence_idle_microseconds": 5}}, "one: sequence_batching: sequences"),
        ({"batch_input": [{"kind": "BATCH_ELEMENT_COUNT"}]}, "one: batch_input: input tensors that"),
        ({"model_transaction_policy": {"decoupled": 1}}, "one: model_transaction_policy.decoupled=1: must be true or"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(said: dict[str, Any], message: str) -> None:
    assert message in refused(said)


def test_all_that_is_wrong_is_reported_at_once() -> None:
    message = refused({"max_batch_size": "x", "sequence_batching": {"x": 1}, "instance_group": 3})
    assert message.count("one: ") == 3


def test_what_says_nothing_is_passed_over() -> None:
    # What Triton answers for a model of which nobody has said anything.
    default: dict[str, Any] = {
        "platform": "onnxruntime_onnx", "backend": "onnxruntime", "runtime": "", "max_batch_size": 4,
        "version_policy": {"latest": {"num_versions": 1}},
        "input": [{
            "name": "x", "data_type": "TYPE_FP32", "format": "FORMAT_NONE", "dims": [3], "is_shape_tensor": False,
            "allow_ragged_batch": False, "optional": False, "is_non_linear_format_io": False,
        }],
        "output": [{
            "name": "y", "data_type": "TYPE_FP32", "dims": [3], "label_filename": "", "is_shape_tensor": False,
            "is_non_linear_format_io": False,
        }],
        "batch_input": [], "batch_output": [],
        "optimization": {"priority": "PRIORITY_DEFAULT", "gather_kernel_buffer_threshold": 0, "eager_batching": False},
        "instance_group": [{
            "name": "x", "kind": "KIND_CPU", "count": 2, "gpus": [], "secondary_devices": [], "profile": [],
            "passive": False, "host_policy": "",
        }],
        "default_model_filename": "model.onnx", "cc_model_filenames": {}, "metric_tags": {}, "parameters": {},
        "model_warmup": [], "dynamic_batching": {"preferred_batch_size": [], "priority_levels": 0},
    }  # fmt: skip
    own = translated(default, "one")
    keys = "batch_dimension file inputs max_batch_size outputs platform versions workers"
    assert " ".join(sorted(own)) == keys
    assert is_default({"a": [], "b": {"c": "X_NONE"}}) and not is_default({"a": [0]})


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"optimization": {"graph": {"level": 1}}}, "one: optimization: the platform decides how it optimises"),
        ({"metric_tags": {"team": "a"}}, "one: metric_tags"),
        ({"parameters": {"FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "no"}}}, "'FORCE_CPU_ONLY_INPUT_TENSORS'"),
        ({"max_batch_size": 4, "dynamic_batching": {"default_queue_policy": {"max_queue_size": 3}}}, "one: max_queue_size: counts rows"),
        ({"response_cache": {"enable": True}}, "one: response_cache: responses are not cached"),
        ({"instance_group": [{"rate_limiter": {"priority": 2}}]}, "one: instance_group.rate_limiter: workers take"),
        ({"dynamic_batching": {"priority_levels": 2, "default_priority_level": 1}}, "requests without a priority come after"),
        ({"instance_group": {"kind": "KIND_GPU"}}, "one: instance_group.kind"),
        ({"output": {"name": "y", "dims": [3], "label_filename": "l.txt"}}, "one: output['y'].label_filename"),
    ],
)  # fmt: skip
def test_what_changes_no_answer_is_warned_of(said: dict[str, Any], what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        translated(said, "one")
    assert what in caplog.text


def test_a_delay_alone_waits_for_the_largest_batch(tmp_path: Path) -> None:
    service = one(tmp_path, "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 200000 }", plain())
    assert service.facts.batching.policy == "size-or-delay:delay=0.2"
    assert (service.policy.delay, service.policy.size, service.facts.batching.max_queue_delay) == (0.2, None, 0.2)  # type: ignore[attr-defined]  # of SizeOrDelay


def _as_texts(value: Any) -> Any:
    """Write numbers as protocol buffers' JSON may, as texts, and keys in camel case."""
    if isinstance(value, dict):
        return {_camel(key): each if key == "parameters" else _as_texts(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_texts(each) for each in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _camel(key: str) -> str:
    first, *rest = key.split("_")
    return first + "".join(map(str.title, rest))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (plain(), "max_batch_size: 16 instance_group { count: 2 }"),
        (plain(), "dynamic_batching { default_queue_policy { max_queue_size: 77 } }"),
        (TENSORS, "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 500 }"),
        (TENSORS, "max_batch_size: 0"),
        (double("n", 3), ""),
        (double("n", 3), "max_batch_size: 16 " + tensor("format: FORMAT_NONE") + tensor("", name="y", key="output")),
        (double(4, 3), "max_batch_size: 4"),
        (double(2, 3), ""),
        (double(1, 3), "max_batch_size: 0 " + reshaped("[1, 3]")),
    ],
)  # fmt: skip
def test_a_model_takes_its_own_configuration_back(tmp_path: Path, data: bytes | str, said: str) -> None:
    service = one(tmp_path, said, data)
    before = config(service)
    forms = [json.loads(json.dumps(form)) for form in (before, _as_texts(before))]
    before["parameters"].pop("unbatched", None)  # once it is found out, once its configuration says so
    for form in forms:
        (model,) = FolderRepository(tmp_path, read_model_table).read("one", form).versions
        again = make_service(model, ())
        returned = config(again)
        returned["parameters"].pop("unbatched", None)
        assert (returned, again.model.inputs) == (before, service.facts.model.inputs)
        assert again.facts.batching.policy == service.facts.batching.policy


def test_a_reshape_is_between_requests_and_the_file(tmp_path: Path) -> None:
    # The first dimension is no batch, and requests know nothing of it.
    service = one(tmp_path / "a", "max_batch_size: 0 " + reshaped("[1, 3]"), double(1, 3))
    assert (service.facts.model.inputs[0].shape, service.facts.batching.max_batch_size) == ((3,), 1)
    assert ask(service, {"x": np.arange(3, dtype=np.float32)})[0]["y"].tolist() == [0, 2, 4]
    assert config(service)["input"][0]["reshape"] == {"shape": [1, 3]}
    # With a batch, before both.
    halved = tensor("reshape { shape: [2, -1, 2] }", "[4, -1]") + tensor("", "[2, -1, 2]", "y", "output")
    service = one(tmp_path / "b", "max_batch_size: 8 " + halved, double("n", 2, "m", 2))
    x = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    assert ask(service, {"x": x})[0]["y"].tolist() == (2 * x.reshape(2, 2, 3, 2)).tolist()
    # A scalar of each row.
    service = one(tmp_path / "c", "max_batch_size: 8 " + reshaped("[]", "[1]"), double("n"))
    assert ask(service, {"x": np.array([[1], [2]], np.float32)})[0]["y"].tolist() == [[2], [4]]


@pytest.mark.parametrize(
    ("said", "data", "message"),
    [
        (tensor("reshape { shape: [2, 2] }"), double("n", 3), "reshape=[2, 2]: must have as many elements as [3]"),
        (tensor("reshape { shape: [-1] }"), double("n", 3), "reshape=[-1]: must have as many lengths of -1 as [3]"),
        (tensor("reshape { shape: [1, 3] }") + tensor("", name="y", key="output"), TENSORS, "reshape: is for ONNX files"),
        (tensor("optional: true"), double("n", 3), "optional: the model itself needs it"),
        (tensor("optional: true"), TENSORS, "optional: the model itself needs it"),
        (tensor("allow_ragged_batch: true"), double("n", 3), "allow_ragged_batch: a model declares it in its class"),
        ("model_transaction_policy { decoupled: true }", double("n", 3), "a streaming model declares it in its class"),
    ],
)  # fmt: skip
def test_what_the_model_itself_does_not_have(tmp_path: Path, said: str, data: bytes | str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        one(tmp_path, said, data)
    assert message in error.value.message


def test_an_input_that_the_file_has_a_value_for_is_optional(tmp_path: Path) -> None:
    shapes, ten = {"x": ("n", 3), "z": (1, 3)}, helper.make_tensor("z", TensorProto.FLOAT, (1, 3), [10.0] * 3)
    data = onnx_file([helper.make_node("Add", ["x", "z"], ["y"])], shapes, {"y": ("n", 3)}, [ten])
    given = tensor("", "[-1, 3]") + tensor("optional: true", "[1, 3]", "z") + tensor("", "[-1, 3]", "y", "output")
    service = one(tmp_path, "max_batch_size: 0 " + given, data)
    assert [tensor.optional for tensor in service.facts.model.inputs] == [False, True]
    assert config(service)["input"][1]["optional"] is True
    x = np.ones((2, 3), np.float32)
    answers = ask(service, {"x": x}, {"x": x, "z": x[:1]})
    assert [answer["y"].tolist() for answer in answers] == [[[11.0] * 3] * 2, [[2.0] * 3] * 2]


def test_formats_are_shown(tmp_path: Path) -> None:
    said = tensor("format: FORMAT_NCHW", "[3, 8, 8]") + tensor("", "[3, 8, 8]", "y", "output")
    service = one(tmp_path, said, double("n", 3, 8, 8))
    shown = [table.get("format") for table in (*config(service)["input"], *config(service)["output"])]
    assert shown == ["FORMAT_NCHW", None]


def test_examples_of_an_onnx_file_warm_it_up(tmp_path: Path) -> None:
    examples = "examples = [{x = [[1, 2, 3]]}]"
    (service,) = services(write(tmp_path, {"one/1/model.onnx": double("n", 3), "one/config.toml": examples}), "one")
    assert ask(service, {"x": np.ones((1, 3), np.float32)})[0]["y"].tolist() == [[2.0] * 3]


TEXT = r"""
name: "a\x41\101 caf\303\251"  # a comment
platform: 'onnx' max_batch_size: 010;
input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 0x10 ] },
  { name: "INPUT1", data_type: TYPE_INT32, dims: -1 dims: 2 }
]
output < name: "a" "b\n" >
dynamic_batching { max_queue_delay_microseconds: 100 preserve_ordering: true }
parameters { key: "k" value: { string_value: "v" } }
"""


def test_a_configuration() -> None:
    assert read_pbtxt(TEXT, "x") == {
        "name": "aAA café", "platform": "onnx", "max_batch_size": 8,
        "input": [
            {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [16]},
            {"name": "INPUT1", "data_type": "TYPE_INT32", "dims": [-1, 2]},
        ],
        "output": [{"name": "ab\n"}], "dynamic_batching": {"max_queue_delay_microseconds": 100, "preserve_ordering": True},
        "parameters": {"k": {"string_value": "v"}},
    }  # fmt: skip
    assert read_pbtxt("input { data_type: 99 }", "x") == {"input": [{"data_type": 99}]}
    assert read_pbtxt("sequence_batching { direct { minimum_slot_utilization: -inf } }", "x") == {
        "sequence_batching": {"direct": {"minimum_slot_utilization": -math.inf}}
    }


@subcases(
    ("text", "message"),
    [
        ("name: 'a'\nnone: 2", 'x: line 2: Message type "inference.ModelConfig" has no field named "none".'),
        ("dynamic_batching { preserve_ordering: true", 'x: line 1: Expected "}".'),
        ("\nmax_batch_size: -inf", "x: line 2: 'max_batch_size: -inf': Couldn't parse integer: -inf"),
        ('name: "open', "x: line 1: 'name: \"open': String missing ending quote: '\"open'"),
        (r'name: "\377"', "x: line 1: '': Couldn't parse string: 'utf-8' codec can't decode byte 0xff"),
        ("input {" * 500, 'x: line 1: Message type "inference.ModelInput" has no field named "input".'),
    ],
)  # fmt: skip
def test_what_is_broken_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_pbtxt(text, "x")
    assert refused.value.message.startswith(message)


def test_a_pbtxt_without_protobuf_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(SettingsError, match="x: needs protobuf, which is not installed") as refused:
        read_pbtxt("", "x")
    assert "\n" not in refused.value.message


def test_the_schema_has_every_field_of_triton() -> None:
    """Those of its client, by name, number and type: a file of Triton's is never refused for a field that Weir does not know."""
    spec = importlib.util.find_spec("tritonclient")
    assert spec is not None and spec.origin is not None
    # Another client has messages of these names.
    code = (Path(spec.origin).parent / "grpc/model_config_pb2.py").read_text()
    literals = [each.value for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Constant)]
    theirs = FileDescriptorProto.FromString(max((each for each in literals if isinstance(each, bytes)), key=len))
    ours = FileDescriptorProto.FromString(POOL.FindFileByName("model_config.proto").serialized_pb)
    assert _fields(ours.message_type) == _fields(theirs.message_type) != []


def _fields(messages: Iterable[DescriptorProto]) -> list[tuple[str, str, int, int]]:
    own = [(message.name, field.name, field.number, field.type) for message in messages for field in message.field]
    return sorted(own + [each for message in messages for each in _fields(message.nested_type)])


def test_a_bound_and_a_deadline_of_a_queue_are_ours(tmp_path: Path) -> None:
    policy = "{ max_queue_size: 1 default_timeout_microseconds: 2500000 timeout_action: REJECT allow_timeout_override: true }"
    levels = f"priority_levels: 2 default_priority_level: 2 priority_queue_policy {{ key: 1 value {policy} }}"
    text = f"max_batch_size: 1 dynamic_batching {{ default_queue_policy {policy} {levels} }}"
    service = one(tmp_path, text, plain())
    assert (service.facts.batching.max_queue_size, service.facts.settings.timeout) == (1, 2.5)


def test_instances_on_devices_get_one_each() -> None:
    groups = [{"count": 2, "kind": "KIND_GPU", "gpus": [0, 2], "rate_limiter": {"priority": 2}}, {"kind": "KIND_CPU"}]
    env = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("0", "2")]
    assert translated({"instance_group": groups}, "one") == {"workers": 5, "env": [*env, *env, {}]}


def test_an_ensemble_is_a_chain_in_the_order_of_its_tensors() -> None:
    last = {"modelName": "b", "modelVersion": "2", "inputMap": {"rawX": "t"}, "outputMap": {"y": "out"}}
    first = {"model_name": "a", "model_version": -1, "input_map": {"x": "in"}, "output_map": {"y": "t"}}
    assert translated({"ensembleScheduling": {"step": [last, first]}}, "one") == {
        "platform": "ensemble",
        "steps": [
            {"model": "a", "version": "", "inputs": {"x": "in"}, "outputs": {"y": "t"}},
            {"model": "b", "version": "2", "inputs": {"rawX": "t"}, "outputs": {"y": "out"}},
        ],
    }


def test_a_warm_up_of_triton_is_run(tmp_path: Path) -> None:
    inputs = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 random_data: true } }'
    service = one(tmp_path, f'max_batch_size: 4 model_warmup {{ name: "a" batch_size: 4 {inputs} }}', double("n", 3))
    model = service.facts.model
    ((example,), sizes) = model.examples, model.warmup_sizes
    assert (example["x"].shape, example["x"].dtype, sizes) == ((1, 3), np.float32, (4,))
    assert ask(service, {"x": np.ones((1, 3), np.float32)})[0]["y"].tolist() == [[2.0] * 3]
