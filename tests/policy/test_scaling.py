"""The rule for the number of workers: ranges, capacities, forecasts, and each decision in virtual time."""

import math
from collections.abc import Sequence

import pytest
from tests.rings import subcases

from weir.errors import SettingsError
from weir.policy import scaling
from weir.policy.online.arrivals import Forecast
from weir.policy.scaling import Capacity, ScalingObservation, ScalingReason, WorkerRange, WorkerScaling

# One worker serves 10 rows per second at most, and 8 within the goal; full batches take 0.5 s.
CAPACITY = Capacity("p99=2s", [8.0, 18.0, 27.0, 36.0], 10.0, slack=1.5)


def test_range_is_read_from_its_text() -> None:
    texts = {"1..16": (1, 16), "0..4": (0, 4), " 2 .. 3 ": (2, 3), "4": (4, 4), "1..1": (1, 1)}
    assert {text: WorkerRange.parse(text) for text in texts} == texts
    allowed = WorkerRange(1, 4)
    assert [allowed.clip(workers) for workers in (0, 1, 3, 9)] == [1, 1, 3, 4] and str(allowed) == "1..4"


@subcases("text", ["", "0", "0..0", "4..2", "1..", "..4", "1...4", "1..2000", "-1..4", "a..b", "1..٣", "1.5"])
def test_text_that_is_no_range_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        WorkerRange.parse(text)
    assert str(raised.value) == (
        f"workers={text!r}: must be 1 or more, or the fewest and the most, as in 1..16 or 0..4; at most 1024"
    )


def test_capacity_says_the_fewest_workers_that_keep_the_goal() -> None:
    assert [CAPACITY.needed(rate) for rate in (0.0, 8.0, 8.1, 27.0, 35.0, 99.0)] == [1, 1, 2, 3, 4, 4]


def test_capacity_predicts_between_the_loads_that_are_known() -> None:
    known = Capacity("knee", [8.0], 10.0, 1.0, loads=(0.2, 0.6), figures=[[(10.0, 20.0, 0.3), (30.0, 60.0, 0.7)]])
    assert known.predict(1, 4.0) == pytest.approx((1, 20.0, 40.0, 0.5))
    assert known.predict(1, 1.0) == pytest.approx((1, 10.0, 20.0, 0.15)), "below that only the busy share falls"
    beyond = known.predict(1, 9.0)
    assert beyond == (1, math.inf, math.inf, 1.0)
    assert beyond.to_dict() == {"workers": 1, "response_time_ms": None, "p99_ms": None, "utilisation": 1.0}
    assert known.predict(2, 4.0) is known.predict(0, 4.0) is CAPACITY.predict(1, 4.0) is None


def test_without_a_solution_workers_are_used_up_to_a_share() -> None:
    assumed = scaling.assumed_capacity(10.0, 0.5, 3.0, 3)
    assert list(assumed.rates) == pytest.approx([8.0, 16.0, 24.0])
    assert (assumed.goal, assumed.slack) == ("load=0.8", 3.0)
    assert scaling.assumed_capacity(10.0, 5.0, 3.0, 3, 0.5).slack == 5.0, (
        "a queue of one batch is no reason for a worker"
    )


def observed(
    now: float = 0.0, *, arrivals: int = 0, waiting: int = 0, running: int = 0, ready: int = 1,
    starting: Sequence[float] = (), start_up: float = 4.0,
) -> ScalingObservation:  # fmt: skip
    """Return an observation of one idle worker, unless stated otherwise."""
    return ScalingObservation(now, arrivals, waiting, running, ready, starting, start_up)


@subcases(
    ("seen", "rate", "queue"),
    [
        (observed(waiting=5), 10.0, 5.0),
        (observed(waiting=5), 20.0, 45.0),
        (observed(waiting=50), 5.0, 30.0),
        (observed(waiting=5), 0.0, 0.0),
        (observed(waiting=5, starting=[1.0]), 20.0, 15.0),
        (observed(waiting=5, starting=[1.0, 9.0]), 20.0, 15.0),  # none takes longer than one that is started now
        (observed(waiting=5, starting=[-2.0]), 20.0, 5.0),  # it should be ready by now
        (observed(waiting=5, ready=0), 10.0, 45.0),
        (observed(waiting=5, ready=0, start_up=0.0), 10.0, 5.0),
    ],
)
def test_queue_is_followed_until_a_new_worker_could_be_ready(
    seen: ScalingObservation, rate: float, queue: float
) -> None:
    assert scaling.queue_at_start(seen, rate, 10.0) == pytest.approx(queue)


class Line:
    """Asks a rule every second about a line of workers that are ready as soon as they are decided on."""

    def __init__(self, rule: WorkerScaling, workers: int = 1) -> None:
        self.rule = rule
        self.workers = workers
        self.now = 0.0
        self.arrivals = 0
        self.reasons: list[ScalingReason] = []

    def pass_seconds(self, seconds: int, rate: int, *, waiting: int = 0) -> list[int]:
        """Let rows arrive at `rate` for so many seconds. Return the workers that were wanted at the end of each."""
        wanted = []
        for _ in range(seconds):
            self.now += 1.0
            self.arrivals += rate
            seen = observed(self.now, arrivals=self.arrivals, waiting=waiting, ready=self.workers, start_up=6.0)
            decision = self.rule.decide(seen)
            self.workers = decision.workers
            self.reasons.append(decision.reason)
            wanted.append(decision.workers)
        return wanted


