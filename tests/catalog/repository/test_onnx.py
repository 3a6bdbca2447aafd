"""Models that are ONNX files: names and shapes come from the file."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.catalog.repository.shelf import services, write

from weir import Service, SettingsError


def graph(*shape: Any, kind: int = TensorProto.FLOAT, op: str = "Add") -> bytes:
    """Return a file that adds its input to itself."""
    inputs = [helper.make_tensor_value_info("x", kind, shape)]
    outputs = [helper.make_tensor_value_info("y", kind, shape)]
    nodes = [helper.make_node(op, ["x"] if op == "Identity" else ["x", "x"], ["y"])]
    made = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def ask(service: Service, *batches: Any) -> list[Any]:
    async def main() -> list[Any]:
        async with service:
            return [await service.infer({"x": batch}) for batch in batches]

    return asyncio.run(main())


def test_a_file_is_served_with_the_tensors_that_it_has(tmp_path: Path) -> None:
    folder = write(tmp_path, {"one/1/any.onnx": graph("n", 3), "one/config.toml": "[params]\nintra_op = 1"})
    (service,) = services(folder, "one")
    assert (service.facts.platform, service.facts.model.inputs[0][:3]) == ("onnx", ("x", "FP32", (-1, 3)))
    (answer,) = ask(service, np.ones((4, 3), dtype=np.float32))
    np.testing.assert_array_equal(answer["y"], np.full((4, 3), 2.0, dtype=np.float32))


def test_a_file_that_was_made_for_one_batch_size_gets_that(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"one/1/model.onnx": graph(4, 2), "one/config.toml": "max_batch_size = 4"}
    (service,) = services(write(tmp_path, files), "one")
    assert (service.facts.batching.max_batch_size, service.facts.model.allowed_batch_sizes) == (4, (4,))
    answers = ask(service, np.ones((1, 2), dtype=np.float32), np.ones((3, 2), dtype=np.float32))
    assert [answer["y"].shape for answer in answers] == [(1, 2), (3, 2)]


def test_texts_are_bytes(tmp_path: Path) -> None:
    data = graph("n", 2, kind=TensorProto.STRING, op="Identity")
    (service,) = services(write(tmp_path, {"one/1/model.onnx": data}), "one")
    assert service.facts.model.inputs[0].datatype == "BYTES"
    (answer,) = ask(service, np.array([[b"a", "ü".encode()]], dtype=object))
    assert answer["y"].tolist() == [[b"a", "ü".encode()]]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"one/1/model.onnx": b"no graph"}, "one/1: model.onnx: its tensors cannot be read: "),
        ({"one/1/a.onnx": b"", "one/1/b.onnx": b""}, "there must be one .onnx file in 1/, or `file` names one; there are a.onnx, b.onnx"),
        ({"one/1/a.onnx": b"", "one/config.toml": 'file = "b.onnx"'}, "there is no such file"),
        ({"one/1/a.onnx": graph(), "one/config.toml": "max_batch_size = 2"}, "max_batch_size must be 0: tensor 'x' is a scalar"),
        ({"one/1/a.onnx": graph(4, 2), "one/config.toml": "max_batch_size = 8"}, "max_batch_size=8: must be at most 4"),
        ({"one/1/a.onnx": graph("n", kind=TensorProto.COMPLEX64, op="Identity")}, "its tensors cannot be read"),
        ({"one/1/a.onnx": graph("n", 3), "one/config.toml": '[[inputs]]\nname = "x"\ndatatype = "FP64"\nshape = [3]'}, "datatype 'FP64'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_reported(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        services(write(tmp_path, files), "one")
    assert message in refused.value.message


def test_amd_files_are_read(tmp_path: Path) -> None:
    text = """
        name = "one"
        platform = "onnx_onnxv1"
        [[inputs]]
        name = "x"
        datatype = "FP32"
        shape = [3]
        [[outputs]]
        name = "y"
        datatype = "FP32"
        shape = [3]
    """
    (service,) = services(write(tmp_path, {"one/1/model.onnx": graph("n", 3), "one/config.toml": text}), "one")
    assert service.facts.platform == "onnx"
    assert onnx.__version__


def batching(folder: Path, data: bytes, config: str = "") -> tuple[str, tuple[int, ...], int]:
    """Return what is declared of a file's batch, its shape, and the largest batch."""
    (service,) = services(write(folder, {"one/1/model.onnx": data, "one/config.pbtxt": config}), "one")
    tensor = service.facts.model.inputs[0]
    return tensor.batch, tuple(tensor.shape), service.facts.batching.max_batch_size


