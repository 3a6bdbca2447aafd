"""Chooses the number of workers: the fewest with which the policy does what it shall at the arrival rate, also while workers start.

A worker that is decided on now serves only when it has started. So the rule looks one start-up time ahead, twice:

- *By the rate.* The rate of about the last start-up time shall be within what the workers can serve as the goal says
  (see Capacity).
- *By the queue.* The queue is followed, as a fluid, to the instant at which a worker that is decided on now would be
  ready, at so high a rate that of all rows no larger share is expected to come beyond it than may be late. Its last
  row shall then have its response in time, so there shall be enough workers to serve that queue before.

The second term is why bursts are met early where the deadline is short, and left to the queue where it is long. How
wrong the rate may be is measured: one start-up time later each estimate is compared with what came.

More workers are wanted at once. Fewer are only wanted when no more were needed for as long as a start takes. That is
the rule for renting or buying skis (Karlin, Manasse, Rudolph and Sleator, Algorithmica 3, 1988): whatever comes, a
worker costs at most twice what it would with knowledge of the future.

Nothing here reads a clock. Instants and durations are in seconds, rates in rows per second.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import ceil, inf
from statistics import NormalDist
from typing import Any, NamedTuple

from weir.errors import SettingsError
from weir.policy.online.arrivals import ArrivalForecast, Forecast

MOST_WORKERS = 1024  # of one model
RANGE_RULE = f"must be 1 or more, or the fewest and the most, as in 1..16 or 0..4; at most {MOST_WORKERS}"


class WorkerRange(NamedTuple):
    """The fewest and the most workers that a model may have. `least` may be 0: without requests it has none."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str, name: str = "workers") -> "WorkerRange":
        """Return the range that `text` states: `1..16`, or `4`, which is 4..4.

        Raises SettingsError that names the setting `name`, the text and the rule.
        """
        low, dots, high = (part.strip() for part in text.partition(".."))
        digits = [low, high] if dots else [low]
        if all(part.isascii() and part.isdigit() and len(part) < 8 for part in digits):
            made = cls(int(digits[0]), int(digits[-1]))
            if made.least <= made.most and 1 <= made.most <= MOST_WORKERS:
                return made
        raise SettingsError(f"{name}={text!r}: {RANGE_RULE}")

    def clip(self, workers: int) -> int:
        """Return the number in the range that is nearest to `workers`."""
        return min(max(workers, self.least), self.most)

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"


