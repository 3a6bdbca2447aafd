"""Intervals for what one long run has shown: batch means.

Responses that follow each other are alike, so a run is divided into stretches, and the mean of each counts as one
observation. While neighbouring stretches are still alike, they are joined in pairs.
"""

from math import ceil, sqrt
from typing import NamedTuple

import numpy as np

from weir.simulation.traces import Floats, Ints

LEVEL = 0.95
STRETCHES = 64  # of a run, as long as that makes them no longer than LONGEST
LONGEST = 65_536  # requests of a stretch
FEWEST = 8  # stretches that are not joined any further
ALIKE = 1.645  # a correlation of neighbours above this many of its standard deviations is taken for one
STRONGEST = 0.8  # the largest correlation that is believed of so few observations


class Estimate(NamedTuple):
    """A value, and the interval in which the true one lies in 95 of 100 runs. NaN: nothing was seen."""

    value: float
    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2.0


def stretch_length(requests: int) -> int:
    """Return how many requests make a stretch, when so many are looked at."""
    return max(1, min(ceil(requests / STRETCHES), LONGEST))


def estimate(observations: Floats, value: float | None = None) -> Estimate:
    """Return the interval of the mean of `observations`, one per stretch, around `value` (their mean if left out).

    Stretches of which nothing is known (NaN) are left out.
    """
    known = observations[np.isfinite(observations)]
    centre = float(np.mean(known)) if value is None and len(known) else value
    if centre is None or not np.isfinite(centre):
        return Estimate(np.nan, np.nan, np.nan)
    if len(known) < 2:
        return Estimate(centre, -np.inf, np.inf)
    joined, alike = _joined(known)
    count = len(joined)
    from scipy.special import stdtrit  # only those who ask for intervals need it

    spread = float(np.std(joined, ddof=1)) * sqrt((1.0 + alike) / (1.0 - alike) / count)
    half = float(stdtrit(count - 1, 0.5 + LEVEL / 2.0)) * spread
    return Estimate(centre, centre - half, centre + half)


def _joined(observations: Floats) -> tuple[Floats, float]:
    """Join neighbours until they are no longer alike; return also the correlation that is left if they stay so."""
    while True:
        alike = correlation(observations)
        if alike <= ALIKE / sqrt(len(observations)):
            return observations, 0.0
        if len(observations) < 2 * FEWEST:
            return observations, min(alike, STRONGEST)
        pairs = observations[len(observations) % 2 :].reshape(-1, 2)
        observations = pairs.mean(axis=1)


def correlation(observations: Floats) -> float:
    """Return the correlation of neighbours; 0 if all are equal."""
    left = observations - observations.mean()
    total = float(left @ left)
    return float(left[1:] @ left[:-1]) / total if total > 0.0 and len(left) > 2 else 0.0


class Spread:
    """The distribution of many positive numbers in memory that does not grow: counts of intervals 0.1 % wide.

    An interval is a power of two divided in 1024 equal parts: the upper bits of the number itself.
    """

    _SHIFT = 42  # of the 52 bits of a number's fraction, 10 are kept
    _FIRST = (1023 - 30) << 10  # 2**-30, about a nanosecond
    _COUNT = 60 << 10  # up to 2**30

    def __init__(self) -> None:
        self.counts: Ints = np.zeros(self._COUNT, dtype=np.int64)
        self.highest = 0.0

    def add(self, values: Floats) -> None:
        """Count `values`."""
        if not len(values):
            return
        places = (np.ascontiguousarray(values, dtype=np.float64).view(np.int64) >> self._SHIFT) - self._FIRST
        self.counts += np.bincount(np.clip(places, 0, self._COUNT - 1), minlength=self._COUNT)
        self.highest = max(self.highest, float(values.max()))

    def quantile(self, share: float) -> float:
        """Return the value below which that share lies; NaN of nothing."""
        sums = np.cumsum(self.counts)
        total = int(sums[-1])
        if not total:
            return float("nan")
        wanted = share * total
        place = int(np.searchsorted(sums, wanted, side="left"))
        inside = self.counts[place]
        low, high = self._edge(place), min(self._edge(place + 1), self.highest)
        below = float(sums[place] - inside)
        return low + (high - low) * (wanted - below) / float(inside) if inside else low

    def beyond(self, value: float) -> float:
        """Return the share above `value`; NaN of nothing."""
        total = int(self.counts.sum())
        if not total:
            return float("nan")
        edges = (np.arange(self._FIRST, self._FIRST + self._COUNT + 1) << self._SHIFT).view(np.float64)
        inside = np.interp(value, edges, np.concatenate([[0.0], np.cumsum(self.counts)]))
        return 1.0 - float(inside) / total

    def _edge(self, place: int) -> float:
        return float(np.array([(self._FIRST + place) << self._SHIFT], dtype=np.int64).view(np.float64)[0])
