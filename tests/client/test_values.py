"""From arrays to tensors."""

import numpy as np
import pytest

from weir import errors
from weir.client import Result, TensorValue
from weir.client.values import request_of, tensor_of
from weir.wire.inference import InferenceResponse


def test_the_datatype_is_that_of_the_array() -> None:
    for datatype, dtype in (
        ("BOOL", bool),
        ("INT8", np.int8),
        ("UINT64", np.uint64),
        ("FP16", np.float16),
        ("FP64", float),
    ):
        assert tensor_of("x", np.zeros(2, dtype)).datatype == datatype
    swapped = tensor_of("x", np.array([1, 2], ">i4"))
    assert (swapped.datatype, swapped.array.tolist(), swapped.array.dtype) == ("INT32", [1, 2], np.dtype("int32"))


def test_texts_and_bytes_are_bytes() -> None:
    for array in (np.array(["é"]), np.array(["é".encode()]), np.array(["é"], object)):
        assert tensor_of("x", array).array.tolist() == ["é".encode()]
    with pytest.raises(errors.InvalidRequest, match="neither bytes nor a text"):
        tensor_of("x", np.array([3], object))


def test_other_arrays_are_refused_and_tensors_are_taken_as_they_are() -> None:
    with pytest.raises(errors.InvalidRequest, match="complex128"):
        tensor_of("x", np.array([1j]))
    given = TensorValue("x", "BF16", np.zeros(2, np.uint16))
    assert tensor_of("x", given) is given


def test_what_is_said_beside_the_inputs() -> None:
    said = request_of(
        "m", {}, {"version": "2", "id": "7", "outputs": ["y"], "priority": 1, "timeout": 0.5, "parameters": {"a": 1}}
    )
    assert (said.version, said.id, [each.name for each in said.outputs or ()]) == ("2", "7", ["y"])
    assert said.parameters == {"a": 1, "priority": 1, "timeout": 500_000}
    assert request_of("m", {}, {}).outputs is None


def test_a_result_is_a_mapping_of_arrays() -> None:
    array = np.array([1, 2], np.int32)
    response = InferenceResponse("m", [TensorValue("y", "INT32", array)], parameters={"triton_final_response": True})
    result = Result(response)
    assert (len(result), list(result), result["y"] is array, result.parameters) == (1, ["y"], True, {})
    assert repr(result) == "Result('m', [TensorValue('y', INT32, shape [2])])"
