import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.profiling.kit import Duration, TimedExecutor, items, started

from weir.errors import ModelError
from weir.profiling.sampling import FEWEST, LEAST, WARM_UP_BATCHES, WARM_UP_MOST, Contention, ServiceTimeSampler
from weir.profiling.settings import ProfilingSettings
from weir.testing import FakeClock


def sampled(
    duration: Duration, act: Callable[[ServiceTimeSampler], Awaitable[Any]], *, places: int = 1, ahead: float = 0.0,
    contention: Contention | None = None, **settings: Any,
) -> tuple[ServiceTimeSampler, TimedExecutor]:  # fmt: skip
    """Do something with a sampler on a worker with these service times."""

    async def story() -> tuple[ServiceTimeSampler, TimedExecutor]:
        executor = TimedExecutor(FakeClock(), duration, places=places, ahead=ahead)
        measuring = await started(executor)
        sampler = ServiceTimeSampler(measuring, items(), ProfilingSettings(**settings), contention=contention)
        await act(sampler)
        return sampler, executor

    return asyncio.run(story())


def test_the_warm_up_ends_when_times_are_steady_and_counts_for_nothing() -> None:
    sampler, executor = sampled(lambda b: 0.001 * b, lambda sampler: sampler.warm_up([1, 2, 4, 8]))
    assert WARM_UP_BATCHES <= len(executor.batches) <= WARM_UP_BATCHES + 2
    assert set(executor.sizes) == {1, 4, 8}
    assert not sampler.durations


def test_the_warm_up_goes_on_while_times_fall_but_not_for_ever() -> None:
    falling = iter(range(100_000, 0, -1))
    _, executor = sampled(
        lambda b: 0.99 ** (100_000 - next(falling)), lambda sampler: sampler.warm_up([1]), seconds=1e6
    )
    assert WARM_UP_BATCHES <= len(executor.batches) < WARM_UP_MOST
    wild = Random(1)
    _, executor = sampled(lambda b: wild.expovariate(1.0), lambda sampler: sampler.warm_up([1]), seconds=1e6)
    assert len(executor.batches) <= WARM_UP_MOST


def test_the_warm_up_of_a_slow_model_takes_a_fifth_of_the_time() -> None:
    _, executor = sampled(lambda b: 0.5, lambda sampler: sampler.warm_up([1, 2]), seconds=10.0)
    assert len(executor.batches) == 4


def test_each_size_is_measured_until_it_is_sure() -> None:
    chance = Random(1)
    sampler, executor = sampled(
        lambda b: 0.001 * (chance.expovariate(1.0) if b == 8 else 1.0), lambda sampler: sampler.settle([2, 8])
    )
    assert len(sampler.durations[2]) == LEAST
    assert sampler.estimates()[8].relative <= 0.02
    assert len(sampler.durations[8]) > 1000
    assert len(executor.batches) == sampler.batches


def test_sizes_come_in_random_order_and_the_seed_decides_which() -> None:
    def order(seed: int) -> list[int]:
        return sampled(lambda b: 0.001, lambda sampler: sampler.settle([1, 2, 3, 4]), seed=seed)[1].sizes

    assert order(1) == order(1) != order(2)
    assert order(1)[:4] != [1, 2, 3, 4] or order(1)[4:8] != [1, 2, 3, 4]
    assert all(sorted(order(3)[start : start + 4]) == [1, 2, 3, 4] for start in range(0, 4 * LEAST, 4))


def test_when_the_time_is_up_it_ends_but_every_size_has_been_measured() -> None:
    sampler, _ = sampled(lambda b: 1.0, lambda sampler: sampler.settle([1, 2, 3]), seconds=1.0)
    assert {size: len(durations) for size, durations in sampler.durations.items()} == {1: FEWEST, 2: FEWEST, 3: FEWEST}


def test_only_a_share_of_the_time_may_be_used_and_what_is_sure_is_not_measured_again() -> None:
    async def act(sampler: ServiceTimeSampler) -> None:
        await sampler.settle([1, 2], 0.5)
        assert 5.0 <= sampler.elapsed <= 6.0
        await sampler.settle([1, 2], 0.5)
        assert sampler.elapsed <= 6.0

    sampled(lambda b: 0.5, act, seconds=10.0, confidence=1e-12)
    _, executor = sampled(lambda b: 0.001, lambda sampler: sampler.settle([1]))
    assert len(executor.batches) == LEAST
    shares: list[float] = []

    async def again(sampler: ServiceTimeSampler) -> None:
        await sampler.settle([1, 2], said=shares.append)
        await sampler.settle([1, 2], said=shares.append)

    sampled(lambda b: 0.001, again)
    assert shares[0] == 0.0 and shares[-1] == 1.0 and len(shares) == LEAST


def test_with_two_batches_in_flight_it_is_the_cycle_that_counts() -> None:
    sampler, _ = sampled(lambda b: 0.003 * b, lambda sampler: sampler.settle([1, 4]), places=2, ahead=0.002)
    estimates = sampler.estimates()
    assert estimates[1].mean == pytest.approx(0.003)
    assert estimates[4].mean == pytest.approx(0.012)
    assert sampler.offset() == pytest.approx(0.002)


def test_where_preparing_takes_longer_than_computing_it_is_the_cycle() -> None:
    sampler, _ = sampled(lambda b: 0.001, lambda sampler: sampler.settle([1]), places=2, ahead=0.004)
    assert sampler.estimates()[1].mean == pytest.approx(0.004)
    assert sampler.offset() == pytest.approx(0.001)


def test_with_one_place_a_caller_waits_no_longer_than_the_batch_takes() -> None:
    sampler, _ = sampled(lambda b: 0.001, lambda sampler: sampler.settle([1]), ahead=0.004)
    assert sampler.estimates()[1].mean == pytest.approx(0.005)
    assert sampler.offset() == 0.0


@pytest.mark.parametrize(("places", "count"), [(1, 100), (2, 100)])
def test_back_to_back_keeps_the_worker_busy(places: int, count: int) -> None:
    async def act(sampler: ServiceTimeSampler) -> None:
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
    contention = Contention([7], tmp_path)
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

    sampler, _ = sampled(crowded, lambda sampler: sampler.settle([1]), contention=Contention([7], tmp_path))
    assert sampler.crowding > 0.3
    assert sampler.estimates()[1].mean == pytest.approx(0.0001)


def test_a_batch_that_fails_leaves_none_that_is_waited_for() -> None:
    async def story() -> None:
        executor = TimedExecutor(FakeClock(), lambda b: 0.001, places=2, fail=ModelError("no"))
        sampler = ServiceTimeSampler(await started(executor), items(), ProfilingSettings())
        with pytest.raises(ModelError, match="no"):
            await sampler.back_to_back(2, 1.0)

    asyncio.run(story())
