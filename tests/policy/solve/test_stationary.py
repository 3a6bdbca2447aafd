"""stationary.py: laws against a linear solver, and tails that it cannot see."""

import numpy as np
import pytest
from reproduction.bounded import arrivals, band

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


@pytest.mark.parametrize(
    "actions", [[0, 1, 2, 3, 3, 3, 3, 3], [0, 0, 0, 3, 3, 3, 1, 3], [0, 0, 2, 1, 3, 0, 2, 2]], ids=str
)
def test_the_law_is_stationary(actions: list[int]) -> None:
    law, matrix = chain(actions, [0, 1, 2, 3, 4, 5, 6, 6])
    assert law.sum() == pytest.approx(1.0, rel=1e-14)
    assert law @ matrix == pytest.approx(law, rel=1e-12)


def test_states_that_are_left_for_ever_get_nothing() -> None:
    law, matrix = chain([0, 0, 0, 0, 2, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5, 6, 7, 7])
    assert law[:2].tolist() == [0.0, 0.0]
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
