"""What a run measured of one target."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.bench.load import Load
from weir.bench.rounds import Round
from weir.bench.target import OK, TIMEOUT, UNSENT, Batches, batches_of
from weir.simulation.statistics import STRETCHES, Estimate, estimate

Floats = NDArray[np.float64]

_FEWEST = 10  # stretches that an interval is made of
_ROUNDING = 1e-9  # seconds; an instant is a difference of two on a clock that may have run for months


class Lag(NamedTuple):
    """How much later than intended requests left, in ms: our own doing, not the server's. One that never left, for want of a
    connection, counts with the time until it was given up."""

    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What was measured of one target, without warm-up (but for `batches`).

    Response times are in ms, from the instant at which a request was *meant* to leave; those of requests that were given up
    count until then. Estimates have 95 % intervals (batch means; infinite where the requests are too few for one). `rate`
    is what was meant, `sent_rate` what left and `throughput` the good answers, all per second of load. `errors` counts the
    failed requests by what went wrong.
    """

    target: str
    rate: float | None
    sent_rate: float
    throughput: float
    requests: int
    answered: int  # well
    timeouts: int
    unfinished: int  # never sent, for want of a connection, or without any end
    errors: dict[str, int]
    response_time_ms: Estimate
    p50_ms: Estimate
    p90_ms: Estimate
    p95_ms: Estimate
    p99_ms: Estimate
    p999_ms: Estimate
    max_ms: float
    lag: Lag
    connections: int | None
    held: int  # requests that waited for a connection because no more were allowed
    batches: Batches | None
    times_ms: Floats  # each response time, in the order in which requests were meant to leave
    instants: Floats  # seconds from the start of the run (rounds laid end to end) at which they were


def make_outcome(target: str, load: Load, rounds: Sequence[Round], connections: int | None, held: int) -> Outcome:
    """Return what `rounds` of one target say together."""
    parts = [_counted(each, load, index * load.round_seconds) for index, each in enumerate(rounds)]
    times, instants = (np.concatenate([getattr(part, name) for part in parts]) for name in ("times_ms", "instants"))
    seconds = (load.round_seconds - load.warm_up) * len(rounds)
    ends: dict[str, int] = {}
    for part in parts:
        for kind, count in part.ends.items():
            ends[kind] = ends.get(kind, 0) + count
    lags = np.concatenate([part.lags_ms for part in parts])
    counts = [each.counts for each in rounds if each.counts is not None]
    return Outcome(
        target=target,
        rate=load.rate,
        sent_rate=sum(part.sent_in_time for part in parts) / seconds,
        throughput=sum(part.answered_in_time for part in parts) / seconds,
        requests=sum(part.requests for part in parts),
        answered=ends.pop(OK, 0),
        timeouts=ends.pop(TIMEOUT, 0),
        unfinished=ends.pop(UNSENT, 0) + ends.pop("", 0),
        errors=dict(sorted(ends.items())),
        response_time_ms=_estimate(times, np.mean),
        **{name: _quantile(times, q) for name, q in QUANTILES.items()},
        max_ms=float(times.max()) if len(times) else np.nan,
        lag=Lag(*(float(each) for each in np.percentile(lags, (50, 99, 100)))) if len(lags) else Lag(0.0, 0.0, 0.0),
        connections=connections,
        held=held,
        batches=batches_of(reduce(add, counts)) if len(counts) == len(rounds) else None,
        times_ms=times,
        instants=instants,
    )


QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}


class _Counted(NamedTuple):
    requests: int
    ends: dict[str, int]
    times_ms: Floats
    instants: Floats
    lags_ms: Floats
    sent_in_time: int
    answered_in_time: int


def _counted(round_: Round, load: Load, offset: float) -> _Counted:
    ledger = round_.ledger
    intended, sent, ended = (np.array(each) - round_.start for each in (ledger.intended, ledger.sent, ledger.ended))
    outcomes = np.array(ledger.outcomes, dtype=np.int64)
    kinds = np.array(ledger.kinds)
    counted = intended >= load.warm_up - _ROUNDING
    numbers = np.bincount(outcomes[counted], minlength=len(kinds))
    timed = counted & np.isin(kinds[outcomes], (OK, TIMEOUT, UNSENT))
    well = kinds[outcomes] == OK
    left = counted & ~np.isnan(sent)
    unsent = counted & (kinds[outcomes] == UNSENT)
    return _Counted(
        requests=int(counted.sum()),
        ends={str(kind): int(number) for kind, number in zip(kinds, numbers, strict=True) if number},
        times_ms=(ended - intended)[timed] * 1000.0,
        instants=intended[timed] + offset,
        lags_ms=np.concatenate([(sent - intended)[left], (ended - intended)[unsent]]) * 1000.0,
        sent_in_time=int((left & (sent < load.round_seconds)).sum()),
        answered_in_time=int((well & (ended >= load.warm_up) & (ended < load.round_seconds)).sum()),
    )


def _quantile(times: Floats, q: float) -> Estimate:
    return _estimate(times, lambda part: np.quantile(part, q), least=10.0 / (1.0 - q))


def _estimate(times: Floats, of: Callable[[Floats], Any], least: float = 10.0) -> Estimate:
    """Return `of(times)` with its interval, from stretches of at least `least` requests; without, if they are too few."""
    if not len(times):
        return Estimate(np.nan, np.nan, np.nan)
    stretches = min(STRETCHES, int(len(times) / least))
    parts = np.array_split(times, stretches) if stretches >= _FEWEST else []
    return estimate(np.array([float(of(part)) for part in parts]), float(of(times)))
