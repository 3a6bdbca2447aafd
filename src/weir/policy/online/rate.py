"""The arrival rate as a policy estimates it, the drift of service times, and the bands of rates in which a bank's tables hold.

The rate is estimated from what a policy sees: how many rows ever arrived, and the instant.

Arrivals fade with age: one that is `a` seconds old counts exp(-a/T). The estimate is the ratio of faded arrivals to
faded time, N/S with S = integral of exp(-a/T) over the time seen: from a cold start it is what was counted over the time
that has passed, later the usual exponential average. Between two looks only the number k that came in the gap d is known;
spread evenly over it they add k·(1 - exp(-d/T))·T/d to N. That is exact, whatever the gap, and needs no clock.

How long to remember is a matter of arrivals, not of seconds. The relative error of the estimate is 1/sqrt(2λT): T = 50/λ
makes it 10 % at any rate, where a window of at most a second would hold two arrivals at 2 rows/s. At least 20 ms are
remembered, so that fast traffic is averaged over the length of a batch. Nothing bounds T from above, nor needs to: when
traffic falls silent the gap itself outweighs the memory (d >> T); when it rises, T shrinks with each look, the time beyond
the new T is forgotten, and the estimate doubles with every 35 arrivals until it is right.

Rows that come together, in requests of many, count as so many arrivals, and make the estimate as much less certain.
"""

from bisect import bisect, bisect_right
from dataclasses import dataclass
from math import exp, inf, log, log1p, sqrt
from statistics import median
from typing import NamedTuple

import numpy as np

from weir.messages import Reason
from weir.policy.cost.objective import ROUNDING, LatencySLO
from weir.policy.cost.profile import Floats, Profile
from weir.policy.decision import Decision
from weir.policy.solve.bank import Bank
from weir.policy.solve.tables import Table, full_batch_table, greedy_table, limit_of

WINDOW_ROWS = 50.0
WINDOW_MIN = 0.02  # seconds
WINDOW_MAX = 3600.0  # seconds; before anything is known, and a bound on the arithmetic
ENOUGH = 20  # arrivals until which the rate counts as unknown; the error is 22 % then


