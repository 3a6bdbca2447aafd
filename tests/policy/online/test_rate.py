"""rate.py: which table of a bank is used at which rate."""

from math import inf, sqrt

import numpy as np
import pytest
from tests.late import scipy
from tests.policy.banks import LIMITS, PROFILE, bank, promised
from tests.rings import subcases

from weir.policy.cost import LatencySLO, Profile
from weir.policy.online.admission import admission
from weir.policy.online.rate import SILENCE, UNLIKELY, RateBand, RateBands, boundaries_of, filling_of
from weir.policy.solve.bank import Bank
from weir.policy.solve.tables import full_batch_table, greedy_table, limit_table, stacked

# stages.py: a bank made ready to be looked up.


def every(made: Bank) -> list[RateBand]:
    """Return all stages of a bank."""
    stages = RateBands(made)
    return [stages[number] for number in range(len(stages))]


def test_the_boundaries_are_halfway_by_ratio_and_as_far_beyond_the_ends() -> None:
    assert boundaries_of(bank()) == pytest.approx((100 / sqrt(2), 100 * sqrt(2), 200 * sqrt(2), 400 * sqrt(2)))
    one = {"rates": [100.0], "tables": limit_table(4, 8)[None], "max_waiting": [0]}
    assert boundaries_of(bank(**one, response_time_ms=[1.0], p99_ms=[1.0], power_w=[1.0])) == (50.0, 200.0)


def test_there_is_a_stage_below_and_one_above() -> None:
    stages = every(bank(max_waiting=[0, 0, 30]))
    assert [stage.limit for stage in stages] == [LIMITS[0], *LIMITS, 1]
    assert [stage.entry for stage in stages] == [0, 0, 1, 2, 2]
    assert [stage.max_waiting for stage in stages] == [None, None, None, 30, 30]
    assert stages[0].decisions == stages[1].decisions, "the lowest table holds below its rate"
    full = full_batch_table(PROFILE).tolist()
    assert [None if each is None else each.rows for each in stages[4].decisions] == [None, *full[1:]]
    assert (stages[0].falls, stages[4].rises) == (0.0, inf)


def test_the_stage_for_a_rate_is_the_nearest() -> None:
    made = bank()
    stages = RateBands(made)
    for rate in np.geomspace(75.0, 560.0, 100).tolist():
        assert stages.at(rate).entry == made.index_of(rate)
    assert [stages.at(rate).number for rate in (1e-9, 70.0, 71.0, 565.0, 566.0, 1e9)] == [0, 0, 1, 3, 4, 4]


def test_a_stage_is_left_only_when_its_boundary_is_well_passed() -> None:
    stages = RateBands(bank())
    second = stages[2]
    low, high = stages.boundaries[1], stages.boundaries[2]
    for rate, number in (
        (low, 2), (0.951 * low, 2), (0.949 * low, 1), (high, 2), (1.049 * high, 2), (1.051 * high, 3), (1.0, 0), (1e4, 4),
    ):  # fmt: skip
        assert stages.next_to(second, rate).number == number
        assert stages.next_to(stages.next_to(second, rate), rate).number == number


def test_only_a_promise_bounds_waits_by_age() -> None:
    assert {(stage.allowance, stage.latest) for stage in every(bank())} == {(None, None)}
    for stage in every(promised()):
        assert stage.latest is not None
        assert stage.latest == pytest.approx([0.035, *(0.036 - rows / 1000.0 for rows in range(1, 9))])
        assert stage.allowance == pytest.approx([latest - 0.001 for latest in stage.latest])


@subcases("limit", [2, 3, 8, 32])
def test_the_line_fills_later_than_that_only_rarely(limit: int) -> None:
    bound = filling_of(limit_table(limit, 32))
    late = float(scipy.stats.gamma.sf(bound, limit - 1))
    assert 0.0 < late <= UNLIKELY
    assert bound < limit + 6.0 * sqrt(limit) + 10.0  # and is not far from what it must be
    assert filling_of(limit_table(1, 8)) == SILENCE  # a table that never waits


def test_where_refusals_count_each_rate_has_its_own_bound_on_the_line() -> None:
    """The last stage, for more than can be served, refuses as the objective's admission says; so does a rate with its bound."""
    objective = LatencySLO(0.04, refusal_price=1.0)
    strict = admission(PROFILE, objective)
    assert strict is not None
    stages = RateBands(bank(objective=objective, max_waiting=[50, strict.max_waiting, 60]))
    gates = [stage.gate for stage in every(stages.bank)]
    assert gates[1] is None and gates[3] is None
    assert gates[2] == strict.gate_at(float(stages.bank.rates[1]))
    assert gates[4] == strict.overload
    assert [stage.max_waiting for stage in every(stages.bank)][1:4] == [50, strict.max_waiting, 60]


def test_where_refusals_count_and_nobody_waits_or_is_refused_it_is_greedy() -> None:
    """Below the lowest rate too, and while the rate is unknown; a limit still has its guards."""
    objective = LatencySLO(0.04, refusal_price=1.0)
    tables = stacked([greedy_table(8), limit_table(3, 8), limit_table(4, 8)])
    stages = RateBands(bank(objective=objective, tables=tables, max_waiting=[0, 0, 30]))
    for stage in (stages[0], stages[1]):
        assert (stage.allowance, stage.latest, stage.max_waiting, stage.largest) == (None, None, None, 8)
        assert stage.decisions == stages[0].decisions
    assert stages[2].latest is not None and stages[2].max_waiting is None
    assert stages[2].gate is None
    assert stages.unknown() is stages[0]
    assert RateBands(promised()).unknown() is not None and RateBands(bank()).unknown() is None


def test_where_refusals_count_overload_is_served_in_full_batches() -> None:
    """The batch and line that have everybody in time for certain would serve far fewer rows."""
    varied = Profile(PROFILE.service_time_ms, PROFILE.energy_mj, np.full(8, 0.3))
    tables = stacked([greedy_table(8)] * 3)
    changes = {"profile": varied, "tables": tables}
    objective = LatencySLO(0.04, slack=0.02, refusal_price=1.0)
    last = RateBands(bank(objective=objective, max_waiting=[0, 0, 20], **changes))[4]
    assert (last.largest, last.max_waiting, last.gate) == (8, 20, None)
    strict = RateBands(bank(objective=objective, max_waiting=[0, 0, 0], **changes))[4]
    assert strict.gate is not None and strict.gate.least <= 8
