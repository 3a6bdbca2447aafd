"""A request from its body to its end, whichever channel it came by: one answer, and several."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from examples.tensors import Affine
from tests.fakes import RecordingObserver
from tests.garbage import no_cycles_of
from tests.rings import subcases
from tests.streaming_models import Count, Script
from tests.waiting import until

from weir.catalog.registry import Registry
from weir.errors import (
    Draining,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    Overloaded,
    TooLarge,
    Unsupported,
    ValidationFailed,
)
from weir.messages import JSON, Dispatch
from weir.model import Measure, Model
from weir.protocols import HttpSettings
from weir.protocols.data_plane import find
from weir.protocols.entries import DEFAULT_SCHEDULE, QueueEntry, schedule_of
from weir.protocols.exchange import Exchange, Gathering, QueuedRequest, StreamPart, end_of
from weir.protocols.native import read_head_for
from weir.serving.service import Service
from weir.testing import FakeClock, FakeExecutor
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


class Letters(Pair):
    """Texts, answered with their letters."""

    Input: ClassVar[Any] = str
    plain_texts = True

    def predict(self, batch: list[Any]) -> list[Any]:
        return [sorted(set(text)) for text in batch]


def tensor(values: Any, name: str = "x", datatype: str = "FP32") -> TensorValue:
    """Return a tensor for a request."""
    return TensorValue(name, datatype, np.array(values, np.float32))


def items(*documents: bytes) -> TensorValue:
    """Return the tensor that a model of items takes."""
    return TensorValue("input", "BYTES", np.array(documents, object))


@asynccontextmanager
async def serving(model: type[Model], **settings: Any) -> AsyncIterator[tuple[Service, RecordingObserver]]:
    """Give a service of `model`, and what its observer hears."""
    observer = RecordingObserver()
    async with Service(model, **{"executor": "inline", "observers": [observer], **settings}) as service:
        yield service, observer


async def infer(
    service: Service, *tensors: TensorValue, timeout: float | None = None,  # noqa: ASYNC109 - the exchange's
    **more: Any,
) -> InferenceResponse:  # fmt: skip
    """Return the answer to a request for its model with these tensors."""
    request = InferenceRequest(service.facts.name, [*tensors], **more)
    return await Exchange(service, frontend="grpc", timeout=timeout).infer(request)


def stream(service: Service, *documents: bytes, **more: Any) -> AsyncGenerator[StreamPart, None]:
    """Yield the answers to a request with these items."""
    return Exchange(service, frontend="grpc").stream(InferenceRequest(service.facts.name, [items(*documents)], **more))


async def test_tensors() -> None:
    """Of more rows than a batch has, too."""
    async with serving(Affine, version="3", max_batch_size=4) as (service, _):
        x = np.arange(30, dtype=np.float32).reshape(10, 3)
        response = await infer(service, tensor(x), id="7")
        assert (response.model, response.version, response.id) == ("affine", "3", "7")
        [output] = response.outputs
        assert (output.name, output.datatype) == ("y", "FP32")
        np.testing.assert_array_equal(output.array, (await service.infer({"x": x.tolist()}))["y"])


@subcases(
    ("model", "documents", "answers"),
    [
        (Pair, (b"1", b" 2", b"3"), [b"[1,1]", b"[2,2]", b"[3,3]"]),
        (Words, (b'"a b"', b'"c"', b'"d e f"'), [b'["a b","a b"]', b'["c","c"]', b'["d e f","d e f"]']),  # of different sizes
    ],
)  # fmt: skip
async def test_items_are_json_documents(model: type[Model], documents: tuple[bytes, ...], answers: list[bytes]) -> None:
    async with serving(model) as (service, _):
        [output] = (await infer(service, items(*documents))).outputs
        assert (output.name, output.datatype, output.array.tolist()) == ("output", "BYTES", answers)


ROW = tensor([[1, 2, 3]])


@subcases(
    ("model", "tensors", "more", "error", "message"),
    [
        (Affine, [tensor([[1, 2, 3]], "z")], {}, InvalidRequest, "'z'"),
        (Affine, [], {}, InvalidRequest, "'x': is missing"),
        (Affine, [tensor([[1, 2, 3]], datatype="FP64")], {}, InvalidRequest, "'FP64', must be FP32"),
        (Affine, [tensor([[1, 2]])], {}, InvalidRequest, r"\[1, 2\]"),
        (Affine, [tensor(np.zeros((9, 3)))], {}, TooLarge, "9 rows"),
        (Affine, [ROW], {"outputs": [RequestedOutput("z", {})]}, InvalidRequest, "'z'.*'y'"),
        (Affine, [ROW], {"outputs": [RequestedOutput("y", {})] * 2}, InvalidRequest, "'y'.*twice"),
        (Affine, [ROW], {"outputs": [RequestedOutput("y", {"classification": 3})]}, Unsupported, "'classification'=3"),
        (Affine, [ROW], {"parameters": {"priority": -1}}, InvalidRequest, "'priority'=-1"),
        (Pair, [ROW], {}, InvalidRequest, r"tensors \[\('x', 'FP32'\)\]: model 'pair' takes items: send one tensor 'input' of BYTES"),
        (Pair, [items(b"1", b"")], {}, InvalidRequest, r"'input'\[1\]: is empty"),
        (Pair, [items(b"1", b"[]")], {}, ValidationFailed, r"tensor 'input'\[1\]: "),
        (Words, [items(b'"a"', b"[]")], {}, InvalidRequest, r"tensor 'input'\[1\]: "),
        (Count, [items(b"1")], {}, Unsupported, "'count' streams its responses"),
        (Letters, [items(b"fine", b"\xff")], {}, InvalidRequest, r"'input'\[1\]: must be a text in UTF-8 \(invalid start byte\)"),
        (Letters, [items(b"")], {}, InvalidRequest, r"'input'\[0\]: is empty, must be a text"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named_and_the_observers_hear_of_it(
    model: type[Model], tensors: list[TensorValue], more: Any, error: type[Exception], message: str
) -> None:
    async with serving(model, max_queue_size=8) as (service, observer):
        with pytest.raises(error, match=message):
            await infer(service, *tensors, **more)
    assert len(observer.refusals) == (error is not ValidationFailed)


async def test_when_one_of_several_is_refused_the_others_are_withdrawn() -> None:
    async with serving(Words, max_queue_size=3) as (service, _):
        with pytest.raises(Overloaded):
            await infer(service, items(b'"a b"', b'"c d"', b'"e"'))
        assert service.state()["waiting"] == 0


async def test_cancelling_withdraws_the_request() -> None:
    async with serving(Affine, clock=FakeClock(), policy="control-limit:4") as (service, _):
        request = asyncio.ensure_future(infer(service, ROW))
        await asyncio.sleep(0)
        assert service.state()["waiting"] == 1
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert service.state()["waiting"] == 0


class Payload(list[int]):
    """What something may refer to weakly."""


async def test_a_payload_is_freed_while_others_of_its_request_wait() -> None:
    executor = FakeExecutor()
    async with serving(Pair, executor=executor, max_batch_size=1) as (service, _):
        exchange, payloads = Exchange(service, frontend="lines"), [Payload(), Payload()]
        gone = [weakref.ref(each) for each in payloads]
        entries: list[Any] = [QueueEntry(exchange.form(), each) for each in payloads]
        gathered = asyncio.ensure_future(end_of(partial(Gathering(exchange, alone=True).begin, entries)))
        payloads.clear()
        for under_way in (1, 0):
            await until(lambda: bool(executor.pending))
            executor.respond_next(lambda batch: [b"1"])
            executor.batches.clear()
            assert [each() is None for each in gone] == [True, not under_way]
        assert [request.output for request in await gathered] == [b"1", b"1"]


def test_priority_and_timeout() -> None:
    assert schedule_of({}) == schedule_of({"timeout": 0, "priority": 0, "other": "x"}) == DEFAULT_SCHEDULE
    highest, lower = schedule_of({"priority": 1}), schedule_of({"priority": "2"})
    assert highest.priority > lower.priority > DEFAULT_SCHEDULE.priority
    assert schedule_of({"timeout": 250_000}).timeout == pytest.approx(0.25)
    wrong: dict[str, tuple[Any, ...]] = {"priority": (1.5, True, "x"), "timeout": (-1, 1 << 63, "9" * 30)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InvalidRequest, match=name):
                schedule_of({name: value})
    with pytest.raises(Unsupported, match="'sequence_id'=7"):
        schedule_of({"sequence_id": 7})


async def test_the_shortest_timeout_holds() -> None:
    async with serving(Affine) as (service, _):
        seen: list[float] = []
        submit = service.submit

        def spy(request: Any, now: float | None = None) -> None:
            seen.append(request.form.timeout)
            submit(request, now)

        service.submit = spy  # type: ignore[method-assign]  # to see what goes into the line
        for timeout in (None, 1.0, 3.0):
            await infer(service, ROW, parameters={"timeout": 2_000_000}, timeout=timeout)
        await infer(service, ROW)
        assert seen == [pytest.approx(2.0), 1.0, pytest.approx(2.0), service.facts.settings.timeout]


def entry_of(exchange: Exchange, item: bytes) -> QueueEntry:
    return QueueEntry(exchange.form(content_type=JSON, accept=JSON), item)


async def test_what_is_submitted_ends_once_with_its_output_or_with_its_error() -> None:
    async with serving(Pair) as (service, observer):
        exchange, ended = Exchange(service, frontend="lines"), asyncio.Queue[QueuedRequest]()
        for item, output, error in ((b"3", b"[3,3]", type(None)), (b'"x"', None, ValidationFailed)):
            request = exchange.submit(entry_of(exchange, item), ended.put_nowait)
            assert request.form.timeout == service.facts.settings.timeout
            assert await ended.get() is request
            assert (request.output, type(request.error)) == (output, error)
        await service.drain()
        with pytest.raises(Draining):
            exchange.submit(entry_of(exchange, b"3"), ended.put_nowait)
        assert ended.empty()
    assert observer.ends == 2


async def submit_one(service: Service) -> None:
    ended = asyncio.Queue[QueuedRequest]()
    exchange = Exchange(service, frontend="lines")
    exchange.submit(entry_of(exchange, b'"a b"'), ended.put_nowait)
    assert (await ended.get()).error is None


async def infer_tensors(service: Service) -> None:
    await infer(service, items(b'"a b"', b'"c"'))


async def infer_items(service: Service) -> None:
    head = read_head_for(service, HttpSettings(), "POST", "/words", [], batch=True)
    await Exchange(service, frontend="http").infer_items(head, b'["a b", "c"]')


@pytest.mark.parametrize("ask", [submit_one, infer_tensors, infer_items])
async def test_what_has_ended_is_freed_without_the_garbage_collector(
    ask: Callable[[Service], Coroutine[Any, Any, None]],
) -> None:
    async with Service(Words, executor="inline") as service:
        with no_cycles_of(QueuedRequest, Dispatch):
            for _ in range(3):  # the queue may keep the last request
                await ask(service)
            await asyncio.sleep(0)


async def test_one_item_is_read_as_its_model_takes_it_and_refusals_are_reported() -> None:
    async with serving(Words) as (service, observer):
        exchange = Exchange(service, frontend="lines")
        assert await exchange.infer_item(b'"a b"') == b'["a b","a b"]'
        with pytest.raises(InvalidRequest):
            await exchange.infer_item(b"7")
        await service.drain()
        with pytest.raises(Draining):
            await exchange.infer_item(b'"a"')
    assert [type(error) for _, _, error in observer.refusals] == [InvalidRequest, Draining]


async def test_an_error_after_the_response_is_no_second_end() -> None:
    async with serving(Words) as (service, observer):
        exchange = Exchange(service, frontend="lines")
        assert await exchange.infer_item(b'"a"')
        late, broken = Overloaded("no room"), ModelError("no JSON")
        for error, whole in ((late, True), (broken, True), (InvalidRequest("one of a list"), False)):
            assert exchange.refused(error, whole=whole).reported
    assert observer.kinds == {"": 1, "InvalidRequest": 1}
    assert observer.failures == [("words", [broken])]


def test_an_unknown_model_is_named_as_clients_expect() -> None:
    registry = Registry([Service(Affine, version="1"), Service(Pair)])
    assert find(registry, "affine") is find(registry, "affine", "1")
    with pytest.raises(ModelNotFound, match=r"Request for unknown model: 'x' is not found; there are affine, pair"):
        find(registry, "x")
    with pytest.raises(ModelNotFound, match=r"Request for unknown model: 'affine' version '2' is not found"):
        find(registry, "affine", "2")


async def test_elements_for_a_model_of_texts_are_the_texts() -> None:
    async with serving(Letters) as (service, _):
        response = await infer(service, items(b'a"b', "ü".encode()))
        assert response.outputs[0].array.tolist() == [b'["\\"","a","b"]', '["ü"]'.encode()]


@subcases(
    ("model", "document", "parts"),
    [
        (Script, b'["a", {"last": "b"}]', [(b'"a"', False), (b'"b"', True)]),
        (Count, b"2", [(b"1", False), (b"2", False)]),  # the end may come without a last answer
        (Pair, b"2", [(b"[2,2]", True)]),  # a model with one answer
    ],
)
async def test_several_answers_and_whether_each_is_the_last(
    model: type[Model], document: bytes, parts: list[tuple[bytes, bool]]
) -> None:
    async with serving(model) as (service, _):
        found = [part async for part in stream(service, document, id="7")]
        assert [(part.response.outputs[0].array.tolist(), part.last) for part in found] == [
            ([answer], last) for answer, last in parts
        ]
        assert {part.response.id for part in found} == {"7"}


async def test_an_error_comes_after_the_answers_before_it() -> None:
    async with serving(Script) as (service, _):
        answers = stream(service, b'[1, {"error": "no"}]')
        assert (await anext(answers)).response.outputs[0].array.tolist() == [b"1"]
        with pytest.raises(InvalidRequest, match="no"):
            await anext(answers)


async def test_leaving_ends_the_request_and_a_stream_is_for_one_item() -> None:
    async with serving(Count) as (service, observer):
        async with aclosing(stream(service, b"200")) as answers:
            await anext(answers)
        assert service.state()["waiting"] == 0
        with pytest.raises(InvalidRequest, match="tensor 'input': has 2 items, a stream takes one"):
            await anext(stream(service, b"1", b"2"))
    assert [type(error).__name__ for _, error, _ in observer.responses] == ["Cancelled"]
    assert len(observer.refusals) == 1
