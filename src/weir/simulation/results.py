"""What a simulation says of each policy, and of the differences between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import Any

import numpy as np

from weir.errors import SettingsError
from weir.messages import Reason
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import Profile
from weir.simulation.arrivals import Floats, Ints
from weir.simulation.engine import LogPart
from weir.simulation.statistics import Estimate, LogHistogram, estimate, stretch_length

# What a run is summed up from, part by part: sums per stretch of requests, in memory that does not grow with the run.
#
# All that a batch costs is shared out among its requests by their rows, so every measure is a sum over requests, and two
# policies can be compared stretch by stretch over the very same arrivals.


SUMS = (
    "answered", "response", "response_squared", "queue", "energy", "busy", "batches", "rows", "late", "refused", "ended",
)  # fmt: skip


class BatchMeans:
    """The sums of the stretches of a run. Requests before `first` are the warm-up, and not counted.

    Times are in milliseconds, energies in millijoules. `starts` are the arrivals at which stretches begin, in seconds.
    """

    def __init__(self, profile: Profile, first: int, requests: int, late_after: float = inf) -> None:
        self._profile = profile
        self._last = requests
        self._late_after_ms = 1000.0 * late_after
        self.length = stretch_length(requests - first)
        self.count = (requests - first) // self.length
        self._first = requests - self.count * self.length  # what does not fill a stretch is warm-up too
        self.sums = {name: np.zeros(self.count) for name in SUMS}
        self.starts = np.full(self.count + 1, nan)
        self.responses = LogHistogram(self.count)
        self.sizes: Ints = np.zeros(profile.max_batch_size + 1, dtype=np.int64)
        self.reasons: Ints = np.zeros(16, dtype=np.int64)
        self.least_waiting = np.full(self.count, inf)  # rows in the queue at a decision
        self.most_waiting = np.full(self.count, -inf)
        self._last_arrival = inf

    def arrived(self, index: int, times: Floats) -> None:
        """Requests from that index on arrived at `times`: remember when stretches begin, and when the last one ends."""
        begins = self._first + self.length * np.arange(self.count)
        inside = (begins >= index) & (begins < index + len(times))
        self.starts[:-1][inside] = times[begins[inside] - index]
        if len(times) and index + len(times) >= self._last:
            self._last_arrival = last = float(times[-1])
            gaps = self.length - 1
            self.starts[-1] = last + (last - self.starts[-2]) / gaps if gaps else last

    def __call__(self, part: LogPart) -> None:
        """Count a part of the run."""
        profile, batches = self._profile, part.batches
        stretch = self._stretch(part.request)
        share = part.rows / part.of_batch(batches.rows)
        took = batches.end - batches.start
        response = 1000.0 * (part.end - part.arrival) + profile.latency_offset_ms
        queue = 1000.0 * (part.of_batch(batches.start) - part.arrival)
        done = np.isfinite(response)
        self._add("energy", stretch, share * part.of_batch(profile.energy_mj[batches.rows - 1]))
        self._add("busy", stretch, share * part.of_batch(1000.0 * took))
        self._add("batches", stretch, share)
        self._add("rows", stretch, part.rows.astype(np.float64))
        self._answered(stretch[done], response[done], queue[done])
        for name, lost in (("refused", part.refused), ("late", part.expired)):
            stretches = self._stretch(lost)
            self._add(name, stretches, np.ones(len(lost)))
            self._add("ended", stretches, np.ones(len(lost)))
        self._count_batches(part)

    def _stretch(self, index: Ints) -> Ints:
        """Return the stretch of each request; those of the warm-up have one below 0."""
        return (index - self._first) // self.length

    def _add(self, name: str, stretch: Ints, values: Floats) -> None:
        counted = stretch >= 0
        self.sums[name] += np.bincount(stretch[counted], values[counted], minlength=self.count)

    def _answered(self, stretch: Ints, response: Floats, queue: Floats) -> None:
        late = response > self._late_after_ms
        one = np.ones(len(stretch))
        self._add("ended", stretch, one)
        self._add("late", stretch, late.astype(np.float64))
        self._add("answered", stretch, one)
        self._add("response", stretch, response)
        self._add("response_squared", stretch, response**2)
        self._add("queue", stretch, queue)
        counted = stretch >= 0
        self.responses.add(response[counted], stretch[counted])

    def _count_batches(self, part: LogPart) -> None:
        batches = part.batches
        if not len(part.request):
            return
        firsts = part.request[np.cumsum(batches.requests) - batches.requests]
        stretch = self._stretch(firsts)
        counted = stretch >= 0
        self.sizes += np.bincount(batches.rows[counted], minlength=len(self.sizes))
        self.reasons += np.bincount(batches.reason[counted], minlength=len(self.reasons))
        counted &= batches.at <= self._last_arrival  # afterwards the queue gets shorter in any case
        np.minimum.at(self.least_waiting, stretch[counted], batches.waiting[counted])
        np.maximum.at(self.most_waiting, stretch[counted], batches.waiting[counted])

    @property
    def is_growing(self) -> bool:
        """Whether the queue never became as short again, in the last quarter of the run, as it was at its longest in the first.

        Or whether most were not even begun when the last one arrived.
        """
        seen = np.flatnonzero(np.isfinite(self.least_waiting))
        if len(seen) and seen[-1] < self.count // 4:
            return True
        quarter = len(seen) // 4
        if not quarter:
            return False
        shortest, longest = self.least_waiting[seen[-quarter:]].min(), self.most_waiting[seen[:quarter]].max()
        return bool(shortest > longest + self._profile.max_batch_size)


COMPARED = ("response_time_ms", "p50_ms", "p95_ms", "p99_ms", "power_w", "cost", "late_share", "in_time_share")
QUANTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
_NOT_PLAIN = ("outcomes", "prices", "objective")
TOLERATED = 0.01  # share of requests by which policies may differ in what they lose and yet be compared by cost
UNBOUNDED = ("response_time_ms", "p50_ms", "p95_ms", "p99_ms", "cost")  # what has no mean where the queue only grows


@dataclass(frozen=True, eq=False)
class PolicyOutcome:
    """What became of the requests under one policy. Estimates have 95 % intervals (batch means).

    Response times are of those answered, in the caller's view; `queue_time_ms` is the mean until the batch began. `cost`
    is latency_weight·W + energy_weight·P. `reasons` and `batch_sizes` are shares of batches. `late_share` are
    answered after, or given up at, their deadline; `refused_share` were not let in; `in_time_share` is the rest. All three
    are of all requests. `fairness` is Jain's index of the response times
    (1: all equal). Where `stable` is false the queue grows without end: times and cost are infinite, power is that of
    workers which are always busy.
    """

    policy: str
    stable: bool
    requests: int
    response_time_ms: Estimate
    p50_ms: Estimate
    p95_ms: Estimate
    p99_ms: Estimate
    power_w: Estimate
    cost: Estimate
    late_share: Estimate
    in_time_share: Estimate
    refused_share: float
    batch_size: float
    busy_share: float
    queue_time_ms: float
    longest_ms: float
    fairness: float
    reasons: Mapping[str, float]
    batch_sizes: Mapping[int, float]
    responses_ms: LogHistogram = field(repr=False)
    observations: Mapping[str, Floats] = field(repr=False)  # per stretch, for paired differences

    @property
    def lost_share(self) -> float:
        """The share of requests that were refused, or late."""
        return self.refused_share + self.late_share.value

    def priced_loss(self, objective: LatencySLO) -> float:
        """Return what share of the requests was lost: late, and refused at the objective's price."""
        return self.late_share.value + objective.refusal_price * self.refused_share

    def keeps(self, objective: LatencySLO) -> bool:
        """Tell whether the run shows nothing against the promise: of the answers, the share that was late is within it, or
        its interval reaches there. The most answers in time are no promise, which cannot be broken."""
        if objective.counts_refusals:
            return True
        answered = 1.0 - self.refused_share
        return self.stable and answered > 0.0 and not self.late_share.low > objective.late_share * answered

    def quantile_ms(self, share: float) -> float:
        """Return the response time below which that share of the answers lies."""
        return self.responses_ms.quantile(share) if self.stable else inf

    def beyond(self, seconds: float) -> float:
        """Return the share of the answers that took longer than that."""
        return self.responses_ms.beyond(1000.0 * seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return all but the distribution as a JSON-able dict; what is infinite or unknown is None."""
        hidden = ("responses_ms", "observations")
        return {name: _plain(value) for name, value in vars(self).items() if name not in hidden}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Policies that met the same arrivals and the same luck. `rate` is in rows per second, over all `workers`. They are
    compared by cost; with an `objective`, by power."""

    arrivals: str
    rate: float
    load: float
    workers: int
    prices: Prices
    seed: int
    outcomes: Mapping[str, PolicyOutcome]
    objective: LatencySLO | None = None

    @property
    def best(self) -> str | None:
        """The policy of least cost (with an objective, power) among those that are eligible; None if there is none."""
        names = [name for name in self.outcomes if self.is_eligible(name)]
        return min(names, key=self.value, default=None)

    @property
    def measure(self) -> str:
        """What policies are compared by: cost; power_w where an objective is to be kept with the least; in_time_share where
        that is to be the most (refusals at their price: see `value`)."""
        if self.objective is None:
            return "cost"
        return "in_time_share" if self.objective.counts_refusals else "power_w"

    def value(self, name: str) -> float:
        """Return what is the less the better: the `measure` of a policy, or what it loses of the most answers in time."""
        if self.objective is not None and self.objective.counts_refusals:
            return self.outcomes[name].priced_loss(self.objective)
        estimated: Estimate = getattr(self.outcomes[name], self.measure)
        return estimated.value

    def is_eligible(self, name: str) -> bool:
        """Tell whether a policy may be the best: it is stable, and it loses hardly more requests than another does.

        Costs are of what was answered; a policy that answers less is not cheaper for it. With an objective, it also keeps
        that, and lost are those that were refused.
        """
        outcome, objective = self.outcomes[name], self.objective
        if objective is not None and objective.counts_refusals:
            return True
        if objective is None:
            least = min((each.lost_share for each in self.outcomes.values() if each.stable), default=0.0)
            return outcome.stable and outcome.lost_share <= least + TOLERATED
        kept = [each.refused_share for each in self.outcomes.values() if each.keeps(objective)]
        return outcome.keeps(objective) and outcome.refused_share <= min(kept) + TOLERATED

    def difference(self, one: str, other: str, what: str = "cost") -> Estimate:
        """Return by how much `what` of policy `one` exceeds that of `other`, stretch by stretch over the same arrivals.

        The interval is narrower than those of the two, for what luck did to both drops out. Raises SettingsError for an
        unknown name.
        """
        if what not in COMPARED:
            raise SettingsError(f"what={what!r}: must be one of {', '.join(COMPARED)}")
        for name in (one, other):
            if name not in self.outcomes:
                raise SettingsError(f"policy={name!r}: must be one of {', '.join(self.outcomes)}")
        first, second = self.outcomes[one], self.outcomes[other]
        value = getattr(first, what).value - getattr(second, what).value
        return estimate(first.observations[what] - second.observations[what], value)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a JSON-able dict."""
        document = {name: _plain(value) for name, value in vars(self).items() if name not in _NOT_PLAIN}
        objective = None if self.objective is None else str(self.objective)
        outcomes = {name: outcome.to_dict() for name, outcome in self.outcomes.items()}
        return {
            **document, "prices": vars(self.prices), "objective": objective, "best": self.best, "outcomes": outcomes,
        }  # fmt: skip


def outcome_of(
    name: str, seen: BatchMeans, prices: Prices, rate: float, workers: int, *, stable: bool
) -> PolicyOutcome:
    """Return what `seen` says of the policy called `name`, at that rate (rows per second)."""
    sums = seen.sums
    # Where the queue only grows, workers are busy for longer than it takes the requests to arrive: all the time.
    seconds = np.diff(seen.starts) if stable else sums["busy"] / (1000.0 * workers)
    observed = {
        "response_time_ms": ratio(sums["response"], sums["answered"]),
        "power_w": ratio(sums["energy"], 1000.0 * seconds),
        "late_share": ratio(sums["late"], sums["ended"]),
        "in_time_share": ratio(sums["ended"] - sums["late"] - sums["refused"], sums["ended"]),
    }
    weight = prices.latency_weight_at(rate)
    observed["cost"] = weight * observed["response_time_ms"] + prices.energy_weight * observed["power_w"]
    estimates = {what: estimate(each) for what, each in observed.items()}
    for quantile, share in QUANTILES.items():
        estimates[quantile], observed[quantile] = seen.responses.estimate(share)
    if not stable:
        estimates |= {what: Estimate(inf, inf, inf) for what in UNBOUNDED}
    answered, total = float(sums["answered"].sum()), float(sums["ended"].sum())
    return PolicyOutcome(
        policy=name, stable=stable, requests=int(total), **estimates,
        refused_share=_over(sums["refused"].sum(), total),
        batch_size=_over(sums["rows"].sum(), sums["batches"].sum()),
        busy_share=_over(sums["busy"].sum(), 1000.0 * workers * float(seconds.sum())),
        queue_time_ms=_over(sums["queue"].sum(), answered) if stable else inf,
        longest_ms=seen.responses.highest,
        fairness=_over(sums["response"].sum() ** 2, answered * sums["response_squared"].sum()),
        reasons=_shares({each.name.lower(): seen.reasons[each] for each in Reason}),
        batch_sizes=_shares(dict(enumerate(seen.sizes.tolist()))),
        responses_ms=seen.responses, observations=observed,
    )  # fmt: skip


def ratio(above: Floats, below: Floats) -> Floats:
    """Return one observation per stretch of sum(above) / sum(below), whose mean is just that.

    Each is the ratio plus what its stretch adds to it, to first order; NaN where there is nothing below.
    """
    total = float(below.sum())
    if not total:
        return np.full(len(above), nan)
    value = float(above.sum()) / total
    observed: Floats = value + (above - value * below) * len(below) / total
    return observed


def _over(above: Any, below: Any) -> float:
    return float(above) / float(below) if below else nan


def _shares(counts: Mapping[Any, Any]) -> dict[Any, float]:
    total = float(sum(counts.values()))
    return {key: float(count) / total for key, count in counts.items() if count}


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, float):
        return value if isfinite(value) else None
    return dict(value) if isinstance(value, Mapping) else value
