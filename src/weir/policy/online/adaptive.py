"""The solved policy, which follows the arrival rate, and `auto`, which starts without tables.

A decision estimates the arrival rate, takes the table that was solved for it, and looks up the number of waiting rows.

In a table, to wait means to wait for the next arrival. That is right for Poisson arrivals at the rate that the table
was solved for, which nothing guarantees. So each wait ends at the earliest of these instants:

- The last arrival + ln(1000)/rate. A gap as long has a probability of 0.001, so the traffic has most likely stopped.
- The oldest arrival + (k + sqrt(2·k·x) + x)/rate, with x = ln(1000) and k the arrivals that the table waits for. They
  take longer only with a probability of 0.001, so they do not come to this queue.
- With a promise about latency, the oldest arrival + the deadline - the service time of what waits - a margin, and as
  much as such waits have lately ended too late: the timers of an event loop are late by a millisecond or so.

The batcher's own bounds (max_queue_delay, the requests' deadlines) hold as well.
"""

from dataclasses import asdict, dataclass, replace
from heapq import heapreplace
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np

from weir.config import AT_LEAST_ZERO, POSITIVE, check, setting
from weir.errors import SettingsError
from weir.messages import Reason
from weir.policy.cost import LatencySLO, Prices, Profile, read_profile, trimmed
from weir.policy.decision import Decision, Greedy, Observation, PolicyBase
from weir.policy.online.admission import AdmissionGate, AdmissionPlan
from weir.policy.online.arrivals import Rate
from weir.policy.online.joint import DevicePolicy, UnevenPolicy
from weir.policy.online.rate import SILENCE, Decisions, RateBand, RateBands, end_of_wait
from weir.policy.solve.bank import Bank
from weir.policy.solve.device import DeviceTable
from weir.policy.solve.uneven import UnevenBank

# What a solved policy costs compared with the greedy one, and when it must be greedy itself.
#
# A table is the best one for Poisson arrivals at one rate. With other traffic its waits may be a loss: a burst ends
# while the policy waits for its next rows, or the rate swings, which changes what a millisecond is worth. No estimate
# of the rate can rule that out, but an account of costs can. Two virtual queues meet the arrivals that the policy
# observes, with the profile's service times and energies: one is served greedily, the other by the tables, or greedily
# while the policy is greedy. Their difference is what the policy has paid for its waits. While that is more than
# ALLOWED of greedy's cost, the policy is greedy. Then the difference stays and the cost it is compared with grows, so
# the tables soon decide again. In the long run the policy costs at most ALLOWED more than greedy, on any traffic, and
# uses its tables wherever they pay.
#
# Both queues meet the same arrivals, so chance cancels. The instants of arrivals are known while a worker is idle,
# which is when the two differ; those that come while all are busy are spread evenly between the first and the last.
# Savings count only up to RESERVE, and the past is repeatedly halved, so old savings do not pay for new losses for
# long. Time is what the policy observes: nothing here reads a clock.


ALLOWED = 0.0025  # share of greedy's cost that the policy may cost more
ENOUGH = 0.75  # share of that at which the tables decide again
RESERVE = 0.01  # share of greedy's cost: the most that counts of what was saved
GRANT = 0.5  # times the cost of as many rows as the table waits for: within one wait the difference goes up and down
FIRST = 0.05  # seconds: the length of the first stretches of a SureRate
STRETCHES, FEWEST = 16, 4  # the largest number of stretches, and the smallest that gives a rate
SURE = 2.0  # standard errors
LATE_FADE = 0.99  # of what is known of the lateness of waits, as each ends; about the worst of the last hundred stays
LATE_MOST = 0.1  # of the longest wait: a server that stood still for a while shall not stop waiting on purpose
ROWS, SECONDS = 20_000.0, 600.0  # with more rows and more seconds than these, the past is halved


class WaitBounds(NamedTuple):
    """Tells when a virtual queue waits, and for how long.

    Attributes:
        decisions: decisions by rows waiting; None: it is greedy.
        silence: the longest wait since the last arrival, in seconds.
        filling: the longest wait since the oldest arrival, in seconds.
        largest: the largest batch in rows.
    """

    decisions: Decisions | None
    silence: float
    filling: float
    largest: int


class Arrived(NamedTuple):
    """`rows` rows arrived `gap` seconds apart, the first at the instant `first` (seconds)."""

    rows: int
    first: float
    gap: float


