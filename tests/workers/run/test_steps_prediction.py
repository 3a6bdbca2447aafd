from collections.abc import Callable
from typing import Any

import numpy
import pytest
from tests.workers.runs import run

from weir.errors import InvalidRequest, ModelError, ValidationFailed
from weir.model import Model, Tensor
from weir.workers.run.steps import judge_of, takes_second


class Square(Model):
    def predict(self, batch: list[int]) -> Any:
        return [x * x for x in batch]


class Staged(Model):
    """Every step of one item, and what each saw."""

    def preprocess(self, item: int) -> int:
        if item < 0:
            raise ValidationFailed("negative", details=[{"loc": [], "msg": "negative", "type": "value"}])
        if item == 13:
            raise LookupError("unlucky")
        return item + 1

    def predict(self, batch: list[int]) -> list[Any]:
        return [InvalidRequest("eight") if x == 8 else x * 10 for x in batch]

    def postprocess(self, item: int, preprocessed: int) -> Any:
        if item == 50:
            raise ZeroDivisionError("fifty")
        return item, preprocessed


def test_list_in_list_out() -> None:
    assert run(Square, [1, 2, 3]) == [1, 4, 9]
    assert run(Square, [3]) == [9]
    assert run(Square, []) == []


def test_each_step_fails_alone() -> None:
    good, negative, unlucky, eight, fifty, last = run(Staged, [1, -1, 13, 7, 4, 2])
    assert (good, last) == ((20, 2), (30, 3))
    assert isinstance(negative, ValidationFailed)
    assert negative.details
    assert (type(unlucky), unlucky.original_type) == (ModelError, "LookupError")
    assert isinstance(eight, InvalidRequest)
    assert (type(fifty), fifty.original_type) == (ModelError, "ZeroDivisionError")
    assert "in postprocess" in fifty.remote_traceback


class InBatches(Model):
    """The batch forms win over the forms of one item."""

    def preprocess(self, item: int) -> int:
        raise AssertionError("never called")

    def preprocess_batch(self, items: list[int]) -> list[Any]:
        if 13 in items:
            raise LookupError("unlucky")
        return [InvalidRequest("negative") if item < 0 else item + 1 for item in items]

    def predict(self, batch: list[int]) -> list[int]:
        return batch

    def postprocess(self, item: int, *preprocessed: Any) -> int:
        raise AssertionError("never called")

    def postprocess_batch(self, items: list[int]) -> list[Any]:
        return [str(item) for item in items]


def test_batch_forms() -> None:
    first, negative, unlucky, last = run(InBatches, [1, -1, 13, 5])
    assert (first, last) == ("2", "6")
    assert isinstance(negative, InvalidRequest)
    assert unlucky.message == "preprocess_batch raised LookupError: unlucky"


@pytest.mark.parametrize("returned", [tuple, iter, numpy.array, lambda b: range(len(b))])
def test_anything_like_a_list_is_taken(returned: Callable[[Any], Any]) -> None:
    class Odd(Model):
        def predict(self, batch: list[int]) -> Any:
            return returned(batch)

    assert run(Odd, [0, 1]) == [0, 1]


def broken_generator() -> Any:
    yield 1
    raise ValueError("half-way")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ([1, 2, 3], "predict returned 3 answers for 2 items"),
        ([], "predict returned 0 answers for 2 items"),
        (None, "predict returned a NoneType for 2 items, must be a list of 2"),
        (7, "predict returned a int for 2 items"),
        ("ab", "predict returned a str for 2 items"),
        ({1: 2, 3: 4}, "predict returned a dict for 2 items"),
        (numpy.array(3), "is no list"),
    ],
)
def test_a_wrong_count_or_type_names_both_numbers_and_is_not_retried(returned: Any, text: str) -> None:
    calls = []

    class Wrong(Model):
        def predict(self, batch: list[int]) -> Any:
            calls.append(len(batch))
            return returned

    outputs = run(Wrong, [1, 2])
    assert all(isinstance(output, ModelError) and text in output.message for output in outputs)
    assert calls == [2]


def test_a_generator_that_raises_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="half-way"):
        judge_of("predict")(broken_generator(), [1, 2])


@pytest.mark.parametrize(
    ("postprocess", "wanted"),
    [
        (lambda item: item, False),
        (lambda item, preprocessed: item, True),
        (lambda item, original: item, True),
        (lambda item, preprocessed=None: item, True),
        (lambda item, threshold=0.5: item, False),
        (lambda item, *, threshold: item, False),
        (lambda item, *more: item, True),
        (lambda *items: items, True),
        (str, False),
        (dict.get, True),
        (max, False),
    ],
)
def test_whether_postprocess_wants_the_preprocessed_item(postprocess: Callable[..., Any], wanted: bool) -> None:
    assert takes_second(postprocess, "preprocessed") is wanted


class Sums(Model):
    inputs = (Tensor("x", "FP32", [-1, -1]), Tensor("w", "INT64", [-1]))
    outputs = (Tensor("sum", "FP64", [-1]),)

    def predict(self, batch: dict[str, Any]) -> Any:
        if (batch["x"] == 13).any():
            raise ValueError("unlucky")
        return {"sum": batch["x"].sum(axis=1) * batch["w"]}


def entry(*rows: list[float]) -> dict[str, Any]:
    return {"x": list(rows), "w": [1] * len(rows)}


def test_tensors_are_joined_and_the_answers_divided() -> None:
    outputs = run(Sums, [entry([1, 2]), entry([3, 4], [5, 6]), entry([0, 0])])
    assert [output["sum"].tolist() for output in outputs] == [[3], [7, 11], [0]]
    assert outputs[0]["sum"].dtype == numpy.float64


def test_a_bad_entry_of_tensors_fails_alone() -> None:
    wide = {"x": [[1, 2, 3]], "w": [1]}
    good, wrong, unlucky, other_shape, last = run(Sums, [entry([1, 2]), {"x": []}, entry([1, 13]), wide, entry([5, 6])])
    assert (good["sum"].tolist(), last["sum"].tolist()) == ([3], [11])
    assert isinstance(wrong, InvalidRequest)
    assert (type(unlucky), unlucky.original_type) == (ModelError, "ValueError")
    assert other_shape["sum"].tolist() == [6]  # it should not have been in this batch, and is computed all the same


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ({"sum": [1.0]}, "predict returned 1 rows for a batch of 2"),
        ({"sum": [[1.0], [2.0]]}, r"tensor 'sum': has shape \[2, 1\], must be \[-1\]"),
        ({"other": [1.0, 2.0]}, "tensor 'other': not one of 'sum'"),
        ({}, "tensor 'sum': is missing"),
        ([1.0, 2.0], "a list, must be an object with 'sum'"),
        ({"sum": ["a", "b"]}, "tensor 'sum': has strings, must be FP64"),
    ],
)
def test_wrong_tensors_are_the_models_error(returned: Any, text: str) -> None:
    class Wrong(Sums):
        def predict(self, batch: dict[str, Any]) -> Any:
            return returned

    for output in run(Wrong, [entry([1, 2]), entry([3, 4])]):
        with pytest.raises(ModelError, match=text):
            raise output


class Scaled(Sums):
    def preprocess(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "x": item["x"] * 10}

    def postprocess(self, item: dict[str, Any], *preprocessed: Any) -> Any:
        return {"sum": item["sum"] + len(preprocessed[0]["x"])}


def test_a_tensor_model_may_have_the_other_steps_too() -> None:
    assert [output["sum"].tolist() for output in run(Scaled, [entry([1, 2]), entry([3, 4], [5, 6])])] == [
        [31],
        [72, 112],
    ]
