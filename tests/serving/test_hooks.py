import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.fakes import FakeRequest
from tests.rings import subcases
from tests.serving.kit import Rig, serving, squares
from tests.waiting import turns

from weir import InvalidRequest, ModelError, Service
from weir.messages import JSON, MSGPACK, OBJECT
from weir.serving.hooks import HookedBatch
from weir.testing import Predict


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


@asynccontextmanager
async def gated(answer: Predict | None = None, **settings: Any) -> AsyncIterator[tuple[Rig, Gate]]:
    async with serving(answer, kind=Gate, **settings) as rig:
        assert isinstance(rig.service, Gate)
        yield rig, rig.service


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
    async with gated(max_batch_size=1) as (rig, service):
        calls = [service.infer(name) for name in "abc"]
        await turns(6)
        assert [batch for batch, _ in service.before] == [["a"], ["b"], ["c"]]
        service.before[1][1].set()  # whoever is prepared first goes first
        await turns(6)
        assert rig.executor.payloads == [["b"]]
        service.before[0][1].set()
        await turns(6)
        assert rig.executor.payloads == [["b"]]  # one place only
        rig.executor.respond_next(lambda batch: batch)
        await turns(6)
        assert [results for results, _ in service.after] == [["b"]]
        assert rig.executor.payloads == [["b"], ["a"]]  # while b is in its second hook
        service.after[0][1].set()
        assert await calls[1] == "b"
        service.before[2][1].set()
        rig.executor.respond_next(lambda batch: batch)
        await turns(6)
        rig.executor.respond_next(lambda batch: batch)
        await turns(6)
        for _, event in service.after:
            event.set()
        assert await asyncio.gather(*calls) == ["a", "b", "c"]


async def test_the_time_of_hooks_counts_as_queue_and_total_time() -> None:
    async with gated() as (rig, service):
        started = rig.clock()
        call = service.infer(1)
        await turns(6)
        assert rig.heard.dispatches == []
        rig.clock.advance(0.5)
        service.before[0][1].set()
        await turns(6)
        assert [dispatch.at for dispatch in rig.heard.dispatches] == [started + 0.5]
        rig.executor.respond_next(squares)
        await turns(6)
        rig.clock.advance(0.25)
        service.after[0][1].set()
        assert await call == 1
        assert rig.heard.responses[0][2] == started + 0.75


async def test_who_left_during_the_first_hook_does_not_reach_the_worker() -> None:
    async with gated() as (rig, service):
        calls = [service.infer(x) for x in range(3)]
        await turns(6)
        calls[1].cancel()
        service.before[0][1].set()
        await turns(6)
        assert rig.executor.payloads == [[0, 2]]
        assert rig.executor.cancelled == []
        calls[2].cancel()
        assert rig.executor.cancelled == [(0, 1, [1])]
        rig.executor.respond_next(squares)
        await turns(6)
        service.after[0][1].set()
        assert await calls[0] == 0


async def test_draining_waits_for_hooks() -> None:
    async with gated(squares) as (_, service):
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
    async with gated() as (rig, service):
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
        rig.executor.respond_next(lambda batch: ["a", "b"])
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


# hooks.py: what becomes of a batch when a hook, a worker or a caller fails it.


@subcases("all_fail", [False, True])
async def test_an_error_in_an_items_place_is_that_items_alone(all_fail: bool) -> None:
    class Picky(Service):
        async def before_batch(self, batch: list[Any]) -> list[Any]:
            return [InvalidRequest("before") if x == 1 or all_fail else x for x in batch]

        async def after_batch(self, results: list[Any]) -> list[Any]:
            return [InvalidRequest("after") if x == 4 else x for x in results]

    async with serving(kind=Picky) as rig:
        calls = [rig.service.infer(x) for x in range(4)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found = [str(answer) for answer in answers]
        assert found == (["before"] * 4 if all_fail else ["0", "before", "after", "9"])
        assert rig.executor.sizes == ([] if all_fail else [3])


@pytest.mark.parametrize("where", ["before_batch", "after_batch"])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("raises", "raised ZeroDivisionError"),
        ("refuses", "no more today"),
        ("shortens", "returned 2 results for 3 items"),
        ("returns nothing", "returned nothing (None) for 3 items, must be a list of 3"),
    ],
)
async def test_a_hook_that_fails_fails_its_batch_and_nothing_else(where: str, what: str, error: str) -> None:
    async def hook(self: Any, values: list[Any]) -> Any:
        if values == [7] or values == [49]:
            return values
        if what == "raises":
            raise ZeroDivisionError("hook")
        if what == "refuses":
            raise InvalidRequest("no more today")
        return values[:-1] if what == "shortens" else None

    kind = type("Failing", (Service,), {where: hook})
    async with serving(kind=kind) as rig:
        answers = await asyncio.gather(*map(rig.service.infer, range(3)), return_exceptions=True)
        for answer in answers:
            assert isinstance(answer, InvalidRequest if what == "refuses" else ModelError)
            assert error in str(answer)
            if what == "raises":
                assert isinstance(answer, ModelError)
                assert isinstance(answer.__cause__, ZeroDivisionError)
                assert answer.original_type == "ZeroDivisionError"
                assert "in hook" in answer.remote_traceback
        assert await rig.service.infer(7) == 49


@subcases("hook", ["before_batch", "after_batch"])
async def test_a_hook_whose_work_was_cancelled_fails_its_batch(hook: str) -> None:
    async def gives_up(self: Service, values: list[Any]) -> list[Any]:
        if 0 in values:
            raise asyncio.CancelledError("what I waited for")
        return values

    gives_up.__name__ = hook
    async with serving(kind=type("GivesUp", (Service,), {hook: gives_up})) as rig:
        for _ in range(5):  # more than there are places
            with pytest.raises(ModelError, match=f"{hook} raised CancelledError"):
                await rig.service.infer(0)
        assert await rig.service.infer(3) == 9


async def test_each_caller_gets_an_object_of_its_own_for_a_hooks_error() -> None:
    class Refuses(Service):
        async def before_batch(self, batch: list[Any]) -> list[Any]:
            raise InvalidRequest("not today")

    async with serving(kind=Refuses) as rig:
        one, other = await asyncio.gather(*map(rig.service.infer, range(2)), return_exceptions=True)
        assert str(one) == str(other) == "not today"
        assert one is not other


@pytest.mark.parametrize(
    "fault", ["cannot be handed over", "outputs of others", "cannot be decoded", "cannot be written"]
)
async def test_a_step_beside_the_hooks_that_fails_ends_its_batch(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises between two hooks, the callers have their error and the worker's place is free again."""

    class Passing(Service):
        async def before_batch(self, batch: list[Any]) -> list[Any]:
            return batch

        async def after_batch(self, results: list[Any]) -> list[Any]:
            return results

    def fail(*arguments: Any) -> Any:
        raise RuntimeError(fault)

    places: dict[str, tuple[object, str]] = {
        "cannot be decoded": (HookedBatch, "decode"), "cannot be written": (HookedBatch, "encode"), "outputs of others": (HookedBatch, "gather"),
    }  # fmt: skip
    async with serving(kind=Passing) as rig:
        with monkeypatch.context() as patch:
            owner, name = places.get(fault, (rig.executor, "run"))
            patch.setattr(owner, name, fail)
            calls = [asyncio.ensure_future(rig.service.infer(x)) for x in range(4)]
            await turns(20)
            assert all(call.done() for call in calls)
            for call in calls:
                assert isinstance(call.exception(), ModelError)
                assert fault in str(call.exception())
        assert await rig.service.infer(3) == 9
