"""The distribution of many positive numbers, in memory that does not grow with them."""

from math import nan

import numpy as np

from weir.simulation.statistics import Estimate, half_width
from weir.simulation.traces import Floats, Ints

FIRST, OCTAVES = -14, 36  # the least and the number of the powers of two that are told apart
FINE, COARSE = 10, 7  # a power of two is divided in 2**10 equal intervals: 0.1 % wide at most; or in 2**7, 0.8 %
EXPONENT = 1023 << 52  # the bits of 1.0


class LogHistogram:
    """Counts of the intervals into which numbers fall: all of them finely, and those of each stretch coarsely.

    What is told apart reaches from 2**-14 to 2**22; for milliseconds that is from 60 ns to more than an hour.
    """

    def __init__(self, stretches: int) -> None:
        self.counts: Ints = np.zeros(OCTAVES << FINE, dtype=np.int64)
        self.by_stretch: Ints = np.zeros((stretches, OCTAVES << COARSE), dtype=np.int64)
        self.highest = 0.0

    def add(self, values: Floats, stretch: Ints) -> None:
        """Count `values`, each in its stretch."""
        if not len(values):
            return
        stretches, width = self.by_stretch.shape
        fine = np.clip((values.view(np.int64) - EXPONENT >> 52 - FINE) - (FIRST << FINE), 0, len(self.counts) - 1)
        self.counts += np.bincount(fine, minlength=len(self.counts))
        places = stretch * width + (fine >> FINE - COARSE)
        self.by_stretch += np.bincount(places, minlength=stretches * width).reshape(stretches, width)
        self.highest = max(self.highest, float(values.max()))

    def quantile(self, share: float) -> float:
        """Return the number below which that share lies; NaN of nothing."""
        sums = np.cumsum(self.counts)
        if not sums[-1]:
            return nan
        wanted = share * float(sums[-1])
        place = int(np.searchsorted(sums, wanted, side="left" if wanted else "right"))
        low, high = edges(place, FINE), min(edges(place + 1, FINE), self.highest)
        inside = float(self.counts[place])
        return low + (high - low) * (wanted - float(sums[place]) + inside) / inside if inside else low

    def beyond(self, value: float) -> float:
        """Return the share above `value`; NaN of nothing."""
        total = float(self.counts.sum())
        return 1.0 - _below(self.counts[None], value, FINE)[0] / total if total else nan

    def estimate(self, share: float) -> tuple[Estimate, Floats]:
        """Return the quantile with its interval, and an observation of it per stretch whose mean it is, to first order.

        The interval is that of the share below the quantile, which is a mean, read through the distribution. (Quantiles of
        single stretches would be biased, for what is rare comes in clusters.)
        """
        value, totals = self.quantile(share), self.by_stretch.sum(axis=1)
        seen = totals > 0
        if not seen.any():
            return Estimate(nan, nan, nan), np.full(len(totals), nan)
        below = np.full(len(totals), nan)
        counted = _below(self.by_stretch[seen], value, COARSE)
        mean = totals[seen].mean()
        below[seen] = share + (counted - counted.sum() / totals.sum() * totals[seen]) / mean
        half = half_width(below[seen])
        low, high = self.quantile(max(share - half, 0.0)), self.quantile(min(share + half, 1.0))
        slope = (high - low) / (min(share + half, 1.0) - max(share - half, 0.0)) if half > 0.0 else 0.0
        observed: Floats = value - (below - share) * slope
        # What lies in one interval is not told apart.
        return Estimate(value, edges(_place(low, FINE), FINE), edges(_place(high, FINE) + 1, FINE)), observed


def edges(place: int, bits: int) -> float:
    """Return where the interval of that number begins, with 2**bits intervals in a power of two."""
    octave, part = divmod(place, 1 << bits)
    return float(np.ldexp(1.0 + part / (1 << bits), octave + FIRST))


def _place(value: float, bits: int) -> int:
    """Return the number of the interval in which `value` lies; below 0 if it lies before all of them."""
    return int((np.array([value]).view(np.int64)[0] - EXPONENT >> 52 - bits) - (FIRST << bits))


def _below(counts: Ints, value: float, bits: int) -> Floats:
    """Return how many of each row lie below `value`, those of its own interval in proportion."""
    place = _place(value, bits)
    if place < 0:
        return np.zeros(len(counts))
    if place >= counts.shape[1]:
        return np.asarray(counts.sum(axis=1), dtype=np.float64)
    low, high = edges(place, bits), edges(place + 1, bits)
    below: Floats = counts[:, :place].sum(axis=1) + counts[:, place] * ((value - low) / (high - low))
    return below
