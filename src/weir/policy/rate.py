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

from math import exp

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
