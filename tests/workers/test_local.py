import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.workers.pools import Recorder
from tests.workers.runs import StoppedClock, run_in_stopped_time

from weir.errors import Cancelled, ModelError, SettingsError
from weir.messages import JSON, OBJECT, Batch, EventKind
from weir.model import Model
from weir.workers.local import InlineExecutor, ThreadExecutor
from weir.workers.settings import WorkerSettings


class Square(Model):
    ends: BaseException | None = None

    def predict(self, batch: list[Any]) -> list[Any]:
        if 13 in batch:
            raise self.ends or ValueError("unlucky")
        return [x * x for x in batch]


def make(model: type[Model] = Square, **settings: Any) -> InlineExecutor:
    return InlineExecutor(model, {}, WorkerSettings(executor="inline", **settings), name="square", max_batch_size=64)


@asynccontextmanager
async def inline(model: type[Model] = Square) -> AsyncIterator[tuple[InlineExecutor, Recorder]]:
    executor, heard = make(model), Recorder()
    await executor.start(heard)
    assert await heard.next("ready") == 1
    yield executor, heard
    await executor.stop()


async def test_a_batch_runs_in_a_later_turn_of_the_loop() -> None:
    async with inline() as (executor, heard):
        executor.run(0, Batch(1, [b"2", b"13"], JSON, JSON))
        assert heard.log.empty()
        assert executor.states()[0].in_flight == 1
        events = await heard.next("events")
        assert events.outputs[0] == b"4"
        assert events.kinds == [EventKind.DONE, EventKind.ERROR]
        assert [state.in_flight for state in executor.states()] == [0]
        await executor.stop()
    assert executor.states()[0].state == "stopped"


async def test_entries_cancelled_before_it_began_are_left_out() -> None:
    async with inline() as (executor, heard):
        executor.run(0, Batch(1, [13, 2], OBJECT, OBJECT))
        executor.cancel(0, 1, [0])
        executor.cancel(0, 99, [0])
        outputs = (await heard.next("events")).outputs
        assert isinstance(outputs[0], Cancelled)
        assert outputs[1] == 4


async def test_a_batch_that_has_not_begun_when_it_stops_is_dropped() -> None:
    async with inline() as (executor, heard):
        executor.run(0, Batch(1, [2], OBJECT, OBJECT))
    await asyncio.sleep(0)
    assert heard.log.empty()


@pytest.mark.parametrize("step", ["__init__", "load"])
@pytest.mark.parametrize("error", [OSError("no weights"), SystemExit(3)])
async def test_a_start_that_fails_is_a_model_error(step: str, error: BaseException) -> None:
    def fail(_: Any) -> None:
        raise error

    executor = make(type("Broken", (Square,), {step: fail}))
    with pytest.raises(ModelError, match="worker 0 of 'square' did not load: it raised") as caught:
        await executor.start(Recorder())
    assert caught.value.original_type == type(error).__name__
    assert executor.states()[0].state == "failed"
    await executor.stop()


def test_an_interrupt_ends_the_batch_and_goes_on_to_the_program() -> None:
    loop = asyncio.new_event_loop()
    executor, heard = make(type("Interrupted", (Square,), {"ends": KeyboardInterrupt()})), Recorder()
    loop.run_until_complete(executor.start(heard))
    executor.run(0, Batch(1, [1, 13], OBJECT, OBJECT))
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_until_complete(heard.next("ready"))
    events = loop.run_until_complete(heard.next("events"))
    assert [output.original_type for output in events.outputs] == ["KeyboardInterrupt"] * 2
    loop.run_until_complete(executor.stop())
    loop.close()


@pytest.mark.parametrize(
    ("executor", "setting"),
    [
        *[("inline", setting) for setting in ({"env": [{"A": "1"}]}, {"cpu_affinity": [[0]]}, {"threads": 2})],
        *[("thread", setting) for setting in ({"env": [{"A": "1"}]}, {"threads": 2})],
    ],
)
async def test_settings_that_need_a_process_are_refused(executor: str, setting: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(setting))}=.*needs worker processes"):
        await (make(**setting) if executor == "inline" else make_threads(**setting)).start(Recorder())


async def test_an_unload_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Clinging(Square):
        def unload(self) -> None:
            raise OSError("will not go")

    async with inline(Clinging):
        pass
    assert "worker 0 of 'square': unload raised" in caplog.text


def test_there_is_no_shared_memory() -> None:
    for executor in (make(), make_threads()):
        assert executor.reserve(1 << 20) is None
        assert executor.gauges() == {"arena_bytes": 0, "arena_free_bytes": 0, "restarts": 0}


