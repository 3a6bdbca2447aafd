import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiling.kit import Duration, TimedExecutor, items, started
from tests.rings import subcases

from weir.errors import ModelError
from weir.messages import OBJECT, Batch, Events
from weir.metrics import MetricReport, ModelMetrics
from weir.profiling import ProfilingSettings, sampling
from weir.testing import FakeBlock, FakeClock, FakeExecutor, whole


def sampled(
    duration: Duration, act: Callable[[sampling.ServiceTimeSampler], Awaitable[Any]], *, places: int = 1, ahead: float = 0.0,
    contention: sampling.Contention | None = None, **settings: Any,
) -> tuple[sampling.ServiceTimeSampler, TimedExecutor]:  # fmt: skip
    """Do something with a sampler on a worker with these service times."""

    async def story() -> tuple[sampling.ServiceTimeSampler, TimedExecutor]:
        executor = TimedExecutor(FakeClock(), duration, places=places, ahead=ahead)
        measuring = await started(executor)
        sampler = sampling.ServiceTimeSampler(measuring, items(), ProfilingSettings(**settings), contention=contention)
        await act(sampler)
        return sampler, executor

    return asyncio.run(story())


def test_the_warm_up_ends_when_times_are_steady_and_counts_for_nothing() -> None:
    sampler, executor = sampled(lambda b: 0.001 * b, lambda sampler: sampler.warm_up([1, 2, 4, 8]))
    assert sampling.WARM_UP_BATCHES <= len(executor.batches) <= sampling.WARM_UP_BATCHES + 2
    assert set(executor.sizes) == {1, 4, 8}
    assert not sampler.durations


def test_the_warm_up_goes_on_while_times_fall_but_not_for_ever() -> None:
    falling = iter(range(100_000, 0, -1))
    _, executor = sampled(
        lambda b: 0.99 ** (100_000 - next(falling)), lambda sampler: sampler.warm_up([1]), seconds=1e6
    )
    assert sampling.WARM_UP_BATCHES <= len(executor.batches) < sampling.WARM_UP_MOST
    wild = Random(1)
    _, executor = sampled(lambda b: wild.expovariate(1.0), lambda sampler: sampler.warm_up([1]), seconds=1e6)
    assert len(executor.batches) <= sampling.WARM_UP_MOST


def test_the_warm_up_of_a_slow_model_takes_a_fifth_of_the_time() -> None:
    _, executor = sampled(lambda b: 0.5, lambda sampler: sampler.warm_up([1, 2]), seconds=10.0)
    assert len(executor.batches) == 4


def test_sizes_come_in_random_order_and_the_seed_decides_which() -> None:
    def order(seed: int) -> list[int]:
        return sampled(lambda b: 0.001, lambda sampler: sampler.settle([1, 2, 3, 4]), seed=seed)[1].sizes

    assert order(1) == order(1) != order(2)
    assert order(1)[:4] != [1, 2, 3, 4] or order(1)[4:8] != [1, 2, 3, 4]
    assert all(sorted(order(3)[start : start + 4]) == [1, 2, 3, 4] for start in range(0, 4 * sampling.LEAST, 4))


def test_when_the_time_is_up_it_ends_but_every_size_has_been_measured() -> None:
    sampler, _ = sampled(lambda b: 1.0, lambda sampler: sampler.settle([1, 2, 3]), seconds=1.0)
    assert {size: len(durations) for size, durations in sampler.durations.items()} == {
        1: sampling.FEWEST,
        2: sampling.FEWEST,
        3: sampling.FEWEST,
    }


def test_a_share_of_the_time_is_used_and_what_is_sure_not_measured_again() -> None:
    async def act(sampler: sampling.ServiceTimeSampler) -> None:
        await sampler.settle([1, 2], 0.5)
        assert 5.0 <= sampler.elapsed <= 6.0
        await sampler.settle([1, 2], 0.5)
        assert sampler.elapsed <= 6.0

    sampled(lambda b: 0.5, act, seconds=10.0, confidence=1e-12)
    _, executor = sampled(lambda b: 0.001, lambda sampler: sampler.settle([1]))
    assert len(executor.batches) == sampling.LEAST
    shares: list[float] = []

    async def again(sampler: sampling.ServiceTimeSampler) -> None:
        await sampler.settle([1, 2], progress=shares.append)
        await sampler.settle([1, 2], progress=shares.append)

    sampled(lambda b: 0.001, again)
    assert shares[0] == 0.0 and shares[-1] == 1.0 and len(shares) == sampling.LEAST


