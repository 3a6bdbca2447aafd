"""padded.py: whose turn it is, and those nearest in length, within a budget that counts padding."""

from contextlib import suppress
from functools import partial
from math import inf, nan
from random import Random

import pytest
from tests.batching import mill
from tests.batching.mill import Asked, Mill, listed
from tests.rings import subcases

from weir.batching import BatchingSettings
from weir.batching.compose import BatchDraft
from weir.batching.group import Group
from weir.batching.padded import ByLength, LengthQueue, length_of
from weir.batching.request_state import is_gone
from weir.errors import DeadlineExceeded, InvalidRequest
from weir.messages import Dispatch

filled = partial(mill.filled, queue=LengthQueue)


def of(length: float, arrival: float = 0.0, **rest: float) -> Asked:
    """Return a request of this length."""
    return Asked(length, arrival, cost=length, **rest)


def take(group: Group, rows: int = 64, cost: float = inf, padding: float | None = None, **rest: float) -> BatchDraft:
    """Compose a batch."""
    before = group.waiting
    seconds = rest.get("seconds", 0.0)
    settings = BatchingSettings(
        max_padding=padding, padding_cost=rest.get("share", 1.0), max_overtakes=int(rest.get("overtakes", 4))
    )
    composer = ByLength(settings, lambda _: seconds)
    load = composer.draft(rows, cost, rest.get("start_cutoff", 0.0))
    composer.fill(load, group)
    assert before - group.waiting == load.departed
    return load


def lengths(load: BatchDraft) -> list[float]:
    """Return the lengths that were taken, in order."""
    return [request.payload for request in load.requests]


def test_the_oldest_goes_with_those_nearest_in_length() -> None:
    group = filled(*map(of, (20.0, 5.0, 21.0, 90.0, 19.0, 20.0, 4.0)))
    load = take(group, 4)
    assert lengths(load) == [20.0, 20.0, 19.0, 21.0]
    assert (load.rows, load.cost, load.padding, load.undivided, load.slices) == (4, 84.0, 4.0, True, None)
    assert lengths(take(group, 2)) == [5.0, 4.0]
    assert lengths(take(group, 4)) == [90.0]
    assert take(group).requests == []


def test_the_longer_ones_are_tried_when_the_shorter_ones_do_not_fit() -> None:
    group = filled(*map(of, (10.0, 4.0, 11.0, 12.0, 30.0)))
    assert lengths(take(group, padding=3.0)) == [10.0, 11.0, 12.0]  # one unit, then two more
    assert lengths(take(group, padding=3.0)) == [4.0]


def test_lists_are_divided_and_the_rest_waits() -> None:
    request = listed(10, cost=30.0)
    group = filled(request, listed(2, cost=6.0), of(2.0))
    load = take(group, 4)
    assert (load.requests, load.slices, load.divided, load.cost) == ([request], [(0, 4)], [request], 12.0)
    load = take(group, 64, 24.0)
    assert (load.slices, load.rows, load.cost) == ([(4, 10), None], 8, 24.0)
    assert lengths(take(group)) == [2.0]


def test_higher_priority_leads_and_lower_fills_up() -> None:
    low, high = of(10.0), of(20.0, priority=1)
    near = of(19.0, 1.0)
    group = filled(low, near, high)
    assert take(group, 2).requests == [high, near]
    assert take(group, 2).requests == [low]


def test_small_ones_lead_and_large_ones_fill_up_but_not_for_ever() -> None:
    large = [of(10.0, large=True), of(30.0, large=True)]
    small = [of(30.0, 1.0) for _ in range(9)]
    group = filled(*large, *small)
    first = take(group, 2, overtakes=2)
    assert first.requests == small[:2]
    assert large[0].overtaken == 1
    assert take(group, 2, overtakes=2).requests == small[2:4]
    third = take(group, 2, overtakes=2, padding=0.0)
    assert third.requests == [large[0]]  # it has been overtaken twice
    assert large[1].overtaken == 0
    assert take(group, 8, overtakes=2).requests == [*small[4:], large[1]]


def test_beside_small_ones_large_ones_make_a_batch_little_dearer() -> None:
    large = [of(10.0, large=True) for _ in range(30)]
    group = filled(*large, of(10.0, 1.0))
    load = take(group, 16, padding=5.0)
    assert (load.rows, load.cost, load.requests[0].large) == (4, 40.0, False)  # eight times the padding
    assert take(group, 16, padding=5.0).rows == 16  # where nobody waits for it, it is full

    small = [of(10.0, 1.0) for _ in range(6)]
    group = filled(*large[20:], *small)
    assert take(group, 16, padding=5.0).requests == small  # which are as many as that already