class Gate:
    """Holds `predict` until the test opens it."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()


class GatedSquare(Model):
    """Squares numbers; 0 waits at the gate."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate

    def predict(self, batch: list[Any]) -> list[Any]:
        if 0 in batch and self.gate is not None:
            self.gate.entered.release()
            self.gate.opened.wait()
        if 13 in batch:
            raise ValueError("unlucky")
        if 14 in batch:
            raise SystemExit(3)
        return [x * x if x != "where" else (self.worker_index, threading.get_ident()) for x in batch]


@asynccontextmanager
async def running(
    gate: Gate | None = None, model: type[Model] = GatedSquare, **settings: Any
) -> AsyncIterator[tuple[ThreadExecutor, Recorder]]:
    executor = make_threads(gate, model, **settings)
    heard = Recorder()
    await executor.start(heard)
    for _ in executor.states():
        await heard.next("ready")
    try:
        yield executor, heard
    finally:
        if gate is not None:
            gate.opened.set()
        await executor.stop()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("weir-square")]


def make_threads(
    gate: Gate | None = None, model: type[Model] = GatedSquare, stop_grace: float = 5.0, hang_grace: float = 30.0,
    params: dict[str, Any] | None = None, **settings: Any,
) -> ThreadExecutor:  # fmt: skip
    given = params or ({} if gate is None else {"gate": gate})
    chosen = WorkerSettings(executor="thread", **settings)
    return ThreadExecutor(
        model, given, chosen, name="square", max_batch_size=64, stop_grace=stop_grace, hang_grace=hang_grace
    )


async def test_each_worker_has_a_thread_and_an_instance_of_its_own() -> None:
    async with running(workers=3) as (executor, heard):
        for worker in range(3):
            executor.run(worker, Batch(worker, ["where"], OBJECT, OBJECT))
        found = {(await heard.next("events")).outputs[0] for _ in range(3)}
        assert {index for index, _ in found} == {0, 1, 2}
        assert len({ident for _, ident in found} | {threading.get_ident()}) == 4
        assert [state.index for state in executor.states()] == [0, 1, 2]
    assert {state.state for state in executor.states()} == {"stopped"}


class Weights(Model):
    """Loads weights that all its threads share; no predict returns before as many run as the barrier wants."""

    def __init__(self, barrier: threading.Barrier, loads: list[str]) -> None:
        self.barrier = barrier
        self.loads = loads

    def load_shared(self) -> None:
        self.loads.append("shared")
        if len(self.loads) > 3:
            raise ValueError("no weights")
        self.weights = bytearray(100)

    def load(self) -> None:
        self.loads.append("own")
        self.own = [self.worker_index]

    def predict(self, batch: list[Any]) -> list[Any]:
        self.barrier.wait()
        return [(id(self.weights), self.own[0]) for _ in batch]


async def test_threads_run_at_once_and_share_what_the_model_loads_once() -> None:
    loads: list[str] = []
    params = {"barrier": threading.Barrier(2), "loads": loads}
    executor, heard = make_threads(model=Weights, params=params, workers=2), Recorder()
    await executor.start(heard)
    for worker in range(2):
        await heard.next("ready")
        executor.run(worker, Batch(worker, ["where"], OBJECT, OBJECT))
    found = [(await heard.next("events")).outputs[0] for _ in range(2)]
    assert {own for _, own in found} == {0, 1}
    assert len({weights for weights, _ in found}) == 1
    await executor.add_worker()
    assert loads == ["shared", "own", "own", "own"]
    await executor.stop()


async def test_a_model_whose_shared_part_cannot_be_loaded_does_not_start() -> None:
    executor = make_threads(model=Weights, params={"barrier": None, "loads": ["own"] * 3}, workers=2)
    with pytest.raises(ModelError, match="did not load: it raised ValueError: no weights"):
        await executor.start(Recorder())


async def test_a_bad_item_fails_alone_and_so_does_one_that_exits() -> None:
    async with running() as (executor, heard):
        executor.run(0, Batch(1, [b"2", b"13", b"{", b"14", b"3"], JSON, JSON))
        events = await heard.next("events")
        assert events.kinds == [EventKind.DONE, *[EventKind.ERROR] * 3, EventKind.DONE]
        assert (events.outputs[0], events.outputs[4]) == (b"4", b"9")
        assert events.outputs[3].original_type == "SystemExit"


