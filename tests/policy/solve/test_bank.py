"""bank.py: a bank is a value, checked, and survives being a file."""

import io
import json
import pickle
from typing import Any

import numpy as np
import pytest
from benchmarks.policies.between import excess_of
from benchmarks.policies.event_loop import planned, served
from benchmarks.policies.random_models import MODERATE, drawn
from reproduction.response import response_time
from tests.late import scipy
from tests.policy.compiler import needs_compiler
from tests.rings import spread, subcases

from weir.errors import SettingsError
from weir.policy.cost import GOOGLENET_P4, LatencySLO, Prices, Profile
from weir.policy.online.rate import RateBands
from weir.policy.solve.bank import Bank, QuantileSampler, default_rates, solve, solve_bank, solve_rates
from weir.policy.solve.smdp import SteadyQueue, evaluate, longest_of, solve_long
from weir.policy.solve.tables import Table, greedy_table, limit_table, static_table

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=3)


def bank(**changes: Any) -> Bank:
    """Return a bank of three rates, with changes."""
    fields: dict[str, Any] = {
        "profile": PROFILE,
        "prices": Prices(1.0, 2.0, 100.0),
        "workers": 2,
        "objective": LatencySLO(0.02, 0.01, 0.001),
        "rates": [100.0, 400.0, 500.0],
        "tables": np.array([[0, 1, 2, 3], [0, 0, 2, 3], [0, 0, 0, 3]], dtype=np.uint16),
        "max_waiting": [0, 0, 20],
        "response_time_ms": [3.0, 4.0, 6.0],
        "p99_ms": [6.0, 8.0, 12.0],
        "power_w": [1.0, 1.5, 2.0],
    }
    return Bank(**fields | changes)


def test_limits_and_indices() -> None:
    made = bank()
    assert made.limits().tolist() == [1, 2, 3]
    assert [made.index_of(rate) for rate in (0.0, 150.0, 250.0, 440.0, 450.0, 9e9)] == [0, 0, 1, 1, 2, 2]
    alone = {"rates": [1.0], "tables": [[0, 1]], "max_waiting": [0]}
    assert bank(**alone, response_time_ms=[1], p99_ms=[1], power_w=[1]).index_of(5.0) == 0
    assert made.capacity == pytest.approx(2 * 600.0)
    with pytest.raises(ValueError, match="read-only"):
        made.tables[0, 1] = 0


@subcases("objective", [None, LatencySLO(0.02, 0.01, 0.001)])
def test_a_bank_survives_being_a_file_and_another_process(objective: LatencySLO | None) -> None:
    made = bank(objective=objective)
    for read in (Bank.from_bytes(made.to_bytes()), pickle.loads(pickle.dumps(made))):
        for name in ("rates", "tables", "max_waiting", "response_time_ms", "p99_ms", "power_w"):
            assert np.array_equal(getattr(read, name), getattr(made, name)), name
            assert getattr(read, name).dtype == getattr(made, name).dtype
        assert (read.prices, read.workers, read.objective) == (made.prices, 2, objective)
        assert read.profile.to_toml() == PROFILE.to_toml()
        assert not read.tables.flags.writeable and not read.profile.cv.flags.writeable


@subcases(
    ("changes", "says"),
    [
        ({"workers": 0}, "workers=0: must be 1 or more"),
        ({"rates": []}, "rates: must have one entry"),
        ({"power_w": [0.0]}, "power_w: must have one entry for each rate, shape (3,); has (1,)"),
        ({"rates": [100.0, 100.0, 200.0]}, "must be finite, greater than 0 and ascending"),
        ({"rates": [0.0, 100.0, 200.0]}, "must be finite, greater than 0 and ascending"),
        ({"rates": [1.0, 100.0, float("inf")]}, "must be finite, greater than 0 and ascending"),
        ({"max_waiting": [0, 0, -1]}, "max_waiting: -1 for rate 500: must be 0 or more"),
        ({"tables": [0, 1]}, "tables: must have shape [rates, states]; has (2,)"),
        ({"tables": [[0, 1], [0, 1], [0, 0]]}, "tables: the last entry, for 1 and more waiting, is 0"),
        ({"tables": [[0, 1], [0, 1]]}, "tables: must have one entry for each rate, shape (3, 2); has (2, 2)"),
        ({"tables": [[0, 1], [0, 1], [0, 9]]}, "tables: 9 rows for 1 waiting"),
    ],
)
def test_what_cannot_be_a_bank_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        bank(**changes)
    assert says in raised.value.message


