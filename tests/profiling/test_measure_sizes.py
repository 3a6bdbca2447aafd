from collections.abc import Callable
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.errors import SettingsError
from weir.profiling.measure import Point, edges, grid, suspects


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


def test_padding_to_powers_of_two_is_found_exactly() -> None:
    points = searched(lambda b: 1.0 + 0.1 * 2 ** ceil(log2(b)), 128)
    assert {16, 32, 64} <= set(edges(points)) <= {1, 2, 4, 8, 16, 32, 64}
    assert len(points) < 45


@pytest.mark.parametrize("step", [4, 8, 16, 32])
def test_a_gpu_that_computes_in_waves_is_found_exactly(step: int) -> None:
    points = searched(lambda b: 2.0 + ceil(b / step), 128)
    assert edges(points) == list(range(step, 128, step))


@given(st.integers(2, 255), st.floats(0.15, 3.0), st.floats(0.0, 0.002))
def test_a_single_step_is_found_wherever_it_is(edge: int, height: float, slope: float) -> None:
    points = searched(lambda b: 1.0 + slope * b + (height if b > edge else 0.0), 256)
    assert {edge, edge + 1} <= set(points)
    if edge > 1:
        assert edge in edges(points)


def test_where_a_flat_roof_begins_to_slope_the_search_ends_soon() -> None:
    points = searched(lambda b: max(10.0, 0.25 * b), 256)
    assert len(points) < 45


def test_noise_is_not_taken_for_a_step() -> None:
    points = {size: Point(10.0 + 0.5 * (size % 2), 0.2) for size in grid(64)}
    assert suspects(points) == []
    assert edges(points) == []


def test_two_sizes_are_a_line() -> None:
    assert suspects({1: Point(1.0, 0.0), 64: Point(50.0, 0.0)}) == []


def test_periods_too_many_to_measure_are_left_alone() -> None:
    points = searched(lambda b: 2.0 + ceil(b / 4), 1024)
    assert len(points) < 400
