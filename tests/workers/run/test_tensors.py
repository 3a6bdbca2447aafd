from typing import Any

import numpy
import pytest

from weir.errors import InvalidRequest, SettingsError
from weir.model import PAD, RAGGED, Model, Tensor
from weir.wire.tensors import Arrays
from weir.workers.run.tensors import Stacker

Y = (Tensor("y", "INT32", [-1]),)


def joiner(*tensors: Tensor, sizes: list[int] | None = None, owns: bool = False) -> Stacker:
    class Declared(Model):
        inputs = tensors
        outputs = Y
        allowed_batch_sizes = sizes
        owns_inputs = owns

    return Stacker(Declared)


def entries(*values: Any, name: str = "x", dtype: Any = numpy.int32) -> list[Arrays]:
    return [{name: numpy.array(value, dtype)} for value in values]


X = Tensor("x", "INT32", [-1, -1])


def test_rows_come_one_after_the_other() -> None:
    batch = joiner(X)(entries([[1, 2]], [[3, 4], [5, 6]]))
    assert batch["x"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert list(batch) == ["x"]


def test_what_is_alone_is_not_copied() -> None:
    for tensor in (X, X._replace(varying=PAD)):
        (entry,) = entries([[1, 2]])
        batch = joiner(tensor)([entry])
        assert batch["x"].ctypes.data == entry["x"].ctypes.data
        assert not batch["x"].flags.writeable
        assert entry["x"].flags.writeable


def test_ragged_input_that_is_alone_is_not_copied() -> None:
    (entry,) = entries([[1, 2], [3, 4]])
    batch = joiner(X._replace(varying=RAGGED))([entry])
    assert batch["x"].ctypes.data == entry["x"].ctypes.data
    assert batch["x"].tolist() == [1, 2, 3, 4]
    assert batch["x_lengths"].tolist() == [2, 2]


@pytest.mark.parametrize("varying", ["group", PAD, RAGGED])
@pytest.mark.parametrize("count", [1, 2])
def test_all_inputs_or_none_can_be_written_to(varying: str, count: int) -> None:
    given = entries([[1, 2]], [[3, 4]])[:count]
    assert not joiner(X._replace(varying=varying))(given)["x"].flags.writeable
    owned = joiner(X._replace(varying=varying), owns=True)(given)["x"]
    assert owned.flags.writeable
    owned[:] = 0
    assert given[0]["x"].tolist() == [[1, 2]]


def test_padding_fills_up_to_the_longest_and_tells_the_true_lengths() -> None:
    tensor = Tensor("x", "INT32", [-1, -1], varying=PAD, pad_value=-7, lengths="n")
    batch = joiner(tensor)(entries([[1]], [[2, 3, 4], [5, 6, 7]], [[8, 9]]))
    assert batch["x"].tolist() == [[1, -7, -7], [2, 3, 4], [5, 6, 7], [8, 9, -7]]
    assert batch["n"].tolist() == [1, 3, 3, 2]
    assert batch["n"].dtype == numpy.int64


def test_several_dimensions_are_padded_at_once() -> None:
    tensor = Tensor("x", "FP32", [-1, -1, 2, -1], varying=PAD, pad_value=0.5)
    small, large = numpy.ones((1, 1, 2, 3), numpy.float32), numpy.ones((1, 2, 2, 1), numpy.float32)
    batch = joiner(tensor)([{"x": small}, {"x": large}])
    assert batch["x"].shape == (2, 2, 2, 3)
    assert batch["x_lengths"].tolist() == [[1, 3], [2, 1]]
    assert (batch["x"][0, :1] == 1).all()
    assert (batch["x"][0, 1] == 0.5).all()
    assert (batch["x"][1, :, :, :1] == 1).all()
    assert (batch["x"][1, :, :, 1:] == 0.5).all()


@pytest.mark.parametrize(
    ("datatype", "pad_value", "padded"),
    [("BYTES", 0, b""), ("BYTES", b"-", b"-"), ("BF16", 1.0, 0x3F80), ("FP16", 1.5, 1.5), ("BOOL", True, True)],
)
def test_every_datatype_has_something_to_pad_with(datatype: str, pad_value: Any, padded: Any) -> None:
    tensor = Tensor("x", datatype, [-1, -1], varying=PAD, pad_value=pad_value)
    dtype = {"BYTES": object, "BF16": "<u2", "FP16": numpy.float16, "BOOL": bool}[datatype]
    short, long = ([[b"a"]], [[b"b", b"c"]]) if datatype == "BYTES" else ([[0]], [[0, 0]])
    batch = joiner(tensor)(entries(short, long, dtype=dtype))
    assert batch["x"][0, 1] == padded


@pytest.mark.parametrize(
    ("datatype", "pad_value"), [("UINT8", -1), ("UINT8", 256), ("INT8", float("nan")), ("FP16", 1e9)]
)
def test_a_pad_value_that_cannot_be(datatype: str, pad_value: Any) -> None:
    with pytest.raises(
        SettingsError, match=f"Declared: tensor 'x' has pad_value={pad_value!r}, which is no {datatype}"
    ):
        joiner(Tensor("x", datatype, [-1, -1], varying=PAD, pad_value=pad_value))


def test_ragged_rows_lose_the_dimension_in_which_they_differ() -> None:
    given = entries([[[1, 2]]], [[[3, 4], [5, 6]], [[7, 8], [9, 10]]], numpy.empty((1, 0, 2)), [[[11, 12]]])
    batch = joiner(Tensor("x", "INT32", [-1, -1, 2], varying=RAGGED))(given)
    assert batch["x"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]
    assert batch["x_lengths"].tolist() == [1, 2, 2, 0, 1]


def test_batches_are_filled_up_to_an_allowed_size_with_the_last_row() -> None:
    join = joiner(X, sizes=[8, 2, 4])
    assert join(entries([[1], [2], [3]]))["x"].tolist() == [[1], [2], [3], [3]]
    assert join(entries([[1]], [[2]]))["x"].tolist() == [[1], [2]]
    assert len(join(entries(*[[[1]]] * 5))["x"]) == 8
    with pytest.raises(InvalidRequest, match="a batch of 9 rows: the model takes 8 at most"):
        join(entries(*[[[1]]] * 9))


def test_ragged_and_padded_batches_are_filled_up_too() -> None:
    tensors = X._replace(varying=RAGGED), Tensor("z", "INT32", [-1, -1], varying=PAD)
    given = [
        {"x": numpy.array([[1]] * 2), "z": numpy.array([[1, 2]] * 2)},
        {"x": numpy.array([[2, 3]]), "z": numpy.array([[4]])},
    ]
    batch = joiner(*tensors, sizes=[4])(given)
    assert batch["x"].tolist() == [1, 1, 2, 3, 2, 3]
    assert batch["x_lengths"].tolist() == [1, 1, 2, 2]
    assert batch["z"].tolist() == [[1, 2], [1, 2], [4, 0], [4, 0]]
    assert batch["z_lengths"].tolist() == [2, 2, 1, 1]


def test_what_preprocess_added_is_joined_like_the_rest() -> None:
    batch = joiner(X)([{"own": numpy.zeros((1, 3))}, {"own": numpy.ones((2, 3))}])
    assert batch["own"].shape == (3, 3)
