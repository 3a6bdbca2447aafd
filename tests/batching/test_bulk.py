"""bulk.py: bulk work gets what interactive requests leave, and adds no more to them than one bulk batch."""

from math import inf
from typing import Any

import pytest
from tests.batching.mill import Asked, Mill, Notes, listed, many
from tests.rings import subcases

from weir.batching import BatchingSettings
from weir.batching.bulk import DEFAULT_DELAY, BulkSize, BulkWork, is_bulk
from weir.batching.group import FifoQueue
from weir.errors import DeadlineExceeded, Overloaded
from weir.messages import Dispatch, Express, Reason
from weir.policy.decision import ControlLimit, Greedy, SizeOrDelay

BULK = -1


def bulk(count: int, arrival: float = 0.0, **rest: object) -> list[Asked]:
    """Return `count` ordinary requests of bulk work."""
    return many(count, arrival, priority=BULK, **rest)


def run(mill: Mill, cut: Dispatch, seconds: float) -> list[Dispatch]:
    """Let the batch run for so long."""
    mill.advance(mill.now + seconds)
    return mill.finish(cut)


def grown(limit: float, **settings: Any) -> Mill:
    """Return a mill whose bulk batches may cost `limit`."""
    mill = Mill(**settings)
    mill.batcher._bulk.size.limit = limit
    mill.batcher._queue.last_arrival = 0.0
    return mill


# Batches of bulk work only.


def test_the_first_batch_is_one_item_and_later_ones_take_what_they_may() -> None:
    mill = grown(0.0, bulk_delay=0.005)
    (cut,) = mill.submit(*bulk(600))
    assert (cut.rows, cut.bulk, cut.reason, cut.waiting) == (1, 1, Reason.BULK, 600)
    seconds = []
    while mill.batcher.has_waiting:
        seconds.append(0.001 + 0.0002 * cut.rows)
        (cut,) = run(mill, cut, seconds[-1])
    assert max(seconds) <= 0.005 + 1e-9
    assert 15 <= mill.batcher.bulk_limit <= 20.0
    assert mill.batcher.recent[-2]["bulk"] == mill.batcher.recent[-2]["rows"] >= 15
    assert mill.batcher.counts[Reason.BULK] == len(mill.cuts)


@pytest.mark.no_cover
def test_after_a_long_time_without_others_bulk_batches_are_larger() -> None:
    mill = grown(4.0, bulk_delay=0.005, max_batch_size=256)
    mill.now = 9.0
    (cut,) = mill.submit(*bulk(600, mill.now))
    while mill.now < 10.0:
        (cut,) = run(mill, cut, 0.001 * cut.rows)
        mill.submit(*bulk(max(0, 600 - mill.batcher.waiting_bulk), mill.now))
    assert cut.rows > 80  # a hundredth of the ten seconds
    mill.submit(*many(1, mill.now))
    (cut,) = run(mill, cut, 0.001 * cut.rows)
    assert cut.bulk < cut.rows
    (cut,) = run(mill, cut, 0.001)
    assert cut.rows <= 5


def test_no_policy_sees_bulk_work() -> None:
    policy = Notes()
    mill = Mill(policy)
    mill.submit(*bulk(3))
    assert policy.seen == []
    mill.submit(*many(2))
    (cut,) = mill.finish(mill.cuts[0])
    assert (cut.reason, policy.seen[0].waiting, policy.seen[0].arrivals) == (Reason.IDLE, 2, 2)
    assert mill.batcher.arrivals == 2


def test_interactive_requests_go_before_older_and_more_urgent_bulk_work() -> None:
    mill = grown(8.0)
    (first,) = mill.submit(*many(1))
    mill.submit(*bulk(5, timeout=0.5))
    mill.now = 0.1
    mill.submit(*many(2, 0.1, key="other"))
    (cut,) = mill.finish(first)
    assert [request.form.key for request in cut.requests] == ["other"] * 2
    (cut,) = mill.finish(cut)
    assert (cut.rows, cut.bulk) == (5, 5)


def test_bulk_work_keeps_its_own_priorities() -> None:
    mill = grown(1.0)
    (first,) = mill.submit(*many(1))
    low, high = Asked("low", priority=-5), Asked("high", priority=-2)
    mill.submit(low, high)
    (cut,) = mill.finish(first)
    assert cut.requests == [high]
    assert is_bulk(low)
    assert not is_bulk(first.requests[0])


