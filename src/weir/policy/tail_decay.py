"""How lines that are longer than a given length become shorter again, where batches of one size are served from them.

From n rows such a line goes to n - size + N, N the rows that arrive during the batch: a random walk that falls by at most
`size` in a step and falls on average. Everything about its long run follows from the roots of z^size = E z^N.
"""

from functools import lru_cache
from math import inf, log1p

import numpy as np
from numpy.typing import NDArray

from weir.policy.profile import Floats, Profile

_STEPS = 16  # of Newton's method, which needs at most 8


def decay(profile: Profile, rate_per_ms: float, size: int) -> float:
    """Return by what factor longer lines are rarer, per row, where batches of `size` are served from a long line.

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
    """Return the law of how far a line is below a length when it first is, coming from that length: entry d - 1 is the
    probability of d rows, d = 1 ... size. Return too by what factor, per row, a longer way down forgets where it began.

    With z_j the `size` roots of z^size = E z^N in the unit disc, the law's generating function solves
    z^size - sum of law[d - 1]·z^(size - d) = product of (z - z_j), because z_j to the power of the line's length is a
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
