"""Solves one order for the models that take turns on a device, and keeps it for their present rates and times.

Each model has its own solved policy, whose bank has the profile and the prices. While several models of a group run,
the tables that were solved for all of them together take the place of the banks' (policy/solve/device.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from weir.batching.workers import SOLVED
from weir.errors import SettingsError, WeirError
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.arrivals import Rate
from weir.policy.solve.device import DeviceLoad, DeviceTable
from weir.tuning import DeviceRequest, SolvingProcess
from weir.workers.timer import end_tasks, in_background, sleep
from weir.workers.turns import DeviceGroup, Member

logger = logging.getLogger("weir")

EVERY = 0.5  # seconds between two looks at the rates
WINDOW_ROWS = 400.0  # arrivals over which a rate is estimated: an error of 3.5 %
SILENT = 20.0  # mean gaps without an arrival after which a model counts as unused,
SILENT_FOR = 2.0  # and at least this many seconds
MOVED, MOVED_PART, LEAST_MOVED = 0.05, 0.2, 0.005  # of the device's time: see `has_moved`
REST = 10.0  # the solver rests this many times as long as it took
LONGEST_SOLVE = 120.0  # seconds

Solve = Callable[[DeviceRequest, float], Coroutine[Any, Any, list[DeviceTable]]]
Pause = Callable[[float], Awaitable[None]]


def has_moved(loads: Sequence[DeviceLoad], before: Sequence[DeviceLoad]) -> bool:
    """Return whether tables that were solved for `before` are no longer right for `loads`, of the same models.

    They are not once a model needs 5 % more or less of the device's time, or a fifth more or less than it did, or one of
    its weights differs by a fifth.
    """
    for new, old in zip(loads, before, strict=True):
        now, then = new.rate / new.profile.max_rate, old.rate / old.profile.max_rate
        moved = abs(now - then)
        if moved > MOVED or moved > max(LEAST_MOVED, MOVED_PART * max(now, then)):
            return True
        if _differ(new.weight, old.weight) or _differ(new.energy_weight, old.energy_weight):
            return True
    return False


def _differ(now: float, then: float) -> bool:
    return abs(now - then) > MOVED_PART * max(now, then)


class _Followed:
    """A model of the group: its arrivals as the order sees them."""

    def __init__(self, user: Member) -> None:
        self.user = user
        policy = user.batcher.policy
        assert isinstance(policy, SolvedPolicy)  # `joined` has checked it
        self.policy = policy
        self._rate = Rate(WINDOW_ROWS)
        self._last = (0, 0.0)  # arrivals, and when there were more for the last time

    def load(self, now: float) -> DeviceLoad | None:
        """Return what the model asks of the device; None while its times are unknown."""
        arrivals, costs = self.user.batcher.arrivals, self.policy.costs
        rate = self._rate.observe(now, arrivals)
        if arrivals != self._last[0]:
            self._last = (arrivals, now)
        if costs is None:
            return None
        profile, prices = costs
        silent = now - self._last[1] > max(SILENT_FOR, SILENT / rate if rate else 0.0)
        latency = prices.latency_weight_at(rate) if rate else prices.latency_weight
        return DeviceLoad(profile, 0.0 if silent else rate, latency, prices.energy_weight)


class DeviceTuner:
    """Keeps the order of one group. See workers/turns.py's Follower.

    Arguments:
        group: the name of the group, for log lines.
        clock: returns seconds.
        pause: sleeps for that many seconds of the clock.
        solve: returns the tables that are wanted, within that many seconds; by default in another process.

    `loads` is what the present tables were solved for; empty while there are none.
    """

    def __init__(self, group: str, *, clock: Callable[[], float], pause: Pause, solve: Solve | None = None) -> None:
        self.loads: list[DeviceLoad] = []
        self._group = group
        self._pause = pause
        self._clock = clock
        self._process = SolvingProcess()
        self._solve: Solve = solve or self._process.solve
        self._followed: list[_Followed] = []
        self._solved_with: list[_Followed] = []
        self._batches = 1  # that the device runs at once, as solved
        self._task: asyncio.Task[None] | None = None

    def joined(self, user: Member) -> None:
        """See Follower."""
        policy = user.batcher.policy
        if not isinstance(policy, SolvedPolicy):
            raise SettingsError(
                f"device_group={self._group!r}, device_order={SOLVED!r}: needs a solved policy, as policy=auto is; with "
                "another policy use device_order=longest"
            )
        objective = policy.objective or (policy.bank and policy.bank.objective)
        if objective:
            raise SettingsError(
                f"device_group={self._group!r}, device_order={SOLVED!r}: is solved for weights, but the policy has a latency "
                "objective; leave it out, or use device_order=oldest"
            )

    def started(self, user: Member) -> None:
        """See Follower."""
        self._followed.append(_Followed(user))
        if self._task is None or self._task.done():
            self._task = in_background(self._follow(), "the order of a device group")

    async def left(self, user: Member) -> None:
        """See Follower."""
        self._followed = [each for each in self._followed if each.user is not user]
        if not self._followed and self._task is not None:
            await end_tasks(self._task)
            await self._process.close()

    async def _follow(self) -> None:
        while True:
            await self._pause(EVERY)
            began = self._clock()
            try:
                changed = await self._update(began)
            except (WeirError, TimeoutError) as error:
                logger.warning("device group %r: no new order; the old one stays: %s", self._group, error)
                changed = True
            if changed:
                await self._pause(REST * (self._clock() - began))

    async def _update(self, now: float) -> bool:
        """Solve and adopt another order if the present one is no longer right. Return whether it was not."""
        followed = list(self._followed)
        loads = [load for each in followed if (load := each.load(now)) is not None]
        if len(loads) < len(followed):
            return False  # a model is still being measured
        if len(followed) < 2:
            self._adopt(followed, [None] * len(followed), [])
            return False
        batches = max(1, *(each.user.batcher.workers for each in followed))
        same = followed == self._solved_with and batches == self._batches
        if same and not has_moved(loads, self.loads):
            return False
        tables = await self._solve(DeviceRequest(loads, batches), LONGEST_SOLVE)
        if followed == self._followed:
            self._batches = batches
            self._adopt(followed, tables, loads)
            logger.info(
                "device group %r: new order of %d models, solved in %.2f s",
                self._group,
                len(loads),
                self._clock() - now,
            )
        return True

    def _adopt(self, followed: list[_Followed], tables: Sequence[DeviceTable | None], loads: list[DeviceLoad]) -> None:
        if not loads and not self.loads:
            return
        self._solved_with, self.loads = followed if loads else [], loads
        for each, table in zip(followed, tables, strict=True):
            each.policy.share(table)
        for each in followed:
            each.user.policy_changed()


class DeviceGroups:
    """The device groups of a server, by name. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._groups: dict[str, DeviceGroup] = {}

    def group(self, name: str, order: str) -> DeviceGroup:
        """Return the group `name`. Raises SettingsError if it has another order."""
        group = self._groups.get(name)
        if group is None:
            solved = order == SOLVED
            follower = DeviceTuner(name, clock=self._clock, pause=partial(sleep, self._clock)) if solved else None
            group = self._groups[name] = DeviceGroup(name, order=order, follower=follower)
        if group.order != order:
            raise SettingsError(
                f"device_order={order!r}: another model of the device_group {name!r} has {group.order!r}; all must have the same"
            )
        return group
