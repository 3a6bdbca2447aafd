"""Triton's generate extension: flat objects to requests, and answers to flat objects."""

import json

import numpy
import pytest

from weir import InvalidRequest, Tensor, TooLarge
from weir.wire.inference import InferenceResponse, TensorValue
from weir.wire.kserve_json import read_generate, write_generated

DECLARED = (Tensor("text", "BYTES", [-1, 1]), Tensor("weights", "FP32", [-1, -1]))


def test_a_value_is_one_row_unless_it_has_all_dimensions() -> None:
    body = {"text": "hello", "weights": [1, 2], "id": "7", "parameters": {"stream": True, "limit": 3}}
    request = read_generate(json.dumps(body).encode(), DECLARED, "m", "2")
    assert (request.model, request.version, request.id, request.parameters) == (
        "m",
        "2",
        "7",
        {"stream": True, "limit": 3},
    )
    assert [value.array.tolist() for value in request.inputs] == [[[b"hello"]], [[1.0, 2.0]]]
    request = read_generate(b'{"text": [["a"], ["b"]], "weights": [[1], [2]]}', DECLARED, "m")
    assert [value.array.tolist() for value in request.inputs] == [[[b"a"], [b"b"]], [[1.0], [2.0]]]


def test_a_tensor_may_be_called_id() -> None:
    request = read_generate(b'{"id": 3}', (Tensor("id", "INT32", [-1]),), "m")
    assert (request.id, request.inputs[0].array.tolist()) == ("", [3])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"[]", "must be an object"), (b"{", "must be an object"),
        (b'{"text": "a"}', "tensor 'weights': is missing"),
        (b'{"text": "a", "weights": [1], "more": 1}', "tensor 'more': not one of"),
        (b'{"text": "a", "weights": [[[1]]]}', "tensor 'weights'"),
        (b'{"text": 1, "weights": [1]}', "tensor 'text'"),
        (b'{"id": 1}', "id=1: must be a text"), (b'{"parameters": {"a": []}}', "parameters: "),
        (b'{"parameters": 3}', "parameters: "),
    ],
)  # fmt: skip
def test_what_is_no_request(body: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        read_generate(body, DECLARED, "m")


def test_lists_objects_and_names_are_counted_before_they_are_made() -> None:
    for many in (
        b"{}," * 400_000,
        b'{"a":' * 10 + b"{" + b",".join([b'"%x":0' % name for name in range(1 << 17)]) + b"}" + b"}" * 10 + b",",
    ):
        with pytest.raises(TooLarge, match="body: has more than"):
            read_generate(b'{"text":[' + many[:-1] + b"]}", DECLARED, "m")


def test_one_value_stands_by_itself() -> None:
    outputs = [
        TensorValue("text", "BYTES", numpy.array([[b"hello"]], object)),
        TensorValue("scores", "FP32", numpy.array([[1.5, 2.5]], "float32")),
    ]
    assert json.loads(write_generated(InferenceResponse("m", outputs, version="2", id="7"))) == {
        "model_name": "m", "model_version": "2", "id": "7", "text": "hello", "scores": [1.5, 2.5],
    }  # fmt: skip
