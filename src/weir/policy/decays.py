"""How much rarer longer lines are."""

from math import inf, log1p

import numpy as np

from weir.policy.profile import Profile


def decay(profile: Profile, rate_per_ms: float, size: int) -> float:
    """Return by what factor longer lines are rarer, per row, where batches of `size` are served from a long line.

    It is the root z > 1 of z^size = E z^N, N the rows that arrive during such a batch.
    """
    mean = rate_per_ms * float(profile.service_time_ms[size - 1])
    excess = mean * float(profile.cv[size - 1]) ** 2

    def balance(x: float) -> float:  # log E z^N - log z^size with z = e^x; convex, 0 at 0, falling there
        grown = np.expm1(x)
        if excess == 0.0:
            return float(mean * grown - size * x)
        return inf if excess * grown >= 1.0 else float(-mean / excess * log1p(-excess * grown) - size * x)

    low, high = 0.0, 1.0
    while balance(high) < 0.0:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if balance(middle) <= 0.0 else (low, middle)
    return float(np.exp(low if low > 0.0 else high))
