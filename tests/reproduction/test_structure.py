import numpy as np
from reproduction.structure import Case, look, paper_grid, random_lines, search

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.solve.bank import solve

STEPS = np.repeat([1.0, 2.0], 8)
PADDED = Profile(2.4 * STEPS + 1.0, 160.0 * STEPS + 20.0, np.zeros(16))


def test_straight_lines_have_control_limits() -> None:
    assert search(random_lines(40)).exceptions == []


def test_padded_batches_have_none() -> None:
    solution = solve(PADDED, 0.4 * PADDED.max_rate, Prices(1.0, 3.0))
    waits, _ = look(solution)
    state, gap = waits[0]
    assert solution.actions[8] == 8
    assert solution.actions[state] == 0
    assert 8 < state < 16
    assert gap > 0.01
    found = search([Case("padded", solution)])
    assert found.clearest[1:] == (state, gap)


def test_a_busy_line_may_be_served_in_part() -> None:
    case = next(each for each in paper_grid() if "ρ = 0.1, w2 = 0" in each.about)
    assert search([case]).smaller_batches == 1