def test_a_large_one_whose_turn_it_is_leads_few_others_beside_small_ones() -> None:
    large = [of(10.0, large=True) for _ in range(9)]
    large[0].overtaken = 4
    small = of(10.0, 1.0)
    group = filled(*large, small)
    load = take(group, 16, padding=5.0)
    assert load.requests == [*large[:4], small]


def test_who_would_miss_the_deadline_leads() -> None:
    patient, tight, tighter = of(10.0, 0.0), of(50.0, 1.0, timeout=4.0), of(90.0, 2.0, timeout=2.5)
    group = filled(patient, tight, tighter)  # by 30, 5 and 4.5
    assert take(group, 1, start_cutoff=3.0, seconds=2.0).requests == [tighter]
    assert take(group, 1, start_cutoff=3.0, seconds=1.9).requests == [patient]  # the next batch is early enough
    assert take(group, 1, start_cutoff=3.0, seconds=2.0).requests == [tight]


def test_who_cannot_make_it_does_not_lead() -> None:
    patient, late, tight = of(10.0), of(50.0, timeout=3.0), of(90.0, timeout=4.0)
    load = take(filled(patient, late, tight), rows=1, start_cutoff=3.0, seconds=2.0)
    assert (load.requests, load.late) == ([tight], [])


def test_who_would_miss_the_deadline_does_not_go_before_a_higher_priority() -> None:
    tight, high = of(50.0, timeout=4.0), of(10.0, priority=1)
    group = filled(tight, high)
    assert take(group, 1, start_cutoff=3.0, seconds=2.0).requests == [high]
    assert take(group, 1, start_cutoff=3.0, seconds=2.0).requests == [tight]


def test_nobody_is_kept_waiting_by_the_deadlines_of_others() -> None:
    first, second, large = of(10.0), of(20.0, 0.5), of(30.0, large=True)
    group = filled(first, second, large, *(of(90.0, 1.0, timeout=2.0 + 0.01 * number) for number in range(20)))
    led = [take(group, 1, padding=0.0, seconds=9.0, overtakes=3).requests[0] for _ in range(12)]
    assert led.index(first) == 4
    assert led.index(large) == 3
    assert led.index(second) == 8
    assert sum(request.form.cost == 90.0 for request in led) == 9


def test_one_that_was_overtaken_enough_goes_before_who_came_later_alone() -> None:
    tight, later = of(10.0, timeout=5.0), of(30.0, 1.0, large=True)
    later.overtaken = 4
    assert take(filled(tight, later), 1, seconds=9.0).requests == [tight]
    first, hurried = of(10.0, 2.0), of(30.0, timeout=5.0, large=True)
    hurried.overtaken = 4
    assert take(filled(first, hurried), 1, seconds=9.0).requests == [hurried]


def test_more_make_their_deadlines_than_in_order_of_arrival() -> None:
    made = {}
    for overtakes in (0, 4):
        random, mill = Random(5), Mill(max_batch_size=4, padded=True, max_padding=8.0, max_overtakes=overtakes)
        for turn in range(400):
            with suppress(DeadlineExceeded):
                mill.submit(of(float(random.randrange(8, 60)), mill.now, timeout=random.choice((0.4, 5.0, 6.0))))
            mill.play(lambda _: 0.1, 0.03 * turn)
        made[overtakes] = sum(request.ends == [request.payload] for request in mill.accepted)
    assert made[4] > 1.1 * made[0]


@pytest.mark.no_cover
def test_a_small_one_waits_for_what_runs_and_for_a_short_batch() -> None:
    def seconds(cut: Dispatch) -> float:
        return 0.008 + 0.001 * cut.cost

    random = Random(9)
    mill = Mill(
        workers=2,
        max_batch_size=16,
        max_batch_cost=160.0,
        padded=True,
        max_padding=4.0,
        max_queue_size=5000,
        small_request_size=1,
    )
    mill.submit(*(Asked(None, rows=2, cost=20.0) for _ in range(1200)))
    full, soon = 0.168, 1.0
    while mill.batcher.waiting_rows > 100:
        mill.play(seconds, soon)
        mill.submit(of(10.0, mill.now))
        soon += random.expovariate(8.0)
    waits = [cut.at + seconds(cut) - each.arrival for cut in mill.cuts for each in cut.requests if not each.large]
    assert len(waits) > 50
    assert max(waits) <= 1.3 * full  # twice as long, if the crowd filled up its batch
    beside = [
        sum(each.form.rows for each in cut.requests if each.large)
        for cut in mill.cuts
        if not all(each.large for each in cut.requests)
    ]
    assert max(beside) == 2  # eight times the padding is room for three rows, and each of them has two
    assert {cut.rows for cut in mill.cuts if cut.rows > max(beside) + 4} == {16}


