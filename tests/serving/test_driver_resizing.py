"""Workers that join and leave while a service runs."""

import asyncio
from typing import Any

import pytest
from tests.serving.kit import Rig, Square, Watch, request, serving, squares, turns

from weir import Conflict, Model, ModelError, ModelNotReady, Service
from weir.testing import FakeExecutor, FakeRequest


async def running(rig: Rig, item: int) -> FakeRequest:
    """Return a request that is a batch of its own."""
    made = request(rig.service, item)
    await turns()
    return made


async def test_a_worker_that_joins_gets_batches() -> None:
    async with serving(None) as rig:
        request(rig.service, 1)
        await turns()
        request(rig.service, 2)
        await turns()
        assert len(rig.executor.pending) == 1
        await rig.service.add_worker()
        assert [worker for worker, _ in rig.executor.pending] == [0, 1]
        assert rig.service.workers.workers == len(rig.service.state()["workers"]) == 2
        assert rig.heard.worker_changes[-1] == (1, "ready", "")


async def test_a_worker_that_leaves_finishes_what_it_has() -> None:
    async with serving(None) as rig:
        await rig.service.add_worker()
        requests = [await running(rig, item) for item in (1, 2)]
        leaving = asyncio.ensure_future(rig.service.remove_worker())
        last = request(rig.service, 3)
        await turns()
        assert [worker for worker, _ in rig.executor.pending] == [0, 1] and not leaving.done()
        rig.executor.pending.reverse()
        rig.executor.answer_next(squares)
        await leaving
        assert rig.heard.worker_changes[-1] == (1, "stopped", "")
        assert (rig.service.workers.workers, len(rig.executor.states())) == (1, 1)
        rig.executor.answer_next(squares)
        rig.executor.answer_next(squares)
        assert [each.output for each in (*requests, last)] == [1, 4, 9]


async def test_what_a_leaving_worker_does_not_finish_runs_again_elsewhere() -> None:
    async with serving(None, drain_timeout=5.0) as rig:
        await rig.service.add_worker()
        requests = [await running(rig, item) for item in (1, 2)]
        leaving = asyncio.ensure_future(rig.service.remove_worker())
        await turns()
        rig.executor.answer_next(squares)
        rig.clock.advance(5.0)
        await leaving
        assert [worker for worker, _ in rig.executor.pending] == [1, 0]
        rig.executor.pending.pop(0)
        rig.executor.answer_next(squares)
        assert [each.output for each in requests] == [1, 4]


async def test_a_leaving_worker_that_dies_does_not_come_back() -> None:
    async with serving(None) as rig:
        await rig.service.add_worker()
        requests = [await running(rig, item) for item in (1, 2)]
        leaving = asyncio.ensure_future(rig.service.remove_worker())
        await turns()
        rig.executor.lose(1)
        rig.executor.revive(1)
        await leaving
        assert [worker for worker, _ in rig.executor.pending] == [0]
        while rig.executor.pending:
            rig.executor.answer_next(squares)
        assert [each.output for each in requests] == [1, 4]


async def test_what_cannot_be_is_refused() -> None:
    async with serving() as rig:
        with pytest.raises(Conflict, match="has one worker left"):
            await rig.service.remove_worker()
    for change in (rig.service.add_worker, rig.service.remove_worker):
        with pytest.raises(ModelNotReady, match="'square' is not ready: stopped"):
            await change()
    inline = Service(Square, executor="inline")
    async with inline:
        with pytest.raises(Conflict, match="InlineExecutor has a fixed number of workers: none can be added"):
            await inline.add_worker()
        with pytest.raises(Conflict, match="none can be removed"):
            await inline.executor.remove_worker()


class Counted(Model):
    """Its third instance does not load."""

    def load(self) -> None:
        if self.worker_index == 2:
            raise ValueError("no room for a third")

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self.worker_index for _ in batch]


@pytest.mark.parametrize("executor", ["process", "thread"])
async def test_real_workers_join_and_leave(executor: str) -> None:
    watch = Watch()
    async with Service(Counted, executor=executor, observers=[watch], max_batch_size=1) as service:
        await service.add_worker()
        assert await service.infer_many([0] * 20, timeout=30) != []
        with pytest.raises(ModelError, match="no room for a third"):
            await service.add_worker()
        assert [state.state for state in service.executor.states()] == ["ready", "ready"]
        assert set(await service.infer_many([0] * 20)) <= {0, 1}
        await service.remove_worker()
        assert [state.state for state in service.executor.states()] == ["ready"]
        assert set(await service.infer_many([0] * 20)) == {0}
        await service.add_worker()
        assert len(service.executor.states()) == 2
    assert {change[:2] for change in watch.worker_changes} == {(0, "ready"), (1, "ready"), (1, "stopped")}


async def test_hooks_follow_the_workers() -> None:
    class Hooked(Service):
        async def before_batch(self, batch: list[Any]) -> list[Any]:
            return [item + 1 for item in batch]

    executor = FakeExecutor(squares)
    async with Hooked(Square, executor=executor, max_batch_size=1) as service:
        await service.add_worker()
        assert await service.infer_many([1, 2, 3]) == [4, 9, 16]
        await service.remove_worker()
        assert await service.infer_many([1, 2, 3]) == [4, 9, 16]
        assert len(executor.states()) == 1
