import asyncio
import concurrent.futures
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.serving.kit import serving, turns

from weir import ModelError, ModelNotReady, Service
from weir.errors import Cancelled
from weir.messages import Events
from weir.testing import FakeExecutor


async def by_await(service: Service) -> Any:
    return await service.infer(3)


async def by_gather(service: Service) -> Any:
    return (await asyncio.gather(service.infer(3), service.infer(4)))[0]


async def by_task(service: Service) -> Any:
    return await asyncio.create_task(service.infer(3))


async def by_group(service: Service) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(service.infer(3))
    return task.result()


async def by_wait_for(service: Service) -> Any:
    return await asyncio.wait_for(service.infer(3), 60)


async def by_timeout(service: Service) -> Any:
    async with asyncio.timeout(60):
        return await service.infer(3)


async def by_shield(service: Service) -> Any:
    return await asyncio.shield(service.infer(3))


async def by_as_completed(service: Service) -> Any:
    (only,) = asyncio.as_completed([service.infer(3)])
    return await only


async def by_wait(service: Service) -> Any:
    done, _ = await asyncio.wait([asyncio.create_task(service.infer(3))])
    return done.pop().result()


WAYS = [by_wait, by_await, by_gather, by_task, by_group, by_wait_for, by_timeout, by_shield, by_as_completed]


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_to_wait_gives_the_answer(way: Callable[[Service], Awaitable[Any]]) -> None:
    async with serving() as rig:
        assert await way(rig.service) == 9


@pytest.mark.parametrize("way", [by_await, by_gather, by_task, by_wait_for, by_timeout, by_shield, by_as_completed])
async def test_every_way_to_wait_raises_the_error(way: Callable[[Service], Awaitable[Any]]) -> None:
    async with serving(lambda batch: [ModelError("no") for _ in batch]) as rig:
        with pytest.raises(ModelError, match="no"):
            await way(rig.service)


async def test_a_task_group_raises_the_error() -> None:
    async with serving(lambda batch: [ModelError("no") for _ in batch]) as rig:
        with pytest.raises(ExceptionGroup) as caught:
            await by_group(rig.service)
        assert isinstance(caught.value.exceptions[0], ModelError)


@pytest.mark.parametrize("way", [by_await, by_gather, by_task, by_group, by_wait_for, by_timeout])
async def test_cancelling_whoever_waits_takes_the_request_out_of_the_line(
    way: Callable[[Service], Awaitable[Any]],
) -> None:
    async with serving(None) as rig:
        blocker = rig.service.infer("busy")
        await turns()
        waiting = asyncio.ensure_future(way(rig.service))
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


async def test_cancelling_twice_or_after_the_answer_does_nothing() -> None:
    async with serving() as rig:
        call = rig.service.infer(3)
        assert await call == 9
        assert not call.cancel()
        other = rig.service.infer(3)
        assert other.cancel()
        assert not other.cancel()
        assert rig.executor.cancelled == []


async def test_an_answer_to_a_future_that_somebody_resolved_is_dropped() -> None:
    async with serving(None) as rig:
        odd, other = rig.service.infer(1), rig.service.infer(2)
        await turns()
        odd.set_result("mine")
        rig.executor.answer_next(lambda batch: batch)
        assert await other == 2
        assert await odd == "mine"


def complaints(loop: asyncio.AbstractEventLoop) -> list[str]:
    heard: list[str] = []
    loop.set_exception_handler(lambda _, context: heard.append(context["message"]))
    return heard


async def test_a_call_left_alone_complains_only_of_the_model() -> None:
    heard = complaints(asyncio.get_running_loop())
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


async def test_an_error_in_place_is_raised_when_nobody_awaits_the_rest() -> None:
    heard = complaints(asyncio.get_running_loop())
    async with serving(lambda batch: [ModelError(str(x)) for x in batch]) as rig:
        with pytest.raises(ModelError, match="0"):
            await asyncio.gather(*map(rig.service.infer, range(3)))
        await turns()
    gc.collect()
    assert heard == []


def test_calls_outside_of_the_loop_or_before_the_start_say_what_is_wrong() -> None:
    from tests.serving.kit import Square

    service = Service(Square, executor=FakeExecutor())
    for call in (lambda: service.infer(3), lambda: service.start().send(None)):
        with pytest.raises(RuntimeError, match=r"'square': no event loop of asyncio runs here; .* BlockingService"):
            call()

    async def before_the_start() -> None:
        await service.infer(3)

    with pytest.raises(ModelNotReady, match="'square' is not ready: not started"):
        asyncio.run(before_the_start())


async def test_a_call_of_another_loop_is_refused() -> None:
    async with serving() as rig:

        async def elsewhere() -> Any:
            return await rig.service.infer(3)

        with (
            concurrent.futures.ThreadPoolExecutor() as threads,
            pytest.raises(RuntimeError, match="BlockingService"),
        ):
            await asyncio.get_running_loop().run_in_executor(threads, asyncio.run, elsewhere())


SET_BY_CALLS = ("payload", "arrival", "timeout", "deadline", "settled", "taken", "overtaken", "partial", "_withdraw")


async def test_a_call_without_options_is_made_like_any_other() -> None:
    async with serving() as rig:
        inlined, general = rig.service.infer(3), rig.service.infer(3, timeout=rig.service.facts.settings.timeout)
        values = [{name: getattr(call, name) for name in SET_BY_CALLS} for call in (inlined, general)]
        assert values[0] == values[1]
        assert [await inlined, await general] == [9, 9]