@pytest.mark.no_cover
def test_whoever_is_first_is_in_the_next_batch() -> None:
    mill, random = (
        Mill(max_batch_size=8, max_batch_cost=512.0, padded=True, max_padding=20.0, max_queue_size=5000),
        Random(7),
    )
    for number in range(600):
        mill.submit(of(float(random.choice((3, 500, random.randrange(3, 200)))), arrival=mill.now + number * 1e-6))
    while mill.waiting:
        oldest = mill.waiting[0]
        (running,) = mill.batcher.running.values()
        (cut,) = mill.finish(running)
        assert oldest in cut.requests
    assert all(cut.padding <= 20.0 for cut in mill.cuts)


def test_what_is_longer_than_the_budget_goes_alone() -> None:
    mill = Mill(padded=True, max_batch_cost=4.0)
    mill.submit(of(9.0), of(1.0), of(9.0))
    mill.run_all()
    assert [cut.cost for cut in mill.cuts] == [9.0, 1.0, 9.0]
    with pytest.raises(InvalidRequest, match="cost=nan: an item costs from 0 to max_batch_cost=inf"):
        mill.submit(of(nan))


def tagged(length: float, tag: float, arrival: float = 0.0, *, brief: bool = False, **rest: float) -> Asked:
    """Return a request of this length that has this turn."""
    request = of(length, arrival, **rest)
    request.tag, request.brief = tag, brief
    return request


def test_the_lowest_tag_leads_whoever_arrived_first() -> None:
    group = filled(tagged(20.0, 9.0), tagged(5.0, 7.0, 1.0), tagged(5.0, 3.0, 2.0), tagged(9.0, 7.0, 0.5))
    assert lengths(take(group, 1)) == [5.0]
    assert [lengths(take(group, 1)) for _ in range(3)] == [[9.0], [5.0], [20.0]]


def test_who_arrived_first_is_passed_over_so_many_times_at_most() -> None:
    group = filled(tagged(20.0, 1e6))
    for number in range(10):
        group.add(tagged(5.0, float(number), 1.0 + number))
    assert [lengths(take(group, 1, overtakes=3)) for _ in range(5)] == [[5.0], [5.0], [5.0], [20.0], [5.0]]


def test_who_arrived_first_and_is_late_leads_nothing() -> None:
    first = tagged(20.0, 1e6, timeout=1.0)
    group = filled(first, *(tagged(5.0, float(number), 1.0 + number) for number in range(9)))
    for _ in range(4):
        take(group, 1, overtakes=3)
    first.overtaken = 9
    load = take(group, 1, start_cutoff=2.0, overtakes=3)
    assert (lengths(load), load.late) == ([5.0], [])


def test_a_batch_with_brief_requests_is_short() -> None:
    def crowd(*brief: Asked) -> Group:
        return filled(*(tagged(10.0, 100.0 + number) for number in range(40)), *brief)

    assert take(crowd(), 64, 200.0, 3.0).cost == 200.0
    load = take(crowd(tagged(10.0, 1.0, 5.0, brief=True)), 64, 200.0, 3.0)
    assert (load.requests[0].tag, load.cost) == (1.0, 20.0)  # eight times 3 is room for two
    several = [tagged(10.0, float(number), 5.0, brief=True) for number in range(4)]
    load = take(crowd(*several), 64, 200.0, 3.0)
    assert (load.requests[:4], load.cost) == (several, 80.0)  # as much of others beside them
    many = [tagged(10.0, float(number), 5.0, brief=True) for number in range(30)]
    assert take(crowd(*many), 64, 200.0, 3.0).cost == 200.0


def test_whose_turn_is_next_goes_before_others_of_that_length() -> None:
    far = [tagged(10.0, 1000.0 + number) for number in range(40)]
    near = [tagged(11.0, 2.0 + number, 5.0) for number in range(4)]
    group = filled(*far, tagged(10.0, 1.0, 5.0, brief=True), *near)
    assert [request.tag for request in take(group, 2, padding=4.0).requests] == [1.0, 2.0]
    assert [request.tag for request in take(group, 2, padding=4.0).requests] == [3.0, 4.0]


