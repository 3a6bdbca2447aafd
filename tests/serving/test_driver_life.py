"""driver.py: how it stops, and what observers hear of it."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from tests.serving.kit import Square, serving, squares, turns

from weir import Draining, Service
from weir.testing import FakeExecutor, RecordingObserver


async def test_draining_refuses_new_work_and_finishes_what_was_accepted() -> None:
    async with serving(None, max_batch_size=2, max_queue_size=2) as rig:
        accepted = [rig.service.infer(item) for item in range(7)]
        await turns()
        stopping = asyncio.ensure_future(rig.service.stop(10.0))
        await turns()
        assert rig.service.draining
        assert rig.service.not_ready_reason == "draining"
        with pytest.raises(Draining):
            await rig.service.infer("new")
        while rig.executor.pending:
            assert not stopping.done()
            rig.executor.answer_next(squares)
            await turns()
        await stopping
        assert await asyncio.gather(*accepted) == squares(list(range(7)))
        assert rig.executor.stopped


async def test_draining_ends_a_wait_of_the_policy() -> None:
    async with serving(policy="full") as rig:
        call = rig.service.infer(3)
        await turns()
        assert rig.executor.sizes == []
        await rig.service.stop(10.0)
        assert await call == 9


async def test_what_is_unfinished_when_draining_ends_fails() -> None:
    async with serving(None, max_queue_size=1) as rig:
        calls = [rig.service.infer("running")]
        await turns()
        calls += [rig.service.infer("in line"), rig.service.infer("outside")]
        stopping = asyncio.ensure_future(rig.service.stop(5.0))
        await turns()
        rig.clock.advance(4.9)
        await turns()
        assert not stopping.done()
        rig.clock.advance(0.2)
        await stopping
        for call in calls:
            with pytest.raises(Draining, match="stopped before the response was ready"):
                await call


async def test_a_second_stop_in_a_hurry_ends_the_first() -> None:
    async with serving(None) as rig:
        call = rig.service.infer("running")
        await turns()
        patient = asyncio.ensure_future(rig.service.stop(100.0))
        await turns()
        await rig.service.stop(0.0)
        await patient
        with pytest.raises(Draining):
            await call


async def test_a_cancelled_stop_still_ends_the_workers() -> None:
    async with serving(None) as rig:
        rig.service.infer("running")
        await turns()
        stopping = asyncio.ensure_future(rig.service.stop(100.0))
        await turns()
        stopping.cancel()
        await asyncio.wait([stopping])
        assert rig.executor.stopped


async def test_an_observer_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RecordingObserver):
        def answered(self, model: str, requests: Sequence[Any], error: Any, now: float) -> None:
            raise KeyError("a bug of the observer")

    with caplog.at_level(logging.ERROR, "weir"):
        sound = RecordingObserver()
        async with Service(Square, executor=FakeExecutor(squares), observers=[Broken(), sound]) as service:
            assert await asyncio.gather(*map(service.infer, range(3))) == [0, 1, 4]
        assert sound.ends == 3
    assert "observer 'Broken' raised at 'answered'" in caplog.text


async def test_stopping_while_loading_does_not_end_ready() -> None:
    class Slow(FakeExecutor):
        async def start(self, listener: Any) -> None:
            await turns()
            await super().start(listener)

    service = Service(Square, executor=Slow(squares))
    starting = asyncio.ensure_future(service.start())
    await asyncio.sleep(0)
    assert service.not_ready_reason == "loading"
    await service.stop()
    await starting
    assert service.not_ready_reason == "stopped"


async def test_a_start_that_is_cancelled_has_stopped_the_service() -> None:
    class Slow(FakeExecutor):
        async def start(self, listener: Any) -> None:
            await asyncio.Event().wait()

    service = Service(Square, executor=Slow(squares))
    starting = asyncio.ensure_future(service.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert service.not_ready_reason == "stopped"
