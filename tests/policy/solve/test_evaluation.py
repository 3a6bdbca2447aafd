"""evaluation.py: exact against closed forms of queueing theory."""

import numpy as np
import pytest

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.solve.evaluation import evaluate
from weir.policy.solve.tables import full_batch_table, greedy_table, limit_table, static_table


def single(cv: float = 0.0, offset: float = 0.0) -> Profile:
    """Return a model that takes 2 ms and 3 mJ for one row, and has no larger batches."""
    return Profile(np.array([2.0]), np.array([3.0]), np.array([cv]), latency_offset_ms=offset)


@pytest.mark.parametrize("cv", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("load", [0.01, 0.1, 0.5, 0.9, 0.99])
def test_single_rows_wait_as_pollaczek_and_khinchine_say(cv: float, load: float) -> None:
    seen = evaluate(single(cv, 0.25), load * 500.0, greedy_table(1), Prices(2.0, 3.0))
    wait = 2.0 * load * (1.0 + cv * cv) / 2.0 / (1.0 - load)
    assert seen.response_time_ms == pytest.approx(2.0 + wait + 0.25, rel=1e-10)
    assert seen.busy_share == pytest.approx(load, rel=1e-10)
    assert seen.power_w == pytest.approx(1.5 * load, rel=1e-10)
    assert seen.cost == pytest.approx(2.0 * seen.response_time_ms + 3.0 * seen.power_w)
    assert seen.throughput == pytest.approx(load * 500.0, rel=1e-10)
    assert seen.batch_size == pytest.approx(1.0)
    assert (seen.stable, seen.refused_share) == (True, 0.0)


@pytest.mark.parametrize("load", [0.1, 0.9, 1.0, 3.0])
@pytest.mark.parametrize("bound", [1, 4, 30])
def test_a_bound_on_those_who_wait_is_the_queue_m_m_1_k(load: float, bound: int) -> None:
    seen = evaluate(single(cv=1.0), load * 500.0, greedy_table(1), max_waiting=bound)
    shares = load ** np.arange(bound + 2.0)
    shares /= shares.sum()
    assert seen.refused_share == pytest.approx(shares[-1], rel=1e-10)
    assert seen.busy_share == pytest.approx(1.0 - shares[0], rel=1e-10)
    arrived = load * (1.0 - shares[-1]) / 2.0
    assert seen.response_time_ms == pytest.approx(shares @ np.arange(bound + 2.0) / arrived, rel=1e-10)


@pytest.mark.parametrize("load", [0.05, 0.2, 0.5, 0.8, 0.9])
def test_never_waiting_keeps_inoues_bound(load: float) -> None:
    """Inoue, Performance Evaluation 147 (2021): unbounded batches; how close the bound is was checked before."""
    alpha, tau0 = 0.3, 1.0
    rate = load / alpha
    profile = Profile.linear(alpha_ms=alpha, tau0_ms=tau0, max_batch_size=300)
    seen = evaluate(profile, 1000.0 * rate, greedy_table(300)).response_time_ms
    first = (alpha + tau0) / (2 * (1 - load)) * (1 + 2 * rate * tau0 + (1 - rate * tau0) / (1 + load))
    second = 3 * tau0 / (2 * (1 - load)) + alpha / 2 * (load + 2) / (1 - load**2)
    assert seen <= min(first, second) <= 1.07 * seen
    if load >= 0.8:
        assert min(first, second) == pytest.approx(seen, rel=1e-4)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_static_batches_at_low_rates_wait_for_the_rest(size: int) -> None:
    rate = 0.01 * 1000.0
    seen = evaluate(GOOGLENET_P4, rate, static_table(size))
    time = GOOGLENET_P4.service_time_ms[size - 1]
    assert seen.response_time_ms == pytest.approx(time + (size - 1) / 2 / rate * 1000.0, rel=1e-3)
    assert seen.power_w == pytest.approx(rate / 1000.0 * GOOGLENET_P4.energy_mj[size - 1] / size, rel=1e-12)
    assert seen.batch_size == pytest.approx(size)


def test_a_table_too_slow_for_the_rate_is_said_to_be() -> None:
    profile = GOOGLENET_P4
    seen = evaluate(profile, 0.9 * profile.max_rate, static_table(8))
    time = profile.service_time_ms[7]
    assert (seen.stable, seen.response_time_ms, seen.cost) == (False, np.inf, np.inf)
    assert seen.throughput == pytest.approx(8000.0 / time)
    assert (seen.power_w, seen.busy_share) == (profile.energy_mj[7] / time, 1.0)
    energy_only = evaluate(profile, 0.9 * profile.max_rate, static_table(8), Prices(0.0, 2.0))
    assert energy_only.cost == pytest.approx(2.0 * seen.power_w)


def test_at_capacity_a_line_has_no_law() -> None:
    """M/D/1 at load 1: its mean is infinite, though a computer may divide by what rounding leaves."""
    assert not evaluate(single(), 500.0, greedy_table(1)).stable
    assert evaluate(single(), 499.0, greedy_table(1)).stable


def test_a_bound_makes_any_table_stable() -> None:
    profile = GOOGLENET_P4
    seen = evaluate(profile, 3.0 * profile.max_rate, greedy_table(32), max_waiting=100)
    assert seen.stable
    assert seen.throughput == pytest.approx(profile.max_rate, rel=1e-6)
    assert seen.refused_share == pytest.approx(2.0 / 3.0, rel=1e-6)


@pytest.mark.parametrize("load", [0.3, 0.9])
def test_a_bound_that_is_never_reached_changes_nothing(load: float) -> None:
    profile = Profile.linear(alpha_ms=0.3, tau0_ms=1.0, beta_mj=2.0, zeta0_mj=9.0, max_batch_size=8, cv=0.5)
    rate, table = load * profile.max_rate, limit_table(3, 8)
    free, bounded = evaluate(profile, rate, table), evaluate(profile, rate, table, max_waiting=800)
    for name in ("response_time_ms", "power_w", "cost", "busy_share", "batch_size", "throughput"):
        assert getattr(bounded, name) == pytest.approx(getattr(free, name), rel=1e-9), name


def test_states_that_are_left_for_ever_do_not_count() -> None:
    table = np.array([0, 0, 0, 0, 2], dtype=np.uint16)  # two always stay
    profile = Profile.linear(alpha_ms=0.0, tau0_ms=1.0, max_batch_size=2)
    seen, moved = evaluate(profile, 100.0, table), evaluate(profile, 100.0, static_table(2))
    assert seen.power_w == pytest.approx(moved.power_w, rel=1e-12)
    assert seen.response_time_ms == pytest.approx(moved.response_time_ms + 2 / 0.1, rel=1e-12)


def test_close_to_capacity() -> None:
    seen = evaluate(GOOGLENET_P4, 0.999 * GOOGLENET_P4.max_rate, full_batch_table(GOOGLENET_P4))
    assert seen.throughput == pytest.approx(0.999 * GOOGLENET_P4.max_rate, rel=1e-9)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_named(rate: float) -> None:
    with pytest.raises(SettingsError, match=f"rate={rate!r}: must be a number of rows per second"):
        evaluate(single(), rate, greedy_table(1))


def test_a_table_that_cannot_be_is_named() -> None:
    with pytest.raises(SettingsError, match="table: 2 rows for 2 waiting; must be a whole number from 0 to 1"):
        evaluate(single(), 100.0, greedy_table(2))
    with pytest.raises(SettingsError, match="max_waiting=3: the table waits for 4 rows, which never come"):
        evaluate(GOOGLENET_P4, 100.0, static_table(4), max_waiting=3)
