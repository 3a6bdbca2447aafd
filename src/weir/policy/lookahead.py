"""What is to be expected after one decision: the mean of the next state's value, for each action and state at once.

One matrix product: the law of the arrivals times the values seen from each number of rows left behind. Value iteration does
this thousands of times and policy iteration a few, so all memory that it takes is taken once.
"""

import numpy as np
from numpy.lib.stride_tricks import as_strided

from weir.policy.profile import Floats

# Numbers of arrivals less likely than this, for every batch size, are lost in a sum of floats.
_LEAST_ADDED = 1e-18


class Lookahead:
    """E[values(next state)] of a model with states 0 ... `s_max` and S_o, whose arrivals during a batch have the law
    `arrivals` (see smdp.py). Each is multiplied by its action's entry of `shares`, if they are given."""

    def __init__(self, arrivals: Floats, s_max: int, shares: Floats | None = None) -> None:
        kept = int(np.flatnonzero(arrivals.max(axis=0) > _LEAST_ADDED)[-1]) + 1
        width, batches = s_max + 1, len(arrivals)
        self._width = width
        self._arrivals = arrivals[:, :kept].copy() if shares is None else arrivals[:, :kept] * shares[1:, None]
        self._waits = 1.0 if shares is None else float(shares[0])
        self._values = np.empty(width + kept)  # beyond s_max all are that of S_o
        self._seen = as_strided(self._values, (kept, width), (8, 8))
        self._packed = np.empty((kept, width))
        flat = np.zeros(1 + batches * width + 1)
        self._left = flat[1:-1].reshape(batches, width)  # [a - 1, rows left behind]
        # Row a - 1 shifted right by a: element (a, s) is left[a - 1, s - a].
        self._by_state = as_strided(flat, (batches, width), ((width - 1) * 8, 8))

    def add(self, values: Floats, table: Floats) -> None:
        """Add to `table` [action, state] what is expected of `values` [state]; to what is not allowed, some finite number."""
        width = self._width
        self._values[:width] = values[:-1]
        self._values[width:] = values[-1]
        np.copyto(self._packed, self._seen)
        np.matmul(self._arrivals, self._packed, out=self._left)
        table[0, :width] += self._waits * self._values[1 : width + 1]
        table[0, width] += self._waits * values[-1]
        table[1:, :width] += self._by_state
        table[1:, width] += self._by_state[:, width - 1]
