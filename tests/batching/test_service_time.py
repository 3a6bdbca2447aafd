"""service_time.py: the service time is learned, and trusted only while that is sensible."""

from math import inf, log

import pytest
from tests.batching.mill import Mill
from tests.batching.test_padded import of
from tests.rings import subcases

from weir.batching.service_time import ENOUGH, LAST, STALE_MIN, ServiceTime
from weir.errors import DeadlineExceeded, Overloaded


def learned(*pairs: tuple[int, float]) -> ServiceTime:
    """Return an estimate that has seen these sizes and seconds."""
    service = ServiceTime()
    for number, (rows, seconds) in enumerate(pairs):
        service.learn(rows, seconds, float(number), 0.0)
    return service


def test_a_part_is_done_sooner_unless_batches_cost_the_same() -> None:
    service = ServiceTime()
    for _ in range(ENOUGH):
        assert not service.is_sooner(8, 16, 0.75)
        service.learn(16, 1.6, 0.0, 16)
    assert service.is_sooner(8, 16, 0.75)  # nobody knows: a try
    service.learn(8, 0.8, 0.0, 8)
    assert service.is_sooner(8, 16, 0.75) and not service.is_sooner(8, 16, 0.4)
    flat = ServiceTime()
    for rows in (16, 16, 16, 8):
        flat.learn(rows, 1.0, 0.0, rows)
    assert not flat.is_sooner(8, 16, 0.75)


@subcases("padded", [False, True])
def test_before_anything_was_measured(padded: bool) -> None:
    service = ServiceTime(padded=padded)
    assert service.expected(64) == service.upper(64) == service.lower(64) == service.alone(1, 512.0) == 0.0
    assert service.rate(64) == service.typical_rows() == inf and not service.is_trusted(0.0)


@subcases(
    ("samples", "rows", "seconds"),
    [
        ([(rows, 0.002 + 0.0005 * rows) for rows in (1, 8, 64, 32, 5, 17)], 100, 0.052),  # a line is found
        ([(8, 0.01)] * 5, 64, 0.01),  # equal sizes count as fixed cost
        ([(1, 0.03), (64, 0.01)] * 10, 64, 0.02),  # a slope is never negative
        ([(10, 0.001), (20, 0.004), (40, 0.016)] * 5, 0, 0.0),  # nor the fixed cost
        ([(8, 0.01)] * 50 + [(8, 0.1)] * 60, 8, 0.1),  # a change is followed
        (
            [(rows, 0.001 * log(rows + 1)) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 200)] * 3,
            64,
            0.0042,
        ),  # about a curve
    ],
)
def test_what_a_batch_takes_is_learned(samples: list[tuple[int, float]], rows: int, seconds: float) -> None:
    assert learned(*samples).expected(rows) == pytest.approx(seconds, rel=0.3)


def test_the_rate_and_the_usual_size_are_learned() -> None:
    assert learned(*[(rows, 0.002 + 0.0005 * rows) for rows in (1, 8, 64, 32, 5, 17)]).rate(64) == pytest.approx(
        64 / 0.034
    )
    assert learned(*[(8, 0.01)] * 5).typical_rows() == pytest.approx(8)


def test_the_spread_widens_the_bounds() -> None:
    steady, shaky = learned(*[(8, 0.01)] * 30), learned(*[(8, 0.005), (8, 0.015)] * 15)
    assert steady.upper(8) == pytest.approx(0.01)
    assert steady.lower(8) == pytest.approx(0.01)
    assert shaky.upper(8) > 0.013
    assert shaky.lower(8) < 0.007
    assert learned((8, 1.0), (8, 0.0), (8, 1.0)).lower(1) == 0.0


def test_it_is_trusted_only_with_enough_and_fresh_samples() -> None:
    assert not learned((8, 0.01), (8, 0.01)).is_trusted(1.0)
    service = learned((8, 0.01), (8, 0.01), (8, 0.01))
    assert service.is_trusted(2.0 + STALE_MIN)
    assert not service.is_trusted(2.1 + STALE_MIN)
    slow = learned((8, 3.0), (8, 3.0), (8, 3.0))
    assert slow.is_trusted(31.0)
    assert not slow.is_trusted(33.0)


def test_the_last_times_of_each_size_are_kept_once_they_are_wanted() -> None:
    service = learned((8, 0.5))
    recent = service.keep()
    for number in range(2 * LAST):
        service.learn(4, float(number), 0.0, 4.0)
    service.learn(8, 0.5, 0.0, 8.0)
    assert service.keep() is recent
    service.learn(2, 0.0, 0.0, 2.0)
    assert {rows: list(times) for rows, times in recent.items()} == {4: [*range(LAST, 2 * LAST)], 8: [0.5]}


