"""A policy of one's own: wait as long as it pays.

    weir serve square.py:Square --policy examples/policies/patient.py:Patient:longest=20ms

Requests often come in bursts. `Patient` dispatches when a burst has ended: nothing has arrived for `lull` seconds, or the
oldest has waited `longest` seconds, or a batch is full.
"""

from dataclasses import dataclass

from weir.messages import Reason
from weir.policy.decision import Decision, Observation


@dataclass(frozen=True)
class Patient:
    """Wait for the end of a burst. `lull`: how long nothing must arrive; `longest`: the bound; both in seconds."""

    lull: float = 0.001
    longest: float = 0.01

    def decide(self, seen: Observation) -> Decision:
        """Dispatch at the end of a burst."""
        if seen.waiting >= seen.max_batch_size:
            return Decision(seen.max_batch_size, Reason.SIZE)
        # An instant, compared with the very expression that arms the timer: see Policy.decide.
        end = min(seen.last_arrival + self.lull, seen.oldest_arrival + self.longest)
        if seen.now >= end:
            return Decision(seen.waiting, Reason.POLICY)
        return Decision(0, until=end)
