"""The policy of one model among several that share a device: it decides by the table that was solved for all of them.

The table is for the present rates of all models; when they change, another policy takes its place. A wait ends at the same
instants as that of a SolvedPolicy: when the traffic has most likely stopped, and when the rows that the table waits for
do not come (see online/rate.py).
"""

from typing import Any

from weir.messages import Reason
from weir.policy.decision import Decision, Observation, PolicyBase
from weir.policy.online.arrivals import Rate
from weir.policy.online.rate import SILENCE, answers_of, filling_of
from weir.policy.rules import Greedy
from weir.policy.solve.device import DeviceTable
from weir.policy.solve.tables import limit_of

_GREEDY = Greedy()


class DevicePolicy(PolicyBase):
    """Decides by `table`. `estimate` of the arrival rate is its own unless it is given."""

    def __init__(self, table: DeviceTable, estimate: Rate | None = None) -> None:
        self.table = table
        self._limit = limit_of(table.table)
        self._answers, self._filling = answers_of(table.table, self._limit), filling_of(table.table)
        self._estimate = estimate or Rate()

    def decide(self, seen: Observation) -> Decision:
        """Return how many rows to dispatch, or until when to wait. See Policy."""
        rate, waiting, answers = self._estimate.observe(seen.now, seen.arrivals), seen.waiting, self._answers
        answer = answers[waiting] if waiting < len(answers) else answers[-1]
        if answer is not None:
            return answer
        if not rate or waiting >= seen.max_batch_size:
            return _GREEDY.decide(seen)
        until = min(seen.last_arrival + SILENCE / rate, seen.oldest_arrival + self._filling / rate)
        if seen.now < until:
            return Decision(0, Reason.POLICY, until, self._limit)
        return Decision(waiting, Reason.POLICY, None, self._limit)

    def urgency(self, waiting: int) -> float:
        """See PolicyBase: comparable with that of the policies whose tables were solved together with this one."""
        return self.table.urgency_of(waiting)

    def explain(self) -> dict[str, Any]:
        """Return the limit in rows, and the urgency of so many rows and of twice as many, as a JSON-able dict."""
        urgency = {str(rows): self.table.urgency_of(rows) for rows in (self._limit, 2 * self._limit)}
        return {"limit": self._limit, "urgency": urgency}

    def fresh(self) -> "DevicePolicy":
        """Return a policy with the same table that has observed nothing."""
        return DevicePolicy(self.table)
