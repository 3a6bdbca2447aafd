"""turns.py: models that take turns on a device, with real services, workers and deaths."""

import asyncio
import fcntl
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.rings import spread
from tests.served import serving
from tests.waiting import until
from tests.workers.models import Echo

from weir.batching.workers import ORDERS, REASONS
from weir.catalog.chains import Chain
from weir.catalog.registry import Registry
from weir.errors import ModelCrashed, ModelError, ModelNotReady, SettingsError
from weir.messages import Batch
from weir.model import Model
from weir.policy.cost import Profile
from weir.policy.loading import load_policy
from weir.policy.solve.bank import solve_bank
from weir.serving.service import Service
from weir.testing import FakeExecutor
from weir.workers.executor import WAITS, capabilities_of
from weir.workers.process.shared import SharedPool
from weir.workers.turns import DeviceGroup


class Exclusive(Model):
    """Fails if another model computes at the same time; the lock of a file tells. "die" ends its process."""

    examples = ("warm-up",)

    def __init__(self, path: str = os.environ.get("DEVICE", "")) -> None:
        self.path = path

    def predict(self, batch: list[Any]) -> list[Any]:
        with open(self.path, "ab") as device:
            fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if "die" in batch:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02 if "warm-up" in batch else 0.001)
        return batch


class Other(Exclusive):
    pass


@asynccontextmanager
async def taking_turns(
    folder: Path, group: DeviceGroup, *models: type[Model], **settings: Any
) -> AsyncIterator[list[Service]]:
    params = {"path": str(folder / "device")}
    settings = {"max_batch_size": 4, "policy": "greedy", **settings}
    services = [Service(model, params=params, device=group, **settings) for model in models]
    try:
        await asyncio.gather(*[each.start() for each in services])
        yield services
    finally:
        await asyncio.gather(*[each.stop() for each in services])


@pytest.mark.parametrize("order", spread(ORDERS, 2))
@pytest.mark.parametrize("executor", ["process", "thread"])
async def test_one_model_computes_at_a_time(tmp_path: Path, order: str, executor: str) -> None:
    async with taking_turns(tmp_path, DeviceGroup("gpu0", order=order), Exclusive, Other, executor=executor) as both:
        assert all(each.generation.shares_workers for each in both)
        calls = [each.infer(number) for number in range(60) for each in both]
        assert await asyncio.gather(*calls) == [number for number in range(60) for _ in both]


async def test_the_place_of_a_worker_that_dies_is_free_for_the_others(tmp_path: Path) -> None:
    group = DeviceGroup("gpu0", order="oldest")
    async with taking_turns(tmp_path, group, Exclusive, Other, max_batch_size=1) as (first, second):
        with pytest.raises(ModelCrashed):
            await first.infer("die")
        assert await asyncio.gather(*[second.infer(number) for number in range(8)]) == list(range(8))
        assert await first.infer(3) == 3  # its worker was replaced
        assert await second.infer(4) == 4


async def test_a_model_that_stops_leaves_the_device_and_may_come_back(tmp_path: Path) -> None:
    async with taking_turns(tmp_path, DeviceGroup("gpu0"), Exclusive, Other) as (first, second):
        await first.stop()
        assert await second.infer(1) == 1
        await first.start()
        assert list(await asyncio.gather(first.infer(2), second.infer(3))) == [2, 3]


async def test_each_model_adds_and_removes_workers_of_its_own(tmp_path: Path) -> None:
    group = DeviceGroup("gpu0")
    async with taking_turns(tmp_path, group, Exclusive, Other, executor="thread") as (first, second):
        await first.add_worker()
        assert (first.generation.worker_count, second.generation.worker_count) == (2, 1)
        await first.remove_worker()
        assert first.generation.worker_count == 1
        assert list(await asyncio.gather(first.infer(2), second.infer(3))) == [2, 3]


async def test_bulk_workers_take_no_turns(tmp_path: Path) -> None:
    group = DeviceGroup("gpu0")
    async with (
        Service(Echo, device=group, policy="greedy", bulk_workers=1) as first,
        Service(Echo, name="second", device=group, policy="greedy") as second,
    ):
        assert capabilities_of(first.executor).start_bulk_workers is not None and first.generation.shares_workers
        work = [first.infer(number, priority=-1) for number in range(20)]
        assert await asyncio.gather(*work, second.infer(5)) == [*range(20), 5]


