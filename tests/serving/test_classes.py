"""Interactive and bulk work in one service: bulk calls wait in a queue of their own, outside of it too, and are counted apart."""

import asyncio
import os
from typing import Any

import psutil
import pytest
from tests.serving.kit import Square, serving
from tests.waiting import turns, until

import weir
from weir.errors import InvalidRequest, Overloaded
from weir.protocols.entries import class_offset, schedule_of


async def test_bulk_calls_wait_for_interactive_ones() -> None:
    async with serving(None, max_batch_size=4) as rig:
        first = asyncio.ensure_future(rig.service.infer(1))
        await turns()
        bulk = [asyncio.ensure_future(rig.service.infer(item, priority=weir.BULK)) for item in (2, 3)]
        await turns()
        interactive = asyncio.ensure_future(rig.service.infer(4))
        await turns()
        state = rig.service.state()
        assert (state["waiting"], state["waiting_bulk"], state["bulk_limit"], state["bulk_delay"]) == (3, 2, 0.0, 0.005)
        rig.executor.respond_next(lambda batch: batch)
        await turns()
        assert first.done()
        rig.executor.respond_next(lambda batch: batch)
        await turns()
        assert (interactive.done(), bulk[0].done()) == (True, False)
        await rig.answer_all()
        assert [task.result() for task in bulk] == [4, 9]
        counts = rig.service.state()["batches"]
        assert (counts["bulk"], counts["idle"]) == (2, 2)


async def test_bulk_calls_that_wait_for_room_hold_up_no_others() -> None:
    async with serving(None, max_queue_size=2) as rig:
        tasks: list[asyncio.Future[Any]] = []

        def call(item: int, priority: int = 0) -> asyncio.Future[Any]:
            task = asyncio.ensure_future(rig.service.infer(item, priority=priority, backpressure=True, timeout=5.0))
            tasks.append(task)
            return task

        for item in range(5):
            call(item, weir.BULK)
        await turns()
        assert rig.service.state()["waiting_outside"] == 2
        call(7)
        await turns()
        state = rig.service.state()
        assert (state["waiting_outside"], state["waiting"], state["waiting_bulk"]) == (2, 3, 2)
        with pytest.raises(Overloaded, match=r"bulk rows=1|is full"):
            await rig.service.infer(8, priority=weir.BULK, backpressure=False)
        tasks[4].cancel()
        await turns()
        assert rig.service.state()["waiting_outside"] == 1
        await rig.answer_all()
        assert [task.result() for task in tasks[:4]] == [0, 1, 4, 9]
        assert tasks[5].result() == 49


async def test_deadlines_of_bulk_calls_hold_outside_too() -> None:
    async with serving(None, max_queue_size=1) as rig:
        tasks = [
            asyncio.ensure_future(rig.service.infer(item, priority=weir.BULK, backpressure=True, timeout=timeout))
            for item, timeout in ((1, 9.0), (2, 9.0), (3, 1.0))
        ]
        await turns()
        rig.clock.advance(1.0)
        await turns()
        assert isinstance(tasks[2].exception(), weir.DeadlineExceeded)
        await rig.answer_all()
        assert tasks[1].result() == 4


def test_a_class_of_work_has_two_values() -> None:
    assert class_offset("interactive", "X") == 0
    assert class_offset("bulk", "X") == weir.BULK
    with pytest.raises(InvalidRequest, match=r"^X 'bulky': must be interactive or bulk$"):
        class_offset("bulky", "X")
    assert schedule_of({"class": "bulk"}).priority == weir.BULK
    assert 0 > schedule_of({"class": "bulk", "priority": 1}).priority > weir.BULK
    assert schedule_of({"class": "interactive", "priority": 1}).priority > 0


async def test_a_job_in_bulk_workers_survives_their_death() -> None:
    service = weir.Service(Square, bulk_workers=2, max_batch_size=4)
    await service.start()
    try:
        assert [worker["index"] for worker in service.state()["workers"]] == [0]
        assert await service.infer(2, priority=weir.BULK) == 4
        await until(lambda: not service.state()["bulk_delay"])  # a bulk worker has come
        job = asyncio.ensure_future(service.infer_many(list(range(100)), priority=weir.BULK, timeout=60.0))
        assert await service.infer(3) == 9
        workers = service.state()["workers"]
        assert [worker["index"] for worker in workers if not worker["bulk"]] == [0]
        killed = next(worker["pid"] for worker in workers if worker["bulk"] and worker["state"] == "ready")
        os.kill(killed, 9)
        while not job.done():
            assert await service.infer(4) == 16
        assert job.result() == [item * item for item in range(100)]
        assert service.ready_workers == 1
        pids = [worker["pid"] for worker in service.state()["workers"]]
    finally:
        await service.stop(5.0)
    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)


def test_only_processes_can_be_bulk_workers() -> None:
    with pytest.raises(weir.SettingsError, match=r"^bulk_workers=1, executor='thread': only processes have"):
        weir.Service(Square, executor="thread", bulk_workers=1)
