from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weir.batching.queue import SLACK
from weir.messages import Form
from weir.serving.calls import ThreadCall
from weir.serving.driver import BackpressureQueue


def call(name: Any = None, *, arrival: float = 0.0, timeout: float = 10.0, rows: int = 1) -> ThreadCall:
    return ThreadCall(Form(timeout, rows=rows), name, arrival, lambda _: None)


def entered(outside: BackpressureQueue, room: int = 1000) -> list[Any]:
    found = []
    while (request := outside.pop(lambda rows, cost, bulk: rows <= room)) is not None:
        found.append(request.payload)
    return found


def test_nobody_passes_one_that_has_no_room() -> None:
    outside = BackpressureQueue()
    outside.append(call("large", rows=5))
    outside.append(call("small"))
    assert outside.pop(lambda rows, cost, bulk: rows <= 4) is None
    assert entered(outside) == ["large", "small"]


def test_clearing_settles_and_returns_all() -> None:
    outside = BackpressureQueue()
    calls = [call(index) for index in range(3)]
    for each in calls:
        outside.append(each)
    outside.drop(calls[1])
    assert [left.payload for left in outside.clear()] == [0, 2]
    assert all(each.settled for each in calls)
    assert not outside.waiting
    outside.append(call("later"))
    assert entered(outside) == ["later"]


def test_those_who_left_from_the_middle_do_not_pile_up() -> None:
    outside = BackpressureQueue()
    outside.append(call("head"))
    for _ in range(10):
        calls = [call() for _ in range(1000)]
        for each in calls:
            outside.append(each)
        for each in calls:
            outside.drop(each)
    assert len(outside.waiting) == 1
    outside.append(call("last"))
    assert len(outside._deadlines._heap) <= 2 * 2 + SLACK
    assert entered(outside) == ["head", "last"]


@given(st.lists(st.tuples(st.sampled_from(["come", "enter", "leave", "pass"]), st.integers(0, 5))))
def test_each_request_leaves_exactly_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    outside, now = BackpressureQueue(), 0.0
    inside: list[ThreadCall] = []
    waiting: list[ThreadCall] = []
    for step, number in steps:
        if step == "come":
            waiting.append(call(arrival=now, timeout=float(number + 1)))
            outside.append(waiting[-1])
        elif step == "enter":
            request = outside.pop(lambda rows, cost, bulk: rows <= 9)
            assert request is (waiting[0] if waiting else None)
            inside += waiting[:1]
            del waiting[:1]
        elif step == "leave" and number < len(waiting):
            outside.drop(waiting.pop(number))
        elif step == "pass":
            now += number
            late = [each for each in waiting if each.deadline <= now]
            assert set(map(id, outside.expire(now))) == set(map(id, late))
            waiting = [each for each in waiting if each.deadline > now]
        assert len(outside) == len(waiting)
        assert bool(outside.waiting) == bool(waiting)
    assert not any(each.settled for each in inside)