def test_bulk_work_does_not_wait_for_what_a_policy_waits_for() -> None:
    mill = Mill(ControlLimit(3), max_queue_delay=1.0)
    assert mill.submit(*many(1)) == []
    (cut,) = mill.submit(*bulk(1))
    assert cut.reason is Reason.BULK
    (cut,) = mill.submit(*many(2)) or mill.finish(cut)
    assert (cut.rows, cut.reason) == (3, Reason.POLICY)


def test_the_last_worker_is_kept_for_a_wait_that_is_about_to_end() -> None:
    mill = grown(1.0, policy=SizeOrDelay(9, 0.1), bulk_delay=0.02, workers=2)
    mill.submit(*many(1))
    mill.advance(0.09)
    (cut,) = mill.submit(*bulk(2))
    assert cut.rows == 1  # the other worker is for the request, whose wait ends at 0.1 s
    (cut,) = mill.advance(0.1)
    assert (cut.reason, cut.bulk) == (Reason.DELAY, 1)


def test_a_worker_with_two_places_gets_bulk_work_only_when_idle() -> None:
    mill = Mill(places=2)
    (first,) = mill.submit(*many(1))
    assert mill.submit(*bulk(2)) == []
    (cut,) = mill.finish(first)
    assert cut.reason is Reason.BULK
    (behind,) = mill.submit(*many(1))
    assert behind.worker == cut.worker


def test_bulk_work_whose_deadline_passes_at_its_dispatch_is_left_out() -> None:
    mill = Mill()
    (cut,) = mill.submit(*many(1))
    mill.submit(*bulk(1, timeout=0.5))
    mill.now = 0.5
    mill.batcher.finished(cut.batch_id, 0.5)
    assert mill.batcher.poll(0.5, cut.wakeup) == []
    assert mill.batcher.next_wakeup == 0.5
    (late,) = mill.batcher.expire(0.5)
    assert late is mill.accepted[1]


# Bulk work beside interactive requests.


def test_bulk_work_fills_the_room_that_an_interactive_batch_leaves() -> None:
    mill = grown(10.0, max_batch_size=8)
    (first,) = mill.submit(*many(1))
    mill.submit(*bulk(3), *bulk(4, key="other"), *many(2))
    (cut,) = mill.finish(first)
    assert (cut.rows, cut.bulk, cut.reason, cut.undivided) == (5, 3, Reason.IDLE, True)
    assert cut.explain()["bulk"] == 3
    mill.run_all()


def test_what_a_bulk_batch_has_added_is_not_added_again() -> None:
    mill = grown(8.0, bulk_delay=0.01)
    (cut,) = mill.submit(*bulk(40))
    mill.advance(0.004)
    mill.submit(*many(1, 0.004))
    mill.advance(0.009)  # the request has waited for half of what bulk work may add
    (cut,) = mill.finish(cut)
    assert (cut.rows, cut.bulk) == (5, 4)
    mill.submit(*many(1, mill.now))
    (cut,) = mill.finish(cut)
    assert (cut.rows, cut.bulk) == (1, 0)  # all that may be added was added to the batch before
    (cut,) = mill.finish(cut)
    assert cut.reason is Reason.BULK


def test_beside_a_request_that_found_an_idle_worker_all_time_is_left() -> None:
    mill = grown(4.0, workers=2, max_queue_delay=0.0)
    mill.submit(*many(1))
    mill.batcher._bulk._left = 0.0
    for request in bulk(9):
        mill.batcher.submit(request, 0.0)
        mill.accepted.append(request)
    (other,) = mill.submit(*many(1))
    assert (other.rows, other.bulk) == (1, 0)  # the other worker is busy, and this was the last that was free


def test_bulk_texts_join_without_making_the_batch_longer() -> None:
    mill = grown(100.0, padded=True, max_padding=20.0)
    (first,) = mill.submit(*many(1))
    mill.submit(*(Asked(0, cost=length, priority=BULK) for length in (8.0, 9.0, 40.0)), Asked(0, cost=10.0))
    (cut,) = mill.finish(first)
    assert sorted(request.form.cost for request in cut.requests) == [8.0, 9.0, 10.0]
    assert (cut.bulk, cut.padding, cut.cost) == (2, 3.0, 30.0)
    (cut,) = mill.finish(cut)
    assert (cut.rows, cut.reason) == (1, Reason.BULK)


