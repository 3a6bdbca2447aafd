"""Learns how many seconds a batch takes from the batches that came back. All who need service times read this.

What a batch will take is a straight line, fixed cost + cost per row. It is a weighted least-squares fit in which older batches count less and less.
While all batches have had the same size, the whole time counts as fixed cost. Where batches are padded to their longest request, the line is over the
cost of a batch instead of its rows: requests to come are taken to be as long as the last ones were, and no batch to cost more than `max_cost`.

The last times of each size are kept as well, where a profile is made of them (tuning/learning.py).
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

FADE = 0.95  # the factor by which the weight of a batch falls with each later one: about the last 20 count
ENOUGH = 3  # batches after which the estimate may refuse work
STALE_SERVICES = 10.0  # an estimate older than this many service times ...
STALE_MIN = 1.0  # ... and than this many seconds refuses nothing: one slow batch must not stop all work for ever
LAST = 64  # times of each size that are kept


class ServiceTime:
    """The expected service time of a batch of n rows, in seconds. Before anything was measured it is 0.

    `padded`: a row costs what rows of the last batches did, padding included; at most `max_cost` in all. `count` is the number of batches.
    """

    def __init__(self, *, padded: bool = False, max_cost: float | None = None) -> None:
        self.count = 0
        self._padded = padded
        self._max_cost = max_cost if padded and max_cost is not None else inf
        self._row_cost = 0.0 if padded else 1.0
        self._at = float("-inf")
        # Faded sums: of weights, of sizes or costs x and seconds t, and of rows where x is a cost.
        self._w = self._x = self._t = self._xx = self._xt = self._rows = 0.0
        self._fixed = self._slope = self._spread = 0.0
        self._differed = False
        self._recent: dict[int, deque[float]] | None = None

    def keep(self) -> dict[int, deque[float]]:
        """Return the last times in seconds by size. They are kept from now on."""
        if self._recent is None:
            self._recent = {}
        return self._recent

    def learn(self, rows: int, seconds: float, now: float, cost: float) -> None:
        """Learn that a batch of `rows`, costing `cost`, took `seconds`, at the instant `now`."""
        x = cost if self._padded else rows
        if self.count:
            error = abs(seconds - self._fixed - self._slope * x)
            self._spread += (1.0 - FADE if self.count > 10 else 1.0 / self.count) * (error - self._spread)
        self.count += 1
        self._at = now
        self._w = weight = FADE * self._w + 1.0
        self._x = n = FADE * self._x + x
        self._t = t = FADE * self._t + seconds
        self._xx = nn = FADE * self._xx + x * x
        self._xt = nt = FADE * self._xt + x * seconds
        variance = nn * weight - n * n
        self._differed = variance > 1e-3 * n * n
        slope = (nt * weight - n * t) / variance if self._differed else 0.0
        if slope < 0.0:
            slope = 0.0
        fixed = (t - slope * n) / weight
        if fixed < 0.0:
            fixed, slope = 0.0, nt / nn
        self._fixed, self._slope = fixed, slope
        if self._padded:
            self._rows = FADE * self._rows + rows
            self._row_cost = n / self._rows
        if self._recent is not None and seconds > 0.0:  # 0 says no more than that the clock is too coarse
            times = self._recent.get(rows)
            if times is None:
                times = self._recent[rows] = deque(maxlen=LAST)
            times.append(seconds)

    def expected(self, rows: float) -> float:
        """Return the expected service time of a batch of `rows`."""
        x = rows * self._row_cost
        return self._fixed + self._slope * (x if x < self._max_cost else self._max_cost)

    def upper(self, rows: float) -> float:
        """Return a service time within which most batches of `rows` are done."""
        x = rows * self._row_cost  # as `expected`, which would be one more call for each wait
        return self._fixed + self._slope * (x if x < self._max_cost else self._max_cost) + 2.0 * self._spread

    def lower(self, rows: float) -> float:
        """Return a service time within which hardly any batch of `rows` is done."""
        x = rows * self._row_cost  # as in `upper`
        seconds = self._fixed + self._slope * (x if x < self._max_cost else self._max_cost) - 2.0 * self._spread
        return seconds if seconds > 0.0 else 0.0

    def alone(self, rows: float, length: float) -> float:
        """Return a service time within which hardly any batch of `rows` of such a `length` is done; the length counts where batches are padded."""
        return max(0.0, self._fixed + self._slope * (rows * length if self._padded else rows) - 2.0 * self._spread)

    def is_sooner(self, rows: float, among: float, share: float) -> bool:
        """Return whether a batch of `rows` takes less than this `share` of the time of one of `among` rows. If enough batches came back, but all of one
        size, it is worth a try, and so True."""
        expected = self.expected(among)
        if not self._differed:
            return self.count >= ENOUGH and expected > 0.0
        return self.expected(rows) < share * expected

    def is_trusted(self, now: float) -> bool:
        """Return whether this estimate may be used to refuse work: enough batches were measured, and not too long ago."""
        if self.count < ENOUGH:
            return False
        return now <= self._at + max(STALE_MIN, STALE_SERVICES * self._t / self._w)

    def rate(self, rows: float) -> float:
        """Return the rows per second that one worker serves in batches of `rows`, or of as many as `max_cost` allows; infinity if nothing is known."""
        if self._max_cost < rows * self._row_cost:
            rows = max(1.0, self._max_cost / self._row_cost)
        seconds = self.expected(rows)
        return rows / seconds if seconds > 0.0 else inf

    def typical_rows(self) -> float:
        """Return the mean size of the last batches; infinity if there were none."""
        return (self._rows if self._padded else self._x) / self._w if self.count else inf


class KindTimes(ServiceTime):
    """The service times of a model whose workers are of several kinds. `of` has those of each kind, by its number.

    What it says for all kinds together comes from the batches of all of them; but `rate` is that of a worker on average, and a forecast that refuses work
    allows for the fastest kind, one that accepts it for the slowest. `workers` returns how many workers there are of each kind.
    """

    def __init__(
        self, kinds: int, workers: Callable[[], Sequence[int]], *, padded: bool = False, max_cost: float | None = None
    ) -> None:
        super().__init__(padded=padded, max_cost=max_cost)
        self.of = [ServiceTime(padded=padded, max_cost=max_cost) for _ in range(kinds)]
        self._workers = workers

    def upper(self, rows: float) -> float:
        """Return a service time within which most batches of `rows` are done, whatever the kind of their worker."""
        return max((each.upper(rows) for each in self.of if each.count), default=0.0)

    def alone(self, rows: float, length: float) -> float:
        """Return what `alone` of the fastest kind is."""
        return min((each.alone(rows, length) for each in self.of if each.count), default=0.0)

    def rate(self, rows: float) -> float:
        """Return the rows per second that a worker serves on average. A kind of which nothing is known counts as the others together."""
        workers = self._workers()
        if not sum(workers):
            return super().rate(rows)
        rates = [(each.rate if each.count else super(KindTimes, self).rate)(rows) for each in self.of]
        return sum(count * rate for count, rate in zip(workers, rates, strict=True) if count) / sum(workers)
