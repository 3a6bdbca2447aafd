"""A whole run: rounds of load in which the targets take turns, and the results of each target."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np

from weir.bench.rounds import Clock, Floats, Load, LoadSettings, Round, make_load, run_round
from weir.bench.target import OK, TIMEOUT, UNSENT, Batches, Ledger, Target, batches_of
from weir.errors import SettingsError
from weir.simulation.statistics import STRETCHES, Estimate, estimate

_FEWEST = 10  # an interval needs at least so many stretches
_ROUNDING = 1e-9  # seconds; instants are differences of times on a clock that may have run for months


class Lag(NamedTuple):
    """How much later than intended requests were sent, in ms: a delay of this program, not of the server. A request that was never
    sent, for lack of a connection, counts with the time until it was given up."""

    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results of one target, without the warm-up (which only `batches` includes).

    Response times are in ms, from the instant at which a request was *to be* sent. A request that was given up counts with the
    time until then. Estimates have 95 % intervals (batch means; infinite if there are too few requests).
    """

    target: str
    rate: float | None  # intended, requests per second; None in a closed loop
    sent_rate: float  # requests sent per second of load
    throughput: float  # successful answers per second of load
    requests: int
    answered: int  # successfully
    timeouts: int
    unfinished: int  # never sent, for lack of a connection, or never ended
    errors: dict[str, int]  # other failed requests by what went wrong
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
    times_ms: Floats  # each response time, in the order of the intended instants
    instants: Floats  # the intended instants, in seconds from the start of the run (rounds laid end to end)


def make_outcome(target: str, load: Load, rounds: Sequence[Round], connections: int | None, held: int) -> Outcome:
    """Return the results of all `rounds` of one target together."""
    intended, sent, ended = (_instants(rounds, name) for name in ("intended", "sent", "ended"))
    kinds = np.concatenate([np.array(each.ledger.kinds)[np.array(each.ledger.outcomes, np.int64)] for each in rounds])
    begun = np.repeat(np.arange(len(rounds)) * load.round_seconds, [len(each.ledger.intended) for each in rounds])
    counted = intended >= load.warm_up - _ROUNDING
    timed = counted & np.isin(kinds, (OK, TIMEOUT, UNSENT))
    left, unsent = counted & ~np.isnan(sent), counted & (kinds == UNSENT)
    in_time = (kinds == OK) & (ended >= load.warm_up) & (ended < load.round_seconds)
    lags = np.concatenate([(sent - intended)[left], (ended - intended)[unsent]]) * 1000.0
    times = (ended - intended)[timed] * 1000.0
    seconds = (load.round_seconds - load.warm_up) * len(rounds)
    ends = dict(zip(*(each.tolist() for each in np.unique(kinds[counted], return_counts=True)), strict=True))
    counts = [each.counts for each in rounds if each.counts is not None]
    return Outcome(
        target=target,
        rate=load.rate,
        sent_rate=float((left & (sent < load.round_seconds)).sum()) / seconds,
        throughput=float(in_time.sum()) / seconds,
        requests=int(counted.sum()),
        answered=ends.pop(OK, 0),
        timeouts=ends.pop(TIMEOUT, 0),
        unfinished=ends.pop(UNSENT, 0) + ends.pop("", 0),
        errors=ends,
        response_time_ms=_estimate(times, np.mean),
        **{name: _quantile(times, q) for name, q in QUANTILES.items()},
        max_ms=float(times.max()) if len(times) else np.nan,
        lag=Lag(*(float(each) for each in np.percentile(lags, (50, 99, 100)))) if len(lags) else Lag(0.0, 0.0, 0.0),
        connections=connections,
        held=held,
        batches=batches_of(reduce(add, counts)) if len(counts) == len(rounds) else None,
        times_ms=times,
        instants=(intended + begun)[timed],
    )


QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}


def _instants(rounds: Sequence[Round], name: str) -> Floats:
    """Return the instants of all requests, in seconds from the start of their rounds."""
    return np.concatenate([np.array(getattr(each.ledger, name)) - each.start for each in rounds])


def _quantile(times: Floats, q: float) -> Estimate:
    return _estimate(times, lambda part: np.quantile(part, q), least=10.0 / (1.0 - q))


