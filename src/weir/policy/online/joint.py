"""Policies by tables that were solved jointly: for all models on a device, or for both kinds of workers of a model.

A `DevicePolicy` is that of one model among several that share a device. Its table is for the present rates of all models; when
they change, another policy takes its place.

An `UnevenPolicy` is that of a model with two kinds of workers.

A batch that runs is expected to take the time of its kind's profile. One that takes longer is expected to go on for as long
as it is late: then a worker that was left idle for its sake starts after all.

A wait for more rows ends at the same instants as that of a SolvedPolicy: when the traffic has most likely stopped, and when
the rows that the table waits for do not come (see online/rate.py).
"""

from dataclasses import asdict
from math import inf
from typing import Any

import numpy as np

from weir.messages import Reason
from weir.policy.decision import Decision, Greedy, KindState, Observation, PolicyBase
from weir.policy.online.arrivals import Rate
from weir.policy.online.rate import decisions_of, end_of_wait, filling_for, filling_of
from weir.policy.solve.device import DeviceTable
from weir.policy.solve.tables import limit_of
from weir.policy.solve.uneven import STEPS, Rows, UnevenBank

_GREEDY = Greedy()
_POLICY = Reason.POLICY


class DevicePolicy(PolicyBase):
    """Decides by `table`. `estimate` of the arrival rate is its own unless it is given."""

    def __init__(self, table: DeviceTable, estimate: Rate | None = None) -> None:
        self.table = table
        self._limit = limit_of(table.table)
        self._decisions, self._filling = decisions_of(table.table, self._limit), filling_of(table.table)
        self._estimate = estimate or Rate()

    def decide(self, seen: Observation) -> Decision:
        """Return how many rows to dispatch, or until when to wait. See Policy."""
        rate, waiting, decisions = self._estimate.observe(seen.now, seen.arrivals), seen.waiting, self._decisions
        decision = decisions[waiting] if waiting < len(decisions) else decisions[-1]
        if decision is not None:
            return decision
        if not rate or waiting >= seen.max_batch_size:
            return _GREEDY.decide(seen)
        until = end_of_wait(seen, rate, self._filling)
        if seen.now < until:
            return Decision(0, Reason.POLICY, until, self._limit)
        return Decision(waiting, Reason.POLICY, None, self._limit)

    def urgency(self, waiting: int) -> float:
        """See PolicyBase: comparable with that of the policies whose tables were solved together with this one."""
        return self.table.urgency_of(waiting)

    def explain(self) -> dict[str, Any]:
        """Return the limit in rows, and the urgency of that many rows and of twice as many, as a JSON-able dict."""
        urgency = {str(rows): self.table.urgency_of(rows) for rows in (self._limit, 2 * self._limit)}
        return {"limit": self._limit, "urgency": urgency}

    def fresh(self) -> "DevicePolicy":
        """Return a policy with the same table that has observed nothing."""
        return DevicePolicy(self.table)


