"""group.py: lanes in order of arrival, and the deadlines of a group, kept apart only when they must be."""

from math import inf

import pytest
from tests.batching.mill import Asked, listed, many

from weir.batching.group import SLACK, FifoQueue, Group


def filled(*requests: Asked) -> Group:
    """Return a group with these in it."""
    group = Group(None)
    for request in requests:
        group.add(request)
    return group


def end(group: Group, request: Asked) -> int:
    """Settle a request and take it out."""
    request.settled = True
    return group.remove(request)


def test_an_empty_group() -> None:
    group = Group("key")
    assert (group.waiting, len(group), group.oldest(), group.earliest(), list(group)) == (0, 0, inf, inf, [])
    assert group.passed(1e9) == []
    assert FifoQueue().head is None


def test_equal_timeouts_need_no_deadlines_of_their_own() -> None:
    group = filled(*many(5, 1.0))
    assert group.timeout == 30.0
    assert (group.waiting, len(group), group.oldest(), group.earliest()) == (5, 5, 1.0, 31.0)


@pytest.mark.parametrize("other", [Asked(0, 2.0, 5.0), Asked(0, 2.0, 30.0, priority=1), Asked(0, 2.0, large=True)])
def test_another_kind_of_request_keeps_them_apart_until_the_group_is_empty(other: Asked) -> None:
    first, second = many(2, 1.0)
    group = filled(first, second)
    end(group, second)
    group.add(other)
    assert group.timeout != group.timeout
    assert group.earliest() == min(31.0, other.deadline)
    end(group, first)
    assert group.earliest() == other.deadline
    assert group.passed(other.deadline) == [other]
    end(group, other)
    assert (group.waiting, group.earliest()) == (0, inf)
    group.add(Asked(0, 3.0, 7.0))
    assert (group.timeout, group.earliest()) == (7.0, 10.0)


def test_who_arrived_earlier_goes_before_even_when_submitted_later() -> None:
    arrivals = [1.0, 3.0, 2.0, 3.0, 0.5]
    group = filled(*[Asked(number, arrival) for number, arrival in enumerate(arrivals)])
    assert [request.payload for request in group] == [4, 0, 2, 1, 3]
    assert group.oldest() == 0.5
    assert group.earliest() == 30.5


def test_leaving_from_the_front_the_middle_and_the_end() -> None:
    requests = many(5)
    group = filled(*requests)
    for place in (2, 4, 0):
        assert end(group, requests[place]) == 1
    assert [request.payload for request in group] == [1, 3]
    assert group.plain.head is requests[1]
    assert end(group, requests[1]) == 1
    assert group.plain.head is requests[3]  # the settled one between them has gone as well
    assert (len(group), group.waiting) == (1, 1)


def test_settled_requests_in_the_middle_are_swept_out() -> None:
    head = Asked("head")
    group = filled(head)
    for number in range(10_000):
        request = Asked(number)
        group.add(request)
        end(group, request)
    assert len(group.plain.waiting) <= 2 * SLACK + 2
    assert list(group) == [head]
    group.append(Asked("appended"))
    assert len(group.plain.waiting) == len(group.plain) + group.plain.dead  # the bound append survives the sweeping


def test_passed_deadlines() -> None:
    requests = [Asked(number, float(number)) for number in range(5)]
    group = filled(*requests)
    end(group, requests[1])
    assert group.passed(29.0) == []
    assert group.passed(32.0) == [requests[0], requests[2]]


def test_levels_are_in_order_of_priority_and_forgotten_when_empty() -> None:
    requests = [Asked(0, priority=priority) for priority in (0, 5, -3, 5)]
    group = filled(*requests)
    assert [level.priority for level in group.levels] == [5, 0, -3]
    for request in requests[1:]:
        end(group, request)
    assert [level.priority for level in group.levels] == [0]
    end(group, requests[0])
    assert [level.priority for level in group.levels] == [0]
    assert group.plain is group.levels[0].small


def test_ten_thousand_priorities_leave_nothing_behind() -> None:
    group = filled(Asked("stays"))
    for priority in range(1, 10_001):
        request = Asked(0, priority=priority)
        group.add(request)
        end(group, request)
    assert len(group.levels) == 1
    assert len(group._deadlines) <= 70


def test_the_rest_of_a_divided_request_leaves() -> None:
    request = listed(10)
    group = filled(request)
    request.taken = 4
    group.departed += 4
    assert end(group, request) == 6
    assert group.waiting == 0
    assert group.plain.odd == 0


def test_those_of_about_its_size_are_ahead_of_a_large_one() -> None:
    group = filled(*(listed(16, large=True) for _ in range(3)), listed(64, large=True), Asked(0))
    ahead = [
        group.lane_of(request).ahead(request) for request in (listed(17, large=True), listed(200, large=True), Asked(1))
    ]
    assert ahead == [3, 0, 1]
