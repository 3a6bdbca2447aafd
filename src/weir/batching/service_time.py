"""How many seconds a batch takes, learned from the batches that came back: a straight line, fixed cost + cost per row.

It is a weighted least-squares fit in which older batches count less and less. While all batches have had the same size, the whole time counts as
fixed cost. Where batches are padded to their longest request, the line is over the cost of a batch instead of its rows: requests to come are taken
to be as long as the last ones were, and no batch to cost more than `max_batch_cost`.
"""

from math import inf

FADE = 0.95  # the factor by which the weight of a batch falls with each later one: about the last 20 count
ENOUGH = 3  # batches after which the estimate may refuse work
STALE_SERVICES = 10.0  # an estimate older than this many service times ...
STALE_MIN = 1.0  # ... and than this many seconds refuses nothing: one slow batch must not stop all work for ever


class ServiceTime:
    """The expected service time of a batch of n rows, in seconds. Before anything was measured it is 0."""

    def __init__(self) -> None:
        self._count = 0
        self._at = float("-inf")
        self._w = self._n = self._t = self._nn = self._nt = 0.0
        self._fixed = self._per_row = self._spread = 0.0
        self._differed = False

    def learn(self, rows: float, seconds: float, now: float, cost: float) -> None:
        """Learn that a batch of `rows` took `seconds`, at the instant `now`; its `cost` does not count here."""
        if self._count:
            error = abs(seconds - self._fixed - self._per_row * rows)
            self._spread += (1.0 - FADE if self._count > 10 else 1.0 / self._count) * (error - self._spread)
        self._count += 1
        self._at = now
        self._w = weight = FADE * self._w + 1.0
        self._n = n = FADE * self._n + rows
        self._t = t = FADE * self._t + seconds
        self._nn = nn = FADE * self._nn + rows * rows
        self._nt = nt = FADE * self._nt + rows * seconds
        variance = nn * weight - n * n
        self._differed = variance > 1e-3 * n * n
        slope = (nt * weight - n * t) / variance if self._differed else 0.0
        if slope < 0.0:
            slope = 0.0
        fixed = (t - slope * n) / weight
        if fixed < 0.0:
            fixed, slope = 0.0, nt / nn
        self._fixed, self._per_row = fixed, slope

    def expected(self, rows: float) -> float:
        """Return the expected service time of a batch of `rows`."""
        return self._fixed + self._per_row * rows

    def upper(self, rows: float) -> float:
        """Return a service time within which most batches of `rows` are done."""
        return self._fixed + self._per_row * rows + 2.0 * self._spread

    def lower(self, rows: float) -> float:
        """Return a service time within which hardly any batch of `rows` is done."""
        return max(0.0, self._fixed + self._per_row * rows - 2.0 * self._spread)

    def alone(self, rows: float, length: float) -> float:
        """Return a service time within which hardly any batch of `rows` of such a `length` is done; here the length does not count."""
        return self.lower(rows)

    def is_sooner(self, rows: float, among: float, share: float) -> bool:
        """Tell whether a batch of `rows` takes less than this `share` of the time of one of `among` rows. If enough batches came back, but all of one
        size, it is worth a try, and so True."""
        expected = self.expected(among)
        if not self._differed:
            return self._count >= ENOUGH and expected > 0.0
        return self.expected(rows) < share * expected

    def is_trusted(self, now: float) -> bool:
        """Tell whether this estimate may be used to refuse work: enough batches were measured, and not too long ago."""
        if self._count < ENOUGH:
            return False
        return now <= self._at + max(STALE_MIN, STALE_SERVICES * self._t / self._w)

    def rate(self, rows: float) -> float:
        """Return the rows per second that one worker serves in batches of `rows`; infinity if nothing is known."""
        seconds = self.expected(rows)
        return rows / seconds if seconds > 0.0 else float("inf")

    def typical_rows(self) -> float:
        """Return the mean size of the last batches; infinity if there were none."""
        return self._n / self._w if self._count else float("inf")


class PaddedTime(ServiceTime):
    """The expected service time of a batch of n rows, each of which costs what rows of the last batches did, padding included; at most `max_cost`
    in all. The line that is fitted is fixed cost + seconds per unit of cost."""

    def __init__(self, max_cost: float | None) -> None:
        super().__init__()
        self._max_cost = inf if max_cost is None else max_cost
        self._rows = 0.0

    def learn(self, rows: float, seconds: float, now: float, cost: float) -> None:
        """Learn that a batch of `rows`, costing `cost`, took `seconds`."""
        super().learn(cost, seconds, now, cost)
        self._rows = FADE * self._rows + rows

    def expected(self, rows: float) -> float:
        """See ServiceTime."""
        return super().expected(self._cost(rows))

    def upper(self, rows: float) -> float:
        """See ServiceTime."""
        return super().upper(self._cost(rows))

    def lower(self, rows: float) -> float:
        """See ServiceTime."""
        return super().lower(self._cost(rows))

    def alone(self, rows: float, length: float) -> float:
        """Return a service time within which hardly any batch of `rows` of such a `length` is done."""
        return super().lower(rows * length)

    def rate(self, rows: float) -> float:
        """Return the rows per second that one worker serves in batches of `rows`, or of as many as `max_cost` allows."""
        cost = self._row_cost()
        return super().rate(min(rows, max(1.0, self._max_cost / cost)) if cost > 0.0 else rows)

    def typical_rows(self) -> float:
        """See ServiceTime."""
        return self._rows / self._w if self._count else inf

    def _cost(self, rows: float) -> float:
        return min(rows * self._row_cost(), self._max_cost)

    def _row_cost(self) -> float:
        return self._n / self._rows if self._rows else 0.0
