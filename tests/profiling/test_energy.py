import asyncio
from collections.abc import Sequence

import pytest
from tests.profiling.kit import TimedExecutor, items, started

from weir.profiling.energy import Energy, Reading, judged, modelled, read_energy, windows
from weir.profiling.sampling import ServiceTimeSampler
from weir.profiling.settings import ProfilingSettings
from weir.testing import FakeClock

IDLE_W = 50.0


class ModelMeter:
    """Counts `idle_w` always, and `busy_w` beyond it while the executor computes."""

    source = "nvml"
    name = "a GPU"

    def __init__(self, executor: TimedExecutor, busy_w: float, limit_w: float | None = 300.0) -> None:
        self.limit_w = limit_w
        self._executor = executor
        self._busy_w = busy_w

    def read_mj(self) -> float:
        return 1000.0 * (IDLE_W * self._executor.clock() + self._busy_w * self._executor.busy)


def read(powers: Sequence[float], sizes: Sequence[int]) -> list[Reading]:
    """Return what meters of a device with these powers say."""

    async def story() -> list[Reading]:
        executor = TimedExecutor(FakeClock(), lambda b: 0.002 * b + 0.01)
        measuring = await started(executor)
        sampler = ServiceTimeSampler(measuring, items(), ProfilingSettings())
        return await read_energy([ModelMeter(executor, power) for power in powers], sampler, sizes)

    return asyncio.run(story())


def test_the_energy_of_a_batch_is_what_is_used_beyond_the_idle_machine() -> None:
    (reading,) = read([100.0], [1, 8])
    assert reading.idle_w == pytest.approx(IDLE_W)
    assert reading.batch_mj == pytest.approx({1: 100.0 * 12.0, 8: 100.0 * 26.0})
    assert reading.power_w == pytest.approx({1: 150.0, 8: 150.0})
    assert reading.rise_w == pytest.approx(100.0)


def test_the_first_meter_whose_power_rises_counts() -> None:
    readings = read([0.0, 100.0], [1, 8])
    energy = judged(readings, None)
    assert energy.source == "nvml"
    assert energy.batch_mj == pytest.approx({1: 1200.0, 8: 2600.0})
    assert energy.about["idle_power_w"] == pytest.approx(IDLE_W)
    assert energy.about["power_limit_w"] == 300.0
    assert energy.warnings == []


def test_a_device_whose_power_does_not_rise_is_not_the_one_that_computes() -> None:
    energy = judged(read([0.2], [1, 8]), None)
    assert energy.source == "time"
    assert energy.about["energy_not_read"] == "the power of a GPU did not rise by 1 W while batches ran"


def test_a_power_above_what_the_board_allows_is_warned_of() -> None:
    (reading,) = read([270.0], [1])
    energy = judged([reading], None)
    assert energy.warnings == ["the power read, 320.0 W, is above what a GPU allows, 300 W: the energies are doubtful"]
    reading.meter.limit_w = None  # type: ignore[misc]  # a test's meter may change
    assert judged([reading], None).warnings == []


def test_a_batch_that_uses_less_than_the_idle_machine_is_warned_of() -> None:
    (reading,) = read([100.0], [1, 8])
    energy = judged([reading._replace(batch_mj={1: -3.0, 8: 40.0})], None)
    assert energy.batch_mj == {1: 0.0, 8: 40.0}
    assert energy.warnings == ["batches of 1 used no more than the idle machine: their energy is taken as 0"]


def test_without_meters_power_is_stated_or_time_stands_for_it() -> None:
    assert modelled(70.0) == Energy("stated", 70.0, about={"energy": "stated: 70 W while it computes"})
    assert modelled(None).source == "time" and modelled(None).watts == 1.0
    assert judged([], 70.0, "no driver").about["energy_not_read"] == "no driver"
    assert "energy_not_read" not in judged([], 70.0).about


def test_energy_is_read_at_a_few_sizes_the_ends_among_them() -> None:
    assert windows([1]) == [1]
    assert windows([1, 2, 3]) == [1, 2, 3]
    assert windows([*range(1, 17), 20, 25, 31, 39, 49, 61, 64]) == [1, 7, 12, 20, 64]
