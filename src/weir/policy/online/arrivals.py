"""The arrival rate as policies estimate it, with their time constants, and how wrong that may be in the near future.

The rate is estimated from what a policy observes: how many rows have ever arrived, and the instant.

Arrivals are forgotten gradually: one that is `a` seconds old counts exp(-a/T). The estimate is N/S, the weighted
number of arrivals divided by the weighted time, S being the integral of exp(-a/T) over the time observed. At first
that is the number of arrivals divided by the time that has passed, and later the usual exponential average. Between
two observations only the number k of arrivals in the gap d is known; spread evenly over the gap they add k·(1 -
exp(-d/T))·T/d to N. That is exact, however long the gap is, and needs no clock.

T depends on the number of arrivals, not on time. The relative error of the estimate is 1/sqrt(2λT), so T = 50/λ makes
it 10 % at any rate λ; a window of at most a second would hold two arrivals at 2 rows per second. T is at least 20 ms,
so that fast traffic is averaged over about a batch. T needs no upper bound. When traffic stops, the gap outweighs the
memory (d >> T). When it grows, T shrinks with each observation, the time beyond the new T is forgotten, and the
estimate doubles with every 35 arrivals until it is right.

Rows that arrive together, in requests of several rows, count one by one, and make the estimate less certain.
"""

from collections import deque
from math import exp, expm1, inf, sqrt
from typing import NamedTuple

WINDOW_ROWS = 50.0  # T is this many mean gaps
WINDOW_MIN = 0.02  # seconds
WINDOW_MAX = 3600.0  # seconds: T before any arrival, and a bound that keeps the arithmetic finite
ENOUGH = 20  # arrivals until which the rate counts as unknown; its error is then 22 %


class Rate:
    """An estimate of the arrival rate: `value`, in rows per second; 0 while it is unknown.

    It changes only with arrivals. Without arrivals it stays, and so do the instants that are computed from it (the
    ends of waits); the next arrival accounts for the whole gap. A policy, the scaling of workers, a device group and
    residency each have one: each needs a window of its own.

    Args:
        window_rows: T is that many mean gaps.
        enough: arrivals until which the rate counts as unknown.

    Attributes:
        least, most: bounds of T in seconds.
        seconds: S, the weighted time observed.
    """

    def __init__(self, window_rows: float = WINDOW_ROWS, enough: int = ENOUGH) -> None:
        self.value = 0.0
        self.least, self.most = WINDOW_MIN, WINDOW_MAX
        self._window_rows, self._enough = window_rows, enough
        self._counted = 0  # arrivals since the start
        self._arrivals = -1  # at the last observation
        self._at = 0.0  # seconds, the last observation
        self._rows = 0.0  # N
        self.seconds = 0.0
        self._window = WINDOW_MAX  # T

    def observe(self, now: float, arrivals: int) -> float:
        """Take note that `arrivals` rows had ever arrived at the instant `now` (seconds). Returns `value`.

        Where either is less than before (another queue, another clock), counting goes on from the new numbers.
        """
        count, gap = arrivals - self._arrivals, now - self._at
        if count > 0 and gap > 0.0 and self._arrivals >= 0:
            self.learn(count, gap)
        elif count >= 0 and gap >= 0.0 and self._arrivals >= 0:
            return self.value  # no arrivals, or no time has passed yet: the next observation counts them
        self._arrivals, self._at = arrivals, now
        return self.value

    def learn(self, count: int, gap: float) -> None:
        """Take note that `count` rows arrived in `gap` seconds."""
        rows, seconds, window = self._rows, self.seconds, self._window
        if seconds > window:
            rows *= window / seconds
            seconds = window
        faded = exp(-gap / window)
        lasting = -expm1(-gap / window) * window  # positive, however short the gap is
        self._rows = rows = rows * faded + count * lasting / gap
        self.seconds = seconds = seconds * faded + lasting
        self._counted += count
        self._window = min(max(self._window_rows * seconds / rows, self.least), self.most) if rows else self.most
        if self._counted >= self._enough:
            self.value = rows / seconds

    def after(self, gap: float) -> float:
        """Return the rate in `gap` seconds if nothing arrives until then; 0 before the first arrival."""
        if not self._rows:
            return 0.0
        faded = exp(-gap / self._window)
        return self._rows * faded / (self.seconds * faded - expm1(-gap / self._window) * self._window)


FORECAST_ROWS = 10.0  # T of a forecast, in rows: as sure as a mean over twice as many
SHORTEST, LONGEST = 0.6, 6.0  # horizons: the bounds of T. With half of one it is as old as the mean over all of it
MEMORY = 10.0  # horizons after which the error of an estimate counts exp(-1)


class Forecast(NamedTuple):
    """The arrival rate over the next start-up time, as far as it is known. `error` is its standard error."""

    rate: float
    error: float


class ArrivalForecast:
    """Estimates the arrival rate over the next `horizon` seconds, and measures how wrong its estimates are."""

    def __init__(self) -> None:
        self._restart(inf, 0)

    def _restart(self, now: float, arrivals: int) -> None:
        self._begun = self._at = now
        self._arrivals = arrivals
        self._rate = Rate(FORECAST_ROWS, enough=0)
        self._past: deque[tuple[float, int, float]] = deque()  # instants, arrivals by then, and rates to be judged
        self._variance: float | None = None

    def observe(self, now: float, arrivals: int, horizon: float) -> Forecast:
        """Take note that `arrivals` rows had ever arrived at the instant `now`. Return the forecast for the next
        `horizon` seconds.

        Before the first horizon is over, nothing is taken to have arrived before the first observation.
        """
        if now < self._at or arrivals < self._arrivals:  # the first one, or another queue or clock
            self._restart(now, arrivals)
        known = self._rate
        known.least, known.most = SHORTEST * horizon, LONGEST * horizon
        if now > self._at:
            known.learn(arrivals - self._arrivals, now - self._at)
            self._at, self._arrivals = now, arrivals
        settled = now >= self._begun + horizon
        seconds = known.seconds if settled else known.least
        rate = known.value * known.seconds / seconds
        self._judge(now, arrivals, horizon)
        if settled:  # else it says little, and is not to be judged
            self._past.append((now, arrivals, rate))
        poisson = rate / (2.0 * seconds)  # the variance that Poisson arrivals have at least
        return Forecast(rate, sqrt(max(poisson, self._variance or 0.0)))

    def _judge(self, now: float, arrivals: int, horizon: float) -> None:
        """Compare the estimates that were made one horizon ago or before with what has come since then."""
        while self._past and self._past[0][0] <= now - horizon:
            then, before, rate = self._past.popleft()
            error = ((arrivals - before) / (now - then) - rate) ** 2
            if self._variance is None:
                self._variance = error
            else:
                step = self._past[0][0] - then if self._past else horizon
                self._variance += (error - self._variance) * min(1.0, step / (MEMORY * horizon))
