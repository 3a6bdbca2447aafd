"""Platforms that packages bring.

Models that are ONNX files: names and shapes come from the file.
"""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.catalog.repository.graphs import ask, double, node, onnx_file
from tests.catalog.repository.shelf import plain, services, write

from weir import Model, SettingsError
from weir.catalog.loading import ServiceMaker
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.repository.onnx_model import describe, joins_rows, open_session
from weir.catalog.sources import ModelToServe


class Table:
    """Serves a file of lines as a model that answers with the line of a number."""

    def load(self, model: ModelToServe) -> type[Model]:
        assert model.folder is not None
        lines = (model.folder / model.target).read_text().splitlines()

        class Lines(Model):
            def predict(self, batch: list[int]) -> list[Any]:
                return [lines[number] for number in batch]

        return Lines


def broken() -> None:
    raise KeyError("no")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here, named = "tests.catalog.repository.test_platforms", {"table": "Table", "bad": "broken"}
    found = [EntryPoint(name, f"{here}:{what}", "weir.platforms") for name, what in named.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)


def test_a_package_may_bring_a_platform(tmp_path: Path, installed: None) -> None:
    files = {"one/1/lines.txt": "a\nb", "one/config.toml": 'platform = "table"\nfile = "lines.txt"'}
    (service,) = services(write(tmp_path, files), "one")
    assert (service.facts.platform, service.facts.model.__name__) == ("table", "Lines")


def test_one_that_cannot_be_made_is_named(tmp_path: Path, installed: None) -> None:
    folder = write(tmp_path, {"one/1/x": "", "one/config.toml": 'platform = "bad"'})
    with pytest.raises(SettingsError, match=r"platform='bad': .*:broken: KeyError: 'no'"):
        services(folder, "one")
    folder = write(tmp_path, {"one/1/x": "", "one/config.toml": 'platform = "none"'})
    available = "python, onnx, sklearn, transformers, triton_python, mlserver, torchserve, ensemble, bad, table"
    with pytest.raises(SettingsError, match=f"available: {available}"):
        services(folder, "one")


TENSORS = """
import weir

class Twice(weir.Model):
    {declared}
    def predict(self, batch):
        return {{"OUT": batch["IN"] * 2}}
"""
DECLARED = """
inputs = [{{name = "IN", datatype = "FP32", shape = {shape}}}]
outputs = [{{name = "OUT", datatype = "FP32", shape = [-1, 3]}}]
"""
IN_CLASS = "inputs = (weir.Tensor('IN', 'FP32', (-1, 3)),)\n    outputs = (weir.Tensor('OUT', 'FP32', (-1, 3)),)"


async def test_a_model_that_changes_is_loaded_anew_and_one_that_breaks_is_not(tmp_path: Path) -> None:
    folder, registry = write(tmp_path, {"one/1/model.py": plain("a")}), Registry([])
    manager = Manager(registry, folder, ServiceMaker(()))
    await manager.load_model("one")
    write(tmp_path, {"one/1/model.py": plain("b")})
    assert await registry.get("one").infer(0) == "a"
    await manager.load_model("one")
    assert await registry.get("one").infer(0) == "b"
    write(tmp_path, {"one/1/model.py": plain("c")[:-10], "one/2/model.py": plain("d")})
    with pytest.raises(Exception, match=r"failed to load 'one': .*SyntaxError"):
        await manager.load_model("one")
    # A worker that is replaced runs what was read, not what is in the file now.
    await registry.get("one").add_worker()
    assert set(await registry.get("one").infer_many([0] * 100)) == {"b"}
    await manager.load_model("one", version="2")
    assert [await registry.get("one", version).infer(0) for version in ("1", "2", "")] == ["b", "d", "d"]
    await manager.stop(0.0)


