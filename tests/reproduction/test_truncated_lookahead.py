"""truncated.py: what is expected after a decision, written out."""

import numpy as np
import pytest
from reproduction.truncated import Lookahead

from weir.policy.cost.profile import Floats

ARRIVALS = np.array([[0.5, 0.3, 0.15, 0.05], [0.2, 0.3, 0.3, 0.2]])
LONGEST = 5
VALUES = np.array([0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 60.0])


def written_out(action: int, state: int, values: Floats) -> float:
    left = min(state, LONGEST) - action
    return float(sum(share * values[min(left + come, LONGEST + 1)] for come, share in enumerate(ARRIVALS[action - 1])))


@pytest.mark.parametrize("shares", [None, np.array([0.5, 2.0, 3.0])])
def test_what_is_expected_is_added_for_each_action_and_state(shares: Floats | None) -> None:
    lookahead = Lookahead(ARRIVALS, LONGEST, shares)
    weights = np.ones(3) if shares is None else shares
    for values in (VALUES, VALUES[::-1]):  # its memory is used again
        table = np.full((3, 7), 100.0)
        lookahead.add(values, table)
        for state in range(7):
            assert table[0, state] == pytest.approx(100.0 + weights[0] * values[min(state + 1, 6)])
            for action in range(1, min(state, 2) + 1):
                assert table[action, state] == pytest.approx(
                    100.0 + weights[action] * written_out(action, state, values)
                )
        assert np.isfinite(table).all()


def test_what_a_sum_of_floats_would_lose_is_left_out() -> None:
    rare = np.hstack((ARRIVALS, np.full((2, 3), 1e-25)))
    tables = [np.zeros((3, 7)) for _ in range(2)]
    for arrivals, table in zip((ARRIVALS, rare), tables, strict=True):
        Lookahead(arrivals, LONGEST).add(VALUES, table)
    assert (tables[0] == tables[1]).all()
