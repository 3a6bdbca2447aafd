"""device.py: one order for the models on a device, against the exact optimum for two."""

from itertools import count

import numpy as np
import pytest
from benchmarks.policies.two_models import TwoModels
from tests.rings import subcases

from weir.policy.cost import Prices, Profile
from weir.policy.solve.device import BUSIEST, TILT, TILTS, DeviceLoad, _tilted, device_load, solve_device, variants
from weir.policy.solve.smdp import LONGEST, solve_long
from weir.policy.solve.tables import extended, limit_of

SHORT = Profile.linear(alpha_ms=0.3, tau0_ms=1.0, beta_mj=1.0, zeta0_mj=6.0, max_batch_size=6)
LONG = Profile.linear(alpha_ms=1.2, tau0_ms=4.0, beta_mj=2.0, zeta0_mj=30.0, max_batch_size=6)


def loads(*parts: tuple[Profile, float], energy_weight: float = 0.0) -> list[DeviceLoad]:
    return [DeviceLoad(profile, part * profile.max_rate, 1.0, energy_weight) for profile, part in parts]


@subcases(
    ("first", "second", "energy_weight", "excess"),
    [(0.2, 0.2, 0.0, 0.01), (0.35, 0.3, 0.0, 0.02), (0.25, 0.3, 0.5, 0.01), (0.1, 0.2, 2.0, 0.02)],
)
def test_the_order_costs_little_more_than_the_exact_optimum(
    first: float, second: float, energy_weight: float, excess: float
) -> None:
    asked = loads((SHORT, first), (LONG, second), energy_weight=energy_weight)
    exact = TwoModels([SHORT, LONG], [each.rate for each in asked], energy_weight)
    rule = exact.rule(solve_device(asked))
    assert exact.evaluate(rule)[0] <= (1.0 + excess) * exact.least(rule)


def test_a_model_that_is_alone_has_the_table_of_the_one_worker_solver() -> None:
    (found,) = solve_device(loads((LONG, 0.6), energy_weight=1.5))
    alone = solve_long(LONG, 0.6 * LONG.max_rate, Prices(1.0, 1.5), LONGEST).table
    length = min(len(alone), len(found.table))
    assert np.array_equal(found.table[:length], extended(alone, length))


def test_urgency_grows_with_the_rows_that_wait_beyond_the_table_too() -> None:
    for each in solve_device(loads((SHORT, 0.3), (LONG, 0.4), energy_weight=1.0)):
        limit, last = limit_of(each.table), len(each.table) - 1
        assert each.urgency_of(limit - 1) == -np.inf if limit > 1 else True
        assert np.all(np.diff(each.urgency[limit:]) > 0.0)
        assert each.urgency_of(last + 3) == pytest.approx(each.urgency[last] + 3 * each.slope)
        assert each.slope == pytest.approx(each.urgency[last] - each.urgency[last - 1], rel=1e-3)


def test_the_model_that_counts_more_is_more_urgent() -> None:
    plain, other = solve_device([DeviceLoad(LONG, 20.0), DeviceLoad(LONG, 20.0, weight=4.0)])
    assert other.urgency_of(3) > 2.0 * plain.urgency_of(3)


def test_a_model_without_arrivals_takes_nothing_from_the_others() -> None:
    unused, used = solve_device([DeviceLoad(SHORT, 0.0), *loads((LONG, 0.4))])
    (alone,) = solve_device(loads((LONG, 0.4)))
    assert np.array_equal(used.table, alone.table) and np.array_equal(used.urgency, alone.urgency)
    assert unused.table.tolist() == list(range(7))
    assert unused.urgency_of(2) == pytest.approx(2.0 / 1.6) and unused.urgency_of(9) == pytest.approx(9.0 / 2.8)
    assert [each.table[1] for each in solve_device([DeviceLoad(SHORT, 0.0), DeviceLoad(LONG, 0.0)])] == [1, 1]


def test_more_work_than_a_device_can_do_is_solved_in_proportion() -> None:
    asked = loads((SHORT, 0.9), (LONG, 0.6))
    shrunk = [each._replace(rate=each.rate * BUSIEST / 1.5) for each in asked]
    assert device_load(asked) == pytest.approx(1.5) and device_load(shrunk) == pytest.approx(BUSIEST)
    for found, wanted in zip(variants(asked)[0], variants(shrunk)[0], strict=True):
        assert np.array_equal(found.table, wanted.table)
        assert found.urgency[1:] == pytest.approx(wanted.urgency[1:])


def test_a_model_that_is_hardly_called_does_not_wait_on_an_idle_device() -> None:
    rare = Profile.linear(alpha_ms=4.0, tau0_ms=60.0, max_batch_size=8)
    asked = [DeviceLoad(rare, 0.3), *loads((SHORT, 0.6))]
    narrow, eager, *_ = variants(asked)
    assert (limit_of(narrow[0].table), limit_of(eager[0].table)) == (4, 1)
    assert limit_of(solve_device(asked)[0].table) == 1


def test_the_urgencies_are_corrected_where_batches_differ_much_in_length() -> None:
    small = Profile.linear(alpha_ms=1.45, tau0_ms=9.2, max_batch_size=4)
    large = Profile.linear(alpha_ms=5.0, tau0_ms=11.5, max_batch_size=16)
    asked = loads((small, 0.13), (large, 0.65))
    exact = TwoModels([small, large], [each.rate for each in asked], 0.0, 30)
    rules = [exact.rule(tables) for tables in (*variants(asked), solve_device(asked))]
    least = exact.least(rules[-1])
    above = [exact.evaluate(rule)[0] / least - 1.0 for rule in rules]
    assert min(above[:-1]) > 0.02 and above[-1] < 0.01


def test_urgencies_are_tilted_a_bounded_number_of_times() -> None:
    asked = loads((SHORT, 0.2), (LONG, 0.2))
    plain = variants(asked)[0]
    halves = (0.5**number for number in count())  # each factor would save half
    tilted = _tilted(asked, (2.0, plain), lambda tables: next(halves))
    factors = sorted(new.urgency_of(5) / old.urgency_of(5) for new, old in zip(tilted, plain, strict=True))
    assert factors == pytest.approx([1.0, TILT**TILTS])
