"""ModelInfer and ModelStreamInfer through a real channel: answers, refusals, deadlines, callers who leave, and forms of requests that come again."""

import asyncio
import gc
import random
from typing import Any

import grpc
import numpy as np
import pytest
from tests.frontends.grpc.kit import INFER, Double, Rig, item, make_request, refused, run, serving
from tests.frontends.http.sockets import until
from tests.rings import subcases
from tests.streaming_models import Count, Script

from weir.errors import Cancelled, InvalidRequest, ModelError
from weir.frontends.grpc import inference as forms
from weir.frontends.grpc.inference import FINAL, LONGEST, WANTS_FINAL, Form, Forms, Writing
from weir.messages import OBJECT, Kind
from weir.model import Model, Tensor
from weir.protocols.entries import QueueEntry
from weir.serving.service import Service
from weir.testing import FakeExecutor, RecordingObserver
from weir.wire.inference import InferenceRequest, InferenceResponse, RequestedOutput, TensorValue
from weir.wire.kserve_grpc import (
    ModelInferResponse,
    parse_request,
    raw_at_end,
    read_request,
    read_response,
    read_stream_response,
    write_request,
)

Code = grpc.StatusCode


class Strict(Model):
    """Items that must be numbers; negative ones break it."""

    Input = int

    def predict(self, batch: list[int]) -> list[int]:
        if min(batch) < 0:
            raise RuntimeError("the secret is 42")
        return [x * x for x in batch]


def test_raw_tensors() -> None:
    async def test(rig: Rig) -> None:
        response = await rig.infer(make_request(3, 4, id="7"))
        assert (response.model, response.version, response.id) == ("double", "", "7")
        (output,) = response.outputs
        assert (output.name, output.datatype, output.array.tolist()) == ("y", "INT32", [[6, 8]])

    observer = run(test)
    assert [request.frontend for request in observer.answers[0][0]] == ["grpc"]
    ((model, frontend, received, sent),) = observer.transfers
    assert (model, frontend) == ("double", "grpc") and received > 8 and sent > 8


def test_typed_tensors_are_answered_in_kind() -> None:
    async def test(rig: Rig) -> None:
        given = tensor(contents={"int_contents": [3, -4]})
        answer = await rig.call("ModelInfer", model_name="double", inputs=[given])
        assert list(answer.outputs[0].contents.int_contents) == [6, -8]
        assert not answer.raw_output_contents

    run(test)


def test_items_are_documents_in_a_tensor_of_bytes() -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.infer(item(b"12", "strict"))).outputs[0].array.tolist() == [b"144"]
        text = await refused(rig.infer(item(b'"x"', "strict")))
        assert text[0] is Code.INVALID_ARGUMENT and "tensor 'input'[0]" in text[1]

    run(test, Strict)


async def test_a_request_larger_than_a_batch_is_divided() -> None:
    service = Service(Double, executor="inline", max_queue_size=5000, max_batch_size=64)
    async with serving(service) as rig:
        request = make_request()
        request.inputs[0].array = np.arange(10_000, dtype=np.int32).reshape(5000, 2)
        response = await rig.infer(request)
        np.testing.assert_array_equal(response.outputs[0].array, 2 * request.inputs[0].array)


def tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "INT32", "shape": [1, 2], **fields}


