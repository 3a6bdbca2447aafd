"""Rules for the number of workers in virtual time: what each number can do, the engine, and Weir's rule."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.rings import spread, subcases

from weir.batching import BatchingSettings
from weir.errors import SettingsError
from weir.policy.cost import LatencySLO, Prices, Profile
from weir.policy.scaling import WorkerRange
from weir.simulation import scaling
from weir.simulation.scaling import CapacityRequest, ScalingTrial, WorkerLoad, measure_capacity
from weir.simulation.simulator import run

# A batch of b takes 0.4 + 0.1 b seconds: 10 rows per second in batches of 16, and 2 one by one.
SLOW = Profile.linear(alpha_ms=100.0, tau0_ms=400.0, max_batch_size=16)
CHANCY = Profile.linear(alpha_ms=1.0, tau0_ms=5.0, max_batch_size=12, cv=0.5)
OBJECTIVE = LatencySLO.parse("p99=4s")
RANGE = WorkerRange(1, 8)


def steps(*stretches: tuple[float, float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return Poisson arrivals in stretches of (seconds, rows per second)."""
    rng, begin, times = np.random.default_rng(5), 0.0, []
    for seconds, rate in stretches:
        times += np.sort(begin + rng.uniform(0.0, seconds, rng.poisson(seconds * rate))).tolist()
        begin += seconds
    return np.array(times)


WAVE = steps((120.0, 4.0), (120.0, 30.0), (120.0, 4.0))


@pytest.fixture(scope="module", autouse=True)
def _capacities_from_fewer_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(scaling, "PART_ROWS", 8_000)
        yield


@pytest.fixture(scope="module")
def trial() -> ScalingTrial:
    return ScalingTrial(SLOW, WAVE, RANGE, 5.0, objective=OBJECTIVE)


# What each number of workers can do.


def test_capacity_predicts_what_one_more_or_one_less_gives(trial: ScalingTrial) -> None:
    capacity = trial.capacity
    fewer, more = capacity.predict(2, 14.0), capacity.predict(3, 14.0)
    assert fewer is not None
    assert more is not None
    times = np.cumsum(np.random.default_rng(3).exponential(1.0 / 14.0, 20_000))
    for predicted in (fewer, more):
        seen = run(SLOW, "greedy", times, workers=predicted.workers)
        assert predicted.response_time_ms == pytest.approx(seen.response_time_ms.mean(), rel=0.1)
        assert predicted.p99_ms == pytest.approx(np.quantile(seen.response_time_ms, 0.99), rel=0.15)
        assert predicted.utilisation == pytest.approx(seen.busy_share, rel=0.1)
    assert fewer.response_time_ms > more.response_time_ms


def test_capacity_of_a_target_load_is_that_share() -> None:
    capacity = measure_capacity(CapacityRequest(SLOW, 3, 5.0, target_load=0.6))
    assert capacity.goal == "load=0.6"
    assert capacity.rates == pytest.approx([6.0 * SLOW.max_rate / 10.0 * count for count in (1, 2, 3)])
    assert capacity.slack == 5.0, "without a deadline a queue may last as long as a start takes"


def test_workers_that_gain_nothing_are_not_used() -> None:
    """Service times that do not depend on the size: one worker more answers as many rows as before, hardly sooner."""
    flat = Profile.linear(alpha_ms=0.1, tau0_ms=8.0, max_batch_size=32)
    capacity = measure_capacity(CapacityRequest(flat, 8, 1.0, prices=Prices(1.0, 0.0)))
    assert capacity.goal == "knee" and capacity.needed(0.35 * 8 * flat.max_rate) <= 4


@pytest.mark.parametrize("workers", spread([1, 3]))
def test_the_objective_is_kept_at_the_rate_that_is_said_to_keep_it(workers: int) -> None:
    profile = Profile.linear(alpha_ms=1.0, tau0_ms=5.0, max_batch_size=12, cv=0.05)
    made = measure_capacity(CapacityRequest(profile, workers, 1.0, objective=LatencySLO.parse("p99=60ms")))
    gaps = np.random.default_rng(5).exponential(1.0 / (0.99 * made.rates[-1]), 100_000)
    late = run(profile, "greedy", np.cumsum(gaps), workers=workers).response_time_ms > 60.0
    assert late.mean() <= 0.01


def test_capacity_of_a_policy_that_waits_is_measured_with_its_limits() -> None:
    waiting = CapacityRequest(SLOW, 2, 1.0, target_load=0.5, prices=Prices(1.0, 5000.0), solved=True)
    slower, faster = (measure_capacity(replace(waiting, solved=solved)) for solved in (True, False))
    assert slower.figures[1][0][0] > faster.figures[1][0][0]