def test_the_policys_time_counts_unless_the_setting_says_another() -> None:
    class Says(Notes):
        """States a time."""

        bulk_delay = 0.25

    assert Mill().batcher.bulk_delay == DEFAULT_DELAY
    assert Mill(Says()).batcher.bulk_delay == 0.25
    assert Mill(Says(), bulk_delay=0.5).batcher.bulk_delay == 0.5
    assert BulkWork(BatchingSettings(), FifoQueue).delay(Greedy()) == DEFAULT_DELAY


# Bounds by rows and by cost.


def test_each_class_has_a_queue_of_its_own() -> None:
    mill = Mill(max_queue_size=2, workers=0)
    mill.submit(*bulk(2))
    assert not mill.batcher.room(1, bulk=True)
    assert mill.batcher.room(2)
    with pytest.raises(Overloaded, match=r"^bulk rows=1: 2 rows wait, max_queue_size=2"):
        mill.submit(*bulk(1))
    mill.submit(*many(2))
    with pytest.raises(Overloaded, match=r"^rows=1: 2 rows wait, max_queue_size=2"):
        mill.submit(*many(1))


def test_the_queue_is_bounded_by_cost() -> None:
    mill = Mill(max_queue_cost=10.0, max_batch_size=2)
    mill.submit(*many(1))
    mill.submit(*many(4), Asked(0, cost=5.5))
    with pytest.raises(Overloaded, match=r"^rows=1: requests that cost 9\.5 wait, this costs 1, max_queue_cost=10"):
        mill.submit(*many(1))
    mill.submit(Asked(0, cost=0.5))
    assert mill.batcher._queue.cost == 10.0
    mill.cancel(mill.accepted[5])
    assert mill.batcher._queue.cost == 4.5
    mill.run_all()
    assert mill.batcher._queue.cost == 0.0
    mill.submit(*many(1))
    mill.submit(listed(30, cost=30.0))  # larger than the whole queue, which is empty
    mill.advance(inf)
    assert mill.batcher._queue.cost == 0.0


# Workers for bulk work only.


def test_bulk_workers_get_all_bulk_work_in_full_batches_and_nothing_else() -> None:
    mill = Mill(bulk_workers=1, max_batch_size=8)
    (cut,) = mill.submit(*bulk(20))
    assert (cut.worker, cut.rows, cut.bulk, cut.reason) == (1, 8, 8, Reason.BULK)
    (first,) = mill.submit(*many(3))
    assert (first.worker, first.rows, first.bulk) == (0, 3, 0)
    assert mill.submit(*many(2)) == []
    (second,) = mill.finish(first)
    assert (second.worker, second.bulk) == (0, 0)  # which has room, but bulk work has a worker of its own
    assert [cut.rows for cut in run(mill, cut, 9.0)] == [8]
    assert (mill.batcher.workers, mill.batcher.bulk_workers) == (1, 1)
    assert (mill.batcher.bulk_limit, mill.batcher.bulk_delay) == (8.0, 0.0)
    assert Mill(bulk_workers=1, max_batch_cost=5.0).batcher.bulk_limit == 5.0


def test_nothing_is_learned_from_bulk_workers() -> None:
    mill = Mill(bulk_workers=1)
    (slow,) = mill.submit(Asked(0, priority=BULK, timeout=8.0))
    run(mill, slow, 5.0)
    assert mill.batcher.best_rate(mill.now) == inf
    mill.submit(Asked(0, mill.now, priority=BULK, timeout=2.0))
    mill.advance(mill.now + 2.0)
    assert isinstance(mill.accepted[-1].ends[0], DeadlineExceeded)
    assert mill.batcher._forecast.margin == 0.0


