"""batcher.py: requests in, batches out, with every reason and refusal."""

from heapq import heappop, heappush
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

import pytest
from tests.batching.mill import Asked, Mill, Notes, check_order, listed, many
from tests.rings import subcases

from weir.batching import BatchingSettings
from weir.batching.batcher import Batcher
from weir.batching.collate import entries_of
from weir.errors import DeadlineExceeded, ModelError, Overloaded
from weir.messages import Dispatch, Express, Reason, Wakeup
from weir.policy.decision import ControlLimit, FullBatches, Greedy, Observation, SizeOrDelay

# Waiting and going.


def test_an_idle_worker_gets_what_there_is() -> None:
    mill = Mill()
    assert (mill.batcher.has_waiting, mill.batcher.free_places) == (False, 1)
    (cut,) = mill.submit(*many(3))
    assert (mill.batcher.has_waiting, mill.batcher.free_places) == (False, 0)
    assert (cut.rows, cut.reason, cut.wakeup, cut.worker, cut.undivided) == (3, Reason.IDLE, Wakeup.ARRIVAL, 0, True)
    assert mill.batcher.running == {cut.batch_id: cut}
    assert mill.finish(cut) == []
    assert [request.ends for request in mill.accepted] == [[0], [1], [2]]
    assert mill.batcher.is_empty
    assert mill.batcher.next_wakeup is None


def test_a_batch_could_grow_while_it_has_room_and_a_worker_is_free() -> None:
    mill = Mill(max_batch_size=4)
    seen = []
    for request in many(4):
        seen.append(mill.batcher.could_grow(2))
        mill.batcher.submit(request, 0.0)
    assert seen == [False, False, True, True]
    assert not mill.batcher.could_grow(2)  # it is full
    mill.turn(Wakeup.ARRIVAL)
    mill.submit(*many(2))
    assert (mill.batcher.has_waiting, mill.batcher.waiting_interactive, mill.batcher.could_grow(2)) == (True, 2, False)


def test_the_policy_is_called_only_with_a_place_free() -> None:
    policy = Notes()
    mill = Mill(policy, workers=0)
    mill.submit(*many(3))
    assert policy.seen == []
    mill.ready(0)
    mill.submit(*many(3, 0.0))
    assert len(policy.seen) == 1


def test_late_arrivals_still_join() -> None:
    mill = Mill()
    (first,) = mill.submit(*many(1))
    mill.submit(*many(2))
    mill.submit(*many(2))
    (second,) = mill.finish(first)
    assert second.rows == 4
    assert second.wakeup is Wakeup.WORKER


def test_what_the_policy_observes() -> None:
    policy = Notes()
    mill = Mill(policy, workers=3, places=2, now=5.0, max_batch_size=8)
    mill.submit(Asked(0, 4.5, 9.0), Asked(1, 4.75, 3.0), listed(3, 5.0))
    assert policy.seen == [Observation(5.0, 5, 4.5, 7.75, 5, 5.0, 6, 3, 8, 0.1, False)]


def learned(seconds_of_4: float, seconds_of_8: float, **rest: Any) -> Mill:
    """Return a mill that has learned how long batches take."""
    mill = Mill(**rest)
    for rows, seconds in ((4, seconds_of_4), (8, seconds_of_8)):
        (cut,) = mill.submit(listed(rows, mill.now))
        mill.now += seconds
        mill.finish(cut)
    return mill


def test_idle_workers_share_what_waits() -> None:
    mill = learned(0.4, 0.8, workers=3)
    cuts = mill.submit(listed(16, mill.now))
    assert [cut.rows for cut in cuts] == [6, 5, 5]
    assert {cut.worker for cut in cuts} == {0, 1, 2}
    for cut in cuts[:2]:
        mill.finish(cut)
    cuts = mill.submit(listed(17, mill.now))  # one is busy
    assert [cut.rows for cut in cuts] == [9, 8]
    assert {cut.reason for cut in cuts} == {Reason.IDLE}


