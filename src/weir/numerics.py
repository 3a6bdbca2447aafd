"""Numerical functions that numpy lacks, accurate enough for Weir to do without scipy.

The tests hold them against scipy's.
"""

import math
from array import array
from bisect import bisect_right
from functools import cache
from math import cos, erfc, exp, lgamma, log, pi, sin, sqrt, tan
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NORMAL = NormalDist()
_SMALLEST = 2.0**-54  # random numbers are multiples of 2**-53, and 0 has no quantile
_ROUND = 2.0**-53  # terms that are smaller, relative to their sum, no longer change it


def erf(x: NDArray[Any]) -> NDArray[Any]:
    """Return the error function of each element, in the type of `x`. A million elements take 50 ms."""
    return np.fromiter(map(math.erf, x.ravel().tolist()), x.dtype, x.size).reshape(x.shape)


def sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    """Return the sigmoid of each element."""
    small = np.exp(-np.abs(x))  # of a large negative number the exponential would overflow
    found: NDArray[Any] = np.where(x >= 0, 1 / (1 + small), small / (1 + small))
    return found


def softmax(x: NDArray[Any]) -> NDArray[Any]:
    """Return the softmax of each row, the last axis of `x`."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    found: NDArray[Any] = powers / powers.sum(axis=-1, keepdims=True)
    return found


# The Gamma law.


def log_gamma(shape: Floats) -> Floats:
    """Return the logarithm of the Gamma function of each element (> 0)."""
    shapes, which = np.unique(shape, return_inverse=True)
    return np.array([lgamma(each) for each in shapes])[which.reshape(shape.shape)]


def gamma_tail(shape: Floats, x: Floats, logarithm: Floats) -> Floats:
    """Return the probability that a Gamma distributed number with `shape` (> 0) and scale 1 is above `x` (>= 0).

    All have the same shape; `logarithm` is log_gamma(shape), which callers with many `x` compute once. The work grows with the square root of
    `shape`: it is meant for shapes up to some 10,000.
    """
    below, above = _gamma_sides(shape, x, logarithm)
    return np.where(x < shape + 1.0, 1.0 - below, above)


def _gamma_sides(shape: Floats, x: Floats, logarithm: Floats | float) -> tuple[Floats, Floats]:
    """Return the probabilities of being below `x` where `x` is less than `shape` + 1, and above it elsewhere."""
    below, above = np.zeros_like(x), np.zeros_like(x)
    with np.errstate(divide="ignore"):
        density = np.exp(shape * np.log(x) - x - logarithm)
    small = x < shape + 1.0
    below[small] = density[small] * _series(shape[small], x[small])
    above[~small] = density[~small] * _fraction(shape[~small], x[~small])
    return below, above


def _series(shape: Floats, x: Floats) -> Floats:
    """Return the sum of x**n / (shape (shape + 1) ... (shape + n)), which is the lower integral over its integrand."""
    total = term = 1.0 / shape
    over = shape
    while np.any(term > _ROUND * total):
        over = over + 1.0
        term = term * (x / over)
        total = total + term
    return total


def _fraction(shape: Floats, x: Floats) -> Floats:
    """Return Legendre's continued fraction of the upper integral over its integrand, by Lentz's method."""
    denominator = x + 1.0 - shape
    down = total = 1.0 / denominator
    up, number, factor = np.full_like(x, 1e300), 0.0, np.zeros_like(x)
    while np.any(np.abs(factor - 1.0) > 4.0 * _ROUND):
        number += 1.0
        part, denominator = number * (shape - number), denominator + 2.0
        down, up = 1.0 / (part * down + denominator), denominator + part / up
        factor = down * up
        total = total * factor
    return total


_LARGE = 1e4  # from this shape on, an expansion is as exact as the table


class GammaQuantile:
    """The quantiles of a Gamma distributed number with `shape` and scale 1, each in less than a microsecond.

    Their logarithms are interpolated by a cubic, with exact slopes, over the quantiles of the normal law.
    """

    def __init__(self, shape: float) -> None:
        self._shape = shape
        if shape < _LARGE:
            self._tabulate()

    def __call__(self, share: float) -> float:
        """Return the number below which the given share lies (0 <= share < 1)."""
        z = _NORMAL.inv_cdf(max(share, _SMALLEST))
        if self._shape >= _LARGE:
            return self._expanded(z)
        index = max(bisect_right(self._z, z) - 1, 0)
        # What is left of the table is too small for a number.
        step, (c0, c1, c2, c3) = max(z - self._z[index], 0.0), self._cubics[4 * index : 4 * index + 4]
        return exp(c0 + step * (c1 + step * (c2 + step * c3)))

    def _tabulate(self) -> None:
        shape = self._shape
        guess = np.arange(-9.0, 9.0, 1.0 / 64.0)
        # Wilson and Hilferty's approximation, and what nothing is below, near which small shapes are.
        cube = np.maximum(1.0 - 1.0 / (9.0 * shape) + guess / (3.0 * sqrt(shape)), 0.0) ** 3
        least = [(log(erfc(-each / sqrt(2.0)) / 2.0) + lgamma(shape + 1.0)) / shape for each in guess.tolist()]
        with np.errstate(divide="ignore"):
            logarithm = np.maximum(np.log(shape * cube), np.maximum(least, -700.0))
        logarithm = np.unique(logarithm)
        x = np.exp(logarithm)
        below, above = _gamma_sides(np.full_like(x, shape), x, lgamma(shape))
        z = np.array(
            [
                _NORMAL.inv_cdf(low) if low else -_NORMAL.inv_cdf(high)
                for low, high in zip(below.tolist(), above.tolist(), strict=True)
            ]
        )
        density = np.exp(shape * logarithm - x - lgamma(shape))  # by the logarithm
        slope = np.exp(-z * z / 2.0) / sqrt(2.0 * pi) / density
        self._z = array("d", z)
        self._cubics = array("d", np.stack(_cubics(z, logarithm, slope), axis=1).ravel())

    def _expanded(self, z: float) -> float:
        """Return Cornish and Fisher's expansion."""
        root, square = 1.0 / sqrt(self._shape), z * z
        more = z * (square - 7.0) / 36.0 + root * (
            -(square * (3.0 * square + 7.0) - 16.0) / 810.0
            + root * z * (square * (9.0 * square + 256.0) - 433.0) / 38880.0
        )
        return self._shape * (1.0 + root * (z + root * ((square - 1.0) / 3.0 + root * more)))