def test_what_a_bulk_worker_had_waits_for_its_replacement() -> None:
    mill = Mill(bulk_workers=1)
    mill.submit(*bulk(4, timeout=20.0))
    assert mill.lose(1, replace=False) == []
    assert (mill.batcher.bulk_workers, mill.batcher.suspects, mill.batcher.is_empty) == (1, 2, False)
    assert mill.batcher.next_wakeup == 20.0
    assert len(mill.batcher.unsettled()) == 4
    assert mill.submit(*bulk(1)) == []  # although the other worker has nothing to do
    (cut,) = mill.ready(1)
    assert (cut.worker, cut.rows, cut.bulk, cut.attempt, cut.reason) == (1, 2, 2, 1, Reason.RETRY)
    mill.run_all()
    assert [each.ends for each in mill.accepted] == [[0], [1], [2], [3], [0]]


def test_after_the_last_bulk_worker_the_others_run_its_work() -> None:
    mill = Mill(bulk_workers=2)
    (cut,) = mill.submit(*bulk(2))
    (again,) = mill.lose(cut.worker, replace=False)
    assert (again.worker, again.reason) == (1 if cut.worker == 2 else 2, Reason.RETRY)
    mill.lose(again.worker, replace=False)
    assert mill.lose(again.worker, replace=False) == []  # it could not load; the other one still may
    (moved,) = mill.lose(cut.worker, replace=False)
    assert (moved.worker, mill.batcher.bulk_workers) == (0, 0)
    mill.run_all()
    assert [each.ends for each in mill.accepted] == [[0], [1]]
    mill.submit(*bulk(1, mill.now))
    (late,) = mill.ready(1)[:1] or mill.cuts[-1:]
    assert (late.worker, mill.batcher.bulk_workers) == (0, 1)


def test_a_place_is_no_use_to_what_runs_again_alone() -> None:
    mill = Mill(bulk_workers=1, places=2)
    mill.submit(*bulk(2))
    mill.lose(1)
    assert [(cut.worker, cut.rows) for cut in mill.batcher.running.values()] == [(1, 1)]
    assert mill.submit(*bulk(1)) == []  # the other half waits for the worker, and this waits behind it
    mill.run_all()
    assert [each.ends for each in mill.accepted] == [[0], [1], [0]]


def test_abandoned_and_leaving_bulk_workers() -> None:
    mill = Mill(bulk_workers=1)
    mill.submit(*bulk(2))
    assert not mill.batcher.worker_leaves(1)
    mill.lose(1, replace=False)
    assert len(mill.batcher.abandon()) == 2
    assert mill.batcher.is_empty
    assert mill.batcher.worker_leaves(1)


# The size of a bulk batch comes near to the time that it may take, from below.


@subcases("fixed", [0.0, 0.001, 0.003])
def test_the_size_comes_near_to_the_time_and_never_beyond(fixed: float) -> None:
    size = BulkSize()
    assert size.limit == 0.0
    for _ in range(200):
        cost = max(1.0, size.limit)
        seconds = fixed + 0.0001 * cost
        assert seconds <= 0.005 + 1e-9
        size.learn(cost, seconds, 0.005)
    assert size.limit == pytest.approx((0.005 - fixed) / 0.0001, rel=0.02)


@subcases(
    ("limit", "cost", "seconds", "then"),
    [
        (100.0, 100.0, 0.00625, 80.0),
        (80.0, 80.0, 5.0, 40.0),  # not by more than half
        (300.0, 2000.0, 0.04, 250.0),  # a long item does not allow more than its share
        (300.0, 100.0, 0.004, 300.0),  # a small batch says nothing about large ones
    ],
)
def test_a_slow_batch_makes_the_next_smaller_at_once(limit: float, cost: float, seconds: float, then: float) -> None:
    size = BulkSize()
    size.limit = limit
    size.learn(cost, seconds, 0.005)
    assert size.limit == pytest.approx(then)


def test_without_a_delay_bulk_work_never_joins() -> None:
    mill = grown(8.0, bulk_delay=0.0)
    (first,) = mill.submit(*many(1))
    mill.submit(*bulk(3), *many(1))
    (cut,) = mill.finish(first)
    assert (cut.rows, cut.bulk) == (1, 0)
    (cut,) = mill.finish(cut)
    assert cut.reason is Reason.BULK


def test_no_bulk_work_joins_an_express_call() -> None:
    mill = grown(8.0)
    (first,) = mill.submit(*many(1))
    mill.submit(*bulk(1), listed(2, key=Express("call")))
    (cut,) = mill.finish(first)
    assert (cut.reason, cut.bulk) == (Reason.EXPRESS, 0)
