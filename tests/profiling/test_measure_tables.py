import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.profiling.measure import along, linear_table, monotone_table

MEASURED = st.dictionaries(st.integers(1, 200), st.floats(0.01, 1000.0), min_size=1, max_size=30)


@given(MEASURED, st.integers(1, 256))
def test_a_table_never_falls_and_never_leaves_what_was_measured(values: dict[int, float], max_batch_size: int) -> None:
    table = monotone_table(values, dict.fromkeys(values, 0.1), max_batch_size)
    assert len(table) == max_batch_size
    assert np.all(np.diff(table) >= 0.0)
    assert min(values.values()) * (1 - 1e-9) <= table[0]
    assert table[-1] <= max(values.values()) * (1 + 1e-9)


@given(MEASURED)
def test_what_rises_already_is_kept_as_it_was_measured(values: dict[int, float]) -> None:
    rising = dict(zip(sorted(values), sorted(values.values()), strict=True))
    table = monotone_table(rising, dict.fromkeys(rising, 0.0), 200)
    for size, value in rising.items():
        assert table[size - 1] == pytest.approx(value)


def test_a_line_stays_a_line() -> None:
    values = {size: 0.3 * size + 1.0 for size in (1, 2, 3, 4, 8, 16, 20, 64)}
    table = monotone_table(values, dict.fromkeys(values, 0.0), 64)
    assert table == pytest.approx(0.3 * np.arange(1, 65) + 1.0)


def test_an_edge_between_neighbours_stays_sharp() -> None:
    values = {1: 1.0, 16: 1.0, 17: 2.0, 32: 2.0}
    table = monotone_table(values, dict.fromkeys(values, 0.01), 32)
    assert table == pytest.approx([1.0] * 16 + [2.0] * 16)


def test_where_times_fall_they_are_pooled_by_how_sure_they_are() -> None:
    table = monotone_table({1: 1.0, 2: 4.0, 3: 2.0}, {1: 0.1, 2: 1.0, 3: 0.1}, 3)
    assert table[0] == 1.0
    assert table[1] == table[2] == pytest.approx((4.0 / 1.0 + 2.0 / 0.01) / (1.0 / 1.0 + 1.0 / 0.01))


def test_beyond_the_measured_sizes_it_is_level() -> None:
    assert monotone_table({2: 1.0, 4: 3.0}, {2: 0.0, 4: 0.0}, 6) == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0, 3.0])
    assert monotone_table({3: 7.0}, {3: 0.0}, 4) == pytest.approx([7.0] * 4)


def test_straight_lines_between_values_and_level_beyond() -> None:
    assert linear_table({2: 1.0, 4: 3.0}, 5) == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])


def test_energies_between_those_read_follow_the_times() -> None:
    times = np.array([1.0, 2.0, 3.0, 4.0])
    assert along(times, {1: 10.0, 4: 25.0}) == pytest.approx([10.0, 15.0, 20.0, 25.0])
    assert along(np.array([1.0, 1.0, 5.0, 5.0]), {1: 10.0, 4: 50.0}) == pytest.approx([10.0, 10.0, 50.0, 50.0])
    assert along(np.array([2.0, 2.0, 2.0]), {1: 10.0, 3: 20.0}) == pytest.approx([10.0, 15.0, 20.0])
    assert along(times, {2: 7.0}) == pytest.approx([7.0] * 4)
