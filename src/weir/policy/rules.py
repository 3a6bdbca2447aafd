"""The simple policies that come with Weir. (The solved ones are in online/adaptive.py.)

Each is a frozen dataclass whose fields are its settings. None has a memory: the same observation gives the same
decision.
"""

from dataclasses import MISSING, dataclass

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, Checked, setting
from weir.messages import Reason
from weir.policy.decision import Decision, Observation, PolicyBase

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
