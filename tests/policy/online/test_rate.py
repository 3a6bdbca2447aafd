"""rate.py: arrivals per second, from looks of any kind."""

from collections.abc import Iterable
from math import exp

import numpy as np
import pytest

from weir.policy.online.rate import ENOUGH, WINDOW_MAX, WINDOW_MIN, WINDOW_ROWS, Rate


def poisson(rate: float, count: int, start: float = 0.0, seed: int = 1) -> list[float]:
    """Return instants of arrivals."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, count)
    return [float(instant) for instant in start + np.cumsum(gaps)]


def follow(estimate: Rate, times: Iterable[float], first: int = 1) -> list[float]:
    """Look at each arrival; return what was estimated then."""
    return [estimate.observe(now, first + number) for number, now in enumerate(times)]


@pytest.mark.parametrize(
    ("rate", "start"), [(0.05, 0.0), (2.0, 0.0), (100.0, 1.7e9), (2000.0, 1.7e9), (2000.0, 0.0), (50_000.0, 0.0)]
)
def test_a_constant_rate_is_found_to_within_ten_per_cent(rate: float, start: float) -> None:
    values = follow(Rate(), poisson(rate, 20_000, start))[1000:]
    assert np.mean(values) == pytest.approx(rate, rel=0.03)
    assert np.std(values) < 0.12 * rate


def test_looks_may_be_rare() -> None:
    times = poisson(1000.0, 50_000)
    estimate, values = Rate(), []
    for number in range(0, len(times), 37):
        values.append(estimate.observe(times[number], number + 1))
    assert np.mean(values[10:]) == pytest.approx(1000.0, rel=0.03)


def test_it_is_unknown_until_enough_has_arrived() -> None:
    values = follow(Rate(), [0.01 * number for number in range(ENOUGH + 5)])
    assert values[:ENOUGH] == [0.0] * ENOUGH
    assert values[ENOUGH:] == pytest.approx([100.0] * 5)


def test_from_a_cold_start_it_is_the_count_over_the_time() -> None:
    times = poisson(500.0, ENOUGH + 1)
    value = follow(Rate(), times)[-1]
    assert value == pytest.approx(ENOUGH / (times[-1] - times[0]), rel=0.2)


def test_the_fading_is_exact_for_arrivals_spread_over_the_gap() -> None:
    estimate = Rate()
    follow(estimate, [0.001 * number for number in range(20_000)])
    assert estimate.value == pytest.approx(1000.0)
    window = WINDOW_ROWS / 1000.0
    estimate.observe(19.999 + 2.0 * window, 20_050)  # 50 in the time of 100
    assert estimate.value == pytest.approx(1000.0 * exp(-2.0) + 500.0 * (1.0 - exp(-2.0)))


def test_it_stays_while_nothing_comes_and_no_time_passes() -> None:
    estimate = Rate()
    follow(estimate, [0.01 * number for number in range(50)])
    before = estimate.value
    assert estimate.observe(5.0, 50) == before  # nothing came
    assert estimate.observe(0.49, 50) == before
    follow(estimate, [0.5], 51)
    assert estimate.value == pytest.approx(100.0)
    assert estimate.observe(0.5, 60) == pytest.approx(100.0)  # no time has passed: the next look counts them
    assert estimate.observe(0.51, 61) > 105.0


def test_after_a_silence_the_gap_counts() -> None:
    estimate = Rate()
    follow(estimate, poisson(1000.0, 1000))
    estimate.observe(100.0, 1001)
    assert estimate.value < 0.02
    follow(estimate, poisson(1000.0, 150, 100.0), 1002)
    assert estimate.value == pytest.approx(1000.0, rel=0.35)


def test_a_thousandfold_rise_is_followed_within_some_hundred_arrivals() -> None:
    estimate = Rate()
    follow(estimate, poisson(2.0, 1000))
    assert estimate.value == pytest.approx(2.0, rel=0.4)
    values = follow(estimate, poisson(2000.0, 1000, 1000.0), 1001)
    assert values[36] > 2.0 * values[1]
    assert values[450] == pytest.approx(2000.0, rel=0.4)


def test_the_memory_is_bounded_both_ways() -> None:
    slow, fast = Rate(), Rate()
    follow(slow, [1e6 * number for number in range(100)])
    assert slow.value == pytest.approx(1e-6)
    assert slow._window == WINDOW_MAX
    follow(fast, [1e-6 * number for number in range(100)])
    assert fast.value == pytest.approx(1e6)
    assert fast._window == WINDOW_MIN


def test_another_line_and_another_clock_start_from_what_is_known() -> None:
    estimate = Rate()
    follow(estimate, [0.01 * number for number in range(100)])
    assert estimate.observe(2.0, 0) == pytest.approx(100.0)  # a service that was started again
    assert estimate.observe(2.01, 1) == pytest.approx(100.0)
    assert estimate.observe(0.0, 5) == pytest.approx(100.0)  # a clock that went back
    assert estimate.observe(0.01, 6) == pytest.approx(100.0)
