"""Searches by simulation: the best control limit, and what keeps a latency SLO at each rate.

To keep a latency SLO with the least energy, or to give most responses in time, a batch is dispatched when `limit`
rows wait, or when its oldest row could not have its response in time otherwise (the bound on waits). A batch is trimmed if
its oldest row would be late otherwise, and arrivals are refused while the queue is so long that they might be late
(policy/online/admission.py).

`play` runs one rule over the arrivals of one queue without the Batcher, which is faster: a search does so hundreds of
times. It knows single rows in the order of their arrival, tables, the ends of waits and bounds on the queue, and nothing
else. Within that it cuts the same batches as the Batcher: tests/simulation/test_search.py holds the two equal. The
Batcher itself then measures what a search has found. Times are in seconds, unless the name says otherwise.

With a bound on waits the number of waiting rows is not all that matters: their ages count too. So the share of late
answers is simulated, with common random numbers. docs/explanation/beyond-the-paper.md has the reasons.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapreplace
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.policy.cost import ROUNDING, Floats, LatencySLO, Profile, trimmed
from weir.policy.online.admission import AdmissionGate, AdmissionPlan, admission
from weir.policy.solve.tables import Table, greedy_table, multi_worker_table
from weir.simulation.arrivals import Arrivals, MarkovModulated
from weir.simulation.engine import ServiceTimes

CLUMP = 10.0  # rows that are refused together
PARTS = 40  # batch means from which a standard error is estimated


class Rule(NamedTuple):
    """The rule by which batches are dispatched.

    Attributes:
        table: rows to dispatch by rows waiting, 0 to wait (see policy/solve/tables.py).
        allowance: by rows waiting, seconds after the oldest arrival at which a wait ends; all rows that fit are then
            dispatched.
        fits: by rows, seconds after the oldest arrival by which a batch must start for that row to be in time. If
            given, batches are trimmed to that (see `trimmed` in policy/cost.py).
        silence: seconds after the last arrival at which a wait ends.
        max_waiting: arrivals are refused while that many rows wait; 0: never.
        gate: arrivals are also refused as it says (see policy/online/admission.py).
    """

    table: Sequence[int]
    allowance: Sequence[float] | None = None
    fits: Sequence[float] | None = None
    silence: float = inf
    max_waiting: int = 0
    gate: AdmissionGate | None = None


class PlayedRounds(NamedTuple):
    """Says what happened. Instants are in seconds, batches in the order of their start.

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
    """Says what a rule does on one queue.

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


# Trials of rules on the same arrivals for every rule; for another rate they are stretched in time.


class Trials:
    """One queue of `requests` arrivals of one row, stretched in time to any rate, on which rules are tried.

    Args:
        profile: the costs of a batch.
        workers: the number of workers.
        requests: the number of arrivals.
        seed: of the random numbers.
        deadline: seconds beyond which a response is late.
        process: makes arrivals for a rate in rows per second; by default they are Poisson, and their mean rate is
            exact.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        workers: int = 1,
        requests: int = 30_000,
        seed: int = 1,
        deadline: float = inf,
        process: Callable[[float], Arrivals] | None = None,
    ) -> None:
        self.profile, self.workers, self.deadline = profile, workers, deadline
        times = np.cumsum(np.random.default_rng([seed, 1]).exponential(1.0, requests))
        self._unit: Floats = times * (requests / times[-1])
        self._services = ServiceTimes(profile, seed)
        self._line: tuple[float, list[float]] = (0.0, [])
        self._process, self._seed = process, seed

    def __call__(self, rate: float, rule: Rule) -> Figures:
        """Return what `rule` does with `rate` rows per second."""
        if self._line[0] != rate:
            self._line = (rate, self._arrivals(rate).tolist())
        rounds = play(self._line[1], rule, self._services, self.profile.max_batch_size, self.workers)
        return figures(rounds, self.profile, self.deadline)

    def _arrivals(self, rate: float) -> Floats:
        if self._process is None:
            return self._unit / rate
        return self._process(rate).times(np.random.default_rng([self._seed, 1]), len(self._unit))


