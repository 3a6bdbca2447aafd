"""tuning/device.py: when the order of a device group is solved, and for what."""

import asyncio
import os
from typing import Any

import pytest
from tests.policy.banks import bank, promised
from tests.rings import subcases
from tests.workers.models import Echo

import weir
from weir.batching import BatchingSettings
from weir.batching.batcher import Batcher
from weir.batching.workers import WaitingTurn
from weir.errors import ModelError, SettingsError
from weir.policy.cost import Prices, Profile
from weir.policy.decision import Greedy, Policy
from weir.policy.online.adaptive import AutoPolicy, SolvedPolicy
from weir.policy.solve.device import DeviceLoad, DeviceTable, solve_device
from weir.simulation.engine import SimulatedRequest
from weir.tuning import DeviceRequest
from weir.tuning.device import EVERY, SILENT_FOR, DeviceGroups, DeviceTuner
from weir.workers.process.shared import SharedPool
from weir.workers.turns import DeviceGroup

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=4.0, max_batch_size=8)


class Model:
    """A model of a group, without workers: rows arrive, and none are served."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.batcher = Batcher(
            BatchingSettings(max_batch_size=8, max_queue_size=1 << 20), policy or SolvedPolicy(bank())
        )
        self.batcher.worker_ready(0, 1, 0.0)
        self.changes = 0
        self.arrivals = 0

    claim = 0
    label = "model"
    turn: WaitingTurn | None = None

    def worker_away(self, worker: int) -> None: ...

    def worker_back(self, worker: int) -> None: ...

    def policy_changed(self) -> None:
        self.changes += 1

    def arrive(self, rate: float, since: float, until: float) -> None:
        while (at := since + (self.arrivals + 1) / rate) < until:
            self.arrivals += 1
            self.batcher.submit(SimulatedRequest(self.arrivals, at), at)

    @property
    def policy(self) -> SolvedPolicy:
        policy = self.batcher.policy
        assert isinstance(policy, SolvedPolicy)
        return policy


class Rig:
    """A tuner in virtual time: `pass_time` lets each pause end at once, after the rows of that time have arrived."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[list[DeviceLoad]] = []
        self.batches = 0
        self.error: Exception | None = None
        self._until = 0.0
        self._idle = asyncio.Event()
        self._go = asyncio.Event()
        self._flows: list[tuple[Model, float, float]] = []
        self.models: list[Model] = []
        self.tuner = DeviceTuner("gpu0", pause=self._pause, clock=lambda: self.now, solve=self._solve)

    async def _pause(self, seconds: float) -> None:
        while self.now + max(seconds, 1e-9) > self._until:
            self._idle.set()
            self._go.clear()
            await self._go.wait()
        self.now += max(seconds, 1e-9)
        for model, rate, since in self._flows:
            model.arrive(rate, since, self.now)

    async def _solve(self, wanted: DeviceRequest, limit: float) -> list[DeviceTable]:
        loads, batches = wanted
        self.batches = batches
        self.asked.append(list(loads))
        if self.error is not None:
            raise self.error
        return solve_device(loads, batches)

    def join(self, *rates: tuple[Model, float]) -> None:
        """Have models join the group and start, to which so many rows come per second."""
        for model, rate in rates:
            self.tuner.joined(model)
            self.tuner.started(model)
            self.models.append(model)
            self.flow(model, rate)

    async def end(self) -> None:
        for model in self.models:
            await self.tuner.left(model)

    def flow(self, model: Model, rate: float) -> None:
        model.arrivals = 0
        self._flows = [each for each in self._flows if each[0] is not model]
        if rate:
            self._flows.append((model, rate, self.now))

    async def pass_time(self, seconds: float) -> None:
        self._until += seconds
        self._idle.clear()
        self._go.set()
        await self._idle.wait()


async def test_the_order_follows_what_the_models_need_of_the_device() -> None:
    rig, first, second = Rig(), Model(), Model()
    rig.join((first, 100.0), (second, 40.0))
    await rig.pass_time(10.0)
    rates = [each.rate for each in rig.tuner.loads]
    assert rates == pytest.approx([100.0, 40.0], rel=0.1)
    assert all(each.policy.urgency(3) is not None and each.changes for each in (first, second))
    solved = len(rig.asked)
    await rig.pass_time(20.0)
    assert len(rig.asked) == solved  # nothing has changed
    rig.flow(second, 80.0)
    await rig.pass_time(20.0)
    assert len(rig.asked) > solved
    assert rig.tuner.loads[1].rate == pytest.approx(80.0, rel=0.25)
    rig.flow(second, 0.0)
    await rig.pass_time(2.0 * SILENT_FOR)
    assert rig.tuner.loads[1].rate == 0.0
    await rig.tuner.left(second)
    await rig.pass_time(2.0 * EVERY)
    assert first.policy.urgency(3) is None and rig.tuner.loads == []  # alone it decides by its bank
    await rig.tuner.left(first)


async def test_while_a_model_is_measured_or_solving_fails_the_order_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, known, unknown = Rig(), Model(), Model(AutoPolicy())
    rig.join((known, 50.0), (unknown, 50.0))
    await rig.pass_time(5.0)
    assert rig.asked == [] and known.policy.urgency(1) is None
    unknown.policy.expect(PROFILE, Prices(latency_weight=3.0))  # its bank may take minutes; the order needs none
    rig.error = ModelError("the solving process ended")
    await rig.pass_time(2.0)
    assert rig.asked and known.policy.urgency(1) is None
    assert "no new order; the old one stays: the solving process ended" in caplog.text
    rig.error = None
    await rig.pass_time(2.0)
    assert known.policy.urgency(1) is not None
    assert rig.tuner.loads[1].weight == 3.0
    await rig.end()