def test_more_workers_are_wanted_at_once_and_fewer_only_after_a_while() -> None:
    line = Line(WorkerScaling(WorkerRange(1, 4), CAPACITY))
    line.pass_seconds(20, 5)
    up = line.pass_seconds(10, 25)
    assert up[-1] == 3 and up == sorted(up) and line.reasons[-1] is ScalingReason.RATE
    down = line.pass_seconds(200, 5)
    assert line.reasons[-200 + down.index(1) - 1] is ScalingReason.HELD
    needed_again = next(second for second, workers in enumerate(down) if workers < 3)
    assert needed_again >= 6, "a worker is kept for as long as a start takes"
    assert down[-1] == 1


def test_worker_is_kept_a_few_seconds_however_fast_it_starts() -> None:
    rule = WorkerScaling(WorkerRange(1, 4), CAPACITY)
    rule.decide(observed(0.0, start_up=0.0))
    assert rule.decide(observed(1.0, arrivals=25, start_up=0.0)).workers == 3
    kept = [rule.decide(observed(1.0 + second, arrivals=25, ready=3, start_up=0.0)).workers for second in range(1, 12)]
    assert kept[: int(scaling.LEAST_HOLD) - 1] == [3] * (int(scaling.LEAST_HOLD) - 1)
    assert kept[-1] == 1


def test_queue_that_could_not_be_answered_in_time_needs_workers() -> None:
    rule = WorkerScaling(WorkerRange(1, 8), CAPACITY)
    rule.decide(observed(0.0))
    decision = rule.decide(observed(10.0, arrivals=30, waiting=70, start_up=4.0))
    assert decision.reason is ScalingReason.QUEUE
    # After 4 s, at the high rate, the queue is as long as `queue`; 15 rows of it are answered in time by each worker.
    assert decision.by_queue == math.ceil(decision.queue / 15.0) == decision.workers
    assert decision.by_rate == 1
    assert decision.high_rate > decision.rate == pytest.approx(3.0)


def test_worker_is_not_taken_away_if_the_queue_would_need_it_again() -> None:
    unsure = Capacity("p99=2s", CAPACITY.rates, 10.0, slack=1.5, exceeded=1e-6)
    rule, seconds = WorkerScaling(WorkerRange(1, 4), unsure), 60
    for second in range(seconds):
        decision = rule.decide(observed(float(second), arrivals=10 * second, ready=3))
    # At 16 rows/s, 3 workers have no queue; of 2 the last row would still be in time, of 1 it would not.
    assert decision.queue == 0.0
    assert decision.high_rate == pytest.approx(10.0 + 4.03 * math.sqrt(10.0 / 4.8), rel=0.01)
    assert decision.by_queue == math.ceil(4.0 * decision.high_rate / (10.0 * 5.5)) == 2


def test_a_rate_that_is_known_well_is_not_assumed_to_be_higher() -> None:
    assert scaling.errors_above(Forecast(10.0, 0.0), 0.01) == 0.0
    assert scaling.errors_above(Forecast(10.0, 0.2), 0.01) == 0.0
    assert scaling.errors_above(Forecast(0.0, 1.0), 0.01) == 4.0


def test_range_bounds_what_is_needed_and_says_so() -> None:
    rule = WorkerScaling(WorkerRange(2, 3), CAPACITY)
    assert rule.decide(observed(0.0, ready=2))[:2] == (2, ScalingReason.LEAST)
    assert rule.decide(observed(1.0, arrivals=100, ready=2))[:2] == (3, ScalingReason.MOST)


def test_no_worker_is_kept_for_long_without_requests() -> None:
    rule = WorkerScaling(WorkerRange(0, 4), CAPACITY, idle_after=10.0)
    rule.decide(observed(0.0))
    for now, running in ((1.0, 1), (9.0, 1), (18.9, 0)):
        assert rule.decide(observed(now, arrivals=3, running=running)).workers == 1
    for now, ready in ((19.0, 1), (60.0, 0)):
        assert rule.decide(observed(now, arrivals=3, ready=ready))[:2] == (0, ScalingReason.IDLE)
    assert rule.decide(observed(60.5, arrivals=4, waiting=1, ready=0))[:2] == (1, ScalingReason.FIRST)
    assert rule.decide(observed(61.0, arrivals=4, waiting=1, ready=0, starting=[3.5])).workers == 1


def test_workers_of_a_range_from_one_are_kept_for_ever() -> None:
    rule = WorkerScaling(WorkerRange(1, 4), CAPACITY, idle_after=10.0)
    assert [rule.decide(observed(second)).workers for second in (0.0, 100.0, 1000.0)] == [1, 1, 1]
