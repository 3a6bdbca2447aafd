import json
from typing import Any

import numpy
import pytest

from weir.errors import InvalidRequest
from weir.model import Tensor
from weir.wire import kserve_json as kserve_outline
from weir.wire.kserve_json import BodyPeek
from weir.wire.tensors import shape_key

DECLARED = [Tensor("a", "INT32", [-1, 2]), Tensor("b", "FP32", [-1, -1])]


def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": ["whatever", {"it": ["is"]}]}


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def test_the_key_is_that_of_the_arrays() -> None:
    arrays = {"a": numpy.zeros((3, 2), numpy.int32), "b": numpy.zeros((3, 5), numpy.float32)}
    outliner = BodyPeek(DECLARED)
    a, b = tensor("a", "INT32", 3, 2), tensor("b", "FP32", 3, 5)
    for inputs in ((a, b), (b, a), (a, b)):
        outline = outliner(body(*inputs, parameters={"priority": 2}))
        assert outline == (3, shape_key(arrays, DECLARED), {"priority": 2}, False)


def test_binary_outputs_are_noticed() -> None:
    outliner, a, b = BodyPeek(DECLARED), tensor("a", "INT32", 3, 2), tensor("b", "FP32", 3, 5)
    assert outliner(body(a, b, parameters={"binary_data_output": True})).for_server
    assert outliner(body(a, b, outputs=[{"name": "y"}, {"name": "z", "parameters": {"binary_data": True}}])).for_server
    assert not outliner(body(a, b, outputs=[{"name": "y", "parameters": {"binary_data": False}}])).for_server


def test_what_only_the_server_can_read_or_write_is_noticed() -> None:
    outliner, a, b = BodyPeek(DECLARED), tensor("a", "INT32", 3, 2), tensor("b", "FP32", 3, 5)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 24}
    assert not outliner(body(a, b)).for_server
    assert outliner(body({**a, "parameters": place}, b)).for_server
    assert outliner(body({**a, "parameters": place}, b).replace(b"_region", b"_regi\\u006fn")).for_server
    for parameters in (place, {"classification": 2}):
        assert outliner(body(a, b, outputs=[{"name": "y", "parameters": parameters}])).for_server
    assert not outliner(body({**a, "parameters": {"shared_memory": "x"}}, b, id="shared_memory_region")).for_server


def test_few_shapes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kserve_outline, "MAX_REMEMBERED", 2)
    outliner = BodyPeek(DECLARED)
    for rows in (1, 2, 3, 1, 2, 3):
        assert outliner(body(tensor("a", "INT32", rows, 2), tensor("b", "FP32", rows, 5))).rows == rows


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([tensor("a", "INT32", 1, 2)], "tensor 'b': is missing"),
        ([tensor("a", "INT32", 1, 2), tensor("c", "INT32", 1)], "tensor 'c': not one of 'a', 'b'"),
        ([tensor("a", "INT32", 1, 2), tensor("a", "INT32", 1, 2)], "tensor 'a': is there twice"),
        ([tensor("a", "INT8", 1, 2), tensor("b", "FP32", 1, 1)], "tensor 'a': has datatype 'INT8', must be INT32"),
        ([tensor("a", "INT9", 1, 2), tensor("b", "FP32", 1, 1)], "tensor 'a': has datatype 'INT9', not one of"),
        ([tensor("a", "INT32", 1, 3), tensor("b", "FP32", 1, 1)], "tensor 'a': has shape [1, 3], must be [-1, 2]"),
        ([tensor("a", "INT32", 1), tensor("b", "FP32", 1, 1)], "tensor 'a': has shape [1], must be [-1, 2]"),
        ([tensor("a", "INT32", 1, 2), tensor("b", "FP32", 1, -1)], "tensor 'b': has shape [1, -1]"),
        ([tensor("a", "INT32", 1, 2), tensor("b", "FP32", 2, 1)], "tensor 'b': has 2 rows, tensor 'a' has 1"),
        ([tensor("a", "INT32", 0, 2), tensor("b", "FP32", 0, 1)], "tensor 'a': has 0 rows, must have at least 1"),
    ],
)
def test_what_is_wrong_is_named(inputs: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BodyPeek(DECLARED)(body(*inputs))
    assert words in caught.value.message
