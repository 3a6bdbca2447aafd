"""agenda.py: a priority queue whose members move and leave."""

from hypothesis import given
from hypothesis import strategies as some

from weir.batching.queue import SLACK, IndexedHeap


def test_the_lowest_rank_is_first_and_equal_ranks_keep_their_order() -> None:
    agenda: IndexedHeap[str] = IndexedHeap()
    assert agenda.first() is None
    agenda.put("late", (2.0, 0.0))
    agenda.put("a", (1.0, 5.0))
    agenda.put("b", (1.0, 5.0))
    assert agenda.first() == ((1.0, 5.0), "a")
    agenda.discard("a")
    agenda.discard("never there")
    assert agenda.first() == ((1.0, 5.0), "b")
    agenda.put("b", (3.0, 0.0))
    assert agenda.first() == ((2.0, 0.0), "late")
    assert len(agenda) == 2
    assert "b" in agenda
    assert "a" not in agenda


def test_members_come_in_the_order_in_which_they_joined() -> None:
    agenda: IndexedHeap[int] = IndexedHeap()
    for number in range(5):
        agenda.put(number, (float(-number), 0.0))
    assert agenda.members(3) == [0, 1, 2]
    assert agenda.members(9) == [0, 1, 2, 3, 4]


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
