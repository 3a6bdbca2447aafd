"""Runs one rule over the arrivals of one queue without the Batcher, which is faster: a search does so hundreds of
times.

It knows single rows in the order of their arrival, tables, the ends of waits and bounds on the queue, and nothing
else. Within that it cuts the same batches as the Batcher: tests/simulation/test_rounds.py holds the two equal. The
Batcher itself then measures what a search has found. Times are in seconds, unless the name says otherwise.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heapreplace
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.policy.cost.objective import ROUNDING, trimmed
from weir.policy.cost.profile import Floats, Profile
from weir.policy.online.admission import AdmissionGate, AdmissionPlan
from weir.simulation.engine import ServiceTimes

CLUMP = 10.0  # rows that are refused together
PARTS = 40  # batch means from which a standard error is estimated


class Rule(NamedTuple):
    """When a batch is dispatched.

    Attributes:
        table: rows to dispatch by rows waiting, 0 to wait (see policy/solve/tables.py).
        allowance: by rows waiting, seconds after the oldest arrival at which a wait ends; all rows that fit are then
            dispatched.
        fits: by rows, seconds after the oldest arrival by which a batch must start for that row to be in time. If
            given, batches are trimmed to that (see `trimmed` in policy/cost/objective.py).
        silence: seconds after the last arrival at which a wait ends.
        max_waiting: arrivals are refused while so many rows wait; 0: never.
        gate: arrivals are also refused as it says (see policy/online/admission.py).
    """

    table: Sequence[int]
    allowance: Sequence[float] | None = None
    fits: Sequence[float] | None = None
    silence: float = inf
    max_waiting: int = 0
    gate: AdmissionGate | None = None


class PlayedRounds(NamedTuple):
    """What happened. Instants are in seconds, batches in the order of their start.

    Attributes:
        starts, ends, sizes: of the batches, sizes in rows; shape (batches,).
        arrivals: of the rows that were served, in their order; shape (rows,).
        refused: number of rows refused.
    """

    starts: Floats
    ends: Floats
    sizes: NDArray[np.int64]
    arrivals: Floats  # of the rows served, in their order
    refused: int

    @property
    def responses(self) -> Floats:
        """Response time in seconds of each row that was served; shape (rows,)."""
        return np.asarray(np.repeat(self.ends, self.sizes) - self.arrivals, dtype=np.float64)


class Figures(NamedTuple):
    """What a rule does on one queue.

    Attributes:
        response_time_ms: mean response time in ms of the rows that are served.
        p99_ms: within which 99 % of all rows are answered, in ms; infinite if more are refused.
        power_w: mean power in watts.
        excess_w: power in watts beyond the unavoidable, which is counted per row of this very queue, so that the
            chance in its arrivals cancels.
        batch_size: mean rows of a batch.
        late_share: share of the responses that are late.
        late_error: its standard error, by batch means.
        refused_share: share of all rows that are refused.
        refused_error: about its standard error, if rows are refused CLUMP at a time.
    """

    response_time_ms: float
    p99_ms: float
    power_w: float
    excess_w: float
    batch_size: float
    late_share: float
    late_error: float
    refused_share: float
    refused_error: float


def play(coming: Sequence[float], rule: Rule, services: ServiceTimes, largest: int, workers: int = 1) -> PlayedRounds:
    """Serve rows that arrive at `coming` (seconds, ascending) by `rule`, in batches of at most `largest` rows.

    Rows for which the rule still waits after the last arrival are left out.
    """
    free = [0.0] * workers
    line: list[float] = []
    head = seen = refused = 0
    starts: list[float] = []
    ends: list[float] = []
    sizes: list[int] = []
    bound: float = rule.max_waiting or inf
    gate, time, plan = rule.gate, services.time, AdmissionPlan()
    while True:
        now = max(free[0], plan.next if starts else 0.0)
        upto = bisect_right(coming, now, seen)
        while seen < upto:
            room = bound - (len(line) - head)
            taken = upto - seen if upto - seen <= room else int(max(room, 0))
            line += coming[seen : seen + taken]
            seen += taken
            if seen < upto and (gate is None or not starts or bound == plan.full(coming[seen])):
                # Full until a row may begin another batch.
                after = upto if gate is None or not starts else bisect_left(coming, plan.opens, seen + 1, upto)
                refused += after - seen
                seen = after
            elif seen < upto:
                bound = plan.bound
        cut = _wait(line, head, now, coming, seen, rule, largest)
        if cut is None:
            break
        now, size, seen = cut
        if rule.fits is not None and now > line[head] + rule.fits[size]:
            size = trimmed(size, now - line[head], rule.fits, plan.first)
        end = now + time(size, head)
        starts.append(now)
        ends.append(end)
        sizes.append(size)
        if gate is not None:
            waiting, idle = len(line) - head, sum(each <= now for each in free)
            plan.dispatch(gate, size, waiting, now, line[head], line[-1], idle, workers)
            bound = plan.bound
        heapreplace(free, end)
        head += size
    return PlayedRounds(
        np.array(starts), np.array(ends), np.array(sizes, dtype=np.int64), np.array(line[:head]), refused
    )


def _wait(
    line: list[float], head: int, now: float, coming: Sequence[float], seen: int, rule: Rule, largest: int
) -> tuple[float, int, int] | None:
    """Let rows join until the rule dispatches. Return the instant, the rows, and how many have arrived; None at the
    end.
    """
    table = rule.table
    waiting, total, end = len(line) - head, len(coming), len(table) - 1
    if not waiting:
        if seen == total:
            return None
        now = coming[seen]
        line.append(now)
        seen, waiting = seen + 1, 1
    oldest, allowance, silence = line[head], rule.allowance, rule.silence
    while not (size := table[waiting if waiting < end else end]):
        until = line[-1] + silence
        if allowance is not None:
            until = min(until, oldest + allowance[waiting if waiting < largest else largest])
        if now >= until:
            return now, min(waiting, largest), seen
        if seen == total:
            return None
        if coming[seen] > until:
            return until, min(waiting, largest), seen
        now = coming[seen]
        line.append(now)
        seen, waiting = seen + 1, waiting + 1
    return now, size, seen


def figures(rounds: PlayedRounds, profile: Profile, deadline: float = inf, warm_up: float = 0.02) -> Figures:
    """Return the means over `rounds`, at least two batches, without the batches of the first share `warm_up` of the
    time.

    `deadline` is the response time in seconds beyond which a response is late.
    """
    first = int(np.searchsorted(rounds.starts, rounds.starts[-1] * warm_up))
    sizes = rounds.sizes[first:]
    responses = rounds.responses[int(rounds.sizes[:first].sum()) :] + profile.latency_offset_ms / 1000.0
    energy = float(profile.energy_mj[sizes - 1].sum())
    rows = int(sizes.sum())
    unavoidable = rows * float(np.min(profile.energy_mj / profile.sizes))
    span_ms = 1000.0 * float(rounds.starts[-1] - rounds.starts[first])
    late = responses > deadline + 2.0 * ROUNDING
    means = late[: len(late) // PARTS * PARTS].reshape(PARTS, -1).mean(axis=1) if len(late) >= PARTS else late
    offered = len(rounds.arrivals) + rounds.refused
    refused = rounds.refused / offered
    return Figures(
        response_time_ms=1000.0 * float(responses.mean()),
        p99_ms=1000.0 * float(np.quantile(responses, 0.99 / (1.0 - refused))) if refused < 0.01 else inf,
        power_w=energy / span_ms,
        excess_w=(energy - unavoidable) / span_ms,
        batch_size=rows / len(sizes),
        late_share=float(late.mean()),
        late_error=float(np.std(means, ddof=1)) / len(means) ** 0.5,
        refused_share=refused,
        refused_error=(CLUMP * refused / offered) ** 0.5,
    )