class CapacityPrediction(NamedTuple):
    """The figures of some number of workers at some rate. `utilisation` is the share of their time that they are busy.

    Times are in ms, infinite if the queue grows without end.
    """

    workers: int
    response_time_ms: float
    p99_ms: float
    utilisation: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON-able dict; None for what is infinite."""
        return {name: None if value == inf else value for name, value in self._asdict().items()}


@dataclass(frozen=True)
class Capacity:
    """Tells how many rows per second workers serve as the goal says, by their number, and what they do at other rates.

    Attributes:
        goal: what shall be kept, as a text: p99=20ms, load=0.7, or the knee.
        rates: entry c - 1: the highest rate at which c workers keep it; not falling.
        max_rate: the most rows per second that one worker can serve at all.
        slack: the seconds that the last row of the queue may wait before its batch starts.
        exceeded: the share of the rows that may be late, and so may come beyond the rate that was assumed.
        loads: shares of what the workers can serve at most, ascending.
        figures: entry c - 1: for each of `loads` the mean response time (ms), its 99th percentile (ms) and the share
            of the time that the workers are busy.
    """

    goal: str
    rates: Sequence[float]
    max_rate: float
    slack: float
    exceeded: float = 0.01
    loads: Sequence[float] = ()
    figures: Sequence[Sequence[tuple[float, float, float]]] = field(default=(), repr=False)

    def needed(self, rate: float) -> int:
        """Return the fewest workers that keep the goal at `rate`; if none do, as many as `rates` has."""
        return min(bisect_left(self.rates, rate) + 1, len(self.rates))

    def predict(self, workers: int, rate: float) -> CapacityPrediction | None:
        """Return what `workers` workers do at `rate`, between the nearest loads that are known; None if it is not
        known.
        """
        if not 1 <= workers <= len(self.figures):
            return None
        load = rate / (workers * self.max_rate)
        if load > self.loads[-1]:
            return CapacityPrediction(workers, inf, inf, 1.0)
        figures = self.figures[workers - 1]
        above = bisect_left(self.loads, load)
        if above == 0:  # so few that only the busy time depends on the rate
            mean, p99, busy = figures[0]
            return CapacityPrediction(workers, mean, p99, busy * load / self.loads[0])
        width = self.loads[above] - self.loads[above - 1]
        share = (load - self.loads[above - 1]) / width
        return CapacityPrediction(
            workers, *(a + share * (b - a) for a, b in zip(figures[above - 1], figures[above], strict=True))
        )


TARGET = 0.8  # the share of what workers can serve at most that is used while nothing else is known


def assumed_capacity(
    max_rate: float, batch_seconds: float, start_up: float, most: int, load: float = TARGET
) -> Capacity:
    """Return the capacity of 1 ... `most` workers that are used up to the share `load` of what they can serve.

    `batch_seconds` is the time of a full batch. Without a deadline a queue may be as long as it is gone before a new
    worker would help, or as one batch.
    """
    rates = [load * count * max_rate for count in range(1, most + 1)]
    return Capacity(f"load={load:g}", rates, max_rate, max(batch_seconds, start_up))


class ScalingReason(Enum):
    """Says what decides the number of workers."""

    RATE = "rate"  # the arrival rate
    QUEUE = "queue"  # the rows that wait, or will wait when a worker could be ready
    HELD = "held"  # they were needed shortly before: less than a start takes
    FIRST = "first"  # a request waits and there is no worker
    IDLE = "idle"  # there was no request for so long that no worker is kept
    LEAST = "least"  # there shall be at least this many
    MOST = "most"  # more are needed than there may be


class ScalingObservation(NamedTuple):
    """Says what the rule may know. Counts of rows, instants in seconds.

    Attributes:
        now: the instant.
        arrivals: rows that have ever arrived.
        waiting: rows in the queue, and rows that must run again because their worker died.
        running: batches with workers.
        ready: workers that take batches.
        starting: for each worker that starts, the seconds until it is expected to be ready.
        start_up: seconds from the decision to start a worker until it is ready.
    """

    now: float
    arrivals: int
    waiting: int
    running: int
    ready: int
    starting: Sequence[float]
    start_up: float


class ScalingDecision(NamedTuple):
    """The number of workers that there shall be, and the reason.

    Attributes:
        workers: how many, those included that are starting.
        reason: what decides.
        rate: the estimated arrival rate.
        high_rate: the rate beyond which only as small a share of the rows is expected to come as may be late.
        by_rate: workers that the rate needs.
        by_queue: workers that the queue needs.
        queue: rows that will wait when a worker that is decided on now would be ready, at the high rate.
    """

    workers: int
    reason: ScalingReason
    rate: float
    high_rate: float
    by_rate: int
    by_queue: int
    queue: float


LEAST_HORIZON = 1.0  # seconds; over less time no rate is known
LEAST_HOLD = 5.0  # seconds for which a worker is kept at least
MOST_NEEDED = 1_000_000
PRECISION, MOST_ERRORS = 1e-3, 4.0  # standard errors


class WorkerScaling:
    """Decides how many workers a model shall have. Ask it every INTERVAL seconds, and when a request finds no worker.

    Args:
        allowed: the fewest and the most.
        capacity: what workers can do. It may be replaced at any time.
        idle_after: seconds without a request after which no worker is kept, if `allowed` begins at 0.
    """

    INTERVAL = 1.0

    def __init__(self, allowed: WorkerRange, capacity: Capacity, idle_after: float = 60.0) -> None:
        self.allowed = allowed
        self.capacity = capacity
        self._idle_after = idle_after
        self._forecast = ArrivalForecast()
        self._needs: deque[tuple[float, int]] = deque()  # falling needs since the last hold began, and their instants
        self._busy_at = -inf  # when there was last something to do
        self._arrivals = -1

    def decide(self, seen: ScalingObservation) -> ScalingDecision:
        """Return how many workers there shall be."""
        horizon = max(seen.start_up, LEAST_HORIZON)
        forecast = self._forecast.observe(seen.now, seen.arrivals, horizon)
        capacity = self.capacity
        high = forecast.rate + errors_above(forecast, capacity.exceeded) * forecast.error
        queue = queue_at_start(seen, high, capacity.max_rate)
        by_rate = capacity.needed(forecast.rate)
        by_queue = self._by_queue(seen, high, queue)
        workers, reason = self._wanted(seen, by_rate, by_queue, max(seen.start_up, LEAST_HOLD))
        return ScalingDecision(workers, reason, forecast.rate, high, by_rate, by_queue, queue)

    def _by_queue(self, seen: ScalingObservation, high: float, queue: float) -> int:
        """Return how many workers the queue needs: to serve in time the `queue` rows that will wait under the present
        workers; and of these as many as would also do if there were no more.
        """
        speed, slack = self.capacity.max_rate, self.capacity.slack
        more = queue / (speed * slack)
        enough = (seen.waiting + high * seen.start_up) / (speed * (seen.start_up + slack))
        return ceil(min(max(more, min(enough, seen.ready + len(seen.starting))), MOST_NEEDED) - 1e-9)

    def _wanted(self, seen: ScalingObservation, by_rate: int, by_queue: int, hold: float) -> tuple[int, ScalingReason]:
        if self._is_idle(seen):
            self._needs.clear()
            return 0, ScalingReason.IDLE
        needed = max(by_rate, by_queue)
        present = seen.ready + len(seen.starting)
        kept = max(needed, min(self._held(seen.now, needed, hold), present))
        if kept > self.allowed.most:
            return self.allowed.most, ScalingReason.MOST
        if kept < self.allowed.least:
            return self.allowed.least, ScalingReason.LEAST
        if not present:
            return kept, ScalingReason.FIRST
        if kept > needed:
            return kept, ScalingReason.HELD
        return kept, ScalingReason.RATE if by_rate >= by_queue else ScalingReason.QUEUE

    def _is_idle(self, seen: ScalingObservation) -> bool:
        """Return whether no worker shall be kept, because there was nothing to do for long."""
        if seen.waiting or seen.running or seen.arrivals != self._arrivals:
            self._busy_at, self._arrivals = seen.now, seen.arrivals
        return not self.allowed.least and seen.now >= self._busy_at + self._idle_after

    def _held(self, now: float, needed: int, hold: float) -> int:
        """Return the most workers that were needed within the last `hold` seconds."""
        needs = self._needs
        while needs and needs[-1][1] <= needed:
            needs.pop()
        needs.append((now, needed))
        while needs[0][0] <= now - hold:
            needs.popleft()
        return needs[0][1]


# By how many standard errors the rate is assumed to be higher than estimated. A goal is about the share of all rows, not
# of all instants: a rate that is exceeded often, but by little, makes few rows late. So it is the z with which
# E[(rate - assumed)+], the normal loss function L(z) times the error, is the allowed share of the rate (in inventory
# theory the fill rate).


def errors_above(forecast: Forecast, share: float) -> float:
    """Return by how many standard errors more than estimated the rate may be so that at most this share of the rows is
    expected to come beyond that; at least 0.
    """
    normal = NormalDist()
    allowed = share * forecast.rate / forecast.error if forecast.error else inf
    low, high = 0.0, MOST_ERRORS
    while high - low > PRECISION:
        middle = (low + high) / 2.0
        enough = normal.pdf(middle) - middle * (1.0 - normal.cdf(middle)) <= allowed
        low, high = (low, middle) if enough else (middle, high)
    return high if high > PRECISION else 0.0


def queue_at_start(seen: ScalingObservation, rate: float, max_rate: float) -> float:
    """Return the rows that will wait when a worker that is started now is ready, if rows arrive at `rate`.

    Each worker serves `max_rate` rows per second from the instant at which it is ready.
    """
    queue, at, workers = float(seen.waiting), 0.0, seen.ready
    for ready in (*sorted(min(each, seen.start_up) for each in seen.starting), seen.start_up):
        ready = max(ready, 0.0)
        queue = max(0.0, queue + (rate - workers * max_rate) * (ready - at))
        at, workers = ready, workers + 1
    return queue
