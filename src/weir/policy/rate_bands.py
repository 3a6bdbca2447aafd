"""A bank made ready to be looked up: a stage for each of its rates, one below the lowest and one above the highest.

Everything that does not depend on the line is worked out here, once, into plain Python values that nothing changes: a
decision is an index into a tuple.
"""

from bisect import bisect
from dataclasses import dataclass
from math import inf, log, sqrt

import numpy as np

from weir.messages import Reason
from weir.policy.bank import Bank
from weir.policy.decision import Decision
from weir.policy.latency_slo import ROUNDING
from weir.policy.overload import Gate, admission
from weir.policy.tables import Table, full_batch_table, greedy_table, limit_of

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