async def test_the_order_is_for_as_many_batches_as_the_device_runs_at_once() -> None:
    rig, first, second = Rig(), Model(), Model()
    rig.join((first, 50.0), (second, 50.0))
    await rig.pass_time(10.0)
    assert rig.batches == 1
    second.batcher.worker_ready(1, 1, rig.now)
    await rig.pass_time(10.0)
    assert rig.batches == 2
    for worker in (0, 1):
        second.batcher.worker_lost(worker, rig.now)
    await rig.pass_time(10.0)
    assert rig.batches == 1
    await rig.end()


@subcases(
    ("policy", "rule"),
    [
        (Greedy(), "needs a solved policy, as policy=auto is; with another policy use device_order=longest"),
        (SolvedPolicy(promised()), "is solved for weights, but the policy has a latency objective"),
        (AutoPolicy(p99=0.02), "is solved for weights, but the policy has a latency objective"),
    ],
)
def test_a_policy_that_the_order_cannot_use_is_refused(policy: Policy, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"device_group='gpu0', device_order='solved': {rule}"):
        Rig().tuner.joined(Model(policy))


def test_a_group_has_one_order() -> None:
    groups = DeviceGroups(lambda: 0.0)
    assert groups.group("gpu0", "oldest") is groups.group("gpu0", "oldest") is not groups.group("gpu1", "oldest")
    assert groups.group("gpu0", "oldest").follower is None
    with pytest.raises(SettingsError, match="device_order='fair': another model of the device_group 'gpu0' has 'old"):
        groups.group("gpu0", "fair")


@subcases("pooled", [False, True])
def test_services_of_a_program_take_turns_in_the_solved_order(*, pooled: bool) -> None:
    async def main() -> None:
        group, executor = weir.device_group("gpu0"), SharedPool().member if pooled else "thread"
        settings: dict[str, Any] = {"executor": executor, "max_batch_size": 8, "device": group}
        async with (
            weir.Service(Echo, policy=SolvedPolicy(bank()), **settings) as first,
            weir.Service(Echo, name="second", policy=SolvedPolicy(bank()), **settings) as second,
        ):
            while "limit" not in first.explain_policy()["device"]:
                assert list(await asyncio.gather(first.infer(1), second.infer(2))) == [1, 2]
            device = second.explain_policy()["device"]
            assert (device["group"], [each["model"] for each in device["models"]]) == ("gpu0", ["echo", "second"])
            assert 0.0 < device["share"] < 1.0
            pids = [{state.pid for state in each.executor.states()} for each in (first, second)]
            assert (pids[0] == pids[1] and os.getpid() not in pids[0]) == pooled

    asyncio.run(main())
    with pytest.raises(
        SettingsError, match="device_group='gpu0', order='lifo': must be one of fair, oldest, longest, solved"
    ):
        weir.device_group("gpu0", "lifo")


def test_models_of_a_group_share_one_pool_or_none() -> None:
    def made(group: DeviceGroup | None, pool: SharedPool | None) -> weir.Service:
        executor = "process" if pool is None else pool.member
        return weir.Service(Echo, executor=executor, device=group, policy="greedy")

    pool, group = SharedPool(), DeviceGroup("gpu0", order="oldest")
    assert made(group, pool).generation.shares_workers
    made(group, pool)
    for other in (None, SharedPool()):
        with pytest.raises(SettingsError, match="device_group='gpu0': some of its models share workers, and others do"):
            made(group, other)
    assert not made(None, pool).generation.shares_workers  # it does not fit those of the pool
    with pytest.raises(SettingsError, match="models that share workers must all have the same device group, or all"):
        made(DeviceGroup("gpu0", order="oldest"), pool)


class Grouped(Echo):
    device_group = "gpu0"


@subcases(
    ("model", "settings"),
    [(Grouped, {}), (Echo, {"device_group": "gpu0"}), (Echo, {"device": DeviceGroup("gpu1"), "device_group": "gpu0"})],
)
def test_a_service_of_a_program_that_would_take_no_turns_is_refused(model: Any, settings: dict[str, Any]) -> None:
    way_out = r"in a program, give all models of the group device=weir.device_group\('gpu0'\)"
    with pytest.raises(SettingsError, match=f"device_group='gpu0': only a server finds a group by its name; {way_out}"):
        weir.Service(model, **settings)


def test_the_group_of_a_service_goes_before_that_of_its_class() -> None:
    assert weir.Service(Grouped, device=DeviceGroup("gpu1", order="oldest")).workers.device_group == "gpu1"
    assert weir.Service(Grouped, device_group=None).workers.device_group is None  # it runs alone


def test_the_models_of_an_application_take_turns_by_a_setting() -> None:
    from weir.catalog.loading import new_service

    groups: list[tuple[str, str]] = []

    def find(name: str, order: str) -> DeviceGroup:
        groups.append((name, order))
        return DeviceGroup(name, order=order)

    assert new_service(Grouped, group_of=find, device_order="oldest").workers.device_order == "oldest"
    assert groups == [("gpu0", "oldest")]
    assert new_service(Grouped).workers.device_group is None  # what is measured runs alone
    with pytest.raises(SettingsError, match="device_order='solved': needs a solved policy"):
        weir.asgi(Grouped, policy="greedy")  # so it found its group


def test_a_group_of_a_program_refuses_workers_that_cannot_take_turns() -> None:
    error = r"workers=1\.\.3, device_group='gpu0': models that take turns have a fixed number of workers"
    with pytest.raises(SettingsError, match=error):
        weir.Service(Echo, device=weir.device_group("gpu0", "oldest"), policy="greedy", workers="1..3")
