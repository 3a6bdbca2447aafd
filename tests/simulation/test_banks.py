"""make_bank: one entry for every crew and objective (objectives: test_slo_search.py)."""

import numpy as np
import pytest
from benchmarks.policies.between import in_use
from benchmarks.policies.event_loop import served_by_several
from benchmarks.policies.random_models import Drawn, drawn
from tests.policy.compiler import needs_compiler

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.solve.bank import Bank, solve_bank
from weir.policy.solve.tables import Table, limit_of, multi_worker_table
from weir.simulation.banks import MULTI_WORKER_LOADS, make_bank
from weir.simulation.search import lowest

P4 = GOOGLENET_P4


def test_one_worker_is_solved_exactly() -> None:
    profile, prices = P4.up_to(4), Prices(1.0, 3.0)
    made, solved = make_bank(profile, prices), solve_bank(profile, prices)
    np.testing.assert_array_equal(made.tables, solved.tables)
    assert made.prices == prices and made.workers == 1 and made.objective is None


@pytest.fixture(scope="module")
def crew() -> tuple[Bank, list[tuple[int, int]]]:
    """The bank of three workers, and what was said of its progress."""
    told: list[tuple[int, int]] = []
    return make_bank(P4, workers=3, progress=lambda done, total: told.append((done, total))), told


@pytest.mark.nightly
def test_a_crews_bank_covers_all_its_workers_serve_and_is_stable_there(
    crew: tuple[Bank, list[tuple[int, int]]],
) -> None:
    bank, told = crew
    assert told == [(done, len(bank.rates)) for done in range(1, len(bank.rates) + 1)]
    assert bank.workers == 3
    assert bank.rates[-1] == pytest.approx(0.97 * 3 * P4.max_rate)
    assert (bank.tables[:, -1] == P4.best_batch_size).all()  # under a long line, full batches
    assert bank.limits()[0] == 1 and bank.limits().max() > 8
    assert not bank.max_waiting.any()
    assert bank.response_time_ms.min() > 1.35
    assert (np.diff(bank.power_w)[np.diff(bank.limits()) == 0] > 0).all()  # where more rows wait, it may fall


@needs_compiler
def test_between_the_rates_of_a_crew_no_table_in_use_costs_more_than_the_best_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weir.simulation.banks.MULTI_WORKER_LOADS", (0.03, 0.06))
    model, workers = drawn(100047), 16  # batches of up to 2 rows: waiting for the second is best above a load of 0.054
    bank = make_bank(model.profile, model.prices, workers=workers)
    for rate in np.geomspace(bank.rates[0], bank.rates[-1], 6).tolist():
        costs = [_cost(model, workers, rate, multi_worker_table(model.profile, limit)) for limit in (1, 2)]
        assert max(costs[limit_of(table) - 1] for table in in_use(bank, rate)) < 1.012 * min(costs)


@needs_compiler
def test_far_below_its_loads_a_crew_waits_for_as_few_rows_as_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.simulation.banks.MULTI_WORKER_LOADS", (0.001, 0.002))
    model, workers = Drawn(0, "linear", P4, Prices(1.0, 1e5), 0.0), 2  # energy is so dear that many rows gather
    bank = make_bank(model.profile, model.prices, workers=workers)
    assert bank.limits()[bank.index_of(0.001 * bank.capacity)] > 8
    for rate in (0.0005 * bank.capacity, 0.00003 * bank.capacity):
        costs = [_cost(model, workers, rate, multi_worker_table(P4, limit)) for limit in range(1, 33)]
        assert max(costs[limit_of(table) - 1] for table in in_use(bank, rate)) < 1.012 * min(costs)


def test_a_crew_gets_no_rate_between_two_with_the_same_table(crew: tuple[Bank, list[tuple[int, int]]]) -> None:
    bank, _ = crew
    own = [3 * P4.max_rate * load for load in MULTI_WORKER_LOADS]
    rates, limits = bank.rates.tolist(), bank.limits().tolist()
    added = [place for place, rate in enumerate(rates) if rate not in own]
    assert added and set(own) <= set(rates)
    assert all(len(set(limits[place - 1 : place + 2])) > 1 for place in added)


def _cost(model: Drawn, workers: int, rate: float, table: Table) -> float:
    seen = served_by_several(model.profile, rate, [table] * workers, 20_000, parts=10, warm=1_000, share=0.0)
    return float(
        model.prices.latency_weight_at(rate) * seen.means.mean() + model.prices.energy_weight * seen.powers.mean()
    )


def test_energy_only_waits_for_the_best_batch_at_every_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.simulation.banks.MULTI_WORKER_LOADS", MULTI_WORKER_LOADS[::8])
    one, other = (make_bank(P4, Prices(0.0, 1.0), workers=2, seed=3) for _ in range(2))
    assert (one.limits() == 32).all()
    np.testing.assert_array_equal(one.p99_ms, other.p99_ms)  # the same seed makes the same bank


def test_latency_only_hardly_waits() -> None:
    assert make_bank(P4, Prices(1.0, 0.0)).limits().max() <= 3


@pytest.mark.parametrize("start", [1, 7, 40])
def test_the_search_finds_the_valley_from_anywhere(start: int) -> None:
    assert lowest(lambda limit: abs(limit - 13.2), start, 32) == 13
    assert lowest(float, start, 32) == 1
    assert lowest(lambda limit: -float(limit), start, 32) == 32


def test_there_must_be_a_worker() -> None:
    with pytest.raises(SettingsError, match="workers=0: must be 1 or more"):
        make_bank(P4, workers=0)
