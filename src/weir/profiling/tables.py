"""From measured sizes to a table of every size: never falling, with exact edges where neighbours were measured."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def monotone_table(values: Mapping[int, float], errors: Mapping[int, float], max_batch_size: int) -> Floats:
    """Return a value for each of 1 ... `max_batch_size`, non-decreasing.

    Through `values`, made non-decreasing by least squares in which each counts as its error says (isotonic regression),
    goes a shape-preserving cubic (Fritsch and Carlson's, PCHIP), which adds no bumps and keeps flat ground flat. Beyond the
    smallest and the largest of them it is level.
    """
    from scipy.interpolate import PchipInterpolator
    from scipy.optimize import isotonic_regression

    sizes = np.array(sorted(values))
    measured = np.array([values[size] for size in sizes])
    floor = 1e-6 * float(measured.max())  # an error of 0 would be all that counts
    weights = np.array([max(errors[size], floor) ** -2.0 for size in sizes])
    rising = isotonic_regression(measured, weights=weights / weights.max()).x
    if len(sizes) == 1:
        return np.full(max_batch_size, rising[0])
    wanted = np.clip(np.arange(1, max_batch_size + 1), sizes[0], sizes[-1])
    table: Floats = PchipInterpolator(sizes, rising)(wanted)
    return np.maximum.accumulate(table)  # rounding


def linear_table(values: Mapping[int, float], max_batch_size: int) -> Floats:
    """Return a value for each of 1 ... `max_batch_size`, on straight lines through `values`, level beyond them."""
    sizes = sorted(values)
    table: Floats = np.interp(np.arange(1, max_batch_size + 1), sizes, [values[size] for size in sizes])
    return table


def along(times: Floats, values: Mapping[int, float]) -> Floats:
    """Return a value for each size, on straight lines through `values`, which are by size, drawn over the service time: where
    that makes a step, so does the table."""
    sizes = np.array(sorted(values))
    # Where times are level the size itself decides, by a hair.
    over = times + 1e-9 * times[-1] * np.arange(len(times))
    table: Floats = np.interp(over, over[sizes - 1], [values[size] for size in sizes])
    return table
