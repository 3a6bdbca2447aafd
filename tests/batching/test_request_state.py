"""A request is dispatched, gathers its answers in any order, and is settled once."""

import sys
from typing import Any

import numpy
import pytest
from tests.batching.mill import Asked, listed
from tests.rings import subcases

from weir.batching import request_state
from weir.batching.request_state import dispatch
from weir.errors import ModelError, Overloaded, Unsupported
from weir.messages import Dispatch, Kind, Reason, Wakeup


@subcases("other", [{"y": numpy.zeros((2, 2))}, {"x": numpy.zeros((2, 3))}, {"x": None}, None])
def test_pieces_that_do_not_fit_together(other: object) -> None:
    gather = request_state.TensorGather(4)
    gather.put(0, 2, {"x": numpy.zeros((2, 2))})
    assert gather.put(2, 4, other)
    result = gather.result()
    assert isinstance(result, ModelError)
    assert "cannot be combined" in result.message


def test_a_second_response_to_an_item_is_dropped() -> None:
    gather = request_state.ListGather(2)
    assert [gather.put(0, 1, "a"), gather.put(0, 1, "b"), gather.put(1, 2, "c")] == [False, False, True]
    assert gather.result() == ["a", "c"]


@subcases(
    ("request_", "expected"),
    [
        (Asked(0), 1),
        (Asked(0, rows=7), 1),
        (listed(5), 5),
        (Asked([1, 2, 3], kind=Kind.ITEMS, rows=6), 3),
        (Asked([1, 2, 3], kind=Kind.ITEMS, rows=7), 1),  # unequal items: kept together
        (Asked([], kind=Kind.ITEMS, rows=0), 1),
        (Asked({"x": numpy.zeros((4, 2))}, kind=Kind.TENSORS, rows=4), 4),
    ],
)
def test_steps(request_: Asked, expected: int) -> None:
    assert request_state.steps(request_) == expected


def test_a_request_that_is_refused_fails() -> None:
    request, error = Asked(0), Overloaded("full")
    request_state.refuse(request, error)
    assert request.settled
    assert request.ends == [error]


class Leaving(Asked):
    """A request whose caller, once it has the answer, ends `other` and then raises."""

    other: Asked

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        super().finish(output, dispatch)
        request_state.settle(self.other)
        raise RuntimeError("this caller's frontend is broken")


def test_an_answer_may_end_another_request_of_its_batch() -> None:
    first, second, third = Leaving(0), Asked(1), Asked(2)
    first.other, failed = second, list[Any]()
    cut = Dispatch(1, 0, [first, second, third], None, 3, 3.0, Reason.IDLE, 3, 0.0, None, Wakeup.ARRIVAL, 0.0)
    unwanted = request_state.finish_each(
        cut.requests, ["a", "b", "c"], cut, lambda request: failed.append((request, sys.exc_info()[0]))
    )
    assert (first.ends, second.ends, third.ends) == (["a"], [], ["c"])
    assert unwanted == [(second, "b")]
    assert failed == [(first, RuntimeError)]
    assert third.settled


def test_a_request_has_one_answer_unless_its_protocol_takes_parts() -> None:
    cut = Dispatch(1, 0, [], None, 1, 1.0, Reason.IDLE, 1, 0.0, None, Wakeup.ARRIVAL, 0.0)
    with pytest.raises(Unsupported, match="'python' returns one response"):
        Asked(0).part("a", cut)


def test_a_request_is_gone_once_its_last_piece_is_dispatched() -> None:
    request, left = Asked([1, 2, 3], kind=Kind.ITEMS, rows=6), []
    for stop in (0, 1, 3):
        dispatch(request, stop, 3)
        left.append((request_state.rows_left(request), request_state.is_gone(request)))
    assert left == [(6, False), (4, False), (0, True)]


def test_tensors_are_joined_in_order() -> None:
    gather = request_state.TensorGather(5)
    assert not gather.put(3, 5, {"x": numpy.array([3, 4])})
    assert not gather.put(3, 5, {"x": numpy.array([9, 9])})
    assert gather.put(0, 3, {"x": numpy.array([0, 1, 2])})
    assert gather.has(0)
    assert gather.result()["x"].tolist() == [0, 1, 2, 3, 4]
