"""The stationary law of a queue under a table, without a single subtraction (Grassmann, Taksar and Heyman).

From n waiting rows a decision leads at most a batch down, and up by as many as may arrive, so the chain's matrix is a
band. States are taken out from the top; the probability of staying, which is the only one that would have to be
subtracted from 1, is never used. Small probabilities (1e-14 and below) come out with as many digits as large ones.
"""

from functools import lru_cache
from math import inf, log1p
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weir.policy.cost.profile import Floats, Profile

_BLOCK = 32  # states that are taken out before the others hear of it, which is then one product of matrices
# A state that is left downwards this much more rarely than it is reached holds all of the law.
_RARE = 1e-200


def band(arrivals: Floats, actions: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[Floats, int]:
    """Return the chain's matrix as a band and how many columns of it are left of the diagonal.

    `arrivals` is the law of the arrivals by batch size, `actions` and `rows` are by state; the last state stands for all
    above. Column `below` + d of row i is the probability of going from i to i + d.
    """
    size, kept = len(actions), arrivals.shape[1]
    below = int(arrivals.shape[0]) + 1
    matrix = np.zeros((size, below + kept + 1))
    for state, (action, waiting) in enumerate(zip(actions.tolist(), rows.tolist(), strict=True)):
        if not action:
            matrix[state, below + min(1, size - 1 - state)] = 1.0
            continue
        start = below + waiting - action - state
        room = below + size - 1 - state  # the column of the last state
        if start + kept - 1 <= room:
            matrix[state, start : start + kept] = arrivals[action - 1]
        else:
            matrix[state, start:room] = arrivals[action - 1, : room - start]
            matrix[state, room] = arrivals[action - 1, room - start :][::-1].sum()
    return matrix, below


def stationary(matrix: Floats, below: int) -> Floats:
    """Return the stationary law of a chain given as a band (see `band`), which is overwritten.

    The chain must have one closed class, which must contain a way down from every state above it; states outside get 0.
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
    """The states from `begin` on that were taken out together: their rows, from column `low` on, and their columns in the rows
    from `high` to `begin`, each as it was when its own state was taken out; and with what probability each is left downwards."""

    begin: int
    low: int
    high: int
    rows: Floats
    columns: Floats
    downs: Floats


def _take_out(whole: Floats, begin: int, end: int, below: int, above: int) -> _Taken:
    """Take the states `begin` ... `end` - 1 out of the chain, from the last on."""
    low, high, count = max(0, begin - below), max(0, begin - above), end - begin
    rows, columns, downs = np.zeros((count, end - low)), np.zeros((begin - high, count)), np.zeros(count)
    for n in range(count):  # only what the band has
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
    """Set the entries of `law` for the states of `block`, from those before them."""
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


# How queues that are longer than a given length become shorter again, where batches of one size are served from them.
#
# From n rows such a queue goes to n - size + N, N the rows that arrive during the batch: a random walk that falls by at most
# `size` in a step and falls on average. Everything about its long run follows from the roots of z^size = E z^N.


_STEPS = 16  # of Newton's method, which needs at most 8


def decay(profile: Profile, rate_per_ms: float, size: int) -> float:
    """Return by what factor longer queues are rarer, per row, where batches of `size` are served from a long queue.

    It is the root z > 1 of z^size = E z^N, N the rows that arrive during such a batch.
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
    """Return what `_descent` does for batches of `size`."""
    mean = rate_per_ms * float(profile.service_time_ms[size - 1])
    return _descent(mean, mean * float(profile.cv[size - 1]) ** 2, size)


@lru_cache(64)  # one rate is asked about several times
def _descent(mean: float, excess: float, size: int) -> tuple[Floats, float]:
    """Return the law of how far a queue is below a length when it first is, coming from that length: entry d - 1 is the
    probability of d rows, d = 1 ... size. Return too by what factor, per row, a longer way down forgets where it began.

    With z_j the `size` roots of z^size = E z^N in the unit disc, the law's generating function solves
    z^size - sum of law[d - 1]·z^(size - d) = product of (z - z_j), because z_j to the power of the queue's length is a
    martingale (Wiener and Hopf's factorisation of a walk that falls by at most `size`).
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
    """Return the roots in the unit disc of z^size = E z^N, N Poisson or negative binomial; the first is 1.

    With z = e^w: size·w - log E e^(wN) = 2πij. The left side's derivative is at least size - mean > 0 in the half-plane
    of w, where the left side is one to one, so that there is one root for each j, which Newton's method finds.
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
