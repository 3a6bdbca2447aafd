"""A profile learned from the batches that a service runs anyway: for models that cannot be measured beforehand."""

from collections import deque
from collections.abc import Iterable
from math import sqrt

import numpy as np

from weir.policy.cost.profile import Floats, Profile

EACH = 10  # batches of a size before it counts
LAST = 64  # of each size that are remembered
LEFT_OUT = 0.05  # of them, the longest: on a shared machine they are the machine's doing, and one outweighs hundreds
ENOUGH = 200  # batches in all, and again that many before it is looked at anew
GROWN = 2  # times the largest size known before: then it is worth another look
LARGEST_CV = 1.0


class OnlineProfile:
    """Service times by size, the last ones. `power` is in watts; without it energy counts as time does."""

    def __init__(self, max_batch_size: int, power: float | None) -> None:
        self._power = power
        self._seconds: list[deque[float]] = [deque(maxlen=LAST) for _ in range(max_batch_size + 1)]
        self._batches = 0
        self._known = 0  # the largest size in the last profile

    def observe(self, rows: int, seconds: float) -> Profile | None:
        """A batch of `rows` took `seconds`. Return a profile when that has become possible, or much better than the last."""
        self._seconds[min(rows, len(self._seconds) - 1)].append(seconds)
        self._batches += 1
        return self._profile() if self._batches % ENOUGH == 0 else None

    def _profile(self) -> Profile | None:
        sizes = [size for size, seconds in enumerate(self._seconds) if len(seconds) >= EACH]
        if not sizes or sizes[-1] < GROWN * max(self._known, sizes[0]):
            return None  # one size says nothing of how time grows with it
        self._known = sizes[-1]
        means, deviations, counts = np.array([_usual(self._seconds[size]) for size in sizes]).T
        every = np.arange(1.0, len(self._seconds))
        times = _extended(np.array(sizes, dtype=np.float64), 1000.0 * rising(means, counts), every)
        energies, source = (times, "time") if self._power is None else (self._power * times, "stated")
        cv = np.minimum(np.interp(every, sizes, deviations / means), LARGEST_CV)
        about = {"how": f"learned from {self._batches} batches, of up to {sizes[-1]} rows"}
        return Profile(times, energies, cv, energy_source=source, about=about)


def _usual(seconds: Iterable[float]) -> tuple[float, float, int]:
    """Return mean, standard deviation and number of all but the longest."""
    kept = sorted(seconds)
    del kept[len(kept) - max(1, int(LEFT_OUT * len(kept))) :]
    mean = sum(kept) / len(kept)
    return mean, sqrt(sum((each - mean) ** 2 for each in kept) / len(kept)), len(kept)


def rising(means: Floats, weights: Floats) -> Floats:
    """Return the non-decreasing values nearest to `means` by weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for mean, weight in zip(means.tolist(), weights.tolist(), strict=True):
        pool = (mean, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / total, total, before[2] + pool[2])
        pools.append(pool)
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


def _extended(sizes: Floats, times: Floats, every: Floats) -> Floats:
    """Return the times of every size: on straight lines between those known, and beyond them on the line through the first
    and the last, which never falls and never reaches 0."""
    slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    table: Floats = np.interp(every, sizes, times)
    below, beyond = every < sizes[0], every > sizes[-1]
    table[beyond] += slope * (every[beyond] - sizes[-1])
    table[below] = np.maximum(times[0] - slope * (sizes[0] - every[below]), times[0] * every[below] / sizes[0])
    return table
