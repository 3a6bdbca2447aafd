import asyncio
from collections.abc import Callable
from math import ceil
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiling.kit import TimedExecutor, items, profiled, started
from tests.rings import subcases

from weir.errors import InvalidRequest, ModelError, SettingsError
from weir.messages import OBJECT
from weir.policy.cost import Profile
from weir.profiling import Entry, Items, ProfilingSettings
from weir.profiling.machine import Meters
from weir.profiling.measure import Point, along, edges, grid, measure, monotone_table, suspects
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
        lambda b: (0.0003 * b + 0.001) * chance.gammavariate(25.0, 1 / 25.0), 32, seconds=60.0, confidence=0.01
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


def test_a_time_that_falls_is_flattened_and_warned_of() -> None:
    profile = profiled(lambda b: 0.005 if b == 7 else 0.001 * b / 4 + 0.001, 16)
    assert np.all(np.diff(profile.service_time_ms) >= 0.0)
    (warning,) = profile.about["warnings"]
    assert warning.startswith(
        "a batch of 7 took 5 ms, longer than some larger ones: the table, which never falls, has "
    )


def test_with_two_batches_in_flight_the_profile_is_of_the_cycle() -> None:
    profile = profiled(lambda b: 0.001 * b + 0.002, 8, places=2, ahead=0.0015)
    assert profile.service_time_ms == pytest.approx(np.arange(1, 9) + 2.0)
    assert profile.latency_offset_ms == pytest.approx(1.5)
    assert profile.pipeline_depth == 2


def test_only_the_sizes_requested_are_measured_and_the_ends() -> None:
    profile = profiled(lambda b: 0.001 * ceil(b / 10), 64, sizes=[8, 32])
    assert profile.about["sizes_measured"] == [1, 8, 32, 64]


def test_the_time_is_kept() -> None:
    profile = profiled(lambda b: 0.01 * b, 16, seconds=20.0, confidence=1e-12)
    assert 20.0 <= profile.about["seconds"] <= 22.0


def test_how_it_was_measured_is_reported_and_goes_into_the_file() -> None:
    profile = profiled(lambda b: 0.001, 4, power=70.0, seed=9)
    assert profile.energy_source == "stated"
    assert profile.energy_mj == pytest.approx([70.0] * 4)
    about = Profile.from_toml(profile.to_toml()).about
    assert about["items"] == 3 and about["content_type"] == OBJECT and about["seed"] == 9
    assert about["confidence"].startswith("4 of 4 means within 2.0% (95 % interval)")
    assert about["left_out"].startswith("0 batches")
    assert "warnings" not in about


def test_without_energy_the_reason_is_reported() -> None:
    async def story() -> Profile:
        executor = TimedExecutor(FakeClock(), lambda b: 0.001)
        measuring = await started(executor)
        return await measure(measuring, items(), 2, meters=Meters([], "NVML: no driver"))

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
            measuring, items(), 8, meters=Meters([CountingMeter(executor)], ""), about={"model": "m"},
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
    with pytest.raises(ModelError, match="the model rejects one of the items to measure with: too long"):
        asyncio.run(story(InvalidRequest("too long")))


def test_items_too_large_are_refused_and_sizes_they_cannot_fill_left_out() -> None:
    async def story(max_batch_size: int) -> Profile:
        executor = TimedExecutor(FakeClock(), lambda b: 0.001 * b)
        measuring = await started(executor)
        return await measure(measuring, Items([Entry(0, rows=3)]), max_batch_size, ProfilingSettings())

    with pytest.raises(SettingsError, match="items: none fits into a batch of 2 rows"):
        asyncio.run(story(2))
    profile = asyncio.run(story(10))
    assert profile.about["sizes_measured"] == [3, 6, 9]
    assert profile.service_time_ms == pytest.approx([1, 1, 1, 4 / 3, 5 / 3, 2, 7 / 3, 8 / 3, 3, 3])


def searched(time: Callable[[int], float], max_batch_size: int) -> dict[int, Point]:
    """Measure as `measure` does, without noise, until nothing is suspect."""
    points = {size: Point(time(size), 0.0) for size in grid(max_batch_size)}
    while more := suspects(points):
        assert not set(more) & set(points)
        points |= {size: Point(time(size), 0.0) for size in more}
    return points


def test_small_sizes_are_all_measured_and_large_ones_in_steps_of_a_quarter() -> None:
    assert grid(1) == [1]
    assert grid(12) == list(range(1, 13))
    assert grid(64) == [*range(1, 17), 20, 25, 31, 39, 49, 61, 64]
    assert len(grid(4096)) < 45


def test_sizes_that_are_given_are_measured_and_so_are_the_ends() -> None:
    assert grid(64, [8, 32, 8]) == [1, 8, 32, 64]
    with pytest.raises(SettingsError, match="sizes=65: must be at most max_batch_size=64"):
        grid(64, [65])


def test_a_straight_line_has_no_edges_and_needs_no_more_sizes() -> None:
    for slope, start in ((0.3, 1.0), (1.0, 0.0), (0.0, 5.0)):
        points = searched(lambda b, slope=slope, start=start: slope * b + start, 256)  # type: ignore[misc]  # a default
        assert sorted(points) == grid(256)
        assert edges(points) == []


@subcases("step", [4, 8, 16, 32])
def test_a_gpu_that_computes_in_waves_is_found_exactly(step: int) -> None:
    points = searched(lambda b: 2.0 + ceil(b / step), 128)
    assert edges(points) == list(range(step, 128, step))


@given(st.integers(2, 255), st.floats(0.15, 3.0), st.floats(0.0, 0.002))
def test_a_single_step_is_found_wherever_it_is(edge: int, height: float, slope: float) -> None:
    points = searched(lambda b: 1.0 + slope * b + (height if b > edge else 0.0), 256)
    assert {edge, edge + 1} <= set(points)
    if edge > 1:
        assert edge in edges(points)


def test_noise_is_not_taken_for_a_step() -> None:
    points = {size: Point(10.0 + 0.5 * (size % 2), 0.2) for size in grid(64)}
    assert suspects(points) == []
    assert edges(points) == []


MEASURED = st.dictionaries(st.integers(1, 200), st.floats(0.01, 1000.0), min_size=1, max_size=30)


@given(MEASURED, st.integers(1, 256))
def test_a_table_never_falls_and_never_leaves_what_was_measured(values: dict[int, float], max_batch_size: int) -> None:
    table = monotone_table(values, dict.fromkeys(values, 0.1), max_batch_size)
    assert len(table) == max_batch_size
    assert np.all(np.diff(table) >= 0.0)
    assert min(values.values()) * (1 - 1e-9) <= table[0]
    assert table[-1] <= max(values.values()) * (1 + 1e-9)


def test_where_times_fall_they_are_pooled_by_how_sure_they_are() -> None:
    table = monotone_table({1: 1.0, 2: 4.0, 3: 2.0}, {1: 0.1, 2: 1.0, 3: 0.1}, 3)
    assert table[0] == 1.0
    assert table[1] == table[2] == pytest.approx((4.0 / 1.0 + 2.0 / 0.01) / (1.0 / 1.0 + 1.0 / 0.01))


def test_beyond_the_measured_sizes_it_is_level() -> None:
    assert monotone_table({2: 1.0, 4: 3.0}, {2: 0.0, 4: 0.0}, 6) == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0, 3.0])
    assert monotone_table({3: 7.0}, {3: 0.0}, 4) == pytest.approx([7.0] * 4)


def test_energies_between_those_read_follow_the_times() -> None:
    times = np.array([1.0, 2.0, 3.0, 4.0])
    assert along(times, {1: 10.0, 4: 25.0}) == pytest.approx([10.0, 15.0, 20.0, 25.0])
    assert along(np.array([1.0, 1.0, 5.0, 5.0]), {1: 10.0, 4: 50.0}) == pytest.approx([10.0, 10.0, 50.0, 50.0])
    assert along(np.array([2.0, 2.0, 2.0]), {1: 10.0, 3: 20.0}) == pytest.approx([10.0, 15.0, 20.0])
    assert along(times, {2: 7.0}) == pytest.approx([7.0] * 4)