async def test_the_next_batch_is_at_hand_and_can_be_cancelled() -> None:
    gate = Gate()
    async with running(gate, pipeline_depth=2) as (executor, heard):
        executor.run(0, Batch(1, [0], OBJECT, OBJECT))
        await asyncio.to_thread(gate.entered.acquire)
        executor.run(0, Batch(2, [5, 6], OBJECT, OBJECT))
        assert executor.states()[0].in_flight == 2
        executor.cancel(0, 2, [0])
        executor.cancel(0, 99, [0])
        gate.opened.set()
        assert (await heard.next("events")).outputs == [0]
        outputs = (await heard.next("events")).outputs
        assert isinstance(outputs[0], Cancelled)
        assert outputs[1] == 36
        assert executor.states()[0].in_flight == 0


def test_a_batch_that_takes_too_long_costs_the_worker_until_it_returns() -> None:
    async def main(loop: StoppedClock) -> None:
        gate = Gate()
        async with running(gate, pipeline_depth=2, predict_timeout=10.0) as (executor, heard):
            executor.run(0, Batch(1, [0], OBJECT, OBJECT))
            executor.run(0, Batch(2, [5], OBJECT, OBJECT))
            await asyncio.to_thread(gate.entered.acquire)
            loop.pass_time(10.0)
            assert "longer than predict_timeout=10.0" in await heard.next("lost")
            assert (executor.states()[0].state, executor.states()[0].in_flight) == ("lost", 0)
            gate.opened.set()
            assert await heard.next("ready") == 2  # and nothing of what it had
            assert (executor.states()[0].state, executor.states()[0].reason) == ("ready", "")
            assert executor.gauges()["restarts"] == 1
            executor.run(0, Batch(3, [6], OBJECT, OBJECT))
            assert (await heard.next("events")).outputs == [36]

    run_in_stopped_time(main)


def test_where_all_threads_hang_nobody_waits_until_one_returns() -> None:
    async def main(loop: StoppedClock) -> None:
        gate, heard = Gate(), Recorder()
        executor = make_threads(gate, workers=2, predict_timeout=10.0, hang_grace=5.0)
        await executor.start(heard)
        for worker in range(2):
            await heard.next("ready")
            executor.run(worker, Batch(worker, [0], OBJECT, OBJECT))
            await asyncio.to_thread(gate.entered.acquire)
        loop.pass_time(10.0)
        for _ in range(2):
            await heard.next("lost")
        loop.pass_time(5.0)
        assert "hangs" in await heard.next("unavailable")  # once: the first one is no reason
        gate.opened.set()
        for _ in range(2):
            await heard.next("ready")
        assert [state.state for state in executor.states()] == ["ready", "ready"]
        await executor.stop()

    run_in_stopped_time(main)


async def test_a_stop_does_not_wait_for_ever() -> None:
    gate, heard = Gate(), Recorder()
    executor = make_threads(gate, stop_grace=0.01)
    await executor.start(heard)
    await heard.next("ready")
    executor.run(0, Batch(1, [0], OBJECT, OBJECT))
    await asyncio.to_thread(gate.entered.acquire)
    await executor.stop()
    assert executor.states()[0].state == "stopped"
    (stuck,) = [thread for thread in threading.enumerate() if thread.name == "weir-square-0"]
    assert stuck.daemon
    gate.opened.set()
    await asyncio.to_thread(stuck.join)


class FirstBroken(GatedSquare):
    def load(self) -> None:
        if self.worker_index == 1:
            raise OSError("no weights")


async def test_a_start_that_fails_leaves_no_thread() -> None:
    executor = make_threads(model=FirstBroken, workers=3)
    with pytest.raises(ModelError, match="worker 1 of 'square' did not load: it raised OSError: no weights") as caught:
        await executor.start(Recorder())
    assert "in load" in caught.value.remote_traceback
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weir-square")]


class SlowToLoad(GatedSquare):
    def load(self) -> None:
        assert self.gate is not None
        self.gate.opened.wait()


async def test_a_start_takes_no_longer_than_its_limit() -> None:
    gate = Gate()
    executor = make_threads(gate, SlowToLoad, start_timeout=0.01)
    with pytest.raises(ModelError, match=r"did not load within start_timeout=0\.01 seconds"):
        await executor.start(Recorder())
    gate.opened.set()
    await executor.stop()


class Affine(GatedSquare):
    def predict(self, batch: list[Any]) -> list[Any]:
        return [os.sched_getaffinity(0)] * len(batch)


async def test_a_thread_may_be_kept_on_some_cpus() -> None:
    allowed = os.sched_getaffinity(0)
    chosen = [min(allowed)]

    async with running(model=Affine, cpu_affinity=[chosen]) as (executor, heard):
        executor.run(0, Batch(1, [1], OBJECT, OBJECT))
        assert (await heard.next("events")).outputs == [set(chosen)]
    assert os.sched_getaffinity(0) == allowed