# Service times by what batches cost.


FIXED, PER_TOKEN = 0.01, 0.001


def learned_padded(*batches: tuple[int, float], max_cost: float | None = None) -> ServiceTime:
    """Return an estimate that has seen these rows and costs."""
    service = ServiceTime(padded=True, max_cost=max_cost)
    for number, (rows, cost) in enumerate(batches):
        service.learn(rows, FIXED + PER_TOKEN * cost, float(number), cost)
    return service


def test_equal_rows_of_other_lengths_are_distinguished() -> None:
    service = learned_padded(*[(4, 4.0 * length) for length in (10, 100, 20, 50, 200, 5)] * 4)
    assert 0.25 < service.alone(1, 300.0) <= 0.31  # less by as much as the first guesses were wrong
    assert 0.0 <= service.alone(2, 10.0) <= 0.03
    assert service.typical_rows() == pytest.approx(4)
    mean = service.expected(1) - FIXED
    assert service.expected(4) == pytest.approx(FIXED + 4 * mean, rel=0.01)
    assert service.lower(4) <= service.expected(4) <= service.upper(4)


def test_no_batch_costs_more_than_the_budget() -> None:
    service = learned_padded(*[(2, 100.0), (4, 200.0)] * 10, max_cost=200.0)  # 50 for a row: four at once
    assert service.expected(1000) == service.expected(4) == pytest.approx(0.21)
    assert 0.21 <= service.upper(1000) == service.upper(4)
    assert service.rate(1000) == service.rate(4) == pytest.approx(4 / 0.21)
    assert service.rate(2) == pytest.approx(2 / 0.11)
    # One too long goes alone.
    assert learned_padded(*[(1, 500.0), (1, 600.0)] * 9, max_cost=200.0).rate(8) == pytest.approx(1 / 0.21)


def test_rows_that_cost_nothing_take_what_a_batch_takes() -> None:
    service = learned_padded(*[(4, 0.0)] * 3, max_cost=8.0)
    assert service.expected(2) == pytest.approx(FIXED) and service.rate(4) == pytest.approx(4 / FIXED)


def taught(max_queue_size: int = 4) -> Mill:
    """A mill of two rows at most, which has learned what tokens take."""
    mill = Mill(max_batch_size=2, max_batch_cost=400.0, padded=True, max_queue_size=max_queue_size)
    for length in (10.0, 200.0, 40.0, 100.0) * 4:
        (batch,) = mill.submit(of(length, mill.now))
        mill.now += FIXED + PER_TOKEN * length
        mill.finish(batch)
    return mill


def test_a_deadline_that_a_short_text_makes_and_a_long_one_does_not() -> None:
    mill = taught()
    mill.submit(of(10.0, mill.now, timeout=0.06))
    with pytest.raises(DeadlineExceeded, match="the response would miss the deadline"):
        mill.batcher.submit(of(200.0, mill.now, timeout=0.06), mill.now)


@subcases(("timeout", "refused"), [(30.0, False), (0.36, True)])
def test_who_can_wait_longer_is_not_ahead_of_one_that_cannot(timeout: float, refused: bool) -> None:
    mill = taught(max_queue_size=8)
    for _ in range(5):
        mill.submit(of(40.0, mill.now, timeout=timeout))  # one runs, four wait: 0.37 s and then its own time
    tight = of(40.0, mill.now, timeout=0.37)
    if refused:
        with pytest.raises(DeadlineExceeded, match="the response would miss the deadline"):
            mill.batcher.submit(tight, mill.now)
        return
    mill.submit(tight)
    mill.run_all(0.1)
    assert tight.ends == [tight.payload]


def test_who_is_refused_hears_how_long_texts_like_the_last_ones_take() -> None:
    mill = taught()
    mill.submit(of(100.0, mill.now))
    mill.submit(*[of(100.0, mill.now) for _ in range(4)])
    with pytest.raises(Overloaded) as caught:
        mill.batcher.submit(of(100.0, mill.now), mill.now)
    pair = mill.batcher.service.expected(2)
    assert 0.1 < pair < 0.3  # of rows alone nothing could be said: all batches so far had one
    assert caught.value.retry_after == pytest.approx((4 + 1 / 2) * pair / 2)
