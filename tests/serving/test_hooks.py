import asyncio
from typing import Any

from tests.serving.kit import serving, squares, turns

from weir import InvalidRequest, Service
from weir.messages import JSON, MSGPACK, OBJECT
from weir.testing import FakeRequest


class Plus(Service):
    async def before_batch(self, batch: list[Any]) -> list[Any]:
        return [x + 1 for x in batch]

    async def after_batch(self, results: list[Any]) -> list[Any]:
        return [x * 10 for x in results]


class Gate(Service):
    """Hooks that wait for the test."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before: list[tuple[list[Any], asyncio.Event]] = []
        self.after: list[tuple[list[Any], asyncio.Event]] = []

    async def before_batch(self, batch: list[Any]) -> list[Any]:
        self.before.append((batch, asyncio.Event()))
        await self.before[-1][1].wait()
        return batch

    async def after_batch(self, results: list[Any]) -> list[Any]:
        self.after.append((results, asyncio.Event()))
        await self.after[-1][1].wait()
        return results


async def test_hooks_change_items_and_answers() -> None:
    async with serving(kind=Plus) as rig:
        assert await asyncio.gather(*map(rig.service.infer, range(4))) == [10, 40, 90, 160]
        assert await rig.service.infer_many([1, 2]) == [40, 90]


async def test_hooks_see_decoded_items_and_answers_are_encoded_after_them() -> None:
    async with serving(kind=Plus) as rig:
        arrival = rig.service.now()
        requests = [
            FakeRequest(b"3", arrival=arrival, content_type=JSON, accept=JSON),
            FakeRequest(b"\x04", arrival=arrival, content_type=MSGPACK, accept=MSGPACK),
            FakeRequest(5, arrival=arrival),
            FakeRequest(b"{", arrival=arrival, content_type=JSON, accept=JSON),
        ]
        for request in requests:
            rig.service.submit(request)
        await turns(6)
        assert [request.output for request in requests] == [b"160", b"\xcc\xfa", 360, None]
        assert isinstance(requests[3].error, InvalidRequest)
        batch = rig.executor.batches[0][1]
        assert (batch.payloads, batch.content_types, batch.accepts) == ([4, 5, 6], OBJECT, OBJECT)


async def test_no_worker_is_held_while_hooks_run() -> None:
    async with serving(None, kind=Gate, max_batch_size=1) as rig:
        service = rig.service
        assert isinstance(service, Gate)
        calls = [service.infer(name) for name in "abc"]
        await turns(6)
        assert [batch for batch, _ in service.before] == [["a"], ["b"], ["c"]]
        service.before[1][1].set()  # whoever is prepared first goes first
        await turns(6)
        assert rig.executor.payloads == [["b"]]
        service.before[0][1].set()
        await turns(6)
        assert rig.executor.payloads == [["b"]]  # one place only
        rig.executor.answer_next(lambda batch: batch)
        await turns(6)
        assert [results for results, _ in service.after] == [["b"]]
        assert rig.executor.payloads == [["b"], ["a"]]  # while b is in its second hook
        service.after[0][1].set()
        assert await calls[1] == "b"
        service.before[2][1].set()
        rig.executor.answer_next(lambda batch: batch)
        await turns(6)
        rig.executor.answer_next(lambda batch: batch)
        await turns(6)
        for _, event in service.after:
            event.set()
        assert await asyncio.gather(*calls) == ["a", "b", "c"]


async def test_the_time_of_hooks_counts_as_queue_and_total_time() -> None:
    async with serving(None, kind=Gate) as rig:
        service = rig.service
        assert isinstance(service, Gate)
        started = rig.clock()
        call = service.infer(1)
        await turns(6)
        assert rig.heard.dispatches == []
        rig.clock.advance(0.5)
        service.before[0][1].set()
        await turns(6)
        assert [dispatch.at for dispatch in rig.heard.dispatches] == [started + 0.5]
        rig.executor.answer_next(squares)
        await turns(6)
        rig.clock.advance(0.25)
        service.after[0][1].set()
        assert await call == 1
        assert rig.heard.answers[0][2] == started + 0.75


async def test_who_left_during_the_first_hook_does_not_reach_the_worker() -> None:
    async with serving(None, kind=Gate) as rig:
        service = rig.service
        assert isinstance(service, Gate)
        calls = [service.infer(x) for x in range(3)]
        await turns(6)
        calls[1].cancel()
        service.before[0][1].set()
        await turns(6)
        assert rig.executor.payloads == [[0, 2]]
        assert rig.executor.cancelled == []
        calls[2].cancel()
        assert rig.executor.cancelled == [(0, 1, [1])]
        rig.executor.answer_next(squares)
        await turns(6)
        service.after[0][1].set()
        assert await calls[0] == 0


async def test_draining_waits_for_hooks() -> None:
    async with serving(squares, kind=Gate) as rig:
        service = rig.service
        assert isinstance(service, Gate)
        call = service.infer(3)
        await turns(6)
        stopping = asyncio.ensure_future(service.stop(100.0))
        await turns(6)
        service.before[0][1].set()
        await turns(6)
        assert not stopping.done()
        service.after[0][1].set()
        await stopping
        assert await call == 9


async def test_blocks_are_held_until_the_worker_has_them_and_then_given_back() -> None:
    async with serving(None, kind=Gate) as rig:
        service = rig.service
        assert isinstance(service, Gate)
        rig.executor.give_blocks = True
        requests = []
        for content_type in (OBJECT, JSON):
            block = service.reserve(1)
            assert block is not None
            block.view[:] = b"3"
            requests.append(FakeRequest(block, arrival=service.now(), content_type=content_type))
            service.submit(requests[-1])
        await turns(6)
        assert [block.shares for block in rig.executor.blocks] == [2, 2]
        service.before[0][1].set()
        await turns(6)
        assert [block.shares for block in rig.executor.blocks] == [1, 1]
        assert rig.executor.payloads == [[rig.executor.blocks[0], 3]]
        rig.executor.answer_next(lambda batch: ["a", "b"])
        await turns(6)
        service.after[0][1].set()
        await turns(6)
        assert [request.output for request in requests] == ["a", "b"]
        assert [block.shares for block in rig.executor.blocks] == [0, 0]


async def test_blocks_are_given_back_where_no_entry_needs_the_worker() -> None:
    class Refuses(Service):
        async def before_batch(self, batch: list[Any]) -> list[Any]:
            raise InvalidRequest("not today")

    async with serving(None, kind=Refuses) as rig:
        rig.executor.give_blocks = True
        block = rig.service.reserve(1)
        assert block is not None
        block.view[:] = b"3"
        rig.service.submit(request := FakeRequest(block, arrival=rig.service.now(), content_type=JSON))
        await turns(6)
        assert isinstance(request.error, InvalidRequest)
        assert [block.shares for block in rig.executor.blocks] == [0]
