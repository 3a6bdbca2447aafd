"""bank.py: a bank says of each table what it will do."""

import numpy as np
import pytest
from reproduction.response import response_time

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.solve.bank import default_rates, solve, solve_bank, solve_rates
from weir.policy.solve.evaluation import evaluate
from weir.policy.solve.smdp import longest_of, solve_long

PRICES = Prices(1.0, 2.0, reference_rate=1500.0)


def test_two_dozen_rates_up_to_97_percent() -> None:
    rates = default_rates(1000.0)
    assert len(rates) == 24
    assert (np.diff(rates) > 0.0).all()
    assert rates[[0, -1]] == pytest.approx([1.0, 970.0])


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


def test_the_best_actions_of_a_rate_nearby_are_a_better_start_than_its_table() -> None:
    """The table has the full-batch rule where lines are not met: policy iteration spent most of its steps on these."""
    fit = GOOGLENET_P4.fit()
    profile = Profile.linear(
        alpha_ms=fit.alpha_ms, tau0_ms=fit.tau0_ms, beta_mj=fit.beta_mj, zeta0_mj=fit.zeta0_mj, max_batch_size=128
    )
    (low,) = solve_rates(profile, Prices(), np.array([0.33 * profile.max_rate]))
    starts = low.table, low.actions, None
    by_table, by_actions, alone = (
        solve_long(profile, 0.39 * profile.max_rate, Prices(), longest_of(profile), start) for start in starts
    )
    assert by_actions.improved.steps <= 8 < by_table.improved.steps
    assert np.array_equal(by_actions.table, alone.table)