def _estimate(times: Floats, of: Callable[[Floats], Any], least: float = 10.0) -> Estimate:
    """Return `of(times)` with an interval from stretches of at least `least` requests each; without an interval if there are too
    few requests."""
    if not len(times):
        return Estimate(np.nan, np.nan, np.nan)
    stretches = min(STRETCHES, int(len(times) / least))
    parts = np.array_split(times, stretches) if stretches >= _FEWEST else []
    return estimate(np.array([float(of(part)) for part in parts]), float(of(times)))


@dataclass(frozen=True, eq=False)
class Report:
    """The results of a run. `outcomes` has those of each target by name. `failures` has one line for each reason why the measurement
    is invalid; it is empty for a valid one."""

    arrivals: str
    rate: float | None  # intended, requests per second; None in a closed loop
    duration: float  # seconds of load on each target
    rounds: int
    warm_up: float  # seconds of each round
    seed: int
    max_lag_ms: float
    outcomes: dict[str, Outcome]
    failures: list[str]

    @property
    def outcome(self) -> Outcome:
        """The results of the first target, which is usually the only one."""
        return next(iter(self.outcomes.values()))


@dataclass(frozen=True)
class TargetTurn:
    """A round of one target: number `index` (from 0) of `count` turns of `seconds` seconds each."""

    target: str
    index: int
    count: int
    seconds: float


Watch = Callable[[TargetTurn, Ledger], None]


async def run_bench(
    targets: Sequence[Target],
    settings: LoadSettings,
    *,
    clock: Clock = time.monotonic,
    watch: Watch = lambda turn, ledger: None,
) -> Report:
    """Put the same load on each of `targets`, in turns, and return the results.

    `watch(turn, ledger)` is called at the start of each round. Raises SettingsError for a wrong setting or a target that does not
    answer. All targets are closed at the end, also after an error.
    """
    names = [target.name for target in targets]
    if not names or len(set(names)) < len(names):
        raise SettingsError(f"targets {', '.join(names) or 'none'}: must be one or more, of different names")
    load = make_load(settings, len(targets))
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    try:
        for target in targets:
            await target.open()
        with _without_pauses():
            for index in range(load.rounds):
                for place, target in enumerate(_turned(targets, index)):
                    turn = TargetTurn(
                        target.name, index * len(targets) + place, load.rounds * len(targets), load.round_seconds
                    )
                    shown = partial(watch, turn)
                    rounds[target.name].append(await run_round(target, load, index, clock=clock, watch=shown))
    finally:
        for target in targets:
            await target.close()
    outcomes = {
        target.name: make_outcome(target.name, load, rounds[target.name], target.connections, target.held)
        for target in targets
    }
    return _report(load, settings, outcomes)


def _turned(targets: Sequence[Target], index: int) -> list[Target]:
    """Return the targets, beginning with another one in each round: the first one may find the machine in another state."""
    first = index % len(targets)
    return [*targets[first:], *targets[:first]]


@contextmanager
def _without_pauses() -> Iterator[None]:
    """Hide all present objects from the garbage collector while the block runs: examining them takes longer than a request."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _report(load: Load, settings: LoadSettings, outcomes: dict[str, Outcome]) -> Report:
    return Report(
        arrivals=load.arrivals,
        rate=load.rate,
        duration=load.round_seconds * load.rounds,
        rounds=load.rounds,
        warm_up=load.warm_up,
        seed=settings.seed,
        max_lag_ms=settings.max_lag_ms,
        outcomes=outcomes,
        failures=[line for outcome in outcomes.values() for line in _failures(outcome, settings.max_lag_ms)],
    )


def _failures(outcome: Outcome, max_lag_ms: float) -> list[str]:
    lines = []
    if outcome.rate is not None and outcome.lag.p99_ms > max_lag_ms:
        held = f", {outcome.held} of them for lack of a connection (max_connections)" if outcome.held else ""
        lines.append(
            f"{outcome.target}: requests were sent late: {outcome.lag.p99_ms:.2f} ms at p99, which must be at most"
            f" {max_lag_ms:g} ms (max_lag_ms){held}; the load was not the requested one"
        )
    if not outcome.answered:
        worst = max(outcome.errors, key=lambda kind: outcome.errors[kind], default="timeout")
        lines.append(f"{outcome.target}: no request was answered ({worst})")
    return lines