RAW = {"raw_input_contents": [bytes(8)]}


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"inputs": [tensor()], "raw_input_contents": [bytes(7)]}, Code.INVALID_ARGUMENT, "'x': has 7 bytes, INT32"),
        ({"inputs": [tensor(datatype="FP32")], **RAW}, Code.INVALID_ARGUMENT, "'x': has datatype 'FP32', must be INT32"),
        ({"inputs": [tensor(name="z")], **RAW}, Code.INVALID_ARGUMENT, "tensor 'z': not one of 'x'"),
        ({"inputs": [tensor(shape=[2, 1])], **RAW}, Code.INVALID_ARGUMENT, "'x': has shape [2, 1], must be [-1, 2]"),
        ({}, Code.INVALID_ARGUMENT, "tensor 'x': is missing"),
        ({"inputs": [tensor()], **RAW, "outputs": [{"name": "q"}]}, Code.INVALID_ARGUMENT, "output 'q': not one of 'y'"),
        (
            {"inputs": [tensor()], **RAW, "parameters": {"priority": {"string_param": "high"}}},
            Code.INVALID_ARGUMENT, "parameter 'priority'='high': must be an integer",
        ),
        (
            {"inputs": [tensor()], **RAW, "parameters": {"sequence_id": {"int64_param": 3}}},
            Code.UNIMPLEMENTED, "no extension 'sequence'",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name_and_observers_hear(fields: dict[str, Any], code: Any, message: str) -> None:
    async def test(rig: Rig) -> None:
        text = await refused(rig.call("ModelInfer", model_name="double", **fields))
        assert text[0] is code and message in text[1]
        assert (await rig.infer(make_request())).outputs  # the server is unharmed

    observer = run(test)
    assert [(model, frontend) for model, frontend, _ in observer.refusals] == [("double", "grpc")]


def test_models_and_versions_that_there_are_not() -> None:
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.infer(make_request(model="nope")))
        assert code is Code.NOT_FOUND and text.startswith("Request for unknown model: 'nope' is not found")
        code, text = await refused(rig.call("ModelInfer", model_name="double", model_version="9"))
        assert code is Code.NOT_FOUND and "version '9'" in text

    run(test)


def test_a_body_that_is_no_message() -> None:
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.raw(INFER, b"\xff\xff"))
        assert code is Code.INVALID_ARGUMENT and "must be a inference.ModelInferRequest" in text
        code, text = await refused(rig.raw("/inference.GRPCInferenceService/ModelReady", b"\xff\xff"))
        assert code is Code.INVALID_ARGUMENT and "must be a inference.ModelReadyRequest" in text

    run(test)


def test_a_message_over_the_limit_is_refused() -> None:
    async def test(rig: Rig) -> None:
        code, _ = await refused(rig.raw(INFER, bytes(5000)))
        assert code is Code.RESOURCE_EXHAUSTED

    run(test, grpc_max_message_size=4999)


@pytest.mark.parametrize("development", [False, True])
def test_what_the_model_raised_is_for_developers(development: bool) -> None:
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.infer(item(b"-1", "strict")))
        assert code is Code.INTERNAL and ("Traceback" in text) == development

    run(test, Strict, http={"development": development})


def test_an_error_of_ours_says_nothing_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        monkeypatch.setattr(rig.registry, "get", None)
        assert await refused(rig.infer(make_request())) == (Code.INTERNAL, "internal error")

    run(test)


def test_a_streaming_model_is_not_for_unary_calls() -> None:
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.infer(item(b"2", "count")))
        assert code is Code.UNIMPLEMENTED and "'count' streams its responses" in text

    run(test, Count)


def test_a_caller_who_leaves_leaves_the_line() -> None:
    async def test(rig: Rig) -> None:
        service = rig.registry.get("double")
        calls = [rig.raw(INFER, write_request(make_request(index, index))) for index in range(3)]
        heard = next(each for each in service.generation.observers if isinstance(each, RecordingObserver))
        await until(lambda: service.state()["waiting"] + service.state()["in_flight"] == 3)
        for call in calls:
            call.cancel()
        await until(lambda: heard.ends == 3)
        assert service.state()["waiting"] == 0

    observer = run(test, executor=FakeExecutor())
    assert {type(error) for _, error, _ in observer.answers} == {Cancelled}


def test_the_deadline_of_a_call_is_that_of_its_request() -> None:
    async def test(rig: Rig) -> None:
        heard = next(
            each for each in rig.registry.get("double").generation.observers if isinstance(each, RecordingObserver)
        )
        service = rig.registry.get("double")
        call = asyncio.ensure_future(rig.infer(make_request(), timeout=40))
        await until(lambda: service.state()["in_flight"] == 1)
        call.cancel()
        await until(lambda: heard.ends == 1)

    observer = run(test, executor=FakeExecutor())
    (request,) = observer.answers[0][0]
    assert 0 < request.timeout <= 40  # the default is 60


