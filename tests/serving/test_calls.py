import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.rings import subcases
from tests.serving.kit import Square, serving, squares
from tests.waiting import turns

from weir import DeadlineExceeded, InvalidRequest, Model, ModelError, ModelNotReady, Service, ValidationFailed
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
        assert [type(error) for _, error, _ in rig.heard.responses] == [Cancelled, Cancelled]
        other = rig.service.infer(3)
        assert (other.cancel(), other.cancel()) == (True, False)


@pytest.mark.parametrize("member", [0, 1, 2])
async def test_cancelling_a_member_of_a_running_batch_harms_no_neighbour(member: int) -> None:
    async with serving(None) as rig:
        calls = [rig.service.infer(item) for item in range(3)]
        await turns()
        calls[member].cancel()
        assert rig.executor.cancelled == [(0, 1, [member])]
        rig.executor.respond_next(lambda batch: [x * 10 for x in batch])
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers.pop(member), asyncio.CancelledError)
        assert answers == [item * 10 for item in range(3) if item != member]


async def test_an_answer_to_a_future_that_somebody_resolved_is_dropped() -> None:
    async with serving(None) as rig:
        odd, other = rig.service.infer(1), rig.service.infer(2)
        await turns()
        odd.set_result("mine")
        rig.executor.respond_next(lambda batch: batch)
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
        rig.executor.respond_next(lambda batch: [ModelError("bug")])
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


async def slowly(items: Any) -> AsyncIterator[Any]:
    for item in items:
        await asyncio.sleep(0)
        yield item


def plainly(items: Any) -> Iterator[Any]:
    yield from items


SOURCES = [plainly, slowly]


async def test_a_list_a_range_and_nothing_can_be_streamed() -> None:
    async with serving() as rig:
        assert [answer async for answer in rig.service.stream([3, 4])] == [9, 16]
        assert [answer async for answer in rig.service.stream(range(1000))] == squares(list(range(1000)))
        assert [answer async for answer in rig.service.stream([])] == []
        assert [answer async for answer in rig.service.stream(slowly([]))] == []


@pytest.mark.parametrize("source", SOURCES)
async def test_answers_come_in_the_order_of_the_items(source: Any) -> None:
    async with serving(workers=3, places=2, max_batch_size=7) as rig:
        answers = [answer async for answer in rig.service.stream(source(range(500)))]
        assert answers == squares(list(range(500)))


@pytest.mark.parametrize("source", SOURCES)
async def test_no_more_is_pulled_than_the_window_holds(source: Any) -> None:
    pulled = 0

    def counting() -> Iterator[int]:
        nonlocal pulled
        while True:
            pulled += 1
            yield pulled

    async with serving(None, max_batch_size=8) as rig:
        stream = rig.service.stream(source(counting()))
        first = asyncio.ensure_future(anext(stream))
        await turns(200)
        assert pulled == rig.service.stream_size == 16
        rig.executor.respond_next(squares)
        assert await first == 1
        await turns(200)
        assert pulled <= 17
        await stream.aclose()


async def test_batches_are_full_while_a_stream_flows() -> None:
    async with serving(max_batch_size=8) as rig:
        async for _ in rig.service.stream(range(800)):
            pass
        assert len(rig.executor.sizes) <= 110


@pytest.mark.parametrize("source", SOURCES)
async def test_inputs_and_errors_are_returned_on_request(source: Any) -> None:
    def picky(batch: list[Any]) -> list[Any]:
        return [ModelError("odd") if x % 2 else x for x in batch]

    async with serving(picky) as rig:
        pairs = [
            (item, answer if isinstance(answer, int) else type(answer))
            async for item, answer in rig.service.stream(source(range(4)), return_inputs=True, return_errors=True)
        ]
        assert pairs == [(0, 0), (1, ModelError), (2, 2), (3, ModelError)]
        seen = []
        with pytest.raises(ModelError, match="odd"):
            async for answer in rig.service.stream(source(range(4))):
                seen.append(answer)
        assert seen == [0]
        await turns()
        assert rig.service.state()["waiting"] == 0


