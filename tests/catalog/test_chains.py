"""Chains in one process: what becomes of an item on its way through several models."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from tests.waiting import turns

from weir import (
    Branch,
    Chain,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Model,
    ModelError,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    Registry,
    Service,
    SettingsError,
    Step,
    Switch,
    WeirError,
)  # fmt: skip
from weir.batching.request_state import RequestBase
from weir.catalog.chains import dependents
from weir.inprocess import InProcess
from weir.messages import JSON, Dispatch, Form
from weir.telemetry.recorder import SilentObserver
from weir.testing import FakeClock, FakeExecutor


class Double(Model):
    sizes: ClassVar[list[int]] = []

    def predict(self, batch: Any) -> Any:
        self.sizes.append(len(batch))
        return [InvalidRequest("is no number") if isinstance(item, str) else 2 * item for item in batch]


class Negate(Model):
    def predict(self, batch: Any) -> Any:
        return [-item for item in batch]


def inline(model: type[Model], **said: Any) -> Service:
    return Service(model, executor="inline", **said)


@asynccontextmanager
async def running(*chains: Service, own: bool = False) -> AsyncIterator[Registry]:
    """Run these, and Double and Negate unless all steps are their `own`; they have ended after the block."""
    models = Registry([*([] if own else [inline(Double), inline(Negate)]), *chains])
    await models.start()
    yield models
    await models.stop(0.0)


async def test_each_step_batches_and_the_last_answer_is_the_chains() -> None:
    Double.sizes = []
    chain = Chain(["double", "negate", Step("double")], name="both")
    assert chain.not_ready_reason == "not started"
    async with running(chain):
        warm = len(Double.sizes)
        assert await asyncio.gather(*[chain.infer(item) for item in range(5)]) == [0, -4, -8, -12, -16]
        assert Double.sizes[warm:] == [5, 5]
        first, error, last = await chain.infer_many([1, "x", 2], return_errors=True)
        assert (first, last) == (-4, -8)
        assert isinstance(error, InvalidRequest)
        assert error.message == "step 'double': is no number"
    assert not chain.ready


async def test_a_stop_takes_its_drain_timeout_once_for_a_chain_and_its_steps() -> None:
    clock = FakeClock()
    settings: dict[str, Any] = {"drain_timeout": 10.0, "clock": clock}
    step, chain = Service(Double, executor=FakeExecutor(), **settings), Chain(["double"], name="chain", **settings)
    async with running(step, chain, own=True) as models:
        calls = [chain.infer(1), step.infer(1)]
        await turns()
        stopped = asyncio.ensure_future(models.stop())
        await turns(20)
        clock.advance(10.0)
        await turns(20)
        assert stopped.done()
        assert [type(each.exception()) for each in calls] == [Draining] * 2


async def test_no_more_items_are_in_all_steps_together_than_the_capacity() -> None:
    slow = FakeExecutor()
    chain = Chain(["double", "negate"], name="chain", capacity=3)
    async with running(inline(Double), Service(Negate, executor=slow), chain, own=True):
        calls = [chain.infer(item) for item in range(5)]
        await turns(20)
        with pytest.raises(Overloaded):
            await chain.infer(9, backpressure=False)
        assert sum(slow.sizes) == 3
        while not all(call.done() for call in calls):
            slow.respond_next(Negate().predict)
            await turns(20)
        assert [call.result() for call in calls] == [0, -2, -4, -6, -8]
    assert Chain(["double"], name="other").facts.batching.capacity == 4096


async def test_steps_may_run_in_threads() -> None:
    class Thread(Model):
        def predict(self, batch: Any) -> Any:
            return [threading.current_thread().name for _ in batch]

    chain = Chain([Branch({"thread": ["thread"], "twice": ["double"]})], name="chain")
    async with running(
        Service(Thread, executor="thread", workers=1), Service(Double, executor="thread"), chain, own=True
    ):
        assert await chain.infer(4) == {"thread": "weir-thread-0", "twice": 8}


async def test_branches_go_side_by_side() -> None:
    both = Chain([Branch({"twice": ["double"], "minus": ["negate", "double"]})], name="both")
    partial = Chain([Branch({"twice": ["double"], "minus": ["negate"]}, fail_fast=False)], name="partial")
    async with running(both, partial):
        assert await both.infer(3) == {"twice": 6, "minus": -6}
        assert await partial.infer(3) == {"twice": 6, "minus": -3}
        for chain in (both, partial):
            with pytest.raises(WeirError, match=r"^step "):  # there is no answer at all
                await chain.infer("x")
        answer = await partial.infer([])  # which has the error of one path beside the answer of the other
        assert answer["twice"] == []
        assert answer["minus"]["type"] == "ModelError"
        assert answer["minus"]["error"].startswith("step 'negate': predict raised TypeError")


async def test_a_path_that_fails_cancels_the_others() -> None:
    executor = FakeExecutor()  # which never answers
    chain = Chain([Branch({"bad": ["double"], "waits": ["waits"]})], name="chain")
    async with running(Service(Negate, name="waits", executor=executor), chain):
        with pytest.raises(InvalidRequest, match="is no number"):
            await asyncio.wait_for(chain.infer("x"), 60)
        assert len(executor.cancelled) == 1


async def test_what_a_step_raised_keeps_its_type_around_the_chain() -> None:
    class Lost(Model):
        def predict(self, batch: Any) -> Any:
            return [ModelNotFound("no weights for this language") for _ in batch]

    chains = [Chain([name], name=f"of_{name}") for name in ("negate", "lost")]
    async with running(inline(Lost), *chains):
        with pytest.raises(TypeError, match="step 'negate': predict raised TypeError") as caught:
            await chains[0].infer([])
        assert isinstance(caught.value, ModelError)
        with pytest.raises(ModelNotFound, match="step 'lost': no weights"):
            await chains[1].infer(1)


async def test_a_switch_without_that_case_goes_the_default_or_refuses() -> None:
    cases = {"d": ["double"], "n": ["negate"]}
    keyed = Chain([Switch("kind", cases, default=["double"])], name="keyed")
    own = Chain([Switch(None, {3: ["double"]}), Switch(lambda item: item > 5, {True: ["negate"]})], name="own")
    async with running(keyed, own):
        assert await own.infer(3) == -6
        for chain, item, why in (
            (own, 4, "switch: 4: must be one of 3"),
            (own, [], "must be one of 3"),
            (keyed, 4, "no 'kind' in the item"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                await chain.infer(item)
        with pytest.raises(WeirError, match="step 'double'"):
            await keyed.infer({"kind": "z"})  # which Double cannot double


async def test_one_deadline_and_one_cancellation_hold_for_all_steps() -> None:
    late = Service(Negate, name="late", executor=FakeExecutor())  # which answers nothing of itself
    chain = Chain(["double", late], name="chain", timeout=0.05)
    async with running(late, chain):
        with pytest.raises(DeadlineExceeded):
            await chain.infer(1)
        call = chain.infer(1, timeout=30.0)
        await turns(20)
        assert late.state()["waiting"] + late.state()["in_flight"] >= 1
        call.cancel()
        await turns(20)
        assert late.state()["waiting"] == 0
        assert chain.state()["in_flight"] == 0


async def test_frontends_call_a_chain_as_they_call_a_model() -> None:
    got: list[Any] = []

    class Asked(RequestBase):
        def finish(self, output: Any, dispatch: Dispatch) -> None:
            got.append(output)

        def fail(self, error: Any) -> None:
            got.append(error)

    chain = Chain(["double", "negate"], name="chain")
    async with running(chain) as models:
        for body in (b"3", b"{"):
            form = Form(1.0, content_type=JSON, accept=JSON, frontend="http")
            chain.submit(Asked(form, body, chain.now()))
        await turns(20)
        assert sorted(map(type, got), key=str) == [bytes, InvalidRequest]
        assert b"-6" in got
        assert chain.statistics is not models.get("double").statistics


async def test_what_cannot_be_a_chain_is_refused() -> None:
    for steps, words in (
        ([], "at least one step"), ("double", "must be a list"), ([3], "is not a step"), ([Branch({})], "at least one path"),
        ([Step("double", inputs={"a": "b"})], "chains that declare tensors"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=words):
            Chain(steps, name="chain")  # type: ignore[arg-type]  # what users may write
    circle = [Chain(["b"], name="a"), Chain(["double", "a"], name="b")]
    for chains, words in (([Chain(["none"], name="a")], "unknown model"), (circle, "circle")):
        with pytest.raises(SettingsError, match=words):
            await Registry([inline(Double), *chains]).start()


async def test_a_chain_is_as_ready_as_its_steps() -> None:
    chain = Chain(["double"], name="chain")
    async with running(chain) as models:
        assert chain.ready
        models.remove("double")
        assert chain.not_ready_reason == "step 'double' is not ready: not loaded"
        with pytest.raises(ModelNotReady, match="step 'double'"):
            await chain.infer(1)


class Both(Chain):
    steps = ("double", "negate")


def test_a_program_may_be_given_a_chain_and_a_function() -> None:
    with InProcess(Double, Negate, Both, _increment, executor="thread") as client:
        assert client.infer("both", 4) == -8
        assert client.infer("_increment", 4) == 5


def _increment(batch: list[int]) -> list[int]:
    return [item + 1 for item in batch]


async def test_a_model_is_replaced_by_a_chain_and_the_other_way_round() -> None:
    service, chain = inline(Negate, name="either"), Chain(["double", "double"], name="either")
    async with running(inline(Double), service, own=True) as models:
        models.join([chain])
        await chain.start()
        await service.replace_with(chain).stop()
        assert await service.infer(3) == 12
        assert [found.name for found in dependents("double", models.all)] == ["either"]
        await models.get("double").stop()
        assert service.not_ready_reason == "step 'double' is not ready: stopped"
        plain = inline(Negate, name="either")
        await plain.start()
        await service.replace_with(plain).stop()
        assert (await service.infer(3), dependents("double", models.all)) == (-3, [])


class OnlyPositive(Chain):
    """Refuses some of its items in a hook."""

    steps = ("double",)

    async def before_batch(self, batch: list[Any]) -> list[Any]:
        return [InvalidRequest("is negative") if item < 0 else item for item in batch]


async def test_an_item_that_a_hook_answers_does_not_reach_the_steps() -> None:
    """The others keep their own requests."""
    chain = OnlyPositive(name="positive", max_batch_size=8)
    seen: list[int] = []

    class Priorities(SilentObserver):
        def answered(self, model: str, requests: Any, error: WeirError | None, now: float) -> None:
            seen.extend(request.form.priority for request in requests)

    async with running(inline(Double, observers=[Priorities()]), chain, own=True):
        calls = [chain.infer(item, priority=item + 10) for item in (-1, 2, -3, 4)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert list(map(str, answers)) == ["is negative", "4", "is negative", "8"]
    assert sorted(seen) == [12, 14]
