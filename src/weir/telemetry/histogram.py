"""A histogram that takes a batch at a time.

The instants of a batch are nearly sorted, so one search per bucket that they span places them all: a batch of 64 costs
about as much as two single observations.
"""

from bisect import bisect_left
from collections.abc import Sequence

# 100 µs (one request through an idle server) to 30 s (the default timeout), three steps to a decade.
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Histogram:
    """Counts of values up to each of `bounds` (ascending), with their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_ages(self, instants: list[float], now: float) -> None:
        """Count `now - instant` for each of `instants`, which must be sorted and not empty."""
        bounds, counts = self.bounds, self.counts
        end = len(instants)
        self.sum += end * now - sum(instants)
        bucket = bisect_left(bounds, now - instants[-1])
        last = bisect_left(bounds, now - instants[0])
        while bucket < last:  # from the youngest to the oldest
            start = bisect_left(instants, now - bounds[bucket], 0, end)
            counts[bucket] += end - start
            end = start
            bucket += 1
        counts[last] += end

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus buckets: the upper bound as text, and how many values are at most that."""
        buckets, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets
