"""smdp.py: lines of any length, exactly, from the values of the short ones."""

import numpy as np
import pytest
from tests.policy.whole_law import performance

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import GOOGLENET_P4, Floats, Profile
from weir.policy.solve.smdp import Continued, Costs, Served, arrivals, arrivals_up_to, improve, rates_of, solve_long
from weir.policy.solve.stationary import descent
from weir.policy.solve.tables import Table, greedy_table, limit_table, static_table

VARIED = Profile(GOOGLENET_P4.service_time_ms, GOOGLENET_P4.energy_mj, np.full(32, 0.5))
TABLES = [greedy_table(32), limit_table(20, 32), static_table(32)]


@pytest.mark.parametrize("profile", [GOOGLENET_P4, VARIED], ids=["constant", "varied"])
@pytest.mark.parametrize("load", [0.1, 0.6, 0.9])
@pytest.mark.parametrize("table", TABLES, ids=["greedy", "limit", "static"])
def test_rates_are_those_of_the_whole_law(profile: Profile, load: float, table: Table) -> None:
    rate = load * profile.max_rate
    exact, found = performance(profile, rate, table), Served(profile, rate / 1000.0, table).rates
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
