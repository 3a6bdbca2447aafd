import json
from typing import Any

import numpy
import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest
from weir.model import NONE, Tensor
from weir.wire import kserve_binary
from weir.wire.inference import InferenceRequest, InferenceResponse, RequestedOutput, TensorValue
from weir.wire.kserve_binary import binary_outputs, read_raw_request, read_request, write_request, write_response
from weir.wire.tensors import DTYPES

X = TensorValue("x", "FP32", numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
S = TensorValue("s", "BYTES", numpy.array([[b"a", b"\xff"]], object))


def binary(name: str, shape: list[int], datatype: str, size: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": size}, **more}


def read(inputs: list[dict[str, Any]], rest: bytes, header_length: int | None = None) -> InferenceRequest:
    header = json.dumps({"inputs": inputs}).encode()
    return read_request(header + rest, len(header) if header_length is None else header_length, "m")


@subcases("datatype", DTYPES)
def test_every_datatype_goes_through(datatype: str) -> None:
    dtype = DTYPES[datatype]
    array = numpy.array([b"a", b""], object) if datatype == "BYTES" else numpy.array([1, 0], dtype)
    written = write_request(InferenceRequest("m", [TensorValue("x", datatype, array)]))
    assert written.header_length == len(written.parts[0])
    body = b"".join(written.parts)
    assert len(body) == written.length
    (x,) = read_request(body, written.header_length, "m").inputs
    assert (x.datatype, x.array.dtype, x.parameters) == (datatype, dtype, {})
    assert x.array.tolist() == array.tolist()


def test_arrays_are_views_of_the_body_and_written_from_their_memory() -> None:
    written = write_request(InferenceRequest("m", [X]))
    assert numpy.frombuffer(written.parts[1], numpy.uint8).ctypes.data == X.array.ctypes.data
    assert written.header_length is not None
    body = bytearray(b"".join(written.parts))
    (x,) = read_request(body, written.header_length, "m").inputs
    assert x.array.ctypes.data == numpy.frombuffer(body, numpy.uint8).ctypes.data + written.header_length
    assert not x.array.flags.writeable


def test_other_byte_orders_and_strides_are_written_right() -> None:
    for array in (X.array.astype(">f4"), numpy.asfortranarray(X.array), numpy.repeat(X.array, 2, axis=1)[:, ::2]):
        written = write_response(InferenceResponse("m", [TensorValue("x", "FP32", array)]), lambda _: True)
        assert bytes(written.parts[1]) == X.array.tobytes()


def test_binary_and_json_mixed() -> None:
    written = write_response(InferenceResponse("m", [S, X]), lambda name: name == "s")
    response = kserve_binary.read_response(b"".join(written.parts), written.header_length or 0)
    assert [output.array.tolist() for output in response.outputs] == [S.array.tolist(), X.array.tolist()]
    only_json = write_response(InferenceResponse("m", [X]), lambda _: False)
    assert only_json.header_length is None and len(only_json.parts) == 1


def test_tensors_take_their_bytes_in_order() -> None:
    first, second = binary("a", [1], "INT8", 1), binary("b", [2], "INT8", 2)
    plain = {"name": "c", "shape": [1], "datatype": "INT8", "data": [7]}
    inputs = read([first, plain, second], b"\1\2\3").inputs
    assert [value.array.tolist() for value in inputs] == [[1], [7], [2, 3]]


BOTH = binary("x", [1], "INT8", 1)
BOTH["parameters"]["shared_memory_region"] = "r"


@subcases(
    ("inputs", "rest", "words"),
    [
        ([binary("x", [1], "INT32", 4)], b"\0\0\0", "binary_data_size 4, must be a number of bytes from 0 to those"),
        ([binary("x", [1], "INT32", -4)], b"\0\0\0\0", "binary_data_size -4"),
        ([binary("x", [1], "INT32", 2**70)], b"", "binary_data_size 1180591620717411303424"),
        ([binary("x", [1], "INT32", "4")], b"\0\0\0\0", "binary_data_size '4'"),
        ([binary("x", [1], "INT32", 4.0)], b"\0\0\0\0", "binary_data_size 4.0"),
        ([binary("x", [1], "INT32", True)], b"\0", "binary_data_size True"),
        ([binary("x", [2], "INT32", 4)], b"\0\0\0\0", "tensor 'x': has 4 bytes, INT32 [2] takes 8"),
        ([BOTH], b"\0", "only one is allowed"),
        ([binary("x", [1], "INT32", 4, data=[1])], b"\0\0\0\0", "only one is allowed"),
        ([binary("x", [1], "INT32", 4)], b"\0\0\0\0\0", "body: has 1 bytes after the last binary tensor"),
        ([binary("x", [1], "BYTES", 5)], b"\2\0\0\0a", "element 0 is truncated: 1 of 2 bytes"),
    ],
)
def test_what_is_wrong_is_named(inputs: list[dict[str, Any]], rest: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(inputs, rest)
    assert words in caught.value.message


def test_the_header_must_be_within_the_body() -> None:
    for length in (-1, 10_000):
        with pytest.raises(InvalidRequest, match=f"Inference-Header-Content-Length {length}: must be from 0"):
            read([], b"", length)


def test_which_outputs_are_binary() -> None:
    wanted: list[tuple[str, Any]] = [("a", {"binary_data": False}), ("b", {}), ("c", {"binary_data": True})]
    outputs = [RequestedOutput(*each) for each in wanted]
    some = binary_outputs(InferenceRequest("m", [], outputs=outputs))
    assert [some(name) for name in "abc"] == [False, False, True]
    most = binary_outputs(InferenceRequest("m", [], outputs=outputs, parameters={"binary_data_output": True}))
    assert [most(name) for name in "abcd"] == [False, True, True, True]
    assert not binary_outputs(InferenceRequest("m", []))("a")


def test_the_whole_body_is_one_tensor() -> None:
    request = read_raw_request(b"\1\0\2\0\3\0\4\0", [Tensor("x", "INT16", [-1, 2, -1])], "m")
    assert request.inputs[0].array.tolist() == [[[1, 2], [3, 4]]]
    assert binary_outputs(request)("y")
    request = read_raw_request(b"\1\0\2\0", [Tensor("x", "INT16", [2], batch=NONE)], "m")
    assert request.inputs[0].array.tolist() == [1, 2]
    request = read_raw_request(b"anything", [Tensor("s", "BYTES", [-1, -1])], "m")
    assert request.inputs[0].array.tolist() == [[b"anything"]]


@subcases(
    ("declared", "words"),
    [
        ([Tensor("x", "INT16", [-1]), Tensor("y", "INT16", [-1])], "the model has 2 inputs"),
        ([Tensor("x", "INT16", [-1, -1, -1])], "2 variable dimensions besides the batch"),
        ([Tensor("x", "INT16", [-1, 3, -1])], "4 bytes, must be a multiple of 6"),
        ([Tensor("x", "INT16", [-1, 3])], "has 4 bytes, INT16 [1, 3] takes 6"),
        ([Tensor("x", "BYTES", [-1, 3])], "BYTES [-1, 3] cannot be one raw element"),
    ],
)
def test_what_cannot_be_raw(declared: list[Tensor], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_raw_request(b"\1\0\2\0", declared, "m")
    assert words in caught.value.message


def test_a_body_can_be_placed_so_that_its_tensors_are_aligned() -> None:
    assert [(kserve_binary.lead(length) + length) % kserve_binary.ALIGNMENT for length in (0, 1, 63, 64, 65, 137)] == [
        0
    ] * 6
    assert kserve_binary.lead(64) == 0
