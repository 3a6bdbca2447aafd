"""make_bank: one entry for every crew and objective (objectives: test_search.py)."""

import numpy as np
import pytest
from benchmarks.policies.between import in_use
from benchmarks.policies.event_loop import served_by_several
from benchmarks.policies.random_models import Drawn, drawn
from tests.policy.compiler import needs_compiler

from weir.errors import SettingsError
from weir.policy.cost import GOOGLENET_P4, Prices
from weir.policy.solve.bank import solve_bank
from weir.policy.solve.tables import Table, limit_of, multi_worker_table
from weir.simulation.banks import MULTI_WORKER_LOADS, make_bank

P4 = GOOGLENET_P4


def test_one_worker_is_solved_exactly() -> None:
    profile, prices = P4.up_to(4), Prices(1.0, 3.0)
    made, solved = make_bank(profile, prices), solve_bank(profile, prices)
    np.testing.assert_array_equal(made.tables, solved.tables)
    assert made.prices == prices and made.workers == 1 and made.objective is None


@pytest.mark.nightly
def test_a_crews_bank_covers_all_its_workers_serve_and_is_stable_there() -> None:
    told: list[tuple[int, int]] = []
    bank = make_bank(P4, workers=3, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, len(bank.rates)) for done in range(1, len(bank.rates) + 1)]
    assert (bank.workers, bank.rates[-1]) == (3, pytest.approx(0.97 * 3 * P4.max_rate))
    assert (bank.tables[:, -1] == P4.best_batch_size).all()  # under a long line, full batches
    assert bank.limits()[0] == 1 and bank.limits().max() > 8 and not bank.max_waiting.any()
    assert bank.response_time_ms.min() > 1.35
    assert (np.diff(bank.power_w)[np.diff(bank.limits()) == 0] > 0).all()  # where more rows wait, it may fall


@needs_compiler
def test_between_the_rates_of_a_crew_no_table_costs_more_than_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weir.simulation.banks.MULTI_WORKER_LOADS", (0.03, 0.06))
    model, workers = drawn(100047), 16  # batches of up to 2 rows: waiting for the second is best above a load of 0.054
    bank = make_bank(model.profile, model.prices, workers=workers)
    for rate in np.geomspace(bank.rates[0], bank.rates[-1], 6).tolist():
        costs = [_cost(model, workers, rate, multi_worker_table(model.profile, limit)) for limit in (1, 2)]
        assert max(costs[limit_of(table) - 1] for table in in_use(bank, rate)) < 1.012 * min(costs)


def _cost(model: Drawn, workers: int, rate: float, table: Table) -> float:
    seen = served_by_several(model.profile, rate, [table] * workers, 20_000, parts=10, warm=1_000, share=0.0)
    return float(
        model.prices.latency_weight_at(rate) * seen.means.mean() + model.prices.energy_weight * seen.powers.mean()
    )


def test_energy_only_waits_for_the_best_batch_at_every_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.simulation.banks.MULTI_WORKER_LOADS", MULTI_WORKER_LOADS[::16])
    one, other = (make_bank(P4, Prices(0.0, 1.0), workers=2, seed=3) for _ in range(2))
    assert (one.limits() == 32).all()
    np.testing.assert_array_equal(one.p99_ms, other.p99_ms)  # the same seed makes the same bank


def test_latency_only_hardly_waits() -> None:
    assert make_bank(P4, Prices(1.0, 0.0)).limits().max() <= 3


def test_there_must_be_a_worker() -> None:
    with pytest.raises(SettingsError, match="workers=0: must be 1 or more"):
        make_bank(P4, workers=0)
