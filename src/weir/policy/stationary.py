"""The stationary law of a line under a table, without a single subtraction (Grassmann, Taksar and Heyman).

From n waiting rows a decision leads at most a batch down, and up by as many as may arrive, so the chain's matrix is a
band. States are taken out from the top; the probability of staying, which is the only one that would have to be
subtracted from 1, is never used. Small probabilities (1e-14 and below) come out with as many digits as large ones.
"""

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weir.policy.profile import Floats

_BLOCK = 32  # states that are taken out before the others hear of it, which is then one product of matrices
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
    taken: list[_Taken] = []
    end = size
    while end > 1:
        begin = max(1, end - _BLOCK)
        taken.append(_take_out(whole, begin, end, below, above))
        end = begin
    law = np.zeros(size)
    law[0] = 1.0
    for block in reversed(taken):
        _add(law, block)
    result: Floats = law / law.sum()
    return result


class _Taken(NamedTuple):
    """The states from `begin` on that were taken out together: their rows, from column `low` on, and their columns in the rows
    from `high` to `begin`, each as it was when its own state was taken out; and with what probability each is left downwards."""

    begin: int
    low: int
    high: int
    rows: Floats
    columns: Floats
    downs: Floats


def _take_out(whole: Floats, begin: int, end: int, below: int, above: int) -> _Taken:
    """Take the states `begin` ... `end` - 1 out of the chain, from the last on."""
    low, high, count = max(0, begin - below), max(0, begin - above), end - begin
    rows, columns, downs = np.zeros((count, end - low)), np.zeros((begin - high, count)), np.zeros(count)
    for n in range(count):  # only what the band has
        first, last = max(low, begin + n - below), min(end, begin + n + above + 1)
        rows[n, first - low : last - low] = whole[begin + n, first:last]
        first = max(high, begin + n - above)
        columns[first - high :, n] = whole[first:begin, begin + n]
    shares = np.zeros_like(columns)
    for n in range(count - 1, -1, -1):
        row = rows[n, : begin + n - low]
        downs[n] = row.sum()
        if downs[n] > 0.0:
            shares[:, n] = columns[:, n] / downs[n]
            rows[:n, : len(row)] += (rows[:n, len(row)] / downs[n])[:, None] * row
            columns[:, :n] += shares[:, n, None] * row[begin - low :]
    whole[high:begin, low:begin] += shares @ rows[:, : begin - low]
    return _Taken(begin, low, high, rows, columns, downs)


def _add(law: Floats, block: _Taken) -> None:
    """Set the entries of `law` for the states of `block`, from those before them."""
    before = law[block.high : block.begin] @ block.columns
    for n, down in enumerate(block.downs.tolist()):
        state = block.begin + n
        reached = float(before[n] + law[block.begin : state] @ block.rows[:n, state - block.low])
        if down > _RARE * reached:
            law[state] = reached / down
            if law[state] > 1.0:  # the largest entry is 1, so that none overflows
                before /= law[state]
                law[: state + 1] /= law[state]
        else:
            law[:state] = 0.0
            before[:] = 0.0
            law[state] = 1.0
