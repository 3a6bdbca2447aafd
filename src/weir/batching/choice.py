"""What the batcher does about a policy's decision, within the bounds on batch size and waiting.

Every wait of a policy is clamped to the oldest arrival + max_queue_delay, and to the earliest deadline - the service time in which most batches
are done: no request starves, and none waits until its deadline can no longer be met. The clamps are instants, compared with the same values that
arm the timer.
"""

from typing import NamedTuple

from weir.batching.service_time import ServiceTime
from weir.messages import Reason
from weir.policy.decision import Decision, Observation

MARGIN = 0.001  # seconds from the end of a batch until its caller has the answer
# As constants, because to look a member of an enum up is slow.
DEADLINE, DELAY, DRAIN, EXPRESS = Reason.DEADLINE, Reason.DELAY, Reason.DRAIN, Reason.EXPRESS
BULK, IDLE, POLICY = Reason.BULK, Reason.IDLE, Reason.POLICY


class Choice(NamedTuple):
    """What the batcher does about a group: cut a batch of up to `rows` for `reason`; or, if `rows` is 0, wait until `until`, which is after now."""

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
