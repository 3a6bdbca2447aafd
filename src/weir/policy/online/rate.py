"""The rates at which each table of a bank is used. online/arrivals.py estimates the rate."""

from bisect import bisect
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log, sqrt

import numpy as np

from weir.messages import Reason
from weir.policy.cost import ROUNDING
from weir.policy.decision import Decision, Observation
from weir.policy.online.admission import Admission, AdmissionGate, admission
from weir.policy.solve.bank import HYSTERESIS, Bank, hysteresis
from weir.policy.solve.tables import Table, full_batch_table, greedy_table, limit_of

UNLIKELY = 1e-3  # a gap between arrivals with a smaller probability is taken for the end of the traffic
SILENCE = log(1.0 / UNLIKELY)  # that gap, in mean gaps

Guards = tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]
Decisions = tuple[Decision | None, ...]  # by rows waiting; None is to wait; the last entry holds for longer queues


@dataclass(frozen=True, slots=True, eq=False)
class RateBand:
    """Says what a policy does in a range of arrival rates.

    Attributes:
        number: the index among the bands, from the lowest rates on.
        entry: the index in the bank of the rate that is nearest.
        falls, rises: rates in rows per second at which the next lower, or next higher, band takes over.
        decisions: decisions by rows waiting.
        limit: the control limit in rows.
        filling: divided by the rate, the seconds for which the oldest row may wait for the queue to fill (see
            `filling_of`).
        allowance: with an objective, the seconds for which the oldest of n rows may wait, by n.
        latest: with an objective, the seconds of age of its oldest row from which on a batch is trimmed, by rows (see
            LatencySLO).
        largest: the largest batch in rows.
        max_waiting: rows waiting at which arrivals are refused under overload; None: no bound.
        gate: which rows are admitted otherwise; None: as many as `max_waiting` says.
    """

    number: int
    entry: int
    falls: float
    rises: float
    decisions: Decisions
    limit: int
    filling: float
    allowance: tuple[float, ...] | None
    latest: tuple[float, ...] | None
    largest: int
    max_waiting: int | None
    gate: AdmissionGate | None


class RateBands:
    """The bands of `bank` by rising rate; boundary i, in rows per second, lies between the bands i and i + 1.

    Below the lowest rate of the bank its table holds; with an objective, all waiting rows are dispatched at once. Above
    the highest, full batches are dispatched without waiting, so that no worker idles under overload, whatever the
    tables say. A band is computed when it is first needed, because a server that adopts a bank has no time to compute
    all at once, and never changes afterwards.
    """

    __slots__ = ("_admission", "_falls", "_guards", "_made", "_rises", "bank", "boundaries")

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.boundaries = boundaries_of(bank)
        margins = margins_of(bank)
        self._falls = (0.0, *(edge * (1.0 - margin) for edge, margin in zip(self.boundaries, margins, strict=True)))
        self._rises = (*(edge * (1.0 + margin) for edge, margin in zip(self.boundaries, margins, strict=True)), inf)
        self._admission = None if bank.objective is None else admission(bank.profile, bank.objective, bank.workers)
        self._guards = promised(bank, self._admission)
        self._made: dict[int, RateBand] = {}

    def __len__(self) -> int:
        return len(self._rises)

    def __getitem__(self, number: int) -> RateBand:
        """Return the band of that number, from 0 to the number of the bank's rates plus 1."""
        band = self._made.get(number)
        if band is None:
            band = self._made[number] = self._make(number)
        return band

    def at(self, rate: float) -> RateBand:
        """Return the band for `rate` (rows per second)."""
        return self[bisect(self.boundaries, rate)]

    def unknown(self) -> RateBand | None:
        """Return the band for a rate that is not known yet; None if the bank has no objective.

        It is the lowest, which never waits, and keeps the promise at any rate.
        """
        return None if self.bank.objective is None else self[0]

    def next_to(self, band: RateBand, rate: float) -> RateBand:
        """Return the band for `rate` (rows per second) if the present one is `band`. It only changes once the rate is
        clearly beyond a boundary.
        """
        number = band.number
        while rate < self._falls[number]:
            number -= 1
        while rate > self._rises[number]:
            number += 1
        return self[number]

    def _make(self, number: int) -> RateBand:
        entry = min(max(number - 1, 0), len(self.bank.rates) - 1)
        table = self._table(number)
        limit = limit_of(table)
        largest, max_waiting, gate = self._queue_bounds(number, entry)
        guards = self._guards
        if self._greedy(number, limit, max_waiting):
            guards, largest = (None, None), self.bank.profile.max_batch_size
            table = greedy_table(largest)
        return RateBand(
            number=number,
            entry=entry,
            falls=self._falls[number],
            rises=self._rises[number],
            decisions=decisions_of(table, limit),
            limit=limit,
            filling=filling_of(table),
            allowance=guards[0],
            latest=guards[1],
            largest=largest,
            max_waiting=max_waiting,
            gate=gate,
        )

    def _greedy(self, number: int, limit: int, max_waiting: int | None) -> bool:
        """Return whether a band is greedy because most responses are then in time: it neither waits nor refuses, so it
        does not trim batches either.
        """
        objective = self.bank.objective
        counts = objective is not None and objective.counts_refusals
        return counts and number < len(self) - 1 and limit == 1 and max_waiting is None

    def _queue_bounds(self, number: int, entry: int) -> tuple[int, int | None, AdmissionGate | None]:
        """Return a band's largest batch (rows), its longest queue under overload (rows; None: any), and its gate."""
        bank, made, most = self.bank, self._admission, int(self.bank.max_waiting[entry]) or None
        if made is None:
            return bank.profile.max_batch_size, most, None
        if number == len(self) - 1 and not self._bounded_above:
            return made.largest, made.max_waiting, made.overload
        if bank.objective is not None and bank.objective.counts_refusals and most != made.max_waiting:
            return int(bank.tables[entry].max()), most, None
        return made.largest, made.max_waiting, made.gate_at(float(bank.rates[entry]))

    @property
    def _bounded_above(self) -> bool:
        """Whether rates above the highest are served as the highest is.

        That is so where refusals count and service times vary: batches small enough to be in time for certain serve
        too few rows.
        """
        objective, varies = self.bank.objective, bool(self.bank.profile.cv.any())
        return objective is not None and objective.counts_refusals and varies and int(self.bank.max_waiting[-1]) > 0

    def _table(self, number: int) -> Table:
        """Return the table of a band; shape (states,), rows."""
        bank = self.bank
        if number == 0 and bank.objective is not None:
            return greedy_table(bank.profile.max_batch_size)
        if number == len(self) - 1 and not self._bounded_above:
            made = self._admission
            return full_batch_table(bank.profile) if made is None else made.table(bank.profile)
        table: Table = bank.tables[min(max(number, 1), len(bank.rates)) - 1]
        return table


