import numpy as np
import pytest
from reproduction.truncated import solve_truncated
from tests.rings import spread, subcases

from weir.errors import SettingsError
from weir.policy.cost import GOOGLENET_P4, Prices, Profile
from weir.policy.solve.bank import solve
from weir.policy.solve.smdp import (
    LONGEST,
    evaluate,
    is_stable,
    longest_of,
    solve_long,
)
from weir.policy.solve.tables import full_batch_table, greedy_table, static_table

# evaluation.py: exact against closed forms of queueing theory.


def single(cv: float = 0.0, offset: float = 0.0) -> Profile:
    """Return a model that takes 2 ms and 3 mJ for one row, and has no larger batches."""
    return Profile(np.array([2.0]), np.array([3.0]), np.array([cv]), latency_offset_ms=offset)


@subcases(("cv", "load"), [(0.0, 0.99), (0.3, 0.1), (1.0, 0.5), (2.0, 0.01), (2.0, 0.9)])
def test_single_rows_wait_as_pollaczek_and_khinchine_say(cv: float, load: float) -> None:
    seen = evaluate(single(cv, 0.25), load * 500.0, greedy_table(1), Prices(2.0, 3.0))
    wait = 2.0 * load * (1.0 + cv * cv) / 2.0 / (1.0 - load)
    assert seen.response_time_ms == pytest.approx(2.0 + wait + 0.25, rel=1e-10)
    assert (seen.busy_share, seen.power_w, seen.batch_size) == pytest.approx((load, 1.5 * load, 1.0), rel=1e-10)
    assert seen.cost == pytest.approx(2.0 * seen.response_time_ms + 3.0 * seen.power_w)
    assert seen.stable and seen.throughput == pytest.approx(load * 500.0, rel=1e-10)


def test_a_table_too_slow_for_the_rate_is_reported() -> None:
    rate, time = 0.9 * GOOGLENET_P4.max_rate, GOOGLENET_P4.service_time_ms[7]
    seen = evaluate(GOOGLENET_P4, rate, static_table(8))
    assert (seen.stable, seen.response_time_ms, seen.cost) == (False, np.inf, np.inf)
    assert seen.throughput == pytest.approx(8000.0 / time)
    assert (seen.power_w, seen.busy_share) == (GOOGLENET_P4.energy_mj[7] / time, 1.0)
    assert evaluate(GOOGLENET_P4, rate, static_table(8), Prices(0.0, 2.0)).cost == pytest.approx(2.0 * seen.power_w)


def test_at_capacity_a_line_has_no_law() -> None:
    """M/D/1 at load 1: its mean is infinite, though a computer may divide by what rounding leaves."""
    assert not evaluate(single(), 500.0, greedy_table(1)).stable
    assert evaluate(single(), 499.0, greedy_table(1)).stable
    rate = 0.999 * GOOGLENET_P4.max_rate
    assert evaluate(GOOGLENET_P4, rate, full_batch_table(GOOGLENET_P4)).throughput == pytest.approx(rate, rel=1e-9)


def test_states_that_are_left_for_ever_do_not_count() -> None:
    table = np.array([0, 0, 0, 0, 2], dtype=np.uint16)  # two always stay
    profile = Profile.linear(alpha_ms=0.0, tau0_ms=1.0, max_batch_size=2)
    seen, moved = evaluate(profile, 100.0, table), evaluate(profile, 100.0, static_table(2))
    assert seen.power_w == pytest.approx(moved.power_w, rel=1e-12)
    assert seen.response_time_ms == pytest.approx(moved.response_time_ms + 2 / 0.1, rel=1e-12)


@subcases("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_named(rate: float) -> None:
    with pytest.raises(SettingsError, match=f"rate={rate!r}: must be a number of rows per second"):
        evaluate(single(), rate, greedy_table(1))


def test_a_table_that_cannot_be_is_named() -> None:
    with pytest.raises(SettingsError, match="table: 2 rows for 2 waiting; must be a whole number from 0 to 1"):
        evaluate(single(), 100.0, greedy_table(2))


# smdp.py: lines of any length, exactly, from the values of the short ones.


VARIED = Profile(GOOGLENET_P4.service_time_ms, GOOGLENET_P4.energy_mj, np.full(32, 0.5))


# smdp.py: the best table in bounded work, however long the lines and however varied the service times.


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


@subcases(("profile", "cv", "loads"), [(LINEAR, 0.0, (0.1, 0.95)), (STEPPED, 0.5, (0.7,)), (FLAT, 1.0, (0.4,))])
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


@pytest.mark.parametrize("profile", spread([FLAT, LINEAR, STEPPED, UNEVEN]))
@pytest.mark.parametrize(("cv", "load"), spread([(0.6, 0.97), (3.0, 0.97), (3.0, 0.3), (1.0, 0.9)], 2))
def test_however_varied_it_is_solved_and_no_worse_than_greedy(profile: Profile, cv: float, load: float) -> None:
    measured = varied(profile, cv)
    rate = load * measured.max_rate
    solution = solve(measured, rate)
    assert solution.s_max <= 2048
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
    least = 2.0 * rate / 1000.0 * measured.energy_mj[31] / 32
    assert solve(measured, rate, Prices(0.0, 2.0)).cost == pytest.approx(least, rel=1e-6)


@subcases(("rows", "weight", "rate"), [(251, 15.0, 300.0), (64, 50.0, 200.0)])
def test_no_step_on_the_way_has_lines_that_stay_long(rows: int, weight: float, rate: float) -> None:
    """Energies that make many rows dear: a step of policy iteration had long lines wait, then serve few of their rows, so that
    they never became short, and its equations had no solution."""
    sizes = np.arange(1.0, rows + 1.0)
    profile = Profile(0.25 + 0.05 * sizes**1.4, 1450.0 + 160.0 * sizes**1.325, np.zeros(rows))
    found = solve_long(profile, rate, Prices(1.0, weight), longest_of(profile))
    assert found.error_bound <= 1e-6 * found.cost
    assert found.cost == pytest.approx(solve(profile, rate, Prices(1.0, weight)).cost, rel=1e-6)