def dims(*lengths: int) -> str:
    """Return the part of a configuration that gives x and y these dimensions."""
    return "".join(
        f'{key} [{{ name: "{name}" data_type: TYPE_FP32 dims: {list(lengths)} }}]\n'
        for key, name in (("input", "x"), ("output", "y"))
    )


@pytest.mark.parametrize(
    ("shape", "config", "expected"),
    [
        (("n", 3), "", ("required", (-1, 3), 64)),
        (("n", 3), "max_batch_size: 0", ("none", (-1, 3), 1)),
        (("n", 3), "max_batch_size: 16", ("required", (-1, 3), 16)),
        (("n", 3), dims(3), ("required", (-1, 3), 64)),
        (("n", 3), dims(-1, 3), ("none", (-1, 3), 1)),
        ((4, 3), "", ("none", (4, 3), 1)),
        ((1, 3), "", ("none", (1, 3), 1)),
        ((4, 3), "max_batch_size: 4", ("required", (-1, 3), 4)),
        ((4, 3), dims(4, 3), ("none", (4, 3), 1)),
        ((4, 3), dims(3), ("required", (-1, 3), 4)),
        ((), "", ("none", (), 1)),
        (("n", 3), dims(3).replace("dims", "shape"), ("optional", (-1, 3), 64)),
        ((4, 3), dims(4, 3).replace("dims", "shape"), ("none", (4, 3), 1)),
    ],
)  # fmt: skip
def test_the_first_dimension_is_a_batch_where_that_is_known(
    tmp_path: Path, shape: tuple[Any, ...], config: str, expected: Any
) -> None:
    assert batching(tmp_path, graph(*shape), config) == expected


@pytest.mark.parametrize("named", [True, False])
def test_without_a_word_of_it_the_file_is_tried(tmp_path: Path, named: bool) -> None:
    rows = "n" if named else None
    assert batching(tmp_path / "apart", graph(rows, 3))[0] == "required"
    cumulative = helper.make_node("CumSum", ["x", "axis"], ["y"])
    axis = helper.make_tensor("axis", TensorProto.INT64, [], [0])
    assert batching(tmp_path / "joined", graph_of([cumulative], (rows, 3), [axis]))[0] == "none"


def test_what_cannot_be_tried_is_a_batch_by_its_names(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "to"], ["t"]), helper.make_node("Reshape", ["t", "back"], ["y"])]
    to = helper.make_tensor("to", TensorProto.INT64, [3], [0, 11, -1])  # no length that is tried can be divided by 11
    constants = [to, helper.make_tensor("back", TensorProto.INT64, [2], [0, -1])]
    assert batching(tmp_path / "named", graph_of(nodes, ("n", "m"), constants))[0] == "required"
    assert batching(tmp_path / "unnamed", graph_of(nodes, (None, "m"), constants))[0] == "none"
    assert batching(tmp_path / "square", graph_of(nodes, ("n", "n"), constants))[0] == "none"


def graph_of(nodes: list[Any], shape: tuple[Any, ...], constants: list[Any]) -> bytes:
    """Return a file of these nodes, from x to y, which have the same shape."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)]
    made = helper.make_graph(nodes, "g", inputs, outputs, constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())
