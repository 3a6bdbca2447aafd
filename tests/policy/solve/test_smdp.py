"""smdp.py: the law of the arrivals during a batch."""

import numpy as np
import pytest
from scipy import stats

from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.solve.smdp import arrivals

SMALL = Profile(np.array([1.0, 1.5, 3.0]), np.array([2.0, 3.0, 7.0]), np.array([0.0, 0.5, 1.0]))


def test_arrivals_are_poisson_and_negative_binomial() -> None:
    table = arrivals(SMALL, 0.6)
    counts = np.arange(40)
    assert table[0, :40] == pytest.approx(stats.poisson.pmf(counts, 0.6), rel=1e-12, abs=1e-30)
    for row, (mean, cv) in enumerate(zip(0.6 * SMALL.service_time_ms[1:], SMALL.cv[1:], strict=True), start=1):
        shape = 1.0 / cv**2
        expected = stats.nbinom.pmf(counts, shape, 1.0 / (1.0 + mean / shape))
        assert table[row, :40] == pytest.approx(expected, rel=1e-11)
    assert table.sum(axis=1) == pytest.approx(1.0, rel=1e-13)


def test_arrivals_keep_the_tail() -> None:
    table = arrivals(GOOGLENET_P4, 2.5, 10)
    assert table.shape == (32, 10)
    assert table[:, -1] == pytest.approx(stats.poisson.sf(8, 2.5 * GOOGLENET_P4.service_time_ms), rel=1e-11)
