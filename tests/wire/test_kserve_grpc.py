import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from tests.late import HAS_KSERVE, needs_kserve
from tests.rings import subcases

from weir.errors import InvalidRequest
from weir.wire import kserve_grpc
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters, RequestedOutput, TensorValue
from weir.wire.kserve_grpc import (
    ModelInferRequest,
    ModelInferResponse,
    message,
    parse_request,
    read_request,
    write_request,
    write_response,
)
from weir.wire.tensors import DTYPES

PARAMETERS: Parameters = {"a": True, "b": -5, "c": "text", "d": 0.5, "e": (1 << 64) - 1}
FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)
TEXTS = np.array([[b"one"], [b"\xff"]], object)
LARGE = np.arange(5000, dtype=np.int32).reshape(1, 5000)


def value(name: str, array: Any, datatype: str = "FP32", **parameters: Any) -> TensorValue:
    return TensorValue(name, datatype, array, parameters)


def request_with(**fields: Any) -> InferenceRequest:
    return read_request(parse_request(ModelInferRequest(**fields).SerializeToString()))


def tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "INT32", "shape": [2], **fields}


@subcases("more", [[], [value("large", LARGE, "INT32")]])
def test_requests_and_responses_there_and_back(more: list[TensorValue]) -> None:
    tensors = [value("x", FLOATS, note="n"), value("t", TEXTS, "BYTES"), *more]
    outputs = [RequestedOutput("y", {"k": 1}), RequestedOutput("z", {})]
    sent = InferenceRequest("m", tensors, version="2", id="7", outputs=outputs, parameters=PARAMETERS)
    parsed = parse_request(write_request(sent))
    request = read_request(parsed)
    assert request.outputs == outputs and not kserve_grpc.is_typed(parsed)
    answer = InferenceResponse("m", tensors, version="2", id="7", parameters=PARAMETERS)
    response = kserve_grpc.read_response(write_response(answer))
    for read, came in ((request, request.inputs), (response, response.outputs)):
        assert (read.model, read.version, read.id, read.parameters) == ("m", "2", "7", PARAMETERS)
        for before, after in zip(tensors, came, strict=True):
            assert (after.name, after.datatype, after.parameters) == (before.name, before.datatype, before.parameters)
            np.testing.assert_array_equal(after.array, before.array)


def test_raw_bytes_of_a_large_request_are_not_copied() -> None:
    body = write_request(InferenceRequest("m", [value("x", LARGE, "INT32")]))
    (read,) = read_request(parse_request(body)).inputs
    assert np.shares_memory(read.array, np.frombuffer(body, np.uint8))
    assert not read.array.flags.writeable


def written_typed(*outputs: TensorValue, typed: bool = True) -> Any:
    return ModelInferResponse.FromString(write_response(InferenceResponse("m", list(outputs)), typed=typed))


def test_typed_contents_are_answered_in_kind_if_all_have_a_typed_form() -> None:
    body = ModelInferRequest(inputs=[tensor(contents={"int_contents": [4, 5]})]).SerializeToString()
    parsed = parse_request(body)
    assert kserve_grpc.is_typed(parsed)
    assert read_request(parsed).inputs[0].array.tolist() == [4, 5]
    written = written_typed(value("y", FLOATS))
    assert list(written.outputs[0].contents.fp32_contents) == [0, 1, 2, 3, 4, 5]
    assert not written.raw_output_contents
    written = written_typed(value("y", FLOATS), value("h", FLOATS.astype(np.float16), "FP16"))
    assert [len(raw) for raw in written.raw_output_contents] == [24, 12]
    assert not written.outputs[0].HasField("contents")


Contents = message("inference.InferTensorContents")
REGION: Parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


def test_inputs_in_shared_memory_take_no_raw_contents() -> None:
    parameters = {"shared_memory_region": {"string_param": "r"}}
    inputs = [tensor(parameters=parameters), tensor(name="y")]
    body = ModelInferRequest(inputs=inputs, raw_input_contents=[bytes(8)]).SerializeToString()
    there = memoryview(b"\1\0\0\0\2\0\0\0")
    found = read_request(parse_request(body), find=lambda name, message: there if message else None)
    assert [each.array.tolist() for each in found.inputs] == [[1, 2], [0, 0]]
    with pytest.raises(InvalidRequest, match="tensor 'x': has shared_memory_region, but shared memory cannot be used"):
        read_request(parse_request(body))


