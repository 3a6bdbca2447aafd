"""line.py: all groups together."""

from math import inf

from tests.batching.mill import Asked, listed

from weir.batching.compose import BatchDraft
from weir.batching.group import Group
from weir.batching.queue import RequestQueue


def test_room() -> None:
    line = RequestQueue(4)
    assert line.room(4)
    assert line.room(400)  # larger than the line, and nothing waits
    line.enter(listed(3))
    assert line.room(1)
    assert not line.room(2)
    line.enter(Asked(0))
    assert not line.room(1)
    line.close()
    assert not line.room(1)


def test_a_group_is_forgotten_when_it_is_empty() -> None:
    line = RequestQueue(1000)
    for number in range(100):
        request = Asked(0, key=number)
        line.enter(request)
        request.settled = True
        line.leave(request)
    assert (line.waiting, len(line.groups), line.turns.first()) == (0, 0, None)


def test_a_group_that_was_emptied_last_serves_its_key_again() -> None:
    line = RequestQueue(10)

    def enter_and_leave(key: object) -> Group:
        request = Asked(0, key=key)
        line.enter(request)
        group = line.groups[key]
        request.settled = True
        line.leave(request)
        assert (group.waiting, len(line.groups), line.turns.first()) == (0, 0, None)
        return group

    first = enter_and_leave("a")
    assert enter_and_leave("a") is first
    assert enter_and_leave("b") is not first
    assert enter_and_leave("a") is not first


def test_the_group_without_a_key_stays() -> None:
    line = RequestQueue(10)
    request = Asked(0)
    line.enter(request)
    request.settled = True
    line.leave(request)
    assert list(line.groups) == [None]
    assert line.groups[None].asleep


def test_a_shorter_deadline_moves_a_group_forward() -> None:
    line = RequestQueue(10)
    line.enter(Asked(0, 0.0, 5.0, key="a"))
    line.enter(Asked(0, 0.0, 4.0, key="b"))
    line.enter(Asked(0, 0.0, 9.0, key="a"))
    assert line.turns.first() is line.groups["b"]
    line.enter(Asked(0, 0.0, 3.0, key="a"))
    assert line.turns.first() is line.groups["a"]


def test_leaving_one_of_several_keeps_the_group() -> None:
    line = RequestQueue(10)
    first, second = Asked(0, key="a"), Asked(0, key="a")
    line.enter(first)
    line.enter(second)
    first.settled = True
    line.leave(first)
    assert (line.waiting, list(line.groups)) == (1, ["a"])
    assert line.room(9)
    assert not line.room(10)


def test_the_rest_of_a_request_that_had_its_end_is_swept_out() -> None:
    line = RequestQueue(10)
    ended, gone, alive = listed(4, key="a"), listed(4, key="a"), listed(4, key="a")
    for request in (ended, gone, alive):
        line.enter(request)
    load = BatchDraft(1, inf, 0.0)
    load.divided = [ended, gone, alive]
    line.account(line.groups["a"], load)
    ended.settled = True
    gone.taken = 4
    line.groups["a"].departed += 4
    line.depart(4)
    line.sweep()
    assert line.waiting == 4
    load.divided, load.late = [], [alive]
    line.account(line.groups["a"], load)
    alive.settled = True
    line.sweep()
    assert line.waiting == 4  # forgotten: somebody else has taken it out


def test_passed_deadlines_leave_the_line() -> None:
    line = RequestQueue(10)
    requests = [Asked(0, 0.0, timeout, key=key) for timeout, key in ((1.0, "a"), (2.0, "b"), (9.0, "b"), (1.0, None))]
    for request in requests:
        line.enter(request)
    assert line.passed(0.5) == []
    assert {id(each) for each in line.passed(2.0)} == {id(requests[n]) for n in (0, 1, 3)}
    assert (line.waiting, list(line.groups)) == (1, ["b", None])
    assert not requests[2].settled


def test_clear() -> None:
    line = RequestQueue(10)
    requests = [Asked(0, key=key) for key in ("a", "b", None)]
    for request in requests:
        line.enter(request)
    line.clear()
    assert (line.waiting, line.groups, line.turns.first()) == (0, {}, None)
    assert line.room(10)