class VirtualQueue:
    """A queue and its workers in virtual time.

    `area_ms` is the time in ms that rows have spent here, and those in service will still spend. `energy_mj` is the
    energy in mJ of their batches beyond the least possible for as many rows.

    Each batch takes its mean time, also where service times vary. With chance, two queues that cut other batches would
    differ by their luck, which in a burst is far more than what an account looks for.
    """

    __slots__ = ("_at", "_ends", "_energies", "_last", "_oldest", "_times", "_waiting", "area_ms", "energy_mj")

    def __init__(self, profile: Profile, workers: int, now: float, waiting: int = 0) -> None:
        self._times = (0.0, *(profile.service_time_ms / 1000.0).tolist())
        self._energies = (0.0, *(profile.energy_mj - profile.sizes * least_energy_mj(profile)).tolist())
        # A heap: the instant at which each worker is free, and the rows it serves till then.
        self._ends = [(now, 0)] * workers
        self._at = self._oldest = self._last = now
        self._waiting = waiting
        self.area_ms = self.energy_mj = 0.0

    def advance(self, now: float, arrived: Arrived, waits: WaitBounds) -> None:
        """Let time pass until `now` (seconds), before which the rows of `arrived` have arrived."""
        left, coming, gap = arrived
        while True:
            free = self._ends[0][0]
            if free > self._at:
                joined = self._let_pass(free if free < now else now, left, coming, gap)
                left, coming = left - joined, coming + joined * gap
                if free > now:
                    return
            until = self._until(waits)
            comes = left > 0 and coming < until
            if until <= self._at or (until <= now and not comes):
                self._pass(max(until, self._at))
                self._dispatch(waits)
            elif comes:
                self._pass(max(coming, self._at))
                self._oldest, self._last = (self._oldest if self._waiting else coming), coming
                self._waiting += 1
                left, coming = left - 1, coming + gap
            else:
                self._pass(now)
                return

    def _let_pass(self, end: float, left: int, coming: float, gap: float) -> int:
        """Let time pass until `end` (seconds), while all workers are busy. Return how many rows have joined by then.

        `left` rows are still to arrive, the first at `coming`, then one every `gap` seconds.
        """
        joined = 0
        if left and coming <= end:
            joined = min(left, int((end - coming) / gap) + 1) if gap > 0.0 else left
            if not self._waiting:
                self._oldest = coming
            self._last = coming + (joined - 1) * gap
            self.area_ms += 1000.0 * joined * (end - (coming + self._last) / 2.0)
        self._pass(end)
        self._waiting += joined
        return joined

    def _pass(self, until: float) -> None:
        self.area_ms += 1000.0 * self._waiting * (until - self._at)
        self._at = until

    def _until(self, waits: WaitBounds) -> float:
        """Return the instant at which the wait ends if no row arrives: infinity if no row waits, -infinity if the wait is over."""
        if not self._waiting:
            return inf
        if self._waiting >= waits.largest or waits.decisions is None or self._decision(waits) is not None:
            return -inf
        return min(self._last + waits.silence, self._oldest + waits.filling)

    def _decision(self, waits: WaitBounds) -> Decision | None:
        """Return the decision of the table; None to wait, and without a table."""
        decisions = waits.decisions or (None,)
        return decisions[self._waiting if self._waiting < len(decisions) else -1]

    def _dispatch(self, waits: WaitBounds) -> None:
        """Start a batch: of all rows that fit where the table would wait."""
        decision = self._decision(waits)
        rows = min(self._waiting if decision is None else decision.rows, waits.largest)
        time = self._times[rows]
        self.area_ms += 1000.0 * rows * time
        self.energy_mj += self._energies[rows]
        self._waiting -= rows
        self._oldest = self._at  # an approximation, for the rows that stay
        heapreplace(self._ends, (self._at + time, rows))

    def spent_ms(self, now: float) -> float:
        """Return the time in ms that rows have spent here until `now` (seconds)."""
        return self.area_ms - 1000.0 * sum(rows * (end - now) for end, rows in self._ends if end > now)


def least_energy_mj(profile: Profile) -> float:
    """Return the least energy per row in mJ, over all batch sizes."""
    return float(np.min(profile.energy_mj / profile.sizes))


