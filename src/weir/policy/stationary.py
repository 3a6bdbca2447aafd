"""The stationary law of a line under a table, without a single subtraction (Grassmann, Taksar and Heyman).

From n waiting rows a decision leads at most a batch down, and up by as many as may arrive, so the chain's matrix is a
band. States are taken out from the top; the probability of staying, which is the only one that would have to be
subtracted from 1, is never used. Small probabilities (1e-14 and below) come out with as many digits as large ones.
"""

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weir.policy.profile import Floats

# A state that is left downwards this much more rarely than it is reached holds all of the law.
_RARE = 1e-200


def band(arrivals: Floats, actions: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[Floats, int]:
    """Return the chain's matrix as a band and how many columns of it are left of the diagonal.

    `arrivals` is the law of the arrivals by batch size, `actions` and `rows` are by state; the last state stands for all
    above. Column `below` + d of row i is the probability of going from i to i + d.
    """
    size, kept = len(actions), arrivals.shape[1]
    below = int(arrivals.shape[0]) + 1
    matrix = np.zeros((size, below + kept + 1))
    for state, (action, waiting) in enumerate(zip(actions.tolist(), rows.tolist(), strict=True)):
        if not action:
            matrix[state, below + min(1, size - 1 - state)] = 1.0
            continue
        start = below + waiting - action - state
        room = below + size - 1 - state  # the column of the last state
        if start + kept - 1 <= room:
            matrix[state, start : start + kept] = arrivals[action - 1]
        else:
            matrix[state, start:room] = arrivals[action - 1, : room - start]
            matrix[state, room] = arrivals[action - 1, room - start :][::-1].sum()
    return matrix, below


def stationary(matrix: Floats, below: int) -> Floats:
    """Return the stationary law of a chain given as a band (see `band`), which is overwritten.

    The chain must have one closed class, which must contain a way down from every state above it; states outside get 0.
    """
    size, width = matrix.shape
    above = width - below - 1
    flat = matrix.reshape(-1)
    # Element (i, j) of the whole matrix lies at i·width + below + j - i: valid wherever the band has it.
    whole = as_strided(flat[below:], (size, size), ((width - 1) * 8, 8))
    downs = np.empty(size)
    for n in range(size - 1, 0, -1):
        low, high = max(0, n - below), max(0, n - above)
        row = whole[n, low:n]
        downs[n] = row.sum()
        column = whole[high:n, n]
        if downs[n] > 0.0:
            whole[high:n, low:n] += (column / downs[n])[:, None] * row
    law = np.zeros(size)
    law[0] = 1.0
    for n in range(1, size):
        high = max(0, n - above)
        reached = float(law[high:n] @ whole[high:n, n])
        if downs[n] > _RARE * reached:
            law[n] = reached / downs[n]
            if law[n] > 1.0:  # the largest entry is 1, so that none overflows
                law[: n + 1] /= law[n]
        else:
            law[:n] = 0.0
            law[n] = 1.0
    result: Floats = law / law.sum()
    return result
