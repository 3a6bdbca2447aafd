"""A table says how many rows to dispatch for each number of rows that wait.

`table[n]` is that number with n rows waiting, 0 to wait for the next arrival; beyond its end the last entry holds, which
is greater than 0, so that every table serves whatever the length of the queue.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weir.errors import SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile

Table = NDArray[np.uint16]


def checked_table(values: ArrayLike, max_batch_size: int, name: str = "table") -> Table:
    """Return `values` as a table. Raises SettingsError naming the entry that breaks a rule: whole numbers, no more rows
    than wait and than a batch may have, and a last entry that serves."""
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
    """Return the control limit: the smallest number of waiting rows for which `table` serves."""
    return int(np.argmax(table > 0))


def entry(table: Table, waiting: int) -> int:
    """Return how many rows `table` dispatches with so many waiting."""
    return int(table[min(waiting, len(table) - 1)])


def extended(table: Table, length: int) -> Table:
    """Return the first `length` entries of `table`, those beyond its end included."""
    return table[np.minimum(np.arange(length), len(table) - 1)]


def steady_table(table: Table) -> Table:
    """Return the shortest table that says the same: without entries that only repeat the last."""
    return table[: int(np.flatnonzero(table != table[-1])[-1]) + 2]  # the first entry is 0, and the last is not


def stacked(tables: Sequence[Table]) -> NDArray[np.uint16]:
    """Return tables of any lengths as the rows of one array."""
    length = max(len(table) for table in tables)
    return np.stack([extended(table, length) for table in tables])


def greedy_table(max_batch_size: int) -> Table:
    """Return the table that never waits: all that there is, at most a full batch."""
    return np.arange(_size("max_batch_size", max_batch_size) + 1, dtype=np.uint16)


def static_table(size: int) -> Table:
    """Return the table that dispatches batches of exactly `size` rows."""
    table = np.zeros(_size("size", size) + 1, dtype=np.uint16)
    table[-1] = size
    return table


def limit_table(limit: int, max_batch_size: int) -> Table:
    """Return the table that waits for `limit` rows and then dispatches all there are, at most a full batch."""
    table = greedy_table(max_batch_size)
    if not 1 <= limit <= max_batch_size:
        raise SettingsError(f"limit={limit}: must be from 1 to {max_batch_size}, the largest batch")
    table[:limit] = 0
    return table


def full_batch_table(profile: Profile) -> Table:
    """Return the table that never waits and always dispatches the size, of those there are rows for, that serves the
    most rows per second: all up to b* on a profile where larger is faster, the largest step worth taking on one with
    steps. No table serves more rows per second, so it is stable wherever any is."""
    speed = [0.0, *(profile.sizes / profile.service_time_ms).tolist()]
    table = [0]
    for size in range(1, profile.best_batch_size + 1):
        table.append(size if speed[size] >= speed[table[-1]] else table[-1])
    return np.array(table, dtype=np.uint16)


def with_full_batches(table: Table, from_state: int, profile: Profile) -> Table:
    """Return `table` with the entries from `from_state` on replaced by the full-batch rule, so that it is stable for
    every rate below the profile's `max_rate`."""
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


# Several workers on one queue: where the search for their common control limit starts.
#
# No exact solution is known for several bulk servers whose service time depends on the batch size; docs/explanation/
# beyond-the-paper.md derives this start, simulation/banks.py refines it.


def start_limit(profile: Profile, rate: float, prices: Prices) -> int:
    """Return the control limit at which latency and energy balance when a worker is always free:
    sqrt(w2·λ·ζ0 / (w1·(1/(2λ) + α))), λ the rate of the whole queue, power that of all workers together.

    It lies between 1 and b*. Stepped profiles enter by their straight lines.
    """
    fit = profile.fit()
    latency_weight, per_ms = prices.latency_weight_at(rate), rate / 1000.0
    slope = latency_weight * (0.5 / per_ms + max(fit.alpha_ms, 0.0))
    most = profile.best_batch_size
    if slope <= 0.0:
        return most
    wished = sqrt(prices.energy_weight * per_ms * max(fit.zeta0_mj, 0.0) / slope)
    return int(np.clip(round(wished), 1, most))


def multi_worker_table(profile: Profile, limit: int) -> Table:
    """Return the table that waits for `limit` rows (at most b*) and then takes full batches: stable below capacity."""
    table = full_batch_table(profile)
    table[:limit] = 0
    return table