class SureRate:
    """A lower bound on the mean arrival rate: `value`, in rows per second; None while it is unknown.

    It is the mean less two standard errors. The errors come from the spread of up to 16 stretches of time of equal
    length. For steady traffic the bound is close to the mean; for bursts it stays low until there were many.
    """

    __slots__ = ("_rows", "_since", "_width", "value")

    def __init__(self) -> None:
        self._rows = [0.0]  # by stretch; the last one is not complete
        self._since = 0.0  # seconds since the first one began
        self._width = FIRST
        self.value: float | None = None

    def observe(self, rows: int, seconds: float) -> None:
        """Take note that `rows` rows arrived in `seconds` seconds."""
        self._since += seconds
        while self._since >= STRETCHES * self._width:
            self._rows = [sum(self._rows[first : first + 2]) for first in range(0, len(self._rows), 2)]
            self._width *= 2.0
        under_way = int(self._since / self._width)
        if under_way >= len(self._rows):
            self._rows += [0.0] * (under_way + 1 - len(self._rows))
            self._learn(self._rows[:-1])
        self._rows[-1] += rows

    def forget(self) -> None:
        """Forget the older half of the stretches."""
        half = len(self._rows) // 2
        del self._rows[:half]
        self._since -= half * self._width

    def _learn(self, rows: list[float]) -> None:
        count = len(rows)
        if count >= FEWEST:
            mean = sum(rows) / count
            error = sqrt(sum((each - mean) ** 2 for each in rows) / (count - 1) / count)
            self.value = max(mean - SURE * error, 0.0) / self._width


class CostAccount:
    """Compares a policy that decides by `bank` with the greedy policy.

    Attributes:
        greedy: whether the policy must be greedy now.
        excess: the share of greedy's cost by which the policy has cost more; below 0, less, as far as savings are
            kept.
    """

    __slots__ = (
        "_arrivals", "_bank", "_by_greedy", "_least", "_now", "_own", "_rate", "_rows", "_seconds", "excess", "greedy",
    )  # fmt: skip

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._least = least_energy_mj(bank.profile)
        self._restart(0.0, 0, 0)
        self._now = inf  # nothing has been observed

    def _restart(self, now: float, arrivals: int, waiting: int) -> None:
        profile, workers = self._bank.profile, self._bank.workers
        self._own = VirtualQueue(profile, workers, now, waiting)
        self._by_greedy = VirtualQueue(profile, workers, now, waiting)
        self._now, self._arrivals = now, arrivals
        self._rate = SureRate()
        self._rows = self._seconds = 0.0  # observed, as far as they are remembered
        self.greedy, self.excess = False, 0.0

    def observe(self, seen: Observation, band: RateBand, decisions: Decisions, rate: float) -> bool:
        """Let both virtual queues see the observation `seen`. Return `greedy`.

        The policy would decide by `decisions` of the band `band`; `rate` is the estimated rate in rows per second.
        """
        now, count = seen.now, seen.arrivals - self._arrivals
        if now < self._now or count < 0:  # the first observation, or another queue or clock
            self._restart(now, seen.arrivals, seen.waiting)
            return False
        arrived = self._spread(count, seen)
        largest = seen.max_batch_size if seen.max_batch_size < band.largest else band.largest
        filling = min(band.filling / rate, seen.max_queue_delay)
        waits = WaitBounds(None, inf, inf, largest)
        self._by_greedy.advance(now, arrived, waits)
        own = waits if self.greedy else WaitBounds(decisions, SILENCE / rate, filling, largest)
        self._own.advance(now, arrived, own)
        self._rows += count
        self._seconds += now - self._now
        self._rate.observe(count, now - self._now)
        self._now, self._arrivals = now, seen.arrivals
        if count:
            self._judge(band.limit)
        return self.greedy

    def _spread(self, count: int, seen: Observation) -> Arrived:
        """Return when the `count` new rows arrived. The last instant is known, and the first if all of them still
        wait.
        """
        last = seen.last_arrival
        if count < 2:
            return Arrived(count, last, 0.0)
        first = seen.oldest_arrival if seen.waiting <= count else self._now + (last - self._now) / count
        first = min(max(first, self._now), last)
        return Arrived(count, first, (last - first) / (count - 1))

    def _judge(self, limit: int) -> None:
        """Compare the costs of both queues, and decide whether the policy must be greedy. `limit` is in rows."""
        own, other, prices, now = self._own, self._by_greedy, self._bank.prices, self._now
        rate = prices.reference_rate or self._rate.value
        if rate is None:
            rate = self._rows / max(self._seconds, 1e-9)
        # Cost of a mJ per row: power in watts is mJ per row times rows per ms.
        joule = prices.energy_weight * rate / 1000.0
        spent = other.spent_ms(now)
        cost = prices.latency_weight * spent + joule * (other.energy_mj + self._rows * self._least)
        more = prices.latency_weight * (own.spent_ms(now) - spent) + joule * (own.energy_mj - other.energy_mj)
        grant = GRANT * limit / self._rows
        allowed = (ALLOWED + grant) * cost
        self.greedy = more > (ENOUGH * allowed if self.greedy else allowed)
        self.excess = more / cost if cost else 0.0
        if self.excess < -RESERVE - grant:
            self._forget((-RESERVE - grant) / self.excess, 1.0)
        if self._rows > ROWS and self._seconds > SECONDS:
            self._forget(1.0, 0.5)
            self._rate.forget()

    def _forget(self, difference: float, all_of_it: float) -> None:
        """Keep the share `difference` of the difference between the queues, and the share `all_of_it` of everything."""
        own, other = self._own, self._by_greedy
        own.area_ms = all_of_it * (other.area_ms + difference * (own.area_ms - other.area_ms))
        own.energy_mj = all_of_it * (other.energy_mj + difference * (own.energy_mj - other.energy_mj))
        other.area_ms *= all_of_it
        other.energy_mj *= all_of_it
        self._rows *= all_of_it
        self._seconds *= all_of_it


