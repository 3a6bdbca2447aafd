"""bank.py: the best table at one rate."""

from itertools import count, product

import numpy as np
import pytest
from reproduction.truncated import solve_truncated
from scipy.optimize import linprog

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.solve import bank
from weir.policy.solve.bank import solve
from weir.policy.solve.evaluation import evaluate
from weir.policy.solve.tables import greedy_table, limit_table, static_table

PAPER_RATE = 0.9 * GOOGLENET_P4.max_rate
STEPPED = Profile(
    np.repeat([2.0, 3.2, 4.9, 6.0], 4), np.repeat([30.0, 35.0, 60.0, 65.0], 4), np.repeat([0.0, 0.1, 0.0, 0.3], 4)
)  # fmt: skip
SIZES = np.arange(1, 17, dtype=np.float64)
# The most energy-efficient size, 8, is neither the quickest nor the largest.
EFFICIENT = Profile(1 + 0.3 * SIZES, 5.0 + SIZES + np.maximum(0.0, SIZES - 8.0) ** 2, np.zeros(16))
# As on many CPUs: from some size on a larger batch is slower per row.
PAST_ITS_BEST = Profile(
    np.array([1.0, 1.4, 1.8, 2.2, 3.2, 4.4, 6.0, 8.0]), np.array([3.0, 4, 5, 6, 8, 10, 13, 17]), np.zeros(8)
)  # fmt: skip


@pytest.mark.parametrize("load", [0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_the_cost_is_that_of_the_untruncated_line(load: float) -> None:
    solution = solve(GOOGLENET_P4, load * GOOGLENET_P4.max_rate)
    assert solution.performance.cost == pytest.approx(solution.cost, rel=1e-7)
    assert 0.0 <= solution.error_bound < 1e-8 * solution.cost
    assert solution.seconds is None
    assert solution.iterations <= 10
    assert len(solution.actions) == len(solution.values) == solution.s_max + 2
    assert solution.values[0] == 0.0


def test_the_papers_example() -> None:
    """Table I: g = 66.1374, with the rounded coefficients that the paper prints 66.1338."""
    solution = solve(GOOGLENET_P4, PAPER_RATE)
    assert solution.cost == pytest.approx(66.1374, rel=1e-4)


@pytest.mark.parametrize("load", [0.05, 0.5, 0.9])
def test_energy_only_makes_full_batches(load: float) -> None:
    solution = solve(GOOGLENET_P4, load * GOOGLENET_P4.max_rate, Prices(0.0, 2.0))
    assert solution.table.tolist() == static_table(32).tolist() + [32] * (len(solution.table) - 33)
    least = 2.0 * load * GOOGLENET_P4.max_rate / 1000.0 * GOOGLENET_P4.energy_mj[31] / 32
    assert solution.cost == pytest.approx(least, rel=1e-12)


def test_energy_only_uses_the_most_efficient_size() -> None:
    rate = 0.5 * EFFICIENT.max_rate
    solution = solve(EFFICIENT, rate, Prices(0.0, 1.0))
    assert solution.limit == 8
    assert set(solution.table[8:16].tolist()) == {8}
    assert solution.performance.cost == pytest.approx(rate / 1000.0 * 13.0 / 8.0, rel=1e-6)


@pytest.mark.parametrize("load", [0.5, 0.86, 0.95])
def test_energy_only_is_within_its_bound(load: float) -> None:
    """The price of time that the solver sets shows where 8 rows at a time are not quick enough: the bound must say so."""
    rate = load * EFFICIENT.max_rate
    solution = solve(EFFICIENT, rate, Prices(0.0, 1.0))
    program = linprog(
        EFFICIENT.energy_mj, A_ub=[EFFICIENT.service_time_ms], b_ub=[1.0], A_eq=[SIZES], b_eq=[rate / 1000.0]
    )
    assert program.fun is not None
    assert 0.0 <= solution.cost - program.fun <= solution.error_bound * (1.0 + 1e-6) + 1e-12
    assert solution.error_bound < 1e-4 * solution.cost


def test_latency_only_hardly_waits() -> None:
    for load in (0.05, 0.5, 0.9):
        rate = load * GOOGLENET_P4.max_rate
        solution = solve(GOOGLENET_P4, rate, Prices(1.0, 0.0))
        assert solution.limit <= 2
        assert solution.cost <= evaluate(GOOGLENET_P4, rate, greedy_table(32), Prices(1.0, 0.0)).cost


def test_neither_time_nor_energy_costs_anything() -> None:
    free = Profile(np.array([1.0, 1.5]), np.zeros(2), np.zeros(2))
    solution = solve(free, 500.0, Prices(0.0, 1.0))
    assert solution.limit == 1
    assert solution.cost == pytest.approx(0.0, abs=1e-9)


def test_the_best_size_may_be_smaller_than_the_largest() -> None:
    rate = 0.95 * PAST_ITS_BEST.max_rate
    solution = solve(PAST_ITS_BEST, rate)
    assert solution.performance.stable
    assert int(solution.table[-1]) == PAST_ITS_BEST.best_batch_size == 4
    assert solution.cost <= evaluate(PAST_ITS_BEST, rate, limit_table(1, 4)).cost * (1 + 1e-9)
    assert not evaluate(PAST_ITS_BEST, rate, static_table(8)).stable


def test_a_start_changes_nothing_but_the_steps() -> None:
    rate = 0.5 * GOOGLENET_P4.max_rate
    cold = solve(GOOGLENET_P4, rate)
    warm = solve(GOOGLENET_P4, rate, start=solve(GOOGLENET_P4, 0.95 * rate).table)
    assert warm.table.tolist() == cold.table.tolist()
    assert warm.cost == pytest.approx(cold.cost, rel=1e-12)
    assert warm.iterations <= cold.iterations


def test_a_clock_measures_the_time() -> None:
    ticks = count(5)
    assert solve(GOOGLENET_P4, 1000.0, clock=lambda: float(next(ticks))).seconds == 1.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rate": 2960.0}, "rate=2960: must be less than the capacity of 2958.8 rows per second (batches of 32)"),
        ({"rate": 0.0}, "rate=0.0: must be a number of rows per second, greater than 0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"start": np.array([0, 0])}, "start: the last entry, for 1 and more waiting, is 0"),
    ],
)
def test_what_cannot_be_solved_is_named(changes: dict[str, object], says: str) -> None:
    arguments: dict[str, object] = {"rate": 1000.0} | changes
    with pytest.raises(SettingsError) as raised:
        solve(GOOGLENET_P4, **arguments)  # type: ignore[arg-type]  # whatever a user may give
    assert says in raised.value.message


def test_a_result_that_may_be_far_from_the_best_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank, "TOLERANCE", -1.0)  # as if rounding had ended it too soon
    with pytest.warns(
        RuntimeWarning, match=r"rate=1000: the table costs [\d.]+, which may be [\d.e-]+ above the least"
    ):
        solve(GOOGLENET_P4, 1000.0)


def test_the_papers_model_grown_long_enough_has_the_same_solution() -> None:
    for profile, load in product((GOOGLENET_P4, STEPPED, PAST_ITS_BEST), (0.2, 0.8)):
        rate, prices = load * profile.max_rate, Prices(1.0, 0.5)
        exact, truncated = solve(profile, rate, prices), solve_truncated(profile, rate, prices)
        assert exact.cost == pytest.approx(truncated.cost, rel=1e-8)
        assert exact.limit == truncated.limit