@subcases("typed", [False, True])
def test_outputs_in_shared_memory_are_written_without_data(typed: bool) -> None:
    written = written_typed(TensorValue("y", "FP32", FLOATS, REGION), value("z", FLOATS), typed=typed)
    assert written.outputs[0].parameters["shared_memory_region"].string_param == "r"
    assert not written.outputs[0].HasField("contents")
    assert [len(raw) for raw in written.raw_output_contents] == ([] if typed else [0, 24])


def test_in_a_stream() -> None:
    response = write_response(InferenceResponse("m", [value("y", FLOATS)], id="7"))
    text, read = kserve_grpc.read_stream_response(kserve_grpc.in_stream(response))
    assert (text, read.id, read.outputs[0].array.tolist()) == ("", "7", FLOATS.tolist())
    text, read = kserve_grpc.read_stream_response(kserve_grpc.error_in_stream("no", "m", "8"))
    assert (text, read.model, read.id, read.outputs) == ("no", "m", "8", [])


BOTH, TEXT = tensor(contents={"int_contents": [1, 2]}), tensor(datatype="BYTES", shape=[1])


@subcases(
    ("fields", "message"),
    [
        ({"inputs": [tensor()]}, "tensor 'x': has no data, neither contents nor an element of raw_input_contents"),
        ({"inputs": [BOTH], "raw_input_contents": [bytes(8)]}, "raw_input_contents or shared memory too; only one is"),
        ({"inputs": [tensor(contents={})]}, r"has 0 elements in int_contents, its shape \[2\] takes 2"),
        ({"inputs": [tensor()], "raw_input_contents": [bytes(7)]}, r"'x': has 7 bytes, INT32 \[2\] takes 8"),
        ({"inputs": [tensor()], "raw_input_contents": [bytes(8)] * 2}, "raw_input_contents: has 2 elements, 1 more"),
        ({"inputs": [tensor(), tensor()], "raw_input_contents": [bytes(8)] * 2}, "tensor 'x': is there twice"),
        ({"inputs": [tensor(name="x"), tensor(name="y")], "raw_input_contents": [bytes(8)]}, "tensor 'y': has no data"),
        ({"inputs": [tensor(shape=[-1])]}, r"tensor 'x': has shape \[-1\], dimensions must be from 0"),
        ({"inputs": [tensor(datatype="INT4")]}, "tensor 'x': has datatype 'INT4', not one of BOOL"),
        ({"inputs": [tensor(parameters={"p": {}})]}, "parameter 'p': has no value"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "output 'y': is there twice"),
        ({"inputs": [TEXT], "raw_input_contents": [b"\5\0\0\0abc"]}, "tensor 'x': element 0 is truncated"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        request_with(**fields)


def test_no_elements_need_no_data_and_empty_contents_say_nothing() -> None:
    for empty in (tensor(shape=[0]), tensor(shape=[0], contents={})):
        assert request_with(inputs=[empty]).inputs[0].array.tolist() == []
    read = request_with(inputs=[tensor(contents={})], raw_input_contents=[np.array([1, 2], np.int32).tobytes()])
    assert read.inputs[0].array.tolist() == [1, 2]
    assert kserve_grpc.read_typed("x", "INT8", (0, 3), 0, Contents()).shape == (0, 3)


@pytest.mark.parametrize("padding", [0, 10_000], ids=["small", "large"])
@subcases("end", [b"\xff", b"\x3a\x7f123", b"\x0b", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x09123"])
def test_a_body_that_is_no_message(padding: int, end: bytes) -> None:
    body = ModelInferRequest(raw_input_contents=[bytes(padding)] if padding else []).SerializeToString()
    with pytest.raises(InvalidRequest, match=r"body: must be a inference\.ModelInferRequest"):
        parse_request(body + end)
    with pytest.raises(InvalidRequest):
        kserve_grpc.read_stream_response(body + end)


def test_fields_that_are_not_known_are_passed_over() -> None:
    body = write_request(InferenceRequest("m", [value("x", LARGE, "INT32")]))
    # One of each wire type, the last a group.
    unknown = b"\xa0\x06\x05\xa1\x06%b\xa5\x06%b\xa2\x06\x01z\xa3\x06\x08\x01\xa4\x06" % (bytes(8), bytes(4))
    assert read_request(parse_request(body + unknown)).inputs[0].array.tolist() == LARGE.tolist()


def test_large_and_small_are_read_alike() -> None:
    inputs = [value(f"x{index}", FLOATS[:1] + index) for index in range(500)]
    body = write_request(InferenceRequest("m", inputs, id="7"))
    whole = message("inference.ModelInferRequest").FromString(body)
    parsed = parse_request(body)
    assert len(body) > 8192 and list(map(bytes, parsed.raw)) == list(whole.raw_input_contents)
    del whole.raw_input_contents[:]
    assert parsed.message == whole


VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False], "UINT8": [0, 255], "UINT16": [0, 65535], "UINT32": [0, (1 << 32) - 1],
    "UINT64": [0, (1 << 64) - 1], "INT8": [-128, 127], "INT16": [-32768, 32767], "INT32": [-(1 << 31), (1 << 31) - 1],
    "INT64": [-(1 << 63), (1 << 63) - 1], "FP32": [0.5, -1e30], "FP64": [0.1, 1e300], "BYTES": [b"", b"\xff\x00"],
}  # fmt: skip


def test_what_has_a_typed_form() -> None:
    assert VALUES.keys() == kserve_grpc.FIELDS.keys() == DTYPES.keys() - {"FP16", "BF16"}


@subcases("datatype", VALUES)
def test_written_and_read_again(datatype: str) -> None:
    array = np.array(VALUES[datatype], DTYPES[datatype]).reshape(2, 1)
    contents = Contents()
    kserve_grpc.write_typed(datatype, array, contents)
    read = kserve_grpc.read_typed("x", datatype, [2, 1], 2, contents)
    assert read.dtype == DTYPES[datatype] and read.shape == (2, 1)
    assert read.tolist() == array.tolist()


@subcases(
    ("datatype", "contents", "message"),
    [
        ("FP16", {}, r"tensor 'x': FP16 has no typed form, it must be sent in raw_input_contents"),
        ("INT32", {"fp32_contents": [1, 2]}, r"tensor 'x': has fp32_contents, INT32 takes int_contents only"),
        ("INT32", {"int_contents": [1, 2], "fp32_contents": [1]}, r"has int_contents, fp32_contents, INT32 takes"),
        ("INT32", {"int_contents": [1]}, r"has 1 elements in int_contents, its shape \[2\] takes 2"),
        ("INT8", {"int_contents": [1, 128]}, r"tensor 'x': has the element 128, out of the range of INT8"),
        ("INT8", {"int_contents": [-129, 1]}, r"tensor 'x': has the element -129, out of the range of INT8"),
        ("UINT16", {"uint_contents": [65536, 0]}, r"has the element 65536, out of the range of UINT16"),
    ],
)
def test_typed_elements_that_are_refused(datatype: str, contents: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        kserve_grpc.read_typed("x", datatype, [2], 2, Contents(**contents))


SERVICE = "inference.GRPCInferenceService"
IMPORTS = {
    "weir": "from weir.wire import kserve_grpc",
    "tritonclient": "import tritonclient.grpc",
    "kserve": "from kserve.protocol.grpc import grpc_predict_v2_pb2",
}
# Has the messages of kserve loaded without all the rest of it, which takes seconds and has no messages.
BARE = """
import importlib.util, sys, types
for name in ("kserve", "kserve.protocol", "kserve.protocol.grpc"):
    package = types.ModuleType(name)
    package.__path__ = importlib.util.find_spec(name).submodule_search_locations
    sys.modules[name] = package
"""


def compiled() -> Any:
    return descriptor_pb2.FileDescriptorSet.FromString((kserve_grpc.PROTOS / kserve_grpc.COMPILED).read_bytes())


def test_what_is_packaged_is_the_sources_compiled(tmp_path: Path) -> None:
    sources = sorted(path.name for path in Path(str(kserve_grpc.PROTOS)).glob("*.proto"))
    output = tmp_path / kserve_grpc.COMPILED
    said = [f"-I{kserve_grpc.PROTOS}", f"--descriptor_set_out={output}", *sources]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *said], check=True, timeout=200)
    made = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    by_name = {file.name: file for file in made.file}
    assert {file.name for file in compiled().file} == by_name.keys()
    assert all(file == by_name[file.name] for file in compiled().file)


def fields(descriptor: Any, prefix: str = "") -> set[tuple[Any, ...]]:
    """Return name, number, type and label of all fields of a message and of those inside of it."""
    name = f"{prefix}{descriptor.name}"
    found = {(name, field.name, field.number, field.type, field.label) for field in descriptor.field}
    return found.union(*[fields(inner, f"{name}.") for inner in descriptor.nested_type])


def described(module: str) -> Any:
    """Return the file of a client's own messages, read in a process of their own."""
    before = BARE if HAS_KSERVE else "import sys"
    code = f"{before}\nfrom {module} import DESCRIPTOR as d; sys.stdout.buffer.write(d.serialized_pb)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=200)
    return descriptor_pb2.FileDescriptorProto.FromString(run.stdout)


@subcases(
    ("module", "ours"),
    [
        ("tritonclient.grpc.service_pb2", "inference.proto"),
        ("tritonclient.grpc.model_config_pb2", "model_config.proto"),
        *([("kserve.protocol.grpc.grpc_predict_v2_pb2", "inference.proto")] if HAS_KSERVE else []),
    ],
)
def test_names_and_numbers_are_those_of_stock_clients(module: str, ours: str) -> None:
    own = next(file for file in compiled().file if file.name == ours)
    known = set().union(*[fields(each) for each in own.message_type])
    theirs = described(module)
    expected = set().union(*[fields(each) for each in theirs.message_type])
    if "tritonclient" not in module:  # where the two contradict each other: the same number, and text in both
        assert {field for field in expected if not field[0].startswith("RepositoryModel")} <= known
    elif ours == "inference.proto":
        assert expected <= known
        methods = {method.name for method in kserve_grpc.methods(SERVICE)}
        assert {method.name for service in theirs.service for method in service.method} <= methods
    else:  # of the configuration we say what means something here
        assert known <= expected


def test_a_method_knows_its_path_and_messages() -> None:
    stream = next(method for method in kserve_grpc.methods(SERVICE) if method.name == "ModelStreamInfer")
    assert stream.path == "/inference.GRPCInferenceService/ModelStreamInfer"
    answered = message("inference.ModelStreamInferResponse")
    assert (stream.request, stream.response) == (message("inference.ModelInferRequest"), answered)
    assert stream.requests_stream and stream.responses_stream


@needs_kserve
@pytest.mark.parametrize(
    ("order", "before"),
    [
        (("weir", "tritonclient", "kserve"), BARE),
        (("kserve", "tritonclient", "weir"), BARE),
        pytest.param(("kserve", "weir", "tritonclient"), "", marks=pytest.mark.nightly),  # with the whole of kserve
    ],
)
def test_a_process_may_load_ours_and_those_of_clients_in_any_order(order: tuple[str, ...], before: str) -> None:
    """The two clients collide with each other, whoever comes first; ours with neither, before and after."""
    lines = [before, "collided = []"]
    for name in order:
        lines += ["try:", f"    {IMPORTS[name]}", "except TypeError:", f"    collided.append({name!r})"]
    second = [name for name in order if name != "weir"][1]
    lines += [f"assert collided == [{second!r}], collided", "Request = kserve_grpc.ModelInferRequest"]
    lines.append("assert Request.FromString(Request(id='7').SerializeToString()).id == '7'")
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], check=True, timeout=200)


@subcases("value", [0, 1, 127, 128, 300, 16383, 16384, (1 << 32) - 1, (1 << 64) - 1])
def test_varints_are_written_and_read_again(value: int) -> None:
    written = b"_" + kserve_grpc.write_varint(value) + b"_"
    assert kserve_grpc.read_varint(memoryview(written), 1) == (value, len(written) - 1)


def test_a_varint_that_is_cut_off_or_too_long() -> None:
    with pytest.raises(IndexError):
        kserve_grpc.read_varint(memoryview(b"\x80\x80"), 0)
    with pytest.raises(ValueError, match="more than 64 bits"):
        kserve_grpc.read_varint(memoryview(b"\x80" * 11 + b"\x01"), 0)
