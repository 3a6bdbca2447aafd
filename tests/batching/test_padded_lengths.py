"""lengths.py: a lane that finds its requests by arrival and by length."""

from math import inf
from random import Random

import pytest
from tests.batching.mill import Asked, listed

from weir.batching.padded import LengthQueue, length_of
from weir.batching.request_state import is_gone


def of(length: float, arrival: float = 0.0) -> Asked:
    """Return a request of this length."""
    return Asked(length, arrival, cost=length)


def test_a_length_is_what_a_row_costs() -> None:
    assert length_of(of(7.0)) == 7.0
    assert length_of(listed(4, cost=12.0)) == 3.0


def test_those_of_equal_length_are_in_order_of_arrival() -> None:
    lane = LengthQueue()
    first, second, late, other = of(5.0, 1.0), of(5.0, 2.0), of(5.0, 1.5), of(3.0, 3.0)
    for request in (first, second, other, late):
        lane.add(request)
    assert lane.lengths == [3.0, 5.0]
    assert list(lane.by_length[5.0]) == [first, late, second]
    assert list(lane.waiting) == [first, late, second, other]


def test_the_front_of_every_queue_waits() -> None:
    lane = LengthQueue()
    first, second, third = of(5.0), of(5.0), of(5.0)
    for request in (first, second, third):
        lane.add(request)
    second.settled = True
    lane.leave(second)
    assert (len(lane), lane.lengths) == (2, [5.0])
    first.taken = 1
    lane.leave(first)
    assert (len(lane), lane.head, list(lane.by_length[5.0])) == (1, third, [third])
    third.settled = True
    lane.leave(third)
    assert (len(lane), lane.head, lane.lengths, lane.by_length) == (0, None, [], {})


def test_who_has_gone_does_not_pile_up() -> None:
    lane, random = LengthQueue(), Random(1)
    head = of(1.0)
    lane.add(head)
    for number in range(5000):
        request = of(float(random.randrange(2, 40)), number)
        lane.add(request)
        if number % 10:
            request.settled = True
            lane.leave(request)
    assert lane.head is head
    assert len(lane) == 501
    assert len(lane.waiting) < 1100
    assert sum(map(len, lane.by_length.values())) < 1100
    assert all(not is_gone(queue[0]) for queue in lane.by_length.values())
    assert lane.lengths == sorted(lane.by_length)


@pytest.mark.parametrize("seed", range(20))
def test_it_holds_what_a_list_would_hold(seed: int) -> None:
    """Whatever comes, is taken or leaves, one by one or many at a time before any of it is told."""
    chance, lane, model = Random(seed), LengthQueue(), list[Asked]()
    for number in range(600):
        if chance.random() < (0.4, 0.6)[number // 100 % 2] or not model:
            request = of(float(chance.randrange(1, 6)), number - chance.choice([0.0, 0.0, 2.5]))
            request.tag, request.brief = seed % 2 * float(chance.randrange(100)), chance.random() < 0.5
            model.append(request)
            lane.add(request)
        else:
            gone = chance.sample(model, min(len(model), chance.choice([1, 1, 5, 200])))
            for request in gone:
                if chance.random() < 0.5:
                    request.settled = True
                else:
                    request.taken = 1
            for request in gone:
                model.remove(request)
                lane.leave(request)
        model.sort(key=lambda each: each.arrival)
        turns = sorted(model, key=lambda each: (each.tag, each.arrival))
        assert (len(lane), lane.oldest, lane.head) == (len(model), *((model[0], turns[0]) if model else (None, None)))
        assert lane.next(inf, inf) == turns
        assert lane.next(3, inf) == turns[:3]
        assert lane.brief == sum(each.brief for each in model)
        assert [each for each in lane.waiting if not is_gone(each)] == model
        assert lane.lengths == sorted(lane.by_length) == sorted({length_of(each) for each in model})
        for length, queue in lane.by_length.items():
            assert not is_gone(queue[0])
            assert [each for each in queue if not is_gone(each)] == [
                each for each in turns if length_of(each) == length
            ]
