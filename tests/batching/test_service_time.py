"""estimate.py: the service time is learned, and trusted only while that is sensible."""

from math import inf, log

import pytest

from weir.batching.service_time import ENOUGH, STALE_MIN, ServiceTime


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


def test_before_anything_was_measured() -> None:
    service = ServiceTime()
    assert service.expected(64) == service.upper(64) == service.lower(64) == 0.0
    assert not service.is_trusted(0.0)
    assert service.rate(64) == inf
    assert service.typical_rows() == inf


def test_a_line_is_found() -> None:
    service = learned(*[(rows, 0.002 + 0.0005 * rows) for rows in (1, 8, 64, 32, 5, 17)])
    assert service.expected(100) == pytest.approx(0.052)
    assert service.rate(64) == pytest.approx(64 / 0.034)


def test_equal_sizes_count_as_fixed_cost() -> None:
    service = learned(*[(8, 0.01)] * 5)
    assert service.expected(64) == pytest.approx(0.01)
    assert service.typical_rows() == pytest.approx(8)


def test_a_slope_is_never_negative() -> None:
    service = learned(*[(1, 0.03), (64, 0.01)] * 10)
    assert service.expected(64) == pytest.approx(service.expected(1))


def test_the_fixed_cost_is_never_negative() -> None:
    service = learned(*[(10, 0.001), (20, 0.004), (40, 0.016)] * 5)
    assert service.expected(0) == 0.0
    assert 0.0 < service.expected(20) < 0.01


def test_a_change_is_followed() -> None:
    service = learned(*[(8, 0.01)] * 50, *[(8, 0.1)] * 60)
    assert service.expected(8) == pytest.approx(0.1, rel=0.1)


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


def test_a_concave_service_time_is_met_roughly() -> None:
    truth = [(rows, 0.001 * log(rows + 1)) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 200)]
    service = learned(*truth * 3)
    for rows, seconds in truth[3:]:
        assert service.expected(rows) == pytest.approx(seconds, rel=0.5)
