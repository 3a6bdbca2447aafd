"""What a policy sees and says.

A policy is asked only while a worker has a free place and something waits. It decides by what it has seen and nothing
else (no clock, no randomness): the same sequence of observations gives the same decisions. Most need but the last one.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from weir.messages import Reason


class Observation(NamedTuple):
    """What a policy may know about the group whose turn it is. Counts are in rows, instants in seconds of `now`'s clock."""

    now: float
    waiting: int  # rows waiting in this group, at least 1
    oldest_arrival: float
    earliest_deadline: float
    arrivals: int  # rows that ever arrived at this service (for rate estimates)
    last_arrival: float
    idle_places: int  # places free at this moment, at least 1
    workers: int  # workers that are ready
    max_batch_size: int
    max_queue_delay: float
    draining: bool  # nothing more will come


class Decision(NamedTuple):
    """`rows` > 0: dispatch that many now (the batcher takes fewer if fewer fit). `rows` 0: wait, to be asked again at the
    group's next arrival, when another place becomes free, or at `until` if that is set. The batcher clamps every wait
    (see batcher.py), and while draining it dispatches in spite of it.

    `limit` is the number of rows being waited for, for the explanation, where the policy has one.
    """

    rows: int
    reason: Reason = Reason.POLICY
    until: float | None = None
    limit: int | None = None


@runtime_checkable
class Policy(Protocol):
    """Decides when a batch is cut. See rules.py for the ones that come with Weir, adaptive.py for those that are solved.

    A policy that remembers (a rate, say) has a method `fresh()` that returns one like it without memory: each service
    has its own. One that must keep the line short has an attribute `max_waiting`: rows beyond which arrivals are refused
    with Overloaded, or None; the batcher looks at it with every decision. If it has a method `full(now)`, the batcher asks it
    when a row finds the line full, and what it returns is its `max_waiting` from then on.
    """

    def decide(self, seen: Observation) -> Decision:
        """Say *dispatch n* or *wait until t*. Compare instants with the very expression used for `until`:
        `seen.now >= seen.oldest_arrival + delay`, never `seen.now - seen.oldest_arrival >= delay`, which can be false
        exactly when the timer fires."""
