"""The arrival rate as a policy estimates it, and the rates at which each table of a bank is used.

The rate is estimated from what a policy observes: how many rows have ever arrived, and the instant.

Arrivals are forgotten gradually: one that is `a` seconds old counts exp(-a/T). The estimate is N/S, the weighted
number of arrivals divided by the weighted time, S being the integral of exp(-a/T) over the time observed. At first
that is the number of arrivals divided by the time that has passed, and later the usual exponential average. Between
two observations only the number k of arrivals in the gap d is known; spread evenly over the gap they add k·(1 -
exp(-d/T))·T/d to N. That is exact, however long the gap is, and needs no clock.

T depends on the number of arrivals, not on time. The relative error of the estimate is 1/sqrt(2λT), so T = 50/λ makes
it 10 % at any rate λ; a window of at most a second would hold two arrivals at 2 rows per second. T is at least 20 ms,
so that fast traffic is averaged over about a batch. T needs no upper bound. When traffic stops, the gap outweighs the
memory (d >> T). When it grows, T shrinks with each observation, the time beyond the new T is forgotten, and the
estimate doubles with every 35 arrivals until it is right.

Rows that arrive together, in requests of several rows, count one by one, and make the estimate less certain.
"""

from bisect import bisect, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.messages import Reason
from weir.policy.cost.objective import ROUNDING, LatencySLO
from weir.policy.cost.profile import Floats, Profile
from weir.policy.decision import Decision
from weir.policy.solve.bank import HYSTERESIS, Bank, hysteresis
from weir.policy.solve.tables import Table, full_batch_table, greedy_table, limit_of

WINDOW_ROWS = 50.0  # T is so many mean gaps
WINDOW_MIN = 0.02  # seconds
WINDOW_MAX = 3600.0  # seconds: T before any arrival, and a bound that keeps the arithmetic finite
ENOUGH = 20  # arrivals until which the rate counts as unknown; its error is then 22 %