class Rate:
    """An estimate of rows per second: `value`, 0 while it is unknown.

    It changes only with arrivals. While nothing comes it stays, and so do the instants that are computed from it (the
    end of a wait); the next arrival brings the whole gap to account.
    """

    __slots__ = ("_arrivals", "_at", "_counted", "_rows", "_seconds", "_window", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._counted = 0  # arrivals since the start
        self._arrivals = -1  # as of the last look
        self._at = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._window = WINDOW_MAX

    def observe(self, now: float, arrivals: int) -> float:
        """At the instant `now`, so many rows had ever arrived. Returns `value`.

        Where either is less than it was (another queue, another clock), counting goes on from there.
        """
        count, gap = arrivals - self._arrivals, now - self._at
        if count > 0 and gap > 0.0 and self._arrivals >= 0:
            self._learn(count, gap)
        elif count >= 0 and gap >= 0.0 and self._arrivals >= 0:
            return self.value  # nothing came, or no time has passed yet: the next look counts it
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


# Have the service times moved away from the profile? A two-sided cumulative sum (Page's CUSUM) of log(τ observed/τ(b)).
#
# Each batch says by which factor it took longer than the profile's mean, on a logarithmic scale, where twice as long and
# half as long are equally far. What exceeds an allowance adds up, what falls short of it is taken off, down to 0; a sum
# above the threshold says that something has changed. The next batches then say by how much (their median does), those
# before the alarm being a mixture of old and new. One sum watches for slower, one for faster.
#
# The allowance is half of the smallest change worth noticing (10 %), or half a standard deviation if that is more. The
# threshold h is what a run of chance would pass, from any one batch on, with the probability of a value five standard
# deviations out (Wald: exp(-2·allowance·h/σ²) = 2.9e-7), and at least five standard deviations. A single batch counts as
# four standard deviations at most, so that one pause of the machine is no change of the model.


NOTICEABLE = 0.1  # relative change of the service time that is worth another solution
LEAST_SPREAD = 0.03  # standard deviation of log τ that even a steady model is granted: clocks, other load
FIVE_SIGMA = -log(2.87e-7)
THRESHOLD = 5.0  # standard deviations, at least
OUTLIER = 4.0  # standard deviations, at most, that one batch counts
BATCHES = 20  # after an alarm, that measure the change


class Drift(NamedTuple):
    """Service times have changed by `factor` (above 1: slower), as `batches` batches say."""

    factor: float
    batches: int


class DriftDetector:
    """Watches one model's service times. `observe` each batch; what it returns is a verdict.

    With a verdict it starts anew: go on with a detector for the profile that was scaled by the factor.
    """

    __slots__ = ("_faster", "_laws", "_since", "_slower")

    def __init__(self, profile: Profile) -> None:
        # By size, the mean and variance of log τ. Of a log-normal law that mean is less than the log of the mean.
        spreads = [log1p(cv * cv) for cv in profile.cv.tolist()]
        times = profile.service_time_ms.tolist()
        self._laws = [(log(ms / 1000.0) - each / 2.0, each) for ms, each in zip(times, spreads, strict=True)]
        self._restart()

    def _restart(self) -> None:
        self._slower = self._faster = 0.0  # the sums
        self._since: list[float] | None = None  # log τ observed/τ(b) since the alarm, if there was one

    def observe(self, rows: int, seconds: float) -> Drift | None:
        """A batch of `rows` took `seconds`. Return by how much service times have changed, None if nothing says so.

        Sizes that the profile does not have, and times that are not above 0, say nothing.
        """
        if not 1 <= rows <= len(self._laws) or seconds <= 0.0:
            return None
        mean, variance = self._laws[rows - 1]
        excess = log(seconds) - mean
        if self._since is None:
            if self._is_alarm(excess, max(sqrt(variance), LEAST_SPREAD)):
                self._since = []
            return None
        self._since.append(excess)
        if len(self._since) < BATCHES:
            return None
        change = median(self._since)
        self._restart()
        return Drift(exp(change), BATCHES) if abs(change) > log1p(NOTICEABLE) / 2.0 else None

    def _is_alarm(self, excess: float, spread: float) -> bool:
        excess = min(max(excess, -OUTLIER * spread), OUTLIER * spread)
        allowance = max(log1p(NOTICEABLE), spread) / 2.0
        self._slower = max(self._slower + excess - allowance, 0.0)
        self._faster = max(self._faster - excess - allowance, 0.0)
        threshold = max(FIVE_SIGMA * spread * spread / (2.0 * allowance), THRESHOLD * spread)
        return max(self._slower, self._faster) > threshold


# A bank made ready to be looked up: a stage for each of its rates, one below the lowest and one above the highest.
#
# Everything that does not depend on the queue is worked out here, once, into plain Python values that nothing changes: a
# decision is an index into a tuple.


# How long the queue may be where a latency is promised, so that whoever is let in is answered in time at any arrival rate.
#
# A row at place p of the queue starts, at the latest, with batch ⌈p/(c·b)⌉ of its worker after the one under way, if c workers
# serve batches of b rows while more than b wait. With no more than c·m·b rows in the queue, it is answered after at most m + 1
# service times; so m·c·b rows may wait if (m + 1)·τ(b) ≤ D, whatever the traffic. docs/explanation/beyond-the-paper.md.


# Of the rows per second that the objective allows; the rest is given for a longer queue, which refuses less.
NEARLY = 0.98
# Shares of late rows below this leave no room for what is not exact: a part of a batch behind another.
RARELY = 1e-3


class AdmissionGate(NamedTuple):
    """Beyond which queue arrivals are refused.

    `bounds[n]` rows may wait once n were dispatched; for n = 0, while the policy waits. None: no bound. With `times` (seconds
    by rows), one more batch of at least `third` rows (0: never) may wait if it comes late enough; `spares[n]` is by how much
    the rows in the queue are answered earlier than they must. With `within`, one batch waits at a time, and its time and that of
    the one that runs are so many seconds at most.
    """

    bounds: tuple[int | None, ...]
    times: tuple[float, ...] = ()
    within: float = 0.0
    third: int = 0
    spares: tuple[float, ...] = ()

    def after(self, rows: int, waiting: int, age: float) -> int | None:
        """Return how many may wait once `rows` of the `waiting` are dispatched; the first that stays is `age` seconds old.

        Those who stay behind are served with whom the queue then lets in: so few that the first of them is in time.
        """
        bound = self.bounds[rows]
        if bound is None or rows >= waiting or not self.within:
            return bound
        left = self.within - self.times[rows] - age + ROUNDING
        return min(bound, max(bisect_right(self.times, left) - 1, waiting - rows, 1))

    def more(self, rows: int, since: float) -> int:
        """Return how many more may wait, `since` seconds after `rows` were dispatched, as a batch behind those in the queue."""
        if not self.third:
            return 0
        more = bisect_right(self.times, since + self.spares[rows] + ROUNDING) - 1
        return more if more >= self.third else 0


OPEN = AdmissionGate((None,))


class Admission(NamedTuple):
    """`steady` rows are a batch under overload, `max_waiting` rows the queue then, and `largest` rows the largest batch at
    any rate. `gate` is for rates that can be served."""

    steady: int
    max_waiting: int
    largest: int
    gate: AdmissionGate

    def table(self, profile: Profile, limit: int = 1) -> Table:
        """Return the table that waits for `limit` rows, then takes full batches, none larger than `largest`."""
        table = full_batch_table(profile)[: self.largest + 1]
        table[:limit] = 0
        return table

    def overloaded(self, profile: Profile) -> tuple[Table, AdmissionGate]:
        """Return the table, and the gate, for more rows than can be served."""
        table = full_batch_table(profile)[: self.steady + 1]
        table[-1] = self.steady
        bounds = (self.max_waiting,) * (self.steady + 1)
        return table, AdmissionGate(bounds, self.gate.times[: self.steady + 1], self.gate.within)


def admission(profile: Profile, objective: LatencySLO, workers: int = 1) -> Admission | None:
    """Return the batch and the queue that serve most rows per second, all of them in time, when more arrive than can be
    served; None if even a row that comes behind one alone may be late.

    It is the size that serves most if two batches of it may wait; else, of all that serve nearly as many, the one with the
    longest queue, so that fewer are refused by bad luck when nearly as many arrive as can be served.
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
        gate = AdmissionGate((longest + workers * steady, *[longest] * steady))
        if workers * depth == 1:  # one more batch, if it may be a whole one
            spares = within - times[:steady] - behind[steady - 1] * times[steady - 1]
            gate = _growing(gate, times[:steady], spares, steady)
        return Admission(steady, longest, steady, gate)
    # One batch under way and one in the queue: the longer the one takes, the shorter the other must be.
    fitting = np.searchsorted(times, within - times, side="right")
    largest = int(np.flatnonzero(fitting)[-1]) + 1
    bounds = np.minimum(fitting[:largest], largest)
    spares = within - times[:largest] - times[bounds - 1]
    gate = AdmissionGate((longest + largest, *bounds.tolist()), within=within)
    third = -(-steady // 2) if objective.late_share >= RARELY else 0
    return Admission(steady, longest, largest, _growing(gate, times[:largest], spares, third))


def _growing(gate: AdmissionGate, times: Floats, spares: Floats, third: int) -> AdmissionGate:
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
    the queue to fill (see `filling_of`). Where there is a promise, `allowance[n]` is how long the oldest of n may wait, and
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
    gate: AdmissionGate


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

    def _line(self, number: int, entry: int) -> tuple[int, int | None, AdmissionGate]:
        """Return a stage's largest batch, its longest queue under overload, and its gate."""
        largest, most = self.bank.profile.max_batch_size, int(self.bank.max_waiting[entry]) or None
        made = self._admission
        if made is None:
            return largest, most, AdmissionGate((most,) * (largest + 1))
        if number == len(self) - 1 and not self._bounded_above:
            return made.steady, made.max_waiting, made.overloaded(self.bank.profile)[1]
        if self.bank.objective is not None and self.bank.objective.counts_refusals and most != made.max_waiting:
            largest = int(self.bank.tables[entry].max())
            return largest, most, AdmissionGate((most,) * (largest + 1))
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
    """Return, in mean gaps between arrivals, how long the oldest row waits at most for the queue to fill.

    The longest wait of `table` is for k arrivals after the oldest. They take longer than k + sqrt(2·k·x) + x gaps with
    probability e^-x at most (a tail bound of the gamma distribution); so after that time they are not coming to this queue.
    """
    arrivals = int(np.flatnonzero(table == 0)[-1])
    return arrivals + sqrt(2.0 * arrivals * SILENCE) + SILENCE
