"""queue.py: all groups together, which is next, and the heap that orders them."""

from math import inf

from hypothesis import given
from hypothesis import strategies as some
from tests.batching.mill import Asked, filled, listed

from weir.batching.compose import BatchDraft
from weir.batching.queue import SLACK, WOKEN_AT_ONCE, GroupScheduler, IndexedHeap, RequestQueue


def test_a_shorter_deadline_moves_a_group_forward() -> None:
    line = RequestQueue(10)
    line.enter(Asked(0, 0.0, 5.0, key="a"))
    line.enter(Asked(0, 0.0, 4.0, key="b"))
    line.enter(Asked(0, 0.0, 9.0, key="a"))
    assert line.scheduler.first() is line.groups["b"]
    line.enter(Asked(0, 0.0, 3.0, key="a"))
    assert line.scheduler.first() is line.groups["a"]


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
    line.depart(4, 4.0)
    line.sweep()
    assert line.waiting == 4
    load.divided, load.late = [], [alive]
    line.account(line.groups["a"], load)
    alive.settled = True
    line.sweep()
    assert line.waiting == 4  # forgotten: somebody else has taken it out


# Which group is next, and which is asked again when.


def test_a_free_place_wakes_some_in_turn() -> None:
    turns = GroupScheduler()
    groups = [filled(Asked(0, 0.0, 9.0)) for _ in range(WOKEN_AT_ONCE + 10)]
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


# A priority queue whose members move and leave.


def test_outdated_entries_do_not_pile_up() -> None:
    agenda: IndexedHeap[str] = IndexedHeap()
    for number in range(10_000):
        agenda.put("only", (float(number), 0.0))
    assert len(agenda._heap) <= 2 + SLACK + 1
    assert agenda.first() == ((9999.0, 0.0), "only")


@given(some.lists(some.tuples(some.integers(0, 5), some.none() | some.integers(0, 9)), max_size=200))
def test_it_agrees_with_a_dictionary(moves: list[tuple[int, int | None]]) -> None:
    agenda: IndexedHeap[int] = IndexedHeap()
    truth: dict[int, float] = {}
    for member, rank in moves:
        if rank is None:
            agenda.discard(member)
            truth.pop(member, None)
        else:
            agenda.put(member, (float(rank), 0.0))
            truth[member] = float(rank)
        first = agenda.first()
        assert (None if first is None else first[0][0]) == min(truth.values(), default=None)
        assert len(agenda) == len(truth)
