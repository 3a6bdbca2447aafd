from math import inf

import numpy as np
import pytest

from weir.batching.settings import BatchingSettings
from weir.policy.cost.profile import Profile
from weir.policy.decision import Decision, Observation, Policy
from weir.policy.rules import ControlLimit, FullBatches, Greedy, SizeOrDelay
from weir.simulation.simulator import policy_for, settings_for, simulate
from weir.simulation.statistics import capacity_of, is_bounded

# The best batch is 4: 4000 rows/s; a full one of 8 serves 2667.
PEAKED = Profile(np.array([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]), np.ones(8), np.zeros(8))


@pytest.mark.parametrize(
    ("policy", "capacity"),
    [
        (Greedy(), 8 / 0.003), (FullBatches(4), 4000.0), (FullBatches(1), 1000.0), (ControlLimit(2), 8 / 0.003),
        (SizeOrDelay(), 8 / 0.003),
    ],
)  # fmt: skip
def test_a_long_line_is_served_in_the_batches_that_the_policy_cuts(policy: Policy, capacity: float) -> None:
    assert capacity_of(policy, PEAKED, settings_for(PEAKED)) == pytest.approx(capacity)
    assert capacity_of(policy, PEAKED, settings_for(PEAKED), workers=3) == pytest.approx(3.0 * capacity)


def test_the_solved_policy_serves_all_that_can_be_served_once_it_knows_the_rate() -> None:
    compared = simulate(PEAKED, ["smdp", "greedy"], "poisson:0.9", requests=5_000)  # greedy serves no more than 0.67
    assert compared.outcomes["smdp"].stable
    assert not compared.outcomes["greedy"].stable


class Silent:
    """Says nothing of long lines."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises

    def decide(self, seen: Observation) -> Decision:
        """Wait, or raise."""
        if self.raises:
            raise ValueError
        return Decision(0)


def test_who_does_not_say_is_not_known() -> None:
    for raises in (True, False):
        assert capacity_of(Silent(raises=raises), PEAKED, settings_for(PEAKED)) is None


def test_what_is_refused_does_not_wait() -> None:
    solved = policy_for("smdp", PEAKED)
    assert not is_bounded(Greedy(), settings_for(PEAKED))
    assert not is_bounded(solved, settings_for(PEAKED))
    assert is_bounded(Greedy(), BatchingSettings(max_batch_size=8, max_queue_delay=inf, max_queue_size=100))
