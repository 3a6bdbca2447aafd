import json

import pytest

from weir.wire.values import find_nonfinite

X = {"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]}


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ([1.0, float("nan")], "NaN"),
        ([[1.0], [float("inf")]], "Infinity"),
        ([[[float("-inf")]]], "-Infinity"),
        (float("nan"), "NaN"),
    ],
)
def test_the_tensor_and_the_number_are_named(data: object, word: str) -> None:
    body = json.dumps({"inputs": [X, {**X, "name": "y", "datatype": "FP32", "data": data}]}).encode()
    assert find_nonfinite(body) == f"tensor 'y': has the element {word}, which is none of FP32 in JSON"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"NaN",
        b"[NaN]",
        b'{"inputs": NaN}',
        b'{"inputs": [NaN]}',
        b'{"inputs": [{"data": [NaN]}',
        b'{"inputs": [{"data": ["NaN"]}]}',
        b'{"id": NaN, "inputs": []}',
        b'{"inputs": [], "id": "\xffNaN"}',
        b'{"inputs": [{"data": ' + b"[" * 100_000 + b"NaN",
        json.dumps({"inputs": [X]}).encode(),
        json.dumps({"inputs": [{**X, "data": [float("nan")]}], "more": "." * (1 << 20)}).encode(),
    ],
)
def test_what_is_wrong_in_another_way_is_left_to_others(body: bytes) -> None:
    assert find_nonfinite(body) is None
