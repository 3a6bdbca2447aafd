"""stationary.py: laws against a linear solver, and tails that it cannot see."""

import numpy as np
import pytest
from reproduction.bounded import arrivals, band
from tests.rings import subcases

from weir.policy.cost.profile import Profile
from weir.policy.solve.stationary import stationary


def chain(actions: list[int], rows: list[int], rate: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Return the stationary law, and the whole matrix, of a line under these actions by state."""
    profile = Profile(np.array([1.0, 1.5, 3.0]), np.ones(3), np.array([0.0, 0.0, 0.5]))
    come = arrivals(profile, rate)
    matrix = np.zeros((len(rows), len(rows)))
    for state, (action, waiting) in enumerate(zip(actions, rows, strict=True)):
        if action:
            for number, probability in enumerate(come[action - 1]):
                matrix[state, min(waiting - action + number, len(rows) - 1)] += probability
        else:
            matrix[state, min(state + 1, len(rows) - 1)] = 1.0
    return stationary(*band(come, np.array(actions), np.array(rows))), matrix


@subcases(
    "actions", [[0, 1, 2, 3, 3, 3, 3, 3], [0, 0, 0, 3, 3, 3, 1, 3], [0, 0, 2, 1, 3, 0, 2, 2], [0, 0, 0, 0, *[2] * 5]]
)
def test_the_law_is_stationary(actions: list[int]) -> None:
    last = len(actions) - 2
    law, matrix = chain(actions, [*range(last), last, last])
    if actions[3] == 0:
        assert law[:2].tolist() == [0.0, 0.0]  # states that are left for ever
    assert law.sum() == pytest.approx(1.0, rel=1e-14)
    assert law @ matrix == pytest.approx(law, rel=1e-12)


def test_tails_have_all_their_digits() -> None:
    """The geometric tail of M/M/1 down to 1e-60: a chain up with 0.1, down with 0.9."""
    size = 64
    matrix = np.zeros((size, 3))
    matrix[:, 0], matrix[:, 2] = 0.9, 0.1
    matrix[0, 1], matrix[0, 0] = 0.9, 0.0
    matrix[-1, 1], matrix[-1, 2] = 0.1, 0.0
    law = stationary(matrix, 1)
    assert law[1:] / law[:-1] == pytest.approx(np.full(size - 1, 1.0 / 9.0), rel=1e-13)


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
