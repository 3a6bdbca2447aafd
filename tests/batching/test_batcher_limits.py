"""batcher.py: what it refuses, and what comes too late."""

from math import inf, nan

import pytest
from tests.batching.mill import Asked, Mill, listed, many
from tests.rings import subcases

from weir.errors import DeadlineExceeded, Draining, InvalidRequest, Overloaded
from weir.messages import Events, Kind, Reason, Wakeup
from weir.policy.decision import Decision, FullBatches, Observation

# Refusals.


def test_a_full_line_refuses() -> None:
    mill = Mill(workers=0, max_queue_size=5)
    mill.submit(*many(5))
    assert not mill.batcher.room(1)
    for request in (Asked(0), listed(3)):
        with pytest.raises(Overloaded, match="5 rows wait, max_queue_size=5") as caught:
            mill.batcher.submit(request, 0.0)
        assert caught.value.retry_after == 1.0  # nothing was measured yet
    assert (mill.batcher.arrivals, mill.batcher.offered) == (5, 9)
    mill.cancel(mill.accepted[2])
    assert mill.batcher.room(1)
    mill.submit(Asked(0))


def test_a_request_larger_than_the_line_is_taken_when_nothing_waits() -> None:
    mill = Mill(workers=0, max_queue_size=5)
    mill.submit(listed(50))
    with pytest.raises(Overloaded):
        mill.batcher.submit(Asked(0), 0.0)
    mill.ready(0)
    mill.run_all()
    assert mill.accepted[0].ends == [list(range(50))]


def test_capacity_counts_what_waits_and_what_runs() -> None:
    mill = Mill(max_batch_size=2, capacity=5)
    mill.submit(*many(5))
    assert mill.batcher.waiting_rows == 3
    with pytest.raises(Overloaded, match="rows=1: 3 rows wait and 2 are with workers, capacity=5"):
        mill.batcher.submit(Asked(0), 0.0)
    (cut,) = mill.finish(mill.cuts[0])
    assert mill.batcher.room(2)
    assert not mill.batcher.room(3)
    mill.submit(Asked(0))
    mill.lose(cut.worker)
    mill.run_all()
    assert mill.batcher.room(5)
    assert mill.batcher.room(50)  # more than there may ever be is taken when there is nothing else
    mill.submit(listed(50))
    assert not mill.batcher.room(1)
    mill.run_all()
    assert mill.batcher.room(1)


@pytest.mark.no_cover
@pytest.mark.parametrize(("workers", "seconds_per_row"), [(1, 0.0), (3, 0.0), (1, 0.002), (2, 0.001)])
def test_retry_after_is_within_a_factor_of_two_of_the_real_wait(workers: int, seconds_per_row: float) -> None:
    mill = Mill(workers=workers, max_batch_size=16, max_queue_size=200)

    def work(until_empty: bool) -> None:
        while mill.batcher.running:
            cut = min(mill.batcher.running.values(), key=lambda each: each.at + 0.05 + seconds_per_row * each.rows)
            mill.advance(cut.at + 0.05 + seconds_per_row * cut.rows)
            mill.finish(cut)
            if not until_empty and len(mill.cuts) > 40:
                return
            if not until_empty:
                mill.submit(*many(min(20 + 3 * len(mill.cuts) % 17, 200 - mill.batcher.waiting_rows), mill.now))

    mill.submit(*many(3))
    work(until_empty=False)
    mill.submit(*many(200 - mill.batcher.waiting_rows, mill.now))
    with pytest.raises(Overloaded) as caught:
        mill.batcher.submit(Asked(0, mill.now), mill.now)
    asked_at = mill.now
    work(until_empty=True)
    real = mill.now - asked_at
    assert caught.value.retry_after is not None
    assert real / 2 <= caught.value.retry_after <= real * 2


@subcases(
    ("request_", "message"),
    [
        (Asked(0, rows=0), "rows=0: a request has at least 1 row"),
        (Asked([], kind=Kind.ITEMS, rows=0), "rows=0"),
        (Asked(0, rows=9), "rows=9: an item that cannot be divided has at most max_batch_size=8 rows"),
        (Asked([1, 2], kind=Kind.ITEMS, rows=18), "rows=9"),
        (Asked(0, cost=0.75), "cost=0.75: an item costs from 0 to max_batch_cost=0.5"),
        (Asked(0), "cost=1: an item costs"),
        (Asked(0, cost=nan), "cost=nan"),
        (Asked(0, cost=-1.0), "cost=-1"),
        (Asked([1, 2], kind=Kind.ITEMS, rows=2, cost=1.5), "cost=0.75"),
    ],
)
def test_what_can_never_be_in_a_batch_is_refused(request_: Asked, message: str) -> None:
    mill = Mill(max_batch_size=8, max_batch_cost=0.5)
    with pytest.raises(InvalidRequest, match=message):
        mill.batcher.submit(request_, 0.0)
    assert mill.batcher.waiting_rows == 0


