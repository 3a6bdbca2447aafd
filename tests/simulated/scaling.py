"""Models of a simulated server whose number of workers follows the load: the real WorkerTuner, whose workers and whose simulations of a capacity are not real."""

import asyncio
import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weir.errors import ModelError
from weir.policy.scaling import Capacity, WorkerScaling, assumed_capacity
from weir.simulation.scaling import CapacityRequest

if TYPE_CHECKING:
    from tests.simulated.plans import Plan
    from tests.simulated.workers import SimulatedExecutor
    from tests.simulated.world import World

SHARE = 0.2  # of the plans have models with a range
RANGES = ("0..1", "0..2", "0..4", "1..2", "1..4", "2..3")
SETTLES = 60.0  # seconds after which a rate of the past counts for nothing, beside those of starts
FADES = 20.0  # starts in which the error of a rate becomes 1/e of what it was, of at least a second each
FAILED = 40.0  # seconds after a start that has failed in which there may be none
_AT_ONCE, _PATIENCE = 0.1, 8.0  # seconds until a first worker starts, and until one more does


@dataclass(frozen=True)
class RangePlan:
    """The range of workers of a model. `fails` is the share of starts that fail, `known` whether what its workers can do can be simulated."""

    least: int
    most: int
    idle_after: float
    fails: float
    known: bool


def draw_ranges(plan: "Plan") -> dict[str, RangePlan]:
    """Return the ranges of some models of `plan`, whose settings state them then."""
    draw, ranges = random.Random(f"{plan.seed} ranges"), {}
    if draw.random() < SHARE:
        free = [name for name in plan.services if plan.device is None or name not in plan.device.models]
        for name in draw.sample(free, draw.randint(0, len(free))):
            text, idle_after = draw.choice(RANGES), draw.choice((0.5, 0.5, 5.0, 60.0))
            least, most = map(int, text.split(".."))
            ranges[name] = RangePlan(least, most, idle_after, draw.choice((0.0, 0.0, 0.3)), draw.random() < 0.7)
            plan.workers[name] = replace(plan.workers[name], workers=max(1, least))
            plan.services[name] |= {"workers": text, "scale_to_zero_after": idle_after}
    return ranges


class Scaling:
    """Sees how many workers one generation of a model has: never more than it may, in time as many as its requests need, and no more without any."""

    def __init__(self, world: "World", plan: RangePlan, draw: random.Random) -> None:
        self.plan = plan
        self._world, self._draw = world, draw
        self._count = max(1, plan.least)
        self._excused = -math.inf  # when there were as many as may be, or some could not be started, or were lost

    def excuse(self) -> None:
        """Something has happened for which requests may find too few workers."""
        self._excused = self._world.loop.now

    @property
    def _excused_at(self) -> float:
        return max(self._excused, self._world.loop.leapt_at)

    def changed(self, executor: "SimulatedExecutor") -> None:
        """There is one worker more, or less."""
        count, before, plan = len(executor.states()), self._count, self.plan
        if count > plan.most or (count < plan.least and not executor.stopped):
            self._world.broken(f"there are {count} workers, of {plan.least}..{plan.most}")
        if plan.most in (count, before):
            self.excuse()
        self._count = count

    def begins(self, executor: "SimulatedExecutor") -> None:
        """A worker begins to start: the first one as soon as there is a request."""
        self.changed(executor)
        now = self._world.loop.now
        age = executor.driver.batcher.oldest_age(now)
        if len(executor.states()) == 1 and age > _AT_ONCE and now > self._excused_at + FAILED:
            self._world.broken(f"a request has waited for {age:.3f} s when the first worker began to start")

    def check_start(self, executor: "SimulatedExecutor") -> None:
        """A worker could be ready now. Raises ModelError if it does not load."""
        if self._draw.random() < self.plan.fails:
            self.excuse()
            raise ModelError("no weights")

    def check_expired(self, arrival: float, start: float) -> None:
        """A request that came at `arrival` has expired in the queue: right if there were as many workers as may be."""
        now = self._world.loop.now
        excused_at = now if self._count == self.plan.most else self._excused_at
        if now - max(arrival, excused_at + FAILED) > _PATIENCE + 4.0 * max(start, WorkerScaling.INTERVAL):
            self._world.broken(f"a request expired after {now - arrival:g} s, and there could be more workers")

    def attach(self, scaler: Any) -> None:
        """Have a WorkerTuner learn what its workers can do without another process."""
        scaler._measure = self._measure

    async def _measure(self, request: CapacityRequest, limit: float) -> Capacity:
        await asyncio.sleep(self._draw.choice((0.01, 2.0)))
        if not self.plan.known:
            raise TimeoutError
        profile = request.profile
        batch = float(profile.service_time_ms[profile.best_batch_size - 1]) / 1000.0
        return assumed_capacity(profile.max_rate, batch, request.start_up, request.most, 0.5)


async def settle(world: "World") -> None:
    """Wait until the numbers of workers must have followed: nobody asks any more."""
    ranges = world.plan.ranges
    start = max((world.plan.workers[name].start for name in ranges), default=0.0)
    await asyncio.sleep(max((each.idle_after for each in ranges.values()), default=0.0) + SETTLES + 10.0 * start)
    for _ in range(9):
        counts = {name: len(world.services[name].executor.states()) for name in ranges}
        wrong = [name for name, each in ranges.items() if counts[name] != each.least]
        if not wrong:
            return
        await asyncio.sleep(FADES * max(start, 1.0))
    each = ranges[wrong[0]]
    world.broken(f"{wrong[0]}: nobody asks, and there are {counts[wrong[0]]} workers, of {each.least}..{each.most}")
