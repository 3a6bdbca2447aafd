import json
from typing import Any

import numpy
import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest, TooLarge
from weir.model import Tensor
from weir.wire import kserve_json
from weir.wire.inference import InferenceRequest, InferenceResponse, RequestedOutput, TensorValue
from weir.wire.kserve_json import (
    BodyPeek,
    read_generate,
    read_request,
    refuse_duplicates,
    write_request,
    write_response,
)
from weir.wire.tensors import shape_key

X: dict[str, Any] = {"name": "x", "shape": [2, 2], "datatype": "INT32", "data": [1, 2, 3, 4]}


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def test_read_everything() -> None:
    parameters = {"priority": 1, "b": True, "c": "d"}
    more = {"outputs": [{"name": "y"}, {"name": "z", "parameters": {"a": 1.5}}], "unknown": {"ignored": []}}
    request = read_request(body({**X, "parameters": {"p": 2}}, id="7", parameters=parameters, **more), "m", "3")
    assert (request.model, request.version, request.id, request.parameters) == ("m", "3", "7", parameters)
    assert request.outputs == [RequestedOutput("y", {}), RequestedOutput("z", {"a": 1.5})]
    (x,) = request.inputs
    assert (x.name, x.datatype, x.parameters, x.array.dtype) == ("x", "INT32", {"p": 2}, numpy.int32)
    assert x.array.tolist() == [[1, 2], [3, 4]]


@subcases("more", [{}, {"outputs": None, "id": None, "parameters": None}, {"outputs": []}])
def test_no_requested_outputs_means_all(more: dict[str, Any]) -> None:
    assert read_request(body(X, **more), "m").outputs is None


