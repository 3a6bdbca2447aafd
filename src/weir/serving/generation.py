"""The generation that a service runs between two loads: a model with its settings, policy, executor and driver; and the report of its policy, whose
predictions stand next to what was measured."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

from weir.batching.batcher import Batcher
from weir.batching.service_time import ServiceTime
from weir.batching.workers import WorkerKinds
from weir.errors import Conflict, ModelNotReady, SettingsError, WeirError
from weir.messages import LONGEST_TIMEOUT, Form, Observer, Request
from weir.policy.decision import complete
from weir.policy.loading import load_policy
from weir.policy.residency import Presence
from weir.serving.delivery import Delivery, methods_of, tracer_among
from weir.serving.driver import LOADING, Driver, DriverPhase, WorkerStarts
from weir.serving.handle import ModelFacts, ResidencyView
from weir.serving.hooks import HookedBatches, ServiceHooks
from weir.telemetry.recorder import Metrics, Recorder, RollingWindow, WindowSummary
from weir.workers.executor import (
    Executor,
    MakeExecutor,
    Reserve,
    SharesWorkers,
    capabilities_of,
    make_executor,
    shortage,
)
from weir.workers.run.steps import ResultWriter
from weir.workers.settings import WorkerSettings
from weir.workers.timer import sleep
from weir.workers.turns import DeviceGroup

if TYPE_CHECKING:
    from weir.policy.cost import Profile
    from weir.tuning.learning import StartMeasurement
    from weir.tuning.policy_tuner import PolicyTuner
    from weir.tuning.workers import WorkerTuner
    from weir.workers.process.launch import Templates

JSON_TYPES = (bool, int, float, str, list, dict, type(None))


class WorkerView(TypedDict):
    """A worker: its index, whether it runs bulk work only, its process, how many batches it has, how often it was replaced, and why it is not ready.

    In a cluster also the id and the address of its node, the ids of its GPUs and that of its actor; elsewhere they are empty. `kind` is empty if
    all workers are alike.
    """

    index: int
    bulk: bool
    state: str
    pid: int | None
    in_flight: int
    restarts: int
    reason: str
    node: str
    address: str
    gpus: list[str]
    actor: str
    kind: str


VIEW_DEFAULTS: dict[str, Any] = {"kind": "", "bulk": False, "node": "", "address": "", "gpus": [], "actor": ""}


class LoadedModel(NamedTuple):
    """A model with its settings, the arguments for its constructor, and the settings of its workers."""

    facts: ModelFacts
    params: dict[str, Any]
    workers: WorkerSettings


class OnDemand(Protocol):
    """Starts generations when requests come for them, and puts them to sleep. Their workers are forked from `templates`."""

    @property
    def templates(self) -> "Templates":
        """The process that workers are forked from."""

    def wanted(self, generation: "Generation", request: Request, now: float) -> WeirError | None:
        """Have `generation` started for a request. Return the error that refuses it, or None if it may wait."""

    def forsaken(self, generation: "Generation") -> None:
        """Note that no request waits for the start of `generation` any more."""

    async def load(self, generation: "Generation") -> None:
        """Have `generation` started, unless a request has; return when it is. Raises what its `begin` raises, and ModelNotReady."""

    def ended(self, generation: "Generation") -> None:
        """Note that `generation` was stopped for good."""

    def explain(self, generation: "Generation") -> ResidencyView:
        """Return where it is and why, and what it takes."""


class Generation:
    """One loaded form of a model: its class and settings, its policy, its executor, and the driver of its batches.

    A service serves with one generation at a time. A reload starts another generation, which replaces this one; this one then
    finishes what it accepted and is stopped. A stopped generation can be started again, with a new driver.

    Arguments:
        loaded: the model.
        executor: replaces the workers that the settings describe, unless it is None; or makes what does, as make_executor does.
        device: the models with which this one takes turns.
        hooks: the hooks of the service.
        observers: are notified of what happens.
        clock: returns the time in seconds.
        on_demand: starts it when a request comes; without it, requests before the start are refused.

    Raises SettingsError for an unusable policy, and for an `after` hook of a streaming model.
    """

    def __init__(
        self, loaded: LoadedModel, *, executor: Executor | MakeExecutor | None, hooks: ServiceHooks, observers: Sequence[Observer],
        clock: Callable[[], float], device: DeviceGroup | None = None, on_demand: OnDemand | None = None,
    ) -> None:  # fmt: skip
        facts, self.params, self._workers = loaded
        self.facts = facts
        self.model, self.batching, self.settings = facts.model, facts.batching, facts.settings
        self.label = label = facts.label
        self._shared: SharesWorkers | None = None
        largest = self.batching.max_batch_size
        self.policy = load_policy(
            self.batching.policy, max_batch_size=largest, max_queue_delay=self.batching.max_queue_delay
        )
        self.tuner: PolicyTuner | None = None
        if complete(self.policy).adopts_banks:
            from weir.tuning.policy_tuner import Tuning, make_tuner  # loads numpy, which only a solved policy needs

            tuning = Tuning(self, self._workers, largest, clock, partial(sleep, clock), watch=not any(hooks))
            self.tuner = make_tuner(self.policy, tuning)
        self._clock = clock
        self.scaler = self._make_scaler()
        views = [each for each in observers if isinstance(each, Metrics)]
        self.recorder = Recorder(detailed=bool(views))
        self.observers = (self.recorder, *(each for each in observers if not isinstance(each, Metrics)))
        self.byte_meters = methods_of(self.observers, "transferred")
        for view in views:
            view.attach(label, self.recorder, self)
        self.tracing = tracer_among(observers)
        self.streaming = self.facts.streaming
        self.takes_as_is = not (self.facts.needs_measure or self.facts.takes_tensors or self.streaming)
        self.form = Form(self.settings.timeout)  # of the calls in this process that state nothing else
        self.simple = self.takes_as_is and self.tracing is None  # a call in this process goes to the driver at once
        self.executor = executor
        self._unmet = capabilities_of(executor).unmet or str
        self._hooks = hooks
        self._device = device
        self.on_demand = on_demand
        self._demand = () if on_demand is None else (partial(on_demand.wanted, self), partial(on_demand.forsaken, self))
        self._leaving: Driver | None = None  # what finishes its requests while `driver` waits for others
        self._stops = 0  # under way: a hurried one does not wait for a patient one
        self._stopped = asyncio.Event()
        self.stopping = False
        self._arrivals = 0  # rows that came before the present driver
        self.driver = self._new_driver()

    def _make_scaler(self) -> "WorkerTuner | None":
        if self._workers.scale is None:
            return None
        from weir.tuning.workers import WorkerTuner  # loads numpy

        largest, clock = self.batching.max_batch_size, self._clock
        return WorkerTuner(
            self,
            self._workers,
            largest,
            self.tuner,
            drain_timeout=self.settings.drain_timeout,
            clock=clock,
            pause=partial(sleep, clock),
        )

    def _new_driver(self) -> Driver:
        """Build what serves from one start to one stop."""
        hooks, scaler = self._hooks, self.scaler
        if hooks.after and self.streaming:
            service = type(getattr(hooks.after, "__self__", self)).__name__
            raise SettingsError(f"{service}.after_batch: gets no results of a streaming model; use its postprocess")
        own = self._own_executor()
        capabilities = capabilities_of(own)
        if self.on_demand is not None and capabilities.fork_from is not None:
            capabilities.fork_from(self.on_demand.templates)
        device = self._device if capabilities.unmet is None else None  # the others take the turns
        self._shared = capabilities.sharing
        if (self._shared or device) is not None and self._workers.worker_kinds:
            raise SettingsError(
                f"worker_kinds={self._workers.worker_kinds}: models that share workers have workers of one kind; leave it out"
            )
        batcher = Batcher(self.batching, self.policy, self._workers.kind_numbers)
        self.window = RollingWindow(self._clock, lambda: batcher.arrivals)
        observers = (*self.observers, self.window, *(each for each in (self.tuner, scaler) if each is not None))
        writer = ResultWriter(self.model, (KeyboardInterrupt,), self.label) if any(hooks) else None
        hooked = None if writer is None else partial(HookedBatches, hooks, writer)
        start_bulk = capabilities.start_bulk_workers if self._workers.bulk_workers else None
        driver = Driver(
            batcher,
            own,
            Delivery(self.label, observers),
            self._clock,
            streaming=self.streaming,
            starts=WorkerStarts(
                None if scaler is None else scaler.decide, start_bulk, self._measurement(), *self._demand
            ),
            hooks=hooked,
            device=device,
        )
        self.withdraw = driver.cancel  # one object for all calls in this process
        return driver

    def _own_executor(self) -> Executor:
        """Return the executor as the settings describe it, or as it was given."""
        own = self.executor
        if own is not None and not callable(own):
            return own
        largest = self.batching.max_batch_size
        return (own or make_executor)(self.model, self.params, self._workers, name=self.label, max_batch_size=largest)

    def _measurement(self) -> "Callable[[Executor, Reserve | None], StartMeasurement] | None":
        """Return what makes the measurement of the workers while they start; None if there is no need of one."""
        if self.tuner is None:
            return None
        from weir.tuning.policy_tuner import start_measurement

        return start_measurement(self.tuner, self.model)

    @property
    def service_time(self) -> ServiceTime:
        """The times of batches since the last start, as far as they are known."""
        return self.driver.batcher.service

    def policy_changed(self) -> None:
        """Let the policy decide again about all that waits: it has other tables."""
        self.window.forget()  # it was measured under the former tables
        self.driver.policy_changed()

    def renew(self) -> None:
        """Make a new driver if the present one was stopped. Raises Conflict if it runs, unless a request may have started it."""
        if self.driver.phase is DriverPhase.RUNNING and self.on_demand is None:
            raise Conflict(f"service {self.label!r} is already running")
        self.stopping = False
        self._stopped.clear()
        if self.driver.phase is DriverPhase.STOPPED:
            self._replace_driver()

    def _replace_driver(self) -> Driver:
        """Serve with a new driver from now on, and return the former one."""
        former = self.driver
        self._arrivals += former.batcher.arrivals
        self.driver = self._new_driver()
        self.driver.may_have_blocks(former)
        return former

    @property
    def arrivals(self) -> int:
        """The number of rows accepted since this model was loaded for the first time, without bulk work."""
        return self._arrivals + self.driver.batcher.arrivals

    async def start(self) -> None:
        """Start the workers, on the running event loop; return when all are ready. Raises what the executor raises, and
        ModelNotReady if there is no memory for the model."""
        if self.on_demand is not None:
            await self.on_demand.load(self)
        else:
            await self.begin()

    async def begin(self) -> None:
        """Do what `start` does, whether there is memory or not."""
        began = self._clock()
        await self.driver.start()
        self.window.forget()
        if self.tuner is not None:
            self.tuner.open()
        if self.scaler is not None:
            self.scaler.open(self._clock() - began)

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Accept no more requests, finish the accepted ones within `drain_timeout` seconds (None: the setting), fail the rest
        with Draining, and stop the workers. Idempotent."""
        seconds = self.settings.drain_timeout if drain_timeout is None else drain_timeout
        until = self._clock() + seconds
        self.stopping = True
        self._stops += 1
        try:
            if self._leaving is not None:
                self.driver.draining = True
                await self._leaving.stop(seconds)
                seconds = max(0.0, until - self._clock())
            if self.scaler is not None and self.driver.phase is DriverPhase.RUNNING:
                await self.driver.drain(seconds)  # first, since requests may wait for a worker that starts
                seconds = 0.0
            await self._close_tuners()
            await self.driver.stop(seconds)
        finally:
            self._stops -= 1
            if not self._stops:
                self._stopped.set()
        if self.on_demand is not None:
            self.on_demand.ended(self)

    @property
    def drivers(self) -> list[Driver]:
        """Those that may have accepted requests."""
        return [self.driver] if self._leaving is None else [self._leaving, self.driver]

    async def sleep(self) -> None:
        """Finish what was accepted, and stop the workers. Requests that come from now on wait until it is started again."""
        if self.stopping:  # which does the same; nothing may wait for another start
            await self._stopped.wait()
            return
        former = self._replace_driver()
        former.note_accepted()
        self._leaving = former
        try:
            await former.drain(LONGEST_TIMEOUT)  # each request has a deadline
            await self._close_tuners()
        finally:
            await former.stop(0.0)
            self._leaving = None

    async def _close_tuners(self) -> None:
        for each in (self.scaler, self.tuner):
            if each is not None:
                await each.close()

    def cancel(self, request: Request) -> None:
        """Cancel a request whose caller has left; nothing happens if it has already ended."""
        leaving = self._leaving
        driver = self.driver if leaving is None or not leaving.accepted(request) else leaving
        driver.cancel(request)

    async def add_worker(self) -> None:
        """Start one more worker; return when it is ready. If other models use the workers, it is one for them too. Raises
        ModelNotReady unless the generation runs, and what the executor raises."""
        driver = self._running_driver()
        self._check_fixed()
        async with self._alone():
            await driver.add_worker()
            self._resized(1)

    async def remove_worker(self) -> None:
        """Let the last worker finish its batches for up to the setting `drain_timeout`, and stop it, also for other models that
        use it. Raises Conflict for the only worker, and ModelNotReady unless the generation runs."""
        driver = self._running_driver()
        self._check_fixed()
        async with self._alone():
            if self.workers.first_workers == 1:
                raise Conflict(f"model {self.label!r} has one worker left; to remove it, stop the service")
            try:
                self._resized(-1)
            except SettingsError as error:  # the last worker of its kind
                raise Conflict(error.message) from None
            await driver.remove_worker(driver.workers()[-1], self.settings.drain_timeout)

    def _alone(self) -> AbstractAsyncContextManager[None]:
        """Return what keeps other models from adding or removing workers meanwhile."""
        return nullcontext() if self._shared is None else self._shared.pool.resizing

    def _resized(self, by: int) -> None:
        if self._shared is None:
            self._workers = replace(self._workers, workers=self._workers.first_workers + by)

    def _check_fixed(self) -> None:
        """Raise Conflict if the number of workers follows the load."""
        if self._workers.scale is not None:
            raise Conflict(
                f"model {self.label!r} has workers={self._workers.workers}, so it autoscales; set a fixed number to add or remove workers yourself"
            )

    @property
    def workers(self) -> WorkerSettings:
        """The settings of the workers; their field `workers` is the present number of workers, or its range as a text."""
        added = 0 if self._shared is None else self._shared.pool.added
        return replace(self._workers, workers=self._workers.first_workers + added) if added else self._workers

    @property
    def shares_workers(self) -> bool:
        """Whether other models may use its workers."""
        return self._shared is not None or self.driver.turns is not None

    @property
    def worker_count(self) -> int:
        """The present number of workers, whatever their state."""
        return self.workers.first_workers if self.workers.scale is None else len(self.driver.workers())

    def _running_driver(self) -> Driver:
        if self.driver.not_ready_reason == LOADING or self.driver.phase is not DriverPhase.RUNNING:
            raise ModelNotReady(f"model {self.label!r} is not ready: {self.not_ready_reason}")
        return self.driver

    @property
    def not_ready_reason(self) -> str:
        """The reason why requests are not accepted or not run; "" if they are."""
        driver = self.driver
        refused = driver.refusing or ("draining" if driver.draining else "")
        return refused or self._unmet() or self.failed_on_demand

    @property
    def failed_on_demand(self) -> str:
        """The reason why it could not be loaded when a request came, as long as it was not loaded since; "" in any other case."""
        residency = self.residency
        return residency["reason"] if residency is not None and residency["state"] == Presence.FAILED.value else ""

    @property
    def residency(self) -> ResidencyView | None:
        """The state of a model on demand, the reason, and what it takes; None for any other."""
        return None if self.on_demand is None else self.on_demand.explain(self)

    def present(self) -> dict[str, Any]:
        """Return what changes from moment to moment, as a JSON-able dict. Sizes are in rows unless the name says otherwise; ages
        are in seconds."""
        driver, batcher = self.driver, self.driver.batcher
        return {
            "shortage": shortage(driver.executor.states()),
            "draining": driver.draining,
            "waiting": batcher.waiting_rows,
            "waiting_requests": batcher.waiting_requests,
            "waiting_outside": driver.waiting_outside,
            "waiting_bulk": batcher.waiting_bulk,
            "bulk_limit": batcher.bulk_limit,
            "bulk_delay": batcher.bulk_delay,
            "oldest_age": batcher.oldest_age(self._clock()),
            "in_flight": sum(dispatch.rows for dispatch in batcher.running.values()),
            "in_flight_batches": len(batcher.running),
            "workers": [
                {name: getattr(state, name, VIEW_DEFAULTS.get(name)) for name in WorkerView.__annotations__}
                | {"kind": self._workers.kind_of(state.index)}
                for state in driver.executor.states()
            ],
            "kinds": by_kind(self._workers.kind_names, batcher.kinds),
            "residency": self.residency,
            "scaling": None if self.scaler is None else self.scaler.brief(),
            "device": None if driver.turns is None else driver.turns.brief(),
            "gauges": driver.executor.gauges(),
        }

    def history(self) -> dict[str, Any]:
        """Return the settings, the counts of batches and the most recent batches, as a JSON-able dict."""
        batcher = self.driver.batcher
        return {
            "settings": self._settings(),
            "batches": {reason.name.lower(): count for reason, count in batcher.counts.items()},
            "recent": list(batcher.recent),
        }

    def _settings(self) -> dict[str, Any]:
        """Return the settings of all three kinds; a value that JSON cannot represent is replaced by its repr."""
        kinds = (self.batching, self.workers, self.settings)
        merged = {name: value for kind in kinds for name, value in asdict(kind).items()}
        # Values of environment variables are often secret: only their names are shown.
        merged["env"] = [sorted(variables) for variables in self.workers.env]
        return {key: value if isinstance(value, JSON_TYPES) else repr(value) for key, value in merged.items()}

    def explain_policy(self, name: str) -> dict[str, Any]:
        """Return what the policy of the model `name` decides and what was measured under it, as a JSON-able dict. What is unknown is None.

        Rates are in rows per second and times in the unit of their names. `measured` covers its last `seconds`; its power
        assumes that batches take the energy of the profile.
        """
        policy, batcher, reading = self.batching.policy, self.driver.batcher, self.window.read()
        recent, turns = batcher.recent, self.driver.turns
        document: dict[str, Any] = {
            "model": name,
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
            "device": None,
            "kinds": None,
            "solved": None,
            "learning": False,
            "scaling": None if self.scaler is None else self.scaler.explain(),
        }
        if self.tuner is not None:
            document |= _solved(self.tuner, reading, batcher.workers)
        if batcher.kinds is not None:
            workers = by_kind(self._workers.kind_names, batcher.kinds)
            document["kinds"] = (document["kinds"] or {}) | {"workers": workers}
        if turns is not None:
            document["device"] = (document["device"] or {}) | turns.explain()
        return document