def test_what_fits_in_batches_is_not_refused() -> None:
    mill = Mill(max_batch_cost=0.5)
    mill.submit(listed(1000, cost=500.0), Asked(0, rows=8, cost=0.5))
    mill.run_all()
    for unbounded in ({"max_batch_size": 8}, {"max_batch_cost": 5.0, "padded": True}):
        mill = Mill(**unbounded)
        assert mill.submit(Asked(0, cost=1e9))


def test_draining_refuses_and_lets_nobody_wait() -> None:
    mill = Mill(FullBatches(), max_queue_delay=60.0)
    mill.submit(*many(3))
    assert mill.cuts == []
    mill.batcher.drain()
    with pytest.raises(Draining) as caught:
        mill.batcher.submit(Asked(0), 0.0)
    assert caught.value.retry_after is not None
    assert not mill.batcher.room(1)
    (cut,) = mill.turn(Wakeup.ARRIVAL)
    assert cut.reason is Reason.DRAIN
    mill.run_all()
    assert mill.batcher.is_empty


# Deadlines.


def test_a_deadline_in_the_past_is_refused() -> None:
    mill = Mill(now=10.0)
    for request in (Asked(0, 5.0, 5.0), Asked(0, 5.0, 1.0)):
        with pytest.raises(DeadlineExceeded, match="deadline passed before"):
            mill.batcher.submit(request, 10.0)


def measured(seconds: float, max_batch_size: int = 64) -> Mill:
    """Return a mill that has learned that any batch takes so long."""
    mill = Mill(max_batch_size=max_batch_size)
    for _ in range(5):
        (cut,) = mill.submit(*many(8, mill.now))
        mill.now += seconds
        mill.finish(cut)
    return mill


def test_what_cannot_make_it_is_refused_at_once() -> None:
    mill = measured(0.5)
    with pytest.raises(DeadlineExceeded, match="the response would miss the deadline"):
        mill.batcher.submit(Asked(0, mill.now, 0.4), mill.now)
    mill.submit(Asked(0, mill.now, 0.6))


def test_where_batches_are_padded_too_what_is_near_or_large_is_looked_at() -> None:
    mill = Mill(max_batch_size=8, padded=True, max_batch_cost=80.0)
    for count in (4, 8) * 8:
        (cut,) = mill.submit(*many(count, mill.now, cost=10.0))
        mill.now += count / 16
        mill.finish(cut)
    assert mill.batcher._tight == inf
    assert 0.5 < mill.batcher._in_sight < 30.0
    with pytest.raises(DeadlineExceeded, match="the response would miss the deadline"):
        mill.batcher.submit(Asked(0, mill.now, 0.01, cost=10.0), mill.now)
    with pytest.raises(DeadlineExceeded, match="the response would miss the deadline"):
        mill.batcher.submit(Asked("takes 50 s", mill.now, 30.0, cost=8000.0), mill.now)
    mill.submit(Asked(0, mill.now, 20.0, cost=10.0))


def test_those_ahead_count_too() -> None:
    mill = measured(0.5, max_batch_size=8)
    mill.submit(*many(8 * 11, mill.now, timeout=60.0))
    with pytest.raises(DeadlineExceeded):
        mill.batcher.submit(Asked(0, mill.now, 2.0), mill.now)
    mill.submit(Asked("more urgent", mill.now, 2.0, priority=1))
    mill.submit(Asked("of another group", mill.now, 2.0, key="other"))
    mill.submit(Asked("patient", mill.now, 20.0))


def test_an_old_estimate_refuses_nothing() -> None:
    mill = measured(0.5)
    mill.now += 10.0
    mill.submit(request := Asked(0, mill.now, 0.4))
    assert request in mill.accepted


def test_without_workers_nothing_is_refused_early() -> None:
    mill = measured(0.5)
    mill.lose(0, replace=False)
    mill.submit(request := Asked(0, mill.now, 0.4))
    assert request in mill.accepted


