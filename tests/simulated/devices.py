"""Models of a simulated server that take turns on a device: the real DeviceGroup, whose device sees which models compute on it."""

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weir.batching.workers import FAIR, LONGEST, OLDEST
from weir.workers.turns import DeviceGroup

if TYPE_CHECKING:
    from tests.simulated.plans import Plan
    from tests.simulated.workers import SimulatedExecutor
    from tests.simulated.world import World

SHARE = 0.2  # of the plans have a device


@dataclass(frozen=True)
class DevicePlan:
    """Which models take turns, and in which order."""

    order: str
    models: tuple[str, ...]


def draw_device(plan: "Plan") -> DevicePlan | None:
    """Return the device of `plan`, whose models mostly have as many workers; None if it has none."""
    draw = random.Random(f"{plan.seed} device")
    if draw.random() >= SHARE:
        return None
    models = draw.sample(list(plan.services), draw.choice((2, len(plan.services))))
    if draw.random() < 0.7:
        workers = draw.choice((1, 1, 2))
        plan.workers |= {name: replace(plan.workers[name], workers=workers) for name in models}
    for name in models:  # some end while their workers compute
        plan.services[name]["drain_timeout"] = draw.choice((plan.services[name]["drain_timeout"], 0.05))
    return DevicePlan(draw.choice((FAIR, OLDEST, LONGEST)), tuple(models))


class Device:
    """The device of a group. Each of its places computes for one model at a time."""

    def __init__(self, world: "World", plan: DevicePlan) -> None:
        self.group = DeviceGroup("gpu0", order=plan.order)
        self._world = world
        self._executors: list[SimulatedExecutor] = []

    def add(self, executor: "SimulatedExecutor") -> None:
        """Note the workers of one more generation of a model."""
        self._executors = [each for each in self._executors if not each.stopped or each.lingering]
        self._executors.append(executor)

    def used(self, index: int, by: "SimulatedExecutor | None" = None) -> bool:
        """Return whether a place computes, for another model than `by`."""
        return any(each.computes(index) for each in self._executors if each is not by)

    def begins(self, executor: "SimulatedExecutor", index: int) -> None:
        """A worker gets a batch, or warms up."""
        if self.used(index, executor):
            self._world.broken(f"two models compute at place {index} of the device")

    def look(self) -> None:
        """Note since when each model has a worker that could compute."""
        for each in self._executors:
            each.look_for_idle()
