"""How long the line may be where a latency is promised, so that whoever is let in is answered in time at any arrival rate.

A row at place p of the line starts, at the latest, with batch ⌈p/(c·b)⌉ of its worker after the one under way, if c workers
serve batches of b rows while more than b wait. With no more than c·m·b rows in line, it is answered after at most m + 1
service times; so m·c·b rows may wait if (m + 1)·τ(b) ≤ D, whatever the traffic. docs/explanation/beyond-the-paper.md.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from weir.policy.latency_slo import ROUNDING, LatencySLO
from weir.policy.profile import Floats, Profile
from weir.policy.tables import Table, full_batch_table

# Of the rows per second that the objective allows; the rest is given for a longer line, which refuses less.
NEARLY = 0.98
# Shares of late rows below this leave no room for what is not exact: a part of a batch behind another.
RARELY = 1e-3


class Gate(NamedTuple):
    """Beyond which line arrivals are refused.

    `bounds[n]` rows may wait once n were dispatched; for n = 0, while the policy waits. None: no bound. With `times` (seconds
    by rows), one more batch of at least `third` rows (0: never) may wait if it comes late enough; `spares[n]` is by how much
    the rows in line are answered earlier than they must. With `within`, one batch waits at a time, and its time and that of
    the one that runs are so many seconds at most.
    """

    bounds: tuple[int | None, ...]
    times: tuple[float, ...] = ()
    within: float = 0.0
    third: int = 0
    spares: tuple[float, ...] = ()

    def after(self, rows: int, waiting: int, age: float) -> int | None:
        """Return how many may wait once `rows` of the `waiting` are dispatched; the first that stays is `age` seconds old.

        Those who stay behind are served with whom the line then lets in: so few that the first of them is in time.
        """
        bound = self.bounds[rows]
        if bound is None or rows >= waiting or not self.within:
            return bound
        left = self.within - self.times[rows] - age + ROUNDING
        return min(bound, max(bisect_right(self.times, left) - 1, waiting - rows, 1))

    def more(self, rows: int, since: float) -> int:
        """Return how many more may wait, `since` seconds after `rows` were dispatched, as a batch behind those in line."""
        if not self.third:
            return 0
        more = bisect_right(self.times, since + self.spares[rows] + ROUNDING) - 1
        return more if more >= self.third else 0


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
        bounds = (self.max_waiting,) * (self.steady + 1)
        return table, Gate(bounds, self.gate.times[: self.steady + 1], self.gate.within)


def admission(profile: Profile, objective: LatencySLO, workers: int = 1) -> Admission | None:
    """Return the batch and the line that serve most rows per second, all of them in time, when more arrive than can be
    served; None if even a row that comes behind one alone may be late.

    It is the size that serves most if two batches of it may wait; else, of all that serve nearly as many, the one with the
    longest line, so that fewer are refused by bad luck when nearly as many arrive as can be served.
    """
    most, depth = profile.best_batch_size, profile.pipeline_depth
    times = profile.service_time_ms[:most] / 1000.0
    # Where refusals count, the margin is for those who wait on purpose only.
    spared = objective.slack if objective.counts_refusals else max(objective.margin, objective.slack)
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
        gate = Gate((longest + workers * steady, *[longest] * steady))
        if workers * depth == 1:  # one more batch, if it may be a whole one
            spares = within - times[:steady] - behind[steady - 1] * times[steady - 1]
            gate = _growing(gate, times[:steady], spares, steady)
        return Admission(steady, longest, steady, gate)
    # One batch under way and one in line: the longer the one takes, the shorter the other must be.
    fitting = np.searchsorted(times, within - times, side="right")
    largest = int(np.flatnonzero(fitting)[-1]) + 1
    bounds = np.minimum(fitting[:largest], largest)
    spares = within - times[:largest] - times[bounds - 1]
    gate = Gate((longest + largest, *bounds.tolist()), within=within)
    third = -(-steady // 2) if objective.late_share >= RARELY else 0
    return Admission(steady, longest, largest, _growing(gate, times[:largest], spares, third))


def _growing(gate: Gate, times: Floats, spares: Floats, third: int) -> Gate:
    return gate._replace(times=(0.0, *times.tolist()), spares=(0.0, *spares.tolist()), third=third)
