"""The rules of others for the number of workers, step by step, as the benchmarks compare them with Weir's."""

from collections.abc import Sequence

import numpy as np
import pytest
from benchmarks.autoscalers import (
    HpaAutoscaler,
    HpaOptions,
    KedaAutoscaler,
    KedaOptions,
    RayAutoscaler,
    RayOptions,
    parse_autoscaler,
)

from weir.errors import SettingsError
from weir.policy.cost.profile import Profile
from weir.policy.scaling import ScalingObservation, WorkerRange
from weir.simulation.scaling import ScalingTrial, WorkerLoad

RANGE = WorkerRange(1, 8)


def load(
    now: float, *, waiting: int = 0, running: int = 0, ready: int = 1, starting: Sequence[float] = (),
    rows_seconds: float = 0.0, busy_seconds: float = 0.0,
) -> WorkerLoad:  # fmt: skip
    return WorkerLoad(
        ScalingObservation(now, 0, waiting, running, ready, starting, 10.0), running, rows_seconds, busy_seconds
    )


def test_ray_divides_the_mean_ongoing_requests_by_the_target() -> None:
    rule = RayAutoscaler(RANGE, RayOptions(target=2.0, upscale=0.0, downscale=0.0, look_back=10.0))
    assert rule.decide(load(0.0, waiting=6, running=2)) == 4, "at first the present number"
    assert rule.decide(load(10.0, rows_seconds=30.0)) == 2, "3 on average over 10 s"
    assert rule.decide(load(20.0, ready=2, rows_seconds=60.0)) == 2


def test_ray_changes_when_all_decisions_of_the_delay_agree() -> None:
    rule = RayAutoscaler(RANGE, RayOptions(target=1.0, upscale=0.5, downscale=1.0, look_back=0.1))
    decisions = [rule.decide(load(0.1 * turn, waiting=3, rows_seconds=0.29 * turn)) for turn in range(8)]
    assert decisions == [1] * 5 + [3, 1, 1], "int(0.5 / 0.1) = 5 decisions are not enough"
    down = [rule.decide(load(10.0 + 0.1 * turn, ready=3, rows_seconds=0.0)) for turn in range(12)]
    assert down == [3] * 10 + [1, 3]


def test_ray_comes_back_from_zero_without_delay_and_goes_there_from_one() -> None:
    rule = RayAutoscaler(WorkerRange(0, 4), RayOptions(target=1.0, downscale=0.0))
    assert rule.decide(load(0.0, ready=0)) == 0
    assert rule.decide(load(0.1, ready=0, waiting=1)) == 1
    assert RayAutoscaler(WorkerRange(0, 4), RayOptions(downscale=0.0)).decide(load(0.0, ready=3)) == 1
    assert RayAutoscaler(WorkerRange(0, 4), RayOptions(downscale=0.0)).decide(load(0.0, ready=1)) == 0


def test_pod_autoscaler_follows_the_utilisation_outside_its_tolerance() -> None:
    rule = HpaAutoscaler(RANGE, HpaOptions(target=0.5, stabilisation=0.0))
    assert rule.decide(load(0.0, ready=4)) == 4, "nothing is known yet"
    assert rule.decide(load(15.0, ready=4, busy_seconds=32.0)) == 4, "0.53 is within a tenth of 0.5"
    assert rule.decide(load(30.0, ready=4, busy_seconds=32.0 + 48.0)) == 7, "4 · 0.8 / 0.5"
    assert rule.decide(load(45.0, ready=4, busy_seconds=80.0 + 12.0)) == 2


def test_pod_autoscaler_counts_starting_pods_as_idle_and_adds_at_most_as_many_as_there_are() -> None:
    rule = HpaAutoscaler(WorkerRange(1, 64), HpaOptions(target=0.5, stabilisation=0.0))
    rule.decide(load(0.0, ready=2))
    assert rule.decide(load(15.0, ready=2, starting=[5.0] * 2, busy_seconds=30.0)) == 4, "2 busy of 4 are the target"
    assert rule.decide(load(30.0, ready=2, starting=[5.0], busy_seconds=60.0)) == 4, "3 · 2 / 3 / 0.5"
    tight = HpaAutoscaler(WorkerRange(1, 64), HpaOptions(target=0.1, stabilisation=0.0))
    tight.decide(load(0.0, ready=6))
    assert tight.decide(load(15.0, ready=6, busy_seconds=90.0)) == 12, "60 are wanted"


def test_pod_autoscaler_takes_pods_away_after_its_window() -> None:
    rule = HpaAutoscaler(RANGE, HpaOptions(target=0.5, stabilisation=30.0))
    rule.decide(load(0.0, ready=4))
    assert [rule.decide(load(15.0 * turn, ready=4)) for turn in range(1, 5)] == [4, 4, 1, 1]


def test_keda_divides_the_queue_by_its_threshold() -> None:
    rule = KedaAutoscaler(RANGE, KedaOptions(target=5.0, stabilisation=0.0))
    assert rule.decide(load(0.0, waiting=17, ready=2)) == 4
    assert rule.decide(load(15.0, waiting=20, ready=4)) == 4
    assert rule.decide(load(30.0, waiting=0, ready=4)) == 1


def test_keda_comes_back_from_zero_when_it_polls_and_goes_there_after_its_cooldown() -> None:
    rule = KedaAutoscaler(WorkerRange(0, 4), KedaOptions(cooldown=40.0, polling=30.0))
    assert [
        rule.decide(load(now, waiting=waiting)) for now, waiting in ((0.0, 1), (15.0, 0), (30.0, 0), (45.0, 0))
    ] == [1, 1, 1, 0]
    woken = [rule.decide(load(now, waiting=1, ready=0)) for now in (60.0, 75.0, 90.0, 105.0)]
    assert woken == [0, 1, 0, 1], "every 30 s"
    assert rule.decide(load(200.0, ready=0)) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slo", "must be one of ray, hpa, keda, with options"),
        ("ray:goal=2", "'goal' is not an option of ray; there are target, upscale, downscale, look_back"),
        ("hpa:target=0", "target=0 must be a number greater than 0"),
        ("hpa:target=x", "target=x must be a number greater than 0"),
        ("keda:cooldown=soon", "cooldown=soon must be a duration of 0 or more"),
        ("keda:cooldown=-1s", "cooldown=-1s must be a duration of 0 or more"),
    ],
)
def test_mistake_in_a_rule_is_named(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        parse_autoscaler(text, RANGE)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["ray:target=8,upscale=0s", "hpa", "keda"])
def test_rules_are_simulated(text: str) -> None:
    profile = Profile.linear(alpha_ms=100.0, tau0_ms=400.0, max_batch_size=16)
    times = np.cumsum(np.random.default_rng(5).exponential(1.0 / 15.0, 3_000))
    trial = ScalingTrial(profile, times, RANGE, 5.0, target_load=0.8)
    outcome = trial.outcome_of(text, trial.run(parse_autoscaler(text, RANGE)))
    assert outcome.most_workers > 1
    assert 0.0 < outcome.busy_share <= 1.0
