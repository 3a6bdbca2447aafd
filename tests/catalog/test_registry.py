import asyncio
from typing import Any

import pytest
from tests.rings import subcases
from tests.serving.kit import Square, squares
from tests.waiting import turns

import weir
from weir import ModelError, ModelNotFound, ModelNotReady, Registry, Service, SettingsError
from weir.catalog.registry import running, version_order
from weir.testing import FakeExecutor
from weir.workers.executor import Listener


def named(name: str, executor: FakeExecutor | None = None, version: str = "") -> Service:
    return Service(Square, name=name, version=version, executor=executor or FakeExecutor(squares))


def test_services_are_found_by_name() -> None:
    one, two = named("one"), named("two")
    registry = Registry([one, two])
    assert registry.get("two") is two
    assert registry.services == {"one": one, "two": two}
    assert registry.sole is None
    assert Registry([one]).sole is one
    registry.on_demand = {"two": "", "four": ""}
    with pytest.raises(ModelNotFound, match=r"unknown model 'three'; available: one, two, four$"):
        registry.get("three")
    with pytest.raises(SettingsError, match="name='one': two models have this name"):
        Registry([named("one"), named("one")])


def test_a_model_on_demand_whose_versions_leave_is_as_if_not_read() -> None:
    async def read(name: str) -> None:
        raise AssertionError(f"{name} is not read here")

    one, two = named("one", version="1"), named("one", version="2")
    registry = Registry([one, two, named("other")], {"one": "/classify"})
    registry.on_demand, registry.read = {"one": ""}, read
    registry.leave("one", {"2"})
    assert (registry.get("one"), registry.get("one", "2")) == (one, two)
    registry.leave("one", {"1", "2"})
    assert "one" not in registry.services and not registry.routes
    assert registry.all[:2] == [one, two]
    for version in ("", "1", "2", "3"):
        with pytest.raises(ModelNotReady) as raised:
            registry.get("one", version)
        assert raised.value.read is not None
    registry.put([one, two])
    assert (registry.get("one"), registry.get("one", "1")) == (two, one)


def test_the_highest_of_several_versions_is_the_default() -> None:
    services = {version: named("one", version=version) for version in ("2", "10", "9")}
    registry = Registry([*services.values(), named("two")], {"one": "/first"})
    assert registry.get("one") is registry.services["one"] is registry.routes["/first"] is services["10"]
    assert registry.get("one", "9") is services["9"]
    assert list(registry.versions("one")) == ["2", "9", "10"]
    assert [service.label for service in registry.all] == ["one/2", "one/10", "one/9", "two"]
    assert set(registry.not_ready_reasons) == {"one/2", "one/9", "one/10", "two"}
    for name, version, rule in (
        ("one", "3", "unknown version '3' of model 'one'; available: 2, 10, 9"),
        ("two", "1", "unknown version '1' of model 'two'; available: none"),
    ):
        with pytest.raises(ModelNotFound, match=rule):
            registry.get(name, version)
    with pytest.raises(ModelNotFound, match="unknown model"):
        registry.versions("three")


@subcases("ascending", [["1", "2", "10"], ["", "1"], ["1.2", "1.10"], ["beta", "beta2", "1"], ["1-rc", "2-rc"]])
def test_versions_are_ordered_as_people_count(ascending: list[str]) -> None:
    descending = ascending[::-1]
    assert sorted(descending, key=version_order) == ascending


def test_a_change_is_announced_and_leaves_earlier_reads_as_they_are() -> None:
    one, other, two = named("one", version="1"), named("one", version="2"), named("two")
    registry = Registry([one, two], {"one": "/first"})
    before, told = registry.services, list[list[str]]()
    registry.changed.append(lambda: told.append(list(registry.services)))
    registry.put([one, other], default="1")
    assert registry.get("one") is registry.routes["/first"] is one
    registry.put([one, other])
    assert registry.get("one") is registry.routes["/first"] is other
    registry.remove("one")
    assert (registry.services, registry.routes) == ({"two": two}, {})
    assert before == {"one": one, "two": two}
    assert told == [["one", "two"], ["one", "two"], ["two"]]
    registry.put([one])
    assert registry.routes == {"/first": one}


def test_a_version_that_cannot_stand_in_a_path_is_refused() -> None:
    with pytest.raises(SettingsError, match="version='1/2': must be of letters"):
        named("one", version="1/2")