@pytest.mark.parametrize("shape", ["[-1, 3]", "[3]"])
@pytest.mark.parametrize("declared", ["number = 1", IN_CLASS])
def test_tensors_are_declared_in_the_file_or_the_class(tmp_path: Path, shape: str, declared: str) -> None:
    code = TENSORS.format(declared=declared)
    folder = write(tmp_path, {"one/1/model.py": code, "one/config.toml": DECLARED.format(shape=shape)})
    (service,) = services(folder, "one")
    (tensor,) = service.facts.model.inputs
    assert (tensor.name, tensor.datatype, tuple(tensor.shape)) == ("IN", "FP32", (-1, 3))
    assert ask(service, {"IN": np.ones((2, 3), np.float32)})[0]["OUT"].tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (DECLARED.format(shape="[-1, 4]"), "inputs: 'IN' has shape [-1, 4]; the model itself has [-1, 3]"),
        (DECLARED.format(shape="[3]").replace("FP32", "FP64"), "inputs: 'IN' has datatype 'FP64'; the model itself has 'FP32'"),
        (DECLARED.format(shape="[3]").replace('"IN"', '"X"'), "inputs: are X; the model itself has IN"),
    ],
)  # fmt: skip
def test_the_file_must_not_contradict_the_class(tmp_path: Path, said: str, message: str) -> None:
    folder = write(tmp_path, {"one/1/model.py": TENSORS.format(declared=IN_CLASS), "one/config.toml": said})
    with pytest.raises(SettingsError) as refused:
        services(folder, "one")
    assert message in refused.value.message


def test_a_target_may_be_an_installed_module_or_a_service(tmp_path: Path) -> None:
    service = plain("s") + "class Own(weir.Service):\n    model = Plain\n"
    folder = write(
        tmp_path,
        {
            "one/1/weights": "x", "one/config.toml": 'target = "tests.served_models:Power"\nparams = {exponent = 3}',
            "two/1/other.py": service, "two/config.toml": 'target = "other.py:Own"',
        },
    )  # fmt: skip
    (one,), (two,) = services(folder, "one"), services(folder, "two")
    assert (one.model.__name__, one.params) == ("Power", {"exponent": 3})
    assert type(two).__name__ == "Own"


def test_a_file_is_served_with_the_tensors_that_it_has(tmp_path: Path) -> None:
    folder = write(tmp_path, {"one/1/any.onnx": double("n", 3), "one/config.toml": "[params]\nintra_op = 1"})
    (service,) = services(folder, "one")
    assert (service.facts.platform, service.facts.model.inputs[0][:3]) == ("onnx", ("x", "FP32", (-1, 3)))
    assert ask(service, {"x": np.ones((4, 3), np.float32)})[0]["y"].tolist() == [[2.0] * 3] * 4


def test_a_file_that_was_made_for_one_batch_size_gets_that(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"one/1/model.onnx": double(4, 2), "one/config.toml": "max_batch_size = 4"}
    (service,) = services(write(tmp_path, files), "one")
    assert (service.facts.batching.max_batch_size, service.facts.model.allowed_batch_sizes) == (4, (4,))
    answers = ask(service, *({"x": np.ones((rows, 2), np.float32)} for rows in (1, 3)))
    assert [answer["y"].shape for answer in answers] == [(1, 2), (3, 2)]


