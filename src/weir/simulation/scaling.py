"""Simulates rules for the number of workers: the real Batcher in virtual time, and workers that take time to start.

`measure_capacity` finds by simulation what each number of workers can do, for Weir's rule (policy/scaling.py).

A worker counts from the decision to start it until it has finished its last batch. A worker that is taken away gets no
more batches, as in a server.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import inf, log
from typing import Any, NamedTuple, Protocol

import numpy as np

from weir.batching import BatchingSettings
from weir.errors import SettingsError
from weir.messages import Dispatch, Wakeup
from weir.policy.cost import Floats, LatencySLO, Prices, Profile
from weir.policy.decision import Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.scaling import Capacity, ScalingObservation, WorkerRange, WorkerScaling
from weir.policy.solve.bank import Bank
from weir.policy.solve.tables import Table, full_batch_table, greedy_table
from weir.simulation.arrivals import Ints, parse_arrivals
from weir.simulation.banks import make_bank
from weir.simulation.engine import (
    Engine,
    Run,
    ServiceTimes,
    SimulatedModel,
    SimulatedWorkers,
    Whole,
)
from weir.simulation.replicas import Replicas, SeenQueues, best_tables, looks
from weir.simulation.results import ResponseFigures, response_figures
from weir.simulation.simulator import (
    SOLVED,
    Progress,
    check_count,
    check_seconds,
    count_of,
    objective_for,
    policy_for,
    settings_for,
)
from weir.simulation.statistics import plain

# What each number of workers can do.

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97)
PART_ROWS = 100_000  # of each simulation
LEAST_LOAD, MOST_LOAD, NEAR = 0.001, 0.995, 0.002  # of the search for the highest load, and how near it comes
LEAST_LATE = 0.01  # smaller late shares, by what is allowed, say little about where it is
SURE = 2.0  # standard errors by which the share of late responses must stay below the allowed one
DEFAULT_LATE = 0.01  # the share of late responses for which a rule prepares where no objective states one
LEAST_SLACK = 0.1  # share of the deadline: the queue's last row may wait at least this long, or nothing could
KNEE_STEP, FLAT = 0.005, 0.1  # of the load; and the share by which workers times cost may exceed the least


@dataclass(frozen=True)
class CapacityRequest:
    """Says what a capacity is measured for.

    Attributes:
        profile: the costs of a batch on one worker.
        most: the most workers.
        start_up: seconds that a worker takes to start.
        objective: the latency SLO to be kept.
        target_load: the share of what the workers can serve that is used at most. Without both, it is the knee of the
            cost.
        prices: the weights of latency and energy in that cost.
        solved: whether the policy is a solved one. Without an objective it then waits for the best control limit; with
            one it takes the fastest batches. Otherwise the policy is taken to be greedy.
    """

    profile: Profile
    most: int
    start_up: float
    objective: LatencySLO | None = None
    target_load: float | None = None
    prices: Prices = Prices()
    solved: bool = False

    def solve(self) -> Capacity:
        """Return what 1 ... `most` workers can do; see `measure_capacity`."""
        return measure_capacity(self)


def measure_capacity(request: CapacityRequest, *, seed: int = 1) -> Capacity:
    """Return what 1 ... `most` workers can do, simulated for some numbers and interpolated between them.

    The knee at some rate is the fewest workers for which workers times cost is within 10 % of the least that more
    workers reach. (With the response time for the cost, that least is the maximum of Kleinrock's power.)

    Raises SettingsError if one worker cannot keep the objective at any rate.
    """
    profile, objective = request.profile, request.objective
    if objective is not None:
        objective.checked_for(profile)
    counts = [count for count in COUNTS if count < request.most] + [request.most]
    replicas = Replicas(profile, 1)
    found = [_Measured(request, replicas.with_workers(count), seed) for count in counts]
    every = np.arange(1, request.most + 1)
    figures = np.array([each.figures for each in found])  # shape (counts, loads, 3)
    flat = figures.reshape(len(counts), -1)
    between = np.stack([np.interp(every, counts, column) for column in flat.T], axis=1)
    shares = np.interp(every, counts, [each.share for each in found])
    if objective is None and request.target_load is None:
        shares = _knees(request, between.reshape(request.most, len(LOADS), 3))
    rates = np.maximum.accumulate(shares * every * profile.max_rate)
    return Capacity(
        _goal(request),
        tuple(rates.tolist()),
        profile.max_rate,
        _slack(request),
        DEFAULT_LATE if objective is None else objective.late_share,
        LOADS,
        tuple(tuple(map(tuple, each)) for each in between.reshape(request.most, len(LOADS), 3).tolist()),
    )


def _goal(request: CapacityRequest) -> str:
    objective = [] if request.objective is None else [str(request.objective)]
    load = [] if request.target_load is None else [f"load={request.target_load:g}"]
    return ", ".join(objective + load) or "knee"


def _slack(request: CapacityRequest) -> float:
    """Return how long the queue's last row may wait until its batch starts: until it would be late; without a deadline
    as long as a start takes, or a batch.
    """
    profile, objective = request.profile, request.objective
    batch = (float(profile.service_time_ms[profile.best_batch_size - 1]) + profile.latency_offset_ms) / 1000.0
    if objective is None:
        return max(batch, request.start_up)
    return max(objective.deadline - batch, LEAST_SLACK * objective.deadline)


class _Measured:
    """Says what the workers of `replicas` do. `share` is the highest load at which they keep the goal, and `figures` has the
    mean and the 99th percentile of the response time (ms) and the busy share, by LOADS.
    """

    def __init__(self, request: CapacityRequest, replicas: Replicas, seed: int) -> None:
        self._request, self._seed, self._replicas = request, seed, replicas
        seen = self._looks(LOADS)
        estimates = [each.estimate() for each in seen]
        self.figures = [(each.response_time_ms, each.p99_ms, each.busy) for each in estimates]
        self.share = request.target_load or 1.0
        if request.objective is not None:
            self.share = min(self._highest(request.objective, seen), self.share)

    def _looks(self, loads: Sequence[float]) -> list[SeenQueues]:
        rates = [load * self._replicas.workers * self._request.profile.max_rate for load in loads]
        return looks(self._replicas, list(zip(rates, self._tables(rates), strict=True)), self._seed, PART_ROWS)

    def _tables(self, rates: Sequence[float]) -> list[Table]:
        """Return the tables of the policy that will run, by rate."""
        request, profile = self._request, self._request.profile
        if not request.solved:
            return [greedy_table(profile.max_batch_size)] * len(rates)
        if request.objective is not None:
            return [full_batch_table(profile)] * len(rates)
        return best_tables(self._replicas, rates, request.prices, self._seed)

    def _highest(self, objective: LatencySLO, seen: Sequence[SeenQueues]) -> float:
        """Return the highest load at which the objective is surely kept, by two standard errors. `seen` is by LOADS.

        Raises SettingsError if it is not kept even if there is next to no load.
        """

        def late(seen: SeenQueues) -> float:
            """Return the share of late responses, by what is allowed; at most 1 if the objective is kept."""
            share, error = seen.later_than(1000.0 * objective.deadline)
            return (share + SURE * error) / objective.late_share

        found = dict(zip(LOADS, map(late, seen), strict=True))
        found[LEAST_LOAD] = late(self._looks([LEAST_LOAD])[0])
        if found[LEAST_LOAD] > 1.0:
            raise SettingsError(
                f"latency_objective={objective}: cannot be kept by any number of workers: more rows than that are late even "
                "if hardly any arrive; the deadline must be later"
            )
        if all(each <= 1.0 for each in found.values()):
            found[MOST_LOAD] = late(self._looks([MOST_LOAD])[0])
        while True:
            high = min((load for load, each in found.items() if each > 1.0), default=inf)
            low = max(load for load in found if load < high)
            if high - low <= NEAR or high == inf:
                return low
            tried = _crossing(low, high, found[low], found[high])
            found.update(zip(tried, map(late, self._looks(tried)), strict=True))


def _crossing(low: float, high: float, at_low: float, at_high: float) -> list[float]:
    """Return the load between `low` and `high` at which the late share is expected to be 1, and two around it."""
    lows, highs = (log(max(each, LEAST_LATE)) for each in (at_low, at_high))
    middle = low + (high - low) * lows / (lows - highs)
    around = (middle - NEAR / 2.0, middle, middle + NEAR / 2.0)
    return sorted({min(max(each, low + (high - low) / 8.0), high - (high - low) / 8.0) for each in around})


def _knees(request: CapacityRequest, found: Floats) -> Floats:
    """Return for each number of workers the highest load at which it is the knee, or more than that; shape (most,).

    `found` has shape (most, loads, 3).
    """
    every = np.arange(1, request.most + 1)
    profile, prices = request.profile, request.prices
    power = float(profile.energy_mj[profile.best_batch_size - 1] / profile.service_time_ms[profile.best_batch_size - 1])
    rates = np.arange(KNEE_STEP, LOADS[-1], KNEE_STEP) * request.most * profile.max_rate
    weights = np.array([prices.latency_weight_at(rate) for rate in rates.tolist()])
    products = np.full((request.most, len(rates)), inf)  # workers times their cost, by number and rate
    for count in every.tolist():
        loads = rates / (count * profile.max_rate)
        times, busy = (np.interp(loads, LOADS, found[count - 1, :, column]) for column in (0, 2))
        # They cost by their latency, and by their power while they are busy.
        cost = weights * times + prices.energy_weight * power * busy * count
        products[count - 1] = np.where(loads <= LOADS[-1], count * cost, inf)
    least = np.minimum.accumulate(products[::-1], axis=0)[::-1]
    knees = np.argmax(products <= (1.0 + FLAT) * least, axis=0) + 1
    highest = np.array([rates[knees <= count].max(initial=0.0) for count in every.tolist()])
    highest[-1] = LOADS[-1] * request.most * profile.max_rate
    return np.asarray(highest / (every * profile.max_rate), dtype=np.float64)


# One run.


class WorkerLoad(NamedTuple):
    """Says what a rule may know of the workers of a simulation.

    Attributes:
        seen: what Weir's rule knows.
        rows_running: rows with workers.
        rows_seconds: the time that rows have spent waiting or with workers until now, in seconds of all together.
        busy_seconds: the time that workers have been busy until now, likewise.
    """

    seen: ScalingObservation
    rows_running: int
    rows_seconds: float
    busy_seconds: float

    @property
    def present(self) -> int:
        """The workers that are ready or starting."""
        return self.seen.ready + len(self.seen.starting)


class Autoscaler(Protocol):
    """Says every `period` seconds how many workers there shall be."""

    @property
    def period(self) -> float:
        """Seconds between two decisions."""

    def decide(self, load: WorkerLoad) -> int:
        """Return how many workers there shall be, those included that are starting."""


class _WeirAutoscaler:
    """Weir's rule, as a server applies it."""

    period = WorkerScaling.INTERVAL

    def __init__(self, scaling: WorkerScaling) -> None:
        self._scaling = scaling

    def decide(self, load: WorkerLoad) -> int:
        return self._scaling.decide(load.seen).workers


class ScalingRun(NamedTuple):
    """Says what happened under one rule.

    Attributes:
        run: the requests and batches.
        worker_seconds: the seconds of all workers together, those included in which they started, from `since` on.
        since: the instant from which on it counts.
        counts: the instants at which the number of workers changed, and the number from then on.
        starts: how many workers were started.
    """

    run: Run
    worker_seconds: float
    since: float
    counts: Sequence[tuple[float, int]]
    starts: int


Changed = Callable[[int], None]


class ScaledWorkers(SimulatedWorkers):
    """The workers of one model, whose number a rule decides.

    Args:
        ready: how many there are at the start.
        places: see SimulatedWorkers.
        start_up: seconds that a further one takes to start.
        allowed: the fewest and the most.
        rule: decides; None: their number stays.
        changed: called with the number of ready workers when it has changed.

    Attributes:
        counts: the instants at which the number of workers changed, and the number from then on.
        starts: how many workers were started, with the first.
    """

    def __init__(
        self, ready: int, places: int, start_up: float, allowed: WorkerRange, rule: Autoscaler | None, changed: Changed
    ) -> None:
        super().__init__(ready, places)
        self._start_up, self._allowed, self._rule, self._changed = start_up, allowed, rule, changed
        self._batches = dict.fromkeys(range(ready), 0)  # by worker that is ready or leaves: how many it has
        self._leaving: set[int] = set()
        self._starting: dict[int, float] = {}  # by worker: the instant at which it is ready
        self._next = 0.0  # when the rule is asked next
        self._rows = 0  # with workers
        self._sums = [0.0, 0.0, 0.0]  # seconds of workers, of workers that are busy, and of rows
        self._at = self._since = 0.0
        self.counts: list[tuple[float, int]] = [(0.0, ready)]
        self.starts = ready

    def serve(self, model: SimulatedModel) -> None:
        """See SimulatedWorkers."""
        super().serve(model)
        self._model, self._engine, self._batcher = model, model.engine, model.batcher
        if self._rule is not None:
            self._engine.schedule(0.0, self._turn, first=True)

    def count_from_now(self) -> None:
        """Count the workers' seconds from now on."""
        self._account()
        self._since = self._sums[0]

    @property
    def worker_seconds(self) -> float:
        """The seconds of all workers together so far, since `count_from_now`."""
        return self._sums[0] - self._since

    def begin(self, model: SimulatedModel, cut: Dispatch) -> None:
        """See SimulatedWorkers."""
        self._account()
        self._batches[cut.worker] += 1
        self._rows += cut.rows
        super().begin(model, cut)

    def end(self, model: SimulatedModel, cut: Dispatch) -> None:
        """See SimulatedWorkers."""
        self._account()
        self._batches[cut.worker] -= 1
        self._rows -= cut.rows
        super().end(model, cut)
        self._forget_idle_leavers()

    def _account(self) -> None:
        now, batches = self._engine.now, self._batches
        busy = sum(count > 0 for count in batches.values())
        each = len(batches) + len(self._starting), busy, self._batcher.waiting_rows + self._rows
        self._sums = [total + (now - self._at) * count for total, count in zip(self._sums, each, strict=True)]
        self._at = now

    @property
    def _ready(self) -> list[int]:
        return [worker for worker in self._batches if worker not in self._leaving]

    @property
    def _present(self) -> int:
        return len(self._batches) - len(self._leaving) + len(self._starting)

    def _turn(self) -> None:
        """Let workers begin that are ready by now, and ask the rule if it is its turn."""
        now, batcher = self._engine.now, self._batcher
        # At the end a policy may wait for ever, until the batcher drains.
        if self._engine.over and not batcher.running and not (batcher.has_waiting and not self._ready):
            return  # all is done: no more time is counted
        self._account()
        for worker in [each for each, ready in self._starting.items() if ready <= now]:
            del self._starting[worker]
            self._join(worker)
        if self._rule is not None and now >= self._next:
            self._resize(self._allowed.clip(self._rule.decide(self._load())))
            self._next = now + self._rule.period
            self._engine.schedule(self._next, self._turn, first=True)
        if batcher.has_waiting:
            self._model.poll(Wakeup.WORKER)

    def _load(self) -> WorkerLoad:
        now, batcher = self._engine.now, self._batcher
        starting = [ready - now for ready in self._starting.values()]
        seen = ScalingObservation(
            now,
            batcher.arrivals,
            batcher.waiting_rows,
            len(batcher.running),
            len(self._ready),
            starting,
            self._start_up,
        )
        return WorkerLoad(seen, self._rows, self._sums[2], self._sums[1])

    def _resize(self, wanted: int) -> None:
        before, now = self._present, self._engine.now
        while self._present < wanted:
            taken = {*self._batches, *self._starting}
            worker = next(index for index in range(len(taken) + 1) if index not in taken)
            self._starting[worker] = now + self._start_up
            self._engine.schedule(now + self._start_up, self._turn, first=True)
            self.starts += 1
        while self._present > wanted:
            if self._starting:
                del self._starting[max(self._starting, key=self._starting.__getitem__)]
            else:
                self._leave(max(self._ready))
        if before != wanted:
            self.counts.append((now, wanted))

    def _join(self, worker: int) -> None:
        self._batches[worker] = 0
        self._batcher.worker_ready(worker, self.places, self._engine.now)
        self._changed(len(self._ready))
        self._batcher.reconsider()

    def _leave(self, worker: int) -> None:
        self._leaving.add(worker)
        self._batcher.worker_leaves(worker)
        self._forget_idle_leavers()
        self._changed(len(self._ready))

    def _forget_idle_leavers(self) -> None:
        for worker in [each for each in self._leaving if not self._batches[each]]:
            self._leaving.remove(worker)
            del self._batches[worker]
            self._batcher.worker_lost(worker, self._engine.now)


# Comparisons.


WEIR = "weir"  # the rule that a server applies


def range_of(text: str, allowed: WorkerRange) -> WorkerRange:
    """Return the fewest and the most workers under the rule that `text` names, `weir` or `fixed:4`. Raises SettingsError."""
    name, _, workers = text.partition(":")
    if text == WEIR:
        return allowed
    if name != "fixed":
        raise SettingsError(f"scaling={text!r}: must be weir, or a number of workers as in fixed:4")
    fixed = allowed.clip(WorkerRange.parse(workers, f"scaling={text!r}: workers").most)
    return WorkerRange(fixed, fixed)


@dataclass(frozen=True)
class ScalingOutcome(ResponseFigures):
    """Says what one rule did with the requests after the warm-up.

    Attributes:
        rule: its text.
        worker_hours: of all workers, those included in which they started.
        mean_workers, most_workers: of those that there should be at a time.
        busy_share: the share of the workers' hours in which they ran batches.
        starts: how many workers were started, without the first.
        counts: instants in seconds at which the number of workers changed, and the number from then on.
    """

    rule: str
    worker_hours: float
    mean_workers: float
    most_workers: int
    busy_share: float
    starts: int
    counts: Sequence[tuple[float, int]] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        return {name: plain(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class ScalingComparison:
    """Rules that got the same arrivals. `deadline` is in seconds; responses after it count as late (None: none do)."""

    arrivals: str
    rate: float
    allowed: WorkerRange
    start_up: float
    goal: str
    deadline: float | None
    policy: str
    outcomes: Mapping[str, ScalingOutcome]

    def heading(self) -> str:
        """Return one line that says what was simulated."""
        late = "" if self.deadline is None else f"; late after {self.deadline:g} s"
        return (
            f"{self.arrivals}: {self.rate:,.4g} rows/s on {self.allowed} workers, which start in {self.start_up:g} s; "
            f"goal {self.goal}{late}; policy {self.policy}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a JSON-able dict."""
        own = {name: value for name, value in vars(self).items() if name not in ("allowed", "outcomes")}
        return own | {
            "workers": str(self.allowed),
            "outcomes": {name: each.to_dict() for name, each in self.outcomes.items()},
        }


@dataclass(frozen=True)
class ScalingTrial:
    """Has what all rules of a comparison have in common.

    Attributes:
        profile: the costs of a batch on one worker.
        arrivals: seconds, ascending; shape (requests,).
        rows: of each request; shape (requests,). None: 1 each.
        allowed: the fewest and the most workers.
        start_up: seconds that a worker takes to start.
        policy: when a batch is cut; `smdp` is solved for each number of workers.
        objective, target_load, prices: what the workers shall keep: see CapacityRequest.
        deadline: each request's timeout in seconds.
        idle_after: seconds without a request after which Weir keeps no worker.
        settings: of the batcher; by default they do not limit the policy.
        warm_up: the share of the time, from the first arrival on, that does not count.
        seed: of random service times.
    """

    profile: Profile
    arrivals: Floats
    allowed: WorkerRange
    start_up: float
    policy: str = "greedy"
    objective: LatencySLO | None = None
    target_load: float | None = None
    prices: Prices = Prices()
    deadline: float | None = None
    idle_after: float = 60.0
    settings: BatchingSettings | None = None
    warm_up: float = 0.1
    seed: int = 1
    rows: Ints | None = None

    @cached_property
    def capacity(self) -> Capacity:
        """The capacity of each number of workers. Raises SettingsError if the objective cannot be kept."""
        request = CapacityRequest(
            self.profile,
            self.allowed.most,
            self.start_up,
            self.objective,
            self.target_load,
            self.prices,
            solved=self.policy == SOLVED,
        )
        return measure_capacity(request, seed=self.seed)

    @cached_property
    def _bank(self) -> Callable[[int], Bank]:
        """Makes the bank for that many workers, once."""
        return cache(
            lambda workers: make_bank(
                self.profile, self.prices, workers=workers, objective=self.objective, seed=self.seed
            )
        )

    @property
    def late_after(self) -> float | None:
        """Seconds after which a response is late; None: never."""
        return self.objective.deadline if self.objective is not None else self.deadline

    def run(self, rule: str | Autoscaler) -> ScalingRun:
        """Return what happens under a rule, or the rule of this text. Raises SettingsError."""
        whole, settings, allowed = Whole(), settings_for(self.profile, self.settings), self.allowed
        scaler = None if isinstance(rule, str) else rule
        if isinstance(rule, str):
            allowed = range_of(rule, allowed)
            if rule == WEIR:
                scaler = _WeirAutoscaler(WorkerScaling(allowed, self.capacity, self.idle_after))
        ready, places = max(allowed.least, 1), self.profile.pipeline_depth
        policy, changed = self._policy(settings, ready)
        workers = ScaledWorkers(ready, places, self.start_up, allowed, scaler, changed)
        services = ServiceTimes(self.profile, self.seed)
        model = SimulatedModel(Engine(), settings, policy, services, whole, workers, timeout=self.deadline)
        model.engine.schedule(self.since, workers.count_from_now)
        model.arrive(0, self.arrivals.tolist(), None if self.rows is None else self.rows.tolist())
        model.engine.finish()
        run = whole.run(self.profile, self.allowed.most, self.arrivals)
        return ScalingRun(run, workers.worker_seconds, self.since, workers.counts, workers.starts)

    @property
    def since(self) -> float:
        """The instant in seconds from which on everything counts."""
        return float(self.arrivals[0] + self.warm_up * (self.arrivals[-1] - self.arrivals[0]))

    def _policy(self, settings: BatchingSettings, first: int) -> tuple[Policy, Changed]:
        if self.policy != SOLVED:
            return policy_for(self.policy, self.profile, settings=settings), lambda workers: None
        solved = SolvedPolicy(self._bank(first))

        def changed(workers: int) -> None:
            if workers:
                solved.adopt(self._bank(workers))

        return solved, changed

    def outcome(self, text: str) -> ScalingOutcome:
        """Return what the rule `text` does. Raises SettingsError."""
        return self.outcome_of(text, self.run(text))

    def outcome_of(self, text: str, made: ScalingRun) -> ScalingOutcome:
        """Return what the rule `text` has done in a run."""
        run, since = made.run, made.since
        busy = float((run.batches.end - np.maximum(run.batches.start, since)).clip(min=0.0).sum())
        return ScalingOutcome(
            **vars(response_figures(run, since, self.late_after)),
            rule=text,
            worker_hours=made.worker_seconds / 3600.0,
            mean_workers=made.worker_seconds / (run.seconds - since),
            most_workers=max(count for _, count in made.counts),
            busy_share=busy / made.worker_seconds,
            starts=made.starts - 1,
            counts=made.counts,
        )


def simulate_scaling(
    profile: Profile, rules: Sequence[str], arrivals: str, *, workers: WorkerRange | str, start_up: float = 10.0,
    requests: int | None = None, seed: int = 1, warm_up: float = 0.1, policy: str = "greedy", prices: Prices | None = None,
    objective: LatencySLO | str | None = None, target_load: float | None = None, deadline: float | None = None,
    idle_after: float = 60.0, settings: BatchingSettings | None = None, progress: Progress | None = None,
) -> ScalingComparison:  # fmt: skip
    """Return what rules for the number of workers do with the same arrivals.

    Args:
        profile: the costs of a batch on one worker.
        rules: texts: `weir`, as a server decides; `fixed:8`, always that many.
        arrivals: the text of a process (see arrivals.py). A load is a share of what the most workers can serve.
        workers: the fewest and the most, also as a text.
        requests: how many arrive; 100 000 by default, of a trace all.
        progress: called with (what, done, of all).

    The other arguments are those of ScalingTrial. Raises SettingsError naming the argument, its value and the rule.
    """
    allowed = WorkerRange.parse(workers) if isinstance(workers, str) else workers
    check_count("seed", seed, 0)
    for name, seconds in (("deadline", deadline), ("start_up", start_up), ("idle_after", idle_after)):
        check_seconds(name, seconds)
    if target_load is not None and not 0.0 < target_load <= 1.0:
        raise SettingsError(f"target_load={target_load!r}: must be a share, greater than 0 and at most 1")
    process = parse_arrivals(arrivals, capacity=allowed.most * profile.max_rate)
    count = count_of(process, requests, warm_up)
    trial = ScalingTrial(
        profile, process.times(np.random.default_rng([seed, 0]), count), allowed, start_up, policy=policy,
        objective=objective_for(objective, profile), target_load=target_load, prices=prices or Prices(), deadline=deadline,
        idle_after=idle_after, settings=settings, warm_up=warm_up, seed=seed, rows=process.sizes(0, count),
    )  # fmt: skip
    for text in rules:
        range_of(text, allowed)
    outcomes = {}
    for done, text in enumerate(rules):
        if progress is not None:
            progress("rules", done, len(rules))
        outcomes[text] = trial.outcome(text)
    rate = int(process.sizes(0, count).sum()) / float(trial.arrivals[-1] - trial.arrivals[0])
    return ScalingComparison(arrivals, rate, allowed, start_up, trial.capacity.goal, trial.late_after, policy, outcomes)
