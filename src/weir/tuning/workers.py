"""Gives a running model as many workers as its load needs (policy/scaling.py decides how many).

The service times come from the policy's profile, or are learned from the batches. What each number of workers can do is
simulated for them, in another process; until that is done workers are used up to a share of what they can serve, and
until there were a few batches their number stays. Start-up times are measured: each start of a worker counts.

Workers start side by side, and are drained one after another, the one of the highest index first.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from weir.batching.batcher import Batcher
from weir.errors import WeirError
from weir.policy.backoff import Backoff
from weir.policy.scaling import (
    MOST_WORKERS,
    TARGET,
    Capacity,
    ScalingDecision,
    ScalingObservation,
    ScalingReason,
    WorkerScaling,
    assumed_capacity,
)
from weir.simulation.scaling import CapacityRequest
from weir.telemetry.recorder import SilentObserver
from weir.tuning import SolvingProcess
from weir.tuning.learning import learned_profile
from weir.workers.settings import WorkerSettings
from weir.workers.timer import end_tasks, in_background

if TYPE_CHECKING:
    from weir.tuning.policy_tuner import PolicyTuner

logger = logging.getLogger("weir")

FEWEST = 3  # batches before a service time is known
CHANGED = 0.15  # relative change of what a worker serves after which the capacity is simulated again
REST = 20.0  # simulations rest this many times as long as the last one took
LONGEST_SIMULATION = 600.0  # seconds
STARTS = 3  # the start-up time is the longest of this many
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between a start that failed and the next try

# While nothing is known of what workers do, their number stays, except that there may be none without requests.
UNKNOWN = Capacity("nothing is known yet", (1e12,) * MOST_WORKERS, 1e12, 1.0)

Pause = Callable[[float], Awaitable[None]]


class ScaledDriver(Protocol):
    """Shows what a WorkerTuner sees of a service between a start and a stop: its driver."""

    @property
    def batcher(self) -> Batcher:
        """The batcher, which knows what waits and runs, and how many workers are ready."""

    @property
    def outside(self) -> Sized:
        """The requests that wait for room in the queue."""

    def workers(self) -> list[int]:
        """Return the indices of the workers, whatever their state, without those for bulk work only."""

    async def add_worker(self) -> None:
        """Start one more worker; return when it is ready. Raises what the executor raises."""

    async def remove_worker(self, worker: int, seconds: float) -> None:
        """Let `worker` finish its batches for that many seconds, and stop it."""

    def unavailable(self, reason: str) -> None:
        """Fail all requests: there is no worker, and none can be started."""


class ScaledService(Protocol):
    """Shows what a WorkerTuner knows of its service."""

    @property
    def label(self) -> str:
        """The model, for log lines."""

    @property
    def driver(self) -> ScaledDriver:
        """Its driver, which is another one after each start."""


class WorkerTuner(SilentObserver):
    """Starts and stops workers of one service between `open` and `close`.

    Args:
        service: the service.
        settings: the range of workers, and what their number shall keep.
        max_batch_size: in rows.
        tuner: keeps the tables of the policy, if it is a solved one: it has the profile, the prices and the promise.
        drain_timeout: the seconds that a worker has to finish its batches before it is stopped.
        clock: returns seconds.
        pause: sleeps for that many seconds of the clock.

    Attributes:
        decision: the last decision; None before there is one.
        wanted: how many workers there shall be.
        start_up: the seconds that a worker takes to start.
        starts, stops, failures: how many workers were started and stopped, and how many starts have failed.
        error: why the last start failed; "" if it succeeded.
    """

    def __init__(
        self, service: ScaledService, settings: WorkerSettings, max_batch_size: int, tuner: "PolicyTuner | None", *,
        drain_timeout: float, clock: Callable[[], float], pause: Pause,
    ) -> None:  # fmt: skip
        assert settings.scale is not None  # only made for a range
        self.allowed = settings.scale
        self.decision: ScalingDecision | None = None
        self.wanted = settings.first_workers
        self.start_up = 0.0
        self.starts = self.stops = self.failures = 0
        self.error = ""
        self._service = service
        self._model = service.label
        self._target_load = settings.target_load
        self._idle_after = settings.scale_to_zero_after
        self._tuner = tuner
        self._drain_timeout = drain_timeout
        self._max_batch_size = max_batch_size
        self._clock, self._pause = clock, pause
        self._process = SolvingProcess()
        self._measure: Callable[[CapacityRequest, float], Awaitable[Capacity]] = self._process.solve
        self._rule = WorkerScaling(self.allowed, UNKNOWN, settings.scale_to_zero_after)
        self._simulated_for: CapacityRequest | None = None
        self._simulation: asyncio.Task[None] | None = None
        self._rested = -math.inf  # the instant until which no capacity is simulated
        self._start_times: deque[float] = deque(maxlen=STARTS)
        self._starting: dict[asyncio.Task[None], float] = {}  # and when they began
        self._stopping: asyncio.Task[None] | None = None
        self._deciding: asyncio.Task[None] | None = None
        self._next_start = -math.inf  # after a failure, the instant of the next try
        self._backoff = Backoff(first=FIRST_PAUSE, longest=LONGEST_PAUSE)

    # The life of a service.

    def open(self, start_up: float) -> None:
        """Begin to decide. The first workers have started in `start_up` seconds."""
        self._start_times.append(start_up)
        self.start_up = start_up
        self._driver.batcher.service.keep()
        self.wanted = len(self._driver.workers())
        self._deciding = in_background(self._decide_again_and_again(), "the scaling of workers")

    async def close(self) -> None:
        """Stop deciding, starting and stopping workers. No process is left when it returns. Idempotent."""
        await end_tasks(self._deciding, self._simulation, self._stopping, *self._starting)
        await self._process.close()

    @property
    def _driver(self) -> ScaledDriver:
        return self._service.driver

    async def _decide_again_and_again(self) -> None:
        while True:
            self.decide()
            await self._pause(WorkerScaling.INTERVAL)

    # Decisions.

    def decide(self) -> None:
        """Decide how many workers there shall be, and begin to start or stop some."""
        self._update_rule()
        seen = self._observation()
        self.decision = self._rule.decide(seen)
        # If a start has failed and there is no worker, the next try also says when the model can be served again.
        self._resize(max(self.decision.workers, 0 if seen.ready or not self.error else 1))

    def _observation(self) -> ScalingObservation:
        now, batcher = self._clock(), self._driver.batcher
        starting = [max(self.start_up - (now - began), 0.0) for began in self._starting.values()]
        lost = self._present() - batcher.workers - len(starting)
        running = sum(not dispatch.gives_way for dispatch in batcher.running.values())
        return ScalingObservation(
            now,
            batcher.offered,
            batcher.backlog + len(self._driver.outside),
            running,
            batcher.workers,
            [*starting, *[self.start_up] * lost],
            self.start_up,
        )

    def _present(self) -> int:
        """Return how many workers are ready or will be: those that start, also before the executor knows of them, and lost
        ones, which the executor replaces.
        """
        ready = self._driver.batcher.workers
        return ready + max(len(self._driver.workers()) - (self._stopping is not None) - ready, len(self._starting))

    def _resize(self, wanted: int) -> None:
        if wanted != self.wanted and self.decision is not None:
            logger.info(
                "model %r: %d worker%s instead of %d (%s; %.4g rows/s)",
                self._model,
                wanted,
                "s"[wanted == 1 :],
                self.wanted,
                self.decision.reason.value,
                self.decision.rate,
            )
        self.wanted = wanted
        present = self._present()
        if self._clock() >= self._next_start:
            leaving = self._stopping is not None  # it is one of the most that may run, until it has ended
            for _ in range(min(wanted, self._rule.allowed.most - leaving) - present):
                task = in_background(self._start_worker(), "the start of a worker")
                self._starting[task] = self._clock()
                task.add_done_callback(lambda done: self._starting.pop(done, None))
        if present > wanted and self._stopping is None and not self._starting:
            self._stopping = in_background(self._stop_workers(), "the end of workers")

    async def _start_worker(self) -> None:
        began = self._clock()
        try:
            await self._driver.add_worker()
        except WeirError as error:
            self.failures += 1
            self.error = error.message
            self._next_start = self._clock() + self._backoff.failed_to_load()
            logger.warning("model %r: another worker did not start: %s", self._model, error.message)
            if not self._driver.batcher.workers:
                self._driver.unavailable(f"no worker of {self._model!r} can be started: {error.message}")
            return
        self.starts += 1
        self.error, self._next_start = "", -math.inf
        self._backoff.loaded()
        self._start_times.append(self._clock() - began)
        self.start_up = max(self._start_times)

    async def _stop_workers(self) -> None:
        """Stop the workers of the highest indices until there are as many as wanted."""
        try:
            while len(workers := self._driver.workers()) > self.wanted and not self._starting:
                self.stops += 1
                await self._driver.remove_worker(max(workers), self._drain_timeout)
        finally:
            self._stopping = None

    # What workers can do.

    @property
    def capacity(self) -> Capacity | None:
        """The capacity of each number of workers, as far as it is known."""
        return None if self._rule.capacity is UNKNOWN else self._rule.capacity

    @property
    def simulating(self) -> bool:
        """Whether a capacity is being simulated now."""
        return self._simulation is not None and not self._simulation.done()

    def _update_rule(self) -> None:
        """Use the present service times, and begin to simulate what they mean if they have changed much."""
        request = self._request()
        if request is None:
            return
        if self._is_outdated(request):
            if not self.simulating and self._clock() >= self._rested:
                self._simulation = in_background(self._simulate(request), "the simulation of a capacity")
            if self._simulated_for is None:
                self._rule.capacity = self._assumed(request)

    def _request(self) -> CapacityRequest | None:
        tuner = self._tuner
        profile = None if tuner is None else tuner.profile
        times = self._driver.batcher.service.keep()
        if profile is None and sum(map(len, times.values())) < FEWEST:
            return None
        profile = profile or learned_profile(times, self._max_batch_size)
        solved = tuner is not None and tuner.profile is not None
        made = CapacityRequest(profile, self.allowed.most, self.start_up, target_load=self._target_load, solved=solved)
        return made if tuner is None else replace(made, objective=tuner.objective, prices=tuner.prices)

    def _assumed(self, request: CapacityRequest) -> Capacity:
        profile = request.profile
        batch = float(profile.service_time_ms[profile.best_batch_size - 1]) / 1000.0
        return assumed_capacity(profile.max_rate, batch, request.start_up, request.most, self._target_load or TARGET)

    def _is_outdated(self, request: CapacityRequest) -> bool:
        known = self._simulated_for
        if known is None:
            return True
        same = replace(request, profile=known.profile, start_up=known.start_up) == known
        return not same or any(
            abs(math.log(now / before)) > CHANGED
            for now, before in (
                (request.profile.max_rate, known.profile.max_rate),
                (request.profile.service_time_ms[0], known.profile.service_time_ms[0]),
                (max(request.start_up, 1.0), max(known.start_up, 1.0)),
            )
        )

    async def _simulate(self, request: CapacityRequest) -> None:
        began = self._clock()
        try:
            capacity = await self._measure(request, LONGEST_SIMULATION)
        except (WeirError, TimeoutError) as error:
            logger.warning(
                "model %r: the capacity of its workers could not be simulated, so they are used up to a load of %g: %s",
                self._model,
                self._target_load or TARGET,
                str(error) or "it takes too long",
            )
            capacity = self._assumed(request)
        await self._process.close()  # it is not needed again for long
        self._simulated_for = request
        self._rested = self._clock() + REST * (self._clock() - began)
        self._rule.capacity = capacity

    # Explanations.

    def brief(self) -> dict[str, Any]:
        """Return how many workers there may be and shall be, and why, as a JSON-able dict."""
        return {"allowed": str(self.allowed), "wanted": self.wanted, "because": self._because()}

    def explain(self) -> dict[str, Any]:
        """Return how many workers there are and shall be, why, and what one more or one less would give, as a JSON-able
        dict. What is unknown is None. Rates are in rows per second, times in the unit of their names.
        """
        decision, capacity = self.decision, self.capacity
        document: dict[str, Any] = {
            "allowed": str(self.allowed),
            "present": len(self._driver.workers()),
            "ready": self._driver.batcher.workers,
            "starting": len(self._starting),
            "wanted": self.wanted,
            "reason": None if decision is None else decision.reason.value,
            "because": self._because(),
            "goal": None if capacity is None else capacity.goal,
            "solved": self._simulated_for is not None,
            "rate": None if decision is None else decision.rate,
            "high_rate": None if decision is None else decision.high_rate,
            "start_up_seconds": self.start_up,
            "starts": self.starts,
            "stops": self.stops,
            "failures": self.failures,
            "error": self.error or None,
        }
        document |= {"one_less": None, "now": None, "one_more": None}
        if decision is not None and capacity is not None:
            for name, count in (("one_less", -1), ("now", 0), ("one_more", 1)):
                found = capacity.predict(self.wanted + count, decision.rate)
                document[name] = None if found is None else found.to_dict()
        return document

    def _because(self) -> str:
        """Return a sentence that says why there shall be that many workers."""
        decision, known = self.decision, self._rule.capacity
        if decision is None or (known is UNKNOWN and decision.reason is not ScalingReason.IDLE):
            return "too few batches have been run to know what a worker can do"
        one = decision.workers == 1
        keep = (
            f"stay{'s' * one} below the knee of the cost" if known.goal == "knee" else f"keep{'s' * one} {known.goal}"
        )
        kept = known.rates[min(max(decision.workers, 1), len(known.rates)) - 1]
        enough = f"{decision.workers} worker{'s' * (not one)} {keep} up to {kept:.4g} rows/s"
        return {
            ScalingReason.RATE: f"{enough}, and {decision.rate:.4g} arrive",
            ScalingReason.QUEUE: self._of_queue(decision),
            ScalingReason.HELD: f"{enough}; {max(decision.by_rate, decision.by_queue)} would do now, but more were needed shortly before",
            ScalingReason.FIRST: "a request is waiting and there was no worker",
            ScalingReason.IDLE: f"no request arrived for {self._idle_after:g} s",
            ScalingReason.LEAST: f"the minimum is {self.allowed.least}; {enough}, and {decision.rate:.4g} arrive",
            ScalingReason.MOST: f"the maximum is {self.allowed.most}, but {max(decision.by_rate, decision.by_queue)} are needed",
        }[decision.reason]

    def _of_queue(self, decision: ScalingDecision) -> str:
        ahead = f"in {self.start_up:.3g} s, when a further worker could be ready, at {decision.high_rate:.4g} rows/s"
        if decision.queue >= 1.0:
            return f"{decision.queue:.0f} rows would wait {ahead}; {decision.workers} workers answer them in time"
        return f"with fewer workers rows would be late {ahead}"