# A queue that finds its requests by arrival and by length.


@subcases("seed", range(20))
def test_it_holds_what_a_list_would_hold(seed: int) -> None:
    """Whatever comes, is taken or leaves, one by one or many at a time before any of it is told."""
    chance, queue, model = Random(seed), LengthQueue(), list[Asked]()
    for number in range(600):
        if chance.random() < (0.4, 0.6)[number // 100 % 2] or not model:
            request = of(float(chance.randrange(1, 6)), number - chance.choice([0.0, 0.0, 2.5]))
            request.tag, request.brief = seed % 2 * float(chance.randrange(100)), chance.random() < 0.5
            model.append(request)
            queue.add(request)
        else:
            gone = chance.sample(model, min(len(model), chance.choice([1, 1, 5, 200])))
            for request in gone:
                if chance.random() < 0.5:
                    request.settled = True
                else:
                    request.taken = 1
            for request in gone:
                model.remove(request)
                queue.leave(request)
        model.sort(key=lambda each: each.arrival)
        turns = sorted(model, key=lambda each: (each.tag, each.arrival))
        assert (len(queue), queue.oldest, queue.head) == (
            len(model),
            *((model[0], turns[0]) if model else (None, None)),
        )
        assert queue.next(inf, inf) == turns
        assert queue.next(3, inf) == turns[:3]
        assert queue.brief == sum(each.brief for each in model)
        assert [each for each in queue.waiting if not is_gone(each)] == model
        assert queue.lengths == sorted(queue.by_length) == sorted({length_of(each) for each in model})
        for length, same in queue.by_length.items():
            assert not is_gone(same[0])
            assert [each for each in same if not is_gone(each)] == [each for each in turns if length_of(each) == length]


def test_padding_is_far_below_that_of_arrival_order() -> None:
    random = Random(3)
    sizes = [float(3 + int(random.lognormvariate(3.0, 0.8))) for _ in range(600)]
    waste = {}
    for padded in (True, False):
        mill = Mill(max_batch_size=16, padded=padded, max_padding=40.0, max_queue_size=5000)
        mill.submit(*(of(size) for size in sizes))
        mill.run_all()
        cost = sum(cut.rows * max(request.form.cost for request in cut.requests) for cut in mill.cuts)
        waste[padded] = 1.0 - sum(sizes) / cost
    assert waste[True] < 0.1 < 0.4 < waste[False]


def test_a_list_of_which_nothing_fits_waits() -> None:
    assert lengths(take(filled(of(10.0), listed(2, cost=100.0)), padding=3.0)) == [10.0]


def test_a_list_leads_in_parts() -> None:
    tight = listed(4, 1.0, 3.0, cost=40.0)
    group = filled(of(90.0), tight)
    assert take(group, 2, start_cutoff=3.0, seconds=2.0).slices == [(0, 2)]
    assert take(group, 2, start_cutoff=3.0, seconds=2.0).slices == [(2, 4)]


def test_padding_may_cost_less_than_tokens() -> None:
    requests = [of(10.0), *(of(8.0) for _ in range(9))]
    load = take(filled(*requests), cost=50.0, share=0.25)
    assert (load.rows, load.cost, load.padding) == (5, 44.0, 2.0)  # with a sixth it would cost 52.5
    requests = [of(10.0), *(of(8.0) for _ in range(9))]
    assert take(filled(*requests), cost=53.0, share=0.25).rows == 6
    assert lengths(take(filled(of(10.0), of(26.0), of(9.0)), cost=54.0, padding=8.5, share=0.25)) == [10.0, 9.0, 26.0]
    free = take(filled(of(10.0), of(26.0), of(9.0)), padding=0.0, share=0.0)
    assert (free.rows, free.cost, free.padding) == (3, 45.0, 0.0)


def test_who_cannot_make_it_is_left_out() -> None:
    requests = [of(10.0, timeout=timeout) for timeout in (1.0, 5.0, 2.0, 9.0)]
    requests.append(of(11.0, timeout=1.0))
    gone = of(10.0)
    group = filled(requests[0], gone, *requests[1:])
    gone.settled = True
    group.remove(gone)
    load = take(group, start_cutoff=2.0)
    assert load.requests == [requests[1], requests[3]]
    assert load.late == [requests[0], requests[2], requests[4]]
    assert all(request.settled for request in load.late)
    assert group.waiting == 0
    assert take(filled(of(1.0)), start_cutoff=99.0).requests == []
