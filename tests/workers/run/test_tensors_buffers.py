from collections.abc import Mapping
from typing import Any

import numpy
import pytest
from tests.workers.runs import run, started

from weir.errors import SettingsError
from weir.model import PAD, Model, Tensor
from weir.workers.run.tensors import Stacker, allocator, input_buffers


class Bound(Model):
    """Gets its batches in arrays of its own."""

    inputs = (Tensor("x", "FP32", [-1, 2]), Tensor("t", "INT64", [-1, -1], varying=PAD, pad_value=-1))
    outputs = (Tensor("y", "FP32", [-1, 2]), Tensor("bound", "BOOL", [-1, 2]))

    def __init__(self) -> None:
        self.mine: dict[str, Any] = {}

    def input_buffers(self, rows: int) -> Mapping[str, Any]:
        self.mine = {"x": numpy.zeros((rows, 2), numpy.float32), "t": numpy.zeros((rows + 1, 4), numpy.int64)}
        return self.mine

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        bound = [batch[name].ctypes.data == self.mine[name].ctypes.data for name in ("x", "t")]
        return {"y": batch["x"] + batch["t"].sum(axis=1, keepdims=True), "bound": [bound] * len(batch["x"])}


def entry(rows: int, length: int) -> dict[str, Any]:
    return {"x": numpy.ones((rows, 2), numpy.float32), "t": numpy.ones((rows, length), numpy.int64)}


def test_batches_are_gathered_into_the_models_own_arrays() -> None:
    runner = started(Bound, max_batch_size=4)
    for entries in ([entry(1, 4)], [entry(2, 1), entry(1, 3)], [entry(4, 4)]):
        for given, answer in zip(entries, run(runner, entries), strict=True):
            length = given["t"].shape[1]
            assert answer["y"].tolist() == [[1 + length - (4 - length)] * 2] * len(given["x"])
            assert answer["bound"].all()


def test_what_does_not_fit_comes_as_if_there_were_none() -> None:
    (answer,) = run(Bound, [entry(1, 5)], max_batch_size=4)
    assert answer["bound"].tolist() == [[True, False]]
    assert answer["y"].tolist() == [[6, 6]]
    one, two = run(Bound, [entry(3, 1), entry(3, 2)], max_batch_size=4)
    assert not one["bound"].any()
    assert two["y"].tolist() == [[3, 3]] * 3


def test_an_allowed_size_decides_how_many_rows_there_must_be_room_for() -> None:
    class Compiled(Bound):
        allowed_batch_sizes = (6,)

    model = Compiled()
    assert len(input_buffers(model, 4)["x"]) == 6


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"z": numpy.zeros((4, 2), numpy.float32)}, "'z' is no input"),
        ({"x": numpy.zeros((4, 2))}, "'x' is of float64, must be of float32"),
        ({"x": numpy.zeros((3, 2), numpy.float32)}, "'x' has shape [3, 2], must be writable and of shape [4, 2]"),
        ({"x": numpy.zeros((4, 3), numpy.float32)}, "'x' has shape [4, 3]"),
        ({"x": numpy.zeros(4, numpy.float32)}, "'x' has shape [4]"),
        ({"x": numpy.broadcast_to(numpy.float32(0), (4, 2))}, "must be writable"),
    ],
)
def test_arrays_that_cannot_be(given: dict[str, Any], words: str) -> None:
    class Wrong(Bound):
        def input_buffers(self, rows: int) -> Mapping[str, Any]:
            return given

    with pytest.raises(SettingsError) as caught:
        started(Wrong, max_batch_size=4)
    assert caught.value.message.startswith("Wrong.input_buffers: ")
    assert words in caught.value.message


def test_outputs_are_of_the_declared_datatype_wherever_the_model_runs() -> None:
    class Anywhere(Model):
        outputs = (Tensor("y", "BF16", [-1]), Tensor("s", "BYTES", [-1, 2]))

    model = Anywhere()
    assert model.output("y", 3).dtype == numpy.uint16
    assert model.output("s", 3, 2).shape == (3, 2)
    with pytest.raises(KeyError):
        model.output("z", 1)


def test_only_large_arrays_without_objects_come_from_the_arena() -> None:
    asked: list[int] = []
    memory = bytearray(1 << 20)

    def open_place(size_bytes: int) -> memoryview | None:
        asked.append(size_bytes)
        return memoryview(memory)[:size_bytes] if size_bytes <= len(memory) else None

    allocate = allocator(open_place)
    assert allocate((10,), numpy.dtype("f4")).shape == (10,)
    assert allocate((1 << 16,), numpy.dtype(object)).dtype == object
    assert asked == []
    array = allocate((100, 1000), numpy.dtype("f4"))
    array[:] = 1
    assert memory[:4] == numpy.float32(1).tobytes()
    assert allocate((1000, 1000), numpy.dtype("f4")).shape == (1000, 1000)
    assert asked == [400_000, 4_000_000]


def test_a_joiner_without_arrays_of_the_models_has_its_own() -> None:
    batch = Stacker(Bound)([entry(1, 2), entry(1, 3)])
    assert not batch["t"].flags.writeable