def summary(explained: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a policy's explanation, without tables and settings."""
    predicted, measured, solved = explained["predicted"], explained["measured"], explained["solved"]
    return {
        "rate": explained["rate"],
        "limit": explained["table"]["limit"],
        "predicted_response_time_ms": predicted["response_time_ms"],
        "measured_response_time_ms": measured["response_time_ms"],
        "predicted_power_w": predicted["power_w"],
        "measured_power_w": measured["power_w"],
        "learning": explained["learning"],
        "resolves": {} if solved is None else solved["reasons"],
        "failed_resolves": 0 if solved is None else solved["failures"],
        "drift": None if explained["drift"] is None else explained["drift"]["factor"],
    }


def by_kind(names: Sequence[str], kinds: WorkerKinds | None) -> list[dict[str, Any]]:
    """Return what the workers of each kind have done, as a JSON-able list; an empty one if all are alike."""
    if kinds is None:
        return []
    counts = zip(names, kinds.workers(), kinds.batches, kinds.rows, strict=True)
    return [{"kind": name, "ready": ready, "batches": batches, "rows": rows} for name, ready, batches, rows in counts]


def _measured(reading: WindowSummary) -> dict[str, Any]:
    measured = reading._asdict() | {"power_w": None, "cost": None}
    del measured["sizes"]
    return measured


def _solved(tuner: "PolicyTuner", reading: WindowSummary, workers: int) -> dict[str, Any]:
    """Return the part of the report that only a solved policy has, also while it is still greedy."""
    prices, objective, profile, bank = tuner.prices, tuner.objective, tuner.profile, tuner.policy.bank
    solved_for = tuner.solved_for
    explained = tuner.policy.explain() | {
        "workers": workers,
        "prices": asdict(prices),
        "objective": None if objective is None else objective.to_dict(),
        "measured": _measured(reading),
        "solved": {
            "count": sum(tuner.counts.values()),
            "reasons": dict(tuner.counts),
            "reason": tuner.reason,
            "seconds": tuner.seconds,
            "workers": None if solved_for is None else solved_for.workers,
            "rates": None if bank is None else bank.rates.tolist(),
            "limits": None if bank is None else bank.limits().tolist(),
            "solving": tuner.solving,
            "failures": tuner.failures,
            "error": tuner.error or None,
        },
    }
    if len(tuner.kinds) > 1:
        explained["kinds"] = (explained["kinds"] or {}) | {
            "profiles": {kind.name: None if kind.profile is None else _profile(kind.profile) for kind in tuner.kinds},
            "drift": {kind.name: kind.drift for kind in tuner.kinds},
        }
    elif profile is not None:
        explained["measured"] |= {"power_w": reading.power_w(profile), "cost": reading.cost(profile, prices)}
        explained["profile"] = _profile(profile)
        explained["drift"] = {"factor": tuner.kinds[0].drift}
    return explained


def _profile(profile: "Profile") -> dict[str, Any]:
    names = ("max_batch_size", "best_batch_size", "max_rate", "energy_source", "pipeline_depth", "latency_offset_ms")
    tables = {"service_time_ms": profile.service_time_ms.tolist(), "energy_mj": profile.energy_mj.tolist()}
    return {name: getattr(profile, name) for name in names} | tables