@subcases(("seconds", "rest"), [((1.0, 1.1), {"workers": 2}), ((0.4, 0.8), {"workers": 1, "places": 2})])
def test_what_would_not_be_done_sooner_is_not_shared(seconds: tuple[float, float], rest: dict[str, Any]) -> None:
    mill = learned(*seconds, **rest)
    (cut,) = mill.submit(listed(16, mill.now))
    assert cut.rows == 16


def test_a_pipeline_of_two() -> None:
    mill = Mill(places=2, max_batch_size=2)
    cuts = mill.submit(*many(6))
    assert [cut.rows for cut in cuts] == [2, 2]
    mill.now = 1.0
    mill.finish(cuts[0])
    mill.now = 2.0
    mill.finish(cuts[1])
    assert mill.batcher.service.expected(2) == pytest.approx(1.0)  # the second did not begin before the first was back
    mill.run_all()


def test_no_policy_waits_longer_than_max_queue_delay() -> None:
    """By the very expression that arms the timer: `now - oldest >= delay` is false for most of these at its instant."""
    for tenths in range(1000):
        mill = Mill(FullBatches(), now=tenths / 10, max_queue_delay=0.3)
        mill.submit(*many(1, mill.now))
        mill.advance(mill.now + 0.2)
        mill.submit(*many(1, mill.now))
        assert mill.cuts == []
        (cut,) = mill.advance(mill.now + 10.0)
        assert (cut.at, cut.rows, cut.reason, cut.limit) == (tenths / 10 + 0.3, 2, Reason.DELAY, 64)


def test_no_policy_waits_until_it_is_too_late() -> None:
    mill = Mill(FullBatches(), max_queue_delay=5.0)
    (cut,) = mill.submit(*many(64))
    mill.now = 0.25
    mill.finish(cut)
    mill.submit(Asked(0, 0.25, 1.0))
    (cut,) = mill.advance(10.0)
    assert cut.reason is Reason.DEADLINE
    assert 0.9 < cut.at < 1.0  # 0.25 s before the deadline at 1.25, and a margin
    assert isinstance(cut.requests[0], Asked)
    assert isinstance(cut.requests[0].ends[0], DeadlineExceeded)  # nobody answered within 10 s


# Groups.


def test_the_earliest_deadline_has_its_turn_first() -> None:
    mill = Mill(workers=0)
    mill.submit(Asked("late", 0.0, 9.0, key="a"), Asked("soon", 0.0, 5.0, key="b"), Asked("later", 0.0, 9.0, key="c"))
    mill.ready(0)
    mill.run_all()
    assert [cut.requests[0].payload for cut in mill.cuts] == ["soon", "late", "later"]


def test_whoever_has_left_gives_its_group_no_turn_and_has_no_deadline() -> None:
    mill = Mill(workers=0)
    gone = [Asked("gone", 0.0, 1.0, key="a"), Asked("gone, too", 0.0, 9.0, key="b")]
    mill.submit(gone[0], Asked("late", 0.0, 9.0, key="a"), Asked("kept", 0.0, 9.0, key="b"), gone[1])
    for each in gone:
        mill.cancel(each)
    mill.submit(Asked("soon", 0.0, 5.0, key="b"))
    mill.ready(0)
    mill.run_all()
    assert [request.payload for cut in mill.cuts for request in cut.requests] == ["kept", "soon", "late"]


def test_while_one_group_waits_the_next_is_considered() -> None:
    mill = Mill(ControlLimit(2))
    mill.submit(Asked("urgent", 0.0, 1.0, key="a"))
    (cut,) = mill.submit(Asked("x", key="b"), Asked("y", key="b"))
    assert [request.payload for request in cut.requests] == ["x", "y"]
    mill.finish(cut)
    (cut,) = mill.submit(Asked("joins", 0.0, 9.0, key="a"))
    assert [request.payload for request in cut.requests] == ["urgent", "joins"]


def test_many_keys_leave_nothing_behind() -> None:
    mill = Mill(SizeOrDelay(2, 0.01), workers=2)
    for number in range(300):
        mill.submit(Asked(number, mill.now, key=number))
        mill.advance(mill.now + 0.001)
        if number % 3 == 0:
            mill.cancel(mill.accepted[-1])
        for cut in list(mill.batcher.running.values()):
            mill.finish(cut)
    mill.batcher.drain()
    mill.run_all()
    queue = mill.batcher._queue
    assert not queue.groups
    assert queue.scheduler._awake.first() is None
    assert queue.scheduler.parked.first() is None