def test_dispatch_leaves_out_who_cannot_make_it_any_more() -> None:
    mill = measured(0.5)
    (first,) = mill.submit(*many(8, mill.now))
    late, fine = Asked("late", mill.now, 0.9), Asked("fine", mill.now, 9.0)
    mill.submit(late, fine)
    mill.now += 0.5
    (cut,) = mill.finish(first)
    assert cut.requests == [fine]
    assert isinstance(late.ends[0], DeadlineExceeded)


def test_the_left_out_are_handed_over_by_the_next_expire() -> None:
    mill = measured(0.5)
    (first,) = mill.submit(*many(8, mill.now))
    late = Asked("late", mill.now, 0.9)
    mill.submit(late)
    mill.now += 0.5
    mill.give(first, Events(first.batch_id, list(range(8))))
    mill.batcher.finished(first.batch_id, mill.now)
    assert mill.batcher.poll(mill.now, Wakeup.WORKER) == []
    assert mill.batcher.next_wakeup == mill.now
    assert not mill.batcher.is_empty
    assert mill.batcher.expire(mill.now) == [late]
    assert mill.batcher.is_empty


@pytest.mark.no_cover
def test_overload_still_answers_at_full_rate() -> None:
    """10 times more arrives than can be served, with short timeouts: the places go to requests that make it."""
    mill = Mill(max_batch_size=16, max_queue_size=400)
    capacity_per_second, step = 16 / 0.05, 0.005
    refused = 0
    for _ in range(800):
        for request in many(16, mill.now, timeout=0.3):
            try:
                mill.batcher.submit(request, mill.now)
                mill.accepted.append(request)
            except (Overloaded, DeadlineExceeded):
                refused += 1
        mill.turn(Wakeup.ARRIVAL)
        mill.play(lambda _: 0.05, mill.now + step)
    answered = sum(isinstance(end, int) for request in mill.accepted for end in request.ends)
    assert answered >= 0.9 * capacity_per_second * 800 * step
    assert refused > 0


# A policy that changes its mind.


class Moody:
    """Waits, until told otherwise."""

    def __init__(self, rows: int = 0, max_waiting: int | None = None) -> None:
        self.rows = rows
        self.max_waiting = max_waiting
        self.arrivals = 0

    def decide(self, seen: Observation) -> Decision:
        """Say what it was told."""
        self.arrivals = seen.arrivals
        return Decision(self.rows)


def test_reconsider_asks_again_about_every_group_that_waits() -> None:
    policy = Moody()
    mill = Mill(policy, workers=2, max_queue_delay=1e6)
    assert mill.submit(Asked(0, key="a"), Asked(1, key="b")) == []
    policy.rows = 1
    mill.batcher.reconsider()
    assert mill.batcher.next_wakeup is not None
    assert [cut.rows for cut in mill.turn(Wakeup.ARRIVAL)] == [1, 1]
    mill.batcher.reconsider()  # nothing waits: nothing happens
    assert mill.turn(Wakeup.ARRIVAL) == []


def test_a_policy_may_let_fewer_wait_than_the_settings() -> None:
    policy = Moody(max_waiting=3)
    mill = Mill(policy, max_queue_size=5, max_queue_delay=1e6)
    mill.submit(*many(3))
    assert mill.batcher.max_waiting == 3
    assert mill.batcher.room(2) is False
    with pytest.raises(Overloaded, match="rows=1: 3 rows wait, max_waiting of the policy=3") as caught:
        mill.batcher.submit(Asked(0), 0.0)
    assert caught.value.retry_after is not None
    policy.max_waiting = 100  # the settings' own bound stays
    mill.batcher.reconsider()
    mill.turn(Wakeup.ARRIVAL)
    mill.submit(*many(2))
    with pytest.raises(Overloaded, match="5 rows wait, max_waiting of the policy=5"):
        mill.batcher.submit(Asked(0), 0.0)


def test_rows_that_are_refused_for_want_of_room_have_arrived_all_the_same() -> None:
    policy = Moody(max_waiting=3)
    mill = Mill(policy, max_queue_delay=1e6)
    mill.submit(*many(3))
    for _ in range(4):
        with pytest.raises(Overloaded):
            mill.batcher.submit(Asked(0, rows=2), 0.0)
    mill.batcher.reconsider()
    mill.turn(Wakeup.ARRIVAL)
    assert policy.arrivals == 3 + 4 * 2