# Student's law.


@cache
def student_quantile(freedom: int, share: float) -> float:
    """Return the number below which the given share (0.5 <= share < 1) of Student's law lies, of `freedom` degrees."""
    low, high = 0.0, pi / 2.0
    while low < (angle := (low + high) / 2.0) < high:
        low, high = (angle, high) if _student_below(freedom, angle) < share else (low, angle)
    return tan(angle) * sqrt(freedom)


def _student_below(freedom: int, angle: float) -> float:
    """Return the share below tan(angle) √freedom, by the finite series that whole degrees of freedom have."""
    odd = freedom % 2
    term = cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for factor in range(2 + odd, freedom - 1, 2):
        term *= cos(angle) ** 2 * (factor - 1) / factor
        total += term
    both = 2.0 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
    return 0.5 + both / 2.0


# Curves through points.


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Return the never falling values nearest to `values` by weighted least squares; all of shape (N,)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight and length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        length = 1
        while blocks and blocks[-1][0] >= value:
            mean, more, count = blocks.pop()
            value = (mean * more + value * weight) / (more + weight)
            weight, length = weight + more, length + count
        blocks.append((value, weight, length))
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])


def monotone_curve(x: Floats, y: Floats, wanted: Floats) -> Floats:
    """Return at `wanted`, within `x`, the cubic through the points (x, y) that rises and falls only as they do.

    `x`, of two points or more, ascends. The slopes are those of Fritsch and Butland ("A method for constructing local
    monotone piecewise cubic interpolants", SIAM Journal on Scientific and Statistical Computing 5, 1984).
    """
    width, rise = np.diff(x), np.diff(y) / np.diff(x)
    slope = np.zeros(len(x))
    before, after = rise[:-1], rise[1:]
    turns = before * after <= 0.0
    first, second = 2.0 * width[1:] + width[:-1], width[1:] + 2.0 * width[:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        slope[1:-1] = np.where(turns, 0.0, (first + second) / (first / before + second / after))
    slope[0], slope[-1] = _end_slope(width, rise), _end_slope(width[::-1], rise[::-1])
    index = np.clip(np.searchsorted(x, wanted, side="right") - 1, 0, len(x) - 2)
    c0, c1, c2, c3 = (each[index] for each in _cubics(x, y, slope))
    step = wanted - x[index]
    return np.asarray(c0 + step * (c1 + step * (c2 + step * c3)), dtype=np.float64)


def _end_slope(width: Floats, rise: Floats) -> float:
    """Return the slope at the first point, of the parabola through three, limited so that the curve stays monotone."""
    if len(rise) == 1:
        return float(rise[0])
    slope = float(((2.0 * width[0] + width[1]) * rise[0] - width[0] * rise[1]) / (width[0] + width[1]))
    if slope * rise[0] <= 0.0:
        return 0.0
    return float(3.0 * rise[0]) if rise[0] * rise[1] <= 0.0 and abs(slope) > 3.0 * abs(rise[0]) else slope


def _cubics(x: Floats, y: Floats, slope: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the coefficients of the cubics between points with these slopes, in the distance to the left one."""
    width = np.diff(x)
    rise, left, right = np.diff(y) / width, slope[:-1], slope[1:]
    return y[:-1], left, (3.0 * rise - 2.0 * left - right) / width, (left + right - 2.0 * rise) / width**2
