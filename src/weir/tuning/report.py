"""What came of the batches of the last half to whole minute, and a policy's report: what it does beside what was predicted.

The window takes one call per batch. It turns in halves: what is read is the half that fills and the whole one before it, so old
batches are forgotten without a list of them.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.batching.batcher import Batcher
from weir.messages import Dispatch, Kind, Timing
from weir.telemetry.recorder import Histogram, SilentObserver

if TYPE_CHECKING:
    from weir.policy.cost.objective import Prices
    from weir.policy.cost.profile import Profile
    from weir.tuning.resolver import Resolver


HALF = 30.0  # seconds

# 20 µs to two minutes in steps of a fifth: a percentile read from them is off by at most a tenth.
AGES = tuple(2e-5 * 1.2**step for step in range(86))

_arrival = attrgetter("arrival")


class WindowHalf:
    """One half of the window. `sizes[b]` counts the batches of b rows; `arrivals` is the count at its begin."""

    __slots__ = ("ages", "arrivals", "batches", "begun", "requests", "rows", "sizes")

    def __init__(self, begun: float, arrivals: int, largest: int) -> None:
        self.begun = begun
        self.arrivals = arrivals
        self.batches = self.requests = self.rows = 0
        self.ages = Histogram(AGES)
        self.sizes = [0] * (largest + 1)


class WindowSummary(NamedTuple):
    """What the window shows; None where it has nothing to say. Times are means over rows, from arrival to the return of
    their batch; `rate` counts rows accepted per second."""

    seconds: float
    requests: int
    rows: int
    batches: int
    rate: float
    response_time_ms: float | None
    p99_ms: float | None
    sizes: list[int]

    def power_w(self, profile: "Profile") -> float:
        """Return the mean power of these batches, were each to take the energy that `profile` states."""
        energies = profile.energy_mj
        spent = sum(count * energies[min(b, len(energies)) - 1] for b, count in enumerate(self.sizes) if count)
        return float(spent) / (1000.0 * self.seconds)

    def cost(self, profile: "Profile", prices: "Prices") -> float | None:
        """Return what these batches cost by `prices`; None if there were none."""
        if self.response_time_ms is None:
            return None
        latency_weight = prices.latency_weight_at(self.rate)
        return latency_weight * self.response_time_ms + prices.energy_weight * self.power_w(profile)


class RollingWindow(SilentObserver):
    """An Observer that remembers the last batches of one service. `arrivals` says how many rows were ever accepted."""

    def __init__(self, clock: Callable[[], float], arrivals: Callable[[], int], max_batch_size: int) -> None:
        self._clock = clock
        self._arrivals = arrivals
        self._largest = max_batch_size
        self.forget()

    def forget(self) -> None:
        """Begin anew: what was measured belongs to other tables."""
        self._current = self._previous = self._new_half(self._clock())

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Count a batch and how old its requests are."""
        if now - self._current.begun >= HALF:
            self._turn(now)
        half, requests, rows = self._current, dispatch.requests, dispatch.rows
        half.batches += 1
        half.rows += rows
        half.sizes[min(rows, self._largest)] += 1
        if rows == len(requests):
            half.requests += rows
            arrivals = list(map(_arrival, requests))
            arrivals.sort()
            half.ages.observe_ages(arrivals, now)
        else:
            half.requests += _weigh(dispatch, half.ages, now)

    def read(self) -> WindowSummary:
        """Return what the window shows now."""
        now = self._clock()
        if now - self._current.begun >= HALF:
            self._turn(now)
        halves = [self._current] if self._previous is self._current else [self._previous, self._current]
        seconds = max(now - halves[0].begun, 1e-9)
        counts = [sum(column) for column in zip(*(half.ages.counts for half in halves), strict=True)]
        aged = sum(counts)
        return WindowSummary(
            seconds=seconds,
            requests=sum(half.requests for half in halves),
            rows=sum(half.rows for half in halves),
            batches=sum(half.batches for half in halves),
            rate=(self._arrivals() - halves[0].arrivals) / seconds,
            response_time_ms=1000.0 * sum(half.ages.sum for half in halves) / aged if aged else None,
            p99_ms=1000.0 * quantile(counts, 0.99) if aged else None,
            sizes=[sum(column) for column in zip(*(half.sizes for half in halves), strict=True)],
        )

    def _turn(self, now: float) -> None:
        idle = now - self._current.begun >= 2 * HALF
        new = self._new_half(now)
        self._previous = new if idle else self._current
        self._current = new

    def _new_half(self, now: float) -> WindowHalf:
        return WindowHalf(now, self._arrivals(), self._largest)


