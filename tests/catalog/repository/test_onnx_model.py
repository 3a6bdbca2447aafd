"""Whether rows can be joined is tried with made-up ones: what mixes them is found out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.catalog.repository.graphs import node

from weir.catalog.repository.onnx_model import describe, joins_rows, open_session

F, N, S = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
WEIGHTS = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
ONES = np.ones(3, np.float32)


CASES: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any], bool | None]] = {
    "product": ([node("MatMul", "x w", "y")], {"x": (F, ("n", 8))}, {"y": (F, ("n", 4))}, True),
    "places": ([node("Gather", "w x", "y")], {"x": (N, ("n", "s"))}, {"y": (F, ("n", "s", 4))}, True),
    "softmax of rows": ([node("Softmax", "x", "y", axis=1)], {"x": (F, ("n", "m"))}, {"y": (F, ("n", "m"))}, True),
    "softmax of all": ([node("Softmax", "x", "y", axis=0)], {"x": (F, ("n",))}, {"y": (F, ("n",))}, False),
    "numbers": ([node("Add", "x x", "y")], {"x": (F, ("n",))}, {"y": (F, ("n",))}, True),
    "classes": ([node("ArgMax", "x", "y", axis=1, keepdims=0)], {"x": (F, ("n", 8))}, {"y": (N, ("n",))}, True),
    "found": ([node("NonZero", "x", "z"), node("Transpose", "z", "y")], {"x": (F, ("n", 8))}, {"y": (N, ("k", 2))}, False),
    "chance": ([node("RandomUniformLike", "x", "y")], {"x": (F, ("n", 8))}, {"y": (F, ("n", 8))}, None),
    "texts": ([node("Identity", "x", "y")], {"x": (S, ("n", 2))}, {"y": (S, ("n", 2))}, True),
    "images": ([node("BatchNormalization", "x o o o o", "y")], {"x": (F, ("n", 3, "h", "w"))}, {"y": (F, ("n", 3, "h", "w"))}, True),
    "centred": (
        [node("ReduceMean", "x", "m", axes=[0], keepdims=1), node("Sub", "x m", "y")],
        {"x": (F, ("n", 8))}, {"y": (F, ("n", 8))}, False,
    ),
    "quantized": (
        [node("DynamicQuantizeLinear", "x", "q s z"), node("DequantizeLinear", "q s z", "d"), node("MatMul", "d w", "y")],
        {"x": (F, ("n", 8))}, {"y": (F, ("n", 4))}, True,
    ),
    "both": ([node("Add", "x z", "y")], {"x": (F, ("n", 8)), "z": (F, ("n", 8))}, {"y": (F, ("n", 8))}, True),
    "crossed": ([node("MatMul", "x z", "y")], {"x": (F, ("n", "k")), "z": (F, ("l", "m"))}, {"y": (F, ("n", "m"))}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_are_joined_where_they_are_answered_as_alone(name: str, tmp_path: Path) -> None:
    nodes, inputs, outputs, expected = CASES[name]
    used = {each for one in nodes for each in one.input}
    constants = [numpy_helper.from_array(array, key) for key, array in {"w": WEIGHTS, "o": ONES}.items() if key in used]
    made = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(key, *kind) for key, kind in inputs.items()],
        [helper.make_tensor_value_info(key, *kind) for key, kind in outputs.items()], constants,
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    opset = [helper.make_opsetid("", 17)]
    path.write_bytes(helper.make_model(made, opset_imports=opset, ir_version=8).SerializeToString())
    session = open_session(str(path), 1, optimize=False)
    assert joins_rows(session, describe(session)["inputs"]) is expected
