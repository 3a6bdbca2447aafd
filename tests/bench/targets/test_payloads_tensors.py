"""The inference requests that are sent."""

import json

import numpy as np
import pytest

from weir.bench.targets.payloads import DeclaredInput, TargetEndpoint, declared_inputs, made_request, said_requests
from weir.errors import SettingsError

DOOR = TargetEndpoint("kserve", "sums", "2")
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5]}


def test_a_request_is_made_of_ones() -> None:
    request = made_request(DOOR, [DeclaredInput("x", "FP32", (-1, -1, 3)), DeclaredInput("n", "INT64", (-1,))], rows=2)
    assert (request.model, request.version) == ("sums", "2")
    first, second = request.inputs
    assert (first.array.shape, first.array.dtype, second.array.shape) == ((2, 1, 3), np.float32, (2,))
    assert first.array.all() and second.array.all()


def test_a_request_has_the_example_of_an_item_model() -> None:
    request = made_request(DOOR, [DeclaredInput("input", "BYTES", (-1,))], rows=3, example={"a": 1})
    assert request.inputs[0].array.tolist() == [b'{"a":1}'] * 3


def test_nobody_knows_what_bytes_are() -> None:
    with pytest.raises(SettingsError, match="model 'sums': nobody knows what its 'input' is; say what with --data"):
        made_request(DOOR, [DeclaredInput("input", "BYTES", (-1,))], rows=1)


def test_what_is_said_is_sent() -> None:
    (request,) = said_requests(json.dumps({"inputs": [TENSOR]}), DOOR)
    assert request.inputs[0].array.tolist() == [[1.5, 2.5]]


def test_what_is_said_must_be_requests() -> None:
    with pytest.raises(SettingsError, match="data: must be inference requests as JSON"):
        said_requests("3", DOOR)


@pytest.mark.parametrize("metadata", [None, {}, {"inputs": []}, {"inputs": [{"name": "x"}]}, {"inputs": 3}])
def test_metadata_without_inputs_are_of_no_use(metadata: object) -> None:
    with pytest.raises(SettingsError, match="model 'sums': the server has no metadata of it that name inputs"):
        declared_inputs("sums", metadata)


def test_metadata_with_a_datatype_of_their_own_are_of_no_use() -> None:
    with pytest.raises(SettingsError, match="model 'sums'"):
        declared_inputs("sums", {"inputs": [{"name": "x", "datatype": "FP8", "shape": [1]}]})


def test_inputs_are_read() -> None:
    metadata = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]}
    assert declared_inputs("sums", metadata) == [DeclaredInput("x", "FP32", (-1, 2))]