def quantile(counts: list[int], share: float) -> float:
    """Return the age, in seconds, that `share` of those counted in the buckets of AGES do not exceed."""
    reached = list(accumulate(counts))
    wanted = share * reached[-1]
    bucket = bisect_left(reached, wanted)
    left = wanted - (reached[bucket] - counts[bucket])
    low = AGES[bucket - 1] if bucket else 0.0
    high = AGES[min(bucket, len(AGES) - 1)]
    return low + (high - low) * left / counts[bucket]


def _weigh(dispatch: Dispatch, ages: Histogram, now: float) -> int:
    """Count each request's age once for each of its rows in this batch; return how many requests begin in it."""
    begun = 0
    for request, part in zip(dispatch.requests, dispatch.slices or [None] * len(dispatch.requests), strict=True):
        start, stop = part or (0, request.rows)
        rows = stop - start
        if part is not None and request.kind is Kind.ITEMS:
            rows = rows * request.rows // len(request.payload)  # a part counts items, which have equal rows
        begun += start == 0
        age = now - request.arrival
        ages.counts[bisect_left(AGES, age)] += rows
        ages.sum += rows * age
    return begun


def explain_policy(
    model: str, policy: Any, batcher: Batcher, measured: RollingWindow, resolver: "Resolver | None" = None
) -> dict[str, Any]:
    """Return the document about a policy, as a JSON-able dict: what it knows nothing of is None.

    `policy` is the setting; `resolver` is there if it is a solved one. Rates are rows per second; `measured` covers its
    `seconds`, and its power is that of batches which take the energy that the profile states.
    """
    reading = measured.read()
    recent = batcher.recent
    document = {
        "model": model,
        "policy": policy if isinstance(policy, str) else repr(policy),
        "rate": reading.rate,
        "capacity": None,
        "table": {"index": None, "rate": None, "limit": recent[-1]["limit"] if recent else None},
        "prices": None,
        "objective": None,
        "workers": batcher.workers,
        "predicted": {"response_time_ms": None, "p99_ms": None, "power_w": None, "cost": None},
        "measured": _measured(reading),
        "profile": None,
        "drift": None,
        "solved": None,
        "learning": False,
    }
    if resolver is not None:
        document |= _solved(resolver, reading, batcher.workers)
    return document


def _measured(reading: WindowSummary) -> dict[str, Any]:
    return {
        "response_time_ms": reading.response_time_ms,
        "p99_ms": reading.p99_ms,
        "power_w": None,
        "cost": None,
        "rate": reading.rate,
        "seconds": reading.seconds,
        "requests": reading.requests,
        "rows": reading.rows,
        "batches": reading.batches,
    }


def _solved(resolver: "Resolver", reading: WindowSummary, workers: int) -> dict[str, Any]:
    """Return what there is to say of a solved policy, while it is still greedy too."""
    prices, objective, profile, bank = resolver.prices, resolver.objective, resolver.profile, resolver.policy.bank
    said = resolver.policy.explain() | {
        "workers": workers,
        "prices": {name: getattr(prices, name) for name in ("latency_weight", "energy_weight", "reference_rate")},
        "objective": None if objective is None else {"text": str(objective)} | objective._asdict(),
        "measured": _measured(reading),
        "solved": {
            "count": sum(resolver.counts.values()),
            "reasons": dict(resolver.counts),
            "reason": resolver.reason,
            "seconds": resolver.seconds,
            "workers": None if bank is None else bank.workers,
            "rates": None if bank is None else bank.rates.tolist(),
            "limits": None if bank is None else bank.limits().tolist(),
            "solving": resolver.solving,
            "failures": resolver.failures,
            "error": resolver.error or None,
        },
    }
    if profile is not None:
        said["measured"] |= {"power_w": reading.power_w(profile), "cost": reading.cost(profile, prices)}
        said["profile"] = _profile(profile)
        said["drift"] = {"factor": resolver.drift}
    return said


def _profile(profile: "Profile") -> dict[str, Any]:
    return {
        "max_batch_size": profile.max_batch_size,
        "best_batch_size": profile.best_batch_size,
        "max_rate": profile.max_rate,
        "service_time_ms": profile.service_time_ms.tolist(),
        "energy_mj": profile.energy_mj.tolist(),
        "energy_source": profile.energy_source,
        "pipeline_depth": profile.pipeline_depth,
        "latency_offset_ms": profile.latency_offset_ms,
    }