def test_a_call_whose_deadline_passes_says_so() -> None:
    async def test(rig: Rig) -> None:
        code, _ = await refused(rig.infer(make_request(), timeout=0.05))
        assert code is Code.DEADLINE_EXCEEDED

    run(test, executor=FakeExecutor())


def test_a_timeout_can_be_a_parameter_too() -> None:
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.infer(make_request(timeout=50_000)))
        assert code is Code.DEADLINE_EXCEEDED and "timeout of 0.05 s" in text

    run(test, executor=FakeExecutor())


async def test_a_full_line_says_when_to_come_again() -> None:
    service = Service(Double, executor=FakeExecutor(), max_queue_size=1, max_batch_size=1)
    async with serving(service) as rig:
        calls = [rig.raw(INFER, write_request(make_request()))]
        await until(lambda: service.state()["in_flight"] == 1)
        calls.append(rig.raw(INFER, write_request(make_request())))
        await until(lambda: service.state()["waiting"] == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.infer(make_request())
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        trailers: Any = caught.value.trailing_metadata()
        assert int(trailers["grpc-retry-pushback-ms"]) >= 1000
        for call in calls:
            call.cancel()


def test_only_the_requested_outputs() -> None:
    async def test(rig: Rig) -> None:
        request = make_request()
        request.outputs = [RequestedOutput("y", {})]
        answer = ModelInferResponse.FromString(await rig.raw(INFER, write_request(request)))
        assert [output.name for output in answer.outputs] == ["y"]

    run(test)


@pytest.mark.parametrize("name", ["x" * 20_000, "\u00e9%\n" * 7_000])
def test_a_long_message_keeps_its_code(name: str) -> None:
    # Trailers of more than 16 KB are refused by the client: RESOURCE_EXHAUSTED, "Stream removed".
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.infer(make_request(model=name)))
        assert code is Code.NOT_FOUND
        assert text.startswith(f"Request for unknown model: '{name[0]}") and text.endswith("...")

    run(test)


WORK = QueueEntry(None, Kind.TENSORS, OBJECT, OBJECT, 1, 1.0, None, False)


class Both(Model):
    """A tensor model with two inputs and two outputs."""

    inputs = (Tensor("a", "INT32", (-1, -1)), Tensor("b", "FP64", (-1, 2)))
    outputs = (Tensor("sum", "FP64", (-1, 2)), Tensor("b", "FP64", (-1, 2)))

    def predict(self, batch: Any) -> Any:
        return {"sum": batch["a"].sum(axis=1, keepdims=True) + batch["b"], "b": batch["b"]}


def make_request_of_two(
    first: int, model: str = "both", columns: int = 3, outputs: Any = None, **options: Any
) -> InferenceRequest:
    a = np.arange(first, first + columns, dtype=np.int32).reshape(1, columns)
    tensors = [TensorValue("a", "INT32", a), TensorValue("b", "FP64", np.array([[first, 0.5]]))]
    return InferenceRequest(model, tensors, outputs=outputs, **options)


def learned(request: InferenceRequest, service: Any = None) -> Forms:
    """Return a memory that has seen `request` twice."""
    known, body = Forms(), write_request(request)
    service = service or Service(Both, executor="inline")
    for _ in range(2):
        known.learn(body, request, service, WORK)
    known.service = service  # type: ignore[attr-defined]  # which nobody else keeps
    return known


def test_a_request_is_known_from_the_second_on_and_read_as_ever() -> None:
    known, service = Forms(), Service(Both, executor="inline")
    for count in range(2):
        assert known.find(write_request(make_request_of_two(0))) is None, count
        known.learn(write_request(make_request_of_two(count)), make_request_of_two(count), service, WORK)
    body = write_request(make_request_of_two(7))
    form = known.find(body)
    assert form is not None and form.serves(service.facts) and (form.model, form.version) == ("both", "")
    for name, array in form.entry(body).payload.items():
        read = next(each.array for each in make_request_of_two(7).inputs if each.name == name)
        assert (array.dtype, array.tolist(), array.flags.writeable) == (read.dtype, read.tolist(), False)


