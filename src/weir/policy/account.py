"""What a solved policy costs beside greedy, and when it has to be greedy itself.

A table is the best there is for Poisson arrivals of one rate. Other traffic may make its waits a loss: bursts end while the
policy waits for their next rows, and a rate that swings changes what a millisecond is worth. No estimate of the rate can
rule that out, but an account can. Two virtual queues meet the arrivals that the policy sees, with the profile's service
times and energies: one is served greedily, the other by the tables, or greedily while the policy is greedy. So their
difference is what the policy has paid for its waits. While that is more than ALLOWED of what greedy costs, the policy is
greedy: the difference stands still, the cost it is held against grows, and soon the tables have their turn again. In the
long run the policy thus costs at most ALLOWED more than greedy, on any traffic, and is back at its tables where they pay.

Both queues meet the same arrivals, so that luck cancels. The instants of arrivals are known while a worker is idle, and
that is when the two differ; those that come while all are busy are spread evenly between the first and the last. Savings
are kept up to RESERVE, and the past is forgotten by halves, so that old savings do not pay for new losses for long. Time is
what the policy observes: nothing here reads a clock.
"""

from heapq import heapreplace
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from weir.policy.bank import Bank
from weir.policy.decision import Observation
from weir.policy.profile import Profile
from weir.policy.rate_bands import SILENCE, Answers, RateBand

ALLOWED = 0.0025  # of greedy's cost, that the policy may cost more
ENOUGH = 0.75  # of that, at which the tables have their turn again
RESERVE = 0.01  # of greedy's cost: the most that is kept of what was saved
GRANT = 0.5  # of the cost of as many rows as the table waits for: within one wait the difference goes up and down
FIRST, STRETCHES, FEWEST = (
    0.05,
    16,
    4,
)  # seconds of the first stretches of a mean rate; how many there are; and are needed
SURE = 2.0  # standard errors
ROWS, SECONDS = 20_000.0, 600.0  # once there are more of both, the past counts half
GOLDEN = 0.6180339887498949  # times the squares of whole numbers it has fractions as of chance
PERIOD = 1 << 20


class Waits(NamedTuple):
    """When the tables wait: `answers` by rows waiting, and for how long at most, in seconds: since the last arrival
    (`silence`), and since the oldest (`filling`). A batch has at most `largest` rows; with `answers` None it is greedy."""

    answers: Answers | None
    silence: float
    filling: float
    largest: int


class Arrived(NamedTuple):
    """`rows` arrived `gap` seconds apart, the first at `first`."""

    rows: int
    first: float
    gap: float


class VirtualQueue:
    """A queue and its workers, in virtual time. `area_ms` is the time that rows have spent there, and those in service are
    still to spend; `energy_mj` is what their batches took beyond the least that as many rows can take. Where service times
    vary, a batch takes the mean plus or minus a standard deviation, as often one as the other; which it is depends on its
    first row, so that two queues have the same luck."""

    __slots__ = ("_at", "_ends", "_energies", "_last", "_oldest", "_rows", "_times", "_waiting", "area_ms", "energy_mj")

    def __init__(self, profile: Profile, workers: int, now: float, waiting: int = 0) -> None:
        spread = profile.service_time_ms * profile.cv.clip(max=1.0) / 1000.0
        mean = profile.service_time_ms / 1000.0
        self._times = ((0.0, *(mean + spread).tolist()), (0.0, *(mean - spread).tolist()))
        self._energies = (0.0, *(profile.energy_mj - profile.sizes * least_energy_mj(profile)).tolist())
        self._ends = [(now, 0)] * workers  # a heap: when each worker is free, and the rows that it serves until then
        self._at = self._oldest = self._last = now
        self._waiting = waiting
        self._rows = 0  # that were dispatched
        self.area_ms = self.energy_mj = 0.0

    def advance(self, now: float, arrived: Arrived, waits: Waits) -> None:
        """Let time pass until `now`, before which those rows arrived."""
        left, coming, gap = arrived
        while True:
            free = self._ends[0][0]
            if free > self._at:
                joined = self._let_pass(free if free < now else now, left, coming, gap)
                left, coming = left - joined, coming + joined * gap
                if free > now:
                    return
            if not self._waiting:
                if not left:
                    self._at = now
                    return
                left, coming = self._join(coming, left, gap)
            until = self._until(waits)
            if until <= self._at:
                self._dispatch(waits)
            elif left and coming < until:
                self._pass(coming)
                left, coming = self._join(coming, left, gap)
            elif until <= now:
                self._pass(until)
                self._dispatch(waits._replace(answers=None))
            else:
                self._pass(now)
                return

    def _let_pass(self, end: float, left: int, coming: float, gap: float) -> int:
        """All workers are busy until `end`, or longer: let those join who come by then, and return how many do."""
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

    def _join(self, coming: float, left: int, gap: float) -> tuple[int, float]:
        """Let one row join; return how many are left, and when the next comes."""
        if not self._waiting:
            self._oldest = coming
        self._at, self._last = max(coming, self._at), coming
        self._waiting += 1
        return left - 1, coming + gap

    def _pass(self, until: float) -> None:
        self.area_ms += 1000.0 * self._waiting * (until - self._at)
        self._at = until

    def _until(self, waits: Waits) -> float:
        """Return when the wait ends if nobody comes: at once where the rows that wait are served."""
        answers, waiting = waits.answers, self._waiting
        if answers is None or waiting >= waits.largest:
            return -inf
        if answers[waiting if waiting < len(answers) else -1] is not None:
            return -inf
        return min(self._last + waits.silence, self._oldest + waits.filling)

    def _dispatch(self, waits: Waits) -> None:
        """Begin a batch, of all that fit where the table would wait."""
        answers, waiting = waits.answers, self._waiting
        answer = None if answers is None else answers[waiting if waiting < len(answers) else -1]
        rows = min(waiting if answer is None else answer.rows, waits.largest)
        time = self._times[self._rows**2 * GOLDEN % 1.0 < 0.5][rows]
        self.area_ms += 1000.0 * rows * time
        self.energy_mj += self._energies[rows]
        self._rows = (self._rows + rows) % PERIOD
        self._waiting -= rows
        self._oldest = self._at  # nearly, of those who stay
        heapreplace(self._ends, (self._at + time, rows))

    def spent_ms(self, now: float) -> float:
        """Return the time that rows have spent here until `now`."""
        return self.area_ms - 1000.0 * sum(rows * (end - now) for end, rows in self._ends if end > now)