# What a solved policy does, and what is predicted for it, as a JSON-able document.


def explain(
    bank: Bank | None, band: RateBand | None, rate: float, account: CostAccount | None = None
) -> dict[str, Any]:
    """Return what a policy does by the band `band` of `bank` at `rate` rows per second, as a JSON-able dict.

    Without a band (the policy still learns) the rate is 0; what is unknown is None.
    """
    return {
        "learning": band is None,
        "rate": rate or None,
        "capacity": None if bank is None else bank.capacity,
        "workers": None if bank is None else bank.workers,
        "prices": None if bank is None else asdict(bank.prices),
        "objective": None if bank is None or bank.objective is None else bank.objective.to_dict(),
        "table": {"index": None, "rate": None, "limit": None} if bank is None or band is None else _table(bank, band),
        "guards": dict.fromkeys(("silence", "filling", "deadline")) if band is None else _guards(band, rate),
        "max_waiting": None if band is None else band.max_waiting,
        "predicted": predict(bank, rate),
        "beside_greedy": {"greedy": None, "excess": None}
        if account is None
        else {"greedy": account.greedy, "excess": account.excess},
    }


def predict(bank: Bank | None, rate: float) -> dict[str, float | None]:
    """Return the predictions for `rate` rows per second: mean and 99th percentile of the response time (ms), power
    (W), cost.

    Between the bank's rates they are interpolated; below the lowest rate the response times are those of that rate and
    power falls in proportion. All are None for rates that the workers cannot serve.
    """
    if bank is None or not 0.0 < rate < bank.capacity:
        return dict.fromkeys(("response_time_ms", "p99_ms", "power_w", "cost"))
    between = (bank.response_time_ms, bank.p99_ms, bank.power_w)
    response, p99, power = (float(np.interp(rate, bank.rates, values)) for values in between)
    power *= min(rate / float(bank.rates[0]), 1.0)
    cost = bank.prices.latency_weight_at(rate) * response + bank.prices.energy_weight * power
    values = {"response_time_ms": response, "p99_ms": p99, "power_w": power, "cost": cost}
    return {name: value if isfinite(value) else None for name, value in values.items()}


def _table(bank: Bank, band: RateBand) -> dict[str, Any]:
    return {"index": band.entry, "rate": float(bank.rates[band.entry]), "limit": band.limit}


def _guards(band: RateBand, rate: float) -> dict[str, float | None]:
    """Return the longest waits in seconds: since the last arrival, since the oldest, and for a single row by the
    objective.
    """
    return {
        "silence": SILENCE / rate,
        "filling": band.filling / rate,
        "deadline": None if band.allowance is None else band.allowance[1],
    }


