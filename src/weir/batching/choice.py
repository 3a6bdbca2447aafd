"""Ask the policy, and hold its answer within bounds.

Every wait is clamped to oldest + max_queue_delay and to the earliest deadline - the service time in which most batches are
done: no request starves, and none is held until it can no longer make it. The clamps are instants, compared with the
very values that arm the timer.
"""

from typing import NamedTuple

from weir.batching.estimate import ServiceTime
from weir.messages import Reason
from weir.policy.decision import Decision, Observation

MARGIN = 0.001  # seconds between the end of a batch and the answer at its caller
# Members of an enum are looked up slowly.
DEADLINE, DELAY, DRAIN, EXPRESS = Reason.DEADLINE, Reason.DELAY, Reason.DRAIN, Reason.EXPRESS
IDLE, POLICY = Reason.IDLE, Reason.POLICY


class Choice(NamedTuple):
    """`rows` > 0: cut a batch of up to that many, for `reason`. 0: wait until `until`, which is after now."""

    rows: int
    reason: Reason
    until: float
    limit: int | None


def bounded(decision: Decision, seen: Observation, service: ServiceTime) -> Choice:
    """Return what a policy has decided, within the bounds. A batch that is not too large is within them."""
    rows, reason, until, limit = decision
    largest = seen.max_batch_size
    if rows > 0:
        return Choice(min(rows, largest), reason, seen.now, limit)
    if seen.draining:
        return Choice(largest, DRAIN, seen.now, limit)
    clamped, reason = clamp(seen, until, service)
    return Choice(0 if seen.now < clamped else largest, reason, clamped, limit)


def clamp(seen: Observation, until: float | None, service: ServiceTime) -> tuple[float, Reason]:
    """Return when a wait ends at the latest, and why then."""
    end, reason = seen.oldest_arrival + seen.max_queue_delay, DELAY
    latest_start = seen.earliest_deadline - service.upper(min(seen.waiting, seen.max_batch_size)) - MARGIN
    if latest_start < end:
        end, reason = latest_start, DEADLINE
    if until is not None and until < end:
        end, reason = until, POLICY
    return end, reason


def greedily(seen: Observation) -> Choice:
    """Return the choice that replaces that of a policy which raised."""
    return Choice(min(seen.waiting, seen.max_batch_size), IDLE, seen.now, None)


def at_once(seen: Observation) -> Choice:
    """Return the choice for express calls, about which no policy is asked."""
    return Choice(min(seen.waiting, seen.max_batch_size), EXPRESS, seen.now, None)