def least_energy_mj(profile: Profile) -> float:
    """Return the least energy that a row can take."""
    return float(np.min(profile.energy_mj / profile.sizes))


class SureRate:
    """The mean rate that arrivals surely have had, `value`: two standard errors below their mean, by the spread of up to 16
    stretches of equal length. Of steady traffic that is nearly the mean; of bursts it is little until there were many."""

    __slots__ = ("_rows", "_since", "_width", "value")

    def __init__(self) -> None:
        self._rows = [0.0]  # of each stretch; the last is under way
        self._since = 0.0  # seconds since the first began
        self._width = FIRST
        self.value: float | None = None  # not known yet

    def observe(self, rows: int, seconds: float) -> None:
        """So many rows came in so many seconds."""
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
        """Forget the older half."""
        half = len(self._rows) // 2
        del self._rows[:half]
        self._since -= half * self._width

    def _learn(self, rows: list[float]) -> None:
        count = len(rows)
        if count >= FEWEST:
            mean = sum(rows) / count
            error = sqrt(sum((each - mean) ** 2 for each in rows) / (count - 1) / count)
            self.value = max(mean - SURE * error, 0.0) / self._width


class Account:
    """Holds a policy that decides by `bank` against greedy. `greedy` says whether it has to be greedy; `excess` is by which
    share of greedy's cost it costs more, or less than 0 by which it costs less, as far as that is kept."""

    __slots__ = (
        "_arrivals",
        "_bank",
        "_by_greedy",
        "_least",
        "_now",
        "_own",
        "_rate",
        "_rows",
        "_seconds",
        "excess",
        "greedy",
    )

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._least = least_energy_mj(bank.profile)
        self._restart(0.0, 0, 0)
        self._now = inf  # nothing has been seen

    def _restart(self, now: float, arrivals: int, waiting: int) -> None:
        profile, workers = self._bank.profile, self._bank.workers
        self._own = VirtualQueue(profile, workers, now, waiting)
        self._by_greedy = VirtualQueue(profile, workers, now, waiting)
        self._now, self._arrivals = now, arrivals
        self._rate = SureRate()
        self._rows = self._seconds = 0.0  # seen, as far as they are remembered
        self.greedy, self.excess = False, 0.0

    def observe(self, seen: Observation, stage: RateBand, answers: Answers, rate: float) -> bool:
        """Let both queues see what the policy sees, which would decide by `answers` of `stage`; return `greedy`."""
        now, count = seen.now, seen.arrivals - self._arrivals
        if now < self._now or count < 0:  # the first look, or another queue or clock
            self._restart(now, seen.arrivals, seen.waiting)
            return False
        arrived = self._spread(count, seen)
        largest = seen.max_batch_size if seen.max_batch_size < stage.largest else stage.largest
        filling = min(stage.filling / rate, seen.max_queue_delay)
        waits = Waits(None, inf, inf, largest)
        self._by_greedy.advance(now, arrived, waits)
        self._own.advance(now, arrived, waits if self.greedy else Waits(answers, SILENCE / rate, filling, largest))
        self._rows += count
        self._seconds += now - self._now
        self._rate.observe(count, now - self._now)
        self._now, self._arrivals = now, seen.arrivals
        if count:
            self._judge(stage.limits[0])
        return self.greedy

    def _spread(self, count: int, seen: Observation) -> Arrived:
        """Return when the rows arrived that are new: the last is known, and the first if all of them still wait."""
        last = seen.last_arrival
        if count < 2:
            return Arrived(count, last, 0.0)
        first = seen.oldest_arrival if seen.waiting <= count else self._now + (last - self._now) / count
        first = min(max(first, self._now), last)
        return Arrived(count, first, (last - first) / (count - 1))

    def _judge(self, limit: int) -> None:
        """Compare what both have cost, and decide who has the next batches."""
        own, other, prices, now = self._own, self._by_greedy, self._bank.prices, self._now
        rate = prices.reference_rate or self._rate.value
        if rate is None:
            rate = self._rows / max(self._seconds, 1e-9)
        joule = prices.energy_weight * rate / 1000.0  # by row: a watt is what a row takes times the rate
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
        """Keep that share of the difference between the queues, and of everything."""
        own, other = self._own, self._by_greedy
        own.area_ms = all_of_it * (other.area_ms + difference * (own.area_ms - other.area_ms))
        own.energy_mj = all_of_it * (other.energy_mj + difference * (own.energy_mj - other.energy_mj))
        other.area_ms *= all_of_it
        other.energy_mj *= all_of_it
        self._rows *= all_of_it
        self._seconds *= all_of_it
