"""Tables: how many rows to dispatch for each number of waiting rows.

`table[n]` is the batch, in rows, that is dispatched while n rows wait; 0 means to wait for the next arrival. Beyond
its end the last entry holds. The last entry is greater than 0, so a table dispatches however long the queue is. A
table has shape (states,), its index being the number of rows waiting from 0 on, and the type uint16.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weir.errors import SettingsError
from weir.policy.cost.profile import Profile

Table = NDArray[np.uint16]


def checked_table(values: ArrayLike, max_batch_size: int, name: str = "table") -> Table:
    """Return `values`, shape (states,), as a table.

    Raises SettingsError naming the entry that breaks a rule: entries are whole numbers, no larger than the rows that
    wait and than `max_batch_size`, and the last one is greater than 0. `name` is what the error calls the table.
    """
    given = np.asarray(values)
    if given.ndim != 1 or not given.size:
        raise SettingsError(f"{name}: must be a row of numbers, at least one; has shape {given.shape}")
    most = np.minimum(np.arange(len(given)), max_batch_size)
    good = (given >= 0) & (given <= most) & (given == np.floor(given))
    if not good.all():
        n = int(np.argmin(good))
        raise SettingsError(f"{name}: {given[n]} rows for {n} waiting; must be a whole number from 0 to {most[n]}")
    if not given[-1]:
        raise SettingsError(f"{name}: the last entry, for {len(given) - 1} and more waiting, is 0; must serve")
    return np.asarray(given, dtype=np.uint16)


def limit_of(table: Table) -> int:
    """Return the control limit in rows: the smallest number of waiting rows for which `table` dispatches."""
    return int(np.argmax(table > 0))


def extended(table: Table, length: int) -> Table:
    """Return the first `length` entries of `table`, repeating its last entry beyond its end; shape (length,), rows."""
    return table[np.minimum(np.arange(length), len(table) - 1)]


def steady_table(table: Table) -> Table:
    """Return the shortest table with the same decisions: without the entries that only repeat the last one."""
    return table[: int(np.flatnonzero(table != table[-1])[-1]) + 2]  # the first entry is 0, and the last is not


def stacked(tables: Sequence[Table]) -> NDArray[np.uint16]:
    """Return tables of any lengths as one array of rows; shape (tables, longest table)."""
    length = max(len(table) for table in tables)
    return np.stack([extended(table, length) for table in tables])


def greedy_table(max_batch_size: int) -> Table:
    """Return the table that never waits: it dispatches all waiting rows, at most `max_batch_size`."""
    return np.arange(_size("max_batch_size", max_batch_size) + 1, dtype=np.uint16)


def static_table(size: int) -> Table:
    """Return the table that dispatches batches of exactly `size` rows."""
    table = np.zeros(_size("size", size) + 1, dtype=np.uint16)
    table[-1] = size
    return table


def limit_table(limit: int, max_batch_size: int) -> Table:
    """Return the table that waits for `limit` rows and then dispatches all that wait, at most `max_batch_size`."""
    table = greedy_table(max_batch_size)
    if not 1 <= limit <= max_batch_size:
        raise SettingsError(f"limit={limit}: must be from 1 to {max_batch_size}, the largest batch")
    table[:limit] = 0
    return table


def full_batch_table(profile: Profile) -> Table:
    """Return the table that never waits and dispatches, of the sizes it has rows for, the one with the most rows per
    second.

    Where larger batches are faster those are all sizes up to b*; on a profile with steps it is the largest step worth
    taking. No table serves more rows per second, so this one is stable at every rate at which any table is.
    """
    speed = [0.0, *(profile.sizes / profile.service_time_ms).tolist()]
    table = [0]
    for size in range(1, profile.best_batch_size + 1):
        table.append(size if speed[size] >= speed[table[-1]] else table[-1])
    return np.array(table, dtype=np.uint16)


def with_full_batches(table: Table, from_state: int, profile: Profile) -> Table:
    """Return `table` with the full-batch rule in its entries from `from_state` (rows waiting) on.

    It is then stable at every rate below the profile's `max_rate`.
    """
    full = full_batch_table(profile)
    length = max(from_state + 1, len(full))
    result = extended(full, length).copy()
    kept = max(from_state, 1)
    result[:kept] = extended(table, kept)
    return result


def _size(name: str, size: int) -> int:
    if not 1 <= size <= np.iinfo(np.uint16).max:
        raise SettingsError(f"{name}={size}: must be from 1 to {np.iinfo(np.uint16).max}")
    return size


def multi_worker_table(profile: Profile, limit: int) -> Table:
    """Return the table that waits for `limit` rows (at most b*) and then takes full batches: stable below capacity."""
    table = full_batch_table(profile)
    table[:limit] = 0
    return table
