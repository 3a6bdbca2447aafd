import json
from typing import Any

import numpy
import pytest

from weir.errors import InvalidRequest
from weir.wire.inference import AskedOutput, InferenceRequest, InferenceResponse, TensorValue
from weir.wire.kserve_json import read_request, read_response, refuse_duplicates, write_request, write_response

X: dict[str, Any] = {"name": "x", "shape": [2, 2], "datatype": "INT32", "data": [1, 2, 3, 4]}


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def refused(data: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read_request(data, "m")
    return caught.value.message


def test_read_everything() -> None:
    asked = [{"name": "y"}, {"name": "z", "parameters": {"a": 1.5}}]
    more = {"id": "7", "parameters": {"priority": 1, "b": True, "c": "d"}, "outputs": asked, "unknown": {"ignored": []}}
    request = read_request(body({**X, "parameters": {"p": 2}}, **more), "m", "3")
    assert (request.model, request.version, request.id) == ("m", "3", "7")
    assert request.parameters == {"priority": 1, "b": True, "c": "d"}
    assert request.outputs == [AskedOutput("y", {}), AskedOutput("z", {"a": 1.5})]
    (x,) = request.inputs
    assert (x.name, x.datatype, x.parameters) == ("x", "INT32", {"p": 2})
    assert x.array.dtype == numpy.int32
    assert x.array.tolist() == [[1, 2], [3, 4]]


def test_nothing_asked_for_is_everything() -> None:
    assert read_request(body(X), "m").outputs is None
    assert read_request(body(X, outputs=None, id=None, parameters=None), "m").outputs is None
    assert read_request(body(X, outputs=[]), "m").outputs is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "body: must be an inference request as JSON"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `inputs`"),
        (b'{"inputs": [', "truncated"),
        (b'{"inputs": [{"name": "x", "datatype": "INT32", "data": NaN}]}', "tensor 'x': has the element NaN, which is none of INT32"),
        (b'{"inputs": [], "a": ' + b"[" * 100_000, "nested less deeply"),
        (body({**X, "data": None}), "data is null, must be a list"),
        (body({"name": "x", "shape": [1], "datatype": "INT32"}), "tensor 'x': has no data"),
        (body({**X, "name": 3}), r"$.inputs[0].name"),
        (body({**X, "shape": [2.0, 2]}), "Expected `int`, got `float`"),
        (body({**X, "shape": [-1, 2]}), "tensor 'x': has shape [-1, 2]"),
        (body({**X, "shape": [2**70, 2]}), "tensor 'x': has shape"),
        (body({**X, "shape": [2**40, 2**40]}), "takes more than"),
        (body({**X, "shape": [0, 2**62]}), "takes more than"),
        (body({**X, "shape": [1] * 33}), "33 dimensions"),
        (body({**X, "shape": [3]}), "tensor 'x': has 4 elements, its shape [3] takes 3"),
        (body({**X, "datatype": "INT4"}), "tensor 'x': has datatype 'INT4', not one of"),
        (body({**X, "datatype": "FP16"}), "tensor 'x': FP16 has no JSON form"),
        (body({**X, "datatype": "BF16"}), "tensor 'x': BF16 has no JSON form"),
        (body(X, X), "tensor 'x': is there twice"),
        (body(X, outputs=[{"name": "y"}, {"name": "y"}]), "output 'y': is there twice"),
        (body(X, parameters={"a": None}), "Expected `bool | int | float | str`"),
        (body({**X, "parameters": {"binary_data_size": 16}}), "the body has no binary data"),
        (body({**X, "parameters": {"shared_memory_region": "r"}}), "shared memory cannot be used here"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(data: bytes, words: str) -> None:
    assert words in refused(data)


def test_bytes_may_lie_elsewhere() -> None:
    def find(name: str, parameters: dict[str, Any]) -> memoryview | None:
        return memoryview(b"\1\0\0\0\2\0\0\0") if "shared_memory_region" in parameters else None

    there = {"name": "x", "shape": [2], "datatype": "INT32", "parameters": {"shared_memory_region": "r", "mine": 1}}
    (x,) = read_request(body(there), "m", find=find).inputs
    assert x.array.tolist() == [1, 2]
    assert x.parameters == {"mine": 1}
    with pytest.raises(InvalidRequest, match="only one may be"):
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
    response = read_response(text)
    assert (response.model, response.version, response.id, response.parameters) == ("m", "", "", {})
    assert [output.array.tolist() for output in response.outputs] == [[[0.5, 2.0]], [b"a", "ü".encode()]]
    assert b"model_version" not in text
    assert b'"id"' not in text


def test_a_request_goes_through() -> None:
    x = TensorValue("x", "UINT64", numpy.array([2**64 - 1], numpy.uint64))
    request = InferenceRequest("m", [x], id="1", outputs=[AskedOutput("y", {"binary_data": True})], parameters={"a": 1})
    again = read_request(write_request(request), "m")
    assert again.inputs[0].array.tolist() == [2**64 - 1]
    assert (again.id, again.outputs, again.parameters) == ("1", request.outputs, {"a": 1})
    assert read_request(write_request(InferenceRequest("m", [x])), "m").outputs is None


def test_a_duplicate_is_found_in_one_pass() -> None:
    compared = 0

    class Name(str):
        """Counts how often it is compared."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

    names: list[str] = [Name(number) for number in range(1000)]
    refuse_duplicates("output", names)
    with pytest.raises(InvalidRequest, match=r"^output .999.: is there twice, names must be unique$"):
        refuse_duplicates("output", [*names, Name(999)])
    assert compared < 100  # by their hashes alone


@pytest.mark.parametrize("shape", [[1000], [1, 1000]])
def test_floats_that_take_long_to_read(shape: list[int]) -> None:
    data: Any = [-1e308] * 1000 if len(shape) == 1 else [[-1e308] * 1000]
    body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": shape, "data": data}]}
    (tensor,) = read_request(json.dumps(body).encode(), "m").inputs
    assert tensor.array.shape == tuple(shape) and (tensor.array == -1e308).all()
    wrong = json.dumps(body).encode().replace(b"-1e+308]", b"1e400]", 1)
    with pytest.raises(InvalidRequest, match="tensor 'x'"):
        read_request(wrong, "m")


def test_parameters_that_take_long_to_read_are_bounded() -> None:
    few = {"inputs": [], "parameters": {f"{place}": -1e308 for place in range(1000)}}
    assert len(read_request(json.dumps(few).encode(), "m").parameters) == 1000
    for where in ("parameters", "inputs", "outputs"):
        many: dict[str, Any] = {"parameters": {f"{place}": -1e308 for place in range(10_000)}}
        body = {"inputs": [], **(many if where == "parameters" else {where: [{"name": "x", **many}]})}
        with pytest.raises(InvalidRequest, match=r"^parameters: \d+ bytes of them, there may be 65536$"):
            read_request(json.dumps(body).encode(), "m")
