"""Whatever the model: no rule is better than what is solved, units do not matter, no table is unstable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.policy.bank import Bank, solve_bank
from weir.policy.evaluation import evaluate, is_stable
from weir.policy.prices import Prices
from weir.policy.profile import Profile
from weir.policy.solver import solve
from weir.policy.tables import full_batch_table, greedy_table, limit_table, static_table

FEW = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Profiles of 1 to 8 sizes: linear, stepped, noisy, with larger sizes slower or not, and service times that vary."""
    size = draw(st.integers(1, 8))
    grow = st.lists(st.floats(0.0, 2.0), min_size=size, max_size=size)
    times = draw(st.floats(0.3, 3.0)) + np.cumsum(draw(grow))
    energies = draw(st.floats(0.1, 30.0)) + np.cumsum(10.0 * np.array(draw(grow)))
    cv = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5]))
    return Profile(np.asarray(times, dtype=np.float64), np.asarray(energies, dtype=np.float64), np.full(size, cv))


loads = st.floats(0.01, 0.95)
weights = st.floats(0.01, 20.0)


@FEW
@given(profiles(), loads, weights)
def test_no_rule_is_better(profile: Profile, load: float, weight: float) -> None:
    rate, prices, largest = load * profile.max_rate, Prices(1.0, weight), profile.max_batch_size
    solved = solve(profile, rate, prices)
    rules = [greedy_table(largest), full_batch_table(profile)]
    for size in range(1, largest + 1):
        rules += [static_table(size), limit_table(size, largest)]
    best = min(evaluate(profile, rate, rule, prices).cost for rule in rules)
    assert solved.performance.cost <= best * (1.0 + 1e-6)
    assert solved.cost <= best * (1.0 + 1e-6)


@FEW
@given(profiles(), loads, weights)
def test_units_do_not_matter(profile: Profile, load: float, weight: float) -> None:
    """Powers of 2, so that rounding is the same too."""
    rate = load * profile.max_rate
    solved = solve(profile, rate, Prices(1.0, weight))
    slower = solve(profile.scaled(time=16.0), rate / 16.0, Prices(1.0 / 16.0, 16.0 * weight))
    dearer = solve(profile.scaled(energy=8.0), rate, Prices(1.0, weight / 8.0))
    for other in (slower, dearer):
        assert other.table.tolist() == solved.table.tolist()
        assert other.cost == pytest.approx(solved.cost, rel=1e-12)
        assert other.performance.cost == pytest.approx(solved.performance.cost, rel=1e-9)
    assert slower.performance.response_time_ms == pytest.approx(16.0 * solved.performance.response_time_ms, rel=1e-9)
    assert dearer.performance.power_w == pytest.approx(8.0 * solved.performance.power_w, rel=1e-9)


@FEW
@given(profiles(), loads, weights)
def test_little(profile: Profile, load: float, weight: float) -> None:
    """What is served is what arrives, and no row is answered sooner than the quickest batch."""
    rate = load * profile.max_rate
    seen = solve(profile, rate, Prices(1.0, weight)).performance
    assert seen.throughput == pytest.approx(rate, rel=1e-9)
    assert seen.response_time_ms >= profile.service_time_ms.min() * (1.0 - 1e-12)
    assert 1.0 - 1e-12 <= seen.batch_size <= profile.max_batch_size
    assert load * (1.0 - 1e-9) <= seen.busy_share <= 1.0


@settings(max_examples=6, deadline=None, derandomize=True)
@given(profiles(), weights)
def test_every_table_of_a_bank_is_stable_at_every_rate(profile: Profile, weight: float) -> None:
    bank = solve_bank(profile, Prices(1.0, weight), rates=np.array([0.01, 0.3, 0.97]) * profile.max_rate)
    assert isinstance(bank, Bank)
    for table in bank.tables:
        assert is_stable(profile, 0.999999 * profile.max_rate, table)
        assert int(table[-1]) == profile.best_batch_size
