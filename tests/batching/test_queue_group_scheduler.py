"""turns.py: whose turn it is, and who is asked again when."""

from math import inf

from tests.batching.mill import Asked

from weir.batching.group import Group
from weir.batching.queue import WOKEN_AT_ONCE, GroupScheduler


def group(key: object, *requests: Asked) -> Group:
    """Return a group with these in it."""
    made = Group(key)
    for request in requests:
        made.add(request)
    return made


def test_nobody() -> None:
    turns = GroupScheduler()
    assert turns.first() is None
    assert (turns.end_of_wait(), turns.earliest_deadline(), turns.passed(1e9)) == (inf, inf, [])


def test_earliest_deadline_then_oldest() -> None:
    turns = GroupScheduler()
    groups = [group("late", Asked(0, 0.0, 9.0)), group("young", Asked(0, 2.0, 5.0)), group("old", Asked(0, 1.0, 6.0))]
    for each in groups:
        turns.wake(each)
    order = []
    while (first := turns.first()) is not None:
        order.append(first.key)
        turns.close(first)
    assert order == ["old", "young", "late"]


def test_what_gave_a_group_its_turn_may_have_gone() -> None:
    urgent = Asked(0, 0.0, 1.0)
    first, second = group("a", urgent, Asked(0, 0.0, 9.0)), group("b", Asked(0, 0.0, 5.0))
    turns = GroupScheduler()
    turns.wake(first)
    turns.wake(second)
    assert turns.first() is first
    urgent.settled = True
    first.remove(urgent)
    assert turns.earliest_deadline() == 1.0  # not looked at yet: an instant before which nothing passes
    assert turns.first() is second
    assert turns.earliest_deadline() == 5.0


def test_a_parked_group_wakes_when_its_wait_is_over() -> None:
    turns = GroupScheduler()
    first, second = group("a", Asked(0, 0.0, 9.0)), group("b", Asked(0, 0.0, 5.0))
    for each, until in ((first, 1.0), (second, 2.0)):
        turns.wake(each)
        turns.park(each, until)
        assert each.asleep
    assert turns.first() is None
    assert turns.end_of_wait() == 1.0
    turns.wake_due(0.5)
    assert turns.first() is None
    turns.wake_due(1.0)
    assert turns.first() is first
    assert not first.asleep
    assert turns.end_of_wait() == 2.0


def test_a_free_place_wakes_some_in_turn() -> None:
    turns = GroupScheduler()
    groups = [group(number, Asked(0, 0.0, 9.0)) for number in range(WOKEN_AT_ONCE + 10)]
    for each in groups:
        turns.park(each, 5.0)
    turns.wake_some()
    assert [each.asleep for each in groups] == [False] * WOKEN_AT_ONCE + [True] * 10
    for each in groups[:WOKEN_AT_ONCE]:
        turns.park(each, 5.0)
    turns.wake_some()
    assert [each.asleep for each in groups[-11:]] == [True] + [False] * 10
    turns.wake_all()
    assert not any(each.asleep for each in groups)


def test_groups_with_a_passed_deadline() -> None:
    turns = GroupScheduler()
    first, second, third = (group(n, Asked(0, 0.0, float(n))) for n in (1, 2, 3))
    turns.wake(first)
    turns.park(second, 1.5)
    turns.wake(third)
    assert turns.passed(0.5) == []
    assert turns.passed(2.0) == [first, second]
    assert turns.first() is third
