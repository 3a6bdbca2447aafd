"""bounded.py: bounded queues against closed forms of queueing theory, and the law of the arrivals during a batch."""

import numpy as np
import pytest
from reproduction.bounded import arrivals, evaluate_bounded
from tests.late import scipy
from tests.rings import subcases

from weir.errors import SettingsError
from weir.policy.cost import GOOGLENET_P4, Profile
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import greedy_table, limit_table, static_table

SMALL = Profile(np.array([1.0, 1.5, 3.0]), np.array([2.0, 3.0, 7.0]), np.array([0.0, 0.5, 1.0]))


def test_arrivals_are_poisson_and_negative_binomial() -> None:
    table = arrivals(SMALL, 0.6)
    counts = np.arange(40)
    assert table[0, :40] == pytest.approx(scipy.stats.poisson.pmf(counts, 0.6), rel=1e-12, abs=1e-30)
    for row, (mean, cv) in enumerate(zip(0.6 * SMALL.service_time_ms[1:], SMALL.cv[1:], strict=True), start=1):
        shape = 1.0 / cv**2
        expected = scipy.stats.nbinom.pmf(counts, shape, 1.0 / (1.0 + mean / shape))
        assert table[row, :40] == pytest.approx(expected, rel=1e-11)
    assert table.sum(axis=1) == pytest.approx(1.0, rel=1e-13)


def test_arrivals_keep_the_tail() -> None:
    table = arrivals(GOOGLENET_P4, 2.5, 10)
    assert table.shape == (32, 10)
    assert table[:, -1] == pytest.approx(scipy.stats.poisson.sf(8, 2.5 * GOOGLENET_P4.service_time_ms), rel=1e-11)


@subcases(("load", "bound"), [(0.1, 1), (0.9, 30), (1.0, 4), (3.0, 30)])
def test_a_bound_on_those_who_wait_is_the_queue_m_m_1_k(load: float, bound: int) -> None:
    profile = Profile(np.array([2.0]), np.array([3.0]), np.array([1.0]))
    seen, refused_share = evaluate_bounded(profile, load * 500.0, greedy_table(1), bound)
    shares = load ** np.arange(bound + 2.0)
    shares /= shares.sum()
    assert refused_share == pytest.approx(shares[-1], rel=1e-10)
    assert seen.busy_share == pytest.approx(1.0 - shares[0], rel=1e-10)
    arrived = load * (1.0 - shares[-1]) / 2.0
    assert seen.response_time_ms == pytest.approx(shares @ np.arange(bound + 2.0) / arrived, rel=1e-10)


def test_a_bound_makes_any_table_stable() -> None:
    seen, refused_share = evaluate_bounded(GOOGLENET_P4, 3.0 * GOOGLENET_P4.max_rate, greedy_table(32), 100)
    assert seen.stable
    assert (seen.throughput, refused_share) == pytest.approx((GOOGLENET_P4.max_rate, 2.0 / 3.0), rel=1e-6)


@subcases("load", [0.3, 0.9])
def test_a_bound_that_is_never_reached_changes_nothing(load: float) -> None:
    profile = Profile.linear(alpha_ms=0.3, tau0_ms=1.0, beta_mj=2.0, zeta0_mj=9.0, max_batch_size=8, cv=0.5)
    rate, table = load * profile.max_rate, limit_table(3, 8)
    free, bounded = evaluate(profile, rate, table), evaluate_bounded(profile, rate, table, 800).performance
    for name in ("response_time_ms", "power_w", "cost", "busy_share", "batch_size", "throughput"):
        assert getattr(bounded, name) == pytest.approx(getattr(free, name), rel=1e-9), name


def test_a_bound_below_what_the_table_waits_for_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_waiting=3: the table waits for 4 rows, which never come"):
        evaluate_bounded(GOOGLENET_P4, 100.0, static_table(4), 3)
