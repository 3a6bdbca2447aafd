"""arrivals.py: arrivals per second, from looks of any kind, and how wrong they may be soon."""

import math
from collections.abc import Iterable, Sequence
from math import exp

import numpy as np
import pytest
from tests.rings import subcases

from weir.policy.online.arrivals import ENOUGH, WINDOW_ROWS, ArrivalForecast, Forecast, Rate


def poisson(rate: float, count: int, start: float = 0.0, seed: int = 1) -> list[float]:
    """Return instants of arrivals."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, count)
    return [float(instant) for instant in start + np.cumsum(gaps)]


def follow(estimate: Rate, times: Iterable[float], first: int = 1) -> list[float]:
    """Look at each arrival; return what was estimated then."""
    return [estimate.observe(now, first + number) for number, now in enumerate(times)]


@subcases(("rate", "start"), [(0.05, 0.0), (100.0, 1.7e9), (2000.0, 1.7e9), (50_000.0, 0.0)])
def test_a_constant_rate_is_found_to_within_ten_per_cent(rate: float, start: float) -> None:
    values = follow(Rate(), poisson(rate, 20_000, start))[1000:]
    assert np.mean(values) == pytest.approx(rate, rel=0.03)
    assert np.std(values) < 0.12 * rate


def test_it_is_unknown_until_enough_has_arrived() -> None:
    values = follow(Rate(), [0.01 * number for number in range(ENOUGH + 5)])
    assert values == pytest.approx([0.0] * ENOUGH + [100.0] * 5)


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


def test_no_gap_is_too_short_for_the_window() -> None:
    estimate = Rate(enough=0)
    estimate.learn(1, 1e-14)
    assert estimate.value == pytest.approx(1e14)


def test_silences_and_rises_are_followed_within_some_hundred_arrivals() -> None:
    estimate = Rate()
    follow(estimate, poisson(1000.0, 1000))
    estimate.observe(100.0, 1001)
    assert estimate.value < 0.02
    follow(estimate, poisson(1000.0, 150, 100.0), 1002)
    assert estimate.value == pytest.approx(1000.0, rel=0.35)
    estimate = Rate()
    follow(estimate, poisson(2.0, 1000))
    assert estimate.value == pytest.approx(2.0, rel=0.4)
    values = follow(estimate, poisson(2000.0, 1000, 1000.0), 1001)
    assert values[36] > 2.0 * values[1]
    assert values[450] == pytest.approx(2000.0, rel=0.4)


def test_another_line_and_another_clock_start_from_what_is_known() -> None:
    estimate = Rate()
    follow(estimate, [0.01 * number for number in range(100)])
    for now, arrivals in ((2.0, 0), (2.01, 1), (0.0, 5), (0.01, 6)):  # a service started again; a clock that went back
        assert estimate.observe(now, arrivals) == pytest.approx(100.0)


# The rate over the time that a worker takes to start.


def seconds_of(forecast: ArrivalForecast, rows: Sequence[int], horizon: float = 4.0) -> list[Forecast]:
    """Let `rows[i]` rows arrive in second i, and return the forecast at the end of each second."""
    arrived, made = 0, []
    for second, more in enumerate(rows):
        arrived += more
        made.append(forecast.observe(float(second), arrived, horizon))
    return made


def test_forecast_is_as_old_as_the_mean_over_the_last_horizon() -> None:
    made = seconds_of(ArrivalForecast(), [0] + [10] * 20 + [30] * 20)
    assert made[0] == (0.0, 0.0), "nothing is known yet"
    assert [each.rate for each in made[1:4]] == pytest.approx([4.2, 6.2, 7.5], abs=0.1), "nothing came before"
    assert [each.rate for each in made[4:21]] == pytest.approx([10.0] * 17)
    assert made[22].rate == pytest.approx(20.0, abs=2.0), "half of a step after half a horizon"
    assert made[-1].rate == pytest.approx(30.0, rel=0.01)


def test_forecast_of_few_rows_is_the_mean_over_more_time() -> None:
    last = seconds_of(ArrivalForecast(), [0, *[1] * 60])[-1]
    assert tuple(last) == pytest.approx((1.0, math.sqrt(1.0 / 20.0)), rel=0.01), "20 rows, by Poisson's law"
    made = seconds_of(ArrivalForecast(), [0, 1, *[0] * 200])
    assert 0.002 < made[30].rate < 0.05 and made[-1].rate < 1e-4


def test_error_is_what_the_estimates_were_wrong_by_and_is_forgotten() -> None:
    least = math.sqrt(100.0 / 4.8)  # Poisson's
    assert seconds_of(ArrivalForecast(), [0, *[100] * 40])[-1].error == pytest.approx(least)
    assert seconds_of(ArrivalForecast(), [0, *([200] * 4 + [0] * 4) * 5])[-1].error > 90.0
    made = seconds_of(ArrivalForecast(), [0, *[200] * 4, *[0] * 4, *[100] * 300])
    assert made[20].error > 30.0 and made[-1].error == pytest.approx(least, rel=0.05)


def test_forecast_counts_anew_on_another_queue_or_clock() -> None:
    forecast = ArrivalForecast()
    seconds_of(forecast, [0, *[100] * 20])
    assert forecast.observe(30.0, 0, 4.0) == (0.0, 0.0)
    assert forecast.observe(31.0, 50, 4.0).rate == pytest.approx(50.0 / 2.4, rel=0.01), "nothing came before"
    assert forecast.observe(1.0, 60, 4.0) == (0.0, 0.0)


def test_rows_of_the_same_instant_count_with_the_next_one() -> None:
    forecast = ArrivalForecast()
    forecast.observe(0.0, 0, 1.0)
    forecast.observe(1.0, 5, 1.0)
    assert forecast.observe(1.0, 9, 1.0).rate == pytest.approx(5.0, rel=0.01)
    assert forecast.observe(2.0, 9, 1.0).rate == pytest.approx(4.4, abs=0.1)


def test_the_rate_after_a_silence_is_what_an_observation_would_give() -> None:
    rate = Rate(enough=0)
    assert rate.after(1.0) == 0.0
    for second in range(1, 50):
        rate.observe(second, second)
    ahead = rate.after(7.0)
    rate.learn(0, 7.0)
    assert ahead == pytest.approx(rate.value, rel=1e-9)
