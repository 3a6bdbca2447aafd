from typing import Any

import numpy
import pytest
from tests.workers.runs import run

from weir.errors import ModelError, WeirError
from weir.model import PAD, RAGGED, Model, Tensor
from weir.wire.tensors import Arrays
from weir.workers.run.tensors import Splitter


def parter(*returned: Tensor, given: tuple[Tensor, ...] = (Tensor("x", "INT32", [-1]),), sizes: Any = None) -> Splitter:
    class Declared(Model):
        inputs = given
        outputs = returned
        allowed_batch_sizes = sizes

    return Splitter(Declared)


def zeros(*shape: int) -> Arrays:
    return {"x": numpy.zeros(shape, numpy.int32)}


Y, Z = Tensor("y", "INT32", [-1]), Tensor("z", "FP32", [-1, 2])


def test_each_entry_gets_its_rows_in_the_order_declared() -> None:
    returned = {"z": [[1, 2]] * 3, "y": [1, 2, 3]}
    first, second = parter(Y, Z)(returned, [zeros(1), zeros(2)])
    assert [list(first), list(second)] == [["y", "z"]] * 2
    assert first["y"].tolist() == [1]
    assert second["y"].tolist() == [2, 3]
    assert second["z"].shape == (2, 2)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1], "predict returned wrong tensors: tensors: a list, must be an object with 'y', 'z'"),
        ({"y": [1] * 3}, "tensor 'z': is missing"),
        ({"y": [1] * 3, "z": [[1, 2]] * 3, "w": [1]}, "tensor 'w': not one of 'y', 'z'"),
        ({"y": [1.5] * 3, "z": [[1, 2]] * 3}, "tensor 'y': has elements of float64, must be INT32"),
        ({"y": [1] * 3, "z": [[1]] * 3}, "tensor 'z': has shape [3, 1], must be [-1, 2]"),
        ({"y": [1] * 2, "z": [[1, 2]] * 3}, "predict returned 2 rows for a batch of 3 (tensor 'y')"),
        ({"y": [1] * 3, "z": [[1, 2]] * 4}, "predict returned 4 rows for a batch of 3 (tensor 'z')"),
    ],
)
def test_what_is_not_as_declared(returned: Any, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parter(Y, Z)(returned, [zeros(1), zeros(2)])
    assert words in caught.value.message


def test_what_filled_the_batch_up_is_dropped() -> None:
    part = parter(Y, sizes=[4])
    assert [answer["y"].tolist() for answer in part({"y": [1, 2, 3, 3]}, [zeros(1), zeros(2)])] == [[1], [2, 3]]
    assert [answer["y"].tolist() for answer in part({"y": [1, 2, 2, 2]}, [zeros(2)])] == [[1, 2]]
    with pytest.raises(ModelError, match="predict returned 3 rows for a batch of 4"):
        part({"y": [1, 2, 3]}, [zeros(3)])


TOKENS = Tensor("x", "INT32", [-1, -1])


def test_padded_answers_are_cut_to_the_true_lengths() -> None:
    part = parter(Tensor("y", "FP32", [-1, 2, -1], like="x"), given=(TOKENS._replace(varying=PAD),))
    returned = numpy.arange(3 * 2 * 4, dtype=numpy.float32).reshape(3, 2, 4)
    first, second = part({"y": returned}, [zeros(1, 4), zeros(2, 1)])
    assert first["y"].tolist() == returned[:1].tolist()
    assert second["y"].tolist() == returned[1:, :, :1].tolist()
    with pytest.raises(ModelError, match=r"tensor 'y': has shape \[1, 2, 3\], must be as long as 'x' \[1, 4\]"):
        part({"y": returned[:, :, :3]}, [zeros(1, 4), zeros(2, 1)])


def test_ragged_answers_are_divided_by_the_true_lengths() -> None:
    part = parter(Tensor("y", "FP32", [-1, -1, 2], like="x"), given=(TOKENS._replace(varying=RAGGED),), sizes=[4])
    returned = numpy.arange(18, dtype=numpy.float32).reshape(9, 2)
    first, second = part({"y": returned}, [zeros(1, 3), zeros(2, 2)])
    assert first["y"].tolist() == [returned[:3].tolist()]
    assert second["y"].tolist() == [returned[3:5].tolist(), returned[5:7].tolist()]
    with pytest.raises(ModelError, match=r"predict returned 8 values for a batch of 9 \(tensor 'y'\)"):
        part({"y": returned[:8]}, [zeros(1, 3), zeros(2, 2)])


class Reverse(Model):
    """Gives back each row reversed, whatever its length, and how long it was."""

    inputs = (TOKENS._replace(varying=PAD, pad_value=-1),)
    outputs = (Tensor("y", "INT32", [-1, -1], like="x"), Tensor("n", "INT64", [-1]))

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        reversed_rows = numpy.full_like(batch["x"], -1)
        for row, length in enumerate(batch["x_lengths"]):
            reversed_rows[row, :length] = batch["x"][row, :length][::-1]
        return {"y": reversed_rows, "n": batch["x_lengths"]}


class RaggedReverse(Reverse):
    inputs = (TOKENS._replace(varying=RAGGED),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = numpy.split(batch["x"], numpy.cumsum(batch["x_lengths"])[:-1])
        return {"y": numpy.concatenate([row[::-1] for row in rows]), "n": batch["x_lengths"]}


@pytest.mark.parametrize("model", [Reverse, RaggedReverse])
@pytest.mark.parametrize("sizes", [None, [1, 4, 16]])
def test_an_answer_is_the_same_in_every_company(model: type[Model], sizes: Any) -> None:
    chosen = type("Chosen", (model,), {"allowed_batch_sizes": sizes})
    entries = [
        {"x": numpy.arange(rows * length).reshape(rows, length)} for rows, length in ((1, 3), (2, 1), (3, 7), (1, 0))
    ]
    together = run(chosen, entries)
    for entry, answer in zip(entries, together, strict=True):
        (alone,) = run(chosen, [entry])
        assert answer["y"].tolist() == alone["y"].tolist() == [row[::-1] for row in entry["x"].tolist()]
        assert answer["n"].tolist() == alone["n"].tolist()


def test_preprocess_must_leave_what_an_answer_is_like() -> None:
    class Other(Reverse):
        def preprocess(self, item: Any) -> Any:
            return {"z": item["x"]}

        def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"y": batch["z"], "n": numpy.zeros(1, numpy.int64)}

    (answer,) = run(Other, [zeros(1, 2)])
    assert isinstance(answer, WeirError)
    assert "tensor 'y' is like 'x', which preprocess has taken away" in answer.message