def test_with_two_batches_in_flight_it_is_the_cycle_that_counts() -> None:
    sampler, _ = sampled(lambda b: 0.003 * b, lambda sampler: sampler.settle([1, 4]), places=2, ahead=0.002)
    estimates = sampler.estimates()
    assert estimates[1].mean == pytest.approx(0.003)
    assert estimates[4].mean == pytest.approx(0.012)
    assert sampler.offset() == pytest.approx(0.002)


def test_with_one_place_a_caller_waits_no_longer_than_the_batch_takes() -> None:
    sampler, _ = sampled(lambda b: 0.001, lambda sampler: sampler.settle([1]), ahead=0.004)
    assert sampler.estimates()[1].mean == pytest.approx(0.005)
    assert sampler.offset() == 0.0


@subcases(("places", "count"), [(1, 100), (2, 100)])
def test_back_to_back_keeps_the_worker_busy(places: int, count: int) -> None:
    async def act(sampler: sampling.ServiceTimeSampler) -> None:
        ran, seconds = await sampler.back_to_back(4, 1.0)
        assert ran >= count
        assert seconds == pytest.approx(ran * 0.01)

    sampled(lambda b: 0.01, act, places=places)


@pytest.mark.parametrize("places", [1, 2])
def test_a_duration_is_what_the_server_sees_with_the_waking_up(places: int, tmp_path: Path) -> None:
    """A batch of 5 ms whose worker takes 0.15 ms to wake: nothing of its 5.15 ms is taken off, and nobody else is to blame."""
    folder = tmp_path / "7" / "task" / "7"
    folder.mkdir(parents=True)
    waited = ran = 0

    def waking(b: int) -> float:
        nonlocal waited, ran
        waited, ran = waited + 150_000, ran + 1
        (folder / "schedstat").write_text(f"1 {waited} {ran}")
        return 0.00515

    (folder / "schedstat").write_text("1 0 0")
    contention = sampling.Contention([7], tmp_path)
    sampler, _ = sampled(waking, lambda sampler: sampler.settle([1]), places=places, contention=contention)
    assert sampler.durations[1] == pytest.approx([0.00515] * len(sampler.durations[1]))
    assert sampler.estimates()[1].mean == pytest.approx(0.00515)
    assert sampler.crowding == 0.0


def test_pauses_on_a_crowded_machine_are_left_out_more_readily(tmp_path: Path) -> None:
    folder = tmp_path / "7" / "task" / "7"
    folder.mkdir(parents=True)
    (folder / "schedstat").write_text("1 0 1")
    batches = waited = 0

    def crowded(b: int) -> float:
        """Every sixth batch, of 0.1 ms, waits 1 ms for a CPU."""
        nonlocal batches, waited
        batches += 1
        waited += 0 if batches % 6 else 1_000_000
        (folder / "schedstat").write_text(f"1 {waited} 1")
        return 0.0001 if batches % 6 else 0.0011

    sampler, _ = sampled(crowded, lambda sampler: sampler.settle([1]), contention=sampling.Contention([7], tmp_path))
    assert sampler.crowding > 0.3
    assert sampler.estimates()[1].mean == pytest.approx(0.0001)


async def test_a_batch_that_fails_leaves_none_that_is_waited_for() -> None:
    executor = TimedExecutor(FakeClock(), lambda b: 0.001, places=2, fail=ModelError("no"))
    sampler = sampling.ServiceTimeSampler(await started(executor), items(), ProfilingSettings())
    with pytest.raises(ModelError, match="no"):
        await sampler.back_to_back(2, 1.0)


