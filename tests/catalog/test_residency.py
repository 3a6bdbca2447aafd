"""Models come when requests come for them and leave when others need their room; no request is lost by that."""

import asyncio
import threading
import time
from collections.abc import Callable
from math import inf
from types import TracebackType
from typing import Any, Self

import pytest
from tests.catalog.workshop import Shelf
from tests.rings import subcases
from tests.serving.kit import Square
from tests.waiting import turns, until

from weir import DeadlineExceeded, Draining, ModelError, ModelNotFound, ModelNotReady, Service, SettingsError
from weir.catalog import manager
from weir.catalog.manager import Manager, ModelState
from weir.catalog.registry import Registry
from weir.catalog.residency import Residency, not_ready, without_paths
from weir.catalog.sources import ModelReading, ModelToServe, Parameters
from weir.frontends.http.application import in_memory
from weir.policy.residency import Resident, Room
from weir.protocols.exchange import once_read
from weir.testing import FakeClock, FakeExecutor
from weir.workers.executor import Listener


class Gated(FakeExecutor):
    """Starts when the test opens the gate of its house, and has ended when it opens the exit; takes what its house says."""

    def __init__(self, house: "House", name: str) -> None:
        super().__init__((lambda batch: [[name, item] for item in batch]) if house.answers else None)
        self._house = house
        self._name = name
        self._over = asyncio.Event()

    async def start(self, listener: Listener) -> None:
        self._house.starts.append(self._name)
        waits = [asyncio.ensure_future(each.wait()) for each in (self._house.gate, self._over)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if self._over.is_set():
            raise ModelNotReady(f"{self._name}: stopped before it was ready")
        if self._name in self._house.fails:
            raise ModelError(f"{self._name}: no weights")
        await super().start(listener)
        for state in self._states.values():
            state.pid = self._house.pids.setdefault(self._name, len(self._house.pids) + 1)

    async def stop(self) -> None:
        self._over.set()
        await self._house.exit.wait()
        await super().stop()


class House:
    """A repository of models on demand: `memory` is for all; each takes what `takes` has for it, or 1. Nothing runs after the block."""

    def __init__(
        self, *names: str, memory: float = 2.0, gpu_memory: float = inf, pinned: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic, **settings: Any,
    ) -> None:  # fmt: skip
        self.shelf = Shelf(**{name: {"": name} for name in names})
        self.gate, self.exit, self.measured = asyncio.Event(), asyncio.Event(), threading.Event()
        for each in (self.gate, self.exit, self.measured):
            each.set()
        self.answers = True
        self.starts: list[str] = []
        self.reads: list[str] = []
        self.fails: set[str] = set()
        self.takes: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        self.on_gpus: dict[str, int] | None = None
        self.executors: dict[str, list[Gated]] = {}
        self.settings: dict[str, Any] = {"policy": "greedy", "clock": clock, **settings}
        self.residency = Residency(
            Room(memory, gpu_memory), frozenset(pinned), clock=clock, measure=self.measure, measure_gpus=self.measure_gpus,
        )  # fmt: skip
        self.registry = Registry([])
        self.manager = Manager(self.registry, self.shelf, self.make, residency=self.residency)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.manager.stop()
            assert self.running() == []

    def measure(self, pid: int) -> int:
        self.measured.wait(60)
        return next(self.takes.get(name, 1) for name, each in self.pids.items() if each == pid)

    def measure_gpus(self) -> dict[int, int]:
        if self.on_gpus is None:
            raise SettingsError("no driver")
        return {pid: self.on_gpus[name] for name, pid in self.pids.items()}

    def make(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        self.reads.append(model.name)

        def executor(*_: Any, **__: Any) -> Gated:
            made = Gated(self, model.name)
            self.executors.setdefault(model.name, []).append(made)
            return made

        return Service(Square, name=model.name, executor=executor, on_demand=self.residency, **self.settings)

    async def find(self, name: str) -> Service:
        """Return the service as channels find it."""
        return await once_read(lambda: self.registry.get(name))

    async def ask(self, name: str, item: Any = 0, **options: Any) -> Any:
        return await (await self.find(name)).infer(item, **options)

    def states(self) -> dict[str, str]:
        """Return where each model is; one that answers is "loading" until it was measured."""
        models = self.residency.core.models
        return {
            name: models.get(service.generation, Resident()).presence.value
            for name, service in self.registry.services.items()
        }

    async def until(self, **states: str) -> None:
        """Return once the models are there."""
        await until(lambda: self.states() == states)

    async def begin_load(self, name: str) -> asyncio.Future[Any]:
        """Begin a load call that goes on when the gate opens; return what ends with it. Nothing else is read until then."""
        self.gate.clear()
        load = asyncio.ensure_future(self.manager.load_model(name))
        await until(lambda: self.starts == [name])
        return load

    async def busy(self, name: str) -> tuple[Service, Any]:
        """Have a model begin a request that is finished by `finish`; return its service and the request."""
        self.answers = False
        service = await self.find(name)
        call = service.infer(0)
        await until(lambda: any(each.pending for each in self.executors.get(name, [])))
        return service, call

    async def crowd_out(self) -> tuple[Service, Any, asyncio.Future[Any]]:
        """Have "a" leave for "b" while it is busy; return its service, its request and that of "b"."""
        service, call = await self.busy("a")
        other = asyncio.ensure_future(self.ask("b", 2))
        await until(lambda: self.states().get("a") == "leaving")
        return service, call, other

    async def finish(self, name: str, number: int = 0) -> None:
        """Have the executor of that number of the model answer its batch, once it has one."""
        await until(lambda: any(each.pending for each in self.executors.get(name, [])[number:]))
        self.executors[name][number].respond_next(lambda batch: [[name, item] for item in batch])

    def running(self) -> list[str]:
        """The names of the models whose workers run."""
        return [
            name for name, made in self.executors.items() if any(each.started and not each.stopped for each in made)
        ]


async def test_concurrent_first_requests_load_a_model_once_until_it_is_unloaded() -> None:
    async with House("a", "b") as house:
        assert await asyncio.gather(*[house.ask("a", item) for item in range(5)]) == [["a", item] for item in range(5)]
        assert house.reads == house.starts == ["a"]
        await house.until(a="loaded")
        with pytest.raises(ModelNotFound):
            await house.ask("c")
        await house.manager.unload_model("a")
        assert house.running() == []
        assert await house.ask("a", 2) == ["a", 2]
        assert house.reads == ["a", "a"]


async def test_a_model_leaves_for_another_and_comes_back() -> None:
    async with House("a", "b", "c") as house:
        for name in "ab":
            await house.ask(name)
        await house.until(a="loaded", b="loaded")
        for model in house.residency.core.models.values():
            model.load_seconds = 1.0
        assert await house.ask("c") == ["c", 0]
        await house.until(a="evicted", b="loaded", c="loaded")
        assert await house.manager.index() == [
            ModelState("a", "", "UNAVAILABLE", "evicted for 'c'"), ModelState("b", "", "READY", ""), ModelState("c", "", "READY", ""),
        ]  # fmt: skip
        assert house.running() == ["b", "c"]
        held = house.registry.get("a")
        assert held.ready
        assert await held.infer(7) == ["a", 7]  # a handle from before
        assert house.starts == ["a", "b", "c", "a"]
        assert len(house.running()) == 2


async def test_a_model_that_answers_is_called_loaded_while_it_is_measured() -> None:
    async with House("a") as house:
        house.measured.clear()
        assert await house.ask("a") == ["a", 0]
        view = (await house.find("a")).residency
        assert view is not None and (view["state"], view["ready_in_seconds"]) == ("loaded", None)
        assert await house.manager.index() == [ModelState("a", "", "READY", "")]
        assert house.states() == {"a": "loading"}
        house.measured.set()
        await house.until(a="loaded")


async def test_a_model_with_a_request_in_flight_finishes_it_before_it_leaves() -> None:
    async with House("a", "b", memory=1.0) as house:
        _, slow, other = await house.crowd_out()
        again = asyncio.ensure_future(house.ask("a", 3))  # it waits for the next load
        await turns(9)
        assert house.running() == house.starts == ["a"]
        await house.finish("a")
        assert await slow == ["a", 0]
        await house.finish("b")
        assert await other == ["b", 2]
        await house.finish("a", 1)
        assert await again == ["a", 3]
        assert house.executors["a"][0].stopped


async def test_a_request_of_a_model_that_is_leaving_can_be_cancelled() -> None:
    async with House("a", "b", memory=1.0) as house:
        service, call, other = await house.crowd_out()
        service.cancel(call)
        await turns()
        assert len(house.executors["a"][0].cancelled) == 1
        await house.finish("a")
        await house.finish("b")
        assert await other == ["b", 2]


async def test_a_model_that_does_not_load_is_refused_until_it_is_tried_again() -> None:
    clock = FakeClock()
    async with House("a", clock=clock) as house:
        house.fails.add("a")
        for _ in range(2):
            with pytest.raises(ModelNotReady, match="model 'a' is not ready: a: no weights") as refused:
                await house.ask("a")
        assert refused.value.retry_after is not None
        assert 0.0 < refused.value.retry_after < 0.1001
        assert house.starts == ["a"]
        assert house.states() == {"a": "failed"}
        house.fails.clear()
        clock.advance(refused.value.retry_after)
        assert await house.ask("a", 1) == ["a", 1]


async def test_a_model_that_cannot_be_read_is_refused_until_it_is_tried_again() -> None:
    clock = FakeClock()
    async with House("a", clock=clock) as house:
        for _ in range(2):  # once it was read, the failures before count no more
            house.shelf.asked.clear()
            house.shelf.models["a"][""] = "broken"
            for _ in range(3):
                with pytest.raises(ModelNotReady, match="cannot be read") as refused:
                    await house.ask("a")
            assert refused.value.retry_after == pytest.approx(0.1)
            assert len(house.shelf.asked) == 1
            house.shelf.models["a"][""] = "a"
            clock.advance(refused.value.retry_after or 0.0)
            assert await house.ask("a", 1) == ["a", 1]
            await house.manager.unload_model("a")


async def test_a_model_whose_folder_has_gone_before_it_was_read_is_unknown() -> None:
    async with House("a", "b") as house:
        del house.shelf.models["a"]
        with pytest.raises(ModelNotFound):
            await house.ask("a")
        assert list(house.registry.on_demand) == ["b"]
        with pytest.raises(ModelNotFound, match="unknown model 'a'"):
            await house.ask("a")


async def test_requests_that_cannot_wait_are_told_when_to_come_again() -> None:
    async with House("a", "b", memory=9.0) as house:
        house.gate.clear()
        first = asyncio.ensure_future(house.ask("a", 1))
        with pytest.raises(DeadlineExceeded):  # how long it takes is not known yet
            await house.ask("a", 2, timeout=0.05)
        house.gate.set()
        assert await first == ["a", 1]
        house.gate.clear()
        with pytest.raises(ModelNotReady, match="not loaded; a request that can wait for") as refused:
            await house.ask("b", 3, timeout=0.01)
        assert refused.value.retry_after is not None
        await turns(20)
        assert house.starts == ["a"]
        house.gate.set()
        assert await house.ask("b", 4) == ["b", 4]
        assert house.starts == ["a", "b"]


async def test_a_load_leaves_the_queue_with_its_last_caller() -> None:
    async with House("a", "b", "c", "d", memory=9.0) as house:
        house.residency.core._at_once = 1
        house.gate.clear()
        services = {name: await house.find(name) for name in "abcd"}
        calls = {name: service.infer(0) for name, service in services.items()}
        await house.until(a="loading", b="waiting", c="waiting", d="waiting")
        calls["b"].cancel()
        with pytest.raises(DeadlineExceeded):
            await services["c"].infer(0, timeout=0.01)
        calls["c"].cancel()
        await turns()
        assert house.states() == {"a": "loading", "b": "available", "c": "available", "d": "waiting"}
        house.gate.set()
        assert [await calls[name] for name in "ad"] == [["a", 0], ["d", 0]]
        assert house.starts == ["a", "d"]


async def test_a_model_that_takes_more_than_there_is_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with House("large", "declared", needs_memory=1) as house:
        house.takes["large"] = 3
        assert await house.ask("large") == ["large", 0]  # only then it is known what it takes
        await house.until(large="failed")
        assert caplog.text.count("it takes 3B") == 1
        with pytest.raises(ModelNotReady, match="it takes 3B, and model_memory=2B is for all models together"):
            await house.ask("large")
        house.settings["needs_memory"] = "4GB"
        with pytest.raises(ModelNotReady, match="it takes 4GB, and model_memory=2B"):
            await house.ask("declared")
        assert house.starts == ["large"]


@subcases("kind", ["memory", "gpu_memory"])
async def test_a_model_that_grows_evicts_others(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    limits: dict[str, Any] = {"memory": 9.0, kind: 4.0}
    async with House("a", "b", **limits) as house:
        house.takes = house.on_gpus = {"a": 2, "b": 1}
        for name in "ab":
            await house.ask(name)
        await house.until(a="loaded", b="loaded")
        house.takes["b"] = 3
        await house.residency.measure()
        await until(lambda: "evicted" in house.states().values())
        assert f"the models take 5B, of model_{kind}=4B; 'b' has grown from 1B to 3B; evicting '" in caplog.text
        assert len(house.running()) == 1
        view = house.registry.get("b").residency
        assert view is not None and view["gpu_memory_bytes"] in (0, 3)


async def test_gpus_that_cannot_be_measured_are_taken_as_stated(caplog: pytest.LogCaptureFixture) -> None:
    async with House("a", "b", gpu_memory=4.0, needs_gpu_memory=3) as house:
        for name in "ab":
            await house.ask(name)
        await house.until(a="evicted", b="loaded")
        assert caplog.text.count("GPU memory is not measured, only stated (needs_gpu_memory): no driver") == 1


async def test_metrics_count_what_comes_and_goes() -> None:
    async with House("a", "b", "c") as house:
        house.fails.add("c")
        for name in "ab":
            await house.ask(name)
        with pytest.raises(ModelNotReady):
            await house.ask("c")
        await until(lambda: sorted(house.states().values()) == ["evicted", "failed", "loaded"])
        found = {name: value for _, name, _, value in in_memory(house.residency.core)}
        assert found.pop("weir_models_load_seconds") > 0
        assert found == {
            "weir_models_loaded": 1, "weir_models_waiting": 0, "weir_models_memory_bytes": 1, "weir_models_gpu_memory_bytes": 0,
            "weir_models_loads": 2, "weir_models_failed_loads": 1, "weir_models_evictions": 1,
        }  # fmt: skip


async def test_pinned_models_stay_and_are_loaded_at_the_start() -> None:
    async with House("a", "b", "c", pinned=("a",)) as house:
        await house.manager.load_model("a")
        for name in "bcb":
            await house.ask(name)
        await until(lambda: house.states()["a"] == "loaded")
        assert house.starts == ["a", "b", "c", "b"]


async def test_the_start_leaves_to_requests_what_they_have_called_before_it() -> None:
    async with House("a", "b") as house:
        house.fails.add("a")
        with pytest.raises(ModelNotReady, match="no weights"):
            await house.ask("a")
        house.gate.clear()
        waiting = asyncio.create_task(house.ask("b"))
        await until(lambda: house.starts == ["a", "b"])
        await house.manager.start()
        house.gate.set()
        assert await waiting == ["b", 0]
        assert house.starts == ["a", "b"]


async def test_a_model_that_a_request_called_before_its_start_is_started_once() -> None:
    async with House("a") as house:
        service = await house.find("a")
        # As if it were one of the first.
        house.manager = Manager(house.registry, house.shelf, house.make, residency=house.residency)
        house.gate.clear()
        waiting = service.infer(0)
        await until(lambda: house.starts == ["a"])
        start = asyncio.create_task(house.manager.start())
        await turns()
        assert not start.done()
        house.gate.set()
        await start
        assert await waiting == ["a", 0]
        await service.start()
        assert house.starts == ["a"]


async def test_requests_that_come_while_their_model_is_unloaded_load_it_again() -> None:
    async with House("a") as house:
        service, call = await house.busy("a")
        unloaded = asyncio.ensure_future(house.manager.unload_model("a"))
        await until(lambda: service.draining)
        others = [asyncio.ensure_future(house.ask("a", number)) for number in (1, 2)]
        await turns()
        assert house.reads == ["a"]
        await house.finish("a")
        assert await call == ["a", 0]
        await unloaded
        await house.finish("a", 1)
        assert await asyncio.gather(*others) == [["a", 1], ["a", 2]]
        assert house.reads == ["a", "a"]


async def test_a_load_call_of_a_model_that_fails_raises_its_error() -> None:
    async with House("a") as house:
        house.fails.add("a")
        with pytest.raises(ModelError, match="no weights"):
            await house.manager.load_model("a")
        with pytest.raises(ModelNotReady):  # it can be read all the same, and is tried again
            await house.ask("a")


async def test_a_server_that_stops_while_a_model_loads_leaves_nothing_behind() -> None:
    async with House("a") as house:
        house.gate.clear()
        asked = asyncio.ensure_future(house.ask("a"))
        await until(lambda: bool(house.starts))
        await house.manager.stop(0.0)
        for each in (asked, house.ask("a")):
            with pytest.raises((Draining, ModelNotReady)):
                await each


async def test_an_unloaded_model_that_was_evicted_is_not_loaded_by_who_knows_it() -> None:
    """A body may have been on its way when the model was unloaded: its service is called after that."""
    async with House("a", "b", memory=1.0) as house:
        service = await house.find("a")
        await service.infer(0)
        await until(lambda: house.states()["a"] == "loaded")
        await house.ask("b")
        await house.until(a="evicted", b="loaded")
        await house.manager.unload_model("a")
        with pytest.raises(ModelNotReady, match="stopped"):
            await service.infer(0)
        assert house.starts == ["a", "b"]


async def test_a_model_that_is_unloaded_while_it_loads_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    async with House("a") as house:
        house.gate.clear()
        service = await house.find("a")
        call = service.infer(0)
        await until(lambda: house.starts == ["a"])
        call.cancel()
        await house.manager.unload_model("a")
        with pytest.raises(ModelNotReady, match="stopped"):
            await service.infer(0)
    assert caplog.text == ""


@subcases("is_busy", [False, True])
async def test_the_memory_of_a_model_is_free_when_its_workers_have_ended(is_busy: bool) -> None:
    """Also where it is unloaded while it is evicted, and has no time left for what it was to finish."""
    async with House("a", "b", memory=1.0, drain_timeout=0.0) as house:
        call = (await house.busy("a"))[1] if is_busy else house.ask("a")
        if not is_busy:
            await call
        await until(lambda: house.states()["a"] == "loaded")
        house.exit.clear()
        other = asyncio.ensure_future(house.ask("b"))
        await until(lambda: house.states()["a"] == "leaving")
        unloaded = asyncio.ensure_future(house.manager.unload_model("a"))
        if is_busy:
            with pytest.raises(Draining):
                await call
        await turns(20)
        assert (unloaded.done(), house.starts) == (False, ["a"])
        house.exit.set()
        await unloaded
        if is_busy:
            await house.finish("b")
        assert await other == ["b", 0]


async def test_a_stop_takes_its_drain_timeout_once_though_models_leave() -> None:
    clock = FakeClock()
    async with House("a", "b", memory=1.0, clock=clock, drain_timeout=10.0) as house:
        service, running, other = await house.crowd_out()
        waiting = service.infer(1)  # for the next load
        stopped = asyncio.ensure_future(house.manager.stop())
        await turns(20)
        assert not stopped.done()
        clock.advance(10.0)
        await turns(40)
        assert stopped.done()
        for each in (running, waiting, other):
            with pytest.raises(Draining):
                await each


@subcases("evicted_first", [True, False])
async def test_a_model_that_is_unloaded_and_evicted_is_not_loaded_again(evicted_first: bool) -> None:
    async with House("a", "b", memory=1.0) as house:
        service, call = await house.busy("a")
        other = await house.find("b")
        calls = [other.infer(0)] if evicted_first else []
        await turns(20)
        unloaded = asyncio.ensure_future(house.manager.unload_model("a"))
        await until(lambda: service.draining)
        calls = calls or [other.infer(0)]
        await turns(20)
        with pytest.raises(Draining, match="is shutting down"):
            await service.infer(1)
        await house.finish("a")
        assert await call == ["a", 0]
        await unloaded
        await house.finish("b")
        assert await calls[0] == ["b", 0]
        assert house.starts == ["a", "b"]


async def test_a_model_that_is_stopped_before_its_load_begins_is_not_loaded() -> None:
    async with House("a") as house:
        service = await house.find("a")
        stopped = asyncio.ensure_future(service.generation.stop())
        service.infer(0).cancel()  # has it loaded, after the stop
        await stopped
        await turns(20)
        assert house.starts == []


async def test_who_waits_for_the_load_of_a_model_that_is_stopped_is_told() -> None:
    async with House("a", "b", memory=1.0, needs_memory=1) as house:
        house.gate.clear()
        services = [await house.find(name) for name in "ab"]
        starts = [asyncio.ensure_future(service.start()) for service in services]
        await house.until(a="loading", b="waiting")
        await services[1].stop()
        await turns()
        assert starts[1].done()  # before "a" is loaded
        with pytest.raises(ModelNotReady, match="stopped"):
            await starts[1]
        house.gate.set()
        await starts[0]


async def test_a_read_that_fails_is_noted_although_its_caller_has_left(caplog: pytest.LogCaptureFixture) -> None:
    async with House("a", "b", clock=FakeClock()) as house:
        house.shelf.models["a"][""] = "broken"
        load = await house.begin_load("b")
        asked = asyncio.ensure_future(house.ask("a"))
        await turns(20)
        loop, read = asyncio.get_running_loop(), house.shelf.read

        def leave_and_read(*what: Any) -> ModelReading:
            loop.call_soon_threadsafe(asked.cancel)
            return read(*what)

        house.shelf.read = leave_and_read  # type: ignore[method-assign, assignment]  # for this read alone
        house.gate.set()
        await load
        await until(lambda: bool(house.registry.on_demand["a"]))
        with pytest.raises(ModelNotReady, match="cannot be read"):
            await house.ask("a")
        assert len(house.shelf.asked) == 2  # one of each: the next try comes later
    assert caplog.text.count("is not tried again") == 1


async def test_a_first_read_that_all_callers_have_left_is_dropped() -> None:
    async with House("a", "b", "c") as house:
        load = await house.begin_load("a")
        left = [asyncio.ensure_future(house.find(name)) for name in "bbc"]
        stays = asyncio.ensure_future(house.find("c"))
        await turns(20)
        for each in left:
            each.cancel()
        house.gate.set()
        await load
        assert (await stays).name == "c"
        assert house.reads == ["a", "c"]
        assert (await house.find("b")).name == "b"
        assert house.reads == ["a", "c", "b"]


async def test_a_first_request_does_not_wait_for_ever_behind_other_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with House("a", "b") as house:
        load = await house.begin_load("a")
        monkeypatch.setattr(manager, "READ_WITHIN", 0.0)
        with pytest.raises(ModelNotReady, match="when other models have been loaded") as refused:
            await house.ask("b")
        assert refused.value.retry_after == 1.0
        house.gate.set()
        await load
        await until(lambda: "b" in house.registry.services)  # it was read all the same


@subcases(
    ("text", "shown"),
    [
        ("File '/srv/models/one/1/model.py', line 3", "File 'model.py', line 3"),
        ('see "/usr/lib/x.so": cannot', 'see "x.so": cannot'),
        ("http://host/a/b and one/1: 1/model.onnx", "http://host/a/b and one/1: 1/model.onnx"),
        ("from /tmp/a/b.onnx failed", "from b.onnx failed"),
    ],
)
def test_paths_are_cut_down_to_names(text: str, shown: str) -> None:
    assert without_paths(text) == shown
    assert not_ready("one", text).message == f"model 'one' is not ready: {shown}"
