"""hooks.py: what becomes of a batch when a hook, a worker or a caller fails it."""

import asyncio
from typing import Any

import pytest
from tests.serving.kit import serving, turns

from weir import InvalidRequest, ModelError, Service
from weir.serving.hooks import HookedBatch


@pytest.mark.parametrize("all_fail", [False, True])
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


@pytest.mark.parametrize("hook", ["before_batch", "after_batch"])
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
