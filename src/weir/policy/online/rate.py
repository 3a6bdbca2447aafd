"""The arrival rate, estimated from what a policy sees: how many rows ever arrived, and the instant.

Arrivals fade with age: one that is `a` seconds old counts exp(-a/T). The estimate is the ratio of faded arrivals to
faded time, N/S with S = integral of exp(-a/T) over the time seen: from a cold start it is what was counted over the time
that has passed, later the usual exponential average. Between two looks only the number k that came in the gap d is known;
spread evenly over it they add k·(1 - exp(-d/T))·T/d to N. That is exact, whatever the gap, and needs no clock.

How long to remember is a matter of arrivals, not of seconds. The relative error of the estimate is 1/sqrt(2λT): T = 50/λ
makes it 10 % at any rate, where a window of at most a second would hold two arrivals at 2 rows/s. At least 20 ms are
remembered, so that fast traffic is averaged over the length of a batch. Nothing bounds T from above, nor needs to: when
traffic falls silent the gap itself outweighs the memory (d >> T); when it rises, T shrinks with each look, the time beyond
the new T is forgotten, and the estimate doubles with every 35 arrivals until it is right.

Rows that come together, in requests of many, count as so many arrivals, and make the estimate as much less certain.
"""

from math import exp, log, log1p, sqrt
from statistics import median
from typing import NamedTuple

from weir.policy.cost.profile import Profile

WINDOW_ROWS = 50.0
WINDOW_MIN = 0.02  # seconds
WINDOW_MAX = 3600.0  # seconds; before anything is known, and a bound on the arithmetic
ENOUGH = 20  # arrivals until which the rate counts as unknown; the error is 22 % then


class Rate:
    """An estimate of rows per second: `value`, 0 while it is unknown.

    It changes only with arrivals. While nothing comes it stays, and so do the instants that are computed from it (the
    end of a wait); the next arrival brings the whole gap to account.
    """

    __slots__ = ("_arrivals", "_at", "_counted", "_rows", "_seconds", "_window", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._counted = 0  # arrivals since the start
        self._arrivals = -1  # as of the last look
        self._at = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._window = WINDOW_MAX

    def observe(self, now: float, arrivals: int) -> float:
        """At the instant `now`, so many rows had ever arrived. Returns `value`.

        Where either is less than it was (another line, another clock), counting goes on from there.
        """
        count, gap = arrivals - self._arrivals, now - self._at
        if count > 0 and gap > 0.0 and self._arrivals >= 0:
            self._learn(count, gap)
        elif count >= 0 and gap >= 0.0 and self._arrivals >= 0:
            return self.value  # nothing came, or no time has passed yet: the next look counts it
        self._arrivals, self._at = arrivals, now
        return self.value

    def _learn(self, count: int, gap: float) -> None:
        rows, seconds, window = self._rows, self._seconds, self._window
        if seconds > window:
            rows *= window / seconds
            seconds = window
        faded = exp(-gap / window)
        lasting = (1.0 - faded) * window
        self._rows = rows = rows * faded + count * lasting / gap
        self._seconds = seconds = seconds * faded + lasting
        self._counted += count
        self._window = min(max(WINDOW_ROWS * seconds / rows, WINDOW_MIN), WINDOW_MAX)
        if self._counted >= ENOUGH:
            self.value = rows / seconds


# Have the service times moved away from the profile? A two-sided cumulative sum (Page's CUSUM) of log(τ observed/τ(b)).
#
# Each batch says by which factor it took longer than the profile's mean, on a logarithmic scale, where twice as long and
# half as long are equally far. What exceeds an allowance adds up, what falls short of it is taken off, down to 0; a sum
# above the threshold says that something has changed. The next batches then say by how much (their median does), those
# before the alarm being a mixture of old and new. One sum watches for slower, one for faster.
#
# The allowance is half of the smallest change worth noticing (10 %), or half a standard deviation if that is more. The
# threshold h is what a run of chance would pass, from any one batch on, with the probability of a value five standard
# deviations out (Wald: exp(-2·allowance·h/σ²) = 2.9e-7), and at least five standard deviations. A single batch counts as
# four standard deviations at most, so that one pause of the machine is no change of the model.


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
