"""Chains in one process: what becomes of an item on its way through several models."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar

import pytest
from tests.serving.kit import turns

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
from weir.messages import JSON, Dispatch
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


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def inline(model: type[Model], **said: Any) -> Service:
    return Service(model, executor="inline", **said)


def registry(*chains: Chain) -> Registry:
    return Registry([inline(Double), inline(Negate), *chains])


async def test_each_step_batches_and_the_last_answer_is_the_chains() -> None:
    Double.sizes = []
    chain = Chain(["double", "negate", Step("double")], name="both")
    models = registry(chain)
    assert chain.not_ready_reason == "not started"
    await models.start()
    warm = len(Double.sizes)
    assert await asyncio.gather(*[chain.infer(item) for item in range(5)]) == [0, -4, -8, -12, -16]
    assert Double.sizes[warm:] == [5, 5]
    first, error, last = await chain.infer_many([1, "x", 2], return_errors=True)
    assert (first, last) == (-4, -8)
    assert isinstance(error, InvalidRequest)
    assert error.message == "step 'double': is no number"
    await models.stop()
    assert not chain.ready


async def test_a_stop_takes_its_drain_timeout_once_for_a_chain_and_its_steps() -> None:
    clock = FakeClock()
    settings: dict[str, Any] = {"drain_timeout": 10.0, "clock": clock}
    step = Service(Double, executor=FakeExecutor(), **settings)
    chain = Chain(["double"], name="chain", **settings)
    models = Registry([step, chain])
    await models.start()
    calls = [chain.infer(1), step.infer(1)]
    await turns()
    stopped = asyncio.ensure_future(models.stop())
    await turns(20)
    clock.advance(10.0)
    await turns(20)
    assert stopped.done()
    assert [type(each.exception()) for each in calls] == [Draining] * 2


async def test_no_more_items_are_under_way_in_all_steps_together_than_the_capacity() -> None:
    slow = FakeExecutor()
    chain = Chain(["double", "negate"], name="chain", capacity=3)
    models = Registry([inline(Double), Service(Negate, executor=slow), chain])
    await models.start()
    calls = [chain.infer(item) for item in range(5)]
    await turns(20)
    with pytest.raises(Overloaded):
        await chain.infer(9, backpressure=False)
    assert sum(slow.sizes) == 3
    while not all(call.done() for call in calls):
        slow.answer_next(Negate().predict)
        await turns(20)
    assert [call.result() for call in calls] == [0, -2, -4, -6, -8]
    assert Chain(["double"], name="other").facts.batching.capacity == 4096
    await models.stop()


def test_steps_may_run_in_threads() -> None:
    class Thread(Model):
        def predict(self, batch: Any) -> Any:
            return [threading.current_thread().name for _ in batch]

    async def main() -> None:
        chain = Chain([Branch({"thread": ["thread"], "twice": ["double"]})], name="chain")
        models = Registry([Service(Thread, executor="thread", workers=1), Service(Double, executor="thread"), chain])
        await models.start()
        assert await chain.infer(4) == {"thread": "weir-thread-0", "twice": 8}
        await models.stop()

    run(main())


async def test_branches_go_side_by_side_and_switches_choose() -> None:
    both = Chain([Branch({"twice": ["double"], "minus": ["negate", "double"]})], name="both")
    partial = Chain([Branch({"twice": ["double"], "same": ["double", "double"]}, fail_fast=False)], name="partial")
    models = registry(both, partial)
    await models.start()
    assert await both.infer(3) == {"twice": 6, "minus": -6}
    assert await partial.infer(3) == {"twice": 6, "same": 12}
    with pytest.raises(InvalidRequest, match="step 'double': is no number"):  # there is no answer at all
        await partial.infer("x")
    with pytest.raises(WeirError, match=r"^step "):
        await both.infer("x")
    await models.stop()


async def test_a_path_that_fails_cancels_the_others() -> None:
    executor = FakeExecutor()  # which never answers
    chain = Chain([Branch({"bad": ["double"], "waits": ["waits"]})], name="chain")
    models = Registry([inline(Double), Service(Negate, name="waits", executor=executor), chain])
    await models.start()
    with pytest.raises(InvalidRequest, match="is no number"):
        await asyncio.wait_for(chain.infer("x"), 60)
    assert len(executor.cancelled) == 1
    await models.stop(0.0)


async def test_a_path_that_fails_has_its_error_beside_the_answers_of_others() -> None:
    split = Chain([Branch({"twice": ["double"], "minus": ["negate"]}, fail_fast=False)], name="split")
    models = registry(split)
    await models.start()
    answer = await split.infer([])
    assert answer["twice"] == []
    assert answer["minus"]["type"] == "ModelError"
    assert answer["minus"]["error"].startswith("step 'negate': predict raised TypeError")
    await models.stop()


async def test_what_a_step_raised_can_be_caught_around_the_chain() -> None:
    chain = Chain(["negate"], name="chain")
    models = registry(chain)
    await models.start()
    with pytest.raises(TypeError, match="step 'negate': predict raised TypeError") as caught:
        await chain.infer([])
    assert isinstance(caught.value, ModelError)
    await models.stop()


async def test_a_switch_without_that_case_goes_the_default_or_refuses() -> None:
    cases = {"d": ["double"], "n": ["negate"]}
    keyed = Chain([Switch("kind", cases, default=["double"])], name="keyed")
    own = Chain([Switch(None, {3: ["double"]}), Switch(lambda item: item > 5, {True: ["negate"]})], name="own")
    models = registry(keyed, own)
    await models.start()
    assert await own.infer(3) == -6
    with pytest.raises(InvalidRequest, match="switch: 4: must be one of 3"):
        await own.infer(4)
    with pytest.raises(InvalidRequest, match="must be one of 3"):
        await own.infer([])
    with pytest.raises(InvalidRequest, match="no 'kind' in the item"):
        await keyed.infer(4)
    with pytest.raises(WeirError, match="step 'double'"):
        await keyed.infer({"kind": "z"})  # which Double cannot double
    await models.stop()


async def test_one_deadline_and_one_cancellation_hold_for_all_steps() -> None:
    slow = FakeExecutor()  # which answers nothing of itself
    late = Service(Negate, name="late", executor=slow)
    chain = Chain(["double", late], name="chain", timeout=0.05)
    models = Registry([inline(Double), late, chain])
    await models.start()
    with pytest.raises(DeadlineExceeded):
        await chain.infer(1)
    call = chain.infer(1, timeout=30.0)
    await turns(20)
    assert late.state()["waiting"] + late.state()["in_flight"] >= 1
    call.cancel()
    await turns(20)
    assert late.state()["waiting"] == 0
    assert chain.state()["in_flight"] == 0
    await models.stop(0.0)


def test_frontends_call_a_chain_as_they_call_a_model() -> None:
    class Asked(RequestBase):
        def finish(self, output: Any, dispatch: Dispatch) -> None:
            got.append(output)

        def fail(self, error: Any) -> None:
            got.append(error)

    got: list[Any] = []

    async def main() -> None:
        chain = Chain(["double", "negate"], name="chain")
        models = registry(chain)
        await models.start()
        for body in (b"3", b"{"):
            chain.submit(Asked(body, chain.now(), 1.0, content_type=JSON, accept=JSON, frontend="http"))
        await turns(20)
        assert sorted(map(type, got), key=str) == [bytes, InvalidRequest]
        assert b"-6" in got
        assert chain.statistics is not models.get("double").statistics
        await models.stop()

    run(main())


def test_what_cannot_be_a_chain_is_refused() -> None:
    async def refused(*chains: Chain) -> str:
        with pytest.raises(SettingsError) as error:
            await registry(*chains).start()
        return error.value.message

    for steps, words in (
        ([], "at least one step"), ("double", "must be a list"), ([3], "is not a step"), ([Branch({})], "at least one path"),
        ([Step("double", inputs={"a": "b"})], "chains that declare tensors"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=words):
            Chain(steps, name="chain")  # type: ignore[arg-type]  # what users may write
    assert "unknown model" in asyncio.run(refused(Chain(["none"], name="a")))
    circle = asyncio.run(refused(Chain(["b"], name="a"), Chain(["double", "a"], name="b")))
    assert "circle" in circle


async def test_a_chain_is_as_ready_as_its_steps() -> None:
    chain = Chain(["double"], name="chain")
    models = registry(chain)
    await models.start()
    assert chain.ready
    models.remove("double")
    assert chain.not_ready_reason == "step 'double' is not ready: not loaded"
    with pytest.raises(ModelNotReady, match="step 'double'"):
        await chain.infer(1)
    await models.stop()


def test_an_error_that_a_step_raises_keeps_its_type() -> None:
    class Lost(Model):
        def predict(self, batch: Any) -> Any:
            return [ModelNotFound("no weights for this language") for _ in batch]

    async def main() -> None:
        chain = Chain(["lost"], name="chain")
        models = Registry([inline(Lost), chain])
        await models.start()
        with pytest.raises(ModelNotFound, match="step 'lost': no weights"):
            await chain.infer(1)
        await models.stop()

    run(main())


class Both(Chain):
    steps = ("double", "negate")


def test_a_program_may_be_given_a_chain_and_a_function() -> None:
    with InProcess(Double, Negate, Both, _increment, executor="thread") as client:
        assert client.infer("both", 4) == -8
        assert client.infer("_increment", 4) == 5


def _increment(batch: list[int]) -> list[int]:
    return [item + 1 for item in batch]


async def test_a_model_that_is_replaced_by_a_chain_is_one_and_the_other_way_round() -> None:
    service = inline(Negate, name="either")
    models = Registry([inline(Double), service])
    await models.start()
    chain = Chain(["double", "double"], name="either")
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
    await models.stop()


class OnlyPositive(Chain):
    """Refuses some of its items in a hook."""

    steps = ("double",)

    async def before_batch(self, batch: list[Any]) -> list[Any]:
        return [InvalidRequest("is negative") if item < 0 else item for item in batch]


async def test_an_item_that_a_hook_answers_does_not_reach_the_steps_and_the_others_keep_their_own_requests() -> None:
    chain = OnlyPositive(name="positive", max_batch_size=8)
    seen: list[int] = []

    class Priorities(SilentObserver):
        def answered(self, model: str, requests: Any, error: WeirError | None, now: float) -> None:
            seen.extend(request.priority for request in requests)

    models = Registry([inline(Double, observers=[Priorities()]), chain])
    await models.start()
    calls = [chain.infer(item, priority=item + 10) for item in (-1, 2, -3, 4)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [answer if isinstance(answer, int) else str(answer) for answer in answers] == [
        "is negative", 4, "is negative", 8,
    ]  # fmt: skip
    assert sorted(seen) == [12, 14]
    await models.stop()
