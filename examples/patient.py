"""A policy of one's own: `weir serve examples.square:Square --policy examples.patient:Patient:horizon=2ms`."""

from dataclasses import dataclass

from weir import Decision, Observation, Reason


@dataclass(frozen=True)
class Patient:
    """Waits up to `horizon` seconds for a full batch, but only while requests keep coming: it gives up when none has
    come for a third of that."""

    horizon: float = 0.01

    def decide(self, seen: Observation) -> Decision:
        """Dispatch a full batch, or what there is when waiting has lost its point."""
        if seen.draining or seen.waiting >= seen.max_batch_size:
            return Decision(min(seen.waiting, seen.max_batch_size), Reason.SIZE)
        end = min(seen.oldest_arrival + self.horizon, seen.last_arrival + self.horizon / 3)
        if seen.now >= end:  # the very expression that is waited for: see docs/how-to/write-a-policy.md
            return Decision(seen.waiting, Reason.DELAY)
        return Decision(0, until=end)