class UnevenPolicy(PolicyBase):
    """Decides by `bank`. `estimate` of the arrival rate is its own unless it is given.

    Greedy until the rate is known, on the first kind if it has a free worker; and while that kind has no worker, or workers
    count as alike.
    """

    def __init__(self, bank: UnevenBank, estimate: Rate | None = None) -> None:
        self.bank = bank
        self._numbers = [each.number for each in bank.kinds]
        self._estimate = estimate or Rate()
        self._times: list[tuple[float, ...]] = [
            (0.0, *(each.profile.service_time_ms / 1000.0).tolist()) for each in bank.kinds
        ]
        self._steps = [kind.step_ms(steps) / 1000.0 for kind, steps in zip(bank.kinds, STEPS, strict=True)]
        self._left_idle: dict[str, Any] | None = None  # the last wait of the second kind

    def decide(self, seen: Observation) -> Decision:
        """Return how many rows to dispatch and on which kind, or until when to wait. See Policy."""
        rate = self._estimate.observe(seen.now, seen.arrivals)
        if len(seen.kinds) <= max(self._numbers):
            return _GREEDY.decide(seen)
        if not rate:
            return _GREEDY.decide(seen)._replace(kind=self._numbers[0])
        table = self.bank.tables[self.bank.at(rate)]
        kinds = [seen.kinds[number] for number in self._numbers]
        ends = [self._end(index, kind) for index, kind in enumerate(kinds)]
        if ends[0] == inf:  # what the second kind leaves to the first would wait in vain
            return _GREEDY.decide(seen)
        steps = [self._steps_until(index, ends[index], seen.now) for index in (0, 1)]
        if kinds[0].idle:
            first = table.first[steps[1]]
            if rows := _entry(first, seen):
                return Decision(rows, _POLICY, None, _limit(first), self._numbers[0])
        second = table.second[steps[0]]
        if kinds[1].idle and (rows := _entry(second, seen)) and not self._would_miss(rows, ends[0], seen):
            return Decision(rows, _POLICY, None, _limit(second), self._numbers[1])
        if kinds[0].idle:
            return self._wait_for_rows(table.first[steps[1]], rate, seen)
        return self._wait_for_first(table.second, ends[0], seen)

    def _end(self, index: int, kind: KindState) -> float:
        """Return the instant at which a worker of a kind is expected to be idle: -infinity if one is, infinity if there is none."""
        if kind.idle:
            return -inf
        times = self._times[index]
        return min((began + times[min(rows, len(times) - 1)] for rows, began in kind.running), default=inf)

    def _steps_until(self, index: int, end: float, now: float) -> int:
        """Return in how many steps of a kind one of its workers is idle, if that is expected at `end`."""
        if end == -inf:
            return 0
        left = abs(end - now)  # what is late goes on for as long as it is late
        return int(min(max(left / self._steps[index] + 0.5, 1.0), float(STEPS[index])))

    def _would_miss(self, rows: int, end: float, seen: Observation) -> bool:
        """Return whether the earliest deadline is kept by the first kind, idle at `end`, but not by the second now."""
        left: float = seen.earliest_deadline - seen.now
        return self._times[1][rows] > left >= max(end - seen.now, 0.0) + self._times[0][rows]

    def _wait_for_rows(self, first: Rows, rate: float, seen: Observation) -> Decision:
        """Wait for that many rows that the first kind, which is idle, starts; or until they are not expected any more."""
        limit, waiting = _limit(first), seen.waiting
        until = end_of_wait(seen, rate, filling_for(float(limit or len(first))))
        if seen.now < until and waiting < seen.max_batch_size:
            return Decision(0, _POLICY, until, limit, self._numbers[0])
        return Decision(min(waiting, seen.max_batch_size), _POLICY, None, limit, self._numbers[0])

    def _wait_for_first(self, second: Rows, end: float, seen: Observation) -> Decision:
        """Leave the second kind idle until the first is, which is expected at `end`."""
        waiting = min(seen.waiting, second.shape[1] - 1)
        self._left_idle = {"kind": self.bank.kinds[1].name, "waiting": seen.waiting, "first_idle_in": end - seen.now}
        starts = np.flatnonzero(second[1:, waiting])
        until = end + self._steps[0] * (1 + int(starts[0])) if len(starts) else None
        if until is not None and until <= seen.now:
            until = None
        return Decision(0, _POLICY, until, None, self._numbers[0])

    def explain(self) -> dict[str, Any]:
        """Return the kinds, from how many waiting rows on each starts, and when the second was last left idle, as a JSON-able
        dict.

        `second_starts_at` is by how much of its longest batch the first kind still has to do: a quarter, half, all of it.
        """
        rate = self._estimate.value
        index = self.bank.at(rate)
        table = self.bank.tables[index]
        kinds: list[dict[str, Any]] = [
            {"kind": each.name, "workers": each.workers, "max_rate": each.max_rate} for each in self.bank.kinds
        ]
        parts = {"0.25": STEPS[0] // 4, "0.5": STEPS[0] // 2, "1": STEPS[0]}
        starts_at = _limit(table.first[STEPS[1]])
        return {
            "capacity": sum(each["max_rate"] for each in kinds),
            "workers": sum(each["workers"] for each in kinds),
            "prices": asdict(self.bank.prices),
            "table": {"index": index, "rate": self.bank.rates[index], "limit": starts_at},
            "kinds": kinds,
            "rate": rate or None,
            "first_starts_at": starts_at,
            "second_starts_at": {part: _limit(table.second[steps]) for part, steps in parts.items()},
            "left_idle": self._left_idle,
        }

    def fresh(self) -> "UnevenPolicy":
        """Return a policy with the same tables that has observed nothing."""
        return UnevenPolicy(self.bank)


def _entry(table: Rows, seen: Observation) -> int:
    """Return the batch of `table`, by rows waiting, within the bound on its size."""
    return min(int(table[min(seen.waiting, len(table) - 1)]), seen.max_batch_size)


def _limit(table: Rows) -> int | None:
    """Return the least rows waiting with which `table` starts a batch; None if it never does."""
    starts = np.flatnonzero(table)
    return int(starts[0]) if len(starts) else None
