"""This says what a simulation shows of each policy, and of the differences between policies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import Any

import numpy as np

from weir.errors import SettingsError
from weir.messages import Reason
from weir.policy.cost import LatencySLO, Prices, Profile
from weir.simulation.arrivals import Floats, Ints
from weir.simulation.engine import LogPart, Run
from weir.simulation.statistics import Estimate, LogHistogram, estimate, plain, short, stretch_length

# The sums of a run, by stretch of requests. Memory does not grow with the run.
#
# The cost of a batch is divided among its requests by their rows. So every figure is a sum over requests, and two
# policies can be compared stretch by stretch over the same arrivals.


SUMS = (
    "answered", "response", "queue", "energy", "busy", "batches", "rows", "late", "refused", "ended",
)  # fmt: skip


class BatchMeans:
    """The sums over each stretch of a run. Requests before number `first` are the warm-up and do not count.

    Times are in milliseconds, energies in millijoules. `starts`, shape (stretches + 1,), has the arrivals in seconds
    at which stretches begin, and the end of the last one. `late_after` is the response time in seconds beyond which an
    response is late.
    """

    def __init__(self, profile: Profile, first: int, requests: int, late_after: float = inf) -> None:
        self._profile = profile
        self._last = requests
        self._late_after_ms = 1000.0 * late_after
        self.length = stretch_length(requests - first)
        self.count = (requests - first) // self.length
        self._first = requests - self.count * self.length  # requests that do not fill a stretch belong to the warm-up
        self.sums = {name: np.zeros(self.count) for name in SUMS}
        self.starts = np.full(self.count + 1, nan)
        self.responses = LogHistogram(self.count)
        self.sizes: Ints = np.zeros(profile.max_batch_size + 1, dtype=np.int64)
        self.reasons: Ints = np.zeros(16, dtype=np.int64)
        self.least_waiting = np.full(self.count, inf)  # rows in the queue at a dispatch
        self.most_waiting = np.full(self.count, -inf)
        self._last_arrival = inf
        self.bulk_rows = 0  # rows of bulk work that were done before the last arrival
        self.bulk_until = 0.0  # the instant (seconds) at which the last of them was

    def arrived(self, index: int, times: Floats) -> None:
        """Take note that the requests from number `index` on arrived at `times` (seconds)."""
        begins = self._first + self.length * np.arange(self.count)
        inside = (begins >= index) & (begins < index + len(times))
        self.starts[:-1][inside] = times[begins[inside] - index]
        if len(times) and index + len(times) >= self._last:
            self._last_arrival = last = float(times[-1])
            gaps = self.length - 1
            self.starts[-1] = last + (last - self.starts[-2]) / gaps if gaps else last

    def __call__(self, part: LogPart) -> None:
        """Add a part of the run."""
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
        self._count_bulk(part)

    def _count_bulk(self, part: LogPart) -> None:
        ends = part.of_batch(part.batches.end)
        counted = (part.request < 0) & (ends <= self._last_arrival)
        if counted.any():
            self.bulk_rows += int(part.rows[counted].sum())
            self.bulk_until = max(self.bulk_until, float(ends[counted].max()))

    def _stretch(self, index: Ints) -> Ints:
        """Return the stretch of each request, shape (requests,); negative for the warm-up."""
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
        counted &= batches.at <= self._last_arrival  # after the last arrival every queue becomes shorter
        np.minimum.at(self.least_waiting, stretch[counted], batches.waiting[counted])
        np.maximum.at(self.most_waiting, stretch[counted], batches.waiting[counted])

    @property
    def best_rate(self) -> float:
        """The most rows per second that one worker serves, in batches of the best size."""
        return self._profile.max_rate

    @property
    def is_growing(self) -> bool:
        """Whether the queue grows without end, as far as the run shows.

        That is so if in its last quarter the queue was always longer than at any time in the first; or if most
        requests had not even been started when the last one arrived.
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
SAME = 1e-12  # an interval narrower than this share of its value is not shown
TOLERATED = 0.01  # share of requests: policies whose losses differ by less are compared by cost
# Figures that have no mean if the queue only grows.
UNBOUNDED = ("response_time_ms", "p50_ms", "p95_ms", "p99_ms", "cost")