# Cancelling.


@subcases("place", [0, 3, 7])
def test_cancelling_in_a_running_batch(place: int) -> None:
    mill = Mill(max_batch_size=8)
    requests = many(8)
    (cut,) = mill.submit(*requests)
    assert mill.cancel(requests[place]) == [(0, cut.batch_id, [place])]
    assert mill.cancel(requests[place]) == []
    mill.finish(cut)
    assert [request.ends for request in requests] == [["cancelled"] if n == place else [n] for n in range(8)]


def test_cancelling_a_divided_request() -> None:
    mill = Mill(max_batch_size=4, workers=2)
    small, request, other = Asked("small"), listed(20), listed(20)
    first, second = mill.submit(small, request, other)
    assert mill.cancel(request) == [(0, first.batch_id, [1, 2, 3]), (1, second.batch_id, [0, 1, 2, 3])]
    assert mill.batcher.waiting_rows == 20
    mill.run_all()
    assert (small.ends, other.ends) == (["small"], [list(range(20))])


# Order.


def test_small_requests_go_before_large_ones_with_a_bound() -> None:
    mill = Mill(workers=0, max_batch_size=4, small_request_size=2, max_overtakes=2)
    large = Asked("large", rows=3)
    mill.submit(large, *many(40, 1.0))
    assert large.large
    mill.ready(0)
    mill.run_all()
    assert [large in cut.requests for cut in mill.cuts[:4]] == [False, False, True, False]
    check_order(mill.accepted, mill.cuts)


def test_who_waited_outside_keeps_the_place_of_its_arrival() -> None:
    mill = Mill(workers=0, now=5.0)
    mill.submit(Asked("inside", 5.0), Asked("outside", 3.0))
    assert mill.batcher.oldest_age(6.0) == 3.0
    (cut,) = mill.ready(0)
    assert [request.payload for request in cut.requests] == ["outside", "inside"]


def in_runs(mill: Mill, runs: list[list[Asked]], *, alike: bool) -> list[list[int]]:
    """Submit each run, and let a batch end after every second one. Return what the batches had, and then the refused ones."""
    refused: list[int] = []
    for index, run in enumerate(runs):
        mill.now = max(mill.now, run[-1].arrival)
        for request in mill.batcher.submit_alike(run, mill.now) if alike else run:
            try:
                mill.batcher.submit(request, mill.now)
            except (Overloaded, DeadlineExceeded):
                refused.append(request.payload)
        mill.accepted += [request for request in run if request.payload not in refused]
        mill.turn(Wakeup.ARRIVAL)
        if index % 2 and mill.batcher.running:
            mill.run(next(iter(mill.batcher.running.values())))
    mill.run_all()
    return [[request.payload for request in cut.requests] for cut in mill.cuts] + [refused]


@subcases("kind", ["plain", "keys", "timeouts", "rows", "padded", "a full queue", "short timeouts"])
def test_requests_that_are_alike_are_queued_as_they_would_be_one_by_one(kind: str) -> None:
    chance = Random(kind)
    settings: dict[str, Any] = {}
    if kind == "padded":
        settings["padded"] = True
    elif kind == "a full queue":
        settings["max_queue_size"] = 9

    def runs() -> list[list[Asked]]:
        chance.seed(kind)
        made, now, number = [], 0.0, 0
        for _ in range(60):
            now += chance.random()
            options: dict[str, Any] = {}
            if kind == "keys":
                options["key"] = chance.choice([None, "a", "b"])
            elif kind in ("timeouts", "short timeouts"):
                options["timeout"] = chance.choice([1.5, 2.5] if kind == "short timeouts" else [20.0, 30.0])
            elif kind == "rows":
                options["rows"] = chance.choice([1, 2])
            arrivals = sorted(now - 1.5 * chance.random() for _ in range(chance.randint(1, 12)))
            made.append([Asked(number + index, max(each, 0.0), **options) for index, each in enumerate(arrivals)])
            number += len(arrivals)
        return made

    together, single = Mill(max_batch_size=8, **settings), Mill(max_batch_size=8, **settings)
    assert in_runs(together, runs(), alike=True) == in_runs(single, runs(), alike=False)


