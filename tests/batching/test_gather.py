"""gather.py: answers of divided requests find together, in any order."""

import numpy
import pytest
from tests.batching.mill import Asked, listed

from weir.batching.gather import ListGather, TensorGather, gather_of
from weir.errors import ModelError
from weir.messages import Kind


def test_a_list_keeps_its_order_and_the_first_answer() -> None:
    gather = ListGather(3)
    assert not gather.put(2, 3, "c")
    assert gather.has(2)
    assert not gather.has(0)
    assert not gather.put(2, 3, "again")
    error = ModelError("bad")
    assert not gather.put(0, 1, error)
    assert gather.put(1, 2, "b")
    assert gather.result() == [error, "b", "c"]


def test_tensors_are_joined_in_order() -> None:
    gather = TensorGather(5)
    assert not gather.put(3, 5, {"x": numpy.array([3, 4])})
    assert not gather.put(3, 5, {"x": numpy.array([9, 9])})
    assert gather.put(0, 3, {"x": numpy.array([0, 1, 2])})
    assert gather.has(0)
    assert gather.result()["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_single_piece_is_not_copied() -> None:
    piece = {"x": numpy.array([1])}
    gather = TensorGather(1)
    assert gather.put(0, 1, piece)
    assert gather.result() is piece


def test_one_error_is_the_end_of_tensors() -> None:
    gather = TensorGather(5)
    error = ModelError("bad")
    assert gather.put(0, 3, error)
    assert gather.result() is error


@pytest.mark.parametrize("other", [{"y": numpy.zeros((2, 2))}, {"x": numpy.zeros((2, 3))}, {"x": None}, None])
def test_pieces_that_do_not_fit_together(other: object) -> None:
    gather = TensorGather(4)
    gather.put(0, 2, {"x": numpy.zeros((2, 2))})
    assert gather.put(2, 4, other)
    result = gather.result()
    assert isinstance(result, ModelError)
    assert "do not fit together" in result.message


def test_each_kind_of_request_has_its_own() -> None:
    items, tensors = listed(2), Asked({}, kind=Kind.TENSORS, rows=2)
    assert isinstance(gather_of(items), ListGather)
    assert isinstance(gather_of(tensors), TensorGather)
    assert gather_of(items) is gather_of(items)
