"""Intervals for the figures of one long run, by batch means; and the distribution of many numbers.

Responses that follow each other are alike. So a run is divided into stretches, and the mean of each stretch counts as
one observation. While neighbouring stretches are still alike, they are joined in pairs. (Law and Kelton, "Simulation
Modeling and Analysis", chapter on output analysis, describe the method of batch means.)
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from math import ceil, inf, isfinite, nan, sqrt
from typing import Any, NamedTuple

import numpy as np

from weir.numerics import student_quantile
from weir.simulation.arrivals import Floats, Ints

LEVEL = 0.95
STRETCHES = 64  # in a run
FEWEST = 8  # fewer stretches are not joined any further
ALIKE = 0.5  # neighbours count as alike if their correlation exceeds this many of its standard deviations
STRONGEST = 0.8  # the largest correlation that is taken from so few observations


class Estimate(NamedTuple):
    """A value and its 95 % interval: the true value lies in it in 95 of 100 runs. NaN: there were no observations.

    In runs that are short for their load it is in the interval less often (10,000 requests at load 0.8: about 90 times
    of 100 for means, 85 for p99).
    """

    value: float
    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2.0


def short(value: float) -> str:
    """Return `value` with four digits; a dash if it is infinite or unknown."""
    return f"{value:.4g}" if isfinite(value) else "–"


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: dataclasses and named tuples as dicts, and None for a number that is infinite or unknown."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    return {key: plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def stretch_length(requests: int) -> int:
    """Return how many requests make a stretch if `requests` are observed."""
    return max(1, ceil(requests / STRETCHES))


def estimate(observations: Floats, value: float | None = None) -> Estimate:
    """Return the interval of the mean of `observations`, one per stretch, around `value` (their mean if it is None).

    Stretches without an observation (NaN) are left out. Shape (stretches,).
    """
    known = observations[np.isfinite(observations)]
    centre = float(np.mean(known)) if value is None and len(known) else value
    if centre is None or not np.isfinite(centre):
        return Estimate(nan, nan, nan)
    half = half_width(known)
    return Estimate(centre, centre - half, centre + half)


def half_width(observations: Floats) -> float:
    """Return half the width of the 95 % interval of the mean of `observations`, shape (stretches,); infinity for fewer
    than two.
    """
    if len(observations) < 2:
        return inf
    joined, alike = _joined(observations)
    count = len(joined)

    spread = float(np.std(joined, ddof=1)) * sqrt((1.0 + alike) / (1.0 - alike) / count)
    return student_quantile(count - 1, 0.5 + LEVEL / 2.0) * spread


def _joined(observations: Floats) -> tuple[Floats, float]:
    """Join neighbours until they are no longer alike. Return also the correlation that is left."""
    while True:
        alike = correlation(observations)
        if alike <= ALIKE / sqrt(len(observations)):
            return observations, 0.0
        if len(observations) < 2 * FEWEST:
            return observations, min(alike, STRONGEST)
        pairs = observations[len(observations) % 2 :].reshape(-1, 2)
        observations = pairs.mean(axis=1)


def correlation(observations: Floats) -> float:
    """Return the correlation of neighbours in `observations`, shape (stretches,); 0 if all are equal."""
    left = observations - observations.mean()
    total = float(left @ left)
    return float(left[1:] @ left[:-1]) / total if total > 0.0 and len(left) > 2 else 0.0


# The distribution of many positive numbers.


FIRST_OCTAVE = -14  # the exponent of the smallest power of two that is distinguished, ...
OCTAVES = 36  # ... and the number of them
FINE, COARSE = 10, 7  # a power of two is divided in 2**10 equal intervals: 0.1 % wide at most; or in 2**7, 0.8 %
EXPONENT = 1023 << 52  # the bits of 1.0


class LogHistogram:
    """Counts positive numbers by interval: all of them in fine intervals, and those of each stretch in coarse ones.

    Its memory does not grow with their number. It distinguishes numbers from 2**-14 to 2**22; for milliseconds that is
    from 60 ns to more than an hour.
    """

    def __init__(self, stretches: int) -> None:
        self.counts: Ints = np.zeros(OCTAVES << FINE, dtype=np.int64)
        self.by_stretch: Ints = np.zeros((stretches, OCTAVES << COARSE), dtype=np.int64)
        self.highest = 0.0

    def add(self, values: Floats, stretch: Ints) -> None:
        """Count `values`, each in the stretch of the same index in `stretch`; both of the same shape."""
        if not len(values):
            return
        stretches, width = self.by_stretch.shape
        fine = np.clip(
            (values.view(np.int64) - EXPONENT >> 52 - FINE) - (FIRST_OCTAVE << FINE), 0, len(self.counts) - 1
        )
        self.counts += np.bincount(fine, minlength=len(self.counts))
        cells = stretch * width + (fine >> FINE - COARSE)
        self.by_stretch += np.bincount(cells, minlength=stretches * width).reshape(stretches, width)
        self.highest = max(self.highest, float(values.max()))

    def quantile(self, share: float) -> float:
        """Return the number below which the given share of the numbers lies; NaN without numbers."""
        sums = np.cumsum(self.counts)
        if not sums[-1]:
            return nan
        wanted = share * float(sums[-1])
        interval = int(np.searchsorted(sums, wanted, side="left" if wanted else "right"))
        low, high = edges(interval, FINE), min(edges(interval + 1, FINE), self.highest)
        inside = float(self.counts[interval])
        return low + (high - low) * (wanted - float(sums[interval]) + inside) / inside if inside else low

    def estimate(self, share: float) -> tuple[Estimate, Floats]:
        """Return a quantile with its interval, and an observation of it for each stretch (to first order, with the
        same mean).

        The interval is that of the share below the quantile, which is a mean, translated by the distribution.
        Quantiles of single stretches would be biased, because rare values come in clusters. Shape of the observations:
        (stretches,).
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
        # Numbers in one interval are not distinguished, so the ends of the interval go to its edges.
        return Estimate(
            value, edges(_interval_of(low, FINE), FINE), edges(_interval_of(high, FINE) + 1, FINE)
        ), observed


def edges(interval: int, bits: int) -> float:
    """Return where interval number `interval` begins, with 2**bits intervals in a power of two."""
    octave, part = divmod(interval, 1 << bits)
    return float(np.ldexp(1.0 + part / (1 << bits), octave + FIRST_OCTAVE))


def _interval_of(value: float, bits: int) -> int:
    """Return the number of the interval in which `value` lies; negative if it lies below all of them."""
    return int((np.array([value]).view(np.int64)[0] - EXPONENT >> 52 - bits) - (FIRST_OCTAVE << bits))


def _below(counts: Ints, value: float, bits: int) -> Floats:
    """Return how many numbers of each row of `counts`, shape (rows, intervals), lie below `value`.

    Those in the interval of `value` count in proportion. Shape (rows,).
    """
    interval = _interval_of(value, bits)
    if interval < 0:
        return np.zeros(len(counts))
    if interval >= counts.shape[1]:
        return np.asarray(counts.sum(axis=1), dtype=np.float64)
    low, high = edges(interval, bits), edges(interval + 1, bits)
    below: Floats = counts[:, :interval].sum(axis=1) + counts[:, interval] * ((value - low) / (high - low))
    return below