def test_texts_are_bytes(tmp_path: Path) -> None:
    data = double("n", 2, kind=TensorProto.STRING, op="Identity")
    (service,) = services(write(tmp_path, {"one/1/model.onnx": data}), "one")
    assert service.facts.model.inputs[0].datatype == "BYTES"
    (answer,) = ask(service, {"x": np.array([[b"a", "ü".encode()]], dtype=object)})
    assert answer["y"].tolist() == [[b"a", "ü".encode()]]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"one/1/model.onnx": b"no graph"}, "one/1: model.onnx: its tensors cannot be read: "),
        ({"one/1/a.onnx": b"", "one/1/b.onnx": b""}, "there must be one .onnx file in 1/, or `file` names one; there are a.onnx, b.onnx"),
        ({"one/1/a.onnx": b"", "one/config.toml": 'file = "b.onnx"'}, "there is no such file"),
        ({"one/1/a.onnx": double(), "one/config.toml": "max_batch_size = 2"}, "max_batch_size must be 0: tensor 'x' is a scalar"),
        ({"one/1/a.onnx": double(4, 2), "one/config.toml": "max_batch_size = 8"}, "max_batch_size=8: must be at most 4"),
        ({"one/1/a.onnx": double("n", kind=TensorProto.COMPLEX64, op="Identity")}, "its tensors cannot be read"),
        ({"one/1/a.onnx": double("n", 3), "one/config.toml": '[[inputs]]\nname = "x"\ndatatype = "FP64"\nshape = [3]'}, "datatype 'FP64'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_reported(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        services(write(tmp_path, files), "one")
    assert message in refused.value.message


def test_amd_files_are_read(tmp_path: Path) -> None:
    text = 'name = "one"\nplatform = "onnx_onnxv1"\n' + shapes(3)
    (service,) = services(write(tmp_path, {"one/1/model.onnx": double("n", 3), "one/config.toml": text}), "one")
    assert service.facts.platform == "onnx"


def batching(folder: Path, data: bytes, config: str = "") -> tuple[str, tuple[int, ...], int]:
    """Return what is declared of a file's batch, its shape, and the largest batch."""
    file = "config.toml" if "[[" in config else "config.pbtxt"
    (service,) = services(write(folder, {"one/1/model.onnx": data, f"one/{file}": config}), "one")
    tensor = service.facts.model.inputs[0]
    return tensor.batch, tuple(tensor.shape), service.facts.batching.max_batch_size


def dims(*lengths: int) -> str:
    """Return the part of a configuration that gives x and y these dimensions."""
    return "".join(
        f'{key} [{{ name: "{name}" data_type: TYPE_FP32 dims: {list(lengths)} }}]\n'
        for key, name in (("input", "x"), ("output", "y"))
    )


def shapes(*lengths: int) -> str:
    """Return the same in the form of the AMD server, where the first length may be the batch."""
    return "".join(
        f'[[{key}]]\nname = "{name}"\ndatatype = "FP32"\nshape = {list(lengths)}\n'
        for key, name in (("inputs", "x"), ("outputs", "y"))
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
        (("n", 3), shapes(3), ("optional", (-1, 3), 64)),
        ((4, 3), shapes(4, 3), ("none", (4, 3), 1)),
    ],
)  # fmt: skip
def test_the_first_dimension_is_a_batch_where_that_is_known(
    tmp_path: Path, shape: tuple[Any, ...], config: str, expected: Any
) -> None:
    assert batching(tmp_path, double(*shape), config) == expected


def test_without_a_word_of_it_the_file_is_tried(tmp_path: Path) -> None:
    cumulative = helper.make_node("CumSum", ["x", "axis"], ["y"])
    axis = helper.make_tensor("axis", TensorProto.INT64, [], [0])
    for rows in ("n", None):
        assert batching(tmp_path / f"apart-{rows}", double(rows, 3))[0] == "required"
        assert batching(tmp_path / f"joined-{rows}", graph_of([cumulative], (rows, 3), [axis]))[0] == "none"


def test_what_cannot_be_tried_is_a_batch_by_its_names(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "to"], ["t"]), helper.make_node("Reshape", ["t", "back"], ["y"])]
    to = helper.make_tensor("to", TensorProto.INT64, [3], [0, 11, -1])  # no length that is tried can be divided by 11
    constants = [to, helper.make_tensor("back", TensorProto.INT64, [2], [0, -1])]
    assert batching(tmp_path / "named", graph_of(nodes, ("n", "m"), constants))[0] == "required"
    assert batching(tmp_path / "unnamed", graph_of(nodes, (None, "m"), constants))[0] == "none"
    assert batching(tmp_path / "square", graph_of(nodes, ("n", "n"), constants))[0] == "none"


def graph_of(nodes: list[Any], shape: tuple[Any, ...], constants: list[Any]) -> bytes:
    """Return a file of these nodes, from x to y, which have the same shape."""
    return onnx_file(nodes, {"x": shape}, {"y": shape}, constants)


# Whether rows can be joined is tried with made-up ones: what mixes them is found out.


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
