"""Trials: one line for every rule, stretched to any rate."""

import pytest
from reproduction.response import response_time

from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.solve.evaluation import evaluate
from weir.policy.solve.tables import limit_table
from weir.simulation.rounds import Rule
from weir.simulation.search import Trials

P4 = GOOGLENET_P4


def test_agrees_with_the_exact_model() -> None:
    trials, rate = Trials(P4, requests=30_000), 0.6 * P4.max_rate
    seen = trials(rate, Rule(limit_table(8, 32).tolist()))
    exact = evaluate(P4, rate, limit_table(8, 32))
    assert seen.response_time_ms == pytest.approx(exact.response_time_ms, rel=0.01)
    assert seen.power_w == pytest.approx(exact.power_w, rel=0.01)
    assert seen.batch_size == pytest.approx(exact.batch_size, rel=0.01)


def test_late_shares_are_those_of_the_exact_law() -> None:
    rate, table = 0.5 * P4.max_rate, limit_table(16, 32)
    seen = Trials(P4, requests=40_000, deadline=0.02)(rate, Rule(table.tolist()))
    exact = response_time(P4, rate, table).beyond(20.0)
    assert 0.0 < seen.late_error < 0.002
    assert seen.late_share == pytest.approx(exact, abs=3.0 * seen.late_error)


def test_a_trial_depends_on_nothing_but_what_is_asked() -> None:
    trials, rule = Trials(P4, requests=2_000), Rule(limit_table(8, 32).tolist())
    first = trials(500.0, rule)
    trials(900.0, rule)
    assert trials(500.0, rule) == first
    assert trials.played == 3
    assert Trials(P4, requests=2_000, seed=2)(500.0, rule) != first