@dataclass(frozen=True, eq=False)
class PolicyOutcome:
    """Says what became of the requests under one policy. Estimates have 95 % intervals by batch means.

    Attributes:
        policy: its name.
        stable: False if the queue grows without end. Then times and cost are infinite, and the power is that of
            workers that are always busy.
        requests: requests counted, without the warm-up.
        response_time_ms, p50_ms, p95_ms, p99_ms: response times in ms, as the caller measures
            them.
        power_w: mean power in watts.
        cost: latency_weight·(mean response time in ms) + energy_weight·(power in W).
        late_share: share of all requests that were answered after their deadline, or given up at it.
        in_time_share: share of all requests that were answered in time.
        refused_share: share of all requests that were refused at their arrival.
        batch_size: mean rows of a batch.
        busy_share: share of the workers' time spent on batches.
        queue_time_ms: mean time in ms until the batch was started.
        longest_ms: the longest response time in ms.
        reasons, batch_sizes: shares of the batches, by reason and by rows.
        bulk_rate: rows of bulk work per second while there was any; NaN without bulk work.
        bulk_share: that rate as a share of what the time that the requests leave could serve in batches of the best size; NaN
            likewise.
        observations: by estimate, one value per stretch, for paired differences; shape (stretches,).
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
    reasons: Mapping[str, float]
    batch_sizes: Mapping[int, float]
    bulk_rate: float
    bulk_share: float
    observations: Mapping[str, Floats] = field(repr=False)  # per stretch, for paired differences

    @property
    def lost_share(self) -> float:
        """The share of the requests that were refused or late."""
        return self.refused_share + self.late_share.value

    def priced_loss(self, objective: LatencySLO) -> float:
        """Return the share of the requests that were lost: late, or refused at the objective's price."""
        return self.late_share.value + objective.refusal_price * self.refused_share

    def keeps(self, objective: LatencySLO) -> bool:
        """Return whether the run does not contradict the promise of `objective`.

        The share of late responses is within it, or at least the interval of that share reaches there. With the
        objective to answer most requests in time there is no promise, so the result is True.
        """
        if objective.counts_refusals:
            return True
        answered = 1.0 - self.refused_share
        return self.stable and answered > 0.0 and not self.late_share.low > objective.late_share * answered

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the observations as a JSON-able dict. What is infinite or unknown is None."""
        return {name: plain(value) for name, value in vars(self).items() if name != "observations"}


@dataclass(frozen=True, eq=False)
class Comparison:
    """Policies that got the same arrivals and random numbers. They are compared by cost; with an `objective`, by power.

    `rate` is in rows per second over all `workers`, and `load` the share of what they can serve.
    """

    arrivals: str
    rate: float
    load: float
    workers: int
    prices: Prices
    seed: int
    outcomes: Mapping[str, PolicyOutcome]
    objective: LatencySLO | None = None

    def heading(self) -> str:
        """Return one line that says what was simulated."""
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        prices = self.prices
        weights = f"cost = {prices.latency_weight:g}/ms, {prices.energy_weight:g}/W"
        if prices.reference_rate is not None:
            weights += f" at {prices.reference_rate:g} rows/s"
        if self.objective is not None:
            weights = str(self.objective)
            weights += " for the most requests" if self.objective.counts_refusals else " with the least energy"
        requests = max((each.requests for each in self.outcomes.values()), default=0)
        return (
            f"{self.arrivals}: {self.rate:,.4g} rows/s, load {self.load:.3g} on {workers}; "
            f"{weights}; {requests:,} requests counted, seed {self.seed}"
        )

    def table(self) -> list[list[str]]:
        """Return the names of columns, and a row for each policy, the best first.

        ± is half the 95 % interval; in the last column, that of the difference from the best policy on the same arrivals.
        """
        objective, outcomes = self.objective, self.outcomes
        columns = ["policy", "response ms", "p99 ms", "power W", "batch", "busy"]
        columns += ["lost"] * self._is_lossy + ["bulk rows/s", "of idle"] * self._has_bulk
        if objective is None:
            columns += ["cost", "above best"]
        else:
            columns += ["late %", "in time %", "% beside best" if objective.counts_refusals else "W above best"]
        order = sorted(
            outcomes, key=lambda name: (not self.is_eligible(name), not outcomes[name].stable, self.value(name))
        )
        rows = [self._row(outcomes[name]) for name in order]
        return [columns, *(row + [""] * (len(columns) - len(row)) for row in rows)]

    @property
    def _is_lossy(self) -> bool:
        return any(each.refused_share if self.objective else each.lost_share for each in self.outcomes.values())

    @property
    def _has_bulk(self) -> bool:
        return any(isfinite(each.bulk_rate) for each in self.outcomes.values())

    def _row(self, outcome: PolicyOutcome) -> list[str]:
        """Return the first cells of the row; those that are left are empty."""
        batches = [short(outcome.power_w.value), f"{outcome.batch_size:.1f}", f"{outcome.busy_share:.0%}"]
        if not outcome.stable:
            return [outcome.policy, "unstable", "", *batches]
        lost = outcome.lost_share if self.objective is None else outcome.refused_share
        row = [outcome.policy, _text(outcome.response_time_ms), short(outcome.p99_ms.value), *batches]
        row += [f"{lost:.2%}"] * self._is_lossy
        row += [f"{outcome.bulk_rate:.0f}", f"{outcome.bulk_share:.0%}"] * self._has_bulk
        shares = map(_percent, (outcome.late_share, outcome.in_time_share))
        row += map(_text, [outcome.cost] if self.objective is None else shares)
        return [*row, self._above(outcome)]

    def _above(self, outcome: PolicyOutcome) -> str:
        best = self.best
        if outcome.policy == best:
            return "best"
        if self.objective is not None and not outcome.keeps(self.objective):
            return "not kept"
        if best is None or not self.is_eligible(outcome.policy):
            return "loses more"
        difference = self.difference(outcome.policy, best, self.measure)
        if self.measure == "in_time_share":
            return _text(_percent(difference))
        return f"+{_text(difference)}"

    @property
    def best(self) -> str | None:
        """The eligible policy with the least cost (with an objective, power); None if there is none."""
        names = [name for name in self.outcomes if self.is_eligible(name)]
        return min(names, key=self.value, default=None)

    @property
    def measure(self) -> str:
        """The figure by which policies are compared: `cost`; with an objective `power_w`, or `in_time_share`, see
        `value`.
        """
        if self.objective is None:
            return "cost"
        return "in_time_share" if self.objective.counts_refusals else "power_w"

    def value(self, name: str) -> float:
        """Return the number that is least for the best policy: its `measure`, or what it loses of the most responses in
        time.
        """
        if self.objective is not None and self.objective.counts_refusals:
            return self.outcomes[name].priced_loss(self.objective)
        estimated: Estimate = getattr(self.outcomes[name], self.measure)
        return estimated.value

    def is_eligible(self, name: str) -> bool:
        """Return whether a policy may be the best: it is stable, and loses hardly more requests than another does.

        Costs only cover answered requests, so a policy that answers fewer does not count as cheaper. With an objective
        it must also keep that, and only refused requests count as lost.
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
        """Return by how much the figure `what` of policy `one` exceeds that of `other`, paired by stretch.

        Its interval is narrower than those of the two, because both got the same arrivals, whose chance cancels. Raises
        SettingsError for an unknown name.
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
        document = {name: plain(value) for name, value in vars(self).items() if name not in _NOT_PLAIN}
        objective = None if self.objective is None else str(self.objective)
        outcomes = {name: outcome.to_dict() for name, outcome in self.outcomes.items()}
        return {
            **document,
            "prices": vars(self.prices),
            "objective": objective,
            "best": self.best,
            "outcomes": outcomes,
        }


def outcome_of(
    name: str, seen: BatchMeans, prices: Prices, rate: float, workers: int, *, stable: bool
) -> PolicyOutcome:
    """Return the outcome of the policy called `name`, from the sums `seen`, at `rate` rows per second."""
    sums = seen.sums
    # If the queue only grows, the workers are busy all the time, and for longer than the requests take to arrive.
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
    busy = _over(sums["busy"].sum(), 1000.0 * workers * float(seconds.sum()))
    bulk_rate = _over(seen.bulk_rows, seen.bulk_until)
    return PolicyOutcome(
        policy=name,
        stable=stable,
        requests=int(total),
        **estimates,
        refused_share=_over(sums["refused"].sum(), total),
        batch_size=_over(sums["rows"].sum(), sums["batches"].sum()),
        busy_share=busy,
        bulk_rate=bulk_rate,
        bulk_share=_over(bulk_rate, workers * seen.best_rate * (1.0 - busy)),
        queue_time_ms=_over(sums["queue"].sum(), answered) if stable else inf,
        longest_ms=seen.responses.highest,
        reasons=_shares({each.name.lower(): seen.reasons[each] for each in Reason}),
        batch_sizes=_shares(dict(enumerate(seen.sizes.tolist()))),
        observations=observed,
    )


@dataclass(frozen=True)
class ResponseFigures:
    """The response times of some requests.

    Attributes:
        requests: how many requests were counted.
        response_time_ms, p50_ms, p99_ms, longest_ms: response times in ms of those that were answered; infinite if none was.
        late_share: the share of the requests that were answered after the deadline, refused or given up.
    """

    requests: int
    response_time_ms: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    late_share: float


def response_figures(run: Run, since: float, late_after: float | None) -> ResponseFigures:
    """Return the figures of the requests of `run` that arrived from `since` on, whose responses are late after that many seconds (None: never)."""
    times = 1000.0 * (run.end - run.arrival)[run.arrival >= since]
    answered = times[np.isfinite(times)]
    in_time = int((answered <= (inf if late_after is None else 1000.0 * late_after)).sum())
    mean = float(answered.mean()) if len(answered) else inf
    p50, p99, longest = np.quantile(answered, (0.5, 0.99, 1.0)).tolist() if len(answered) else (inf, inf, inf)
    return ResponseFigures(len(times), mean, p50, p99, longest, 1.0 - in_time / len(times) if len(times) else 0.0)


def ratio(above: Floats, below: Floats) -> Floats:
    """Return one observation per stretch of sum(above) / sum(below), whose mean is that ratio; shape (stretches,).

    Each is the ratio plus what its stretch adds to it, to first order; NaN if the sum below is 0.
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


def _percent(share: Estimate) -> Estimate:
    return Estimate(*(100.0 * value for value in share))


def _text(estimate: Estimate) -> str:
    half = estimate.half_width
    if not isfinite(half) or half <= SAME * abs(estimate.value):
        return short(estimate.value)
    digits = max(0, 1 - int(np.floor(np.log10(half))))
    return f"{estimate.value:.{digits}f} ± {half:.{digits}f}"
