"""smdp.py: the best table in bounded work, however long the lines and however varied the service times."""

from itertools import pairwise

import numpy as np
import pytest
from reproduction.truncated import solve_truncated
from tests.policy.whole_law import performance

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.solve.bank import solve, solve_bank
from weir.policy.solve.evaluation import evaluate, is_stable
from weir.policy.solve.smdp import LONGEST, Served, longest_of, solve_long
from weir.policy.solve.tables import entry, greedy_table

SIZES = np.arange(1.0, 33.0)
STEPS = (SIZES - 1.0) // 8.0
LINEAR = GOOGLENET_P4
STEPPED = Profile(2.0 + 1.5 * STEPS, 30.0 + 12.0 * STEPS, np.zeros(32))
FLAT = Profile.linear(alpha_ms=10.8, tau0_ms=0.5, max_batch_size=32)  # every size is nearly as quick per row
UNEVEN = Profile(
    (0.3 * SIZES + 1.0) * np.random.default_rng(1).uniform(0.8, 1.25, 32), 20.0 * SIZES + 20.0, np.zeros(32)
)


def varied(profile: Profile, cv: float) -> Profile:
    """Return `profile` with that coefficient of variation."""
    return Profile(profile.service_time_ms, profile.energy_mj, np.full(profile.max_batch_size, cv))


@pytest.mark.parametrize("profile", [LINEAR, STEPPED, FLAT], ids=["linear", "stepped", "flat"])
@pytest.mark.parametrize(("cv", "loads"), [(0.0, (0.1, 0.5, 0.95)), (0.5, (0.1, 0.7)), (1.0, (0.1, 0.4))])
def test_tables_cost_what_those_of_the_papers_model_cost(profile: Profile, cv: float, loads: tuple[float, ...]) -> None:
    measured = varied(profile, cv)
    for load in loads:
        rate = load * measured.max_rate
        whole = solve_truncated(measured, rate, s_max=700)
        assert whole.tail_share <= 1e-7
        assert whole.overflow_cost > 0.0
        found = solve_long(measured, rate, Prices(), 160)
        assert found.cost == pytest.approx(whole.cost, rel=1e-6)
        assert evaluate(measured, rate, found.table).cost == pytest.approx(found.cost, rel=1e-12)


@pytest.mark.parametrize("profile", [LINEAR, STEPPED, FLAT, UNEVEN], ids=["linear", "stepped", "flat", "uneven"])
@pytest.mark.parametrize(("cv", "load"), [(0.6, 0.95), (1.0, 0.9), (3.0, 0.3), (3.0, 0.97)])
def test_however_varied_it_is_solved_and_no_worse_than_greedy(profile: Profile, cv: float, load: float) -> None:
    measured = varied(profile, cv)
    rate = load * measured.max_rate
    solution = solve(measured, rate)
    assert solution.s_max <= 1000
    greedy = greedy_table(measured.best_batch_size)
    assert solution.performance.cost <= evaluate(measured, rate, greedy).cost * (1.0 + 1e-8)
    # Only where lines of 2000 rows are common is a table as good as it can be at its rate, and no more.
    assert is_stable(measured, 0.999999 * measured.max_rate, solution.table) or (cv, load) == (3.0, 0.97)
    assert len(solution.actions) == len(solution.values) == solution.s_max + 2


def test_a_solution_says_how_it_was_bounded() -> None:
    measured = varied(LINEAR, 2.5)
    rate = 0.9 * measured.max_rate
    solution = solve(measured, rate, clock=lambda: 1.0)
    assert (solution.s_max, solution.seconds) == (LONGEST, 0.0)
    assert np.all(np.diff(solution.values[-5:]) > 0.0)
    assert solve(measured, rate, Prices(0.0, 2.0)).cost == pytest.approx(
        2.0 * rate / 1000.0 * measured.energy_mj[31] / 32, rel=1e-6
    )
    truncated = solve_truncated(measured, rate, overflow_cost=1000.0)
    assert (truncated.s_max, truncated.overflow_cost) == (1000, 1000.0)


def test_where_sizes_are_alike_small_batches_are_best_for_long_lines_too() -> None:
    """They hold up no one behind them; what they lack in speed hardly matters before the line is very long."""
    measured = varied(FLAT, 1.0)
    rate = 0.9 * measured.max_rate
    found = solve_long(measured, rate, Prices(), 160)
    table = found.table
    assert entry(table, 300) < 16
    assert 300 < len(table) <= 2049
    full = evaluate(measured, rate, np.concatenate((table[:65], greedy_table(32)[-1:])).astype(np.uint16))
    assert found.cost < 0.9 * full.cost
    assert found.cost == pytest.approx(evaluate(measured, rate, table).cost, rel=1e-12)


@pytest.mark.parametrize(("rows", "weight", "rate"), [(251, 15.0, 300.0), (64, 50.0, 200.0)])
def test_no_step_on_the_way_has_lines_that_stay_long(rows: int, weight: float, rate: float) -> None:
    """Energies that make many rows dear: a step of policy iteration had long lines wait, then serve few of their rows, so that
    they never became short, and its equations had no solution."""
    sizes = np.arange(1.0, rows + 1.0)
    profile = Profile(0.25 + 0.05 * sizes**1.4, 1450.0 + 160.0 * sizes**1.325, np.zeros(rows))
    found = solve_long(profile, rate, Prices(1.0, weight), longest_of(profile))
    assert found.error_bound <= 1e-6 * found.cost
    assert found.cost == pytest.approx(solve(profile, rate, Prices(1.0, weight)).cost, rel=1e-6)


def test_every_entry_of_a_long_table_counts() -> None:
    measured = varied(LINEAR, 1.0)
    rate = 0.88 * measured.max_rate
    table = np.minimum(np.arange(1101), 32).astype(np.uint16)
    table[700:1100] = 20  # too slow, but for what is beyond
    found, greedy = (Served(measured, rate / 1000.0, each).rates for each in (table, greedy_table(32)))
    exact = performance(measured, rate, table, 3000)
    assert exact.left_out < 1e-8
    assert found.response_time_ms == pytest.approx(exact.response_time_ms, rel=1e-6)
    assert found.response_time_ms > 1.01 * greedy.response_time_ms


def test_how_long_lines_are_looked_at() -> None:
    assert longest_of(LINEAR) == longest_of(varied(LINEAR, 3.0)) == 400
    assert longest_of(Profile.linear(alpha_ms=1.0, tau0_ms=1.0, max_batch_size=1000)) == 1144


def test_a_bank_of_varied_service_times() -> None:
    measured = varied(FLAT, 1.5)
    loads = np.array([0.01, 0.3, 0.6, 0.9, 0.97])
    bank = solve_bank(measured, rates=loads * measured.max_rate)
    for low, high in pairwise(range(len(loads))):
        assert bank.response_time_ms[low] < bank.response_time_ms[high]
        assert bank.p99_ms[low] < bank.p99_ms[high]
    assert np.all(bank.p99_ms > 2.0 * bank.response_time_ms)
    steady = evaluate(measured, bank.rates[3], bank.tables[3])
    assert bank.response_time_ms[3] == pytest.approx(steady.response_time_ms, rel=1e-3)
    assert bank.power_w[3] == pytest.approx(steady.power_w, rel=1e-3)
