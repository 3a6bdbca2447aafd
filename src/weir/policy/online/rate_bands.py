"""A bank made ready to be looked up: a stage for each of its rates, one below the lowest and one above the highest.

Everything that does not depend on the line is worked out here, once, into plain Python values that nothing changes: a
decision is an index into a tuple.
"""

from bisect import bisect, bisect_right
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import NamedTuple

import numpy as np

from weir.messages import Reason
from weir.policy.cost.latency_slo import ROUNDING, LatencySLO
from weir.policy.cost.profile import Floats, Profile
from weir.policy.decision import Decision
from weir.policy.solve.bank import Bank
from weir.policy.solve.tables import Table, full_batch_table, greedy_table, limit_of

# How long the line may be where a latency is promised, so that whoever is let in is answered in time at any arrival rate.
#
# A row at place p of the line starts, at the latest, with batch ⌈p/(c·b)⌉ of its worker after the one under way, if c workers
# serve batches of b rows while more than b wait. With no more than c·m·b rows in line, it is answered after at most m + 1
# service times; so m·c·b rows may wait if (m + 1)·τ(b) ≤ D, whatever the traffic. docs/explanation/beyond-the-paper.md.


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


UNLIKELY = 1e-3  # a silence that the rate makes less likely than this is taken for the end of the traffic
SILENCE = log(1.0 / UNLIKELY)
HYSTERESIS = 0.05  # how far, relative to a boundary, the rate must be beyond it

Guards = tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]
Answers = tuple[Decision | None, ...]  # by rows waiting; None is to wait, and the last entry holds beyond the end


@dataclass(frozen=True, slots=True, eq=False)
class RateBand:
    """What is done at a range of rates.

    `falls` and `rises` are the rates at which it is left for the next lower and higher one. `second` decides the share
    `share` of the batches, `first` the others; `limits` are those of both. `filling`, divided by the rate, is how long the oldest row may wait for
    the line to fill (see `filling_of`). Where there is a promise, `allowance[n]` is how long the oldest of n may wait, and
    `latest[n]` how old it may be when they start (see LatencySLO). `entry` is the index in the bank of what comes nearest,
    `largest` the largest batch. `gate` says when arrivals are refused, `max_waiting` how many rows wait then under overload.
    """

    number: int
    entry: int
    falls: float
    rises: float
    first: Answers
    second: Answers
    share: float
    limits: tuple[int, int]
    filling: float
    allowance: tuple[float, ...] | None
    latest: tuple[float, ...] | None
    largest: int
    max_waiting: int | None
    gate: Gate


