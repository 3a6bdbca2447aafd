"""What a sample of durations says: its mean, how sure that is, and what the machine did to it.

The mean is what predicts response times, so the mean is estimated, and not the median. But on a shared machine now and
then something else takes the CPU for a while, and one such pause outweighs hundreds of batches. Hence a duration counts as
the machine's doing, and is left out, if it is both *far* (more than FAR robust standard deviations above the median) and
*rare* (not more than RARE of the sample are so far; of a small sample, one). What is more frequent belongs to the model: it
stays, in the mean and in the coefficient of variation. Where other processes are known to compete for the CPUs, what is far
may be as frequent as CROWDED_RARE. How much was left out is always reported.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

FAR = 8.0
LEAST_SPREAD = 0.05  # of the median: what is within FAR times it is never far
RARE = 0.05
CROWDED_RARE = 0.3
SMALL = 5  # durations in a sample of which one may be left out
PRIOR = 5.0  # durations that what is known of the other sizes is worth
NORMAL = 1.4826  # standard deviations in a median absolute deviation
Z95 = 1.96


class Estimate(NamedTuple):
    """Of one batch size: durations in seconds. `half_width` is half the 95 % interval of the mean; `left_out` the number
    of durations that were, `left_out_seconds` by how much they exceeded the median, in all."""

    mean: float
    deviation: float
    counted: int
    half_width: float
    left_out: int
    left_out_seconds: float

    @property
    def cv(self) -> float:
        """Coefficient of variation."""
        return self.deviation / self.mean

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / sqrt(self.counted)

    @property
    def relative(self) -> float:
        """`half_width` as a share of the mean."""
        return self.half_width / self.mean


def estimate(durations: Sequence[float], rare: float = RARE) -> Estimate:
    """Return the estimate of at least one duration; of fewer than three `half_width` is infinite.

    `rare` is the largest share of them that may be left out.
    """
    values = np.asarray(durations, dtype=np.float64)
    median = float(np.median(values))
    spread = max(NORMAL * float(np.median(np.abs(values - median))), LEAST_SPREAD * median)
    far = values > median + FAR * spread
    left_out = int(far.sum())
    if left_out > max(rare * len(values), len(values) >= SMALL):
        left_out, far = 0, np.zeros(len(values), dtype=np.bool_)
    kept = values[~far]
    mean = float(kept.mean())
    deviation = float(kept.std(ddof=1)) if len(kept) > 1 else 0.0
    half_width = Z95 * deviation / sqrt(len(kept)) if len(kept) > 2 else float("inf")
    return Estimate(mean, deviation, len(kept), half_width, left_out, float(np.sum(values[far] - median)))


def steadied(estimates: Mapping[int, Estimate]) -> dict[int, Estimate]:
    """Return `estimates`, by size, with the deviation of each moved towards what the others say of it, the more the fewer
    durations it has: three that happen to agree are not known exactly."""
    usual = float(np.median([each.cv for each in estimates.values()]))
    return {
        size: each._replace(deviation=each.mean * sqrt(_weighted(each.cv**2, each.counted, usual**2)))
        for size, each in estimates.items()
    }


def _weighted(own: float, counted: int, usual: float) -> float:
    return (own * counted + usual * PRIOR) / (counted + PRIOR)
