"""Forecasts from the service times that were learned: how fast the queue moves, and which requests can still meet their deadlines; and what the
batcher does about a policy's decision, within the bounds on batch size and waiting.

Every wait of a policy is clamped to the oldest arrival + max_queue_delay, and to the earliest deadline - the service time in which most batches
are done: no request starves, and none waits until its deadline can no longer be met. The clamps are instants, compared with the same values that
arm the timer.
"""

from math import inf
from typing import NamedTuple

from weir.batching import BatchingSettings
from weir.batching.group import FifoQueue, Group
from weir.batching.padded import length_of
from weir.batching.queue import RequestQueue
from weir.batching.request_state import is_gone
from weir.batching.service_time import ServiceTime
from weir.batching.workers import Places
from weir.messages import Reason, Request
from weir.policy.decision import Decision, Observation

UNKNOWN_WAIT = 1.0  # seconds; what Retry-After says before anything was measured

# The factors by which the margin of `start_cutoff` grows with each batch that missed a deadline, and shrinks with each other batch.
MARGIN_GROWTH, MARGIN_DECAY = 1.5, 0.99
FIRST_MARGIN = 0.1  # the first margin, as a part of the time of a batch

# A request may wait for a turn of the driver's loop before it is read, and its response for another turn.
TURNS, TURN_FADE = 2.0, 0.9

MARGIN = 0.001  # seconds from the end of a batch until its caller has the response
# As constants, because to look a member of an enum up is slow.
DEADLINE, DELAY, DRAIN, EXPRESS = Reason.DEADLINE, Reason.DELAY, Reason.DRAIN, Reason.EXPRESS
BULK, IDLE, POLICY = Reason.BULK, Reason.IDLE, Reason.POLICY


class QueueForecast:
    """Forecasts for one queue and its workers. Rates are in rows per second, of all workers together.

    `margin` is how many seconds before its deadline a request must be expected to have its response, to be started while more wait than can have theirs
    in time. `turn` is how many seconds a turn of the driver's loop takes: about the longest of the last turns.
    """

    def __init__(self, settings: BatchingSettings, service: ServiceTime, queue: RequestQueue, places: Places) -> None:
        self._largest = settings.max_batch_size
        self._max_rows = settings.max_queue_size
        self._padded = settings.padded
        self._service = service
        self._queue = queue
        self._places = places
        self.margin = 0.0
        self.turn = 0.0

    def rate(self, waiting: int) -> float:
        """Return the rows per second that all workers serve together while `waiting` rows wait."""
        rows = self._service.typical_rows() if len(self._queue.groups) > 1 else waiting
        return self._service.rate(max(1, int(min(rows, self._largest)))) * max(1, len(self._places))

    def best_rate(self, now: float) -> float:
        """Return the rows per second that all workers serve together in full batches; infinity while too little is known."""
        is_known = self._service.is_trusted(now) and len(self._places)
        return self.rate(self._largest) if is_known else inf

    def drain_time(self, running: int) -> float:
        """Return how many seconds the queue and the `running` rows will take; 1 s if nothing is known."""
        waiting = self._queue.waiting
        rate = self.rate(waiting)
        return (waiting + running / 2) / rate if 0.0 < rate < inf else UNKNOWN_WAIT

    def time_in_sight(self) -> float:
        """Return in how many seconds a request that arrives now certainly has its response, unless the queue grows a lot meanwhile."""
        rows = min(self._max_rows, 2 * self._queue.waiting + 16 * self._largest)
        return self._service.upper(self._largest) + (rows + self._largest) / self.rate(rows)

    def cannot_make_it(self, request: Request, now: float) -> bool:
        """Return whether the response would be late even in a good case: after the requests that are certainly served before it, and its own service."""
        if not self._service.is_trusted(now) or not len(self._places):
            return False
        group = self._queue.groups.get(request.form.key)
        queue = FifoQueue() if group is None else group.queue_of(request)
        rate = self.rate(self._queue.waiting)
        done = now + self._service.alone(min(request.form.rows, self._largest), length_of(request))
        if done + queue.ahead(request) / rate < request.deadline:
            return False
        return not self._padded or done + _before(queue, request) / rate >= request.deadline

    def start_cutoff(self, seen: Observation, rows: int, group: Group, service: ServiceTime) -> float:
        """Return the instant after which the deadline of a request must lie for it to be started on a worker with the times `service`.

        While more rows wait than fit into the batch, only requests are started that will very likely meet their deadlines, with a margin that was
        learned from those that did not; where no request has that much time to spare, the last arrivals are started. Otherwise only requests are
        left out that have hardly a chance.
        """
        if seen.earliest_deadline == inf or not service.is_trusted(seen.now):
            return seen.now
        if seen.waiting <= rows:
            return seen.now + service.lower(seen.waiting)
        needed = service.upper(rows)
        spare = seen.earliest_deadline - seen.oldest_arrival - needed
        margin = min(max(self.margin, TURNS * self.turn), spare / 2.0)
        if margin <= 0.0:
            return seen.now + needed
        return seen.now + max(needed, min(needed + margin, group.last_deadline(rows) - seen.now))

    def missed(self, request: Request) -> None:
        """Note that `request` was started and had no response by its deadline: leave more time from now on, up to half of what it had to spare.

        Under overload every request that is started is as old as `start_cutoff` allows. The time that it takes a request to come here and its response
        to go back is unknown to this server; without a margin it would make all responses late rather than a few.
        """
        needed = self._service.upper(self._largest)
        grown = max(FIRST_MARGIN * needed, MARGIN_GROWTH * self.margin)
        self.margin = max(self.margin, min(grown, (request.form.timeout - needed) / 2.0))

    def made_it(self) -> None:
        """Note that a batch came back and missed no deadline: leave a little less time."""
        self.margin *= MARGIN_DECAY