class Stages:
    """The stages of `bank`, by rising rate; boundary i lies between stages i and i + 1.

    Below the lowest rate whatever waits is served at once; above the highest, full batches are, without waiting, so that
    overload is work-conserving whatever the tables say. A stage is worked out when it is first needed, for a server that
    adopts a bank has no time for all at once; it never changes then.
    """

    __slots__ = ("_admission", "_edges", "_guards", "_made", "bank", "boundaries")

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.boundaries = boundaries_of(bank)
        self._edges = (0.0, *self.boundaries, inf)
        self._guards = promised(bank)
        self._admission = None if bank.objective is None else admission(bank.profile, bank.objective, bank.workers)
        self._made: dict[int, RateBand] = {}

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, number: int) -> RateBand:
        """Return the stage of that number, from 0 to one more than the bank has tables."""
        stage = self._made.get(number)
        if stage is None:
            stage = self._made[number] = self._make(number)
        return stage

    def at(self, rate: float) -> RateBand:
        """Return the stage whose range `rate` is in."""
        return self[bisect(self.boundaries, rate)]

    def unknown(self) -> RateBand | None:
        """Return the stage for a rate that is not known yet, where there is a promise to keep: it never waits, and keeps it
        at any rate. Where refusals count, nobody is refused before the rate is known."""
        objective = self.bank.objective
        if objective is None:
            return None
        return self[0 if objective.counts_refusals else len(self) - 1]

    def next_to(self, stage: RateBand, rate: float) -> RateBand:
        """Return the stage for `rate`, coming from `stage`: the nearest, but a boundary counts only when it is well passed."""
        edges, number = self._edges, stage.number
        while rate < edges[number] * (1.0 - HYSTERESIS):
            number -= 1
        while rate > edges[number + 1] * (1.0 + HYSTERESIS):
            number += 1
        return self[number]

    def _make(self, number: int) -> RateBand:
        entry = min(max(number - 1, 0), len(self.bank.rates) - 1)
        first, second, share = self._tables(number)
        limits = limit_of(first), limit_of(second)
        largest, max_waiting, gate = self._line(number, entry)
        guards = self._guards
        if self._greedy(number, limits[0], max_waiting):
            guards, largest = (None, None), self.bank.profile.max_batch_size
            first = second = greedy_table(largest)
        answers = answers_of(first, limits[0])
        return RateBand(
            number=number,
            entry=entry,
            falls=self._edges[number] * (1.0 - HYSTERESIS),
            rises=self._edges[number + 1] * (1.0 + HYSTERESIS),
            first=answers,
            second=answers_of(second, limits[1]) if share else answers,
            share=share,
            limits=limits,
            filling=max(filling_of(first), filling_of(second)),
            allowance=guards[0],
            latest=guards[1],
            largest=largest,
            max_waiting=max_waiting,
            gate=gate,
        )

    def _greedy(self, number: int, limit: int, max_waiting: int | None) -> bool:
        """Whether a stage neither waits nor refuses because most are then in time: it is greedy, and trims no batch either."""
        objective = self.bank.objective
        counts = objective is not None and objective.counts_refusals
        return counts and number < len(self) - 1 and limit == 1 and max_waiting is None

    def _line(self, number: int, entry: int) -> tuple[int, int | None, Gate]:
        """Return a stage's largest batch, its longest line under overload, and its gate."""
        largest, most = self.bank.profile.max_batch_size, int(self.bank.max_waiting[entry]) or None
        made = self._admission
        if made is None:
            return largest, most, Gate((most,) * (largest + 1))
        if number == len(self) - 1 and not self._bounded_above:
            return made.steady, made.max_waiting, made.overloaded(self.bank.profile)[1]
        if self.bank.objective is not None and self.bank.objective.counts_refusals and most != made.max_waiting:
            largest = int(self.bank.tables[entry].max())
            return largest, most, Gate((most,) * (largest + 1))
        return made.largest, made.max_waiting, made.gate

    @property
    def _bounded_above(self) -> bool:
        """Whether rates above the highest are served as that is. So it is where refusals count and service times vary: batches
        small enough to have all in time for certain serve too few rows."""
        objective, varies = self.bank.objective, bool(self.bank.profile.cv.any())
        return objective is not None and objective.counts_refusals and varies and int(self.bank.max_waiting[-1]) > 0

    def _tables(self, number: int) -> tuple[Table, Table, float]:
        """Return both tables of a stage, and the share of the second."""
        bank, share = self.bank, 0.0
        if number == 0:
            first = second = greedy_table(bank.profile.max_batch_size)
        elif number == len(self) - 1 and not self._bounded_above:
            made = self._admission
            first = second = full_batch_table(bank.profile) if made is None else made.overloaded(bank.profile)[0]
        else:
            entry = min(number, len(bank.rates)) - 1
            share = float(bank.shares[entry])
            first = bank.tables[entry]
            second = bank.second_tables[entry] if share else first
        return first, second, share


def promised(bank: Bank) -> Guards:
    """Return what the bank's objective allows, if it has one: waits, and starts. A wait ends sooner by what rounding may
    add, so that an answer due at the deadline is not late by the last digit."""
    if bank.objective is None:
        return None, None
    objective, profile = bank.objective, bank.profile
    waits, starts = objective.allowance(profile) - ROUNDING, objective.trimmed_by(profile)
    return tuple(waits.tolist()), tuple(starts.tolist())


def boundaries_of(bank: Bank) -> tuple[float, ...]:
    """Return the rates at which the nearest table, by ratio, changes: between each two, and as far beyond the ends."""
    rates = bank.rates
    if len(rates) == 1:
        return float(rates[0]) / 2.0, float(rates[0]) * 2.0
    ratios = np.sqrt(rates[1:] / rates[:-1])
    return tuple(float(each) for each in (rates[0] / ratios[0], *(rates[:-1] * ratios), rates[-1] * ratios[-1]))


def answers_of(table: Table, limit: int) -> Answers:
    """Return the decisions of `table`."""
    made = [None, *(Decision(rows, Reason.POLICY, None, limit) for rows in range(1, int(table.max()) + 1))]
    return tuple(map(made.__getitem__, table.tolist()))


def filling_of(table: Table) -> float:
    """Return, in mean gaps between arrivals, how long the oldest row waits at most for the line to fill.

    The longest wait of `table` is for k arrivals after the oldest. They take longer than k + sqrt(2·k·x) + x gaps with
    probability e^-x at most (a tail bound of the gamma distribution); so after that time they are not coming to this line.
    """
    arrivals = int(np.flatnonzero(table == 0)[-1])
    return arrivals + sqrt(2.0 * arrivals * SILENCE) + SILENCE
