import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.rings import subcases
from tests.serving.kit import Square, serving, turns

from weir import ModelError, ModelNotReady, Service
from weir.errors import Cancelled
from weir.messages import Events
from weir.testing import FakeExecutor


async def by_group(service: Service) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(service.infer(3))
    return task.result()


async def by_timeout(service: Service) -> Any:
    async with asyncio.timeout(60):
        return await service.infer(3)


async def by_wait(service: Service) -> Any:
    done, _ = await asyncio.wait([asyncio.create_task(service.infer(3))])
    return done.pop().result()


WAYS: dict[str, Callable[[Service], Awaitable[Any]]] = {
    "await": lambda service: service.infer(3),
    "gather": lambda service: asyncio.gather(service.infer(3)),
    "task": lambda service: asyncio.create_task(service.infer(3)),
    "wait_for": lambda service: asyncio.wait_for(service.infer(3), 60),
    "shield": lambda service: asyncio.shield(service.infer(3)),
    "as_completed": lambda service: next(iter(asyncio.as_completed([service.infer(3)]))),
    "group": by_group,
    "timeout": by_timeout,
    "wait": by_wait,
}


@subcases("way", [way for way in WAYS if way not in ("shield", "as_completed", "wait")])
async def test_cancelling_whoever_waits_takes_the_request_out_of_the_line(way: str) -> None:
    async with serving(None) as rig:

        async def wait() -> None:
            await WAYS[way](rig.service)

        blocker = rig.service.infer("busy")
        await turns()
        waiting = asyncio.create_task(wait())
        await turns()
        assert rig.service.state()["waiting"] > 0
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert rig.service.state()["waiting"] == 0
        blocker.cancel()


async def test_a_timeout_of_asyncio_cancels_the_request() -> None:
    async with serving(None) as rig:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rig.service.infer("slow"), 0.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await rig.service.infer("waits")
        assert rig.executor.payloads == [["slow"]]
        assert rig.executor.cancelled == [(0, 1, [0])]
        assert [type(error) for _, error, _ in rig.heard.answers] == [Cancelled, Cancelled]
        other = rig.service.infer(3)
        assert (other.cancel(), other.cancel()) == (True, False)


@pytest.mark.parametrize("member", [0, 1, 2])
async def test_cancelling_a_member_of_a_running_batch_harms_no_neighbour(member: int) -> None:
    async with serving(None) as rig:
        calls = [rig.service.infer(item) for item in range(3)]
        await turns()
        calls[member].cancel()
        assert rig.executor.cancelled == [(0, 1, [member])]
        rig.executor.answer_next(lambda batch: [x * 10 for x in batch])
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers.pop(member), asyncio.CancelledError)
        assert answers == [item * 10 for item in range(3) if item != member]


async def test_an_answer_to_a_future_that_somebody_resolved_is_dropped() -> None:
    async with serving(None) as rig:
        odd, other = rig.service.infer(1), rig.service.infer(2)
        await turns()
        odd.set_result("mine")
        rig.executor.answer_next(lambda batch: batch)
        assert await other == 2
        assert await odd == "mine"


async def test_a_call_left_alone_complains_only_of_the_model() -> None:
    heard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context["message"]))
    async with serving(None, max_queue_size=1) as rig:
        rig.service.infer("late", timeout=1.0)
        await turns()
        rig.service.infer("waits", timeout=1.0)
        rig.service.infer("refused", backpressure=False)
        rig.clock.advance(2.0)
        rig.executor.reply(0, Events(1, ["answer"]))
        rig.service.infer("left").cancel()
        await turns()
        gc.collect()
        assert heard == []
        rig.service.infer("bug")
        await turns()
        rig.executor.answer_next(lambda batch: [ModelError("bug")])
        await turns()
    del rig  # its observer remembers all requests
    gc.collect()
    assert heard == ["Call exception was never retrieved"]


async def test_calls_outside_of_the_loop_or_before_the_start_say_so() -> None:
    service = Service(Square, executor=FakeExecutor())

    def outside() -> None:
        for call in (lambda: service.infer(3), lambda: service.start().send(None)):
            with pytest.raises(RuntimeError, match=r"'square': no event loop of asyncio runs here; .* BlockingService"):
                call()

    await asyncio.to_thread(outside)
    with pytest.raises(ModelNotReady, match="'square' is not ready: not started"):
        await service.infer(3)

    async def elsewhere() -> Any:
        return await service.infer(3)

    async with service:
        with pytest.raises(RuntimeError, match="BlockingService"):
            await asyncio.to_thread(asyncio.run, elsewhere())


SET_BY_CALLS = ("form", "payload", "arrival", "deadline", "settled", "taken", "overtaken", "partial", "_withdraw")


async def test_a_call_without_options_is_made_like_any_other() -> None:
    async with serving() as rig:
        inlined, general = rig.service.infer(3), rig.service.infer(3, timeout=rig.service.facts.settings.timeout)
        values = [{name: getattr(call, name) for name in SET_BY_CALLS} for call in (inlined, general)]
        assert values[0] == values[1]
        assert [await inlined, await general] == [9, 9]


@subcases("way", WAYS)
async def test_every_way_to_wait_gives_the_answer_or_the_error(way: str) -> None:
    async with serving() as rig:
        assert await WAYS[way](rig.service) in (9, [9])
    async with serving(lambda batch: [ModelError("no") for _ in batch]) as rig:
        with pytest.raises((ModelError, ExceptionGroup)) as caught:
            await WAYS[way](rig.service)
        error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
        assert isinstance(error, ModelError) and error.message == "no"