def test_whatever_is_found_is_read_as_it_is_otherwise() -> None:
    """Every byte of a message is changed, taken away or doubled: either its form is not known, or it says the same."""
    known, body = learned(make_request_of_two(0)), write_request(make_request_of_two(3))
    changed = [body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :] for at in range(len(body)) for bit in range(8)]
    changed += [body[:at] + body[at + 1 :] for at in range(len(body))]
    changed += [body[: at + 1] + body[at:] for at in range(len(body))]
    found = 0
    for each in changed:
        form = known.find(each)
        if form is not None:
            found += 1
            read = read_request(parse_request(each))
            arrays = form.entry(each).payload
            assert [(value.name, value.array.tobytes(), value.array.shape) for value in read.inputs] == [
                (name, array.tobytes(), array.shape) for name, array in arrays.items()
            ]
    assert found >= 8 * (12 + 16)  # every bit of the tensors


def raw(*tensors: bytes) -> bytes:
    return b"".join(b"\x3a" + bytes([len(tensor)]) + tensor for tensor in tensors)


@subcases(
    ("body", "count"),
    [
        (raw(b"1", b"22") + b"\x0a\x01m", 2),  # another field comes last
        (raw(b"1") + b"\x0a\x01m" + raw(b"22"), 2),
        (b"\x0a\x01m" + raw(b"1"), 2),
        (b"\x0a\x01m" + raw(b"1")[:-1], 1),
        (b"\x0a\x01m", 0),
        (b"", 0),
        (b"\x7b" + raw(b"1"), 1),  # a group
        (b"\x0a\x01m" * 64 + raw(b"1"), 1),
        (b"\x38\x05\x0a\x01m", 1),  # the number of the field with another type
    ],
)
def test_messages_of_other_forms_are_not_remembered(body: bytes, count: int) -> None:
    assert not raw_at_end(body, count)


def test_raw_tensors_at_the_end_are_found() -> None:
    assert raw_at_end(b"\x38\x05" + raw(b"1", b"22"), 2) == [(2, 4, 5), (5, 7, 9)]


@subcases(
    "request_",
    [
        make_request_of_two(0, id="mine"),
        make_request_of_two(0, parameters={"priority": 1}),
        make_request_of_two(0, outputs=[RequestedOutput("sum", {"binary_data": True})]),
        make_request_of_two(0, columns=LONGEST),
        InferenceRequest("both", []),
        InferenceRequest("both", [TensorValue("a", "BYTES", np.array([b"1"], object))]),
        InferenceRequest("both", [TensorValue("a", "INT32", np.empty((1, 0), np.int32))]),
        InferenceRequest("both", [TensorValue("a", "INT32", np.ones((1, 1), np.int32), {"p": 1})]),
    ],
)
def test_requests_that_say_more_are_not_remembered(request_: InferenceRequest) -> None:
    assert learned(request_).find(write_request(request_)) is None


def test_a_generation_that_was_replaced_is_not_served_nor_kept() -> None:
    known = learned(make_request_of_two(0))
    form = known.find(write_request(make_request_of_two(0)))
    assert form is not None and not form.serves(Service(Both, executor="inline").facts)
    del known.service  # type: ignore[attr-defined]  # `learned` has set it
    gc.collect()
    assert form._facts() is None


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_MOST_LENGTHS", 8)
    service, known = Service(Both, executor="inline"), Forms()
    for columns in range(1, 40):
        for model in ("a", "bb", "ccc", "dddd", "eeeee", "ffffff"):
            request = make_request_of_two(0, model, columns)
            for _ in range(2):
                known.learn(write_request(request), request, service, WORK)
        assert known.find(write_request(make_request_of_two(1, "ffffff", columns))) is not None
    assert len(known._lengths) <= 8
    assert max(map(len, known._lengths.values())) <= forms._MOST_HEADS


