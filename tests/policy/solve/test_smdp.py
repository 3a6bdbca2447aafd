from itertools import pairwise

import numpy as np
import pytest
from reproduction.bounded import arrivals
from reproduction.truncated import solve_truncated
from tests.policy.whole_law import performance
from tests.rings import spread, subcases

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Floats, Profile
from weir.policy.solve.bank import solve, solve_bank
from weir.policy.solve.smdp import (
    LONGEST,
    Continued,
    Costs,
    SteadyQueue,
    arrivals_up_to,
    evaluate,
    improve,
    is_stable,
    longest_of,
    rates_of,
    solve_long,
)
from weir.policy.solve.stationary import descent
from weir.policy.solve.tables import Table, extended, full_batch_table, greedy_table, limit_table, static_table

# evaluation.py: exact against closed forms of queueing theory.


def single(cv: float = 0.0, offset: float = 0.0) -> Profile:
    """Return a model that takes 2 ms and 3 mJ for one row, and has no larger batches."""
    return Profile(np.array([2.0]), np.array([3.0]), np.array([cv]), latency_offset_ms=offset)


@pytest.mark.parametrize("cv", [0.0, 0.3, 1.0, 2.0])
@subcases("load", [0.01, 0.1, 0.5, 0.9, 0.99])
def test_single_rows_wait_as_pollaczek_and_khinchine_say(cv: float, load: float) -> None:
    seen = evaluate(single(cv, 0.25), load * 500.0, greedy_table(1), Prices(2.0, 3.0))
    wait = 2.0 * load * (1.0 + cv * cv) / 2.0 / (1.0 - load)
    assert seen.response_time_ms == pytest.approx(2.0 + wait + 0.25, rel=1e-10)
    assert seen.busy_share == pytest.approx(load, rel=1e-10)
    assert seen.power_w == pytest.approx(1.5 * load, rel=1e-10)
    assert seen.cost == pytest.approx(2.0 * seen.response_time_ms + 3.0 * seen.power_w)
    assert seen.throughput == pytest.approx(load * 500.0, rel=1e-10)
    assert seen.batch_size == pytest.approx(1.0)
    assert seen.stable


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


@subcases("size", [2, 8, 32])
def test_static_batches_at_low_rates_wait_for_the_rest(size: int) -> None:
    rate = 0.01 * 1000.0
    seen = evaluate(GOOGLENET_P4, rate, static_table(size))
    time = GOOGLENET_P4.service_time_ms[size - 1]
    assert seen.response_time_ms == pytest.approx(time + (size - 1) / 2 / rate * 1000.0, rel=1e-3)
    assert seen.power_w == pytest.approx(rate / 1000.0 * GOOGLENET_P4.energy_mj[size - 1] / size, rel=1e-12)
    assert seen.batch_size == pytest.approx(size)


def test_a_table_too_slow_for_the_rate_is_reported() -> None:
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


def test_states_that_are_left_for_ever_do_not_count() -> None:
    table = np.array([0, 0, 0, 0, 2], dtype=np.uint16)  # two always stay
    profile = Profile.linear(alpha_ms=0.0, tau0_ms=1.0, max_batch_size=2)
    seen, moved = evaluate(profile, 100.0, table), evaluate(profile, 100.0, static_table(2))
    assert seen.power_w == pytest.approx(moved.power_w, rel=1e-12)
    assert seen.response_time_ms == pytest.approx(moved.response_time_ms + 2 / 0.1, rel=1e-12)


def test_close_to_capacity() -> None:
    seen = evaluate(GOOGLENET_P4, 0.999 * GOOGLENET_P4.max_rate, full_batch_table(GOOGLENET_P4))
    assert seen.throughput == pytest.approx(0.999 * GOOGLENET_P4.max_rate, rel=1e-9)


