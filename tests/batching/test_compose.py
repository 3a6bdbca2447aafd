"""compose.py: what goes into a batch, and in which order."""

from math import inf
from typing import Any

from tests.batching.mill import Asked, filled, listed, many
from tests.rings import subcases

from weir.batching.compose import BatchDraft, Composer
from weir.batching.group import Group
from weir.messages import Kind


def take(group: Group, rows: int, cost: float = inf, start_cutoff: float = 0.0, overtakes: int = 4) -> BatchDraft:
    """Compose a batch."""
    before = group.waiting
    composer = Composer(overtakes)
    load = composer.draft(rows, cost, start_cutoff)
    composer.fill(load, group)
    assert before - group.waiting == load.departed
    return load


def payloads(load: BatchDraft) -> list[Any]:
    """Return what was taken."""
    return [request.payload for request in load.requests]


def test_plain_requests_go_in_order() -> None:
    group = filled(*many(5))
    load = take(group, 3)
    assert payloads(load) == [0, 1, 2]
    assert (load.rows, load.cost, load.slices, load.undivided) == (3, 3.0, None, True)
    assert payloads(take(group, 3)) == [3, 4]
    assert group.waiting == 0


def test_the_slow_way_agrees_with_the_fast_one() -> None:
    fast, slow = filled(*many(5)), filled(*many(5))
    slow.add(Asked("lowest", priority=-1))
    for rows in (2, 2, 1):
        first, second = take(fast, rows), take(slow, rows)
        assert payloads(first) == payloads(second)
        assert (first.rows, first.cost, first.undivided) == (second.rows, second.cost, second.undivided)
        assert first.slices is None


def test_who_cannot_make_it_is_left_out() -> None:
    requests = [Asked(number, 0.0, timeout) for number, timeout in enumerate((1.0, 5.0, 2.0, 9.0))]
    group = filled(*requests)
    load = take(group, 3, start_cutoff=2.0)
    assert payloads(load) == [1, 3]
    assert load.late == [requests[0], requests[2]]
    assert all(request.settled for request in load.late)
    assert group.waiting == 0


def test_a_list_is_divided_so_that_batches_are_full() -> None:
    group = filled(Asked("a"), listed(5), Asked("b"))
    load = take(group, 4)
    assert load.slices == [None, (0, 3)]
    assert (load.rows, load.cost, load.undivided) == (4, 1.6, False)
    assert load.divided == [load.requests[1]]
    load = take(group, 4)
    assert load.slices == [(3, 5), None]
    assert payloads(load)[1] == "b"
    assert load.divided == []


def test_items_of_two_rows_are_not_torn() -> None:
    group = filled(Asked([1, 2, 3], kind=Kind.ITEMS, rows=6))
    first, second = take(group, 5), take(group, 5)
    assert (first.rows, first.slices) == (4, [(0, 2)])
    assert (second.rows, second.slices) == (2, [(2, 3)])


def test_an_item_larger_than_the_policy_wants_goes_alone() -> None:
    group = filled(Asked("three", rows=3), Asked("one"), Asked([1, 2], kind=Kind.ITEMS, rows=8))
    assert payloads(take(group, 2)) == ["three"]
    assert payloads(take(group, 2)) == ["one"]
    assert [take(group, 2).slices for _ in range(2)] == [[(0, 1)], [(1, 2)]]
    assert group.waiting == 0


def test_nobody_within_a_lane_is_passed_over() -> None:
    group = filled(Asked("two", rows=2), Asked("three", rows=3), Asked("one", rows=1))
    assert payloads(take(group, 4)) == ["two"]
    assert payloads(take(group, 4)) == ["three", "one"]


@subcases(
    ("costs", "expected"),
    [([1.0, 1.0, 1.0], [2, 1]), ([0.5, 1.5, 1.0], [2, 1]), ([2.0, 2.0, 0.0], [1, 2]), ([0.0, 0.0, 0.0], [3])],
)
def test_a_batch_has_a_budget(costs: list[float], expected: list[int]) -> None:
    group = filled(*[Asked(number, cost=cost) for number, cost in enumerate(costs)])
    loads = [take(group, 64, cost=2.0) for _ in expected]
    assert [load.rows for load in loads] == expected
    assert all(load.cost <= 2.0 for load in loads)


def test_a_list_is_divided_by_cost_too() -> None:
    group = filled(listed(10, cost=7.0))
    loads = [take(group, 64, cost=2.1) for _ in range(4)]
    assert [load.rows for load in loads] == [3, 3, 3, 1]
    assert all(load.cost <= 2.1 for load in loads)


def test_rounding_never_breaks_the_budget() -> None:
    assert int((1.68 - 0.14) / 0.14) * 0.14 + 0.14 > 1.68
    group = filled(Asked("first", cost=0.14), listed(100, cost=100 * 0.14))
    while group.waiting:
        assert 0 < take(group, 64, cost=1.68).cost <= 1.68