def counting(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each call, whether it was of a known form."""
    known: list[bool] = []
    find = Forms.find

    def counted(self: Forms, body: bytes) -> Form | None:
        form = find(self, body)
        known.append(form is not None)
        return form

    monkeypatch.setattr(Forms, "find", counted)
    return known


@pytest.mark.parametrize("outputs", [None, [RequestedOutput("b", {})]])
def test_answers_are_those_of_other_requests(outputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = counting(monkeypatch)

    async def test(rig: Rig) -> None:
        for first in range(6):
            bodies = []
            for name in ("", "mine"):  # that one is never known
                answer = await rig.raw(INFER, write_request(make_request_of_two(first, outputs=outputs, id=name)))
                read = read_response(answer)
                bodies.append([(each.name, each.datatype, each.array.tolist()) for each in read.outputs])
                assert (read.model, read.version, read.id, read.parameters) == ("both", "", name, {})
            assert bodies[0] == bodies[1]
            assert bodies[0][-1] == ("b", "FP64", [[first, 0.5]])

    observer = run(test, Both)
    assert known == [False, False] * 2 + [True, False] * 4
    assert observer.ends == 12


def test_many_at_once_in_batches_of_processes_and_of_other_shapes() -> None:
    async def test(rig: Rig) -> None:
        rng = random.Random(7)
        pairs = [(rng.randrange(1000), rng.randrange(1, 4)) for _ in range(200)]
        answers = await asyncio.gather(
            *[rig.infer(make_request_of_two(first, columns=columns)) for first, columns in pairs]
        )
        for (first, columns), answer in zip(pairs, answers, strict=True):
            total = float(sum(range(first, first + columns)))
            assert [each.array.tolist() for each in answer.outputs] == [[[total + first, total + 0.5]], [[first, 0.5]]]

    run(test, Both, executor="process")


class Odd(Model):
    """Answers with what the request's number asks for."""

    inputs = (Tensor("x", "INT32", (-1, 2)),)
    outputs = (Tensor("text", "BYTES", (-1,)),)

    def predict(self, batch: Any) -> Any:
        if int(batch["x"].max()) == 13:
            raise ValueError("thirteen")
        return {"text": np.array([str(row).encode() for row in batch["x"].tolist()], object)}


def test_errors_and_texts_of_known_forms() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(4):
            assert (await rig.infer(make_request(1, 2, model="odd"))).outputs[0].array.tolist() == [b"[1, 2]"]
        code, text = await refused(rig.infer(make_request(13, 13, model="odd")))
        assert (code, "thirteen" in text) == (grpc.StatusCode.INTERNAL, True)

    run(test, Odd)


def test_deadlines_of_known_forms() -> None:
    """A call has its own deadline, sooner or later than the model's timeout, whether its message is read or has a known form."""
    timeouts: list[float] = []
    submit = Service.submit

    def noted(self: Service, request: Any, now: float | None = None) -> None:
        timeouts.append(request.timeout)
        submit(self, request, now)

    async def test(rig: Rig) -> None:
        for timeout in (50.0, None, 20.0, None, 20.0, 50.0):
            assert (await rig.infer(make_request(1, 2), timeout=timeout)).outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Service, "submit", noted)
        run(test)
    default = Service(Double, executor="inline").facts.settings.timeout
    assert [timeout == default for timeout in timeouts] == [False, True, False, True, False, False]
    assert all(15.0 < timeout < 21.0 for timeout in (timeouts[2], timeouts[4]))
    assert all(45.0 < timeout < 51.0 for timeout in (timeouts[0], timeouts[5]))