@subcases(
    ("routes", "rule"),
    [
        *(({"one": path}, "route=") for path in ("", "/", "classify", "/a/", "//a", "/a b", "/a?b", "/{a}", "/a%20", "/../a", "/a/..")),
        ({"one": "/a", "two": "/a/batch"}, "route='/a/batch': is where the route '/a' takes lists"),
        ({"one": "/a", "two": "/a"}, "both 'one' and 'two' claim it"),
        ({"three": "/a"}, "unknown model 'three'; available: one, two"),
    ],
)  # fmt: skip
def test_routes_that_cannot_be_are_refused(routes: dict[str, str], rule: str) -> None:
    with pytest.raises(SettingsError, match=rule):
        Registry([named("one"), named("two")], routes)


class Gated(FakeExecutor):
    """Starts only after all of its group have been asked to."""

    def __init__(self, barrier: asyncio.Barrier) -> None:
        super().__init__(squares)
        self._barrier = barrier

    async def start(self, listener: Listener) -> None:
        await self._barrier.wait()
        await super().start(listener)


async def test_all_models_start_at_the_same_time() -> None:
    barrier = asyncio.Barrier(3)
    registry = Registry([named(name, Gated(barrier)) for name in "abc"])
    assert registry.not_ready_reasons == dict.fromkeys("abc", "not started")
    async with asyncio.timeout(60), running(registry) as started:
        assert started is registry
        assert registry.ready
        assert await registry.get("b").infer(3) == 9
        assert set(registry.state()) == {"a", "b", "c"}
    assert registry.not_ready_reasons == dict.fromkeys("abc", "stopped")
    with pytest.raises(ZeroDivisionError):
        async with running(registry):
            raise ZeroDivisionError
    assert registry.not_ready_reasons == dict.fromkeys("abc", "stopped")


async def test_when_one_fails_to_start_the_others_are_stopped() -> None:
    well, stuck = FakeExecutor(squares), Gated(asyncio.Barrier(2))
    broken = FakeExecutor(start_error=ModelError("no weights"))
    registry = Registry([named("well", well), named("stuck", stuck), named("broken", broken)])
    with pytest.raises(ModelError, match="no weights"):
        await registry.start()
    assert well.stopped
    assert stuck.stopped
    assert not registry.ready
    assert len(asyncio.all_tasks()) == 1


class Deviceless(weir.Model):
    def load(self) -> None:
        raise SettingsError("device='cuda:3': torch sees 0 GPUs here")

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Untried(weir.Model):
    examples = (1,)

    def predict(self, batch: list[Any]) -> list[Any]:
        raise ValueError("no weights")


class Weightless(Untried):
    def load(self) -> None:
        raise FileNotFoundError("weights.bin")


@pytest.mark.parametrize("executor", ["process", "thread"])
@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Deviceless, "faulty: device='cuda:3': torch sees 0 GPUs here"),
        (Untried, "warm-up of 'faulty', example 0 in a batch of 1: predict raised ValueError: no weights"),
        (Weightless, "worker 0 of 'faulty'"),
    ],
)
def test_the_error_of_one_of_several_models_names_it_once(model: type[weir.Model], what: str, executor: str) -> None:
    faulty = Service(model, name="faulty", executor=executor)
    with pytest.raises((ModelError, SettingsError)) as caught:
        asyncio.run(Registry([named("one"), faulty]).start())
    assert what in str(caught.value) and str(caught.value).count("faulty") == 1


async def test_all_models_drain_at_the_same_time() -> None:
    executors = [FakeExecutor(), FakeExecutor()]
    registry = Registry([named(str(index), executor) for index, executor in enumerate(executors)])
    await registry.start()
    calls: list[Any] = [service.infer(3) for service in registry.services.values()]
    await turns()
    draining = asyncio.ensure_future(registry.drain(100.0))
    await turns()
    assert registry.not_ready_reasons == {"0": "draining", "1": "draining"}
    for executor in executors:
        assert not draining.done()
        executor.respond_next(squares)
    await draining
    assert not executors[0].stopped
    assert await asyncio.gather(*calls) == [9, 9]
    await registry.stop()
    assert executors[0].stopped


def test_a_server_keeps_paths_for_itself() -> None:
    registry = Registry([named("one")], {"one": "/v2x"})
    registry.reserve(["v1"])
    with pytest.raises(SettingsError, match="/v1 is reserved"):
        registry.claim("one", "/v1/mine")
    with pytest.raises(SettingsError, match="route='/v2x': /v2x is reserved"):
        registry.reserve(["v2x"])