def _before(queue: FifoQueue, request: Request) -> int:
    """Return how many requests of a padded queue are certainly served before `request`: the tag and the deadline both say so."""
    deadline, tag = request.deadline, request.tag
    return sum(each.deadline <= deadline and each.tag <= tag for each in queue.waiting if not is_gone(each))


class Choice(NamedTuple):
    """Tells the batcher what to do about a group: cut a batch of up to `rows` for `reason`; or, if `rows` is 0, wait until `until`, which is after now."""

    rows: int
    reason: Reason
    until: float
    limit: int | None
    kind: int | None = None  # of the worker that gets the batch


def bounded(decision: Decision, seen: Observation, service: ServiceTime) -> Choice:
    """Return the choice that a policy's decision comes to within the bounds on batch size and waiting."""
    rows, reason, until, limit, kind = decision
    largest = seen.max_batch_size
    if rows > 0:
        return Choice(min(rows, largest), reason, seen.now, limit, kind)
    if seen.draining:
        return Choice(largest, DRAIN, seen.now, limit, kind)
    clamped, reason = clamp(seen, until, service)
    return Choice(0 if seen.now < clamped else largest, reason, clamped, limit, kind)


def clamp(seen: Observation, until: float | None, service: ServiceTime) -> tuple[float, Reason]:
    """Return the instant at which a wait ends, and the reason: the policy's `until`, or an earlier bound."""
    end, reason = seen.oldest_arrival + seen.max_queue_delay, DELAY
    latest_start = seen.earliest_deadline - service.upper(min(seen.waiting, seen.max_batch_size)) - MARGIN
    if latest_start < end:
        end, reason = latest_start, DEADLINE
    if until is not None and until < end:
        end, reason = until, POLICY
    return end, reason


def greedily(seen: Observation) -> Choice:
    """Return the choice that is made when the policy raises."""
    return Choice(min(seen.waiting, seen.max_batch_size), IDLE, seen.now, None)


def at_once(seen: Observation) -> Choice:
    """Return the choice for a group of express calls, about which no policy is asked."""
    return Choice(min(seen.waiting, seen.max_batch_size), EXPRESS, seen.now, None)
