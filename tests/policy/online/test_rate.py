"""rate.py: arrivals per second, from looks of any kind."""

from collections.abc import Iterable
from dataclasses import replace
from math import exp, inf, sqrt

import numpy as np
import pytest
from scipy.stats import gamma
from tests.policy.banks import LIMITS, PROFILE, bank, promised

from weir.policy.cost.objective import LatencySLO
from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.policy.online.rate import (
    ENOUGH,
    OPEN,
    SILENCE,
    UNLIKELY,
    WINDOW_MAX,
    WINDOW_MIN,
    WINDOW_ROWS,
    AdmissionGate,
    Rate,
    RateBand,
    RateBands,
    admission,
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
    assert gates[1].bounds == (50,) * 9  # the tables' largest batch is of 8
    assert gates[2] == strict.gate
    assert gates[3].bounds == (60,) * 9
    assert gates[4].bounds == (strict.max_waiting,) * (strict.steady + 1)
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
    assert stages[2].gate.bounds == (None,) * 9
    assert stages.unknown() is stages[0]
    assert RateBands(promised()).unknown() is not None and RateBands(bank()).unknown() is None


def test_where_refusals_count_and_times_vary_overload_is_served_in_full_batches() -> None:
    """The batch and line that have everybody in time for certain would serve far fewer rows."""
    varied = Profile(PROFILE.service_time_ms, PROFILE.energy_mj, np.full(8, 0.3))
    tables = stacked([greedy_table(8)] * 3)
    changes = {"profile": varied, "tables": tables, "second_tables": tables}
    objective = LatencySLO(0.04, slack=0.02, refusal_price=1.0)
    last = RateBands(bank(objective=objective, max_waiting=[0, 0, 20], **changes))[4]
    assert (last.largest, last.max_waiting, last.gate.bounds) == (8, 20, (20,) * 9)
    strict = RateBands(bank(objective=objective, max_waiting=[0, 0, 0], **changes))[4]
    assert strict.largest < 8


# How long the line may be where a latency is promised.


P4 = GOOGLENET_P4


def test_two_batches_after_each_other_are_in_time() -> None:
    """29 rows take 9.9 ms; of 2 batches of 18, 36 rows might wait, but they serve 6 % fewer rows per second."""
    made = admission(P4, LatencySLO(0.02))
    assert made is not None
    assert (made.steady, made.max_waiting, made.largest) == (29, 29, 32)
    times = P4.service_time_ms
    for rows, bound in enumerate(made.gate.bounds[1:], 1):
        assert bound is not None
        assert times[rows - 1] + times[bound - 1] <= 20.0
        assert bound == 32 or times[rows - 1] + times[bound] > 20.0


def test_with_time_for_more_batches_the_line_is_longer() -> None:
    made = admission(P4, LatencySLO(0.06))  # of five batches of 32, one runs
    assert made is not None
    assert (made.steady, made.max_waiting, made.largest) == (32, 128, 32)
    assert made.gate.bounds == (160, *[128] * 32)


def test_a_little_less_is_served_for_a_line_of_two_batches() -> None:
    made = admission(P4, LatencySLO(0.03))  # two batches of 32 cannot wait, of 29 they can
    assert made is not None
    assert (made.steady, made.max_waiting, made.largest) == (29, 58, 29)


def test_each_worker_has_its_part_of_the_line() -> None:
    made = admission(P4, LatencySLO(0.02), workers=3)
    assert made is not None
    assert (made.steady, made.max_waiting, made.largest) == (29, 87, 29)


def test_batches_in_flight_take_their_time() -> None:
    profile = Profile(P4.service_time_ms, P4.energy_mj, np.zeros(32), latency_offset_ms=2.0, pipeline_depth=2)
    made = admission(profile, LatencySLO(0.03))  # three of 27 take 27.9 ms
    assert made is not None
    assert (made.steady, made.max_waiting) == (27, 27)


@pytest.mark.parametrize("changes", [{"margin": 0.002}, {"slack": 0.002}, {"margin": 0.002, "slack": 0.001}])
def test_what_is_spared_shortens_the_line(changes: dict[str, float]) -> None:
    made = admission(P4, LatencySLO(0.02)._replace(**changes))
    assert made is not None
    assert (made.steady, made.max_waiting) == (26, 26)  # two take 18 ms


def test_none_is_possible_where_a_row_behind_one_alone_is_late() -> None:
    """Where refusals count. Elsewhere it is refused, and a row that comes later is not."""
    assert admission(P4, LatencySLO(0.0027, refusal_price=1.0)) is None
    made = admission(P4, LatencySLO(0.0028, refusal_price=1.0))
    assert made is not None
    assert (made.steady, made.max_waiting) == (1, 1)
    assert admission(P4, LatencySLO(0.0013)) is None


def test_tables_take_no_larger_batch_than_there_is_time_for() -> None:
    made = admission(P4, LatencySLO(0.012))
    assert made is not None
    assert (made.steady, made.largest) == (16, 31)
    assert made.table(P4, 4).tolist() == [0, 0, 0, 0, *range(4, 32)]
    table, gate = made.overloaded(P4)
    assert table.tolist() == list(range(17))
    assert gate.bounds == (16,) * 17


def test_under_overload_a_batch_is_never_split_by_a_step() -> None:
    """17 to 20 rows take longer than 16 do, and serve fewer per second; a line of 20 is served all the same."""
    times = np.where(np.arange(1, 33) <= 16, 5.0, 9.0)
    made = admission(Profile(times, times, np.zeros(32)), LatencySLO(0.01))
    assert made is not None
    assert (made.steady, made.max_waiting) == (16, 16)
    table, _ = made.overloaded(Profile(times, times, np.zeros(32)))
    assert table[-1] == 16


GATE = AdmissionGate((6, 4, 4, 3, 3), (0.0, 1.0, 2.0, 3.0, 4.0), 8.0, 2, (0.0, 1.0, 0.0, 0.0, 0.0))


def test_who_stays_behind_keeps_others_out() -> None:
    assert GATE.after(3, 3, 0.0) == 3  # none does
    assert GATE.after(3, 4, 0.5) == 3
    assert GATE.after(3, 4, 2.5) == 2  # 8 - 3 - 2.5 are left for the next batch
    assert GATE.after(3, 4, 4.0) == 1
    assert GATE.after(1, 4, 19.0) == 3  # those who are in stay in
    assert AdmissionGate((9, 9)).after(1, 5, 10.0) == 9
    assert OPEN.after(0, 5, 10.0) is None


def test_a_third_batch_waits_if_it_comes_late_enough() -> None:
    assert [GATE.more(2, since) for since in (0.0, 1.9, 2.0, 3.5, 9.0)] == [0, 0, 2, 3, 4]
    assert GATE.more(1, 1.0) == 2  # one second is to spare behind a batch of one
    assert GATE._replace(min_extra_batch=0).more(2, 9.0) == 0
    assert OPEN.more(0, 9.0) == 0


def test_behind_several_batches_only_a_whole_one_may_come() -> None:
    profile = Profile(np.array([2.0]), np.array([3.0]), np.zeros(1))
    made = admission(profile, LatencySLO(0.009))
    assert made is not None
    assert (made.steady, made.max_waiting) == (1, 3)
    assert [made.gate.more(1, since) for since in (0.0009, 0.001, 0.0019)] == [0, 1, 1]
    crew = admission(profile, LatencySLO(0.009), workers=2)
    assert crew is not None
    assert crew.gate.more(1, 1.0) == 0


def test_where_hardly_any_may_be_late_nothing_is_tried() -> None:
    made = admission(P4, LatencySLO(0.02, 1e-4))
    assert made is not None
    assert made.gate.min_extra_batch == 0


# Where batches are spaced.


SLEEPS = Profile.linear(alpha_ms=0.5, tau0_ms=21.0, max_batch_size=64)


@pytest.mark.parametrize(
    ("workers", "deadline", "steady", "waiting"),
    [
        (4, 0.045, 30, 30),  # 36 ms, and 9 ms until the next batch starts; at worst two of 3 rows would be in time
        (4, 0.04, 22, 22),  # at worst not even two rows would be
        (2, 0.045, 18, 18),
        (8, 0.045, 38, 38),
        (4, 0.06, 54, 54),
    ],
)
def test_batches_start_apart_where_more_rows_are_then_in_time(
    workers: int, deadline: float, steady: int, waiting: int
) -> None:
    made = admission(SLEEPS, LatencySLO(deadline), workers)
    assert made is not None
    assert (made.steady, made.max_waiting, made.largest) == (steady, waiting, steady)
    assert made.gate.spacing == pytest.approx((0.021 + 0.0005 * steady) / workers)
    assert made.gate.bounds == (waiting + steady, *[waiting] * steady)
    assert made.overloaded(SLEEPS)[1].spacing == made.gate.spacing


@pytest.mark.parametrize(("workers", "deadline"), [(1, 0.045), (4, 0.12), (1, 0.12)])
def test_nothing_is_spaced_where_the_worst_case_is_in_time_or_there_is_one_worker(
    workers: int, deadline: float
) -> None:
    made = admission(SLEEPS, LatencySLO(deadline), workers)
    assert made is not None
    assert made.gate.spacing == 0.0


def test_batches_in_flight_at_one_worker_start_apart_too() -> None:
    made = admission(replace(SLEEPS, pipeline_depth=2), LatencySLO(0.06))
    assert made is not None
    assert (made.steady, made.max_waiting) == (18, 18)
    assert made.gate.spacing == pytest.approx(0.03)
    assert admission(replace(SLEEPS, pipeline_depth=2), LatencySLO(0.042)) is None


def test_even_spaced_a_row_behind_another_may_be_late() -> None:
    assert admission(SLEEPS, LatencySLO(0.0268), 4) is None  # 21.5 ms and a quarter of them
    made = admission(SLEEPS, LatencySLO(0.0269), 4)
    assert made is not None
    assert (made.steady, made.max_waiting) == (1, 1)


def test_one_worker_admits_rows_by_the_time_that_is_left() -> None:
    made = admission(SLEEPS, LatencySLO(0.045))
    assert made is not None and made.windowed
    assert (made.steady, made.largest, made.max_waiting) == (48, 48, 48)  # 45 ms
    gate = made.gate_at(1.0)
    assert gate.bounds == (48, *[0] * 48)
    assert gate.min_extra_batch == 1
    assert [gate.more(1, since) for since in (0.0, 0.005, 0.0215)] == [5, 15, 48]  # 23.5 ms and 5 ms more are left
    assert gate.more(48, 0.0214) == 0
    assert (gate.after(5, 5, 0.0), gate.after(5, 8, 0.0), gate.after(5, 8, 0.02)) == (0, 3, 3)
    assert (gate.extends(5, 5), gate.extends(5, 8), gate.extends(0, 5), OPEN.extends(1, 1)) == (
        True,
        False,
        False,
        False,
    )
    waits = LatencySLO(0.045).allowance(SLEEPS)
    assert made.waits(waits).tolist() == [*waits[1:].tolist(), waits[-1]]


@pytest.mark.parametrize(
    ("rate", "size"),
    [(10.0, 1), (100.0, 3), (200.0, 5), (400.0, 8), (800.0, 14), (1600.0, 21)],
)
def test_the_more_rows_come_the_less_time_may_be_left_for_them(rate: float, size: int) -> None:
    """Of a batch of 5 at 200 rows/s, 21.5 ms are left for as many to come; of larger ones less, of smaller ones more come than fit."""
    made = admission(SLEEPS, LatencySLO(0.045))
    assert made is not None
    assert made.gate_at(rate).min_extra_batch == size
    assert made.overloaded(SLEEPS)[1].min_extra_batch == made.gate_at(1.5 * SLEEPS.max_rate).min_extra_batch
