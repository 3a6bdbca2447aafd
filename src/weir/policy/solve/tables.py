"""Tables: how many rows to dispatch for each number of waiting rows.

`table[n]` is the batch, in rows, that is dispatched while n rows wait; 0 means to wait for the next arrival. Beyond
its end the last entry holds. The last entry is greater than 0, so a table dispatches however long the queue is. A
table has shape (states,), its index being the number of rows waiting from 0 on, and the type uint16.

The stationary law of a queue under a table is computed without a subtraction, by the method of Grassmann, Taksar and
Heyman ("Regenerative analysis and steady state distributions for Markov chains", Operations Research 33, 1985). A
decision shortens a queue by at most one batch and lengthens it by at most as many rows as may arrive, so the matrix of
the chain is a band. States are eliminated from the longest queue downwards. The probability of staying, which alone
would have to be subtracted from 1, is never used. So probabilities of 1e-14 and below have as many correct digits as
large ones.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import inf, log1p
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import ArrayLike, NDArray

from weir.errors import SettingsError
from weir.policy.cost import Floats, Profile

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


_BLOCK = 32  # states that are eliminated together: their effect on all others is one product of matrices
# A state that is left downwards this much more rarely than it is reached gets all of the law.
_RARE = 1e-200


def stationary(matrix: Floats, below: int) -> Floats:
    """Return the stationary law of a chain, shape (states,), from its matrix as a band, which is overwritten.

    Row i of `matrix`, shape (states, width), has the probabilities of going from state i to state i + d in its column
    `below` + d. The chain must have one closed class, with a way down from every state above it; states outside that
    class get 0.
    """
    size, width = matrix.shape
    above = width - below - 1
    flat = matrix.reshape(-1)
    # Element (i, j) of the whole matrix lies at i·width + below + j - i: valid wherever the band has it.
    whole = as_strided(flat[below:], (size, size), ((width - 1) * 8, 8))
    taken: list[_Taken] = []
    end = size
    while end > 1:
        begin = max(1, end - _BLOCK)
        taken.append(_take_out(whole, begin, end, below, above))
        end = begin
    law = np.zeros(size)
    law[0] = 1.0
    for block in reversed(taken):
        _add(law, block)
    result: Floats = law / law.sum()
    return result


class _Taken(NamedTuple):
    """States that were eliminated together: `begin` and all above it up to the next block.

    Attributes:
        begin: the first of them.
        low: the first column of `rows`, as a state.
        high: the first row of `columns`, as a state.
        rows: their rows of the matrix, from column `low` on, each as it was when its state was eliminated.
        columns: their columns in the rows `high` ... `begin` - 1, likewise.
        downs: the probability of leaving each of them downwards.
    """

    begin: int
    low: int
    high: int
    rows: Floats
    columns: Floats
    downs: Floats


def _take_out(whole: Floats, begin: int, end: int, below: int, above: int) -> _Taken:
    """Eliminate the states `begin` ... `end` - 1 from the chain, the last one first. `whole` is the matrix (states,
    states).
    """
    low, high, count = max(0, begin - below), max(0, begin - above), end - begin
    rows, columns, downs = np.zeros((count, end - low)), np.zeros((begin - high, count)), np.zeros(count)
    for n in range(count):  # only the columns that the band has
        first, last = max(low, begin + n - below), min(end, begin + n + above + 1)
        rows[n, first - low : last - low] = whole[begin + n, first:last]
        first = max(high, begin + n - above)
        columns[first - high :, n] = whole[first:begin, begin + n]
    shares = np.zeros_like(columns)
    for n in range(count - 1, -1, -1):
        row = rows[n, : begin + n - low]
        downs[n] = row.sum()
        if downs[n] > 0.0:
            shares[:, n] = columns[:, n] / downs[n]
            rows[:n, : len(row)] += (rows[:n, len(row)] / downs[n])[:, None] * row
            columns[:, :n] += shares[:, n, None] * row[begin - low :]
    whole[high:begin, low:begin] += shares @ rows[:, : begin - low]
    return _Taken(begin, low, high, rows, columns, downs)


def _add(law: Floats, block: _Taken) -> None:
    """Set the entries of `law`, shape (states,), for the states of `block`, from the entries before them."""
    before = law[block.high : block.begin] @ block.columns
    for n, down in enumerate(block.downs.tolist()):
        state = block.begin + n
        reached = float(before[n] + law[block.begin : state] @ block.rows[:n, state - block.low])
        if down > _RARE * reached:
            law[state] = reached / down
            if law[state] > 1.0:  # the largest entry is 1, so that none overflows
                before /= law[state]
                law[: state + 1] /= law[state]
        else:
            law[:state] = 0.0
            before[:] = 0.0
            law[state] = 1.0


# How long queues become shorter again if batches of one size are served from them.
#
# From n rows such a queue goes to n - size + N, where N rows arrive during the batch: a random walk that falls by at
# most `size` in a step and falls on average. Its long run follows from the roots of z^size = E z^N.


_STEPS = 16  # of Newton's method, which needs at most 8


def decay(profile: Profile, rate_per_ms: float, size: int) -> float:
    """Return the factor, per row, by which longer queues are rarer if batches of `size` rows are served from long
    queues.

    It is the root z > 1 of z^size = E z^N, N being the number of rows that arrive during such a batch. `rate_per_ms`
    is in rows per ms.
    """
    mean = rate_per_ms * float(profile.service_time_ms[size - 1])
    excess = mean * float(profile.cv[size - 1]) ** 2

    def balance(x: float) -> float:  # log E z^N - log z^size with z = e^x; convex, 0 at 0, falling there
        grown = np.expm1(x)
        if excess == 0.0:
            return float(mean * grown - size * x)
        return inf if excess * grown >= 1.0 else float(-mean / excess * log1p(-excess * grown) - size * x)

    low, high = 0.0, 1.0
    while balance(high) < 0.0:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if balance(middle) <= 0.0 else (low, middle)
    return float(np.exp(low if low > 0.0 else high))


def descent(profile: Profile, rate_per_ms: float, size: int) -> tuple[Floats, float]:
    """Return what `_descent` returns for batches of `size` rows at `rate_per_ms` rows per ms."""
    mean = rate_per_ms * float(profile.service_time_ms[size - 1])
    return _descent(mean, mean * float(profile.cv[size - 1]) ** 2, size)


@lru_cache(64)  # one rate is asked about several times
def _descent(mean: float, excess: float, size: int) -> tuple[Floats, float]:
    """Return how a long queue comes down: by how many rows it first falls below a given length, starting at that
    length.

    Returns the law of that number, shape (size,): entry d - 1 is the probability of d rows, d = 1 ... size. Returns
    also the factor, per row, by which a longer way down depends less on where it began.

    `mean` is the mean number of arrivals during a batch, and `excess` their variance divided by the mean, less 1. With
    z_j the `size` roots of z^size = E z^N in the unit disc, the generating function of the law solves z^size - sum of
    law[d - 1]·z^(size - d) = product of (z - z_j), because z_j to the power of the queue's length is a martingale.
    This is the Wiener-Hopf factorisation of a random walk that falls by at most `size` in a step.
    """
    if size == 1:
        return np.ones(1), 0.0
    roots = _roots(mean, excess, size)
    count = 2 * size
    around = np.exp(-2j * np.pi * np.arange(size + 1) / count)
    # The product is a polynomial of degree `size`, so its values on twice as many points give its coefficients.
    values = np.ones(size + 1, dtype=np.complex128)
    for root in roots:
        values *= around - root
    coefficients = np.fft.irfft(values, count)
    law = np.maximum(-coefficients[size - 1 :: -1], 0.0)
    law /= law.sum()
    law.setflags(write=False)
    return law, float(np.abs(roots[1:]).max())


def _roots(mean: float, excess: float, size: int) -> NDArray[np.complex128]:
    """Return the roots of z^size = E z^N in the unit disc, N Poisson or negative binomial; shape (size,), the first is
    1.

    With z = e^w the equation reads size·w - log E e^(wN) = 2πij. The derivative of the left side is at least size -
    mean > 0 in the half-plane of w, where the left side is one to one; so there is one root for each j, and Newton's
    method finds it.
    """
    turns = 2j * np.pi * np.arange(size // 2 + 1)
    w = turns / size
    for _ in range(_STEPS):
        z = np.exp(w)
        if excess == 0.0:
            log_mean, slope = mean * (z - 1.0), mean * z
        else:
            log_mean, slope = -mean / excess * np.log1p(excess * (1.0 - z)), mean * z / (1.0 + excess * (1.0 - z))
        step = (size * w - log_mean - turns) / (size - slope)
        w = w - step
        w = np.where(w.real > 0.0, 1j * w.imag, w)
    w[0] = 0.0
    half = np.exp(w)
    mirrored = half[1 : size - len(half) + 1]
    return np.concatenate((half, np.conj(mirrored)))