def lowest(cost: Callable[[int], float], start: int, most: int) -> int:
    """Return the whole number from 1 to `most` with the lowest `cost` that a search from `start` finds.

    The search goes first by factors of 1.5, so that a bad start does no harm, then by steps that are halved.
    """
    of = cache(cost)
    at = min(max(start, 1), most)
    while (there := min((_clip(at, 1.5, most), _clip(at, 1 / 1.5, most), at), key=of)) != at:
        at = there
    step = max(1, round(at / 4))
    while True:
        there = min((at, max(at - step, 1), min(at + step, most)), key=of)
        if there == at:
            if step == 1:
                return at
            step = max(1, step // 2)
        at = there


def _clip(limit: int, factor: float, most: int) -> int:
    return int(np.clip(round(limit * factor), 1, most))


SURE = 2.0  # standard errors by which the share of late responses must stay below the allowed one
MARGINS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # standard deviations of the service time, tried in this order
# Loads at which the bound on waits alone must keep the objective.
MARGIN_LOADS = (0.002, 0.005, 0.015, 0.04, 0.1, 0.3, 0.5)
SLACK_STEP = 0.5  # standard deviations of the service time, or times LEAST_SPREAD if that is more
LEAST_SPREAD = 0.02  # share of the deadline
# Bounds on the queue that are tried, in batches under overload.
BOUNDS = (0.5, 0.75, 1.0, 1.125, 1.25, 1.375, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
CAREFUL = 6.0  # standard deviations of the longest service time by which a wait ends early if a late row is lost
HARDLY_MORE = 0.1  # of the share that may be lost
CLEARLY = 0.9  # a bound on the queue must lose less than this share of what the greedy rule loses
BURST = 5.0  # rate in a burst over the rate between bursts
BURST_BATCHES = 20.0  # mean batches, of the longest, per burst cycle
HIGHER = 1.25  # a rate may be this many times its estimate
# Loads, and loads under overload, at which admitted rows must be in time if no row waits on purpose.
LOADS = (0.8, 0.97)
OVERLOADS = (2.0, 1.2, 10.0, 1.5, 1.0)


@dataclass(frozen=True)
class SloPoint:
    """Tells how an objective is kept at one rate.

    Attributes:
        limit: the control limit in rows.
        figures: what this does at the rate.
        max_waiting: rows that may wait; None: as the objective's admission says; 0: any number.
    """

    limit: int
    figures: Figures
    max_waiting: int | None = None


class SloSearch:
    """Finds, for one profile and number of workers, what keeps a latency SLO.

    Attributes:
        profile: the costs of a batch.
        objective: the latency SLO, with the margin and the slack that random service times need.
        admission: what it refuses.

    Raises SettingsError, naming the objective, if even a row alone would be late, or if it cannot be kept under
    overload.
    """

    def __init__(self, profile: Profile, objective: LatencySLO, *, workers: int = 1, seed: int = 1) -> None:
        self.profile = profile
        self._workers, self._seed = workers, seed
        self._capacity = workers * profile.max_rate
        self._spread = float(np.max(profile.cv * profile.service_time_ms)) / 1000.0
        self._take(objective.checked_for(profile))
        self._find_slack()
        self._patient = True  # whether rows may wait on purpose
        if self.objective.counts_refusals:
            self._take_margin()
        elif profile.cv.any():
            self._find_margin()

    def trials(self, requests: int, other: int = 0, *, bursts: bool = False) -> Trials:
        """Return trials with the objective's deadline.

        `other`, if not 0, changes the arrivals. With `bursts` they come in bursts that last some of the longest
        batches.
        """
        period = BURST_BATCHES * float(self.profile.service_time_ms.max()) / 1000.0
        return Trials(
            self.profile,
            workers=self._workers,
            requests=requests,
            seed=self._seed + other,
            deadline=self.objective.deadline,
            process=(lambda rate: MarkovModulated(rate, burst=BURST, period=period)) if bursts else None,
        )

    def rule(self, limit: int, max_waiting: int | None = None, *, rate: float) -> Rule:
        """Return the rule that waits for `limit` rows, at most the largest batch, within the bound on waits.

        With `max_waiting`, arrivals are refused while that many rows wait, and not by the admission at `rate` (rows per
        second); 0: none is refused, and with a `limit` of 1 the rule is greedy.
        """
        allowed, profile, objective = self.admission, self.profile, self.objective
        if max_waiting == 0 and limit == 1:
            return Rule(greedy_table(profile.max_batch_size).tolist())
        table = self.table(limit, max_waiting)
        gate = allowed.gate_at(rate) if max_waiting is None else None
        return Rule(
            table.tolist(),
            allowed.waits(objective.allowance(profile)).tolist(),
            objective.trimmed_by(profile).tolist(),
            max_waiting=max_waiting or 0,
            gate=gate,
        )

    def table(self, limit: int, max_waiting: int | None = None) -> Table:
        """Return the table of a rule; shape (states,), rows.

        Batches are at most as large as the admission says, so that admitted rows are in time. If service times vary
        and `max_waiting` is given, that is not certain anyway, and smaller batches serve fewer rows; then all sizes
        are used.
        """
        if max_waiting is None or not self.profile.cv.any():
            return self.admission.table(self.profile, limit)
        return multi_worker_table(self.profile, limit)

    def overloaded(self) -> Rule:
        """Return the rule for more rows than can be served."""
        allowed, starts = self.admission, self.objective.latest_starts(self.profile)
        return Rule(allowed.table(self.profile).tolist(), None, starts.tolist(), gate=allowed.overload)

    def keeps(self, figures: Figures) -> bool:
        """Return whether the share of late responses is surely within the objective."""
        return _at_most(figures) <= self.objective.late_share

    def at(self, rates: Sequence[float], trials: Trials, estimate: float) -> SloPoint:
        """Return what keeps the objective at all of `rates` (rows per second, ascending) with the least energy.

        Rows are admitted as at the rate `estimate`. A row that is refused counts as late. If nothing keeps the objective,
        the limit is the one that loses least at the highest rate, and the rows that are admitted are in time. The 99th
        percentile is infinite if it is not surely kept at `estimate`.

        Raises SettingsError, naming objective and rate, if even then too many of these are late.
        """
        allowed = self.objective.late_share

        def keeps(limit: int) -> bool:
            rule = self.rule(limit, rate=estimate)
            return all(_lost_at_most(trials(rate, rule)) <= allowed for rate in rates)

        most = _largest(keeps, self.admission.largest) or self._loses_least(rates[-1], trials, estimate)
        figures = trials(estimate, self.rule(most, rate=estimate))
        kept = _lost_at_most(figures) <= allowed
        return SloPoint(most, figures if kept else figures._replace(p99_ms=inf))

    def _loses_least(self, rate: float, trials: Trials, estimate: float) -> int:
        """Return the largest limit with which hardly more rows are lost than with any. Where batches of all sizes take
        nearly as long, that is a large one.
        """
        largest = self.admission.largest
        limits = sorted({1, largest, *(1 << power for power in range(largest.bit_length()))})
        seen = {limit: trials(rate, self.rule(limit, rate=estimate)) for limit in limits}
        least = min(_lost_at_most(each) for each in seen.values())
        most = least + HARDLY_MORE * self.objective.late_share
        best = max(limit for limit in limits if _lost_at_most(seen[limit]) <= most)
        if (late := trials(estimate, self.rule(best, rate=estimate)).late_share) > self.objective.late_share:
            raise SettingsError(
                f"latency_objective={self.objective}: cannot be kept at {estimate:.4g} rows/s: even if no row waits on purpose, "
                f"{100.0 * late:.3g} % of the responses are late; the deadline must be later"
            )
        return best

    def most_in_time(self, lowest: float, highest: float, trials: Trials, bursts: Trials) -> SloPoint:
        """Return what loses least from the `lowest` to the `highest` rate (rows per second): late responses, and
        refusals at their price.

        No row is refused unless a bound on the queue loses clearly less than the greedy rule. Then the largest limit
        is taken with which no more is lost at any of the rates, nor in `bursts`: it takes the least energy. At low
        rates more rows wait until the bound on waits, so the lowest rate counts as well. The true rate may differ from
        the estimate by the factor HIGHER; if it may then exceed what can be served, no row waits on purpose.
        """
        bound, limit = self._bound((lowest, highest), trials), 1
        if self._patient and HIGHER * highest < self._capacity:
            rates = lowest / HIGHER, lowest, highest, HIGHER * highest
            every = [(trials, rate) for rate in rates] + [(bursts, rates[0]), (bursts, highest)]
            least = [self.lost(on(rate, self.rule(1, max_waiting=bound, rate=highest))) for on, rate in every]

            def as_good(limit: int) -> bool:
                rule = self.rule(limit, max_waiting=bound, rate=highest)
                return all(self.lost(on(rate, rule)) <= most for (on, rate), most in zip(every, least, strict=True))

            limit = _largest(as_good, self.admission.largest) or 1
        return SloPoint(limit, trials(highest, self.rule(limit, max_waiting=bound, rate=highest)), bound)

    def _bound(self, rates: Sequence[float], trials: Trials) -> int | None:
        """Return the bound on the queue, in rows, at these rates (rows per second), as in SloPoint."""

        def lost(max_waiting: int | None) -> float:
            rule = self.rule(1, max_waiting=max_waiting, rate=rates[-1])
            return sum(self.lost(trials(rate, rule)) for rate in rates)

        greedy = lost(0)
        if not greedy:
            return 0
        unit = self._workers * self.admission.overload.least
        bound = min([None, *sorted({max(1, round(part * unit)) for part in BOUNDS})], key=lost)
        return bound if lost(bound) <= CLEARLY * greedy else 0

    def lost(self, figures: Figures) -> float:
        """Return the share of all arrivals that is lost: late responses, and refusals at their price."""
        refused = figures.refused_share
        return figures.late_share * (1.0 - refused) + self.objective.refusal_price * refused

    def _take(self, objective: LatencySLO) -> None:
        """Use this objective from now on. Raises SettingsError if it cannot be kept under overload."""
        profile = self.profile
        made = admission(profile, objective, self._workers)
        if made is None:
            alone = float(profile.service_time_ms[0]) + profile.latency_offset_ms
            spared = 1000.0 * max(objective.margin, objective.slack)
            raise SettingsError(
                f"latency_objective={objective}: cannot be kept: a row alone takes {alone:.4g} ms, and {spared:.3g} ms of "
                "slack are needed because service times vary; the deadline must be later"
            )
        self.objective, self.admission = objective, made

    def _find_slack(self) -> None:
        """Find nearly the smallest slack with which admitted rows are in time although no row waits on purpose."""
        given, trials = self.objective, self.trials(10_000)
        if not self.profile.cv.any():  # then none is needed: see policy/online/admission.py
            self._take(given._replace(slack=given.margin))
            return
        unit, low = max(self._spread, LEAST_SPREAD * given.deadline), 0.0

        def good(units: float) -> bool:
            self._take(given._replace(slack=max(given.margin, units * unit)))
            rules = [(load, self.overloaded()) for load in OVERLOADS]
            rules += [(load, self.rule(1, rate=load * self._capacity)) for load in LOADS]
            return all(self.keeps(trials(load * self._capacity, rule)) for load, rule in rules)

        high = 0.0
        while not good(high):
            low, high = high, high + SLACK_STEP
        while high - low > SLACK_STEP / 4.0:
            middle = (low + high) / 2.0
            low, high = (low, middle) if good(middle) else (middle, high)
        self._take(given._replace(slack=max(given.margin, high * unit)))

    def _take_margin(self) -> None:
        """Choose a margin so large that the variation of service times hardly makes a wait on purpose cause a late
        answer.
        """
        margin = max(self.objective.margin, CAREFUL * self._spread)
        latest = self.objective.deadline - self.profile.latency_offset_ms / 1000.0
        self._patient = margin < latest - float(self.profile.service_time_ms[0]) / 1000.0
        if self._patient:
            self.objective = self.objective._replace(margin=margin)

    def _find_margin(self) -> None:
        """Find the smallest margin with which the bound on waits keeps the objective at moderate load."""
        given, trials = self.objective, self.trials(20_000)
        for deviations in MARGINS:
            tried = given._replace(margin=max(given.margin, deviations * self._spread))
            if admission(self.profile, tried, self._workers) is None:
                break
            self._take(tried)
            rates = [load * self._capacity for load in MARGIN_LOADS]
            if all(self.keeps(trials(rate, self.rule(self.admission.largest, rate=rate))) for rate in rates):
                break


def _largest(good: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` that is good, by bisection; 0 if not even 1 is."""
    if good(most):
        return most
    least = 1
    if not good(least):
        return 0
    while most - least > 1:
        middle = (least + most) // 2
        if good(middle):
            least = middle
        else:
            most = middle
    return least


def _lost_at_most(figures: Figures) -> float:
    """Return an upper bound on the share of all rows that are late or refused."""
    refused = figures.refused_share + SURE * figures.refused_error
    return refused + (1.0 - refused) * _at_most(figures)


def _at_most(figures: Figures) -> float:
    """Return an upper bound on the share of late responses."""
    return figures.late_share + SURE * figures.late_error
