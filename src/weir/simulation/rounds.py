"""Runs one rule over the arrivals of one queue without the Batcher: a search does so hundreds of times, for speed.

It knows single rows in the order of their arrival, tables, the ends of waits and a bound on the queue, and nothing else. There
it cuts the very batches that the Batcher cuts: tests/simulation/test_rounds.py holds the two equal. The batcher itself then
measures what a search has found. Times are in seconds, unless the name says otherwise.
"""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapreplace
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.policy.cost.objective import ROUNDING, trimmed
from weir.policy.cost.profile import Floats, Profile
from weir.policy.online.adaptive import Mixing
from weir.policy.online.rate import AdmissionGate
from weir.simulation.engine import ServiceTimes

PARTS = 40  # batch means behind an interval


class Rule(NamedTuple):
    """When a batch is cut. Times in seconds.

    `table[n]` rows with n waiting, 0 to wait (tables.py). A wait ends at oldest arrival + `allowance[n]` and at last
    arrival + `silence`; all rows that fit go then. With `fits`, a batch is trimmed (cost/objective.py) so that its oldest row
    starts by oldest arrival + `fits[rows]`. `share` of the batches is decided by `second`, evenly spread. Arrivals are
    refused while `max_waiting` rows wait (0: never), or while the `gate` is closed (online/rate.py).
    """

    table: Sequence[int]
    allowance: Sequence[float] | None = None
    fits: Sequence[float] | None = None
    silence: float = inf
    second: Sequence[int] | None = None
    share: float = 0.0
    max_waiting: int = 0
    gate: AdmissionGate | None = None


class PlayedRounds(NamedTuple):
    """What happened. Times in seconds, batches in order of their start."""

    starts: Floats
    ends: Floats
    sizes: NDArray[np.int64]
    arrivals: Floats  # of the rows served, in their order
    refused: int

    @property
    def responses(self) -> Floats:
        """Response time of each row served, in seconds."""
        return np.asarray(np.repeat(self.ends, self.sizes) - self.arrivals, dtype=np.float64)


class Figures(NamedTuple):
    """What a rule does on one queue. Power beyond what no policy can avoid is `excess_w`: per row of this very queue, so
    that the luck of its arrivals cancels. `late_error` is the standard error of `late_share`, by batch means."""

    response_time_ms: float
    p99_ms: float
    power_w: float
    excess_w: float
    batch_size: float
    late_share: float
    late_error: float
    refused_share: float

    def excess_cost(self, latency_weight: float, energy_weight: float) -> float:
        """Return the cost beyond the unavoidable, for weights per ms and per watt."""
        return latency_weight * self.response_time_ms + energy_weight * self.excess_w


def play(coming: Sequence[float], rule: Rule, services: ServiceTimes, largest: int, workers: int = 1) -> PlayedRounds:
    """Serve rows that arrive at `coming` (seconds, ascending) by `rule`, in batches of at most `largest`.

    The rows that still wait when the last has arrived, and the rule waits, are left out.
    """
    free, last, mixing = [0.0] * workers, 0.0, Mixing()
    line: list[float] = []
    head = seen = refused = 0
    starts: list[float] = []
    ends: list[float] = []
    sizes: list[int] = []
    bound: float = rule.max_waiting or inf
    gate, time, size = rule.gate, services.time, 0
    while True:
        now = max(free[0], last)
        upto = bisect_right(coming, now, seen)
        room = bound - (len(line) - head)
        taken = upto - seen if upto - seen <= room else int(max(room, 0))
        line += coming[seen : seen + taken]
        seen += taken
        if seen < upto:
            refused += upto - seen
            if gate is not None:
                more = _more(coming, seen, upto, gate, size, last)
                line += more
                refused -= len(more)
            seen = upto
        table = rule.second if mixing.second and rule.second is not None else rule.table
        cut = _wait(line, head, now, coming, seen, table, rule, largest)
        if cut is None:
            break
        now, size, seen = cut
        if rule.fits is not None and now > line[head] + rule.fits[size]:
            size = trimmed(size, now - line[head], rule.fits)
        end = now + time(size, head)
        starts.append(now)
        ends.append(end)
        sizes.append(size)
        heapreplace(free, end)
        mixing.cut(rule.share)
        if gate is not None:
            waiting = len(line) - head
            age = now - line[head + size] if waiting > size else 0.0
            after = gate.after(size, waiting, age)
            bound = inf if after is None else after
        last = now
        head += size
    return PlayedRounds(
        np.array(starts), np.array(ends), np.array(sizes, dtype=np.int64), np.array(line[:head]), refused
    )


def _more(
    coming: Sequence[float], start: int, stop: int, gate: AdmissionGate, rows: int, since: float
) -> Sequence[float]:
    """Return those who, of the arrivals from `start` to `stop`, are let in though the queue is full."""
    for index in range(start, stop):
        if more := gate.more(rows, coming[index] - since):
            return coming[index : min(index + more, stop)]
    return ()


def _wait(
    line: list[float], head: int, now: float, coming: Sequence[float], seen: int, table: Sequence[int], rule: Rule,
    largest: int,
) -> tuple[float, int, int] | None:  # fmt: skip
    """Let rows join until the rule cuts: (instant, rows, how many have come). None when no more come."""
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
    """Return the means of `rounds`, two or more, without the batches of the first `warm_up` of the time."""
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
    return Figures(
        response_time_ms=1000.0 * float(responses.mean()),
        p99_ms=1000.0 * float(np.quantile(responses, 0.99)),
        power_w=energy / span_ms,
        excess_w=(energy - unavoidable) / span_ms,
        batch_size=rows / len(sizes),
        late_share=float(late.mean()),
        late_error=float(np.std(means, ddof=1)) / len(means) ** 0.5,
        refused_share=rounds.refused / offered,
    )