def test_an_answer_that_lacks_an_output_is_the_models_failure() -> None:
    service = Service(Both, executor="inline")
    form = learned(make_request_of_two(0), service).find(write_request(make_request_of_two(0)))
    assert form is not None
    whole = {"sum": np.zeros((1, 2)), "b": np.zeros((1, 2))}
    first, then = form.respond(service, whole), form.respond(service, whole)
    assert isinstance(first, Writing) and first.write() == then
    other = {"sum": np.zeros((1, 2), np.float32), "b": np.zeros((1, 2))}  # as a hook may have left it
    converted = form.respond(service, other)
    assert isinstance(converted, Writing) and converted.write() == then
    with pytest.raises(ModelError, match="output 'b': is missing"):
        form.respond(service, {"sum": np.zeros((1, 2))})
    with pytest.raises(InvalidRequest):
        form.respond(service, InvalidRequest("no"))
    large = {"sum": np.zeros((1000, 2)), "b": np.zeros((1000, 2))}
    assert all(isinstance(form.respond(service, large), Writing) for _ in range(2))  # the bytes take longest


async def test_a_model_that_was_replaced_answers_by_its_own_rules() -> None:
    class Triple(Double):
        def predict(self, batch: Any) -> Any:
            return {"y": 3 * batch["x"]}

    async with serving(Service(Double, executor="inline")) as rig:
        for _ in range(3):
            assert (await rig.infer(make_request(1, 2))).outputs[0].array.tolist() == [[2, 4]]
        other = Service(Triple, executor="inline", name="double")
        await other.start()
        registry = rig.registry
        before, registry.services["double"] = registry.services["double"], other
        try:
            for _ in range(3):
                assert (await rig.infer(make_request(1, 2))).outputs[0].array.tolist() == [[3, 6]]
        finally:
            registry.services["double"] = before
            await other.stop()


async def answers(call: Any, *requests: InferenceRequest) -> list[tuple[str, InferenceResponse]]:
    """Send all requests, and return the error text and the response of each answer until the end."""
    for request in requests:
        await call.write(write_request(request))
    await call.done_writing()
    return [read_stream_response(body) async for body in call]


def test_many_requests_in_one_stream() -> None:
    async def test(rig: Rig) -> None:
        found = await answers(rig.stream(), *[make_request(n, n, id=str(n)) for n in range(50)])
        assert {response.id: response.outputs[0].array.tolist() for _, response in found} == {
            str(n): [[2 * n, 2 * n]] for n in range(50)
        }
        assert all(response.parameters[FINAL] is True and not error for error, response in found)

    assert len(run(test).transfers) == 50


async def test_answers_of_different_models_overtake_each_other() -> None:
    slow = Service(Double, executor=FakeExecutor())
    async with serving(slow, Service(Count, executor="inline")) as rig:
        call = rig.stream()
        await call.write(write_request(make_request(id="slow")))
        await call.write(write_request(item(b"1", "count", id="quick")))
        assert read_stream_response(await call.read())[1].id == "quick"
        call.cancel()


async def test_unary_calls_streams_and_python_share_a_batch() -> None:
    executor = FakeExecutor()
    service = Service(Double, executor=executor, max_batch_size=8)
    async with serving(service) as rig:
        x = np.array([[1, 2]], np.int32)
        calls = [asyncio.ensure_future(rig.infer(make_request()))]
        await until(lambda: bool(executor.pending))  # the worker is busy: the rest waits
        stream = rig.stream()
        await stream.write(write_request(make_request()))
        calls += [asyncio.ensure_future(rig.infer(make_request())), asyncio.ensure_future(service.infer({"x": x}))]
        await until(lambda: service.state()["waiting"] == 3)
        for _ in range(2):
            executor.answer_next(lambda payloads: [{"y": payload["x"]} for payload in payloads])
            await asyncio.sleep(0)
        assert read_stream_response(await stream.read())[1].outputs
        await asyncio.gather(*calls)
        assert [batch["rows"] for batch in service.state()["recent"]] in ([1, 3], [3, 1])
        stream.cancel()


def test_a_streaming_model_gives_several_answers() -> None:
    async def test(rig: Rig) -> None:
        found = await answers(rig.stream(), item(b'["a", {"last": "b"}]', "script", id="7"))
        assert [response.outputs[0].array.tolist() for _, response in found] == [[b'"a"'], [b'"b"']]
        assert [response.parameters[FINAL] for _, response in found] == [False, True]

    run(test, Script)