class Lateness:
    """By how much waits have lately ended too late: `value`, in seconds. It rises at once and fades slowly."""

    __slots__ = ("_due", "_most", "_next", "value")

    def __init__(self) -> None:
        self.value = self._next = self._most = 0.0
        self._due = inf  # when the wait that was decided last shall end

    def decided(self, now: float) -> None:
        """Note that there is a decision at `now` (seconds). A wait that has not ended by then is over: rows have come."""
        late, self._due = now - self._due, inf
        if late < 0.0:
            self.value = self._next  # not before: the wait that has just ended would go on
            return
        late = min(late, self._most)
        self._next = max(late, LATE_FADE * self.value + (1.0 - LATE_FADE) * late)
        self.value = max(self.value, late)

    def waits(self, until: float, longest: float) -> None:
        """Note that a wait shall end at `until`; the `longest` wait takes that many seconds."""
        self._due, self._most = until, LATE_MOST * longest


GREEDY = Greedy()
POLICY = Reason.POLICY  # looking up a member of an enum is slow


class SolvedPolicy(PolicyBase):
    """Decides by the tables of a Bank, and follows the arrival rate. Greedy without a Bank and until the rate is known.

        bank = Bank.from_bytes(Path("square.policy.npz").read_bytes())
        service = weir.Service(Square, policy=weir.SolvedPolicy(bank), max_batch_size=bank.profile.max_batch_size)

    Rates are in rows per second of the whole service, and so are the tables' rates. If requests form several groups
    (batch keys, shapes), the queue of each group is looked up as if all arrivals joined it. A group that gets only a
    part of them reaches its limit later than the table expects; then the bound on the wait of its oldest row ends the
    wait. That costs latency and nothing else; a service with very many groups is better served by `greedy`.

    A smaller `max_batch_size` than the bank's profile has is allowed: batches are cut at that size, and a full one is
    never held back.

    `max_waiting` is the number of waiting rows at which arrivals are refused until the next decision; None: no bound.
    `prices` and `objective` are what its first tables are for.
    """

    adopts_banks = True

    def __init__(self, bank: Bank | None = None) -> None:
        self.max_waiting = None
        self.prices, self.objective = (Prices(), None) if bank is None else (bank.prices, bank.objective)
        self._estimate = Rate()
        self._late = Lateness()
        self._account: CostAccount | None = None  # of the bank of `_of`, if that has no objective
        self._bands: RateBands | None = None if bank is None else RateBands(bank)
        self._band: RateBand | None = None  # one of `_bands`, or still one of the bank before
        self._of: RateBands | None = None  # the bands that `_band` belongs to
        self._tried = self._trials = 0  # rows of the batches to try, and how many
        self._plan: AdmissionPlan | None = None  # of the rows that wait, where a gate decides which are admitted
        # Decides instead of the bank while the model shares a device with others, or has workers of two kinds.
        self._instead: DevicePolicy | UnevenPolicy | None = None
        self._costs: tuple[Profile, Prices] | None = None  # what is known before, or after, the bank was solved

    # Decisions.

    @property
    def bulk_delay(self) -> float | None:
        """See PolicyBase: a part of the latency objective of the tables, if they have one."""
        objective = None if self._bands is None else self._bands.bank.objective
        return None if objective is None else objective.bulk_delay

    def decide(self, seen: Observation) -> Decision:
        """Return how many rows to dispatch, or until when to wait. See Policy."""
        waiting = seen.waiting
        rate = self._estimate.observe(seen.now, seen.arrivals)
        if self._instead is not None:
            return self._instead.decide(seen)
        band = self._band
        if band is None or self._of is not self._bands or not band.falls <= rate <= band.rises:
            band = self._move(rate)
            if band is None:
                return GREEDY.decide(seen)
        if band.allowance is not None:
            self._late.decided(seen.now)
        if self._trials and waiting >= self._tried:
            self._trials -= 1
            return Decision(self._tried, POLICY, None, self._tried)
        largest = seen.max_batch_size if seen.max_batch_size < band.largest else band.largest
        decisions = band.decisions
        if self._account is not None and self._account.observe(seen, band, decisions, rate):
            return GREEDY.decide(seen)
        if (
            band.gate is not None
            and self._plan is not None
            and seen.now < self._plan.next <= seen.now + band.gate.spacing
        ):
            return Decision(0, POLICY, self._plan.next, band.limit)
        decision = decisions[waiting] if waiting < len(decisions) else decisions[-1]
        if decision is None:
            limit, until = band.limit, wait_deadline(band, rate, seen, self._late.value)
            if seen.now < until and waiting < largest:
                if band.allowance is not None:
                    self._late.waits(until, band.allowance[1])
                if band.gate is not None:
                    self._admit(band.gate, 0, seen)
                return Decision(0, POLICY, until, limit)
            decision = Decision(min(waiting, largest), POLICY, None, min(limit, seen.max_batch_size))
        elif decision.rows > largest:
            decision = Decision(largest, POLICY, None, min(band.limit, largest))
        if band.latest is not None and (age := seen.now - seen.oldest_arrival) > band.latest[decision.rows]:
            planned = None if self._plan is None else self._plan.first
            decision = decision._replace(rows=trimmed(decision.rows, age, band.latest, planned))
        if band.gate is not None:
            self._admit(band.gate, decision.rows, seen)
        return decision

    def _admit(self, gate: AdmissionGate, rows: int, seen: Observation) -> None:
        """Set `max_waiting` for the time after `rows` rows are dispatched (0: the policy waits), as `gate` says."""
        plan = self._plan
        if plan is None:
            plan = self._plan = AdmissionPlan()
        elif not rows and plan.waits_by is gate:
            return  # the plan holds until something is dispatched
        idle = seen.idle_places - (gate.depth - 1) * seen.workers
        plan.dispatch(
            gate, rows, seen.waiting, seen.now, seen.oldest_arrival, seen.last_arrival, idle, max(seen.workers, 1)
        )
        self.max_waiting = plan.bound

    def full(self, now: float) -> int | None:
        """Return `max_waiting` (rows) as of `now` (seconds): an arrival has found the queue full. See PolicyBase."""
        if self._plan is not None:
            self.max_waiting = self._plan.full(now)
        return self.max_waiting

    def _move(self, rate: float) -> RateBand | None:
        """Take the band for `rate` (rows per second), and return it.

        None if there is no bank. While the rate is unknown (0) there is a band only with an objective.
        """
        bands, band = self._bands, self._band
        if bands is None:
            return None
        if not rate:
            return bands.unknown()
        if band is None or self._of is not bands:
            band = bands.at(rate)
        self._band = band = bands.next_to(band, rate)
        if self._of is not bands:
            self._of = bands
            self._account = CostAccount(bands.bank) if bands.bank.objective is None else None
        self.max_waiting, self._plan = band.max_waiting, self._plan if band.gate else None
        return band

    # The life of a policy.

    def adopt(self, bank: Bank) -> None:
        """Decide by `bank` from now on. The estimate of the rate stays."""
        self._bands = RateBands(bank)  # one assignment: a decision sees the old bank or the new one

    def expect(self, profile: Profile, prices: Prices) -> None:
        """Note what batches cost now, for which a bank may still be being solved."""
        self._costs = profile, prices

    @property
    def costs(self) -> tuple[Profile, Prices] | None:
        """The times and energies of batches, and the prices, as far as they are known: those expected last, else those of the bank."""
        return self._costs or (None if self.bank is None else (self.bank.profile, self.bank.prices))

    def share(self, table: DeviceTable | None) -> None:
        """Decide by `table`, which was solved for all models on a device together; None: by the bank again."""
        self._instead = None if table is None else DevicePolicy(table, self._estimate)

    def adopt_kinds(self, bank: UnevenBank) -> None:
        """Decide by `bank`, which was solved for workers of two kinds together."""
        self._instead = UnevenPolicy(bank, self._estimate)

    def urgency(self, waiting: int) -> float | None:
        """See PolicyBase; None unless the model shares a device with others."""
        return None if self._instead is None else self._instead.urgency(waiting)

    def try_size(self, rows: int, batches: int) -> None:
        """Make the next `batches` decisions with at least that many rows waiting dispatch `rows`, to see how long that takes."""
        self._tried, self._trials = rows, batches

    def fresh(self) -> "SolvedPolicy":
        """Return a policy with the same bank that has observed nothing. Each service and simulation has its own."""
        return SolvedPolicy(self.bank)

    # Facts.

    @property
    def bank(self) -> Bank | None:
        """The bank that it decides by."""
        return None if self._bands is None else self._bands.bank

    @property
    def largest_batch(self) -> int | None:
        """The largest batch, in rows, whose cost it knows: `max_batch_size` must not exceed it."""
        return None if self._bands is None else self._bands.bank.profile.max_batch_size

    @property
    def rate(self) -> float:
        """The estimated arrival rate in rows per second; 0 while it is unknown."""
        return self._estimate.value

    @property
    def learning(self) -> bool:
        """Whether it is still greedy because there is no bank, or the rate is unknown."""
        return (self._bands is None and self._instead is None) or not self.rate

    def _current(self) -> RateBand | None:
        bands, rate = self._bands, self.rate
        if bands is None or not rate:
            return None
        return self._band if self._of is bands else bands.at(rate)

    def explain(self) -> dict[str, Any]:
        """Return what it does and why, as a JSON-able dict. What is unknown is None.

        Times are in seconds, except for those of the prediction, in ms, which is for the estimated rate.
        """
        account = self._account if self._of is self._bands else None
        explained = explain(self.bank, self._current(), self.rate, account) | {"device": None, "kinds": None}
        if isinstance(self._instead, DevicePolicy):
            explained["device"] = self._instead.explain()
        elif self._instead is not None:
            kinds = self._instead.explain()
            explained |= {name: kinds.pop(name) for name in ("capacity", "workers", "table", "prices")}
            kinds["each"] = kinds.pop("kinds")
            explained |= {"learning": self.learning, "predicted": predict(None, 0.0), "kinds": kinds}
        return explained


