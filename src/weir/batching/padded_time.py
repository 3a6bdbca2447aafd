"""How long a batch takes where all in it is padded to the longest: by what it costs, for rows say little of it.

What is still to come is taken to be as long as what came lately, and no batch to cost more than the budget.
"""

from math import inf

from weir.batching.estimate import FADE, ServiceTime


class PaddedTime(ServiceTime):
    """The expected service time of a batch of n rows, each costing what rows of the last batches did, padding included; at most `max_cost`
    in all. The line that is fitted is fixed cost + seconds per unit of cost."""

    __slots__ = ("_max_cost", "_rows")

    def __init__(self, max_cost: float | None) -> None:
        super().__init__()
        self._max_cost = inf if max_cost is None else max_cost
        self._rows = 0.0

    def learn(self, rows: float, seconds: float, now: float, cost: float) -> None:
        """Learn that a batch of `rows`, costing `cost`, took `seconds`."""
        super().learn(cost, seconds, now, cost)
        self._rows = FADE * self._rows + rows

    def expected(self, rows: float) -> float:
        """Return the expected service time of a batch of `rows`."""
        return super().expected(self._cost(rows))

    def upper(self, rows: float) -> float:
        """Return a time in which most batches of `rows` are done."""
        return super().upper(self._cost(rows))

    def lower(self, rows: float) -> float:
        """Return a time in which hardly any batch of `rows` is done."""
        return super().lower(self._cost(rows))

    def alone(self, rows: float, length: float) -> float:
        """Return a time in which hardly any batch with `rows` of such a length is done."""
        return super().lower(rows * length)

    def rate(self, rows: float) -> float:
        """Return the rows per second that one worker serves in batches of `rows`, or of as many as the budget allows."""
        cost = self._row_cost()
        return super().rate(min(rows, max(1.0, self._max_cost / cost)) if cost > 0.0 else rows)

    def typical_rows(self) -> float:
        """Return the mean size of the last batches; infinity if there were none."""
        return self._rows / self._w if self._count else inf

    def _cost(self, rows: float) -> float:
        return min(rows * self._row_cost(), self._max_cost)

    def _row_cost(self) -> float:
        return self._n / self._rows if self._rows else 0.0