def damaged(**changes: Any) -> bytes:
    """Return a bank's file with changes to what it says about itself."""
    with np.load(io.BytesIO(bank().to_bytes())) as arrays:
        held = dict(arrays)
    held["about"] = np.array(json.dumps(json.loads(str(held["about"])) | changes))
    buffer = io.BytesIO()
    np.savez(buffer, **held)
    return buffer.getvalue()


@subcases(
    ("data", "says"),
    [
        (b"", "must be a policy file made by `weir solve`"),
        (b"not a bank", "must be a policy file made by `weir solve`; it is not an .npz file"),
        (bank().to_bytes()[:-40], "must be a policy file made by `weir solve`"),
        (damaged(weir_bank=2), "weir_bank=2: must be 1"),
        (damaged(workers=0), "workers=0: must be 1 or more"),
        (damaged(prices=[1.0, -1.0, None]), "energy_weight=-1.0: must be a number, 0 or more"),
        (damaged(profile="weir_profile = 1"), "profile: must be a profile"),
        (damaged(objective=[-1.0, 0.01, 0.0]), "deadline=-1.0"),
        (damaged(objective=7), "must be a policy file made by `weir solve`"),
    ],
)
def test_a_file_that_is_no_bank_is_named(data: bytes, says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Bank.from_bytes(data, "x.policy.npz")
    assert raised.value.message.startswith("x.policy.npz: ")
    assert says in raised.value.message


# bank.py: the best table at one rate.


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


@subcases("load", [0.001, 0.1, 0.5, 0.9, 0.97])
def test_the_cost_is_that_of_the_untruncated_line(load: float) -> None:
    solution = solve(GOOGLENET_P4, load * GOOGLENET_P4.max_rate)
    assert solution.performance.cost == pytest.approx(solution.cost, rel=1e-7)
    assert 0.0 <= solution.error_bound < 1e-8 * solution.cost
    assert solution.iterations <= 10 and solution.seconds is None


def test_the_papers_example() -> None:
    """Table I: g = 66.1374, with the rounded coefficients that the paper prints 66.1338."""
    assert solve(GOOGLENET_P4, PAPER_RATE).cost == pytest.approx(66.1374, rel=1e-4)


@subcases("load", [0.05, 0.9])
def test_energy_only_makes_full_batches(load: float) -> None:
    solution = solve(GOOGLENET_P4, load * GOOGLENET_P4.max_rate, Prices(0.0, 2.0))
    assert solution.table.tolist() == static_table(32).tolist() + [32] * (len(solution.table) - 33)
    least = 2.0 * load * GOOGLENET_P4.max_rate / 1000.0 * GOOGLENET_P4.energy_mj[31] / 32
    assert solution.cost == pytest.approx(least, rel=1e-12)


@subcases("load", [0.5, 0.86, 0.95])
def test_energy_only_is_within_its_bound(load: float) -> None:
    """The price of time that the solver sets shows where 8 rows at a time are not quick enough: the bound must say so."""
    rate = load * EFFICIENT.max_rate
    solution = solve(EFFICIENT, rate, Prices(0.0, 1.0))
    if load == 0.5:  # the most efficient size is quick enough
        assert solution.limit == 8 and set(solution.table[8:16].tolist()) == {8}
    times, rows = [EFFICIENT.service_time_ms], [rate / 1000.0]
    program = scipy.optimize.linprog(EFFICIENT.energy_mj, A_ub=times, b_ub=[1.0], A_eq=[SIZES], b_eq=rows)
    assert program.fun is not None
    assert 0.0 <= solution.cost - program.fun <= solution.error_bound * (1.0 + 1e-6) + 1e-12
    assert solution.error_bound < 1e-4 * solution.cost


def test_the_best_size_may_be_smaller_than_the_largest() -> None:
    rate = 0.95 * PAST_ITS_BEST.max_rate
    solution = solve(PAST_ITS_BEST, rate)
    assert solution.performance.stable
    assert int(solution.table[-1]) == PAST_ITS_BEST.best_batch_size == 4
    assert solution.cost <= evaluate(PAST_ITS_BEST, rate, limit_table(1, 4)).cost * (1 + 1e-9)
    assert not evaluate(PAST_ITS_BEST, rate, static_table(8)).stable


@subcases(
    ("changes", "says"),
    [
        ({"rate": 2960.0}, "rate=2960: must be less than the capacity of 2958.8 rows per second (batches of 32)"),
        ({"rate": GOOGLENET_P4.max_rate * (1.0 - 1e-9)}, "must be less than the capacity of 2958.8 rows per second"),
        ({"rate": 1e-300}, "rate=1e-300: must be a number of rows per second, greater than 0, at least 1e-09"),
        ({"rate": 0.0}, "rate=0.0: must be a number of rows per second, greater than 0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"start": np.array([0, 0])}, "start: the last entry, for 1 and more waiting, is 0"),
    ],
)
def test_what_cannot_be_solved_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        solve(GOOGLENET_P4, **{"rate": 1000.0} | changes)
    assert says in raised.value.message


def test_a_result_that_may_be_far_from_the_best_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.policy.solve.bank.TOLERANCE", -1.0)  # as if rounding had ended it too soon
    with pytest.warns(RuntimeWarning, match=r"rate=1000: the table costs [\d.]+, which may be [\d.e-]+ above"):
        solve(GOOGLENET_P4, 1000.0)


# bank.py: a bank says of each table what it will do.


PRICES = Prices(1.0, 2.0, reference_rate=1500.0)


def test_two_dozen_rates_up_to_99_percent() -> None:
    rates = default_rates(1000.0)
    assert len(rates) == 25
    assert (np.diff(rates) > 0.0).all()
    assert rates[[0, -1]] == pytest.approx([1.0, 990.0])


@pytest.mark.no_cover
@needs_compiler
@pytest.mark.parametrize("number", spread([1, 7, 16]))
def test_no_rate_costs_a_quarter_of_a_percent_more_than_the_least(number: int) -> None:
    """Of straight, concave and stepped profiles, also where the hysteresis still holds a neighbour's table."""
    loads = np.append(np.geomspace(0.0011, 0.8, 20), (0.93, 0.985))
    model = drawn(number)
    bank = solve_bank(model.profile, model.prices)
    assert max(excess_of(model, bank, load)[0] for load in loads.tolist()) < 0.0025


def test_longer_queues_are_looked_at_where_batches_differ_there() -> None:
    """Of 57 rows with a coefficient of variation of 1.5, and dear energy: smaller batches pay up to 800 rows."""
    model = drawn(40)
    rate = 0.97 * model.profile.max_rate
    (found,) = solve_rates(model.profile, model.prices, np.array([rate]))
    least = solve_long(model.profile, rate, model.prices, 1600)
    assert longest_of(model.profile) < least.model.longest
    assert found.served.rates.cost(1.0, model.prices.energy_weight) <= (1.0 + 5e-4) * least.cost


@needs_compiler
def test_rows_wait_below_the_lowest_rate_where_energy_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.policy.solve.bank.default_rates", lambda capacity: default_rates(capacity)[:4])
    prices = Prices(1.0, 1e5)
    bank = solve_bank(GOOGLENET_P4, prices)
    band = RateBands(bank)[0]
    rate = 0.0005 * GOOGLENET_P4.max_rate
    table = bank.tables[bank.index_of(rate)]
    least, _ = planned(GOOGLENET_P4, rate, prices, 200)
    assert planned(GOOGLENET_P4, rate, prices, 200, table)[0] < 1.0025 * least
    assert planned(GOOGLENET_P4, rate, prices, 200, greedy_table(32))[0] > 1.2 * least
    assert band.limit == 1
    only = solve_bank(GOOGLENET_P4, Prices(0.0, 1.0))
    assert RateBands(only)[0].limit == 32, "where only energy counts, rows wait for the best batch at any rate"


def test_a_bank_predicts_what_evaluation_says() -> None:
    rates = np.array([0.05, 0.5, 0.9]) * GOOGLENET_P4.max_rate
    bank = solve_bank(GOOGLENET_P4, PRICES, rates=rates)
    assert (bank.workers, bank.objective, bank.prices) == (1, None, PRICES)
    for i, rate in enumerate(rates.tolist()):
        alone = solve(GOOGLENET_P4, rate, PRICES)
        assert bank.tables[i, : len(alone.table)].tolist() == alone.table.tolist()
        seen = evaluate(GOOGLENET_P4, rate, bank.tables[i], PRICES)
        assert bank.response_time_ms[i] == pytest.approx(seen.response_time_ms, rel=1e-12)
        assert bank.power_w[i] == pytest.approx(seen.power_w, rel=1e-12)
        p99 = response_time(GOOGLENET_P4, rate, bank.tables[i], cells=2048).quantile_ms(0.99)
        assert bank.p99_ms[i] == pytest.approx(p99, rel=0.02)


def test_a_rate_that_cannot_be_served_is_named() -> None:
    with pytest.raises(SettingsError, match="rate=3000: must be less than the capacity"):
        solve_bank(GOOGLENET_P4, rates=[100.0, 3000.0])


STEPS = np.arange(32.0) // 8.0
STEPPED = Profile(2.0 + 1.5 * STEPS, 30.0 + 12.0 * STEPS, np.full(32, 0.2))
FLAT = Profile.linear(alpha_ms=10.8, tau0_ms=0.5, max_batch_size=32)
SAME = Profile(np.ones(16), np.ones(16), np.zeros(16))
STEADY = Profile(0.1942 + 0.2884 * np.arange(1.0, 35.0), np.ones(34), np.zeros(34))


@pytest.mark.no_cover
@pytest.mark.parametrize(("profile", "load"), spread([(GOOGLENET_P4, 0.9), (STEPPED, 0.6), (FLAT, 0.1)]))
def test_sampled_percentiles_are_those_of_the_law(profile: Profile, load: float) -> None:
    rate = load * profile.max_rate
    found = solve_long(profile, rate, Prices(), 400).served
    computed = response_time(profile, rate, found.table, cells=1024)
    for share in (0.5, 0.9, 0.99):
        assert QuantileSampler(found).quantile_ms(share) == pytest.approx(computed.quantile_ms(share), rel=0.01)


@subcases(("load", "rows"), [(0.2, 1), (0.8, 3), (0.99, 1)])
def test_exponential_batches_of_one_size(load: float, rows: int) -> None:
    """M/M/1: exponential with rate μ - λ. SteadyQueue singly or by threes while fewer come than are served."""
    profile = Profile(np.full(rows, 2.0), np.ones(rows), np.ones(rows))
    found = SteadyQueue(profile, load * 0.5, greedy_table(1))
    assert QuantileSampler(found).quantile_ms(0.99) == pytest.approx(-np.log(0.01) * 2.0 / (1.0 - load), rel=0.02)


@needs_compiler
@pytest.mark.parametrize(
    ("profile", "rate", "table"),
    [
        (SAME, 990.0, np.array([0, *[1] * 16, 4], dtype=np.uint16)),  # most rows wait for many batches of one
        (SAME, 5.0, static_table(4)),
        (Profile(np.ones(16), np.ones(16), np.full(16, 0.1)), 900.0, np.array([0, *[1] * 9, 3], dtype=np.uint16)),
        (GOOGLENET_P4, 100.0, limit_table(5, 32)),
        (GOOGLENET_P4, 2100.0, np.array([*[0] * 8, *[8] * 15, 23], dtype=np.uint16)),
        # Long queues have a share of 1e-32.
        (STEADY, 251.0, np.array([0, 1, 2, 2, 2, 3, 3, 3, *range(8, 35)], dtype=np.uint16)),
    ],
)
def test_sampled_percentiles_are_those_of_the_event_loop(profile: Profile, rate: float, table: Table) -> None:
    p99 = QuantileSampler(SteadyQueue(profile, rate / 1000.0, table)).quantile_ms(0.99)
    assert p99 == pytest.approx(served(profile, rate, table, 2_000_000, parts=1, warm=100_000).quantiles[0], rel=0.02)


@pytest.mark.no_cover
@needs_compiler
@pytest.mark.parametrize("number", spread(MODERATE, 4))
def test_of_random_models_one_row_in_a_hundred_is_later(number: int) -> None:
    model = drawn(number)
    found = solve_long(model.profile, model.rate, model.prices, longest_of(model.profile)).served
    p99 = QuantileSampler(found).quantile_ms(0.99)
    seen = served(model.profile, model.rate, found.table, 50_000, warm=100_000, late=(0.98 * p99, 1.02 * p99))
    assert seen.later[1].low < 0.01 < seen.later[0].high