@subcases("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_named(rate: float) -> None:
    with pytest.raises(SettingsError, match=f"rate={rate!r}: must be a number of rows per second"):
        evaluate(single(), rate, greedy_table(1))


def test_a_table_that_cannot_be_is_named() -> None:
    with pytest.raises(SettingsError, match="table: 2 rows for 2 waiting; must be a whole number from 0 to 1"):
        evaluate(single(), 100.0, greedy_table(2))


# smdp.py: lines of any length, exactly, from the values of the short ones.


VARIED = Profile(GOOGLENET_P4.service_time_ms, GOOGLENET_P4.energy_mj, np.full(32, 0.5))
TABLES = [greedy_table(32), limit_table(20, 32), static_table(32)]


@pytest.mark.parametrize("profile", [GOOGLENET_P4, VARIED], ids=["constant", "varied"])
@pytest.mark.parametrize("load", [0.1, 0.6, 0.9])
@pytest.mark.parametrize("table", TABLES, ids=["greedy", "limit", "static"])
def test_rates_are_those_of_the_whole_law(profile: Profile, load: float, table: Table) -> None:
    rate = load * profile.max_rate
    exact, found = performance(profile, rate, table), SteadyQueue(profile, rate / 1000.0, table).rates
    assert found.response_time_ms == pytest.approx(exact.response_time_ms, rel=1e-9)
    assert found.power_w == pytest.approx(exact.power_w, rel=1e-9)
    assert found.busy_share == pytest.approx(exact.busy_share, rel=1e-9)
    assert 1000.0 * found.rows == pytest.approx(rate, rel=1e-9)
    assert found.rows / found.batches == pytest.approx(exact.batch_size, rel=1e-9)


@pytest.mark.parametrize("longest", [32, 33, 96, 300])
def test_it_does_not_matter_where_the_continuation_begins(longest: int) -> None:
    """At 90 % of the capacity many decisions meet more than 32 rows."""
    rate = 0.9 * VARIED.max_rate
    exact = performance(VARIED, rate, greedy_table(32))
    assert exact.left_out < 1e-12
    model = Continued(VARIED, rate / 1000.0, 32, longest)
    visits = model.visits(model.start())
    assert longest > 33 or model.beyond_share(model.start()) > 0.05
    found = rates_of(model, model.chain(model.start()), model.start(), visits)
    assert found.response_time_ms == pytest.approx(exact.response_time_ms, rel=1e-9)


def test_the_values_solve_the_optimality_equation() -> None:
    found = solve_long(VARIED, 0.8 * VARIED.max_rate, Prices(), 150)
    model, values = found.model, found.improved.values
    costs = Costs(
        np.concatenate(([0.0], VARIED.energy_mj + 1.25 * VARIED.service_time_ms**2 / 2.0)), 1.0 / model.rate_per_ms
    )
    choices = model.choices(costs, values)
    np.testing.assert_allclose(choices.min(axis=0), values.states, atol=1e-8 * np.ptp(values.states))
    assert found.improved.error_bound < 1e-8 * values.cost
    again = improve(model, costs, found.improved.actions)
    assert again.steps == 1
    assert again.values.cost == pytest.approx(values.cost, rel=1e-12)


def test_the_continuation_is_what_longer_lines_are_worth() -> None:
    model = Continued(VARIED, 0.8 * VARIED.max_rate / 1000.0, 32, 40)
    longer = Continued(VARIED, model.rate_per_ms, 32, 300)
    costs = Costs(np.concatenate(([0.0], VARIED.energy_mj)), 1.0 / model.rate_per_ms)
    short, long = model.values(costs, model.start()), longer.values(costs, longer.start())
    assert short.cost == pytest.approx(long.cost, rel=1e-12)
    np.testing.assert_allclose(short.above[:200], long.states[41:241], rtol=1e-10)


@pytest.mark.parametrize("load", [0.01, 0.5, 0.75])
@pytest.mark.parametrize("cv", [0.0, 0.7, 2.0])
def test_the_way_down_is_that_of_the_walk(load: float, cv: float) -> None:
    """The law of the first length below, by following the walk for as long as it takes."""
    size = 5
    profile = Profile(np.ones(size), np.ones(size), np.full(size, cv))
    law, _ = descent(profile, load * size, size)
    most = 2000
    come = arrivals_up_to(profile, load * size, most)[size - 1]
    above, met = np.zeros(most), np.zeros(size)
    above[0] = 1.0
    for _ in range(3_000):
        moved: Floats = np.fft.irfft(np.fft.rfft(above, 4 * most) * np.fft.rfft(come, 4 * most), 4 * most)
        met += moved[:size]
        above = moved[size : size + most]
        if above.sum() < 1e-9:
            break
    np.testing.assert_allclose(law, met[::-1], atol=1e-7)


def test_few_arrivals_are_those_of_the_whole_law() -> None:
    early = arrivals_up_to(VARIED, 2.0, 30)
    np.testing.assert_allclose(early, arrivals(VARIED, 2.0)[:, :31], rtol=1e-12)


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


@pytest.mark.parametrize("profile", spread([FLAT, LINEAR, STEPPED, UNEVEN]))
@pytest.mark.parametrize(("cv", "load"), spread([(3.0, 0.97), (0.6, 0.95), (1.0, 0.9), (3.0, 0.3)], 2))
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
    assert extended(table, 301)[300] < 16
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
    found, greedy = (SteadyQueue(measured, rate / 1000.0, each).rates for each in (table, greedy_table(32)))
    exact = performance(measured, rate, table, 3000)
    assert exact.left_out < 1e-8
    assert found.response_time_ms == pytest.approx(exact.response_time_ms, rel=1e-6)
    assert found.response_time_ms > 1.01 * greedy.response_time_ms


def test_how_long_lines_are_looked_at() -> None:
    assert longest_of(LINEAR) == longest_of(varied(LINEAR, 3.0)) == 400
    assert longest_of(Profile.linear(alpha_ms=1.0, tau0_ms=1.0, max_batch_size=1000)) == 1144


@pytest.mark.nightly
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