def test_requests_of_several_fronts_that_came_by_turns_are_queued_together() -> None:
    mill = Mill(workers=0, now=9.0, max_batch_size=16)
    for name, arrivals in (("a", (1.0, 3.0, 5.0, 7.0)), ("b", (2.0, 3.0, 6.0)), ("c", (0.5,))):
        run = [Asked(f"{name}{arrival:g}", arrival) for arrival in arrivals]
        assert not mill.batcher.submit_alike(run, mill.now)
        mill.accepted += run
    (cut,) = mill.ready(0)
    assert [each.payload for each in cut.requests] == ["c0.5", "a1", "b2", "a3", "b3", "a5", "b6", "a7"]


BOTH = pytest.mark.parametrize("padded", [False, True])


def median_waits(clients: dict[int, int], seconds: float = 15.0, *, padded: bool) -> dict[int, float]:
    """Return the median time to the answer by size, where so many clients of each size always have one request under way. Two workers
    take 0.163 s for a batch of 64."""
    batcher, now, ends = (
        Batcher(BatchingSettings(max_queue_size=100_000, padded=padded), Greedy()),
        0.0,
        list[tuple[float, int, Dispatch]](),
    )
    left: dict[int, int] = {}
    waits: dict[int, list[float]] = {size: [] for size in clients}

    def send(size: int) -> None:
        request = listed(size, now, 1e6, cost=float(size))
        left[id(request)] = size
        batcher.submit(request, now)

    def poll(wakeup: Wakeup) -> None:
        for dispatch in batcher.poll(now, wakeup):
            heappush(ends, (now + 0.003 + 0.0025 * dispatch.rows, dispatch.batch_id, dispatch))

    for worker in range(2):
        batcher.worker_ready(worker, 1, now)
    for size in (size for size, count in clients.items() for _ in range(count)):
        send(size)
    poll(Wakeup.ARRIVAL)
    while now < seconds:
        now, _, dispatch = heappop(ends)
        batcher.finished(dispatch.batch_id, now)
        for request, start, stop in entries_of(dispatch):
            left[id(request)] -= stop - start
            if not left[id(request)]:
                request.settled = True
                waits[request.form.rows].append(now - request.arrival)
                send(request.form.rows)
        poll(Wakeup.WORKER)
    return {size: median(found) for size, found in waits.items()}


@BOTH
def test_beside_large_requests_16_rows_wait_for_their_share_and_17_as_long(padded: bool) -> None:
    waits = median_waits({16: 8, 17: 8, 256: 16}, padded=padded)
    assert waits[17] <= 1.2 * waits[16]
    assert waits[256] >= 8.0 * waits[16]  # which waits as long in the order of arrival
    assert waits[256] <= 32 * 256 / 64 * 0.163  # as if each had its share of the two workers, and half of it were lost


@BOTH
def test_no_size_is_a_step(padded: bool) -> None:
    sizes = (1, 2, 4, 8, 12, 15, 16, 17, 18, 20, 24, 32, 48, 64, 96, 128, 192, 256)
    waits = median_waits(dict.fromkeys(sizes, 4), 40.0, padded=padded)
    batch = 0.163
    for smaller, larger in pairwise(sizes):
        assert waits[larger] <= 1.2 * larger / smaller * waits[smaller] + batch, (smaller, larger)


# The end.


def test_abandoning_settles_everything() -> None:
    mill = Mill(max_batch_size=4, workers=2)
    requests = [*many(12), listed(9), *many(2, key="other")]
    mill.submit(*requests)
    mill.lose(1, replace=False)
    mill.cancel(requests[11])
    left = mill.batcher.abandon()
    assert {id(request) for request in left} == {id(request) for request in requests if request is not requests[11]}
    assert all(request.settled for request in requests)
    assert (mill.batcher.waiting_rows, mill.batcher.waiting_requests, mill.batcher.suspects) == (0, 0, 0)
    for request in left:
        request.fail(ModelError("nobody runs it"))
    mill.finish(next(iter(mill.batcher.running.values())))
    assert mill.batcher.is_empty
    mill.ready(1)
    (cut,) = mill.submit(*many(1))
    assert cut.rows == 1