@subcases(
    ("data", "words"),
    [
        (b"", "body: must be an inference request as JSON"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `inputs`"),
        (b'{"inputs": [', "truncated"),
        (b'{"inputs": [{"name": "x", "datatype": "INT32", "data": NaN}]}', "tensor 'x': has the element NaN, which is none of INT32"),
        (b'{"inputs": [], "a": ' + b"[" * 1_000_000, "nested less deeply"),
        (body({**X, "data": None}), "data is null, must be a list"),
        (body({"name": "x", "shape": [1], "datatype": "INT32"}), "tensor 'x': has no data"),
        (body({**X, "name": 3}), r"$.inputs[0].name"),
        (body({**X, "shape": [2.0, 2]}), "Expected `int`, got `float`"),
        (body({**X, "shape": [-1, 2]}), "tensor 'x': has shape [-1, 2]"),
        (body({**X, "shape": [3]}), "tensor 'x': has 4 elements, its shape [3] takes 3"),
        (body({**X, "datatype": "INT4"}), "tensor 'x': has datatype 'INT4', not one of"),
        (body({**X, "datatype": "FP16"}), "tensor 'x': FP16 has no JSON form"),
        (body(X, X), "tensor 'x': is there twice"),
        (body(X, outputs=[{"name": "y"}, {"name": "y"}]), "output 'y': is there twice"),
        (body(X, parameters={"a": None}), "Expected `bool | int | float | str`"),
        (body({**X, "parameters": {"binary_data_size": 16}}), "the body has no binary data"),
        (body({**X, "parameters": {"shared_memory_region": "r"}}), "shared memory cannot be used here"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(data, "m")
    assert words in caught.value.message


def test_bytes_may_lie_elsewhere() -> None:
    def find(name: str, parameters: dict[str, Any]) -> memoryview | None:
        return memoryview(b"\1\0\0\0\2\0\0\0") if "shared_memory_region" in parameters else None

    there = {"name": "x", "shape": [2], "datatype": "INT32", "parameters": {"shared_memory_region": "r", "mine": 1}}
    (x,) = read_request(body(there), "m", find=find).inputs
    assert x.array.tolist() == [1, 2]
    assert x.parameters == {"mine": 1}
    with pytest.raises(InvalidRequest, match="only one is allowed"):
        read_request(body({**there, "data": [1, 2]}), "m", find=find)
    with pytest.raises(InvalidRequest, match=r"has 8 bytes, INT32 \[3\] takes 12"):
        read_request(body({**there, "shape": [3]}), "m", find=find)


def test_a_response_goes_through() -> None:
    y = TensorValue("y", "FP32", numpy.array([[0.5, 2]], numpy.float32), {"q": 1})
    s = TensorValue("s", "BYTES", numpy.array([b"a", "ü".encode()], object))
    there = TensorValue("t", "INT8", numpy.zeros(3, numpy.int8), {"shared_memory_region": "r"})
    text = write_response(InferenceResponse("m", [y, s, there], version="1", id="7", parameters={"p": True}))
    assert json.loads(text) == {
        "model_name": "m",
        "model_version": "1",
        "id": "7",
        "parameters": {"p": True},
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"q": 1}, "data": [0.5, 2.0]},
            {"name": "s", "datatype": "BYTES", "shape": [2], "data": ["a", "ü"]},
            {"name": "t", "datatype": "INT8", "shape": [3], "parameters": {"shared_memory_region": "r"}},
        ],
    }
    text = write_response(InferenceResponse("m", [y, s]))
    response = kserve_json.read_response(text)
    assert (response.model, response.version, response.id, response.parameters) == ("m", "", "", {})
    assert [output.array.tolist() for output in response.outputs] == [[[0.5, 2.0]], [b"a", "ü".encode()]]
    assert b"model_version" not in text and b'"id"' not in text


def test_a_request_goes_through() -> None:
    x = TensorValue("x", "UINT64", numpy.array([2**64 - 1], numpy.uint64))
    outputs = [RequestedOutput("y", {"binary_data": True})]
    sent = InferenceRequest("m", [x], id="1", outputs=outputs, parameters={"a": 1})
    again = read_request(write_request(sent), "m")
    assert again.inputs[0].array.tolist() == [2**64 - 1]
    assert (again.id, again.outputs, again.parameters) == ("1", outputs, {"a": 1})


def test_a_duplicate_is_found() -> None:
    names = [str(number) for number in range(1000)]
    refuse_duplicates("output", names)
    with pytest.raises(InvalidRequest, match=r"^output .999.: is there twice, names must be unique$"):
        refuse_duplicates("output", [*names, "999"])
    with pytest.raises(
        InvalidRequest, match="outputs: there are 1025, must be at most 1024"
    ):  # nor is each compared with each
        refuse_duplicates("output", [str(number) for number in range(1025)])


@subcases(("shape", "data"), [([1000], [-1e308] * 1000), ([1, 1000], [[-1e308] * 1000])])
def test_floats_that_take_long_to_read(shape: list[int], data: Any) -> None:
    sent = body({"name": "x", "datatype": "FP64", "shape": shape, "data": data})
    (tensor,) = read_request(sent, "m").inputs
    assert tensor.array.shape == tuple(shape) and (tensor.array == -1e308).all()
    with pytest.raises(InvalidRequest, match="tensor 'x'"):
        read_request(sent.replace(b"-1e+308]", b"1e400]", 1), "m")


def test_parameters_that_take_long_to_read_are_bounded() -> None:
    few, many = ({"parameters": {f"{place}": -1e308 for place in range(count)}} for count in (1000, 10_000))
    assert len(read_request(body(**few), "m").parameters) == 1000
    for sent in (body(**many), body({"name": "x", **many}), body(outputs=[{"name": "x", **many}])):
        with pytest.raises(InvalidRequest, match=r"^parameters: have \d+ bytes, must have at most 65536$"):
            read_request(sent, "m")


DECLARED = (Tensor("text", "BYTES", [-1, 1]), Tensor("weights", "FP32", [-1, -1]))


def test_a_value_is_one_row_unless_it_has_all_dimensions() -> None:
    parameters = {"stream": True, "limit": 3}
    sent = json.dumps({"text": "hello", "weights": [1, 2], "id": "7", "parameters": parameters}).encode()
    request = read_generate(sent, DECLARED, "m", "2")
    assert (request.model, request.version, request.id, request.parameters) == ("m", "2", "7", parameters)
    assert [value.array.tolist() for value in request.inputs] == [[[b"hello"]], [[1.0, 2.0]]]
    request = read_generate(b'{"text": [["a"], ["b"]], "weights": [[1], [2]]}', DECLARED, "m")
    assert [value.array.tolist() for value in request.inputs] == [[[b"a"], [b"b"]], [[1.0], [2.0]]]
    request = read_generate(b'{"id": 3}', (Tensor("id", "INT32", [-1]),), "m")  # a tensor may be called so
    assert (request.id, request.inputs[0].array.tolist()) == ("", [3])


@subcases(
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
    names = b",".join([b'"%x":0' % name for name in range(1 << 17)])
    for many in (b"{}," * 400_000 + b"{}", b'{"a":' * 10 + b"{" + names + b"}" * 11):
        with pytest.raises(TooLarge, match="body: has more than"):
            read_generate(b'{"text":[' + many + b"]}", DECLARED, "m")


def test_one_value_stands_by_itself() -> None:
    outputs = [
        TensorValue("text", "BYTES", numpy.array([[b"hello"]], object)),
        TensorValue("scores", "FP32", numpy.array([[1.5, 2.5]], "float32")),
    ]
    assert json.loads(kserve_json.write_generated(InferenceResponse("m", outputs, version="2", id="7"))) == {
        "model_name": "m", "model_version": "2", "id": "7", "text": "hello", "scores": [1.5, 2.5],
    }  # fmt: skip


PEEKED = [Tensor("a", "INT32", [-1, 2]), Tensor("b", "FP32", [-1, -1])]


def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": ["whatever", {"it": ["is"]}]}


def test_the_key_is_that_of_the_arrays() -> None:
    arrays = {"a": numpy.zeros((3, 2), numpy.int32), "b": numpy.zeros((3, 5), numpy.float32)}
    outliner = BodyPeek(PEEKED)
    for inputs in ((A, B), (B, A), (A, B)):
        outline = outliner(body(*inputs, parameters={"priority": 2}))
        assert outline == (3, shape_key(arrays, PEEKED), {"priority": 2}, False)


A, B = tensor("a", "INT32", 3, 2), tensor("b", "FP32", 3, 5)
PLACED = {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 24}}


@subcases(
    ("sent", "for_server"),
    [
        (body(A, B), False),
        (body(A, B, parameters={"binary_data_output": True}), True),
        (body(A, B, outputs=[{"name": "y"}, {"name": "z", "parameters": {"binary_data": True}}]), True),
        (body(A, B, outputs=[{"name": "y", "parameters": {"binary_data": False}}]), False),
        (body(A | PLACED, B), True),
        (body(A | PLACED, B).replace(b"_region", b"_regi\\u006fn"), True),
        (body(A, B, outputs=[{"name": "y", **PLACED}]), True),
        (body(A, B, outputs=[{"name": "y", "parameters": {"classification": 2}}]), True),
        (body({**A, "parameters": {"shared_memory": "x"}}, B, id="shared_memory_region"), False),
    ],
)
def test_what_only_the_server_can_read_or_write_is_noticed(sent: bytes, for_server: bool) -> None:
    assert BodyPeek(PEEKED)(sent).for_server == for_server


def test_few_shapes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kserve_json, "MAX_REMEMBERED", 2)
    outliner = BodyPeek(PEEKED)
    for rows in (1, 2, 3, 1, 2, 3):
        assert outliner(body(tensor("a", "INT32", rows, 2), tensor("b", "FP32", rows, 5))).rows == rows


