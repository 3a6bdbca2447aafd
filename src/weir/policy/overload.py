"""How long the line may be where a latency is promised, so that whoever is let in is answered in time at any arrival rate.

A row at place p of the line starts, at the latest, with batch ⌈p/(c·b)⌉ of its worker after the one under way, if c workers
serve batches of b rows while more than b wait. With no more than c·m·b rows in line, it is answered after at most m + 1
service times; so m·c·b rows may wait if (m + 1)·τ(b) ≤ D, whatever the traffic. docs/explanation/beyond-the-paper.md.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from weir.policy.objective import ROUNDING, Objective
from weir.policy.profile import Profile
from weir.policy.tables import Table, full_batch_table

NEARLY = (
    0.98  # of the rows per second that the objective allows; the rest is given for a longer line, which refuses less
)


class Gate(NamedTuple):
    """Beyond which line arrivals are refused.

    `bounds[n]` rows may wait once n were dispatched; for n = 0, while the policy waits. With `times`, in seconds by rows, it
    is one batch that runs and one that waits, and those of both are `within` seconds at most; in time, one more batch of at
    least `third` rows may wait (0: never). Bounds are None if there are none.
    """

    bounds: tuple[int | None, ...]
    times: tuple[float, ...] = ()
    within: float = 0.0
    third: int = 0

    def after(self, rows: int, waiting: int, now: float, oldest: float, last: float) -> int | None:
        """Return how many may wait once `rows` of the `waiting` are dispatched at `now`; they came from `oldest` to `last`.

        Those who stay behind are served with whom the line then lets in: so few that the first of them is in time.
        """
        bound = self.bounds[rows]
        if bound is None or rows >= waiting or not self.times:
            return bound
        first = oldest + (last - oldest) * rows / (waiting - 1)
        left = self.within - self.times[rows] - (now - first)
        return min(bound, max(bisect_right(self.times, left) - 1, waiting - rows, 1))

    def more(self, since: float) -> int:
        """Return how many more may wait, `since` seconds after a dispatch, as a batch behind the next one."""
        rows = bisect_right(self.times, since + ROUNDING) - 1
        return rows if rows >= self.third > 0 else 0


OPEN = Gate((None,))


class Admission(NamedTuple):
    """`steady` rows are a batch under overload, `max_waiting` rows the line then, and `largest` rows the largest batch at
    any rate. `gate` is for rates that can be served."""

    steady: int
    max_waiting: int
    largest: int
    gate: Gate

    def table(self, profile: Profile, limit: int = 1) -> Table:
        """Return the table that waits for `limit` rows, then takes full batches, none larger than `largest`."""
        table = full_batch_table(profile)[: self.largest + 1]
        table[:limit] = 0
        return table

    def overloaded(self, profile: Profile) -> tuple[Table, Gate]:
        """Return the table, and the gate, for more rows than can be served."""
        table = full_batch_table(profile)[: self.steady + 1]
        table[-1] = self.steady
        times = self.gate.times[: self.steady + 1]
        return table, Gate((self.max_waiting,) * (self.steady + 1), times, self.gate.within)


def admission(profile: Profile, objective: Objective, workers: int = 1) -> Admission | None:
    """Return the batch and the line that serve most rows per second, all of them in time, when more arrive than can be
    served; None if even a row that comes behind one alone may be late.

    It is the size that serves most if two batches of it may wait; else, of all that serve nearly as many, the one with the
    longest line, so that fewer are refused by bad luck when nearly as many arrive as can be served.
    """
    most, depth = profile.best_batch_size, profile.pipeline_depth
    times = profile.service_time_ms[:most] / 1000.0
    spared = max(objective.margin, objective.slack)
    within = objective.deadline - spared - profile.latency_offset_ms / 1000.0 + ROUNDING
    behind = np.floor(within / times).astype(np.int64) - depth  # batches of that size that may wait, for each worker
    possible = behind >= 1
    if not possible[0]:
        return None
    sizes = np.arange(1, most + 1)
    speeds = np.where(possible, sizes / times, 0.0)
    steady = most - int(np.argmax(speeds[::-1]))
    if behind[steady - 1] < 2:
        steady = int(np.argmax(np.where(speeds >= NEARLY * speeds.max(), behind * sizes, 0))) + 1
    longest = workers * steady * int(behind[steady - 1])
    if workers * depth > 1 or behind[steady - 1] > 1:
        return Admission(steady, longest, steady, Gate((longest + workers * steady, *[longest] * steady)))
    # One batch under way and one in line: the longer the one takes, the shorter the other must be.
    fitting = np.searchsorted(times, within - times, side="right")
    largest = int(np.flatnonzero(fitting)[-1]) + 1
    bounds = np.minimum(fitting[:largest], largest).tolist()
    gate = Gate((longest + largest, *bounds), (0.0, *times[:largest].tolist()), within, -(-steady // 2))
    return Admission(steady, longest, largest, gate)
