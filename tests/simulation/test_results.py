from math import log, nan

import numpy as np
import pytest
from tests.simulation.test_statistics import mm1

from weir.simulation.arrivals import Floats
from weir.simulation.results import COARSE, FINE, FIRST, OCTAVES, LogHistogram, edges
from weir.simulation.statistics import stretch_length


def spread_of(values: Floats) -> LogHistogram:
    length = stretch_length(len(values))
    whole = values[len(values) % length :]
    spread = LogHistogram(len(whole) // length)
    for start in range(0, len(whole), 1000):  # in parts
        index = np.arange(start, min(start + 1000, len(whole)))
        spread.add(whole[index], index // length)
    return spread


def test_quantiles_are_within_a_thousandth() -> None:
    values = np.random.default_rng(1).lognormal(size=96_000)
    spread = spread_of(values)
    for share in (0.001, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0):
        assert spread.quantile(share) == pytest.approx(np.quantile(values, share, method="inverted_cdf"), rel=1.5e-3)
    assert spread.quantile(1.0) == spread.highest == values.max()
    assert spread.quantile(0.0) == pytest.approx(values.min(), rel=1e-3)


def test_the_share_beyond_a_value() -> None:
    values = np.random.default_rng(1).exponential(size=96_000)
    spread = spread_of(values)
    for value in (0.01, 1.0, 5.0):
        assert spread.beyond(value) == pytest.approx(np.mean(values > value), abs=1e-4)
    assert spread.beyond(1e-9) == 1.0
    assert spread.beyond(1e9) == 0.0
    assert spread.beyond(values.max() * 1.01) == pytest.approx(0.0, abs=1e-12)


def test_what_is_out_of_its_reach_counts_at_the_ends() -> None:
    spread = spread_of(np.array([1e-9, 1e9, 1.0]))
    assert spread.counts.sum() == 3
    assert spread.quantile(0.5) == pytest.approx(1.0, rel=1e-3)
    assert spread.quantile(1.0) == edges(OCTAVES << FINE, FINE) == 2.0 ** (FIRST + OCTAVES)


def test_edges_divide_a_power_of_two_evenly() -> None:
    assert edges(0, COARSE) == 2.0**FIRST
    assert edges((-FIRST << COARSE) + 64, COARSE) == 1.5
    assert edges(1 - FIRST << FINE, FINE) == 2.0


def test_nothing_is_nothing() -> None:
    spread = LogHistogram(4)
    spread.add(np.empty(0), np.empty(0, dtype=np.int64))
    value, observed = spread.estimate(0.5)
    assert np.isnan([*value, *observed, spread.quantile(0.5), spread.beyond(1.0)]).all()
    assert str(spread.quantile(0.5)) == str(nan)


def test_a_single_value_has_no_width() -> None:
    value, observed = spread_of(np.full(1000, 5.0)).estimate(0.95)
    assert value.value == pytest.approx(5.0, rel=1e-3)
    assert 5.0 in value
    assert value.half_width < 0.01
    assert observed == pytest.approx(np.full(len(observed), 5.0), rel=1e-3)


def test_a_stretch_without_values_has_no_observation() -> None:
    spread = LogHistogram(3)
    spread.add(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 0, 2, 2]))
    _, observed = spread.estimate(0.5)
    assert np.isnan(observed).tolist() == [False, True, False]


@pytest.mark.parametrize(("load", "least"), [(0.3, 0.88), (0.7, 0.85)])
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


def test_observations_have_the_quantile_for_their_mean() -> None:
    for share in (0.5, 0.99):
        value, observed = spread_of(mm1(0.7, 50_000, np.random.default_rng(6))).estimate(share)
        assert observed.mean() == pytest.approx(value.value)
        assert value.low < value.value < value.high
