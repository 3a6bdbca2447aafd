"""rate.py: arrivals per second, from looks of any kind."""

from collections.abc import Iterable
from math import exp, inf, sqrt

import numpy as np
import pytest
from scipy.stats import gamma
from tests.policy.banks import LIMITS, PROFILE, bank, promised

from weir.policy.cost.objective import LatencySLO
from weir.policy.cost.profile import Profile
from weir.policy.online.admission import admission
from weir.policy.online.rate import (
    ENOUGH,
    SILENCE,
    UNLIKELY,
    WINDOW_MAX,
    WINDOW_MIN,
    WINDOW_ROWS,
    Rate,
    RateBand,
    RateBands,
    boundaries_of,
    filling_of,
)
from weir.policy.solve.bank import Bank
from weir.policy.solve.tables import full_batch_table, greedy_table, limit_table, stacked


def poisson(rate: float, count: int, start: float = 0.0, seed: int = 1) -> list[float]:
    """Return instants of arrivals."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, count)
    return [float(instant) for instant in start + np.cumsum(gaps)]


def follow(estimate: Rate, times: Iterable[float], first: int = 1) -> list[float]:
    """Look at each arrival; return what was estimated then."""
    return [estimate.observe(now, first + number) for number, now in enumerate(times)]


@pytest.mark.parametrize(
    ("rate", "start"), [(0.05, 0.0), (2.0, 0.0), (100.0, 1.7e9), (2000.0, 1.7e9), (2000.0, 0.0), (50_000.0, 0.0)]
)
def test_a_constant_rate_is_found_to_within_ten_per_cent(rate: float, start: float) -> None:
    values = follow(Rate(), poisson(rate, 20_000, start))[1000:]
    assert np.mean(values) == pytest.approx(rate, rel=0.03)
    assert np.std(values) < 0.12 * rate


def test_looks_may_be_rare() -> None:
    times = poisson(1000.0, 50_000)
    estimate, values = Rate(), []
    for number in range(0, len(times), 37):
        values.append(estimate.observe(times[number], number + 1))
    assert np.mean(values[10:]) == pytest.approx(1000.0, rel=0.03)


def test_it_is_unknown_until_enough_has_arrived() -> None:
    values = follow(Rate(), [0.01 * number for number in range(ENOUGH + 5)])
    assert values[:ENOUGH] == [0.0] * ENOUGH
    assert values[ENOUGH:] == pytest.approx([100.0] * 5)


def test_from_a_cold_start_it_is_the_count_over_the_time() -> None:
    times = poisson(500.0, ENOUGH + 1)
    value = follow(Rate(), times)[-1]
    assert value == pytest.approx(ENOUGH / (times[-1] - times[0]), rel=0.2)


def test_the_fading_is_exact_for_arrivals_spread_over_the_gap() -> None:
    estimate = Rate()
    follow(estimate, [0.001 * number for number in range(20_000)])
    assert estimate.value == pytest.approx(1000.0)
    window = WINDOW_ROWS / 1000.0
    estimate.observe(19.999 + 2.0 * window, 20_050)  # 50 in the time of 100
    assert estimate.value == pytest.approx(1000.0 * exp(-2.0) + 500.0 * (1.0 - exp(-2.0)))


def test_it_stays_while_nothing_comes_and_no_time_passes() -> None:
    estimate = Rate()
    follow(estimate, [0.01 * number for number in range(50)])
    before = estimate.value
    assert estimate.observe(5.0, 50) == before  # nothing came
    assert estimate.observe(0.49, 50) == before
    follow(estimate, [0.5], 51)
    assert estimate.value == pytest.approx(100.0)
    assert estimate.observe(0.5, 60) == pytest.approx(100.0)  # no time has passed: the next look counts them
    assert estimate.observe(0.51, 61) > 105.0


def test_after_a_silence_the_gap_counts() -> None:
    estimate = Rate()
    follow(estimate, poisson(1000.0, 1000))
    estimate.observe(100.0, 1001)
    assert estimate.value < 0.02
    follow(estimate, poisson(1000.0, 150, 100.0), 1002)
    assert estimate.value == pytest.approx(1000.0, rel=0.35)


def test_a_thousandfold_rise_is_followed_within_some_hundred_arrivals() -> None:
    estimate = Rate()
    follow(estimate, poisson(2.0, 1000))
    assert estimate.value == pytest.approx(2.0, rel=0.4)
    values = follow(estimate, poisson(2000.0, 1000, 1000.0), 1001)
    assert values[36] > 2.0 * values[1]
    assert values[450] == pytest.approx(2000.0, rel=0.4)


def test_the_memory_is_bounded_both_ways() -> None:
    slow, fast = Rate(), Rate()
    follow(slow, [1e6 * number for number in range(100)])
    assert slow.value == pytest.approx(1e-6)
    assert slow._window == WINDOW_MAX
    follow(fast, [1e-6 * number for number in range(100)])
    assert fast.value == pytest.approx(1e6)
    assert fast._window == WINDOW_MIN


def test_another_line_and_another_clock_start_from_what_is_known() -> None:
    estimate = Rate()
    follow(estimate, [0.01 * number for number in range(100)])
    assert estimate.observe(2.0, 0) == pytest.approx(100.0)  # a service that was started again
    assert estimate.observe(2.01, 1) == pytest.approx(100.0)
    assert estimate.observe(0.0, 5) == pytest.approx(100.0)  # a clock that went back
    assert estimate.observe(0.01, 6) == pytest.approx(100.0)


# stages.py: a bank made ready to be looked up.


def alone(rate: float) -> Bank:
    """Return a bank of one rate."""
    one = limit_table(4, 8)[None]
    return bank(
        rates=[rate], tables=one, shares=[0.0], max_waiting=[0], response_time_ms=[1.0], p99_ms=[1.0], power_w=[1.0]
    )


def every(made: Bank) -> list[RateBand]:
    """Return all stages of a bank."""
    stages = RateBands(made)
    return [stages[number] for number in range(len(stages))]


def test_the_boundaries_are_halfway_by_ratio_and_as_far_beyond_the_ends() -> None:
    assert boundaries_of(bank()) == pytest.approx((100 / sqrt(2), 100 * sqrt(2), 200 * sqrt(2), 400 * sqrt(2)))
    assert boundaries_of(alone(100.0)) == (50.0, 200.0)


def test_there_is_a_stage_below_and_one_above() -> None:
    stages = every(bank(max_waiting=[0, 0, 30]))
    assert [stage.limits[0] for stage in stages] == [LIMITS[0], *LIMITS, 1]
    assert [stage.entry for stage in stages] == [0, 0, 1, 2, 2]
    assert [stage.max_waiting for stage in stages] == [None, None, None, 30, 30]
    assert stages[0].first == stages[1].first, "the lowest table holds below its rate"
    full = full_batch_table(PROFILE).tolist()
    assert [None if each is None else each.rows for each in stages[4].first] == [None, *full[1:]]
    assert (stages[0].falls, stages[4].rises) == (0.0, inf)


def test_the_answers_are_the_tables() -> None:
    made = bank()
    for stage in every(made)[1:-1]:
        assert [0 if each is None else each.rows for each in stage.first] == made.tables[stage.entry].tolist()
        assert {each.limit for each in stage.first if each is not None} == {LIMITS[stage.entry]}
        assert stage.second is stage.first


def test_a_second_table_is_kept_where_there_is_one() -> None:
    made = bank()
    second = made.tables.copy()
    second[1] = second[2]
    stage = RateBands(bank(tables=made.tables, second_tables=second, shares=[0.0, 0.3, 0.0]))[2]
    assert (stage.share, stage.limits) == (0.3, (4, 6))
    assert [0 if each is None else each.rows for each in stage.second] == second[1].tolist()
    assert stage.filling == filling_of(second[1])


def test_the_stage_for_a_rate_is_the_nearest() -> None:
    made = bank()
    stages = RateBands(made)
    for rate in np.geomspace(75.0, 560.0, 100).tolist():
        assert stages.at(rate).entry == made.index_of(rate)
    assert [stages.at(rate).number for rate in (1e-9, 70.0, 71.0, 565.0, 566.0, 1e9)] == [0, 0, 1, 3, 4, 4]


def test_a_stage_is_made_once() -> None:
    stages = RateBands(bank())
    assert stages.at(200.0) is stages.next_to(stages[4], 200.0) is stages[2]


def test_a_stage_is_left_only_when_its_boundary_is_well_passed() -> None:
    stages = RateBands(bank())
    second = stages[2]
    low, high = stages.boundaries[1], stages.boundaries[2]
    for rate, number in (
        (low, 2), (0.951 * low, 2), (0.949 * low, 1), (high, 2), (1.049 * high, 2), (1.051 * high, 3), (1.0, 0), (1e4, 4),
    ):  # fmt: skip
        assert stages.next_to(second, rate).number == number
        assert stages.next_to(stages.next_to(second, rate), rate).number == number


def test_a_stage_says_where_it_is_left() -> None:
    """What a decision compares the rate with; only beyond it is the next stage looked for."""
    stages = RateBands(bank())
    edges = (0.0, *stages.boundaries, inf)
    for number in range(len(stages)):
        assert stages[number].falls == pytest.approx(0.95 * edges[number])
        assert stages[number].rises == pytest.approx(1.05 * edges[number + 1])


def test_only_a_promise_bounds_waits_by_age() -> None:
    assert {(stage.allowance, stage.latest) for stage in every(bank())} == {(None, None)}
    for stage in every(promised()):
        assert stage.latest is not None
        assert stage.latest == pytest.approx([0.035, *(0.036 - rows / 1000.0 for rows in range(1, 9))])
        assert stage.allowance == pytest.approx([latest - 0.001 for latest in stage.latest])


@pytest.mark.parametrize("limit", [2, 3, 8, 32])
def test_the_line_fills_later_than_that_only_rarely(limit: int) -> None:
    bound = filling_of(limit_table(limit, 32))
    late = float(gamma.sf(bound, limit - 1))
    assert 0.0 < late <= UNLIKELY
    assert bound < limit + 6.0 * sqrt(limit) + 10.0  # and is not far from what it must be


def test_a_table_that_never_waits_has_only_the_silence() -> None:
    assert filling_of(limit_table(1, 8)) == SILENCE


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
    stages = RateBands(bank(objective=objective, tables=tables, second_tables=tables, max_waiting=[0, 0, 30]))
    for stage in (stages[0], stages[1]):
        assert (stage.allowance, stage.latest, stage.max_waiting, stage.largest) == (None, None, None, 8)
        assert stage.first == stages[0].first
    assert stages[2].latest is not None and stages[2].max_waiting is None
    assert stages[2].gate is None
    assert stages.unknown() is stages[0]
    assert RateBands(promised()).unknown() is not None and RateBands(bank()).unknown() is None


def test_where_refusals_count_and_times_vary_overload_is_served_in_full_batches() -> None:
    """The batch and line that have everybody in time for certain would serve far fewer rows."""
    varied = Profile(PROFILE.service_time_ms, PROFILE.energy_mj, np.full(8, 0.3))
    tables = stacked([greedy_table(8)] * 3)
    changes = {"profile": varied, "tables": tables, "second_tables": tables}
    objective = LatencySLO(0.04, slack=0.02, refusal_price=1.0)
    last = RateBands(bank(objective=objective, max_waiting=[0, 0, 20], **changes))[4]
    assert (last.largest, last.max_waiting, last.gate) == (8, 20, None)
    strict = RateBands(bank(objective=objective, max_waiting=[0, 0, 0], **changes))[4]
    assert strict.gate is not None and strict.gate.least <= 8
