"""The contract of a policy: what it observes, what it decides, and which members it may have.

A policy is asked only while a worker has a free place and rows wait. Its decision depends on the observations that it
has had and on nothing else (no clock, no randomness): the same sequence of observations gives the same decisions. Most
policies use only the latest observation.
"""

from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, Checked, setting
from weir.messages import Reason


class KindState(NamedTuple):
    """The ready workers of one kind.

    Attributes:
        idle: how many of them have no batch.
        running: the batches of the others, each as its rows and the instant at which it began.
    """

    idle: int
    running: tuple[tuple[int, float], ...]


class Observation(NamedTuple):
    """Says what a policy may know about the group of requests whose turn it is.

    Counts are numbers of rows. Instants are in seconds on the clock of `now`; their origin has no meaning.
    """

    now: float
    waiting: int  # rows waiting in this group, at least 1
    oldest_arrival: float
    earliest_deadline: float
    arrivals: int  # rows that have ever arrived at this service, for rate estimates
    last_arrival: float
    idle_places: int  # places free at this moment, at least 1
    workers: int  # workers that are ready, whether free or busy
    max_batch_size: int  # rows
    max_queue_delay: float  # seconds
    draining: bool  # no more requests will be accepted
    kinds: tuple[KindState, ...] = ()  # by the number of the kind; empty while all workers count as alike


class Decision(NamedTuple):
    """Dispatch `rows` rows now, or wait if `rows` is 0.

    The batcher takes fewer rows where fewer fit. After a wait it asks again at the group's next arrival, when another
    place becomes free, or at the instant `until` (seconds) if that is set. The batcher limits every wait, whatever the
    policy says (see batching/forecast.py), and dispatches while it drains, even if the policy wants to wait.

    `reason` and `limit` only explain the decision: `limit` is the number of rows that the policy waits for, if it has
    one. A worker of the kind with the number `kind` gets the batch, if one has a free place; None: any.
    """

    rows: int
    reason: Reason = Reason.POLICY
    until: float | None = None
    limit: int | None = None
    kind: int | None = None


@runtime_checkable
class Policy(Protocol):
    """Decides when a batch is dispatched: all that a policy must have.

    The simple ones that come with Weir are below, those that are solved in online/adaptive.py; PolicyBase lists the
    optional members.
    """

    def decide(self, seen: Observation) -> Decision:
        """Return whether to dispatch, and how many rows, or until when to wait.

        Compare instants with the very expression that `until` was computed with: `seen.now >= seen.oldest_arrival +
        delay`. The form `seen.now - seen.oldest_arrival >= delay` may be false because of rounding just when the timer
        fires.
        """


class PolicyBase(Policy):
    """A policy with every optional member. The defaults suit a policy that has no memory and bounds nothing.

    A policy may derive from this class, or define `max_waiting`, `full` or `fresh` in addition to `decide`: `complete` adds
    the rest.

    Attributes:
        max_waiting: the number of waiting rows at which further arrivals are refused with Overloaded; None: only the
            setting `max_queue_size` bounds the queue. The batcher reads it after every decision.
        adopts_banks: whether a server may replace the policy's bank by calling `adopt`, as it does with a
            SolvedPolicy.
    """

    max_waiting: int | None = None
    adopts_banks: bool = False

    @property
    def largest_batch(self) -> int | None:
        """The largest batch, in rows, whose cost the policy knows: `max_batch_size` must not exceed it. None: any
        size.
        """
        return None

    @property
    def bulk_delay(self) -> float | None:
        """The seconds that bulk work may add to an interactive request, where the setting `bulk_delay` does not say it;
        None: the default of batching/bulk.py.
        """
        return None

    @property
    def remembers(self) -> bool:
        """Whether earlier observations may change a decision: the class overrides `fresh`."""
        return type(self).fresh is not PolicyBase.fresh

    def full(self, now: float) -> int | None:
        """Return `max_waiting` (rows) as of the instant `now` (seconds). Called when an arrival finds the queue full."""
        return self.max_waiting

    def urgency(self, waiting: int) -> float | None:
        """Return how much sooner that many waiting rows (at least 1) must be served than those of the other models that share
        the workers, on a scale that their policies have in common. None: the policy does not know.
        """
        return None

    def fresh(self) -> Policy:
        """Return a policy like this one that has observed nothing. Each service and each simulation uses its own."""
        return self


