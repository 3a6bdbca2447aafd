"""Archives of torch.save are read without unpickling them."""

import collections
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.text_models import tiny

from weir.errors import SettingsError
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.checkpoint.weights import open_pickled, open_tensors

KINDS = {"float32": "FloatStorage", "float16": "HalfStorage", "int64": "LongStorage"}


class Named(NamedTuple):
    """Pickles as a name of a module that need not exist."""

    module: str
    name: str


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments


class Storage(tuple[Any, ...]):
    """Pickles as a persistent id."""


PythonPickler: Any = pickle._Pickler


class Pickler(PythonPickler):  # type: ignore[misc]  # Any is its base
    """Writes the instructions that torch.save writes, without torch."""

    dispatch: ClassVar[dict[type, Any]] = dict(PythonPickler.dispatch)

    def save_named(self, value: Named) -> None:
        self.write(f"c{value.module}\n{value.name}\n".encode())

    def save_call(self, value: Call) -> None:
        self.save(value.function)
        self.save(value.arguments)
        self.write(pickle.REDUCE)

    def save_storage(self, value: Storage) -> None:
        self.save(tuple(value))
        self.write(pickle.BINPERSID)

    dispatch |= {Named: save_named, Call: save_call, Storage: save_storage}


def save(
    path: Path, arrays: dict[str, NDArray[Any]], *, more: dict[str, Any] | None = None, compression: int = zipfile.ZIP_STORED
) -> None:  # fmt: skip
    """Write an archive as torch.save does for a state_dict."""
    table: dict[str, Any] = {}
    for place, (name, array) in enumerate(arrays.items()):
        storage = Storage(("storage", Named("torch", KINDS[str(array.dtype)]), str(place), "cpu", array.size))
        strides = tuple(step // array.itemsize for step in array.strides)
        hooks = Call(Named("collections", "OrderedDict"))
        table[name] = Call(Named("torch._utils", "_rebuild_tensor_v2"), storage, 0, array.shape, strides, False, hooks)
    text = io.BytesIO()
    Pickler(text, 2).dump(table | (more or {}))
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", text.getvalue())
        for place, array in enumerate(arrays.values()):
            archive.writestr(f"archive/data/{place}", array.tobytes(order="A"))


def test_tensors_are_those_of_the_archive(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    arrays: dict[str, NDArray[Any]] = {"a": random.normal(size=(3, 5)).astype(np.float32), "ids": np.arange(4)}
    arrays["b.half"] = random.normal(size=7).astype(np.float16)
    save(tmp_path / "it.bin", arrays)
    found = open_pickled(tmp_path / "it.bin")
    assert {name: found.shape(name) for name in found} == {"a": (3, 5), "ids": (4,), "b.half": (7,)}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_model_of_pickles_is_that_of_safetensors(tmp_path: Path) -> None:
    expected = read_checkpoint(tiny.model(tmp_path / "safe")).weights()
    pickled = tiny.model(tmp_path / "pickled")
    arrays = {name: np.array(value) for name, value in open_tensors(pickled / "model.safetensors").items()}
    save(pickled / "pytorch_model.bin", arrays)
    (pickled / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match="not read without --allow-pickle"):
        read_checkpoint(pickled)
    found = read_checkpoint(pickled, allow_pickle=True).weights()
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_code_is_never_run(tmp_path: Path) -> None:
    for value, called in (
        (Call(Named("posix", "system"), f"touch {tmp_path / 'ran'}"), "posix[ .]system"),
        (Call(Named("builtins", "eval"), "1"), "builtins.eval"),
        (collections.Counter("a"), "collections.Counter"),
    ):
        save(tmp_path / "it.bin", {"a": np.zeros(3, np.float32)}, more={"other": value})
        with pytest.raises(SettingsError, match=f"its pickle would call {called}"):
            open_pickled(tmp_path / "it.bin")
    assert not (tmp_path / "ran").exists()


def test_archives_that_are_no_tables_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "it.bin"
    floats, compressed = np.arange(6, dtype=np.float32).reshape(2, 3), zipfile.ZIP_DEFLATED
    for arrays, compression, rule in (
        ({"a": floats.T}, zipfile.ZIP_STORED, "the values of 'a' are not in order"),
        ({"a": np.zeros(1000, np.float32)}, compressed, "the values of 'a' are compressed"),
        (dict[str, Any](), zipfile.ZIP_STORED, "has no tensors"),
    ):
        save(path, arrays, compression=compression)
        with pytest.raises(SettingsError, match=rule):
            open_pickled(path)
    for content in (b"", b"PK", pickle.dumps({"a": 1})):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match="is damaged, or is not an archive of tensors"):
            open_pickled(path)


def test_archives_that_are_changed_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "it.bin"
    save(path, {"a": np.ones((3, 4), np.float32), "b": np.ones(5, np.float16)})
    whole, random = path.read_bytes(), np.random.default_rng(3)
    refusals = 0
    for _ in range(400):
        data = bytearray(whole)
        for place in random.integers(len(data), size=2):
            data[place] = random.integers(256)
        path.write_bytes(data)
        try:
            for value in open_pickled(path).values():
                value.sum()
        except SettingsError as error:
            assert error.message.startswith(f"{path}: ")
            refusals += 1
    assert refusals > 40