def wait_deadline(band: RateBand, rate: float, seen: Observation, early: float) -> float:
    """Return the instant, in seconds, at which a wait ends at `rate` rows per second: `early` seconds before the objective's last."""
    until = end_of_wait(seen, rate, band.filling)
    if band.allowance is None:
        return until
    return min(until, seen.oldest_arrival + band.allowance[min(seen.waiting, band.largest)] - early)


# The policy `auto`: greedy until the server has measured the model and solved a bank.


@dataclass(eq=False)
class AutoPolicy(SolvedPolicy):
    """A solved policy that starts without a bank. Its fields say how the model is measured, and what is optimised.

    It is greedy until the server has measured the model and solved a bank, which it then adopts. Without a weight of
    energy (`energy_weight` 0) only latency counts: the mean response time is the least that any policy reaches, and no
    row waits in order to save energy. What a joule is worth against a millisecond only the owner knows.

    Raises SettingsError naming the setting, the value and the rule.
    """

    latency_weight: float = setting(1.0, "weight of a millisecond of mean response time", rule=AT_LEAST_ZERO)
    energy_weight: float = setting(0.0, "weight of a watt of mean power", rule=AT_LEAST_ZERO)
    reference_rate: float | None = setting(
        None,
        "arrival rate at which the latency weight holds, in rows per second (default: at every rate)",
        rule=POSITIVE,
    )
    p99: float | None = setting(
        None, "objective instead of weights: p99 response time in seconds, reached with the least energy", rule=POSITIVE
    )
    in_time: float | None = setting(
        None,
        "objective instead of weights: answer as many requests as possible within this many seconds; refusals count as late",
        rule=POSITIVE,
    )
    power: float | None = setting(
        None, "power of a busy worker in watts (default: 1; no meter is read at startup)", rule=POSITIVE
    )
    profile: str | None = setting(None, "profile to read instead of measuring the model at startup")
    seconds: float = setting(
        3.0, "seconds to measure the model at startup; up to three times that if batches are slow", rule=POSITIVE
    )

    def __post_init__(self) -> None:
        super().__init__()
        check(self)
        self.prices = Prices(self.latency_weight, self.energy_weight, self.reference_rate)
        self.objective = self._objective()

    @property
    def largest_batch(self) -> int | None:
        """See SolvedPolicy; before it has a bank, the largest batch of its profile. Raises SettingsError if that cannot be read."""
        if self._bands is not None or self.profile is None:
            return super().largest_batch
        return read_profile(self.profile, f"policy=auto:profile={self.profile}").max_batch_size

    def _objective(self) -> LatencySLO | None:
        if self.p99 is not None and self.in_time is not None:
            raise SettingsError(f"p99={self.p99:g}, in_time={self.in_time:g}: must be one of them, not both")
        if self.in_time is not None:
            return LatencySLO(self.in_time, refusal_price=1.0).checked()
        return None if self.p99 is None else LatencySLO(self.p99, 0.01).checked()

    def fresh(self) -> "AutoPolicy":
        """Return a policy with the same settings, and the same bank if there is one, that has observed nothing."""
        made = replace(self)
        made._bands = self._bands
        return made
