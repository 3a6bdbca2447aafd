"""group.py: queues in order of arrival, and the deadlines of a group, kept apart only when they must be."""

from math import inf

from hypothesis import given
from hypothesis import strategies as some
from tests.batching.mill import Asked, filled, listed

from weir.batching.group import SLACK, Deadlines, Group


def end(group: Group, request: Asked) -> int:
    """Settle a request and take it out."""
    request.settled = True
    return group.remove(request)


def test_settled_requests_in_the_middle_are_swept_out() -> None:
    head = Asked("head")
    group = filled(head)
    for number in range(10_000):
        request = Asked(number)
        group.add(request)
        end(group, request)
    assert len(group.main.waiting) <= 2 * SLACK + 2
    assert list(group) == [head]
    group.append(Asked("appended"))
    assert len(group.main.waiting) == len(group.main) + group.main.dead  # the bound append survives the sweeping


def test_levels_are_in_order_of_priority_and_forgotten_when_empty() -> None:
    requests = [Asked(0, priority=priority) for priority in (0, 5, -3, 5)]
    group = filled(*requests)
    assert [level.priority for level in group.levels] == [5, 0, -3]
    for request in requests[1:]:
        end(group, request)
    assert [level.priority for level in group.levels] == [0]
    end(group, requests[0])
    assert [level.priority for level in group.levels] == [0]
    assert group.main is group.levels[0].small.queue


def test_ten_thousand_priorities_leave_nothing_behind() -> None:
    group = filled(Asked("stays"))
    for priority in range(1, 10_001):
        request = Asked(0, priority=priority)
        group.add(request)
        end(group, request)
    assert len(group.levels) == 1
    assert len(group._deadlines) <= 70


def test_those_of_about_its_size_are_ahead_of_a_large_one() -> None:
    group = filled(*(listed(16, large=True) for _ in range(3)), listed(64, large=True), Asked(0))
    ahead = [
        group.queue_of(request).ahead(request)
        for request in (listed(17, large=True), listed(200, large=True), Asked(1))
    ]
    assert ahead == [3, 0, 1]


# The earliest deadline of the waiting requests, whatever timeouts they have.


def test_the_earliest_is_that_of_a_request_that_waits() -> None:
    deadlines = Deadlines()
    requests = [Asked(0, 0.0, float(timeout)) for timeout in range(30, 0, -1)]
    for request in requests:
        deadlines.add(request)
    assert len(deadlines) == 30
    for request in reversed(requests):
        assert deadlines.earliest() == request.deadline
        request.settled = True
    assert deadlines.earliest() == inf


def test_what_has_gone_is_swept_out() -> None:
    deadlines = Deadlines()
    blocker = Asked(0, 0.0, 1e6)
    deadlines.add(blocker)
    for number in range(10_000):
        request = Asked(0, 1.0 + number, (1e6, 7.0 + number % 20)[number % 2])
        deadlines.add(request)
        request.settled = True
        deadlines.trim(1)
    assert len(deadlines) <= 2 + SLACK
    assert deadlines.earliest() == blocker.deadline
    blocker.settled = True
    for _ in range(2 * SLACK):
        deadlines.add(blocker)
    deadlines.trim(0)
    assert len(deadlines) == 0


@given(some.lists(some.tuples(some.floats(0.1, 9.0), some.integers(0, 12), some.booleans()), max_size=60))
def test_it_agrees_with_a_list(added: list[tuple[float, int, bool]]) -> None:
    deadlines = Deadlines()
    alive: list[Asked] = []
    for arrival, timeout, ends_another in added:
        request = Asked(0, arrival, 1.0 + timeout)
        deadlines.add(request)
        alive.append(request)
        if ends_another:
            alive.pop(len(alive) // 2).settled = True
        assert deadlines.earliest() == min((each.deadline for each in alive), default=inf)
        deadlines.trim(len(alive))
    now = 8.0
    assert {id(each) for each in deadlines.passed(now)} == {id(each) for each in alive if each.deadline <= now}
    assert deadlines.earliest() == min((each.deadline for each in alive if each.deadline > now), default=inf)


def test_those_whose_deadline_is_near() -> None:
    deadlines = Deadlines()
    assert deadlines.within(inf) == []
    requests = [Asked(0, 0.0, float(timeout % 20)) for timeout in range(7, 407, 7)]
    for request in requests:
        deadlines.add(request)
    for request in requests[::3]:
        request.settled = True
    for until in (0.5, 4.0, 11.5, 99.0):
        near = [request for request in requests if request.deadline <= until and not request.settled]
        assert sorted(map(id, deadlines.within(until))) == sorted(map(id, near))
    assert len(deadlines) == len(requests)
