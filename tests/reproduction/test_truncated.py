"""truncated.py: the paper's finite model, by both methods and by trying all policies; how far it must reach; Table I."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.policy.solve.test_bank import EFFICIENT, PAST_ITS_BEST, STEPPED
from tests.rings import spread, subcases

from reproduction import truncated
from weir.errors import SettingsError
from weir.policy.cost import GOOGLENET_P4, Prices, Profile

RATE = 0.9 * GOOGLENET_P4.max_rate
# c_o, smallest s_max, iterations, Δ where it is more than rounding
TABLE_I = [
    (10_000.0, 89, 1847, 9.36e-4),
    (1_000.0, 78, 1635, 9.78e-4),
    (100.0, 70, 1483, 8.36e-4),
    (10.0, 161, 10_000, None),
    (0.0, 192, 10_000, None),
]


@pytest.mark.parametrize(("overflow_cost", "s_max", "iterations", "delta"), spread(TABLE_I))
def test_table_1(overflow_cost: float, s_max: int, iterations: int, delta: float | None) -> None:
    found = truncated.minimum_s_max(GOOGLENET_P4, RATE, Prices(), overflow_cost)
    assert found.s_max == s_max
    assert abs(found.iterations - iterations) <= 2
    assert found.cost == pytest.approx({89: 66.1384, 78: 66.1383, 70: 66.1377}.get(s_max, 66.1374), rel=1e-4)
    assert found.space == 32 * s_max
    assert found.time == found.iterations * 32 * s_max**2
    if delta is None:
        assert found.delta < 1e-11
    else:
        assert found.delta == pytest.approx(delta, rel=0.01)


def test_the_tail_of_the_law_needs_no_subtraction() -> None:
    """Table I: Δ = 6.14e-12 with c_o = 10 and s_max = 161."""
    model = truncated.model_of(GOOGLENET_P4, RATE, Prices(), 161, 10.0)
    best = truncated.iterate_policies(model, truncated.start_actions(model), overflow_cost=10.0)
    law = truncated.law_of(model, best.actions)
    assert truncated.overflow_cost_rate(model, best.actions, law) == pytest.approx(6.14e-12, rel=0.01)
    assert truncated.overflow_share(model, best.actions, law) == pytest.approx(6.14e-12 / 66.1374, rel=0.01)
    assert truncated.cost_of(model, best.actions, law) == pytest.approx(best.cost, rel=1e-12)


def test_no_truncation_may_be_long_enough() -> None:
    with pytest.raises(SettingsError, match="overflow_cost=10: no s_max up to 160 is acceptable"):
        truncated.minimum_s_max(GOOGLENET_P4, RATE, Prices(), 10.0, longest=160, max_iterations=300)


def test_unvisited_states_make_full_batches() -> None:
    solution = truncated.solve_truncated(GOOGLENET_P4, 0.2 * GOOGLENET_P4.max_rate, s_max=100)
    raw = solution.actions
    assert raw[-1] < 32, "what the truncated model does in S_o is an artefact"
    assert solution.table[:12].tolist() == raw[:12].tolist()
    assert int(solution.table[-1]) == 32
    law = np.zeros(len(raw))
    law[:10] = 1.0
    assert truncated.served_table(GOOGLENET_P4, raw, law).tolist() == [*raw[:10], *range(10, 33)]


@subcases(("profile", "load"), [(GOOGLENET_P4, 0.8), (STEPPED, 0.2), (PAST_ITS_BEST, 0.8)])
def test_both_methods_agree(profile: Profile, load: float) -> None:
    rate, prices = load * profile.max_rate, Prices(1.0, 0.5)
    exact = truncated.solve_truncated(profile, rate, prices, s_max=80)
    long: dict[str, Any] = {"method": "value-iteration", "epsilon": 1e-6, "max_iterations": 100_000}
    swept = truncated.solve_truncated(profile, rate, prices, s_max=80, **long)
    assert swept.cost == pytest.approx(exact.cost, rel=1e-8)
    assert exact.cost <= swept.cost * (1.0 + 1e-12)
    assert swept.cost - swept.error_bound <= exact.cost
    assert swept.iterations > 10 * exact.iterations
    assert swept.values[:40] == pytest.approx(exact.values[:40], rel=1e-3, abs=1e-3)


TINY = [
    (Profile.linear(alpha_ms=1.0, tau0_ms=1.0, beta_mj=1.0, zeta0_mj=6.0, max_batch_size=2), 0.7, (1.0, 1.0)),
    (Profile.linear(alpha_ms=1.0, tau0_ms=1.0, beta_mj=1.0, zeta0_mj=6.0, max_batch_size=2), 0.3, (1.0, 5.0)),
    (Profile(np.array([1.0, 1.1, 2.5]), np.array([4.0, 4.1, 9.0]), np.array([0.0, 0.5, 1.0])), 0.6, (1.0, 2.0)),
]


@subcases(("profile", "load", "weights"), TINY)
def test_no_policy_at_all_is_better(profile: Profile, load: float, weights: tuple[float, float]) -> None:
    largest = profile.max_batch_size
    rate = load * profile.max_rate
    s_max = {2: 5, 3: 4}[largest]
    solution = truncated.solve_truncated(profile, rate, Prices(*weights), s_max=s_max)
    model = truncated.model_of(profile, rate, Prices(*weights), s_max, solution.overflow_cost)
    costs = []
    choices = [range(min(state, largest) + 1) for state in range(s_max + 1)] + [range(1, largest + 1)]
    for policy in product(*choices):
        actions = np.array(policy)
        costs.append(truncated.cost_of(model, actions, truncated.law_of(model, actions)))
    assert solution.cost == pytest.approx(min(costs), rel=1e-10)
    swept = truncated.solve_truncated(
        profile, rate, Prices(*weights), s_max=s_max, method="value-iteration", epsilon=1e-9
    )
    assert swept.cost == pytest.approx(min(costs), rel=1e-8)


def test_s_max_grows_until_the_tail_is_small() -> None:
    rate = 0.75 * EFFICIENT.max_rate  # the most efficient size leaves long lines, which b* would not
    solution = truncated.solve_truncated(EFFICIENT, rate, Prices(0.0, 1.0), overflow_cost=1000.0)
    assert solution.tail_share <= 1e-9
    assert solution.s_max > 60


def test_a_result_that_may_be_far_from_the_best_says_so() -> None:
    with pytest.warns(RuntimeWarning, match=r"rate=1000: the table costs [\d.]+, which may be [\d.]+ above the least"):
        solution = truncated.solve_truncated(GOOGLENET_P4, 1000.0, method="value-iteration", s_max=60, max_iterations=3)
    assert solution.error_bound > 1e-3 * solution.cost


def test_too_cheap_an_overflow_is_a_trap_for_value_iteration() -> None:
    """Section V-C: to wait in S_o for ever then looks cheapest. Policy iteration serves there, and gets it right."""
    with pytest.raises(SettingsError, match=r"overflow_cost=10: too small for s_max=100 and \d+ iterations: never to"):
        truncated.solve_truncated(GOOGLENET_P4, RATE, method="value-iteration", s_max=100, overflow_cost=10.0)
    exact = truncated.solve_truncated(GOOGLENET_P4, RATE, s_max=100, overflow_cost=10.0)
    assert exact.overflow_cost == 10.0
    assert exact.cost == pytest.approx(66.1338, rel=1e-5)


def test_a_line_in_two_parts_is_refused() -> None:
    """Batches of 2 from 5, a wait at 3: where hardly anything arrives during a batch, a line of 3 never gets to 2."""
    model = truncated.model_of(PAST_ITS_BEST, 1e-9, Prices(), 12)
    with pytest.raises(SettingsError, match="rate=1e-09: too low for these actions"):
        truncated.iterate_policies(model, np.array([0, 0, 2, 0, 0, *[2] * 9]))


@subcases(
    ("changes", "says"),
    [
        ({"rate": 2960.0}, "rate=2960: must be less than the capacity of 2958.8 rows per second (batches of 32)"),
        ({"method": "magic"}, "method='magic': must be one of policy-iteration, value-iteration"),
        ({"s_max": 31}, "s_max=31: must be at least max_batch_size=32"),
        ({"overflow_cost": -1.0}, "overflow_cost=-1.0: must be a number, 0 or more"),
        ({"tail_tolerance": 0.0}, "tail_tolerance=0.0: must be greater than 0"),
        ({"method": "value-iteration", "eta": 1.0}, "eta=1.0: must be greater than 0 and less than 1"),
        ({"method": "value-iteration", "epsilon": 0.0}, "epsilon=0.0: must be greater than 0"),
        ({"method": "value-iteration", "max_iterations": 0}, "max_iterations=0: must be greater than 0"),
    ],
)
def test_what_cannot_be_solved_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        truncated.solve_truncated(GOOGLENET_P4, **{"rate": 1000.0} | changes)
    assert says in raised.value.message
