"""One service takes the place of another while requests come."""

import asyncio
import gc
import weakref

import pytest
from tests.serving.kit import Square, request, squares, turns

from weir import Draining, ModelNotReady, Service
from weir.serving.driver import Driver
from weir.serving.service import Replaced
from weir.testing import FakeClock, FakeExecutor, RecordingObserver


class Pair:
    """Two services of one clock that run; `swap` has the second replace the first."""

    def __init__(self) -> None:
        self.clock, self.heard = FakeClock(), RecordingObserver()
        self.replaced: list[Replaced] = []
        self.executors = [FakeExecutor(None) for _ in range(3)]
        self.old, self.new, self.newest = (
            Service(
                Square, executor=executor, clock=self.clock, observers=[self.heard], max_batch_size=1, max_queue_size=2
            )
            for executor in self.executors
        )

    async def __aenter__(self) -> "Pair":
        for service in (self.old, self.new, self.newest):
            await service.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        replaced = [each.generation for each in self.replaced]
        for generation in (*replaced, *(each.generation for each in (self.old, self.new, self.newest))):
            await generation.stop(0.0)

    def answer(self, which: int) -> None:
        self.executors[which].answer_next(squares)


async def test_what_was_accepted_is_answered_by_the_old_and_the_rest_by_the_new() -> None:

    async def answering(pair: Pair, which: int) -> None:
        await turns()
        pair.answer(which)

    async with Pair() as pair:
        before = [request(pair.old, item) for item in (1, 2)]
        await turns()
        former = pair.old.replace_with(pair.new)
        after, call = request(pair.old, 3), pair.old.infer(4)
        await turns()
        stopping = asyncio.ensure_future(former.stop(10.0))
        await turns()
        for _ in range(2):
            pair.answer(0)
            pair.answer(1)
            await turns()
        assert [each.output for each in (*before, after)] == [1, 4, 9]
        assert await call == 16
        await stopping
        assert pair.executors[0].stopped and not pair.executors[1].stopped
        assert await asyncio.gather(pair.old.infer(5), *[answering(pair, 1)]) == [25, None]


async def test_draining_waits_for_what_replaced_ones_had_accepted() -> None:
    async with Pair() as pair:
        sent = request(pair.old, 3)
        await turns()
        pair.replaced.append(pair.old.replace_with(pair.new))
        draining = asyncio.ensure_future(pair.old.drain(10.0))
        hurried = asyncio.ensure_future(pair.replaced[0].generation.driver.drain(1.0))
        await turns()
        assert not draining.done()
        pair.clock.advance(2.0)  # who gives it less time does not end the others' wait
        await turns()
        assert hurried.done() and not draining.done()
        pair.answer(0)
        await draining
        assert sent.output == 9


async def test_the_old_one_is_as_ready_as_the_newest() -> None:
    async with Pair() as pair:
        for newer in (pair.new, pair.newest):
            pair.replaced.append(pair.old.replace_with(newer))
        assert pair.old.ready and not pair.old.draining
        sent = request(pair.old, 3)
        await turns()
        pair.answer(2)
        assert sent.output == 9
        await pair.newest.stop(0.0)
        assert pair.old.not_ready_reason == "stopped"
        with pytest.raises(ModelNotReady, match="stopped"):
            request(pair.old, 4)


async def test_a_caller_who_leaves_is_forgotten_by_whoever_has_the_request() -> None:
    async with Pair() as pair:
        running, waiting = request(pair.old, 1), request(pair.old, 2)
        await turns()
        former = pair.old.replace_with(pair.new)
        passed_on, call = request(pair.old, 3), pair.old.infer(4)
        await turns()
        for each in (waiting, passed_on):
            pair.old.cancel(each)
        call.cancel()
        assert pair.executors[1].cancelled == [(0, 1, [0])]
        pair.old.cancel(running)
        assert pair.executors[0].cancelled == [(0, 1, [0])]
        pair.answer(0)
        pair.answer(1)
        await former.stop(10.0)
        assert {each.ends for each in (running, waiting, passed_on)} == {0}
        assert pair.heard.ends == 4


async def test_calls_outside_of_a_full_line_are_answered_by_the_old() -> None:
    async with Pair() as pair:
        calls = [pair.old.infer(item) for item in range(6)]
        await turns()
        stopping = asyncio.ensure_future(pair.old.replace_with(pair.new).stop(10.0))
        calls[5].cancel()
        for _ in range(5):
            await turns()
            pair.answer(0)
        await stopping
        assert [await call for call in calls[:5]] == squares(list(range(5)))


async def test_memory_of_the_old_one_may_be_submitted_to_the_new_one() -> None:
    async with Pair() as pair:
        for executor in pair.executors:
            executor.give_blocks = True
        block = pair.old.reserve(10)
        pair.replaced.append(pair.old.replace_with(pair.new))
        sent = request(pair.old, block)
        assert pair.old.reserve(10) is pair.executors[1].blocks[0]
        await turns()
        pair.executors[1].answer_next(lambda batch: [len(each.view) for each in batch])
        assert sent.output == 10
        assert pair.executors[0].blocks[0].shares == 0


async def test_a_stop_ends_the_generations_that_were_replaced_too() -> None:
    async with Pair() as pair:
        pair.old.replace_with(pair.new)
        await pair.old.stop(0.0)
        assert [executor.stopped for executor in pair.executors] == [True, True, False]


async def test_a_stop_accepts_no_more_while_replaced_ones_finish() -> None:
    async with Pair() as pair:
        sent = request(pair.old, 3)
        await turns()
        pair.replaced.append(pair.old.replace_with(pair.new))
        stopping = asyncio.ensure_future(pair.old.stop(10.0))
        await turns()
        with pytest.raises((Draining, ModelNotReady)):
            await pair.old.infer(4)
        pair.answer(0)
        await stopping
        assert sent.output == 9


async def test_whoever_holds_a_service_reaches_the_newest_and_keeps_none_between() -> None:
    clock = FakeClock()

    def fresh() -> Service:
        return Service(Square, executor=FakeExecutor(squares), clock=clock)

    service = fresh()
    await service.start()
    between: list[weakref.ref[Driver]] = []
    for _ in range(1500):
        new = fresh()
        await new.start()
        former = service.replace_with(new)
        await former.stop(0.0)
        between.append(weakref.ref(former.generation.driver))
    del former, new
    call, sent = service.infer(3), request(service, 4)
    await turns()
    assert (await call, sent.output) == (9, 16)
    gc.collect()
    assert sum(each() is not None for each in between) == 0
    await service.stop(0.0)
