"""tables.py: what a table is, and the ones that need no solving."""

import numpy as np
import pytest
from reproduction.bounded import arrivals, band
from tests.rings import subcases

from weir.errors import SettingsError
from weir.policy.cost import GOOGLENET_P4, Profile
from weir.policy.solve import tables
from weir.policy.solve.tables import (
    extended,
    full_batch_table,
    greedy_table,
    limit_of,
    limit_table,
    static_table,
    stationary,
)


def profile_of(*times: float) -> Profile:
    """Return a profile with those service times, and energies like them."""
    return Profile(np.array(times), np.array(times), np.zeros(len(times)))


def test_the_simple_tables() -> None:
    assert greedy_table(3).tolist() == [0, 1, 2, 3]
    assert static_table(3).tolist() == [0, 0, 0, 3]
    assert limit_table(2, 4).tolist() == [0, 0, 2, 3, 4]
    assert [limit_of(table) for table in (greedy_table(3), static_table(3), limit_table(2, 4))] == [1, 3, 2]


def test_the_last_entry_holds_beyond_the_end() -> None:
    table = static_table(2)
    assert extended(table, 100)[[0, 1, 2, 3, 99]].tolist() == [0, 0, 2, 2, 2]
    assert extended(table, 5).tolist() == [0, 0, 2, 2, 2]
    assert extended(table, 2).tolist() == [0, 0]
    assert tables.stacked([table, greedy_table(4)]).tolist() == [[0, 0, 2, 2, 2], [0, 1, 2, 3, 4]]


@subcases(
    ("values", "says"),
    [
        ([], "at least one"),
        ([[0, 1]], "has shape (1, 2)"),
        ([0, 2], "2 rows for 1 waiting; must be a whole number from 0 to 1"),
        ([0, 1, 2, 3], "3 rows for 3 waiting; must be a whole number from 0 to 2"),
        ([0, -1], "-1 rows for 1 waiting"),
        ([0, 0.5], "0.5 rows for 1 waiting"),
        ([0, float("nan")], "nan rows for 1 waiting"),
        ([0, 1, 0], "the last entry, for 2 and more waiting, is 0; must serve"),
    ],
)
def test_a_bad_table_is_named(values: list[float], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        tables.checked_table(values, 2)
    assert says in raised.value.message
    assert raised.value.message.startswith("table: ")


def test_a_good_table_is_kept() -> None:
    table = tables.checked_table([0, 0, 2.0, 1], 2)
    assert table.dtype == np.uint16 and table.tolist() == [0, 0, 2, 1]


@subcases("size", [0, -1, 70_000])
def test_bad_sizes_are_named(size: int) -> None:
    with pytest.raises(SettingsError, match=f"max_batch_size={size}: must be from 1 to 65535"):
        greedy_table(size)
    with pytest.raises(SettingsError, match=f"size={size}: must be from 1 to 65535"):
        static_table(size)


@subcases("limit", [0, 5])
def test_a_limit_above_a_batch_is_named(limit: int) -> None:
    with pytest.raises(SettingsError, match=f"limit={limit}: must be from 1 to 4"):
        limit_table(limit, 4)


def test_full_batches_are_the_quickest_per_row() -> None:
    assert full_batch_table(GOOGLENET_P4).tolist() == list(range(33))
    assert full_batch_table(profile_of(1.0, 1.5, 2.0, 4.0)).tolist() == [0, 1, 2, 3]
    stepped = profile_of(2.0, 2.0, 2.0, 2.0, 3.6, 3.6, 3.6, 3.6)
    assert full_batch_table(stepped).tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 8]


def test_full_batches_from_a_state_on() -> None:
    table = tables.with_full_batches(static_table(2), 3, profile_of(1.0, 1.5, 2.0, 4.0))
    assert table.tolist() == [0, 0, 2, 3]
    assert tables.with_full_batches(static_table(1), 5, profile_of(1.0, 1.9)).tolist() == [0, 1, 1, 1, 1, 2]
    assert tables.with_full_batches(static_table(2), 0, profile_of(1.0, 1.9)).tolist() == [0, 1, 2]


def test_a_crews_table_waits_for_its_limit_and_then_takes_all() -> None:
    table = tables.multi_worker_table(GOOGLENET_P4, 5)
    assert limit_of(table) == 5
    assert table.tolist() == [0] * 5 + list(range(5, 33))


def chain(actions: list[int], rows: list[int], rate: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Return the stationary law, and the whole matrix, of a line under these actions by state."""
    profile = Profile(np.array([1.0, 1.5, 3.0]), np.ones(3), np.array([0.0, 0.0, 0.5]))
    come = arrivals(profile, rate)
    matrix = np.zeros((len(rows), len(rows)))
    for state, (action, waiting) in enumerate(zip(actions, rows, strict=True)):
        if action:
            for number, probability in enumerate(come[action - 1]):
                matrix[state, min(waiting - action + number, len(rows) - 1)] += probability
        else:
            matrix[state, min(state + 1, len(rows) - 1)] = 1.0
    return stationary(*band(come, np.array(actions), np.array(rows))), matrix


@subcases(
    "actions", [[0, 1, 2, 3, 3, 3, 3, 3], [0, 0, 0, 3, 3, 3, 1, 3], [0, 0, 2, 1, 3, 0, 2, 2], [0, 0, 0, 0, *[2] * 5]]
)
def test_the_law_is_stationary(actions: list[int]) -> None:
    last = len(actions) - 2
    law, matrix = chain(actions, [*range(last), last, last])
    if actions[3] == 0:
        assert law[:2].tolist() == [0.0, 0.0]  # states that are left for ever
    assert law.sum() == pytest.approx(1.0, rel=1e-14)
    assert law @ matrix == pytest.approx(law, rel=1e-12)


def test_tails_have_all_their_digits() -> None:
    """The geometric tail of M/M/1 down to 1e-60: a chain up with 0.1, down with 0.9."""
    size = 64
    matrix = np.zeros((size, 3))
    matrix[:, 0], matrix[:, 2] = 0.9, 0.1
    matrix[0, 1], matrix[0, 0] = 0.9, 0.0
    matrix[-1, 1], matrix[-1, 2] = 0.1, 0.0
    law = stationary(matrix, 1)
    assert law[1:] / law[:-1] == pytest.approx(np.full(size - 1, 1.0 / 9.0), rel=1e-13)


def test_a_law_that_grows_beyond_all_floats_is_still_a_law() -> None:
    # Up with 1 - 1e-9, down with 1e-9: each state is a thousand million times as likely as the one below.
    size, down = 60, 1e-9
    matrix = np.zeros((size, 3))
    matrix[:, 0], matrix[:, 2] = down, 1.0 - down
    matrix[0, 0], matrix[-1, 2] = 0.0, 0.0
    law = stationary(matrix, 1)
    assert law.sum() == pytest.approx(1.0)
    assert law[-2] / law[-1] == pytest.approx(down, rel=1e-6)


def test_a_state_that_is_as_good_as_never_left_has_all_of_the_law() -> None:
    matrix = np.array([[0.0, 0.5, 0.5], [1e-250, 1.0, 0.0]])
    np.testing.assert_array_equal(stationary(matrix, 1), [0.0, 1.0])