def large(name: Any, arrival: float, rows: int = 4) -> Asked:
    """Return a large request."""
    return Asked(name, arrival, rows=rows, large=True)


def test_small_ones_overtake_large_ones() -> None:
    group = filled(large("large", 0.0), *many(3, 1.0))
    assert payloads(take(group, 4)) == [0, 1, 2]
    assert payloads(take(group, 4)) == ["large"]


def test_but_not_more_often_than_allowed() -> None:
    group = filled(large("first", 0.0), large("second", 0.0), *many(40, 1.0))
    order = [payloads(take(group, 4, overtakes=2))[0] for _ in range(8)]
    assert order == [0, 4, "first", 8, 12, "second", 16, 20]


def test_a_large_list_takes_turns_with_small_ones() -> None:
    """5 batches of the large one do not hold up the small ones: each takes its turn."""
    group = filled(listed(20, 0.0, large=True), *many(100, 1.0))
    led = [isinstance(take(group, 4, overtakes=3).requests[0].payload, list) for _ in range(12)]
    assert led == [False, False, False, True] * 3


def test_a_large_one_that_only_fills_up_has_not_led() -> None:
    """It gets what is left over, and is still due in its turn."""
    big = listed(20, 0.0, large=True)
    group = filled(big, *[Asked(number, 1.0, rows=3) for number in range(9)])
    for _ in range(2):
        load = take(group, 4, overtakes=2)
        assert [request is big for request in load.requests] == [False, True]
    assert big.overtaken == 2
    assert take(group, 4, overtakes=2).requests == [big]
    assert big.overtaken == 0


def test_one_single_item_goes_at_once_before_a_crowd_of_large_ones() -> None:
    group = filled(*(listed(256, large=True) for _ in range(1000)))
    for _ in range(9):
        take(group, 64, overtakes=1000)
    single = Asked("single", 1.0)
    group.add(single)
    assert take(group, 64, overtakes=1000).requests[0] is single


def test_a_crowd_that_was_cancelled_leaves_nothing_behind() -> None:
    head = large("head", 0.0)
    group = filled(head)
    for _ in range(1000):
        request = large("gone", 1.0)
        group.add(request)
        request.settled = True
        group.remove(request)
    assert sum(len(share.queue.waiting) for share in group.levels[0].large.shares.values()) < 200
    assert take(group, 4).requests == [head]


def test_a_large_one_that_waited_outside_keeps_its_place() -> None:
    group = filled(large("second", 2.0), large("first", 1.0), large("third", 3.0))
    assert payloads(take(group, 12)) == ["first", "second", "third"]


def test_the_oldest_large_one_takes_turns_with_other_sizes() -> None:
    big = listed(400, 0.0, large=True)
    group = filled(big, *(large(number, 1.0) for number in range(40)))
    led = [take(group, 4, overtakes=3).requests[0] is big for _ in range(12)]
    assert led == [False, False, False, True] * 3


def test_small_ones_that_came_before_one_that_is_due_go_before_it() -> None:
    due = large("due", 1.5)
    due.overtaken = 4
    early, late = [Asked(number, float(number)) for number in range(2)], Asked("late", 2.0)
    assert payloads(take(filled(due, *early, late), 7)) == [0, 1, "due", "late"]


def test_where_a_large_one_does_not_fit_small_ones_fill_the_batch() -> None:
    group = filled(large("large", 0.0), large("too large", 0.5, rows=9), *many(30, 1.0))
    assert payloads(take(group, 12, overtakes=0)) == ["large", *range(8)]


def test_higher_priority_goes_first() -> None:
    group = filled(*[Asked(priority, priority=priority) for priority in (0, 2, -1, 2, 0)])
    assert payloads(take(group, 4)) == [2, 2, 0, 0]
    assert payloads(take(group, 4)) == [-1]


def test_cancelled_ones_are_passed_over() -> None:
    requests = many(4)
    group = filled(*requests)
    requests[1].settled = True
    group.remove(requests[1])
    assert payloads(take(group, 3)) == [0, 2, 3]


def test_whole_ones_after_a_divided_one() -> None:
    group = filled(listed(4, cost=8.0, priority=1), Asked("whole"))
    load = take(group, 64, cost=5.0)
    assert load.slices == [(0, 2), None]
    assert (load.rows, load.cost, payloads(load)[1]) == (3, 5.0, "whole")


def test_beside_large_ones_too_who_cannot_make_it_is_left_out() -> None:
    small = [Asked("small, late", 0.0, 1.0), Asked("small", 0.0, 9.0)]
    crowd = [Asked("large, late", 0.0, 1.0, rows=4, large=True), Asked("large", 0.0, 9.0, rows=4, large=True)]
    group = filled(*small, *crowd)
    load = take(group, 5, start_cutoff=2.0)
    assert sorted(payloads(load)) == ["large", "small"]
    assert {request.payload for request in load.late} == {"small, late", "large, late"}
    assert all(request.settled for request in load.late)
    assert group.waiting == 0
