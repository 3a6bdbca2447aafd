"""continued.py: lines of any length, from the values of the short ones."""

import numpy as np
import pytest

from weir.policy.continued import Continued, Costs
from weir.policy.evaluation import evaluate, is_short
from weir.policy.long_lines import improve, rates_of, rates_of_table, solve_long
from weir.policy.prices import Prices
from weir.policy.profile import GOOGLENET_P4, Profile
from weir.policy.smdp import arrivals, arrivals_up_to
from weir.policy.tables import Table, greedy_table, limit_table, static_table

VARIED = Profile(GOOGLENET_P4.service_time_ms, GOOGLENET_P4.energy_mj, np.full(32, 0.5))
TABLES = [greedy_table(32), limit_table(20, 32), static_table(32)]


@pytest.mark.parametrize("profile", [GOOGLENET_P4, VARIED], ids=["constant", "varied"])
@pytest.mark.parametrize("load", [0.1, 0.6, 0.9])
@pytest.mark.parametrize("table", TABLES, ids=["greedy", "limit", "static"])
def test_rates_are_those_of_the_exact_law(profile: Profile, load: float, table: Table) -> None:
    rate = load * profile.max_rate
    assert is_short(profile, rate, table)
    exact, found = evaluate(profile, rate, table), rates_of_table(profile, rate / 1000.0, table)
    assert found.response_time_ms == pytest.approx(exact.response_time_ms, rel=1e-6)
    assert found.power_w == pytest.approx(exact.power_w, rel=1e-6)
    assert found.busy_share == pytest.approx(exact.busy_share, rel=1e-6)
    assert 1000.0 * found.rows == pytest.approx(rate, rel=1e-9)
    assert found.rows / found.batches == pytest.approx(exact.batch_size, rel=1e-6)


def test_far_fewer_states_than_the_line_has_are_enough() -> None:
    """At 95 % of the capacity one decision in twenty meets more than 96 rows."""
    rate = 0.95 * VARIED.max_rate
    exact = evaluate(VARIED, rate, greedy_table(32))
    model = Continued(VARIED, rate / 1000.0, 32, 96)
    visits = model.visits(model.start())
    once = Costs(np.ones(33), 0.0)
    total, above = model.rate_of(once, model.start(), visits)
    assert above / total > 0.05
    assert rates_of(model, model.start(), visits).response_time_ms == pytest.approx(exact.response_time_ms, rel=1e-5)


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
    rate = 0.8 * VARIED.max_rate
    short, long = (solve_long(VARIED, rate, Prices(), longest).improved.values for longest in (200, 260))
    above = np.arange(61)
    continued = short.constant + short.slope * above + short.bend * above**2
    np.testing.assert_allclose(continued, long.states[200:261], rtol=1e-5)


def test_few_arrivals_are_those_of_the_whole_law() -> None:
    early = arrivals_up_to(VARIED, 2.0, 30)
    np.testing.assert_allclose(early, arrivals(VARIED, 2.0)[:, :31], rtol=1e-12)
