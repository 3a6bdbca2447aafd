"""Loads models when requests come for them, and ends those that must leave: what policy/residency.py decides, with processes."""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from math import inf, isfinite
from operator import attrgetter
from typing import Any

from weir.catalog.sources import LOAD_NONE, ModelToServe, RepositorySettings
from weir.config import as_size, parse_size
from weir.errors import ModelNotReady, SettingsError, WeirError
from weir.messages import Request
from weir.policy.residency import Key, Presence, Resident, Residents, Room, Waiters
from weir.profiling.machine import GpuMemory, memory_of
from weir.serving.delivery import logger
from weir.serving.generation import Generation
from weir.serving.handle import ResidencyView
from weir.workers.cpus import cpu_count
from weir.workers.process.launch import Templates
from weir.workers.timer import Timer, end_tasks, in_background, outcome_of, resolve

MEASURE_EVERY = 5.0  # seconds between measurements of what loaded models take
_PATH = re.compile(r"(?<![\w.~:/-])/(?:[^/\s'\":,;()]+/)+(?=[^/\s'\":,;()])")
LOAD_CALLS = "load calls"  # the caller of loads that no request asks for; no API key is called so

# Returns the bytes that a process takes; None if that is unknown.
Measure = Callable[[int], int | None]
# Returns the bytes of GPU memory by process. Raises SettingsError.
MeasureGpus = Callable[[], dict[int, int]]


