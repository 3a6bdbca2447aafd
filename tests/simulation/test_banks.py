"""make_bank: one entry for every crew and objective (objectives: test_slo_search.py)."""

import numpy as np
import pytest

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.solve.bank import solve_bank
from weir.simulation.banks import MULTI_WORKER_LOADS, make_bank
from weir.simulation.search import lowest

P4 = GOOGLENET_P4


def test_one_worker_is_solved_exactly() -> None:
    profile, prices = P4.up_to(8), Prices(1.0, 3.0)
    made, solved = make_bank(profile, prices), solve_bank(profile, prices)
    np.testing.assert_array_equal(made.tables, solved.tables)
    assert made.prices == prices and made.workers == 1 and made.objective is None


def test_a_crews_bank_covers_all_its_workers_serve_and_is_stable_there() -> None:
    told: list[tuple[int, int]] = []
    bank = make_bank(P4, workers=3, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, len(MULTI_WORKER_LOADS)) for done in range(1, len(MULTI_WORKER_LOADS) + 1)]
    assert bank.workers == 3
    assert bank.rates[-1] == pytest.approx(0.97 * 3 * P4.max_rate)
    assert (bank.tables[:, -1] == P4.best_batch_size).all()  # under a long line, full batches
    assert bank.limits()[0] == 1 and bank.limits().max() > 8
    assert not bank.max_waiting.any()
    assert bank.response_time_ms.min() > 1.35 and (np.diff(bank.power_w) > 0).all()


def test_energy_only_waits_for_the_best_batch_at_every_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.simulation.banks.MULTI_WORKER_LOADS", MULTI_WORKER_LOADS[::4])
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