def promised(bank: Bank, allowed: Admission | None) -> Guards:
    """Return, by rows, the allowances and the latest starts of the bank's objective in seconds; None and None without
    one. `allowed` is its admission, if it has one.

    A wait ends earlier by what rounding may add, so that a response due at the deadline is not late by the last digit.
    """
    if bank.objective is None:
        return None, None
    objective, profile = bank.objective, bank.profile
    waits, starts = objective.allowance(profile) - ROUNDING, objective.trimmed_by(profile)
    waits = waits if allowed is None else allowed.waits(waits)
    return tuple(waits.tolist()), tuple(starts.tolist())


def boundaries_of(bank: Bank) -> tuple[float, ...]:
    """Return the rates, in rows per second, at which another table becomes the nearest by ratio.

    There is one between each two rates of the bank, and one as far below the lowest and above the highest.
    """
    rates = bank.rates
    if len(rates) == 1:
        return float(rates[0]) / 2.0, float(rates[0]) * 2.0
    ratios = np.sqrt(rates[1:] / rates[:-1])
    return tuple(float(each) for each in (rates[0] / ratios[0], *(rates[:-1] * ratios), rates[-1] * ratios[-1]))


def margins_of(bank: Bank) -> tuple[float, ...]:
    """Return how far beyond each boundary, relative to it, the rate must be before the band changes."""
    rates = bank.rates.tolist()
    between = [hysteresis(low, high) for low, high in pairwise(rates)] or [HYSTERESIS]
    return between[0], *(between if len(rates) > 1 else ()), between[-1]


def decisions_of(table: Table, limit: int) -> Decisions:
    """Return the decisions of `table`, shape (states,): by rows waiting, None to wait. `limit` (rows) explains them."""
    made = [None, *(Decision(rows, Reason.POLICY, None, limit) for rows in range(1, int(table.max()) + 1))]
    return tuple(map(made.__getitem__, table.tolist()))


def filling_of(table: Table) -> float:
    """Return how long the oldest row waits at most for the queue to fill, in mean gaps between arrivals: for the longest wait of `table`, shape
    (states,)."""
    return filling_for(int(np.flatnonzero(table == 0)[-1]))


def filling_for(arrivals: float) -> float:
    """Return how many mean gaps a wait for that many arrivals takes at most.

    k arrivals take longer than k + sqrt(2·k·x) + x gaps with a probability of at most e^-x (a tail bound of the gamma distribution: Boucheron, Lugosi
    and Massart, "Concentration Inequalities", 2013, section 2.4). So after that time they are not expected to come to this queue.
    """
    return arrivals + sqrt(2.0 * arrivals * SILENCE) + SILENCE


def end_of_wait(seen: Observation, rate: float, filling: float) -> float:
    """Return the instant at which a wait ends at `rate` rows per second: when the traffic has most likely stopped, or when the oldest row has waited for
    `filling` mean gaps."""
    return min(seen.last_arrival + SILENCE / rate, seen.oldest_arrival + filling / rate)