async def listening(executor: FakeExecutor, clock: FakeClock | None = None) -> sampling.Measuring:
    """Return what has started `executor` and listens to it."""
    measuring = sampling.Measuring(executor, clock or FakeClock())
    await executor.start(measuring)
    return measuring


async def test_a_batch_is_timed_to_its_last_events_and_its_memory_given_back() -> None:
    clock, executor, block = FakeClock(), FakeExecutor(), FakeBlock(10)
    measuring = await listening(executor, clock)
    assert measuring.places == {0: 1}
    done = measuring.run(0, [1, 2], OBJECT, OBJECT)
    clock.advance(0.25)
    executor.reply(0, Events(sampling.FIRST_ID, [block], indices=[0], final=False))
    clock.advance(0.5)
    executor.reply(0, Events(sampling.FIRST_ID, [2], indices=[1]))
    assert await done == sampling.Finished(1000.0, 1000.75)
    assert block.shares == 0
    with pytest.raises(ModelError, match="worker 3 cannot be measured: it has not started"):
        await measuring.run(3, [1], OBJECT, OBJECT)


async def test_a_lost_worker_fails_its_batches_until_it_is_back() -> None:
    executor = FakeExecutor()
    measuring = await listening(executor)
    under_way = measuring.run(0, [1], OBJECT, OBJECT)
    executor.lose(0, "it was killed")
    for done in (under_way, measuring.run(0, [1], OBJECT, OBJECT)):
        with pytest.raises(ModelError, match="it was killed"):
            await done
    executor.revive(0)
    again = measuring.run(0, [1], OBJECT, OBJECT)
    executor.reply(0, whole(executor.batches[-1][1].batch_id, [1]))
    await again


async def test_a_batch_that_the_executor_refuses_leaves_nothing_behind() -> None:
    class Refusing(FakeExecutor):
        def run(self, worker: int, batch: Batch) -> None:
            raise RuntimeError("no")

    executor = Refusing()
    measuring = await listening(executor)
    with pytest.raises(RuntimeError, match="no"):
        await measuring.run(0, [1], OBJECT, OBJECT)
    executor.lose(0)  # and there is nothing to fail


async def test_what_is_late_from_the_measurement_is_dropped() -> None:
    executor, block = FakeExecutor(), FakeBlock(10)
    measuring = await listening(executor)
    left = measuring.run(0, [1], OBJECT, OBJECT)
    left.cancel()
    executor.reply(0, whole(sampling.FIRST_ID, [1]))
    executor.reply(0, whole(sampling.FIRST_ID, [block]))  # and one that nobody knows
    assert block.shares == 0
    assert measuring.has(sampling.FIRST_ID) and not measuring.has(1)


def waited(proc: Path, pid: int, thread: int, nanoseconds: int) -> None:
    """Let a thread have waited for so long."""
    folder = proc / str(pid) / "task" / str(thread)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"123456789 {nanoseconds} 17\n")


def test_the_thread_that_waited_most_counts_and_processes_add_up(tmp_path: Path) -> None:
    for pid, thread in ((7, 7), (7, 8), (9, 9)):
        waited(tmp_path, pid, thread, 1_000_000_000)
    contention = sampling.Contention([7, 9], tmp_path)
    before = contention.look()
    assert contention.since(before) == 0.0
    waited(tmp_path, 7, 7, 1_010_000_000)
    waited(tmp_path, 7, 8, 1_030_000_000)
    waited(tmp_path, 9, 9, 1_005_000_000)
    assert contention.since(before) == pytest.approx(0.035)


def test_waking_up_is_no_contention(tmp_path: Path) -> None:
    """2 ms in ten times are waking up; what is more is not."""
    waited(tmp_path, 7, 7, 0)
    contention = sampling.Contention([7], tmp_path)
    before = contention.look()
    for nanoseconds, seconds in ((2_000_000, 0.0), (3_500_000, 0.0015)):
        (tmp_path / "7" / "task" / "7" / "schedstat").write_text(f"123456789 {nanoseconds} 27\n")
        assert contention.since(before) == pytest.approx(seconds)


