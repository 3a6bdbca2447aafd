"""The stationary law of a queue under a table, computed without a subtraction.

The method is that of Grassmann, Taksar and Heyman ("Regenerative analysis and steady state distributions for Markov
chains", Operations Research 33, 1985). A decision shortens a queue by at most one batch and lengthens it by at most as
many rows as may arrive, so the matrix of the chain is a band. States are eliminated from the longest queue downwards.
The probability of staying, which alone would have to be subtracted from 1, is never used. So probabilities of 1e-14
and below have as many correct digits as large ones.
"""

from functools import lru_cache
from math import inf, log1p
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weir.policy.cost.profile import Floats, Profile

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
