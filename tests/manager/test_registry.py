import asyncio
from typing import Any

import pytest
from tests.manager.kit import Square, squares, turns

from weir import ModelError, ModelNotFound, Registry, Service, SettingsError
from weir.manager.lifespan import running
from weir.manager.registry import RESERVED
from weir.testing import FakeExecutor
from weir.workers.executor import Listener


def named(name: str, executor: FakeExecutor | None = None) -> Service:
    return Service(Square, name=name, executor=executor or FakeExecutor(squares))


def test_services_are_found_by_name() -> None:
    one, two = named("one"), named("two")
    registry = Registry([one, two])
    assert registry.get("two") is two
    assert registry.services == {"one": one, "two": two}
    assert registry.sole is None
    assert Registry([one]).sole is one
    with pytest.raises(ModelNotFound, match="model 'three': there is none of this name; there are one, two"):
        registry.get("three")


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(SettingsError, match="name='one': two models have this name"):
        Registry([named("one"), named("one")])


def test_routes_lead_to_models() -> None:
    one, two = named("one"), named("two")
    registry = Registry([one, two], {"one": "/classify", "two": ["/embed", "/api/embed"]})
    assert registry.routes == {"/classify": one, "/embed": two, "/api/embed": two}


@pytest.mark.parametrize("segment", RESERVED)
def test_reserved_paths_are_refused(segment: str) -> None:
    for path in (f"/{segment}", f"/{segment}/mine"):
        with pytest.raises(SettingsError, match=f"/{segment} is reserved"):
            Registry([named("one")], {"one": path})


@pytest.mark.parametrize("path", ["", "/", "classify", "/a/", "//a", "/a b", "/a?b", "/{a}", "/a%20", "/../a", "/a/.."])
def test_odd_paths_are_refused(path: str) -> None:
    with pytest.raises(SettingsError, match="route="):
        Registry([named("one")], {"one": path})


def test_paths_of_lists_are_refused() -> None:
    with pytest.raises(SettingsError, match="route='/a/batch': is where the route '/a' takes lists"):
        Registry([named("one"), named("two")], {"one": "/a", "two": "/a/batch"})


def test_a_route_leads_to_one_model_that_is_there() -> None:
    with pytest.raises(SettingsError, match="both 'one' and 'two' claim it"):
        Registry([named("one"), named("two")], {"one": "/a", "two": "/a"})
    with pytest.raises(SettingsError, match="there is no model 'three'; there are one"):
        Registry([named("one")], {"three": "/a"})


class Gated(FakeExecutor):
    """Starts only after all of its group have been asked to."""

    def __init__(self, barrier: asyncio.Barrier) -> None:
        super().__init__(squares)
        self._barrier = barrier

    async def start(self, listener: Listener) -> None:
        await self._barrier.wait()
        await super().start(listener)


def test_all_models_start_at_the_same_time() -> None:
    async def main() -> None:
        barrier = asyncio.Barrier(3)
        registry = Registry([named(name, Gated(barrier)) for name in "abc"])
        assert registry.not_ready_reasons == dict.fromkeys("abc", "not started")
        async with asyncio.timeout(10), running(registry) as started:
            assert started is registry
            assert registry.ready
            assert await registry.get("b").infer(3) == 9
            assert set(registry.state()) == {"a", "b", "c"}
        assert registry.not_ready_reasons == dict.fromkeys("abc", "stopped")

    asyncio.run(main())


class Stuck(FakeExecutor):
    """Never becomes ready."""

    async def start(self, listener: Listener) -> None:
        await asyncio.Event().wait()


def test_when_one_fails_to_start_the_others_are_stopped() -> None:
    async def main() -> None:
        well, stuck = FakeExecutor(squares), Stuck()
        broken = FakeExecutor(start_error=ModelError("no weights"))
        registry = Registry([named("well", well), named("stuck", stuck), named("broken", broken)])
        with pytest.raises(ModelError, match="no weights"):
            await registry.start()
        assert well.stopped
        assert stuck.stopped
        assert not registry.ready
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_all_models_drain_at_the_same_time() -> None:
    async def main() -> None:
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
            executor.answer_next(squares)
        await draining
        assert not executors[0].stopped
        assert await asyncio.gather(*calls) == [9, 9]
        await registry.stop()
        assert executors[0].stopped

    asyncio.run(main())


def test_a_lifespan_stops_its_models_also_after_an_error() -> None:
    async def main() -> None:
        executor = FakeExecutor(squares)
        with pytest.raises(ZeroDivisionError):
            async with running(Registry([named("one", executor)])):
                raise ZeroDivisionError
        assert executor.stopped

    asyncio.run(main())
