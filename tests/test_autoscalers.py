"""The rules of others for the number of workers, step by step, as the benchmarks compare them with Weir's."""

import numpy as np
import pytest
from benchmarks.autoscalers import parse_autoscaler

from weir.policy.cost.profile import Profile
from weir.policy.scaling import WorkerRange
from weir.simulation.scaling import ScalingTrial

RANGE = WorkerRange(1, 8)


@pytest.mark.parametrize("text", ["ray:target=8,upscale=0s", "hpa", "keda"])
def test_rules_are_simulated(text: str) -> None:
    profile = Profile.linear(alpha_ms=100.0, tau0_ms=400.0, max_batch_size=16)
    times = np.cumsum(np.random.default_rng(5).exponential(1.0 / 15.0, 3_000))
    trial = ScalingTrial(profile, times, RANGE, 5.0, target_load=0.8)
    outcome = trial.outcome_of(text, trial.run(parse_autoscaler(text, RANGE)))
    assert outcome.most_workers > 1
    assert 0.0 < outcome.busy_share <= 1.0