@subcases(
    ("profile", "objective", "message"),
    [
        (SLOW, "p99=300ms", "a row alone takes 500 ms"),
        (CHANCY, "p99=7ms", "cannot be kept by any number of workers"),
    ],
)
def test_objective_that_no_worker_can_keep_is_refused(profile: Profile, objective: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        measure_capacity(CapacityRequest(profile, 2, 1.0, objective=LatencySLO.parse(objective)))


# The engine.


def test_fixed_number_is_what_the_simulator_does_anyway(trial: ScalingTrial) -> None:
    seen, plain = trial.run("fixed:4"), run(SLOW, "greedy", WAVE, workers=4)
    assert seen.run.end.tolist() == plain.end.tolist()
    assert seen.counts == [(0.0, 4)]
    assert seen.worker_seconds == pytest.approx(4.0 * (seen.run.seconds - seen.since))


def test_workers_come_and_go_and_no_request_is_lost(trial: ScalingTrial) -> None:
    made = trial.run("weir")
    batches, first_change = made.run.batches, made.counts[1][0]
    assert batches.start[batches.worker > 0].min() >= first_change + 5.0  # they serve once they have started
    assert np.isfinite(made.run.end).all() and made.starts > 2
    order = np.lexsort((batches.start, batches.worker))
    same = batches.worker[order][1:] == batches.worker[order][:-1]
    assert (batches.start[order][1:] >= batches.end[order][:-1] - 1e-9)[same].all(), "one batch at a time"
    assert trial.outcome("weir") == trial.outcome("weir")
    seen, peak = trial.outcome("weir"), trial.outcome("fixed:4")
    assert seen.late_share <= 0.05 and seen.most_workers <= 8
    assert seen.worker_hours < 0.75 * peak.worker_hours


def test_worker_hours_count_starts_and_the_last_batches() -> None:
    # One worker serves all; a second one is started at 100 s, and taken away before it was ready.
    class Hasty:
        period = 1.0

        def decide(self, load: WorkerLoad) -> int:
            return 2 if 100.0 <= load.seen.now < 103.0 else 1

    times = np.arange(0.0, 200.0, 5.0)
    trial = ScalingTrial(SLOW, times, RANGE, 30.0, warm_up=0.0, target_load=0.5)
    made = trial.run(Hasty())
    assert made.worker_seconds == pytest.approx(195.5 + 3.0)
    assert made.counts == [(0.0, 1), (100.0, 2), (103.0, 1)]


def test_pipelines_and_policies_that_wait_for_ever_end_with_the_arrivals() -> None:
    piped = ScalingTrial(replace(SLOW, pipeline_depth=2), WAVE, WorkerRange(1, 4), 5.0, objective=OBJECTIVE)
    waiting = ScalingTrial(SLOW, np.arange(0.0, 60.0, 0.7), RANGE, 5.0, policy="full:16", target_load=0.8)
    runs = [trial.run("weir") for trial in (piped, waiting)]
    assert all(np.isfinite(made.run.end).all() for made in runs) and runs[0].starts > 2


def test_random_service_times_and_deadlines_are_simulated_too() -> None:
    varying, settings = replace(SLOW, cv=np.full(16, 0.3)), BatchingSettings(max_batch_size=16)
    trial = ScalingTrial(varying, WAVE, RANGE, 20.0, target_load=0.8, deadline=2.0, settings=settings)
    seen = trial.outcome("weir")
    assert 0.0 < seen.late_share < 0.5 and seen.longest_ms < 5000.0


# Weir's rule in the engine.


@pytest.mark.nightly
def test_solved_policy_is_solved_for_each_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.simulation.banks.MULTI_WORKER_LOADS", (0.2, 0.5, 0.8))
    times = steps((30.0, 4.0), (30.0, 10.0))
    small = Profile.linear(alpha_ms=100.0, tau0_ms=400.0, max_batch_size=8)
    trial = ScalingTrial(small, times, WorkerRange(1, 2), 2.0, policy="smdp", target_load=0.7, prices=Prices(1.0, 1.0))
    made = trial.run("weir")
    assert np.isfinite(made.run.end).all()
    fixed, two = trial.run("fixed:2").run, replace(trial, allowed=WorkerRange(2, 2)).run("weir").run
    assert fixed.end.tolist() == two.end.tolist(), "from the start on"


# Comparisons.


@subcases("text", ["slo", "weir:target=1", "hpa"])
def test_rule_that_weir_does_not_have_is_named(text: str, trial: ScalingTrial) -> None:
    with pytest.raises(SettingsError, match=f"scaling='{text}': must be weir, or a number of workers as in fixed:4"):
        trial.run(text)


def test_fixed_number_is_a_number_within_the_range() -> None:
    with pytest.raises(SettingsError, match="scaling='fixed:none': workers='none': must be 1 or more"):
        scaling.range_of("fixed:none", RANGE)
    assert scaling.range_of("fixed:99", RANGE) == WorkerRange(8, 8)


def test_comparison_has_each_rule_on_the_same_arrivals() -> None:
    reported: list[str] = []
    compared = scaling.simulate_scaling(
        SLOW, ["weir", "fixed:3"], "sine:0.4,depth=0.9,period=200s",
        workers="1..4", start_up=5.0, requests=4000, objective="p99=4s", progress=lambda what, done, total: reported.append(what),
    )  # fmt: skip
    document = compared.to_dict()
    assert document["workers"] == "1..4"
    assert list(document["outcomes"]) == ["weir", "fixed:3"]
    assert document["outcomes"]["fixed:3"]["mean_workers"] == pytest.approx(3.0)
    assert {outcome.requests for outcome in compared.outcomes.values()} == {compared.outcomes["weir"].requests}
    assert reported == ["rules"] * 2


@subcases(
    ("changed", "message"),
    [
        ({"workers": "4..1"}, "workers='4..1'"),
        ({"target_load": 1.5}, "target_load=1.5: must be a share"),
        ({"start_up": 0.0}, "start_up=0.0: must be a number of seconds"),
        ({"idle_after": -1.0}, "idle_after=-1.0"),
        ({"objective": "p99=100ms"}, "a row alone takes"),
        ({"rules": ["weir", "none"]}, "scaling='none'"),
    ],
)
def test_mistakes_are_named_before_anything_is_simulated(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"rules": ["weir"], "arrivals": "poisson:0.5", "workers": "1..4"} | changed
    with pytest.raises(SettingsError, match=r"^[^\n]*$") as raised:
        scaling.simulate_scaling(SLOW, **arguments)
    assert message in str(raised.value)
