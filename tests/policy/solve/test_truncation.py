"""truncation.py: how far the model must reach; the paper's Table I."""

import numpy as np
import pytest

from weir.errors import SettingsError
from weir.policy.cost.prices import Prices
from weir.policy.cost.profile import GOOGLENET_P4
from weir.policy.solve.policy_iteration import iterate_policies, start_actions
from weir.policy.solve.smdp import model_of
from weir.policy.solve.solver import solve
from weir.policy.solve.truncation import (
    cost_of,
    law_of,
    minimum_s_max,
    overflow_cost_rate,
    overflow_share,
    served_table,
)

RATE = 0.9 * GOOGLENET_P4.max_rate
# c_o, smallest s_max, iterations, Δ where it is more than rounding
TABLE_I = [
    (10_000.0, 89, 1847, 9.36e-4),
    (1_000.0, 78, 1635, 9.78e-4),
    (100.0, 70, 1483, 8.36e-4),
    (10.0, 161, 10_000, None),
    (0.0, 192, 10_000, None),
]


@pytest.mark.parametrize(("overflow_cost", "s_max", "iterations", "delta"), TABLE_I)
def test_table_1(overflow_cost: float, s_max: int, iterations: int, delta: float | None) -> None:
    found = minimum_s_max(GOOGLENET_P4, RATE, Prices(), overflow_cost)
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
    model = model_of(GOOGLENET_P4, RATE, Prices(), 161, 10.0)
    best = iterate_policies(model, start_actions(model), overflow_cost=10.0)
    law = law_of(model, best.actions)
    assert overflow_cost_rate(model, best.actions, law) == pytest.approx(6.14e-12, rel=0.01)
    assert overflow_share(model, best.actions, law) == pytest.approx(6.14e-12 / 66.1374, rel=0.01)
    assert cost_of(model, best.actions, law) == pytest.approx(best.cost, rel=1e-12)


def test_no_truncation_may_be_long_enough() -> None:
    with pytest.raises(SettingsError, match="overflow_cost=10: no s_max up to 100 is acceptable"):
        minimum_s_max(GOOGLENET_P4, RATE, Prices(), 10.0, longest=100)
    with pytest.raises(SettingsError, match="overflow_cost=10: no s_max up to 160 is acceptable"):
        minimum_s_max(GOOGLENET_P4, RATE, Prices(), 10.0, longest=160, max_iterations=300)


def test_unvisited_states_make_full_batches() -> None:
    solution = solve(GOOGLENET_P4, 0.2 * GOOGLENET_P4.max_rate, s_max=100)
    raw = solution.actions
    assert raw[-1] < 32, "what the truncated model does in S_o is an artefact"
    assert solution.table[:12].tolist() == raw[:12].tolist()
    assert int(solution.table[-1]) == 32
    law = np.zeros(len(raw))
    law[:10] = 1.0
    assert served_table(GOOGLENET_P4, raw, law).tolist() == [*raw[:10], *range(10, 33)]