async def test_a_batch_that_cannot_be_handed_over_keeps_no_turn() -> None:
    class Refusing(FakeExecutor):
        def run(self, worker: int, batch: Batch) -> None:
            raise RuntimeError("no")

    settings: dict[str, Any] = {"device": DeviceGroup("gpu0", order="oldest"), "policy": "greedy"}
    async with (
        Service(Other, executor=Refusing(), **settings) as first,
        Service(Other, name="second", executor=FakeExecutor(lambda payloads: payloads), **settings) as second,
    ):
        with pytest.raises(ModelError, match="no"):
            await first.infer(1)
        assert await asyncio.wait_for(second.infer(2), 20) == 2


class Measured(Exclusive):
    examples = ("item",)
    warmup_sizes = ()


@pytest.mark.parametrize("pooled", [False, True])
async def test_a_model_is_measured_while_no_other_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, pooled: bool
) -> None:
    group = DeviceGroup("gpu0", order="longest")
    params, executor = {"path": str(tmp_path / "device")}, SharedPool().member if pooled else "process"
    async with taking_turns(tmp_path, group, Exclusive, executor=executor) as (first,):
        settings: dict[str, Any] = {"params": params, "executor": executor, "device": group, "max_batch_size": 2}
        late = Service(Measured, policy="auto:seconds=0.4", **settings)
        starting = asyncio.ensure_future(late.start())
        served = 0
        while not starting.done():
            await asyncio.gather(*[first.infer(number) for number in range(8)])
            served += 8
        await starting
        try:
            assert served > 8
            assert late.generation.tuner is not None and late.generation.tuner.profile is not None, caplog.text
            assert await late.infer(3) == 3
        finally:
            await late.stop()


@pytest.mark.parametrize("executor", spread(["process", "thread", "pooled", "inline"], 2))
async def test_models_warm_up_while_no_other_computes(tmp_path: Path, executor: str) -> None:
    group = DeviceGroup("gpu0", order="longest")
    kind: Any = SharedPool().member if executor == "pooled" else executor
    async with taking_turns(tmp_path, group, Exclusive, Other, executor=kind) as (first, second):
        late = [Service(Exclusive, name=name, params=first.params, device=group, executor=kind) for name in "cd"]
        starting = asyncio.gather(*[each.start() for each in late])
        served = 0
        while not starting.done():
            await asyncio.gather(*[each.infer(number) for number in range(8) for each in (first, second)])
            served += 1
        await starting
        try:
            assert served > 1
            assert await asyncio.gather(*[each.infer(3) for each in late]) == [3, 3]
        finally:
            await asyncio.gather(*[each.stop() for each in late])


class Held(Model):
    """Computes until it may end."""

    began, may_end = threading.Event(), threading.Event()

    def predict(self, batch: list[Any]) -> list[Any]:
        Held.began.set()
        Held.may_end.wait()
        return batch


@pytest.mark.parametrize("executor", ["process", "thread", "inline"])
async def test_a_model_that_waits_to_warm_up_says_so_and_can_be_stopped(tmp_path: Path, executor: str) -> None:
    group = DeviceGroup("gpu0", order="longest")
    Held.began.clear()
    Held.may_end.clear()
    async with Service(Held, executor="thread", device=group, policy="greedy") as first:
        answer = first.infer(1)
        assert await asyncio.to_thread(Held.began.wait, 20)
        late = Service(Exclusive, params={"path": str(tmp_path / "device")}, device=group, executor=executor)
        starting = asyncio.ensure_future(late.start())
        await until(lambda: [each.reason for each in late.executor.states()] == [WAITS])
        await late.stop()
        with pytest.raises((ModelNotReady, asyncio.CancelledError)):
            await starting
        Held.may_end.set()
        assert await answer == 1
        assert await first.infer(2) == 2


class BothSteps(Chain):
    steps = ("first", "second")


async def test_a_chain_leaves_the_turns_to_its_steps(tmp_path: Path) -> None:
    group, params = DeviceGroup("gpu0", order="longest"), {"path": str(tmp_path / "device")}
    settings: dict[str, Any] = {"params": params, "device": group, "policy": "greedy"}
    first, second = (Service(Exclusive, name=name, **settings) for name in ("first", "second"))
    chain = BothSteps(device=group)
    registry = Registry([first, second, chain])
    await registry.start()
    try:
        async with asyncio.timeout(60):
            calls = [chain.infer(number) for number in range(20)]
            assert await asyncio.gather(*calls) == list(range(20))
    finally:
        await registry.stop()


