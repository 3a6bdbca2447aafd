"""padded_time.py: service times by what batches cost."""

from math import inf

import pytest
from tests.batching.mill import Mill
from tests.batching.test_padded import of

from weir.batching.service_time import PaddedTime
from weir.errors import DeadlineExceeded, Overloaded

FIXED, PER_TOKEN = 0.01, 0.001


def learned(*batches: tuple[int, float], max_cost: float | None = None) -> PaddedTime:
    """Return an estimate that has seen these rows and costs."""
    service = PaddedTime(max_cost)
    for number, (rows, cost) in enumerate(batches):
        service.learn(rows, FIXED + PER_TOKEN * cost, float(number), cost)
    return service


def test_before_anything_was_measured() -> None:
    service = PaddedTime(None)
    assert service.expected(64) == service.upper(64) == service.lower(64) == service.alone(1, 512.0) == 0.0
    assert service.rate(64) == service.typical_rows() == inf and not service.is_trusted(0.0)


def test_equal_rows_of_other_lengths_are_told_apart() -> None:
    service = learned(*[(4, 4.0 * length) for length in (10, 100, 20, 50, 200, 5)] * 4)
    assert 0.25 < service.alone(1, 300.0) <= 0.31  # less by as much as the first guesses were wrong
    assert 0.0 <= service.alone(2, 10.0) <= 0.03
    assert service.typical_rows() == pytest.approx(4)
    mean = service.expected(1) - FIXED
    assert service.expected(4) == pytest.approx(FIXED + 4 * mean, rel=0.01)
    assert service.lower(4) <= service.expected(4) <= service.upper(4)


def test_no_batch_costs_more_than_the_budget() -> None:
    service = learned(*[(2, 100.0), (4, 200.0)] * 10, max_cost=200.0)  # 50 for a row: four at once
    assert service.expected(1000) == service.expected(4) == pytest.approx(0.21)
    assert 0.21 <= service.upper(1000) == service.upper(4)
    assert service.rate(1000) == service.rate(4) == pytest.approx(4 / 0.21)
    assert service.rate(2) == pytest.approx(2 / 0.11)
    assert learned(*[(1, 500.0), (1, 600.0)] * 9, max_cost=200.0).rate(8) == pytest.approx(
        1 / 0.21
    )  # one too long goes alone


def test_rows_that_cost_nothing_take_what_a_batch_takes() -> None:
    service = learned(*[(4, 0.0)] * 3, max_cost=8.0)
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
    with pytest.raises(DeadlineExceeded, match="the answer would come too late"):
        mill.batcher.submit(of(200.0, mill.now, timeout=0.06), mill.now)


@pytest.mark.parametrize(("timeout", "refused"), [(30.0, False), (0.36, True)])
def test_who_can_wait_longer_is_not_ahead_of_one_that_cannot(timeout: float, refused: bool) -> None:
    mill = taught(max_queue_size=8)
    for _ in range(5):
        mill.submit(of(40.0, mill.now, timeout=timeout))  # one runs, four wait: 0.37 s and then its own time
    tight = of(40.0, mill.now, timeout=0.37)
    if refused:
        with pytest.raises(DeadlineExceeded, match="the answer would come too late"):
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