@pytest.mark.parametrize(("document", "count"), [(b'["a", "b"]', 2), (b'["a", {"last": "b"}]', 1)])
def test_a_final_answer_without_outputs_is_sent_if_no_answer_was_marked_final(document: bytes, count: int) -> None:
    async def test(rig: Rig) -> None:
        found = await answers(rig.stream(), item(document, "script", id="7", **{WANTS_FINAL: True}))
        *others, (_, last) = found
        assert len(others) == count
        assert not any(response.parameters[FINAL] for _, response in others)
        assert (last.id, last.parameters[FINAL]) == ("7", True)
        assert bool(last.outputs) == (b"last" in document)

    run(test, Script)


def test_an_error_is_a_message_and_the_stream_goes_on() -> None:
    async def test(rig: Rig) -> None:
        bad = make_request(model="nope", id="1")
        found = await answers(
            rig.stream(), bad, item(b'["a", {"error": "no"}]', "script", id="2"), make_request(id="3")
        )
        text = [(response.id, error[:26]) for error, response in found]
        assert sorted(text) == [("1", "Request for unknown model:"), ("2", ""), ("2", "no"), ("3", "")]

    run(test, Double, Script)


def test_what_is_no_message_is_an_error_too() -> None:
    async def test(rig: Rig) -> None:
        call = rig.stream()
        await call.write(b"\xff\xff")
        ((error, response),) = await answers(call)
        assert "must be a inference.ModelInferRequest" in error and response.id == ""

    run(test)


def test_who_leaves_a_stream_leaves_the_line() -> None:
    async def test(rig: Rig) -> None:
        service = rig.registry.get("double")
        heard = next(each for each in service.generation.observers if isinstance(each, RecordingObserver))
        call = rig.stream()
        for _ in range(3):
            await call.write(write_request(make_request()))
        await until(lambda: service.state()["waiting"] + service.state()["in_flight"] == 3)
        call.cancel()
        await until(lambda: heard.ends == 3)
        assert service.state()["waiting"] == 0

    observer = run(test, executor=FakeExecutor())
    assert {type(error) for _, error, _ in observer.answers} == {Cancelled}


def test_no_more_than_so_many_requests_are_under_way() -> None:
    async def test(rig: Rig) -> None:
        found = await answers(rig.stream(), *[make_request(id=str(n)) for n in range(20)])
        assert len(found) == 20

    observer = run(test, grpc_stream_requests=2)
    assert max(len(dispatch.requests) for dispatch in observer.dispatches) <= 2


def test_a_draining_server_answers_the_requests_of_a_stream_and_ends_it() -> None:
    async def test(rig: Rig) -> None:
        service = rig.registry.get("double")
        fake: Any = service.executor
        call = rig.stream()
        await call.write(write_request(make_request(id="7")))
        await until(lambda: bool(fake.pending))
        rig.server.refuse()
        draining = asyncio.ensure_future(rig.drain(10))
        fake.answer_next(lambda payloads: [{"y": payloads[0]["x"]}])
        assert read_stream_response(await call.read())[1].id == "7"
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await draining

    run(test, executor=FakeExecutor())


def test_a_stream_without_requests_just_ends() -> None:
    async def test(rig: Rig) -> None:
        call = rig.stream()
        assert await answers(call) == []
        assert await call.code() is grpc.StatusCode.OK

    run(test)


def test_who_leaves_amid_the_answers_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def test(rig: Rig) -> None:
        heard = next(
            each for each in rig.registry.get("count").generation.observers if isinstance(each, RecordingObserver)
        )
        for _ in range(10):
            call = rig.stream()
            for _ in range(5):
                await call.write(write_request(item(b"50", "count")))
            await call.read()
            call.cancel()
        await until(lambda: not rig.registry.get("count").state()["waiting"] and heard.ends >= 10)

    run(test, Count)
    assert [record for record in caplog.records if record.name == "weir.grpc"] == []