def test_models_of_a_server_take_turns_by_a_setting(tmp_path: Path) -> None:
    targets = [f"{__name__}:{model.__name__}" for model in (Exclusive, Other)]
    bank = tmp_path / "exclusive.npz"
    profile = Profile.linear(alpha_ms=0.1, tau0_ms=1.0, max_batch_size=4)
    bank.write_bytes(solve_bank(profile, rates=[100.0, 1000.0, 2500.0]).to_bytes())
    turns = ["--device-group", "gpu0", "--policy", str(bank), "--max-batch-size", "4"]
    with (
        serving(*targets, *turns, env={"DEVICE": str(tmp_path / "device")}) as (_, client),
        ThreadPoolExecutor(8) as threads,
    ):
        answers = threads.map(
            lambda number: client.post(f"/infer/{('exclusive', 'other')[number % 2]}", json=number), range(80)
        )
        assert [answer.json() for answer in answers] == list(range(80))
        while "limit" not in (device := client.get("/models/other/policy").json()["device"]):
            assert client.post("/infer/exclusive", json=3).json() == client.post("/infer/other", json=3).json() == 3
        metrics = client.get("/metrics").text
    assert (device["limit"], device["group"], device["order"]) == (1, "gpu0", "solved")
    assert {each["model"] for each in device["models"]} == {"exclusive", "other"}
    assert sum(device["turns"].values()) >= 10 and device["last"]["reason"] in REASONS
    assert 0.0 < device["share"] < 1.0
    (busy,) = re.findall(r'^weir_device_busy_seconds_total{device="gpu0",model="other"} (.*)$', metrics, re.M)
    assert float(busy) >= device["busy_seconds"] > 0.01


async def test_a_model_of_a_group_says_why_it_was_next_whatever_its_policy(tmp_path: Path) -> None:
    group, patient = DeviceGroup("gpu0", order="longest"), 20.0  # nothing has to begin in this test
    settings: dict[str, Any] = {"executor": "thread", "max_queue_delay": patient}
    async with taking_turns(tmp_path, group, Exclusive, Other, **settings) as (first, second):
        device = first.explain_policy()["device"]
        assert device["last"] == {"reason": None, "models": []}
        assert 0.0 < device["share"] < 1.0  # the warm-up counts
        calls = [first.infer(number) for number in range(9)] + [second.infer(number) for number in range(3)]
        await asyncio.gather(*calls)
        device = first.explain_policy()["device"]
        assert device["turns"]["free"] == 1 and sum(device["turns"].values()) == 3
        brief = first.state(brief=True)["device"]
        assert brief == {
            **{key: device[key] for key in ("group", "order", "busy_seconds", "share", "turns")},
            "because": device["last"]["reason"],
        }
        other = second.explain_policy()["device"]
        assert other["last"]["reason"] == "first"
        (shown,) = [each for each in other["last"]["models"] if each["model"] == "other"]
        assert (shown["waiting"], shown["urgency"], shown["must_begin"]) == (3, None, False)
        assert 0.0 < shown["due_in"] <= patient
        assert device["share"] + other["share"] == pytest.approx(1.0)


class Noting:
    """A Follower that notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def joined(self, user: Any) -> None:
        if isinstance(user.batcher.policy, type(load_policy("full:4"))):
            raise SettingsError("no full batches here")
        self.heard.append("joined")

    def started(self, user: Any) -> None:
        self.heard.append("started")

    async def left(self, user: Any) -> None:
        self.heard.append("left")


async def test_what_follows_a_group_is_notified_of_its_models_and_may_refuse_one(tmp_path: Path) -> None:
    following = Noting()
    group = DeviceGroup("gpu0", follower=following)
    async with taking_turns(tmp_path, group, Exclusive, executor="thread"):
        assert following.heard == ["joined", "started"]
    assert following.heard == ["joined", "started", "left"]
    with pytest.raises(SettingsError, match="no full batches here"):
        Service(Exclusive, device=group, policy="full:4", max_batch_size=4)