def test_an_unknown_kernel_and_an_ended_process_have_waited_for_nothing(tmp_path: Path) -> None:
    waited(tmp_path, 7, 7, 1)
    (tmp_path / "7" / "task" / "7" / "schedstat").write_text("")
    contention = sampling.Contention([7, 8], tmp_path)
    assert contention.since(contention.look()) == 0.0


def test_mean_spread_and_interval_are_the_usual_ones() -> None:
    durations = np.random.default_rng(1).gamma(100.0, 0.01, 4000)
    said = sampling.estimate(list(durations))
    assert said.mean == pytest.approx(durations.mean())
    assert said.cv == pytest.approx(0.1, rel=0.05)
    assert said.half_width == pytest.approx(1.96 * said.error)
    assert said.relative == pytest.approx(said.half_width / said.mean)
    assert said.left_out == 0


@subcases(
    ("short", "long", "crowded", "mean", "left_out"),
    [
        (99, 1, False, 0.010, 1),  # a rare pause of the machine
        (90, 10, False, 0.020, 0),  # what happens often belongs to the model
        (80, 20, False, 0.030, 0),
        (80, 20, True, 0.010, 20),  # on a crowded machine pauses may be more frequent
        (60, 40, True, 0.050, 0),
        (4, 1, False, 0.010, 1),
        (3, 2, False, 0.050, 0),
        (2, 1, False, 0.130 / 3, 0),  # of a tiny sample none is left out
        (1, 0, False, 0.010, 0),
    ],
)
def test_rare_pauses_are_left_out_and_reported(
    short: int, long: int, crowded: bool, mean: float, left_out: int
) -> None:
    durations = [0.010] * short + [0.110] * long
    said = sampling.estimate(durations, sampling.CROWDED_RARE) if crowded else sampling.estimate(durations)
    assert said.mean == pytest.approx(mean)
    assert (said.counted, said.left_out) == (short + long - left_out, left_out)
    assert said.left_out_seconds == pytest.approx(0.1 * left_out)
    assert (said.half_width == inf) == (said.counted == 1)


def test_few_durations_that_agree_are_as_uncertain_as_those_of_other_sizes() -> None:
    chance = np.random.default_rng(3)
    known = {size: sampling.estimate(list(chance.normal(1.0, 0.1, 500))) for size in (1, 2, 3)}
    few = sampling.steadied({**known, 4: sampling.estimate([2.0, 2.0, 2.0])})
    assert few[4].mean == 2.0
    assert few[4].cv == pytest.approx(0.1 * np.sqrt(5 / 8), rel=0.1)
    for size, each in known.items():
        assert few[size].cv == pytest.approx(each.cv, rel=0.02)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50), st.floats(0.01, 100.0))
def test_the_unit_of_time_does_not_matter(durations: list[float], scale: float) -> None:
    one, other = sampling.estimate(durations), sampling.estimate([scale * each for each in durations])
    assert min(durations) <= one.mean * (1 + 1e-9) and one.mean <= max(durations) * (1 + 1e-9)
    assert other.mean == pytest.approx(scale * one.mean)
    assert other.left_out == one.left_out


async def test_examples_that_are_measured_do_not_count_in_the_models_metrics() -> None:
    def reports() -> list[MetricReport]:
        metrics = ModelMetrics()
        metrics.gauge("size").set(1)
        metrics.counter("items").inc()
        return metrics.take() or []

    def counted() -> list[str]:
        return [report.definition.name for report in measuring.counted(0, reports())]

    measuring = await listening(FakeExecutor())
    assert counted() == ["size", "items"]
    running = measuring.run(0, [1], OBJECT, OBJECT)
    assert counted() == ["size"]
    running.cancel()


def test_each_size_is_measured_until_it_is_sure() -> None:
    chance = Random(1)
    sampler, executor = sampled(
        lambda b: 0.001 * (chance.expovariate(1.0) if b == 8 else 1.0), lambda sampler: sampler.settle([2, 8])
    )
    assert len(sampler.durations[2]) == sampling.LEAST
    assert sampler.estimates()[8].relative <= 0.02
    assert len(sampler.durations[8]) > 1000
    assert len(executor.batches) == sampler.batches
