import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.profiling.sampling import CROWDED_RARE, estimate, steadied


def test_one_duration_says_its_mean_and_nothing_of_how_sure_it_is() -> None:
    said = estimate([0.5])
    assert (said.mean, said.deviation, said.counted, said.half_width) == (0.5, 0.0, 1, float("inf"))


def test_mean_spread_and_interval_are_the_usual_ones() -> None:
    durations = np.random.default_rng(1).gamma(100.0, 0.01, 4000)
    said = estimate(list(durations))
    assert said.mean == pytest.approx(durations.mean())
    assert said.cv == pytest.approx(0.1, rel=0.05)
    assert said.half_width == pytest.approx(1.96 * said.error)
    assert said.relative == pytest.approx(said.half_width / said.mean)
    assert said.left_out == 0


def test_a_rare_pause_of_the_machine_is_left_out_and_reported() -> None:
    said = estimate([0.010] * 99 + [0.110])
    assert said.mean == pytest.approx(0.010)
    assert (said.counted, said.left_out) == (99, 1)
    assert said.left_out_seconds == pytest.approx(0.1)


def test_what_happens_often_belongs_to_the_model() -> None:
    said = estimate([0.010] * 90 + [0.110] * 10)
    assert said.mean == pytest.approx(0.020)
    assert (said.counted, said.left_out) == (100, 0)


def test_on_a_crowded_machine_pauses_may_be_more_frequent() -> None:
    durations = [0.010] * 80 + [0.110] * 20
    assert estimate(durations).mean == pytest.approx(0.030)
    assert estimate(durations, CROWDED_RARE).mean == pytest.approx(0.010)
    assert estimate([0.010] * 60 + [0.110] * 40, CROWDED_RARE).left_out == 0


def test_of_a_small_sample_one_pause_is_left_out_and_of_a_tiny_one_none() -> None:
    assert estimate([0.010] * 4 + [0.110]).mean == pytest.approx(0.010)
    assert estimate([0.010] * 3 + [0.110] * 2).mean == pytest.approx(0.050)
    assert estimate([0.010] * 2 + [0.110]).mean == pytest.approx(0.130 / 3)


def test_few_durations_that_agree_are_as_uncertain_as_those_of_other_sizes() -> None:
    chance = np.random.default_rng(3)
    known = {size: estimate(list(chance.normal(1.0, 0.1, 500))) for size in (1, 2, 3)}
    few = steadied({**known, 4: estimate([2.0, 2.0, 2.0])})
    assert few[4].mean == 2.0
    assert few[4].cv == pytest.approx(0.1 * np.sqrt(5 / 8), rel=0.1)
    for size, each in known.items():
        assert few[size].cv == pytest.approx(each.cv, rel=0.02)


def test_an_exponential_time_is_hardly_cut() -> None:
    durations = np.random.default_rng(2).exponential(1.0, 20_000)
    assert estimate(list(durations)).mean == pytest.approx(durations.mean(), rel=0.02)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50), st.floats(0.01, 100.0))
def test_the_unit_of_time_does_not_matter(durations: list[float], scale: float) -> None:
    one, other = estimate(durations), estimate([scale * each for each in durations])
    assert min(durations) <= one.mean * (1 + 1e-9) and one.mean <= max(durations) * (1 + 1e-9)
    assert other.mean == pytest.approx(scale * one.mean)
    assert other.left_out == one.left_out