class Rate:
    """An estimate of the arrival rate: `value`, in rows per second; 0 while it is unknown.

    It changes only with arrivals. Without arrivals it stays, and so do the instants that are computed from it (the
    ends of waits); the next arrival accounts for the whole gap.
    """

    __slots__ = ("_arrivals", "_at", "_counted", "_rows", "_seconds", "_window", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._counted = 0  # arrivals since the start
        self._arrivals = -1  # at the last observation
        self._at = 0.0  # seconds, the last observation
        self._rows = 0.0  # N
        self._seconds = 0.0  # S
        self._window = WINDOW_MAX  # T

    def observe(self, now: float, arrivals: int) -> float:
        """Take note that `arrivals` rows had ever arrived at the instant `now` (seconds). Returns `value`.

        Where either is less than before (another queue, another clock), counting goes on from the new numbers.
        """
        count, gap = arrivals - self._arrivals, now - self._at
        if count > 0 and gap > 0.0 and self._arrivals >= 0:
            self._learn(count, gap)
        elif count >= 0 and gap >= 0.0 and self._arrivals >= 0:
            return self.value  # no arrivals, or no time has passed yet: the next observation counts them
        self._arrivals, self._at = arrivals, now
        return self.value

    def _learn(self, count: int, gap: float) -> None:
        rows, seconds, window = self._rows, self._seconds, self._window
        if seconds > window:
            rows *= window / seconds
            seconds = window
        faded = exp(-gap / window)
        lasting = (1.0 - faded) * window
        self._rows = rows = rows * faded + count * lasting / gap
        self._seconds = seconds = seconds * faded + lasting
        self._counted += count
        self._window = min(max(WINDOW_ROWS * seconds / rows, WINDOW_MIN), WINDOW_MAX)
        if self._counted >= ENOUGH:
            self.value = rows / seconds


# How long the queue may be if a latency is promised: every admitted row is answered in time at any arrival rate.
#
# Let c workers serve batches of b rows while more than b rows wait. The row at place p of the queue starts, at the
# latest, with batch ⌈p/(c·b)⌉ of its worker after the running one. With at most c·m·b rows in the queue it is answered
# after at most m + 1 service times. So m·c·b rows may wait if (m + 1)·τ(b) ≤ D, whatever the traffic is.
#
# That is the worst case: all workers have started at the same instant. It need not be met. If two batches always start
# at least τ(b)/c apart, then τ(b)/c after a start the worker of the c-th last batch is free. So the row at place p
# starts after at most ⌈p/b⌉·τ(b)/c, and k batches may wait if (1 + k/c)·τ(b) ≤ D. Full batches come no slower for it.
# Batches are spaced like that where more rows can then be served in time.
# docs/explanation/beyond-the-paper.md has the details.


# The share of the rows per second that the objective allows; the rest is given up for a longer queue, which refuses
# less.
NEARLY = 0.98
# One worker that serves less than this share of what it could, for fear of the worst case, admits rows by the time that
# is left until it is free. Rates from OVERLOAD times the capacity on are then treated alike.
FAR_LESS, OVERLOAD = 0.8, 1.5
# With a smaller share of late rows no extra batch is admitted, because whether it is in time is not certain.
RARELY = 1e-3


class AdmissionGate(NamedTuple):
    """The length of the queue at which arrivals are refused.

    Attributes:
        bounds: rows that may wait after a batch of n rows was dispatched; the entry for n = 0 holds while the policy
            waits. None: no bound; 0: none before the extra batch, unless rows stay.
        times: service time in seconds by rows, from 0 on; empty: no batch is admitted beyond `bounds`.
        within: seconds. If not 0, only one batch may wait at a time, and its service time and that of the running
            batch may add up to at most this.
        min_extra_batch: one more batch of at least so many rows may wait if it comes late enough; 0: never.
        slack: by rows dispatched, seconds by which the rows in the queue will be answered earlier than they must.
        spacing: two batches start at least so many seconds apart.
    """

    bounds: tuple[int | None, ...]
    times: tuple[float, ...] = ()
    within: float = 0.0
    min_extra_batch: int = 0
    slack: tuple[float, ...] = ()
    spacing: float = 0.0

    def after(self, rows: int, waiting: int, age: float) -> int | None:
        """Return how many rows may wait after `rows` of the `waiting` rows were dispatched; None: any number.

        `age` is that, in seconds, of the first row that stays. The rows that stay are served together with those that
        are admitted now, so only so many are admitted that the first of them is answered in time.
        """
        bound = self.bounds[rows]
        if bound is None or rows >= waiting or not self.within:
            return bound
        left = self.within - self.times[rows] - age + ROUNDING
        fitting = max(bisect_right(self.times, left) - 1, waiting - rows, 1)
        return min(bound, fitting) if bound else fitting

    def extends(self, rows: int, waiting: int) -> bool:
        """Return whether an extra batch may be admitted after `rows` of `waiting` rows were dispatched."""
        return bool(self.min_extra_batch and rows and (self.bounds[rows] or rows >= waiting))

    def more(self, rows: int, since: float) -> int:
        """Return how many more rows may wait, as a batch behind those in the queue, `since` seconds after `rows` were
        dispatched.
        """
        if not self.min_extra_batch:
            return 0
        more = bisect_right(self.times, since + self.slack[rows] + ROUNDING) - 1
        return more if more >= self.min_extra_batch else 0


OPEN = AdmissionGate((None,))


class Admission(NamedTuple):
    """What an objective allows: batches and queues under which every admitted row is answered in time.

    Attributes:
        steady: batch in rows when more rows arrive than can be served.
        max_waiting: queue in rows then.
        largest: the largest batch in rows at any rate.
        gate: the bounds at rates that can be served.
        windowed: rows are only admitted from some time before the worker is free, which depends on the rate: see
            `gate_at`.
    """

    steady: int
    max_waiting: int
    largest: int
    gate: AdmissionGate
    windowed: bool = False

    def waits(self, allowance: Floats) -> Floats:
        """Return how long the oldest of n waiting rows may wait on purpose, given for how long a batch of n may, in
        seconds; both of shape (max_batch_size + 1,). If windowed, until a batch of one row more must start: a row that
        comes later would have to stay behind, and be late.
        """
        return np.append(allowance[1:], allowance[-1:]) if self.windowed else allowance

    def gate_at(self, rate: float) -> AdmissionGate:
        """Return the bounds at `rate` rows per second.

        If windowed, the first row that comes while the worker is busy decides how large the next batch may be: the
        later it comes, the larger. Rows are refused until that is so many rows as serve the most of such a rate.
        """
        if not self.windowed:
            return self.gate
        times = np.array(self.gate.times[1:])
        sizes = np.arange(1, len(times) + 1)
        reached = np.minimum(sizes, rate * (self.gate.within - times))  # rows of a batch, by the size that is allowed
        every = sizes[sizes >= rate * times]  # batches of as many rows serve all that come
        target = min(float(reached.max()), float(every[0]) if len(every) else inf)
        return self.gate._replace(min_extra_batch=int(np.argmax(reached >= target - ROUNDING)) + 1)

    def table(self, profile: Profile, limit: int = 1) -> Table:
        """Return the table that waits for `limit` rows and then takes full batches, none above `largest`."""
        table = full_batch_table(profile)[: self.largest + 1]
        table[:limit] = 0
        return table

    def overloaded(self, profile: Profile) -> tuple[Table, AdmissionGate]:
        """Return the table and the gate for arrival rates that exceed what can be served."""
        if self.windowed:
            return self.table(profile), self.gate_at(OVERLOAD * profile.max_rate)
        table = full_batch_table(profile)[: self.steady + 1]
        table[-1] = self.steady
        bounds = (self.max_waiting,) * (self.steady + 1)
        return table, AdmissionGate(
            bounds, self.gate.times[: self.steady + 1], self.gate.within, spacing=self.gate.spacing
        )


def admission(profile: Profile, objective: LatencySLO, workers: int = 1) -> Admission | None:
    """Return the batch and the queue that serve the most rows per second in time if more arrive than can be served.

    If two batches of the fastest size may wait, it is that size. Otherwise it is, of all sizes that are nearly as
    fast, the one with the longest queue, so that chance causes fewer refusals when nearly as many rows arrive as can
    be served.

    Args:
        profile: the costs of a batch on one worker.
        objective: the latency SLO.
        workers: the number of workers that serve the queue.

    Returns None if even a row that comes right behind another one, which is served alone, may be late.
    """
    most = profile.best_batch_size
    times = profile.service_time_ms[:most] / 1000.0
    # Where refusals count, the margin only applies to waits on purpose.
    spared = objective.slack if objective.counts_refusals else max(objective.margin, objective.slack)
    within = objective.deadline - spared - profile.latency_offset_ms / 1000.0 + ROUNDING
    behind = np.floor(within / times).astype(np.int64) - profile.pipeline_depth  # batches that may wait, per worker
    places = workers * profile.pipeline_depth
    anyhow = _steady(times, workers * behind, 2 * workers)
    if places > 1:
        spaced_behind = np.floor(workers * (within / times - 1.0)).astype(np.int64)
        spaced = _steady(times, spaced_behind, 2 * workers)
        if spaced is not None and (anyhow is None or anyhow / times[anyhow - 1] < NEARLY * spaced / times[spaced - 1]):
            return _spaced(spaced, int(spaced_behind[spaced - 1]), float(times[spaced - 1]) / workers)
    speed = 0.0 if anyhow is None else anyhow / float(times[anyhow - 1])
    if places == 1 and not objective.counts_refusals and speed < FAR_LESS * profile.max_rate:
        return _windowed(times, within)
    if anyhow is None:
        return None
    return _unspaced(anyhow, workers, places, behind, times, within, objective)


def _steady(times: Floats, behind: NDArray[np.int64], enough: int) -> int | None:
    """Return the batch in rows for overload; None if there is none. Both arrays have shape (sizes,).

    `behind` is by size how many batches may wait in all; if that is `enough`, the fastest size is taken.
    """
    if behind[0] < 1:
        return None
    sizes = np.arange(1, len(times) + 1)
    speeds = np.where(behind >= 1, sizes / times, 0.0)
    steady = len(times) - int(np.argmax(speeds[::-1]))
    if behind[steady - 1] >= enough:
        return steady
    return int(np.argmax(np.where(speeds >= NEARLY * speeds.max(), behind * sizes, 0))) + 1


def _spaced(steady: int, behind: int, spacing: float) -> Admission:
    """Return what is allowed if batches of `steady` rows start `spacing` seconds apart, and `behind` of them may wait."""
    longest = steady * behind
    gate = AdmissionGate((longest + steady, *[longest] * steady), spacing=spacing)
    return Admission(steady, longest, steady, gate)


def _windowed(times: Floats, within: float) -> Admission | None:
    """Return what is allowed if rows are admitted by the time that is left; None if not even a row alone is in time."""
    largest = int(np.searchsorted(times, within, side="right"))
    if not largest:
        return None
    spares = within - times[:largest]
    gate = _growing(AdmissionGate((largest, *[0] * largest), within=within), times[:largest], spares, 1)
    return Admission(largest, largest, largest, gate, windowed=True)


def _unspaced(
    steady: int, workers: int, places: int, behind: NDArray[np.int64], times: Floats, within: float,
    objective: LatencySLO,
) -> Admission:  # fmt: skip
    """Return what is allowed if any worker that is free starts a batch. `behind` is per worker; see `admission`."""
    longest = workers * steady * int(behind[steady - 1])
    if places > 1 or behind[steady - 1] > 1:
        gate = AdmissionGate((longest + workers * steady, *[longest] * steady))
        if places == 1:  # one more batch, if it is a full one
            spares = within - times[:steady] - behind[steady - 1] * times[steady - 1]
            gate = _growing(gate, times[:steady], spares, steady)
        return Admission(steady, longest, steady, gate)
    # One batch runs and one waits: the longer the one takes, the shorter the other must be.
    fitting = np.searchsorted(times, within - times, side="right")
    largest = int(np.flatnonzero(fitting)[-1]) + 1
    bounds = np.minimum(fitting[:largest], largest)
    spares = within - times[:largest] - times[bounds - 1]
    gate = AdmissionGate((longest + largest, *bounds.tolist()), within=within)
    min_extra_batch = -(-steady // 2) if objective.late_share >= RARELY else 0
    return Admission(steady, longest, largest, _growing(gate, times[:largest], spares, min_extra_batch))


def _growing(gate: AdmissionGate, times: Floats, spares: Floats, min_extra_batch: int) -> AdmissionGate:
    return gate._replace(times=(0.0, *times.tolist()), slack=(0.0, *spares.tolist()), min_extra_batch=min_extra_batch)


UNLIKELY = 1e-3  # a gap between arrivals with a smaller probability is taken for the end of the traffic
SILENCE = log(1.0 / UNLIKELY)  # that gap, in mean gaps

Guards = tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]
Answers = tuple[Decision | None, ...]  # by rows waiting; None is to wait; the last entry holds for longer queues


@dataclass(frozen=True, slots=True, eq=False)
class RateBand:
    """What a policy does in a range of arrival rates.

    Attributes:
        number: the index among the bands, from the lowest rates on.
        entry: the index in the bank of the rate that is nearest.
        falls, rises: rates in rows per second at which the next lower, or next higher, band takes over.
        first, second: decisions by rows waiting.
        share: the share of the batches that `second` decides; `first` decides the others.
        limits: the control limits of both, in rows.
        filling: divided by the rate, the seconds for which the oldest row may wait for the queue to fill (see
            `filling_of`).
        allowance: with an objective, the seconds for which the oldest of n rows may wait, by n.
        latest: with an objective, the seconds of age of its oldest row from which on a batch is trimmed, by rows (see
            LatencySLO).
        largest: the largest batch in rows.
        max_waiting: rows waiting at which arrivals are refused under overload; None: no bound.
        gate: when arrivals are refused otherwise.
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
    gate: AdmissionGate


class RateBands:
    """The bands of `bank` by rising rate; boundary i, in rows per second, lies between the bands i and i + 1.

    Below the lowest rate of the bank its table holds; with an objective, all waiting rows are dispatched at once. Above
    the highest, full batches are dispatched without waiting, so that no worker idles under overload, whatever the
    tables say. A band is computed
    when it is first needed, because a server that adopts a bank has no time to compute all at once, and never changes
    afterwards.
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

        It never waits, and keeps the promise at any rate. Where refusals count, or the time that is left decides, no
        more rows are refused than at low rates.
        """
        objective = self.bank.objective
        if objective is None:
            return None
        windowed = self._admission is not None and self._admission.windowed
        return self[0 if objective.counts_refusals or windowed else len(self) - 1]

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
        first, second, share = self._tables(number)
        limits = limit_of(first), limit_of(second)
        largest, max_waiting, gate = self._queue_bounds(number, entry)
        guards = self._guards
        if self._greedy(number, limits[0], max_waiting):
            guards, largest = (None, None), self.bank.profile.max_batch_size
            first = second = greedy_table(largest)
        answers = answers_of(first, limits[0])
        return RateBand(
            number=number,
            entry=entry,
            falls=self._falls[number],
            rises=self._rises[number],
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
        """Return whether a band is greedy because most answers are then in time: it neither waits nor refuses, so it
        does not trim batches either.
        """
        objective = self.bank.objective
        counts = objective is not None and objective.counts_refusals
        return counts and number < len(self) - 1 and limit == 1 and max_waiting is None

    def _queue_bounds(self, number: int, entry: int) -> tuple[int, int | None, AdmissionGate]:
        """Return a band's largest batch (rows), its longest queue under overload (rows; None: any), and its gate."""
        largest, most = self.bank.profile.max_batch_size, int(self.bank.max_waiting[entry]) or None
        made = self._admission
        if made is None:
            return largest, most, AdmissionGate((most,) * (largest + 1))
        if number == len(self) - 1 and not self._bounded_above:
            return made.steady, made.max_waiting, made.overloaded(self.bank.profile)[1]
        if self.bank.objective is not None and self.bank.objective.counts_refusals and most != made.max_waiting:
            largest = int(self.bank.tables[entry].max())
            return largest, most, AdmissionGate((most,) * (largest + 1))
        return made.largest, made.max_waiting, made.gate_at(float(self.bank.rates[entry]))

    @property
    def _bounded_above(self) -> bool:
        """Whether rates above the highest are served as the highest is.

        That is so where refusals count and service times vary: batches small enough to be in time for certain serve
        too few rows.
        """
        objective, varies = self.bank.objective, bool(self.bank.profile.cv.any())
        return objective is not None and objective.counts_refusals and varies and int(self.bank.max_waiting[-1]) > 0

    def _tables(self, number: int) -> tuple[Table, Table, float]:
        """Return both tables of a band, shape (states,), rows; and the share of the second."""
        bank, share = self.bank, 0.0
        if number == 0 and bank.objective is not None:
            first = second = greedy_table(bank.profile.max_batch_size)
        elif number == len(self) - 1 and not self._bounded_above:
            made = self._admission
            first = second = full_batch_table(bank.profile) if made is None else made.overloaded(bank.profile)[0]
        else:
            entry = min(max(number, 1), len(bank.rates)) - 1
            share = float(bank.shares[entry])
            first = bank.tables[entry]
            second = bank.second_tables[entry] if share else first
        return first, second, share


def promised(bank: Bank, allowed: Admission | None) -> Guards:
    """Return, by rows, the allowances and the latest starts of the bank's objective in seconds; None and None without
    one. `allowed` is its admission, if it has one.

    A wait ends earlier by what rounding may add, so that an answer due at the deadline is not late by the last digit.
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


def answers_of(table: Table, limit: int) -> Answers:
    """Return the decisions of `table`, shape (states,): by rows waiting, None to wait. `limit` (rows) explains them."""
    made = [None, *(Decision(rows, Reason.POLICY, None, limit) for rows in range(1, int(table.max()) + 1))]
    return tuple(map(made.__getitem__, table.tolist()))


def filling_of(table: Table) -> float:
    """Return how long the oldest row waits at most for the queue to fill, in mean gaps between arrivals.

    The longest wait of `table`, shape (states,), is for k arrivals after the oldest row. They take longer than k +
    sqrt(2·k·x) + x gaps with a probability of at most e^-x (a tail bound of the gamma distribution: Boucheron, Lugosi
    and Massart, "Concentration Inequalities", 2013, section 2.4). So after that time they are not expected to come to
    this queue.
    """
    arrivals = int(np.flatnonzero(table == 0)[-1])
    return arrivals + sqrt(2.0 * arrivals * SILENCE) + SILENCE
