"""Profiles from a service's own workers: measured at its start (policy `auto`), or learned from the batches that it
runs.

A start does not wait for the solver; until there are tables the policy is greedy. Errors of the measurement are logged
as warnings; a start only fails where it would have failed without a measurement.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from weir.errors import ModelNotReady, WeirError
from weir.model import Model
from weir.numerics import isotonic
from weir.policy.cost import Floats, Profile
from weir.policy.online.adaptive import AutoPolicy
from weir.profiling import ProfilingSettings, items_of
from weir.profiling.machine import Meters
from weir.profiling.measure import measure
from weir.profiling.sampling import Measuring
from weir.workers.executor import Executor, Reserve

if TYPE_CHECKING:
    from weir.tuning.policy_tuner import PolicyTuner

logger = logging.getLogger("weir")

EACH = 10  # batches of a size before the size counts
# The share of them, the longest, that is left out: on a shared machine one pause outweighs hundreds of batches.
LEFT_OUT = 0.05
ENOUGH = 200  # batches before a profile is tried, and again before each further one
GROWN = 2  # a further profile is made when the largest size has grown by this factor
LARGEST_CV = 1.0  # a larger coefficient of variation counts as this one
LARGEST = 1024  # rows: the largest batch of a learned profile

Times = Mapping[int, Collection[float]]  # the last times in seconds of batches, by rows


class ProfileMaker:
    """Makes a profile once there are enough batches, and a further one when there are much larger ones.

    `power` is the power of a busy worker in watts; without it, energy is a unit of time (1 mJ for 1 ms).
    """

    def __init__(self, max_batch_size: int, power: float | None) -> None:
        self._largest = max_batch_size
        self._power = power
        self._known = 0  # the largest size in the last profile

    def update(self, times: Times, batches: int) -> Profile | None:
        """Return the profile that `times`, those of `batches` batches, show; None if there is none that is new or much
        better.
        """
        if batches % ENOUGH:
            return None
        known = {rows: seconds for rows, seconds in times.items() if len(seconds) >= EACH}
        if not known or max(known) < GROWN * max(self._known, min(known)):
            return None  # one size does not show how time grows with it
        self._known = max(known)
        how = f"learned from {batches} batches, of up to {self._known} rows"
        return learned_profile(known, self._largest, self._power, how)


def learned_profile(times: Times, max_batch_size: int, power: float | None = None, how: str = "learned") -> Profile:
    """Return the profile that `times` show. A single size is taken to be the time of all: then batches grow, and show
    what is true.
    """
    largest = min(max_batch_size, LARGEST)
    sizes = sorted(times)
    means, deviations, counts = np.array([_usual(times[size]) for size in sizes]).T
    every = np.arange(1.0, largest + 1.0)
    milliseconds = np.maximum(1000.0 * isotonic(means, counts), 1e-6)
    table = np.full(largest, milliseconds[0])
    if len(sizes) > 1:
        table = extended(np.array(sizes, dtype=np.float64), milliseconds, every)
    energies, source = (table, "time") if power is None else (power * table, "stated")
    cv = np.minimum(np.interp(every, sizes, deviations / np.maximum(means, 1e-9)), LARGEST_CV)
    return Profile(table, energies, cv, energy_source=source, about={"how": how})


def _usual(seconds: Collection[float]) -> tuple[float, float, int]:
    """Return mean, standard deviation (both in seconds) and number of all durations but the longest of EACH or more."""
    kept = sorted(seconds)
    if len(kept) >= EACH:
        del kept[len(kept) - max(1, int(LEFT_OUT * len(kept))) :]
    mean = sum(kept) / len(kept)
    return mean, sqrt(sum((each - mean) ** 2 for each in kept) / len(kept)), len(kept)


def extended(sizes: Floats, times: Floats, every: Floats) -> Floats:
    """Return the times for the sizes `every`, from `times` at `sizes`; in ms, shape of `every`.

    Between known sizes they are interpolated. Beyond them they are on the straight line through the first and the
    last, which never falls and never reaches 0.
    """
    slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    table: Floats = np.interp(every, sizes, times)
    below, beyond = every < sizes[0], every > sizes[-1]
    table[beyond] += slope * (every[beyond] - sizes[-1])
    table[below] = np.maximum(times[0] - slope * (sizes[0] - every[below]), times[0] * every[below] / sizes[0])
    return table


# Batch sizes that a start measures: two to each doubling, since it has no time to look for every step.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Times the wanted seconds. If a few batches of each size take longer than that, the model is served
# without a profile, and one is learned from its batches.
LONGEST_MEASURING = 3.0
NO_TIME_FOR_METERS = Meters(
    [], "a start has no time for them; `weir profile` reads them, and auto:profile=FILE uses what it wrote"
)


class StartMeasurement(Measuring):
    """Measures the first worker of each kind of `executor`, when they have started and before they get batches of requests."""

    def __init__(
        self, tuner: "PolicyTuner", policy: AutoPolicy, model: type[Model], executor: Executor, reserve: Reserve | None
    ) -> None:
        """`reserve` keeps a worker for this model alone, if it has other models; see Measuring."""
        super().__init__(executor, reserve=reserve)
        self._tuner = tuner
        self._policy = policy
        self._model = model
        self._task: asyncio.Task[None] | None = None

    async def measure_all(self) -> None:
        """Measure the workers. Raises ModelNotReady if `cancel` is called meanwhile."""
        self._task = asyncio.ensure_future(self._measure_each())
        try:
            await self._task
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ModelNotReady("stopped before it was ready") from None

    def cancel(self) -> None:
        """End the measurement, if it is still running: the workers end."""
        if self._task is not None:
            self._task.cancel()

    async def _measure_each(self) -> None:
        workers = self._tuner.tuning.workers
        numbers = workers.kind_numbers or (0,)
        for kind, name in enumerate(workers.kind_names or ("",)):
            await self._measure(kind, numbers.index(kind), f" on worker kind {name!r}" * bool(name))

    async def _measure(self, kind: int, worker: int, where: str) -> None:
        policy, name = self._policy, self._model.__name__ + where
        logger.info("measuring %s for %g s, to solve its policy", name, policy.seconds)
        try:
            async with self.within(LONGEST_MEASURING * policy.seconds):
                profile = await self._profile(worker)
        except Exception as error:
            late = f"its batch sizes take longer than {LONGEST_MEASURING:g} times {policy.seconds:g} s"
            trace = None if isinstance(error, WeirError | TimeoutError) else error
            logger.warning(
                "%s could not be measured, so its policy starts as greedy: %s", name, str(error) or late, exc_info=trace
            )
            return
        self._tuner.measured(profile, kind)

    async def _profile(self, worker: int) -> Profile:
        largest = self._tuner.tuning.max_batch_size
        sizes = [size for size in SIZES if size < largest] + [largest]
        settings = ProfilingSettings(sizes=sizes, seconds=self._policy.seconds, power=self._policy.power)
        items = items_of(self._model)
        return await measure(self, items, largest, settings, worker=worker, meters=NO_TIME_FOR_METERS)
