import asyncio
from math import ceil
from random import Random

import numpy as np
import pytest
from tests.profiling.kit import TimedExecutor, items, profiled, started

from weir.errors import InvalidRequest, ModelError, SettingsError
from weir.messages import OBJECT
from weir.policy.cost.profile import Profile
from weir.profiling.items import Entry, Items
from weir.profiling.measure import crowded, measure
from weir.profiling.settings import ProfilingSettings
from weir.testing import FakeClock


def test_a_straight_line_is_measured_as_one() -> None:
    profile = profiled(lambda b: 0.0003 * b + 0.001, 64)
    assert profile.service_time_ms == pytest.approx(0.3 * np.arange(1, 65) + 1.0)
    assert profile.cv == pytest.approx(np.zeros(64), abs=1e-9)
    fit = profile.fit()
    assert (fit.alpha_ms, fit.tau0_ms, fit.time_r2) == pytest.approx((0.3, 1.0, 1.0))
    assert profile.best_batch_size == 64
    assert profile.latency_offset_ms == 0.0 and profile.pipeline_depth == 1


def test_noise_is_averaged_out_and_its_size_is_known() -> None:
    chance = Random(4)
    profile = profiled(
        lambda b: (0.0003 * b + 0.001) * chance.gammavariate(25.0, 1 / 25.0), 32, seconds=120.0, confidence=0.01
    )
    truth = 0.3 * np.arange(1, 33) + 1.0
    assert np.all(np.abs(profile.service_time_ms / truth - 1.0) < 0.03)
    assert float(np.mean(profile.cv)) == pytest.approx(0.2, rel=0.05)


def test_steps_have_exact_edges() -> None:
    chance = Random(5)
    steps = 0.01 * np.ceil(np.arange(1, 129) / 32) + 0.02

    def duration(b: int) -> float:
        return float(steps[b - 1]) * chance.gauss(1.0, 0.01)

    profile = profiled(duration, 128, seconds=600.0)
    assert np.all(np.abs(profile.service_time_ms / (1000.0 * steps) - 1.0) < 0.02)
    assert profile.about["edges"] == [32, 64, 96]


def test_the_best_batch_need_not_be_the_largest() -> None:
    assert profiled(lambda b: 0.001 * ceil(b / 8), 60).best_batch_size == 8
    assert profiled(lambda b: 0.001 + 0.0001 * b * b, 64).best_batch_size == 3


def test_a_time_that_falls_is_flattened_and_warned_of() -> None:
    profile = profiled(lambda b: 0.005 if b == 7 else 0.001 * b / 4 + 0.001, 16)
    assert np.all(np.diff(profile.service_time_ms) >= 0.0)
    (warning,) = profile.about["warnings"]
    assert warning.startswith(
        "a batch of 7 took 5 ms, longer than some larger ones: the table, which never falls, has "
    )


def test_with_two_batches_in_flight_the_profile_is_of_the_cycle_and_says_what_a_caller_waits_beyond_it() -> None:
    profile = profiled(lambda b: 0.001 * b + 0.002, 8, places=2, ahead=0.0015)
    assert profile.service_time_ms == pytest.approx(np.arange(1, 9) + 2.0)
    assert profile.latency_offset_ms == pytest.approx(1.5)
    assert profile.pipeline_depth == 2


def test_only_the_sizes_asked_for_are_measured_and_the_ends() -> None:
    profile = profiled(lambda b: 0.001 * ceil(b / 10), 64, sizes=[8, 32])
    assert profile.about["sizes_measured"] == [1, 8, 32, 64]


def test_the_time_is_kept() -> None:
    profile = profiled(lambda b: 0.01 * b, 16, seconds=20.0, confidence=1e-12)
    assert 20.0 <= profile.about["seconds"] <= 22.0


