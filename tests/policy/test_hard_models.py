"""Models whose truncation invites to lose rows, or whose law spans more than a float does."""

import numpy as np
import pytest

from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.solve.bank import solve
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.stationary import stationary

# Energy dear and rows rare; a small fast batch beside a slow large one: rows lost in S_o would save more than 1.5 g.
DEAR = Profile.linear(alpha_ms=0.2563, tau0_ms=0.3039, beta_mj=25.57, zeta0_mj=8.083, max_batch_size=8)
UNEVEN = Profile(
    np.array([0.308, 0.308, 0.308, 2.395, 2.395, 5.235, 7.136]),
    np.array([19.05, 19.05, 27.05, 34.03, 54.57, 54.57, 54.57]),
    np.zeros(7),
)


@pytest.mark.parametrize(("profile", "load", "weight"), [(DEAR, 0.1177, 71.03), (UNEVEN, 0.789, 84.59)])
def test_no_policy_lives_on_rows_that_overflow(profile: Profile, load: float, weight: float) -> None:
    rate, prices = load * profile.max_rate, Prices(1.0, weight)
    solution = solve(profile, rate, prices)
    assert solution.iterations < 20
    exact = evaluate(profile, rate, solution.actions.astype(np.uint16), prices)
    assert exact.cost == pytest.approx(solution.cost, rel=1e-7)


def test_a_law_that_grows_beyond_all_floats_is_still_a_law() -> None:
    # Up with 1 - 1e-9, down with 1e-9: each state is a thousand million times as likely as the one below.
    size, down = 60, 1e-9
    matrix = np.zeros((size, 3))
    matrix[:, 0], matrix[:, 2] = down, 1.0 - down
    matrix[0, 0], matrix[-1, 2] = 0.0, 0.0
    law = stationary(matrix, 1)
    assert law.sum() == pytest.approx(1.0)
    assert law[-2] / law[-1] == pytest.approx(down, rel=1e-6)


def test_a_state_that_is_as_good_as_never_left_has_all_of_the_law() -> None:
    matrix = np.array([[0.0, 0.5, 0.5], [1e-250, 1.0, 0.0]])
    np.testing.assert_array_equal(stationary(matrix, 1), [0.0, 1.0])
