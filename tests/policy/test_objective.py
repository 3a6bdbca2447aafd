"""objective.py: what is promised about latency."""

import pytest

from weir.errors import SettingsError
from weir.policy.objective import Objective


def test_an_objective_is_a_value() -> None:
    assert Objective(0.02).checked() == (0.02, 0.01, 0.0)


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        (Objective(0.0), "deadline=0.0: must be a number of seconds, greater than 0"),
        (Objective(float("inf")), "deadline=inf"),
        (Objective(0.02, 1.0), "late_share=1.0: must be between 0 and 1"),
        (Objective(0.02, 0.01, 0.02), "margin=0.02: must be 0 or more, and less than the deadline 0.02"),
        (Objective(0.02, 0.01, -1.0), "margin=-1.0"),
    ],
)
def test_what_cannot_be_promised_is_named(objective: Objective, says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        objective.checked()
    assert says in raised.value.message