class Residency:
    """Decides for the generations of a server when they run. It is their OnDemand.

    Arguments:
        limits: the memory that all may take together.
        pinned: the names of the models that stay.
        clock: that of the services.
        measure: measures a process.
        measure_gpus: measures all processes that use a GPU, where their memory has a limit; see GpuMemory.read.
    """

    def __init__(
        self,
        limits: Room,
        pinned: frozenset[str] = frozenset(),
        *,
        clock: Callable[[], float],
        measure: Measure = memory_of,
        measure_gpus: MeasureGpus | None = None,
    ) -> None:
        self.core = Residents(limits, at_once=cpu_count())
        self.pinned = pinned
        self.clock = clock
        self.templates = Templates()
        self._measure = measure
        self._measure_gpus = measure_gpus or GpuMemory().read
        self._gpus_unknown = limits.gpu_memory == inf  # they need not, or cannot be measured
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: dict[Generation, asyncio.Future[None]] = {}  # that somebody awaits
        self._watching: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._over = False  # whether more than there is was taken when it was measured last

    def open(self) -> None:
        """Prepare for the first request. Called on the running event loop."""
        self._spawn(self.templates.prepare())

    # OnDemand.

    def wanted(self, generation: Generation, request: Request, now: float) -> WeirError | None:
        """See OnDemand."""
        return self._ask(generation, request.deadline, now, request.form.caller)

    def forsaken(self, generation: Generation) -> None:
        """See OnDemand."""
        now = self.clock()
        if generation not in self._loads:
            self.core.forsaken(generation, now)
        self._arm(now)

    def _ask(self, generation: Generation, deadline: float, now: float, caller: str) -> WeirError | None:
        if generation not in self.core.models:
            workers = generation.workers
            needs = (workers.needs_memory, workers.needs_gpu_memory)
            declared = Room(*(float(parse_size(each or 0) or 0) for each in needs))
            self.core.add(generation, declared, pinned=generation.facts.name in self.pinned)
        refusal = self.core.ask(generation, deadline, now, caller)
        self._arm(now)  # not at once: the request waits only when it is in its queue
        return None if refusal is None else not_ready(generation.label, refusal.reason, refusal.retry_after)

    async def load(self, generation: Generation) -> None:
        """See OnDemand."""
        model = self.core.models.get(generation)
        if model is not None and model.presence is Presence.LOADED:
            return
        loaded = self._loads.setdefault(generation, asyncio.get_running_loop().create_future())
        refusal = self._ask(generation, float("inf"), self.clock(), LOAD_CALLS)
        if refusal is not None:
            del self._loads[generation]
            raise refusal
        await outcome_of(loaded)

    def ended(self, generation: Generation) -> None:
        """See OnDemand."""
        self.core.remove(generation)
        self._tell(generation, not_ready(generation.label, "stopped"))
        self._go_on()

    def explain(self, generation: Generation) -> ResidencyView:
        """See OnDemand."""
        model = self.core.models.get(generation) or Resident()
        now = self.clock()
        taken = model.measured or Room()
        presence = model.presence
        if presence is Presence.LOADING and not generation.driver.not_ready_reason:
            presence = Presence.LOADED  # it answers already; what it takes is being measured
        coming = presence in (Presence.WAITING, Presence.LOADING)
        return {
            "state": presence.value,
            "reason": model.reason,
            "pinned": model.pinned,
            "memory_bytes": int(taken.memory),
            "gpu_memory_bytes": int(taken.gpu_memory),
            "load_seconds": model.load_seconds,
            "rate": model.rate_at(now),
            "ready_in_seconds": self.core.time_to_load(generation, now) if coming else None,
        }

    def memory(self) -> dict[str, float | None]:
        """Return what the models take together, and of how much, as a JSON-able dict; None where there is no limit."""
        used, limits = self.core.used, self.core.limits
        return {
            "memory_bytes": used.memory,
            "memory_limit": _finite(limits.memory),
            "gpu_memory_bytes": used.gpu_memory,
            "gpu_memory_limit": _finite(limits.gpu_memory),
        }

    async def close(self) -> None:
        """Load and end nothing more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        await end_tasks(self._watching, *self._tasks)
        await self.templates.close()

    # The work.

    def _go_on(self) -> None:
        """Take all steps that can be taken now."""
        now = self.clock()
        self._observe(now)
        while (step := self.core.next_step(now, _is_idle, self._waiters)) is not None:
            generation = _generation(step.load)
            if step.leave:
                for each in step.leave:
                    self._evict(_generation(each), f"evicted for {generation.label!r}")
            else:
                self.core.begin(generation, now)
                self._spawn(self._load(generation))
        if self.core.step_at is not None:
            self._arm(self.core.step_at)

    def _arm(self, when: float) -> None:
        """Go on at this instant."""
        if self._timer is None:
            self._timer = Timer(self.clock, asyncio.get_running_loop(), self._go_on)
        self._timer.arm(when)

    def _waiters(self, key: Key) -> Waiters:
        generation = _generation(key)
        awaited = {LOAD_CALLS: inf} if generation in self._loads else {}
        return generation.driver.waiters() | awaited

    def _observe(self, now: float) -> None:
        for key, model in self.core.models.items():
            model.observe(now, _generation(key).arrivals)

    def _evict(self, generation: Generation, reason: str, level: int = logging.INFO) -> None:
        self.core.leave(generation, self.clock(), reason)
        logger.log(level, "model %r: %s", generation.label, reason)
        self._spawn(self._end(generation))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        in_background(work, "a load or an end of a model on demand", self._tasks)

    async def _load(self, generation: Generation) -> None:
        if generation not in self.core.models:  # it was stopped before this began
            return
        error: Exception | None = None
        try:
            await generation.begin()
            taken = await self._taken([generation])
        except Exception as failure:
            error = failure
            if generation in self.core.models and not generation.stopping:
                self._failed(generation, failure)
        else:
            if generation in self.core.models:
                error = self._loaded(generation, taken[generation])
        self._tell(generation, error)
        self._go_on()

    def _failed(self, generation: Generation, error: Exception) -> None:
        reason = error.message if isinstance(error, WeirError) else str(error) or type(error).__name__
        pause = self.core.failed(generation, reason.partition("\n")[0], self.clock())
        logger.error("model %r: failed to load, and is not tried again for %.3g s: %s", generation.label, pause, reason)
        generation.renew()

    def _loaded(self, generation: Generation, taken: Room) -> Exception | None:
        """Note that it is loaded; return the error if it cannot stay."""
        self._observe(self.clock())  # who came until now is not who is expected
        stays = self.core.loaded(generation, taken, self.clock())
        model = self.core.models[generation]
        logger.info("model %r: loaded in %.3g s, takes %s", generation.label, model.load_seconds, as_size(taken.memory))
        if not stays:
            self._evict(generation, model.reason, logging.ERROR)
            return not_ready(generation.label, model.reason)
        self._make_room({})
        if self._watching is None:
            self._watching = in_background(self._watch(), "the measurement of loaded models")
        return None

    def _tell(self, generation: Generation, error: Exception | None) -> None:
        if (waiting := self._loads.pop(generation, None)) is not None:
            resolve(waiting, error)

    async def _end(self, generation: Generation) -> None:
        try:
            await generation.sleep()
        finally:
            if generation in self.core.models:
                self.core.left(generation, self.clock(), self._waiters(generation))
        self._go_on()

    async def _watch(self) -> None:
        """Measure again and again what the loaded models take, and make room if they have grown."""
        while True:
            await asyncio.sleep(MEASURE_EVERY)
            await self.measure()

    async def measure(self) -> None:
        """Measure what the loaded models take, and make room if they have grown beyond what there is."""
        taken = await self._taken(self._all_loaded())
        self._make_room({each: taken[each] for each in self._all_loaded() if each in taken})

    def _all_loaded(self) -> list[Generation]:
        return [_generation(key) for key, model in self.core.models.items() if model.presence is Presence.LOADED]

    def _make_room(self, taken: dict[Key, Room]) -> None:
        now = self.clock()
        self._observe(now)
        before = {key: self.core.models[key].measured or Room() for key in taken}
        leaving = self.core.measure(taken, now, _is_idle)
        is_over = not self.core.used.fits(self.core.limits)
        if is_over and (leaving or not self._over):
            kind = "memory" if self.core.used.memory > self.core.limits.memory else "gpu_memory"
            size: Callable[[Room], float] = attrgetter(kind)
            grown = max(taken, key=lambda key: size(taken[key]) - size(before[key]), default=None)
            logger.warning(
                "the models take %s, of model_%s=%s%s; %s",
                as_size(size(self.core.used)),
                kind,
                as_size(size(self.core.limits)),
                ""
                if grown is None
                else f"; {_generation(grown).label!r} has grown from {as_size(size(before[grown]))} to {as_size(size(taken[grown]))}",
                f"evicting {', '.join(repr(_generation(key).label) for key in leaving)}"
                if leaving
                else "none can leave",
            )
        self._over = is_over
        for key in leaving:
            self._evict(_generation(key), "evicted since models have grown")

    async def _taken(self, generations: list[Generation]) -> dict[Generation, Room]:
        pids: dict[Generation, list[int]] = {}
        for each in generations:
            own = [state.pid for state in each.driver.executor.states()]
            # Of a worker in this process only what it states is known.
            pids[each] = [pid for pid in own if pid is not None and pid != os.getpid()]
        return await asyncio.to_thread(partial(self._rooms, pids))

    def _rooms(self, pids: dict[Generation, list[int]]) -> dict[Generation, Room]:
        on_gpus = self._on_gpus()
        return {
            each: Room(sum(self._measure(pid) or 0 for pid in own), sum(on_gpus.get(pid, 0) for pid in own))
            for each, own in pids.items()
        }

    def _on_gpus(self) -> dict[int, int]:
        """Return the bytes of GPU memory by process; none where they are not known, which a warning says once."""
        if self._gpus_unknown:
            return {}
        try:
            return self._measure_gpus()
        except SettingsError as error:
            self._gpus_unknown = True
            logger.warning("GPU memory is not measured, only stated (needs_gpu_memory): %s", error.message)
            return {}


def make_residency(settings: RepositorySettings, targets: Iterable[ModelToServe]) -> Residency | None:
    """Return what decides which models are in memory, if not all are. What is named stays: the TARGETs, and the models of `load`."""
    if not settings.on_demand:
        return None
    named = [*(model.name for model in targets), *(name for name in settings.load if name != LOAD_NONE)]
    return Residency(settings.room, frozenset(named), clock=time.monotonic)


def to_start(settings: RepositorySettings, residency: Residency | None) -> list[str]:
    """Return the names of the models to load at the start, as in the setting `load`."""
    return settings.load if residency is None else sorted(residency.pinned) or [LOAD_NONE]


def without_paths(text: str) -> str:
    """Return `text` with every absolute path in it shortened to its last name: anybody may read the index, and request any model."""
    return _PATH.sub("", text)


def not_ready(model: str, reason: str, retry_after: float | None = None) -> ModelNotReady:
    """Return the error of a request for `model`, which does not run."""
    return ModelNotReady(f"model {model!r} is not ready: {without_paths(reason)}", retry_after=retry_after)


def _finite(size: float) -> float | None:
    return size if isfinite(size) else None


def _generation(key: Key) -> Generation:
    assert isinstance(key, Generation), "only generations are added"
    return key


def _is_idle(key: Key) -> bool:
    return _generation(key).driver.is_idle