@subcases(
    ("inputs", "words"),
    [
        ([tensor("a", "INT32", 1, 2)], "tensor 'b': is missing"),
        ([tensor("a", "INT32", 1, 2), tensor("c", "INT32", 1)], "tensor 'c': not one of 'a', 'b'"),
        ([tensor("a", "INT32", 1, 2), tensor("a", "INT32", 1, 2)], "tensor 'a': is there twice"),
        ([tensor("a", "INT8", 1, 2), tensor("b", "FP32", 1, 1)], "tensor 'a': has datatype 'INT8', must be INT32"),
        ([tensor("a", "INT32", 1, 3), tensor("b", "FP32", 1, 1)], "tensor 'a': has shape [1, 3], must be [-1, 2]"),
        ([tensor("a", "INT32", 1, 2), tensor("b", "FP32", 1, -1)], "tensor 'b': has shape [1, -1]"),
        ([tensor("a", "INT32", 1, 2), tensor("b", "FP32", 2, 1)], "tensor 'b': has 2 rows, tensor 'a' has 1"),
        ([tensor("a", "INT32", 0, 2), tensor("b", "FP32", 0, 1)], "tensor 'a': has 0 rows, must have at least 1"),
    ],
)
def test_what_an_outline_has_wrong_is_named(inputs: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BodyPeek(PEEKED)(body(*inputs))
    assert words in caught.value.message