def test_how_it_was_measured_is_said_and_goes_into_the_file() -> None:
    profile = profiled(lambda b: 0.001, 4, power=70.0, seed=9)
    assert profile.energy_source == "stated"
    assert profile.energy_mj == pytest.approx([70.0] * 4)
    about = Profile.from_toml(profile.to_toml()).about
    assert about["items"] == 3 and about["content_type"] == OBJECT and about["seed"] == 9
    assert about["confidence"].startswith("4 of 4 means within 2.0% (95 % interval)")
    assert about["left_out"].startswith("0 batches")
    assert "warnings" not in about


def test_without_energy_it_is_said_why() -> None:
    async def story() -> Profile:
        executor = TimedExecutor(FakeClock(), lambda b: 0.001)
        measuring = await started(executor)
        return await measure(measuring, items(), 2, no_meters="NVML: no driver")

    profile = asyncio.run(story())
    assert profile.energy_source == "time"
    assert profile.energy_mj.tolist() == profile.service_time_ms.tolist()
    assert profile.about["energy_not_read"] == "NVML: no driver"


class CountingMeter:
    """Power rises with the batch size; beyond the limit at the largest."""

    source = "rapl"
    name = "1 CPU package"
    limit_w = 40.0

    def __init__(self, executor: TimedExecutor) -> None:
        self._executor = executor

    def read_mj(self) -> float:
        busy = sum(10.0 * len(batch.payloads) for _, batch in self._executor.batches)
        return 5000.0 * self._executor.clock() + busy


def test_a_meter_that_is_there_is_read() -> None:
    async def story() -> Profile:
        executor = TimedExecutor(FakeClock(), lambda b: 0.001 * b + 0.001)
        measuring = await started(executor)
        shown: list[str] = []
        profile = await measure(
            measuring, items(), 8, meters=[CountingMeter(executor)], about={"model": "m"},
            progress=lambda share, what: shown.append(what),
        )  # fmt: skip
        assert shown[0] == "warming up" and shown[-1] == "reading energy"
        return profile

    profile = asyncio.run(story())
    assert profile.energy_source == "rapl"
    assert profile.energy_mj == pytest.approx(10.0 * np.arange(1, 9), rel=0.05)
    assert profile.about["model"] == "m" and profile.about["energy_sizes"] == [1, 3, 5, 6, 8]


def test_a_model_that_fails_on_an_item_is_an_error() -> None:
    async def story(error: Exception, places: int = 1) -> None:
        executor = TimedExecutor(FakeClock(), lambda b: 0.001, fail=error, places=places)  # type: ignore[arg-type]  # both are WeirErrors
        measuring = await started(executor)
        await measure(measuring, items(), 4)

    for places in (1, 2):
        with pytest.raises(ModelError, match="predict raised"):
            asyncio.run(story(ModelError("predict raised"), places))
    with pytest.raises(ModelError, match="the model refuses an item that it is measured with: too long"):
        asyncio.run(story(InvalidRequest("too long")))


def test_items_too_large_for_any_batch_are_refused_and_sizes_that_they_cannot_fill_left_out() -> None:
    async def story(max_batch_size: int) -> Profile:
        executor = TimedExecutor(FakeClock(), lambda b: 0.001 * b)
        measuring = await started(executor)
        return await measure(measuring, Items([Entry(0, rows=3)]), max_batch_size, ProfilingSettings())

    with pytest.raises(SettingsError, match="items: none of them fits into a batch of 2 rows"):
        asyncio.run(story(2))
    profile = asyncio.run(story(10))
    assert profile.about["sizes_measured"] == [3, 6, 9]
    assert profile.service_time_ms == pytest.approx([1, 1, 1, 4 / 3, 5 / 3, 2, 7 / 3, 8 / 3, 3, 3])


def test_a_crowded_machine_is_warned_of() -> None:
    assert crowded(0.01) == []
    assert crowded(0.4) == ["other processes had the CPUs for 40% of the time: measure again on a quieter machine"]
