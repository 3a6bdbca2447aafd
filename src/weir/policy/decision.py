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
    """Decides when a batch is cut: all that a policy must have. See rules.py for the ones that come with Weir, adaptive.py for
    those that are solved, and PolicyBase for what else one may have."""

    def decide(self, seen: Observation) -> Decision:
        """Say *dispatch n* or *wait until t*. Compare instants with the very expression used for `until`:
        `seen.now >= seen.oldest_arrival + delay`, never `seen.now - seen.oldest_arrival >= delay`, which can be false
        exactly when the timer fires."""


class PolicyBase(Policy):
    """A policy with all members of the contract; the defaults are those of a policy that remembers nothing and bounds nothing.

    A policy may derive from it, or just define `max_waiting`, `full` or `fresh` beside `decide`: `complete` adds the rest.

    Attributes:
        max_waiting: rows waiting from which on arrivals are refused with Overloaded; None for no bound but that of the
            settings. The batcher reads it after every decision.
        adopts_banks: whether a server may give it another bank by `adopt`, as it may give one to a SolvedPolicy.
    """

    max_waiting: int | None = None
    adopts_banks: bool = False

    @property
    def largest_batch(self) -> int | None:
        """The most rows of a batch that it knows the cost of: `max_batch_size` must not be larger. None: any."""
        return None

    @property
    def remembers(self) -> bool:
        """Whether what it has seen may change what it decides: it has a `fresh` of its own."""
        return type(self).fresh is not PolicyBase.fresh

    def full(self, now: float) -> int | None:
        """Return `max_waiting` as of `now`, in seconds: an arrival found the queue full."""
        return self.max_waiting

    def fresh(self) -> Policy:
        """Return a policy like this one without memory. Each service, and each simulation, has its own."""
        return self


@runtime_checkable
class _Bounding(Protocol):
    max_waiting: int | None


@runtime_checkable
class _Extending(Protocol):
    def full(self, now: float) -> int | None: ...


@runtime_checkable
class _Remembering(Protocol):
    def fresh(self) -> Policy: ...


class CompletedPolicy(PolicyBase):
    """A policy that is not derived from PolicyBase, with the defaults for those members that it does not define."""

    def __init__(self, own: Policy) -> None:
        self._own = own
        self._bounding = own if isinstance(own, _Bounding) else None
        self._extending = own if isinstance(own, _Extending) else None
        self._remembering = own if isinstance(own, _Remembering) else None
        if self._bounding is not None:
            self.max_waiting = self._bounding.max_waiting

    @property
    def remembers(self) -> bool:
        """Whether its class has a method `fresh`."""
        return self._remembering is not None

    def decide(self, seen: Observation) -> Decision:
        """Decide, and take over the bound that the policy has now."""
        decision = self._own.decide(seen)
        if self._bounding is not None:
            self.max_waiting = self._bounding.max_waiting
        return decision

    def full(self, now: float) -> int | None:
        """Return the bound as of `now`."""
        return self.max_waiting if self._extending is None else self._extending.full(now)

    def fresh(self) -> Policy:
        """Return what `fresh` of the policy does; the policy itself where it remembers nothing."""
        return self._own if self._remembering is None else self._remembering.fresh()


def complete(policy: Policy) -> PolicyBase:
    """Return `policy` with all members of PolicyBase: itself if it is derived from that."""
    return policy if isinstance(policy, PolicyBase) else CompletedPolicy(policy)
