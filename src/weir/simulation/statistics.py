"""Intervals for what one long run has shown: batch means.

Responses that follow each other are alike, so a run is divided into stretches, and the mean of each counts as one
observation. While neighbouring stretches are still alike, they are joined in pairs.
"""

from math import ceil, inf, nan, sqrt
from sys import maxsize
from typing import NamedTuple

import numpy as np

from weir.batching.settings import BatchingSettings
from weir.policy.cost.profile import Profile
from weir.policy.decision import Observation, Policy, complete
from weir.simulation.arrivals import Floats

LEVEL = 0.95
STRETCHES = 64  # of a run
FEWEST = 8  # stretches that are not joined any further
ALIKE = 0.5  # a correlation of neighbours above this many of its standard deviations is taken for one: rather too often
STRONGEST = 0.8  # the largest correlation that is believed of so few observations


class Estimate(NamedTuple):
    """A value, and the interval in which the true one lies in 95 of 100 runs; in fewer where the run is short for its load
    (10,000 requests at load 0.8: about 90 for means, 85 for p99). NaN: nothing was seen."""

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
    return max(1, ceil(requests / STRETCHES))


def estimate(observations: Floats, value: float | None = None) -> Estimate:
    """Return the interval of the mean of `observations`, one per stretch, around `value` (their mean if left out).

    Stretches of which nothing is known (NaN) are left out.
    """
    known = observations[np.isfinite(observations)]
    centre = float(np.mean(known)) if value is None and len(known) else value
    if centre is None or not np.isfinite(centre):
        return Estimate(nan, nan, nan)
    half = half_width(known)
    return Estimate(centre, centre - half, centre + half)


def half_width(observations: Floats) -> float:
    """Return half the width of the 95 % interval of their mean; infinity for fewer than two."""
    if len(observations) < 2:
        return inf
    joined, alike = _joined(observations)
    count = len(joined)
    from scipy.special import stdtrit  # only those who ask for intervals need it

    spread = float(np.std(joined, ddof=1)) * sqrt((1.0 + alike) / (1.0 - alike) / count)
    return float(stdtrit(count - 1, 0.5 + LEVEL / 2.0)) * spread


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


# Whether a policy keeps up with its arrivals.


MANY = 1_000_000  # rows that wait when a policy is asked what it does with more than enough


def capacity_of(
    policy: Policy, profile: Profile, settings: BatchingSettings, workers: int = 1, *, now: float = 0.0,
    arrivals: int = 0,
) -> float | None:  # fmt: skip
    """Return the rows per second that all workers serve once the queue is long; None where the policy does not say.

    A long queue is served in the batches that `policy` cuts from it: at this rate or above, it only grows. One that learns
    is asked when it has: at the end of a run, which was at `now` and after `arrivals` rows.
    """
    seen = Observation(
        now, MANY, now, inf, arrivals, now, 1, workers, settings.max_batch_size, settings.max_queue_delay, False
    )
    try:
        rows = min(policy.decide(seen).rows, settings.max_batch_size)
    except Exception:  # what it raises comes up again when it is really asked
        return None
    return workers * rows / float(profile.service_time_ms[rows - 1]) * 1000.0 if rows > 0 else None


def is_bounded(policy: Policy, settings: BatchingSettings) -> bool:
    """Tell whether the queue cannot grow without end, because more are refused."""
    return settings.max_queue_size < maxsize or complete(policy).max_waiting is not None
