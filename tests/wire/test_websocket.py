"""WebSocket messages: both directions, text and binary, and what is wrong with the malformed."""

import json
import struct
import tracemalloc

import numpy
import pytest
from tests.rings import subcases

from weir import InvalidRequest, TooLarge
from weir.wire.inference import InferenceRequest, InferenceResponse, RequestedOutput, TensorValue
from weir.wire.websocket import (
    CancelMessage,
    ErrorMessage,
    id_of,
    read_request,
    read_response,
    write_cancel,
    write_failure,
    write_request,
    write_response,
)  # fmt: skip


def request(**options: object) -> InferenceRequest:
    values = TensorValue("x", "FP32", numpy.array([[1.5, 2.5]], "float32"))
    words = numpy.array([b"one", b"\xfftwo"], object)
    inputs = [values] if options.pop("plain", False) else [values, TensorValue("words", "BYTES", words)]
    return InferenceRequest("simple", inputs, id="7", **options)  # type: ignore[arg-type]  # said by the test


def test_a_request_as_text() -> None:
    message = write_request(request(plain=True, version="2"), binary=False).message("7")
    assert isinstance(message, str)
    assert json.loads(message) == {
        "model_name": "simple", "model_version": "2", "id": "7",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5]}],
    }  # fmt: skip
    read = read_request(message)
    assert isinstance(read, InferenceRequest)
    assert (read.model, read.version, read.id) == ("simple", "2", "7")
    assert read.inputs[0].array.tolist() == [[1.5, 2.5]]
    # In the words of AMD's client.
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5], "parameters": {}}]
    read = read_request(json.dumps({"model": "simple", "id": "7", "inputs": inputs, "parameters": {}, "outputs": []}))
    assert isinstance(read, InferenceRequest)
    assert (read.model, read.version, read.id) == ("simple", "", "7")


def test_a_request_as_binary() -> None:
    asked = request(outputs=[RequestedOutput("y", {"binary_data": True})], parameters={"priority": 1})
    message = write_request(asked).message("7")
    assert isinstance(message, bytes)
    (length,) = struct.unpack_from(">I", message)
    header = json.loads(message[4 : 4 + length])
    assert [tensor["parameters"] for tensor in header["inputs"]] == [{"binary_data_size": 8}, {"binary_data_size": 15}]
    assert len(message) == 4 + length + 8 + 15
    read = read_request(message)
    assert isinstance(read, InferenceRequest)
    assert (read.model, read.version, read.id, read.parameters) == ("simple", "", "7", {"priority": 1})
    assert [tensor.array.tolist() for tensor in read.inputs] == [[[1.5, 2.5]], [b"one", b"\xfftwo"]]
    assert read.outputs == [RequestedOutput("y", {"binary_data": True})]


def test_a_response_has_the_requested_form() -> None:
    response = InferenceResponse("simple", [TensorValue("y", "INT32", numpy.array([3], "int32"))], id="7")
    for kind, parameters in ((str, {}), (bytes, {"binary_data_output": True})):
        message = write_response(request(parameters=parameters), response)
        read = read_response(message)
        assert isinstance(message, kind) and isinstance(read, InferenceResponse)
        assert (read.model, read.id, read.outputs[0].array.tolist()) == ("simple", "7", [3])


def test_cancelling_and_failing() -> None:
    assert read_request(write_cancel("7")) == CancelMessage("7")
    failure = ErrorMessage("full", "7", "Overloaded", 429, 0.5)
    assert read_response(write_failure(failure)) == failure
    assert read_response('{"error": "no"}') == ErrorMessage("no")


PLACED = {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"shared_memory_region": "r"}}


@subcases(
    ("message", "text"),
    [
        ("", "message: must be|body: must be a message as JSON"),
        ("[]", "must be a message as JSON"),
        ("{}", "has neither 'model_name' nor 'cancel'"),
        ('{"model_name": "", "inputs": []}', "has neither 'model_name' nor 'cancel'"),
        ('{"model_name": 7}', "must be a message as JSON"),
        ('{"model_name": "m"}', "must be an inference request as JSON"),
        ('{"model_name": "\ud800"}', "must be a message as JSON"),
        (json.dumps({"model_name": "m", "inputs": [PLACED]}), "shared memory cannot be used here"),
        (b"", "has 0 bytes, must begin with the length of its JSON in 4"),
        (b"\0\0\0", "has 3 bytes"),
        (b"\xff\xff\xff\xff{}", "says that its JSON has 4294967295 bytes, but 2 follow"),
        (b"\0\0\0\x02{}rest", "has neither 'model_name' nor 'cancel'"),
        (b'\0\0\0\x1f{"model_name": "m", "inputs":[]}rest', "JSON"),
        (b'\0\0\0\x20{"model_name": "m", "inputs":[]}rest', "4 bytes after the last binary tensor"),
    ],
)
def test_what_is_no_message(message: str | bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read_request(message)


@subcases(
    ("message", "found"),
    [
        ('{"id": "7", "inputs": 3}', "7"), ('{"id": 7}', ""), ("[]", ""), ("{", ""), (b"\0\0\0\x09{\"id\":\"8\"}", ""),
        (b'\0\0\0\x0a{"id":"8"}', "8"), (b"", ""),
    ],
)  # fmt: skip
def test_the_id_of_what_cannot_be_read(message: str | bytes, found: str) -> None:
    assert id_of(message) == found


def test_an_id_that_is_no_text_is_not_decoded() -> None:
    message = '{"model_name": "m", "id": [' + "[]," * 300_000 + "[]]}"
    tracemalloc.start()
    assert id_of(message) == ""
    assert tracemalloc.get_traced_memory()[1] < 4 * len(message)  # 20 times before
    tracemalloc.stop()


def test_names_of_parameters_are_counted_before_they_are_made() -> None:
    many = ",".join([f'"{name:x}":0' for name in range(1 << 17)])
    with pytest.raises(TooLarge, match="different names"):
        read_request('{"model_name": "m", "inputs": [], "parameters": {' + many + "}}")
