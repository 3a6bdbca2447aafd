"""Have the service times moved away from the profile? A two-sided cumulative sum (Page's CUSUM) of log(τ observed/τ(b)).

Each batch says by which factor it took longer than the profile's mean, on a logarithmic scale, where twice as long and
half as long are equally far. What exceeds an allowance adds up, what falls short of it is taken off, down to 0; a sum
above the threshold says that something has changed. The next batches then say by how much (their median does), those
before the alarm being a mixture of old and new. One sum watches for slower, one for faster.

The allowance is half of the smallest change worth noticing (10 %), or half a standard deviation if that is more. The
threshold h is what a run of chance would pass, from any one batch on, with the probability of a value five standard
deviations out (Wald: exp(-2·allowance·h/σ²) = 2.9e-7), and at least five standard deviations. A single batch counts as
four standard deviations at most, so that one pause of the machine is no change of the model.
"""

from math import exp, log, log1p, sqrt
from statistics import median
from typing import NamedTuple

from weir.policy.profile import Profile

NOTICEABLE = 0.1  # relative change of the service time that is worth another solution
LEAST_SPREAD = 0.03  # standard deviation of log τ that even a steady model is granted: clocks, other load
FIVE_SIGMA = -log(2.87e-7)
THRESHOLD = 5.0  # standard deviations, at least
OUTLIER = 4.0  # standard deviations, at most, that one batch counts
BATCHES = 20  # after an alarm, that measure the change


class Drift(NamedTuple):
    """Service times have changed by `factor` (above 1: slower), as `batches` batches say."""

    factor: float
    batches: int


class DriftDetector:
    """Watches one model's service times. `observe` each batch; what it returns is a verdict.

    With a verdict it starts anew: go on with a detector for the profile that was scaled by the factor.
    """

    __slots__ = ("_faster", "_laws", "_since", "_slower")

    def __init__(self, profile: Profile) -> None:
        # By size, the mean and variance of log τ. Of a log-normal law that mean is less than the log of the mean.
        spreads = [log1p(cv * cv) for cv in profile.cv.tolist()]
        times = profile.service_time_ms.tolist()
        self._laws = [(log(ms / 1000.0) - each / 2.0, each) for ms, each in zip(times, spreads, strict=True)]
        self._restart()

    def _restart(self) -> None:
        self._slower = self._faster = 0.0  # the sums
        self._since: list[float] | None = None  # log τ observed/τ(b) since the alarm, if there was one

    def observe(self, rows: int, seconds: float) -> Drift | None:
        """A batch of `rows` took `seconds`. Return by how much service times have changed, None if nothing says so.

        Sizes that the profile does not have, and times that are not above 0, say nothing.
        """
        if not 1 <= rows <= len(self._laws) or seconds <= 0.0:
            return None
        mean, variance = self._laws[rows - 1]
        excess = log(seconds) - mean
        if self._since is None:
            if self._is_alarm(excess, max(sqrt(variance), LEAST_SPREAD)):
                self._since = []
            return None
        self._since.append(excess)
        if len(self._since) < BATCHES:
            return None
        change = median(self._since)
        self._restart()
        return Drift(exp(change), BATCHES) if abs(change) > log1p(NOTICEABLE) / 2.0 else None

    def _is_alarm(self, excess: float, spread: float) -> bool:
        excess = min(max(excess, -OUTLIER * spread), OUTLIER * spread)
        allowance = max(log1p(NOTICEABLE), spread) / 2.0
        self._slower = max(self._slower + excess - allowance, 0.0)
        self._faster = max(self._faster - excess - allowance, 0.0)
        threshold = max(FIVE_SIGMA * spread * spread / (2.0 * allowance), THRESHOLD * spread)
        return max(self._slower, self._faster) > threshold