@pytest.mark.parametrize("source", SOURCES)
async def test_an_error_of_the_source_comes_after_the_answers_before_it(source: Any) -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        raise KeyError("source")

    async with serving() as rig:
        seen = []
        with pytest.raises(KeyError, match="source"):
            async for answer in rig.service.stream(source(broken())):
                seen.append(answer)
        assert seen == [0, 1, 4]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("way", ["aclose", "drop", "cancel"])
async def test_leaving_half_way_withdraws_what_is_under_way(source: Any, way: str) -> None:
    async with serving(None, max_batch_size=4) as rig:
        stream = rig.service.stream(source(range(1000)))
        waiting = asyncio.ensure_future(anext(stream))
        await turns(50)
        if way == "cancel":
            waiting.cancel()
            await asyncio.wait([waiting])
        else:
            rig.executor.respond_next(squares)
            assert await waiting == 0
        if way == "aclose":
            await stream.aclose()
        del stream, waiting
        gc.collect()
        await turns(50)
        state = rig.service.state()
        assert (state["waiting"], state["waiting_outside"]) == (0, 0)
        assert len(asyncio.all_tasks()) == 1
        assert rig.executor.cancelled


async def test_the_timeout_is_each_items_own() -> None:
    async with serving(None, max_batch_size=1) as rig:
        stream = rig.service.stream(range(3), timeout=5.0, return_errors=True)
        first = asyncio.ensure_future(anext(stream))
        await turns()
        rig.executor.respond_next(squares)
        assert await first == 0
        second = asyncio.ensure_future(anext(stream))
        await turns()
        rig.clock.advance(5.0)
        assert isinstance(await second, DeadlineExceeded)
        third = asyncio.ensure_future(anext(stream))
        await turns()
        assert isinstance(await third, DeadlineExceeded)


class Odd(Model):
    def predict(self, batch: list[int]) -> list[Any]:
        return [ModelError("odd") if x % 2 else x for x in batch]


async def test_errors_in_an_abandoned_stream_are_not_logged() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    async with Service(Odd, executor="inline") as service:
        stream = service.stream(range(10))
        assert await anext(stream) == 0
        await turns(50)
        await stream.aclose()
        del stream
        gc.collect()
    assert complaints == []


async def test_leaving_while_the_source_is_still_ending_withdraws_too() -> None:
    async def clinging() -> AsyncIterator[int]:
        try:
            for item in range(3):
                yield item
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    async with serving(None, max_batch_size=2) as rig:
        waiting = asyncio.ensure_future(anext(rig.service.stream(clinging())))
        await turns(50)
        assert rig.service.state()["waiting"] >= 1
        for _ in range(2):  # the second one while the first waits for the source
            waiting.cancel()
            await turns(50)
        assert rig.service.state()["waiting"] == 0


@pytest.mark.parametrize("source", SOURCES)
async def test_a_preprocessor_sees_each_item_and_fails_it_alone(source: Any) -> None:
    def digits(text: str) -> int:
        if text == "none":
            raise ValidationFailed("there is none")
        return int(text)

    async with serving() as rig:
        items = ["3", "x", "4", "none"]
        stream = rig.service.stream(source(items), preprocessor=digits, return_inputs=True, return_errors=True)
        pairs = [pair async for pair in stream]
        assert [item for item, _ in pairs] == items
        assert [answer for _, answer in pairs if isinstance(answer, int)] == [9, 16]
        assert type(pairs[1][1]) is InvalidRequest
        assert isinstance(pairs[1][1].__cause__, ValueError)
        assert str(pairs[1][1]).startswith("the preprocessor of the stream raised ValueError(")
        assert type(pairs[3][1]) is ValidationFailed
        seen = []
        with pytest.raises(InvalidRequest, match="preprocessor"):
            async for answer in rig.service.stream(source(items), preprocessor=digits):
                seen.append(answer)
        assert seen == [9]
