from math import inf, isinf, isnan, log, nan

import numpy as np
import pytest
from tests.rings import subcases

from weir.simulation import statistics
from weir.simulation.arrivals import Floats
from weir.simulation.statistics import Estimate, LogHistogram, correlation, estimate, half_width, stretch_length


def mm1(load: float, count: int, rng: np.random.Generator) -> Floats:
    """Return the response times of an M/M/1 queue, unit arrival rate, by Lindley's recursion."""
    service, gap = rng.exponential(load, count), rng.exponential(1.0, count)
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gap[1:])])
    response: Floats = walk - np.minimum.accumulate(walk) + service
    return response


def stretches_of(values: Floats) -> Floats:
    length = stretch_length(len(values))
    whole = values[len(values) % length :]
    return whole.reshape(-1, length)


def test_of_independent_observations_it_is_students_interval() -> None:
    seen = estimate(np.array([1.0, 3.0, 2.0, 4.0, 5.0, 0.0, 2.0, 3.0]))
    assert seen.value == 2.5
    assert seen.high - seen.value == pytest.approx(2.364624 * np.sqrt(18.0 / 7.0 / 8.0))  # t of 7 degrees, 97.5 %
    assert seen.low == pytest.approx(5.0 - seen.high)
    assert seen.half_width == pytest.approx(seen.high - 2.5)


@subcases(("load", "least"), [(0.3, 0.92), (0.9, 0.85)])
def test_intervals_of_a_queue_hold_its_mean_although_neighbours_are_alike(load: float, least: float) -> None:
    rng = np.random.default_rng(2)
    true = load / (1.0 - load)
    held = [true in estimate(stretches_of(mm1(load, 50_000, rng)[5_000:]).mean(axis=1)) for _ in range(100)]
    assert least <= np.mean(held) < 1.0


def test_what_does_not_vary_has_no_width() -> None:
    assert estimate(np.full(64, 3.0)) == Estimate(3.0, 3.0, 3.0)
    assert correlation(np.full(64, 3.0)) == 0.0


def test_what_is_not_known_is_left_out() -> None:
    assert estimate(np.array([np.nan, 1.0, np.nan, 1.0])) == Estimate(1.0, 1.0, 1.0)
    assert all(map(isnan, estimate(np.array([np.nan]))))
    assert all(map(isnan, estimate(np.array([]))))
    assert estimate(np.array([2.0])) == Estimate(2.0, -inf, inf)
    assert isinf(half_width(np.array([1.0])))


def test_an_interval_contains_numbers() -> None:
    said: list[object] = [2.0, 1, 3.5, "2"]
    assert [each in Estimate(2.0, 1.0, 3.0) for each in said] == [True, True, False, False]


def test_there_are_at_most_64_stretches() -> None:
    assert [stretch_length(requests) for requests in (1, 64, 65, 90_000, 10**8)] == [1, 1, 2, 1407, 1_562_500]


def spread_of(values: Floats) -> LogHistogram:
    stretches = stretches_of(values)
    spread = LogHistogram(len(stretches))
    index = np.arange(stretches.size)
    for part in np.array_split(index, 10):
        spread.add(stretches.ravel()[part], part // stretches.shape[1])
    return spread


def test_quantiles_are_within_a_thousandth() -> None:
    values = np.random.default_rng(1).lognormal(size=96_000)
    spread = spread_of(values)
    for share in (0.001, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0):
        assert spread.quantile(share) == pytest.approx(np.quantile(values, share, method="inverted_cdf"), rel=1.5e-3)
    assert spread.quantile(1.0) == spread.highest == values.max()
    assert spread.quantile(0.0) == pytest.approx(values.min(), rel=1e-3)


def test_what_is_out_of_its_reach_counts_at_the_ends() -> None:
    spread = spread_of(np.array([1e-9, 1e9, 1.0]))
    assert spread.counts.sum() == 3
    assert spread.quantile(0.5) == pytest.approx(1.0, rel=1e-3)
    assert (
        spread.quantile(1.0)
        == statistics.edges(statistics.OCTAVES << statistics.FINE, statistics.FINE)
        == 2.0 ** (statistics.FIRST_OCTAVE + statistics.OCTAVES)
    )


def test_nothing_is_nothing() -> None:
    spread = LogHistogram(4)
    spread.add(np.empty(0), np.empty(0, dtype=np.int64))
    value, observed = spread.estimate(0.5)
    assert np.isnan([*value, *observed, spread.quantile(0.5)]).all()
    assert str(spread.quantile(0.5)) == str(nan)


def test_a_single_value_has_no_width() -> None:
    value, observed = spread_of(np.full(1000, 5.0)).estimate(0.95)
    assert value.value == pytest.approx(5.0, rel=1e-3) and 5.0 in value and value.half_width < 0.01
    assert observed == pytest.approx(np.full(len(observed), 5.0), rel=1e-3)
    spread = LogHistogram(3)
    spread.add(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 0, 2, 2]))
    assert np.isnan(spread.estimate(0.5)[1]).tolist() == [False, True, False]


@subcases(("load", "least"), [(0.3, 0.88), (0.7, 0.85)])
def test_intervals_of_a_queue_hold_its_quantiles(load: float, least: float) -> None:
    rng = np.random.default_rng(5)
    shares = (0.5, 0.95, 0.99)
    held = np.zeros(3)
    for _ in range(60):
        spread = spread_of(mm1(load, 50_000, rng)[5_000:])
        for place, share in enumerate(shares):
            true = -log(1.0 - share) * load / (1.0 - load)  # the response time of M/M/1 is exponential
            held[place] += true in spread.estimate(share)[0]
    assert (held / 60 >= least).all()
