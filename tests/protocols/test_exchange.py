"""A request from its body to its end, whichever channel it came by: one answer, and several."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, ClassVar

import numpy as np
import pytest
from examples.tensors import Affine
from tests.garbage import no_cycles_of
from tests.streaming_models import Count, Script

from weir.batching.request_state import RequestBase
from weir.catalog.registry import Registry
from weir.errors import Draining, InvalidRequest, ModelNotFound, Overloaded, TooLarge, Unsupported, ValidationFailed
from weir.messages import JSON, MSGPACK, Dispatch, Kind
from weir.model import Measure, Model
from weir.protocols import HttpSettings
from weir.protocols.entries import DEFAULT_SCHEDULE, REFUSED_ENTRY, QueueEntry, Schedule, schedule_of
from weir.protocols.exchange import Exchange, QueuedRequest, StreamPart
from weir.protocols.kserve_metadata import find
from weir.protocols.native import read_head_for
from weir.serving.service import Service
from weir.testing import FakeClock, FakeExecutor, RecordingObserver
from weir.wire.inference import InferenceRequest, InferenceResponse, RequestedOutput, TensorValue


class Pair(Model):
    """Items that must be numbers; each is answered with itself twice."""

    Input: ClassVar[Any] = int
    max_batch_size = 4

    def predict(self, batch: list[int]) -> list[list[int]]:
        return [[x, x] for x in batch]


class Words(Pair):
    """Items of different size."""

    Input: ClassVar[Any] = str

    @classmethod
    def measure(cls, item: Any) -> Measure:
        return Measure(rows=len(item.split()))


def tensor(values: Any, name: str = "x", datatype: str = "FP32") -> TensorValue:
    """Return a tensor for a request."""
    return TensorValue(name, datatype, np.array(values, np.float32))


def items(*documents: bytes) -> TensorValue:
    """Return the tensor that a model of items takes."""
    return TensorValue("input", "BYTES", np.array(documents, object))


def with_service(
    model: type[Model], test: Callable[[Service], Coroutine[Any, Any, None]], **settings: Any
) -> RecordingObserver:
    """Run `test` with a service of `model`; return what its observer has heard."""
    observer = RecordingObserver()

    async def main() -> None:
        async with Service(model, executor="inline", observers=[observer], **settings) as service:
            await asyncio.wait_for(test(service), 60)

    asyncio.run(main())
    return observer


async def infer(
    service: Service, request: InferenceRequest, *, frontend: str, timeout: float | None = None,  # noqa: ASYNC109 - the exchange's
) -> InferenceResponse:  # fmt: skip
    """Return the answer to a request."""
    return await Exchange(service, frontend=frontend, timeout=timeout).infer(request)


def stream(service: Service, request: InferenceRequest, *, frontend: str) -> AsyncGenerator[StreamPart, None]:
    """Yield the answers to a request."""
    return Exchange(service, frontend=frontend).stream(request)


def test_tensors() -> None:
    async def test(service: Service) -> None:
        response = await infer(service, InferenceRequest("affine", [tensor([[1, 0, 0]])], id="7"), frontend="grpc")
        expected = await service.infer({"x": [[1.0, 0.0, 0.0]]})
        assert (response.model, response.version, response.id) == ("affine", "3", "7")
        [output] = response.outputs
        assert (output.name, output.datatype) == ("y", "FP32")
        np.testing.assert_array_equal(output.array, expected["y"])

    with_service(Affine, test, version="3")


def test_a_request_larger_than_a_batch_is_divided() -> None:
    async def test(service: Service) -> None:
        x = np.arange(30, dtype=np.float32).reshape(10, 3)
        response = await infer(service, InferenceRequest("affine", [tensor(x)]), frontend="grpc")
        assert response.outputs[0].array.shape == (10, 2)

    with_service(Affine, test, max_batch_size=4)


def test_items_are_json_documents() -> None:
    async def test(service: Service) -> None:
        response = await infer(service, InferenceRequest("pair", [items(b"1", b" 2", b"3")]), frontend="grpc")
        [output] = response.outputs
        assert (output.name, output.datatype, output.array.tolist()) == (
            "output",
            "BYTES",
            [b"[1,1]", b"[2,2]", b"[3,3]"],
        )

    with_service(Pair, test)


def test_items_that_differ_in_size() -> None:
    async def test(service: Service) -> None:
        response = await infer(
            service, InferenceRequest("words", [items(b'"a b"', b'"c"', b'"d e f"')]), frontend="grpc"
        )
        assert response.outputs[0].array.tolist() == [b'["a b","a b"]', b'["c","c"]', b'["d e f","d e f"]']

    with_service(Words, test)


@pytest.mark.parametrize("model", [Pair, Words])
def test_an_item_that_fails_fails_the_request_and_is_named(model: type[Model]) -> None:
    good = b"1" if model is Pair else b'"a"'

    async def test(service: Service) -> None:
        with pytest.raises(ValidationFailed if model is Pair else InvalidRequest, match=r"tensor 'input'\[1\]: "):
            await infer(service, InferenceRequest("pair", [items(good, b"[]")]), frontend="grpc")

    with_service(model, test)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (InferenceRequest("affine", [tensor([[1, 2, 3]], "z")]), InvalidRequest, "'z'"),
        (InferenceRequest("affine", []), InvalidRequest, "'x': is missing"),
        (InferenceRequest("affine", [tensor([[1, 2, 3]], datatype="FP64")]), InvalidRequest, "'FP64', must be FP32"),
        (InferenceRequest("affine", [tensor([[1, 2]])]), InvalidRequest, r"\[1, 2\]"),
        (InferenceRequest("affine", [tensor(np.zeros((9, 3)))]), TooLarge, "9 rows"),
        (InferenceRequest("affine", [tensor([[1, 2, 3]])], outputs=[RequestedOutput("z", {})]), InvalidRequest, "'z'.*'y'"),
        (
            InferenceRequest("affine", [tensor([[1, 2, 3]])], outputs=[RequestedOutput("y", {})] * 2), InvalidRequest,
            "'y'.*twice",
        ),
        (
            InferenceRequest("affine", [tensor([[1, 2, 3]])], outputs=[RequestedOutput("y", {"classification": 3})]),
            Unsupported, "'classification'=3",
        ),
        (InferenceRequest("affine", [tensor([[1, 2, 3]])], parameters={"priority": -1}), InvalidRequest, "'priority'=-1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_the_observers_hear_of_it(
    request_: InferenceRequest, error: type[Exception], message: str
) -> None:
    async def test(service: Service) -> None:
        with pytest.raises(error, match=message):
            await infer(service, request_, frontend="grpc")

    observer = with_service(Affine, test, max_queue_size=8)
    assert len(observer.refusals) == 1


def test_an_empty_item_is_refused() -> None:
    async def test(service: Service) -> None:
        with pytest.raises(InvalidRequest, match=r"'input'\[1\]: is empty"):
            await infer(service, InferenceRequest("pair", [items(b"1", b"")]), frontend="grpc")

    with_service(Pair, test)


def test_when_one_of_several_is_refused_the_others_are_withdrawn() -> None:
    async def test(service: Service) -> None:
        with pytest.raises(Overloaded):
            await infer(service, InferenceRequest("words", [items(b'"a b"', b'"c d"', b'"e"')]), frontend="grpc")
        assert service.state()["waiting"] == 0

    with_service(Words, test, max_queue_size=3)


async def test_cancelling_withdraws_the_request() -> None:
    clock = FakeClock()
    async with Service(Affine, executor="inline", clock=clock, policy="control-limit:4") as service:
        request = asyncio.ensure_future(
            infer(service, InferenceRequest("affine", [tensor([[1, 2, 3]])]), frontend="grpc")
        )
        await asyncio.sleep(0)
        assert service.state()["waiting"] == 1
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert service.state()["waiting"] == 0


def test_priority_and_timeout() -> None:
    assert schedule_of({}) == schedule_of({"timeout": 0, "priority": 0, "other": "x"}) == DEFAULT_SCHEDULE
    highest, lower = schedule_of({"priority": 1}), schedule_of({"priority": "2"})
    assert highest.priority > lower.priority > DEFAULT_SCHEDULE.priority
    assert schedule_of({"timeout": 250_000}).timeout == pytest.approx(0.25)


@pytest.mark.parametrize(
    "parameters",
    [
        {"priority": 1.5},
        {"priority": True},
        {"priority": "x"},
        {"timeout": -1},
        {"timeout": 1 << 63},
        {"timeout": "9" * 30},
    ],
)
def test_a_schedule_that_cannot_be_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(parameters))}"):
        schedule_of(parameters)


def test_sequences_are_not_offered() -> None:
    with pytest.raises(Unsupported, match="'sequence_id'=7"):
        schedule_of({"sequence_id": 7})


def test_the_shortest_timeout_holds() -> None:
    async def test(service: Service) -> None:
        seen: list[float] = []
        submit = service.submit

        def spy(request: Any, now: float | None = None) -> None:
            seen.append(request.timeout)
            submit(request, now)

        service.submit = spy  # type: ignore[method-assign]  # to see what goes into the line
        sent = InferenceRequest("affine", [tensor([[1, 2, 3]])], parameters={"timeout": 2_000_000})
        for timeout in (None, 1.0, 3.0):
            await infer(service, sent, frontend="grpc", timeout=timeout)
        await infer(service, InferenceRequest("affine", [tensor([[1, 2, 3]])]), frontend="grpc")
        assert seen == [pytest.approx(2.0), 1.0, pytest.approx(2.0), service.facts.settings.timeout]

    with_service(Affine, test)


def entry_of(item: bytes) -> QueueEntry:
    return REFUSED_ENTRY._replace(payload=item, content_type=JSON, accept=JSON)


def test_the_constructor_of_what_is_submitted_sets_what_the_base_sets() -> None:
    entry = QueueEntry(b"3", Kind.ITEMS, JSON, MSGPACK, 2, 3.0, "k", True)
    service = Service(Pair, executor=FakeExecutor(), clock=FakeClock(), timeout=9.0)
    exchange = Exchange(service, frontend="lines")
    for timeout in (None, 2.0):
        request = QueuedRequest(entry, exchange, Schedule(4, timeout), lambda request: None, trace={"traceparent": "a"})
        base = RequestBase(
            b"3", service.now(), timeout or 9.0, kind=Kind.ITEMS, content_type=JSON, accept=MSGPACK, rows=2, cost=3.0, key="k",
            priority=4, large=True, frontend="lines", trace={"traceparent": "a"},
        )  # fmt: skip
        for name in RequestBase.__slots__:
            assert getattr(request, name) == getattr(base, name), name


def test_what_is_submitted_ends_once_with_its_output_or_with_its_error() -> None:
    async def test(service: Service) -> None:
        exchange, ended = Exchange(service, frontend="lines"), asyncio.Queue[QueuedRequest]()
        for item, output, error in ((b"3", b"[3,3]", type(None)), (b'"x"', None, ValidationFailed)):
            request = exchange.submit(entry_of(item), Schedule(0, None), ended.put_nowait)
            assert request.timeout == service.facts.settings.timeout
            assert await ended.get() is request
            assert (request.output, type(request.error)) == (output, error)
        assert ended.empty()

    assert with_service(Pair, test).ends == 2


async def submit_one(service: Service) -> None:
    ended = asyncio.Queue[QueuedRequest]()
    Exchange(service, frontend="lines").submit(entry_of(b'"a b"'), Schedule(0, None), ended.put_nowait)
    assert (await ended.get()).error is None


async def infer_tensors(service: Service) -> None:
    await infer(service, InferenceRequest("words", [items(b'"a b"', b'"c"')]), frontend="grpc")


async def infer_items(service: Service) -> None:
    head = read_head_for(service, HttpSettings(), "POST", "/words", [], batch=True)
    await Exchange(service, frontend="http").infer_items(head, b'["a b", "c"]')


@pytest.mark.parametrize("ask", [submit_one, infer_tensors, infer_items])
def test_what_has_ended_is_freed_without_the_garbage_collector(
    ask: Callable[[Service], Coroutine[Any, Any, None]],
) -> None:
    async def main() -> None:
        async with Service(Words, executor="inline") as service:
            with no_cycles_of(QueuedRequest, Dispatch):
                for _ in range(3):  # the queue may keep the last request
                    await ask(service)
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_is_refused_is_raised_and_has_no_other_end() -> None:
    async def test(service: Service) -> None:
        ended = list[QueuedRequest]()
        await service.drain()
        with pytest.raises(Draining):
            Exchange(service, frontend="lines").submit(entry_of(b"3"), Schedule(0, 1.0), ended.append)
        assert not ended

    with_service(Pair, test)


def test_one_item_is_read_as_its_model_takes_it_and_its_refusal_is_reported() -> None:
    async def test(service: Service) -> None:
        exchange = Exchange(service, frontend="lines")
        assert await exchange.infer_item(b'"a b"') == b'["a b","a b"]'
        with pytest.raises(InvalidRequest):
            await exchange.infer_item(b"7")
        await service.drain()
        with pytest.raises(Draining):
            await exchange.infer_item(b'"a"')

    assert [type(error) for _, _, error in with_service(Words, test).refusals] == [InvalidRequest, Draining]


def test_an_unknown_model_is_named_as_clients_expect() -> None:
    registry = Registry([Service(Affine, version="1"), Service(Pair)])
    assert find(registry, "affine") is find(registry, "affine", "1")
    with pytest.raises(ModelNotFound, match=r"Request for unknown model: 'x' is not found; there are affine, pair"):
        find(registry, "x")
    with pytest.raises(ModelNotFound, match=r"Request for unknown model: 'affine' version '2' is not found"):
        find(registry, "affine", "2")


class Letters(Pair):
    """Texts, answered with their letters."""

    Input: ClassVar[Any] = str
    plain_texts = True

    def predict(self, batch: list[Any]) -> list[Any]:
        return [sorted(set(text)) for text in batch]


def test_elements_for_a_model_of_texts_are_the_texts() -> None:
    async def test(service: Service) -> None:
        response = await infer(service, InferenceRequest("m", [items(b'a"b', "ü".encode())]), frontend="grpc")
        assert response.outputs[0].array.tolist() == [b'["\\"","a","b"]', '["ü"]'.encode()]
        with pytest.raises(InvalidRequest, match=r"'input'\[1\]: must be a text in UTF-8 \(invalid start byte\)"):
            await infer(service, InferenceRequest("m", [items(b"fine", b"\xff")]), frontend="grpc")
        with pytest.raises(InvalidRequest, match=r"'input'\[0\]: is empty, must be a text"):
            await infer(service, InferenceRequest("m", [items(b"")]), frontend="grpc")

    with_service(Letters, test)


def test_several_answers_and_whether_each_is_the_last() -> None:
    async def test(service: Service) -> None:
        request = InferenceRequest("script", [items(b'["a", {"last": "b"}]')], id="7")
        parts = [part async for part in stream(service, request, frontend="grpc")]
        assert [part.response.outputs[0].array.tolist() for part in parts] == [[b'"a"'], [b'"b"']]
        assert [part.last for part in parts] == [False, True]
        assert {part.response.id for part in parts} == {"7"}

    with_service(Script, test)


def test_the_end_may_come_without_a_last_answer() -> None:
    async def test(service: Service) -> None:
        request = InferenceRequest("count", [items(b"2")])
        assert [part.last async for part in stream(service, request, frontend="grpc")] == [False, False]

    with_service(Count, test)


def test_a_model_with_one_answer() -> None:
    async def test(service: Service) -> None:
        request = InferenceRequest("affine", [tensor([[1, 0, 0]])])
        (part,) = [part async for part in stream(service, request, frontend="grpc")]
        assert part.last and part.response.outputs[0].name == "y"

    with_service(Affine, test)


def test_an_error_comes_after_the_answers_before_it() -> None:
    async def test(service: Service) -> None:
        answers = stream(service, InferenceRequest("script", [items(b'[1, {"error": "no"}]')]), frontend="grpc")
        assert (await anext(answers)).response.outputs[0].array.tolist() == [b"1"]
        with pytest.raises(InvalidRequest, match="no"):
            await anext(answers)

    with_service(Script, test)


def test_leaving_ends_the_request() -> None:
    async def test(service: Service) -> None:
        async with aclosing(stream(service, InferenceRequest("count", [items(b"200")]), frontend="grpc")) as answers:
            await anext(answers)
        assert service.state()["waiting"] == 0

    observer = with_service(Count, test)
    assert [type(error).__name__ for _, error, _ in observer.answers] == ["Cancelled"]


def test_a_stream_is_for_one_item() -> None:
    async def test(service: Service) -> None:
        with pytest.raises(InvalidRequest, match="tensor 'input': has 2 items, a stream takes one"):
            await anext(stream(service, InferenceRequest("count", [items(b"1", b"2")]), frontend="grpc"))
        with pytest.raises(Unsupported, match="'count' streams its responses"):
            await infer(service, InferenceRequest("count", [items(b"1")]), frontend="grpc")

    observer = with_service(Count, test)
    assert len(observer.refusals) == 2