def test_a_worker_that_leaves_finishes_what_it_has() -> None:
    mill = Mill(workers=2)
    first, second = mill.submit(*many(1)) + mill.submit(*many(1))
    assert not mill.batcher.worker_leaves(first.worker)
    assert mill.batcher.workers == 1
    mill.submit(*many(3))
    assert mill.finish(first) == []
    assert mill.batcher.worker_leaves(first.worker)
    (third,) = mill.finish(second)
    assert (third.worker, third.rows) == (second.worker, 3)
    assert mill.batcher.worker_lost(first.worker, mill.now) == []
    mill.run_all()


def test_what_has_not_had_its_end_is_reported_without_changing_it() -> None:
    mill = Mill(max_batch_size=2)
    running, waiting = listed(3), Asked(0)
    mill.submit(running, waiting)
    assert mill.batcher.unsettled() == [running, waiting]
    mill.cancel(waiting)
    assert mill.batcher.unsettled() == [running]
    mill.lose(0, replace=False)
    assert mill.batcher.unsettled() == [running]
    mill.ready(0)
    mill.run_all()
    assert mill.batcher.unsettled() == []


# Express calls.


def test_an_express_call_has_a_batch_of_its_own_and_waits_for_no_policy() -> None:
    mill = Mill(FullBatches(), max_queue_delay=9.0, max_batch_size=8)
    assert mill.submit(*many(3)) == []
    (cut,) = mill.submit(listed(5, key=Express(object())))
    assert (cut.rows, cut.reason, len(cut.requests)) == (5, Reason.EXPRESS, 1)
    assert mill.finish(cut) == []  # the others wait as if nobody had passed
    (cut,) = mill.advance(9.0)
    assert (cut.rows, cut.reason) == (3, Reason.DELAY)


def test_two_express_calls_do_not_share_a_batch_and_one_of_equal_keys_does() -> None:
    mill = Mill(workers=0, max_batch_size=8)
    first, second = (Express(object(), "a") for _ in range(2))
    mill.submit(listed(2, key=first), listed(2, key=second), listed(3, key=first))
    mill.ready(0)
    mill.run_all()
    assert [cut.rows for cut in mill.cuts] == [5, 2]


def test_express_calls_and_others_take_turns() -> None:
    mill = Mill(workers=0, max_batch_size=4)
    mill.submit(*many(12))
    mill.submit(*(listed(4, key=Express(object())) for _ in range(4)), listed(8, 0.0, 1.0, key=Express(object())))
    mill.ready(0)
    mill.run_all()
    # The express call of 8 rows has the earliest deadline.
    express, plain = Reason.EXPRESS, Reason.SIZE
    assert [cut.reason for cut in mill.cuts] == [express, plain] * 3 + [express] * 3
    assert [cut.requests[0].form.timeout for cut in mill.cuts[:3:2]] == [1.0, 1.0]


# Explanations.


def test_an_explanation_says_what_was_seen() -> None:
    mill = Mill(max_batch_size=4)
    first, second = (mill.submit(*many(3)), mill.submit(*many(6)))
    assert second == []
    mill.now = 0.5
    mill.finish(first[0])
    assert mill.batcher.recent == [
        {
            "batch_id": 1, "worker": 0, "rows": 3, "cost": 3.0, "padding": 0.0, "reason": "idle", "waiting": 3,
            "oldest_age": 0.0, "limit": None, "wakeup": "arrival", "at": 0.0, "attempt": 0, "bulk": 0,
        },
        {
            "batch_id": 2, "worker": 0, "rows": 4, "cost": 4.0, "padding": 0.0, "reason": "size", "waiting": 6,
            "oldest_age": 0.5, "limit": 4, "wakeup": "worker", "at": 0.5, "attempt": 0, "bulk": 0,
        },
    ]  # fmt: skip