class Lengthening(Moody):
    """Lets one more wait for each second."""

    def full(self, now: float) -> int | None:
        """Say how many."""
        if now > 5.0:
            raise ValueError
        self.max_waiting = 2 + int(now)
        return self.max_waiting


def test_a_policy_may_let_more_wait_once_the_line_is_full() -> None:
    mill = Mill(Lengthening(max_waiting=2), max_queue_size=5, max_queue_delay=1e6)
    mill.submit(*many(2))
    with pytest.raises(Overloaded, match="2 rows wait, max_waiting of the policy=2"):
        mill.batcher.submit(Asked(0), 0.5)
    mill.batcher.submit(Asked(0), 1.0)
    assert mill.batcher.max_waiting == 3
    with pytest.raises(Overloaded):
        mill.batcher.submit(Asked(0, rows=3), 2.0)  # there is room for one
    mill.batcher.submit(Asked(0), 2.0)
    with pytest.raises(Overloaded):
        mill.batcher.submit(Asked(0), 6.0)
    assert isinstance(mill.batcher.policy_error, ValueError)


def test_a_policy_that_lets_none_wait_is_called_when_no_batch_runs() -> None:
    policy = Moody(rows=2)
    policy.max_waiting = 0
    mill = Mill(policy, max_queue_size=9)
    mill.submit(*many(1))
    (cut,) = mill.batcher.running.values()
    with pytest.raises(Overloaded, match="0 rows wait, max_waiting of the policy=0"):
        mill.submit(*many(1))
    mill.finish(cut)
    mill.submit(*many(1))
    assert len(mill.batcher.running) == 1


def test_those_that_wait_already_stay_when_the_policy_takes_its_bound_down() -> None:
    policy = Moody(rows=2)
    mill = Mill(policy, max_queue_size=9)
    mill.submit(*many(8))
    policy.max_waiting = 0
    (cut,) = mill.batcher.running.values()
    mill.finish(cut)
    assert (mill.batcher.max_waiting, mill.batcher.waiting_rows) == (0, 4)
    assert not mill.batcher.room(1)
    policy.max_waiting = None
    mill.run_all()
    assert mill.batcher.max_waiting == 9
    mill.submit(*many(9))


def test_a_bound_that_is_no_number_is_a_mistake_of_the_policy() -> None:
    mill = Mill(Moody(rows=1, max_waiting="many"))  # type: ignore[arg-type]  # that is the point
    (cut,) = mill.submit(*many(1))
    assert (cut.rows, cut.reason) == (1, Reason.IDLE)
    assert isinstance(mill.batcher.policy_error, TypeError)


def test_the_best_rate_is_unknown_until_enough_was_measured() -> None:
    mill = Mill(max_batch_size=4, workers=2)
    assert mill.batcher.best_rate(0.0) == inf
    for _ in range(4):
        mill.submit(*many(8, mill.now))
        mill.run_all(0.5)
    assert mill.batcher.best_rate(mill.now) == pytest.approx(2 * 4 / 0.5, rel=0.5)
    for worker in range(2):
        mill.lose(worker, replace=False)
    assert mill.batcher.best_rate(mill.now) == inf


def test_a_closed_line_stays_closed_whatever_the_policy_says() -> None:
    policy = Moody()
    mill = Mill(policy, max_queue_delay=1e6)
    mill.submit(*many(3))
    mill.batcher.drain()
    policy.max_waiting = 7
    mill.turn(Wakeup.ARRIVAL)
    with pytest.raises(Draining):
        mill.batcher.submit(Asked(0), 0.0)


def test_capacity_counts_what_is_to_run_again() -> None:
    mill = Mill(max_batch_size=4, capacity=5)
    requests = [listed(2), *many(2, timeout=5.0)]
    mill.submit(*requests)
    mill.lose(0, replace=False)
    assert mill.batcher.waiting_rows == 0
    with pytest.raises(Overloaded, match="rows=2: 4 rows wait and 0 are with workers, capacity=5"):
        mill.batcher.submit(listed(2), 0.0)
    assert mill.batcher.room(1)
    mill.cancel(requests[1])
    assert mill.batcher.room(2)
    assert not mill.batcher.room(3)
    mill.advance(5.0)
    assert requests[2].settled
    assert mill.batcher.room(3)
    assert not mill.batcher.room(4)
    mill.ready(0)
    mill.run_all()
    assert mill.batcher.room(5)