class CompletedPolicy(PolicyBase):
    """Wraps a policy that does not derive from PolicyBase, and adds the members that it does not define."""

    def __init__(self, own: Policy) -> None:
        self._own: Any = own  # which may have any of the optional members
        self.max_waiting = getattr(own, "max_waiting", None)

    @property
    def bulk_delay(self) -> float | None:
        """The wrapped policy's; None if it does not say."""
        return getattr(self._own, "bulk_delay", None)

    @property
    def remembers(self) -> bool:
        """Whether the wrapped policy's class has a method `fresh`."""
        return hasattr(self._own, "fresh")

    def decide(self, seen: Observation) -> Decision:
        """Return the wrapped policy's decision, and copy its present `max_waiting`."""
        decision: Decision = self._own.decide(seen)
        self.max_waiting = getattr(self._own, "max_waiting", None)
        return decision

    def full(self, now: float) -> int | None:
        """Return the bound (rows) as of `now` (seconds)."""
        return self._own.full(now) if hasattr(self._own, "full") else self.max_waiting

    def urgency(self, waiting: int) -> float | None:
        """Return the urgency of that many rows; None if the wrapped policy has no such method."""
        return self._own.urgency(waiting) if hasattr(self._own, "urgency") else None

    def fresh(self) -> Policy:
        """Return what the wrapped policy's `fresh` returns; the wrapped policy itself if it has no memory."""
        made: Policy = self._own.fresh() if self.remembers else self._own
        return made


def complete(policy: Policy) -> PolicyBase:
    """Return `policy` with all members of PolicyBase: the policy itself if it derives from that class, else wrapped."""
    return policy if isinstance(policy, PolicyBase) else CompletedPolicy(policy)


# Module constants: looking up a member of an enum is slow.
DELAY, IDLE, POLICY, SIZE = Reason.DELAY, Reason.IDLE, Reason.POLICY, Reason.SIZE


def all_of(seen: Observation) -> int:
    """Return how many rows can be dispatched: all that wait, at most a full batch."""
    return min(seen.waiting, seen.max_batch_size)


@dataclass(frozen=True)
class Greedy(PolicyBase):
    """Never wait while a worker has a free place. The default policy, and the baseline for all others."""

    def decide(self, seen: Observation) -> Decision:
        """Dispatch all waiting rows, at most a full batch."""
        if seen.waiting >= seen.max_batch_size:
            return Decision(seen.max_batch_size, SIZE, None, seen.max_batch_size)
        return Decision(seen.waiting, IDLE)


@dataclass(frozen=True)
class SizeOrDelay(Checked, PolicyBase):
    """Wait until `size` rows wait or the oldest has waited for `delay` seconds, whichever comes first."""

    size: int | None = setting(None, "rows to wait for (default: a full batch)", rule=AT_LEAST_ONE)
    delay: float = setting(0.005, "longest wait of the oldest request, in seconds", rule=AT_LEAST_ZERO)

    def decide(self, seen: Observation) -> Decision:
        """Dispatch all waiting rows once there are enough of them or the oldest has waited long enough."""
        size = seen.max_batch_size if self.size is None else min(self.size, seen.max_batch_size)
        if seen.waiting >= size:
            return Decision(all_of(seen), SIZE, None, size)
        end = seen.oldest_arrival + self.delay
        if seen.now >= end:
            return Decision(all_of(seen), DELAY, None, size)
        return Decision(0, DELAY, end, size)


@dataclass(frozen=True)
class FullBatches(Checked, PolicyBase):
    """Dispatch batches of exactly `size` rows. Smaller ones only occur where the batcher ends a wait."""

    size: int | None = setting(None, "rows of each batch (default: max_batch_size)", rule=AT_LEAST_ONE)

    def decide(self, seen: Observation) -> Decision:
        """Dispatch one batch of `size` rows if that many wait."""
        size = seen.max_batch_size if self.size is None else min(self.size, seen.max_batch_size)
        return Decision(size if seen.waiting >= size else 0, SIZE, None, size)


@dataclass(frozen=True)
class ControlLimit(Checked, PolicyBase):
    """Dispatch if and only if at least `limit` rows wait.

    The rule is that of Deb and Serfozo ("Optimal control of batch service queues", Advances in Applied Probability 5,
    1973). They dispatch when the queue exceeds M, so `limit` is their M + 1.
    """

    limit: int = setting(MISSING, "number of waiting rows from which a batch is dispatched", rule=AT_LEAST_ONE)

    def decide(self, seen: Observation) -> Decision:
        """Dispatch all waiting rows, at most a full batch, once the limit is reached."""
        limit = min(self.limit, seen.max_batch_size)
        return Decision(all_of(seen) if seen.waiting >= limit else 0, POLICY, None, limit)
