"""deadlines.py: the earliest deadline of those that wait, whatever timeouts they have."""

from math import inf

from hypothesis import given
from hypothesis import strategies as some
from tests.batching.mill import Asked

from weir.batching.group import MAX_QUEUES, SLACK, Deadlines


def test_nothing_is_kept_of_those_that_have_gone_once_nobody_waits() -> None:
    deadlines = Deadlines()
    gone = [Asked(number, 0.0, 1.0 + number) for number in range(12)]
    for request in gone:
        deadlines.add(request)
        request.settled = True
    deadlines.trim(1)
    assert len(deadlines) == 12
    deadlines.trim(0)
    assert len(deadlines) == 0


def test_nothing_has_no_deadline() -> None:
    assert Deadlines().earliest() == inf
    assert Deadlines().passed(1e9) == []


def test_settled_and_dispatched_requests_are_passed_over() -> None:
    deadlines = Deadlines()
    first, second, third = requests = [Asked(0, float(arrival)) for arrival in range(3)]
    for request in requests:
        deadlines.add(request)
    assert deadlines.earliest() == first.deadline
    first.settled = True
    assert deadlines.earliest() == second.deadline
    second.taken = 1
    assert deadlines.earliest() == third.deadline
    third.settled = True
    assert deadlines.earliest() == inf


def test_more_distinct_timeouts_than_queues_share_a_heap() -> None:
    deadlines = Deadlines()
    requests = [Asked(0, 0.0, float(timeout)) for timeout in range(30, 0, -1)]
    for request in requests:
        deadlines.add(request)
    assert len(deadlines._by_timeout) == MAX_QUEUES
    assert len(deadlines) == 30
    for request in reversed(requests):
        assert deadlines.earliest() == request.deadline
        request.settled = True
    assert deadlines.earliest() == inf


def test_an_empty_queue_makes_room_for_another_timeout() -> None:
    deadlines = Deadlines()
    for timeout in range(1, 200):
        request = Asked(0, 0.0, float(timeout))
        deadlines.add(request)
        assert deadlines.earliest() == request.deadline
        request.settled = True
        deadlines.earliest()
    assert not deadlines._heap
    assert len(deadlines) <= 2


def test_one_that_arrived_late_keeps_its_place_by_deadline() -> None:
    deadlines = Deadlines()
    young, old = Asked(0, 5.0), Asked(0, 1.0)
    deadlines.add(young)
    deadlines.add(old)
    assert deadlines.earliest() == old.deadline
    assert deadlines.passed(old.deadline) == [old]
    assert deadlines.passed(young.deadline) == [young]


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
    assert not deadlines._by_timeout


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
