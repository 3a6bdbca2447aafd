"""How long each simulated batch takes."""

from collections.abc import Callable
from typing import cast

import numpy as np

from weir.policy.cost.profile import Profile

BLOCK = 16_384  # requests whose luck is drawn at once
KEPT = 16  # blocks of luck that are remembered; others are drawn again, and come out the same
STREAM = 2  # arrivals draw from 0, and searches from 1; what they shared would not be independent
EXACT = 1e-4  # a smaller coefficient of variation than this is none


class Services:
    """Service times in seconds, with the mean and the coefficient of variation that `profile` says (a Gamma law).

    Luck belongs to requests: a batch has that of its first request. So two policies that start a batch with the same
    request meet the same luck (common random numbers), whatever they did before, and larger batches take longer.
    """

    def __init__(self, profile: Profile, seed: int) -> None:
        self._seed = seed
        self._mean: list[float] = [0.0, *(profile.service_time_ms / 1000.0).tolist()]
        self._shape: list[float] = [0.0, *(float(1.0 / cv**2) if cv > EXACT else 0.0 for cv in profile.cv)]
        self._luck: dict[int, list[float]] = {}
        if any(self._shape):
            from scipy.special import gammaincinv  # only where times are random

            self._gamma = cast(Callable[[float, float], float], gammaincinv)

    def time(self, rows: int, index: int) -> float:
        """Return how long a batch of `rows` takes whose first request has that index."""
        shape = self._shape[rows]
        if not shape:
            return self._mean[rows]
        return self._mean[rows] * float(self._gamma(shape, self._share(index))) / shape

    def _share(self, index: int) -> float:
        """Return the luck of a request, uniform between 0 and 1."""
        number, place = divmod(index, BLOCK)
        block = self._luck.get(number)
        if block is None:
            if len(self._luck) >= KEPT:
                del self._luck[min(self._luck)]
            block = self._luck[number] = np.random.default_rng([self._seed, STREAM, number]).random(BLOCK).tolist()
        return block[place]
