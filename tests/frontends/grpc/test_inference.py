"""ModelInfer and ModelStreamInfer through a real channel: answers, refusals, deadlines, callers who leave, and forms of requests that come again."""

import asyncio
import gc
import random
import weakref
from typing import Any

import grpc
import numpy as np
import pytest
from tests.frontends.grpc.kit import INFER, Double, item, make_request, refuses, serving
from tests.rings import subcases
from tests.streaming_models import Count, Script
from tests.waiting import until

from weir.errors import Cancelled, ModelError
from weir.frontends.grpc import inference as forms
from weir.frontends.grpc.inference import FINAL, LONGEST, WANTS_FINAL, MessageLayout, MessageLayouts
from weir.messages import Form, Kind
from weir.model import Model, Tensor
from weir.protocols.call import Writing
from weir.protocols.entries import QueueEntry
from weir.serving.service import Service
from weir.testing import FakeExecutor
from weir.wire.inference import InferenceRequest, InferenceResponse, RequestedOutput, TensorValue
from weir.wire.kserve_grpc import (
    ModelInferRequest,
    parse_request,
    raw_at_end,
    read_request,
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


async def test_raw_tensors() -> None:
    async with serving() as rig:
        response = await rig.infer(make_request(3, 4, id="7"))
        (output,) = response.outputs
        assert (response.model, response.version, response.id) == ("double", "", "7")
        assert (output.name, output.datatype, output.array.tolist()) == ("y", "INT32", [[6, 8]])
    assert [request.form.frontend for request in rig.observer.responses[0][0]] == ["grpc"]
    ((model, frontend, received, sent),) = rig.observer.transfers
    assert (model, frontend) == ("double", "grpc") and received > 8 and sent > 8


async def test_typed_tensors_are_answered_in_kind_and_items_are_documents() -> None:
    async with serving(Double, Strict) as rig:
        answer = await rig.call("ModelInfer", model_name="double", inputs=[tensor(contents={"int_contents": [3, -4]})])
        assert list(answer.outputs[0].contents.int_contents) == [6, -8]
        assert not answer.raw_output_contents
        assert (await rig.infer(item(b"12", "strict"))).outputs[0].array.tolist() == [b"144"]


def tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "INT32", "shape": [1, 2], **fields}


def message(model_name: str = "double", **fields: Any) -> bytes:
    """Return a message with these fields, and a tensor if none of them says otherwise."""
    given = {"inputs": [tensor()], "raw_input_contents": [bytes(8)], **fields}
    return bytes(ModelInferRequest(model_name=model_name, **given).SerializeToString())


# What is sent, and where if not to ModelInfer; the code and the text of its error. Of the first ones the observers of `double` hear.
HEARD: list[tuple[str, bytes, Code, str]] = [
    (INFER, message(raw_input_contents=[bytes(7)]), Code.INVALID_ARGUMENT, "'x': has 7 bytes, INT32"),
    (INFER, message(inputs=[tensor(datatype="FP32")]), Code.INVALID_ARGUMENT, "'x': has datatype 'FP32', must be INT32"),
    (INFER, message(inputs=[], raw_input_contents=[]), Code.INVALID_ARGUMENT, "tensor 'x': is missing"),
    (INFER, message(outputs=[{"name": "q"}]), Code.INVALID_ARGUMENT, "output 'q': not one of 'y'"),
    (INFER, message(parameters={"priority": {"string_param": "high"}}), Code.INVALID_ARGUMENT, "'priority'='high': must be an integer"),
    (INFER, message(parameters={"sequence_id": {"int64_param": 3}}), Code.UNIMPLEMENTED, "no extension 'sequence'"),
]  # fmt: skip
REFUSED = [
    *HEARD,
    (INFER, message("nope"), Code.NOT_FOUND, "^Request for unknown model: 'nope' is not found"),
    (INFER, message(model_version="9"), Code.NOT_FOUND, "version '9'"),
    (INFER, b"\xff\xff", Code.INVALID_ARGUMENT, "must be a inference.ModelInferRequest"),
    ("/inference.GRPCInferenceService/ModelReady", b"\xff\xff", Code.INVALID_ARGUMENT, "must be a inference.ModelReadyRequest"),
    ("/inference.GRPCInferenceService/Nothing", b"", Code.UNIMPLEMENTED, ""),
    (INFER, bytes(50_000), Code.RESOURCE_EXHAUSTED, "larger than max"),
    (INFER, write_request(item(b"2", "count")), Code.UNIMPLEMENTED, "'count' streams its responses"),
    (INFER, write_request(item(b'"x"', "strict")), Code.INVALID_ARGUMENT, r"tensor 'input'\[0\]"),
    # Trailers of more than 16 KB are refused by the client: RESOURCE_EXHAUSTED, "Stream removed".
    (INFER, message("x" * 20_000), Code.NOT_FOUND, r"^Request for unknown model: 'x.*\.\.\.$"),
    (INFER, message("\u00e9%\n" * 7_000), Code.NOT_FOUND, "^Request for unknown model: '\u00e9.*\\.\\.\\.$"),
]  # fmt: skip


async def test_what_is_wrong_is_refused_by_name_and_harms_no_other_call() -> None:
    async with serving(Double, Strict, Count, grpc_max_message_size=49_999) as rig:
        for path, body, code, text in REFUSED:
            await refuses(rig.raw(path, body), code, text)
            assert (await rig.infer(make_request())).outputs
    heard = [frontend for model, frontend, _ in rig.observer.refusals if model == "double"]
    assert heard == ["grpc"] * len(HEARD)


@pytest.mark.parametrize("development", [False, True])
async def test_what_the_model_raised_is_for_developers(development: bool) -> None:
    async with serving(Strict, http={"development": development}) as rig:
        text = "Traceback" if development else "^((?!Traceback).)*$"
        await refuses(rig.infer(item(b"-1", "strict")), Code.INTERNAL, text)


async def test_an_error_of_ours_says_nothing_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as rig:
        monkeypatch.setattr(rig.context.registry, "get", None)
        await refuses(rig.infer(make_request()), Code.INTERNAL, "^internal error$")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_caller_who_leaves_leaves_the_line(streams: bool) -> None:
    async with serving(executor=FakeExecutor()) as rig:
        bodies = [write_request(make_request(index, index)) for index in range(3)]
        calls = [rig.stream()] if streams else [rig.raw(INFER, body) for body in bodies]
        for body in bodies if streams else ():
            await calls[0].write(body)
        await until(lambda: rig.under_way == 3)
        for call in calls:
            call.cancel()
        await until(lambda: rig.observer.ends == 3)
        assert rig.service.state()["waiting"] == 0
        assert {type(error) for _, error, _ in rig.observer.responses} == {Cancelled}


async def test_a_deadline_that_passes_is_said_also_if_it_is_a_parameter() -> None:
    async with serving(executor=FakeExecutor()) as rig:
        await refuses(rig.infer(make_request(), timeout=0.05), Code.DEADLINE_EXCEEDED)
        await refuses(rig.infer(make_request(timeout=50_000)), Code.DEADLINE_EXCEEDED, "timeout of 0.05 s")


async def test_a_full_line_says_when_to_come_again() -> None:
    async with serving(Service(Double, executor=FakeExecutor(), max_queue_size=1, max_batch_size=1)) as rig:
        calls = []
        for count in (1, 2):
            calls.append(rig.raw(INFER, write_request(make_request())))
            await until(lambda count=count: rig.under_way == count)  # type: ignore[misc]  # bound at once
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.infer(make_request())
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        trailers: Any = caught.value.trailing_metadata()
        assert int(trailers["grpc-retry-pushback-ms"]) >= 1000
        for call in calls:
            call.cancel()


WORK = QueueEntry(Form(30.0, Kind.TENSORS), None)


class Both(Model):
    """A tensor model with two inputs and two outputs."""

    inputs = (Tensor("a", "INT32", (-1, -1)), Tensor("b", "FP64", (-1, 2)))
    outputs = (Tensor("sum", "FP64", (-1, 2)), Tensor("b", "FP64", (-1, 2)))

    def predict(self, batch: Any) -> Any:
        return {"sum": batch["a"].sum(axis=1, keepdims=True) + batch["b"], "b": batch["b"]}


def make_request_of_two(first: int, model: str = "both", columns: int = 3, **options: Any) -> InferenceRequest:
    a = np.arange(first, first + columns, dtype=np.int32).reshape(1, columns)
    tensors = [TensorValue("a", "INT32", a), TensorValue("b", "FP64", np.array([[first, 0.5]]))]
    return InferenceRequest(model, tensors, **options)


def learn(known: MessageLayouts, request: InferenceRequest, service: Service) -> None:
    """Have `known` learn the form of `request`, which it does from the second one on."""
    for _ in range(2):
        assert known.find(write_request(request)) is None
        known.learn(write_request(request), request, service, WORK)


def test_whatever_is_found_is_read_as_it_is_otherwise() -> None:
    """Every byte of a message is changed, taken away or doubled: either its form is not known, or it says the same."""
    known, body = MessageLayouts(), write_request(make_request_of_two(3))
    learn(known, make_request_of_two(0), Service(Both, executor="inline"))
    changed = [body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :] for at in range(len(body)) for bit in range(8)]
    changed += [body[:at] + body[at + 1 :] for at in range(len(body))]
    changed += [body[: at + 1] + body[at:] for at in range(len(body))]
    found = [(form, each) for each in changed if (form := known.find(each)) is not None]
    assert len(found) >= 8 * (12 + 16)  # every bit of the tensors
    for form, each in found:
        read, arrays = read_request(parse_request(each)).inputs, form.entry(each, 1.0, "").payload
        assert [(value.name, value.array.dtype, value.array.tobytes(), value.array.shape) for value in read] == [
            (name, array.dtype, array.tobytes(), array.shape) for name, array in arrays.items()
        ]
        assert not any(array.flags.writeable for array in arrays.values())


def raw(*tensors: bytes) -> bytes:
    return b"".join(b"\x3a" + bytes([len(tensor)]) + tensor for tensor in tensors)


@subcases(
    ("body", "count"),
    [
        (raw(b"1", b"22") + b"\x0a\x01m", 2),  # another field comes last
        (raw(b"1") + b"\x0a\x01m" + raw(b"22"), 2), (b"\x0a\x01m" + raw(b"1"), 2), (b"\x0a\x01m" + raw(b"1")[:-1], 1),
        (b"\x0a\x01m", 0), (b"", 0), (b"\x7b" + raw(b"1"), 1),  # the latter is a group
        (b"\x0a\x01m" * 64 + raw(b"1"), 1), (b"\x38\x05\x0a\x01m", 1),  # the latter is the number of the field with another type
    ],
)  # fmt: skip
def test_messages_of_other_forms_are_not_remembered(body: bytes, count: int) -> None:
    assert not raw_at_end(body, count)
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
    known = MessageLayouts()
    learn(known, request_, Service(Both, executor="inline"))
    assert known.find(write_request(request_)) is None


def test_a_generation_that_was_replaced_is_not_kept() -> None:
    known, service = MessageLayouts(), Service(Both, executor="inline")
    learn(known, make_request_of_two(0), service)
    gone = weakref.ref(service.facts)
    del service
    gc.collect()
    assert gone() is None


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_MOST_LENGTHS", 8)
    service, known = Service(Both, executor="inline"), MessageLayouts()
    for columns in range(1, 40):
        for model in ("a", "bb", "ccc", "dddd", "eeeee", "ffffff"):
            learn(known, make_request_of_two(0, model, columns), service)
        assert known.find(write_request(make_request_of_two(1, "ffffff", columns))) is not None
    assert len(known._lengths) <= 8
    assert max(map(len, known._lengths.values())) <= forms._MOST_HEADS


@pytest.mark.parametrize("outputs", [None, [RequestedOutput("b", {})]])
async def test_answers_are_those_of_other_requests(outputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[bool] = []  # of each call, whether its form was known
    find = MessageLayouts.find

    def noted(self: MessageLayouts, body: bytes) -> MessageLayout | None:
        form = find(self, body)
        known.append(form is not None)
        return form

    monkeypatch.setattr(MessageLayouts, "find", noted)
    async with serving(Both) as rig:
        for first in range(6):
            bodies = []
            for name in ("", "mine"):  # that one is never known
                read = await rig.infer(make_request_of_two(first, outputs=outputs, id=name))
                bodies.append([(each.name, each.datatype, each.array.tolist()) for each in read.outputs])
                assert (read.model, read.version, read.id, read.parameters) == ("both", "", name, {})
            assert bodies[0] == bodies[1]
            assert bodies[0][-1] == ("b", "FP64", [[first, 0.5]])
            assert len(bodies[0]) == (2 if outputs is None else 1)
    assert known == [False, False] * 2 + [True, False] * 4
    assert rig.observer.ends == 12


async def test_many_at_once_in_batches_of_processes_and_of_other_shapes() -> None:
    rng = random.Random(7)
    pairs = [(rng.randrange(1000), rng.randrange(1, 4)) for _ in range(200)]
    async with serving(Both, executor="process") as rig:
        found = await asyncio.gather(
            *[rig.infer(make_request_of_two(first, columns=columns)) for first, columns in pairs]
        )
    for (first, columns), answer in zip(pairs, found, strict=True):
        total = float(sum(range(first, first + columns)))
        assert [each.array.tolist() for each in answer.outputs] == [[[total + first, total + 0.5]], [[first, 0.5]]]


class Odd(Model):
    """Answers with what the request's number asks for."""

    inputs = (Tensor("x", "INT32", (-1, 2)),)
    outputs = (Tensor("text", "BYTES", (-1,)),)

    def predict(self, batch: Any) -> Any:
        if int(batch["x"].max()) == 13:
            raise ValueError("thirteen")
        return {"text": np.array([str(row).encode() for row in batch["x"].tolist()], object)}


async def test_errors_and_texts_of_known_forms() -> None:
    async with serving(Odd) as rig:
        for _ in range(4):
            assert (await rig.infer(make_request(1, 2, model="odd"))).outputs[0].array.tolist() == [b"[1, 2]"]
        await refuses(rig.infer(make_request(13, 13, model="odd")), Code.INTERNAL, "thirteen")


async def test_deadlines_of_known_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has its own deadline, sooner or later than the model's timeout, whether its message is read or has a known form."""
    timeouts: list[float] = []
    submit = Service.submit

    def noted(self: Service, request: Any, now: float | None = None) -> None:
        timeouts.append(request.form.timeout)
        submit(self, request, now)

    monkeypatch.setattr(Service, "submit", noted)
    async with serving() as rig:
        for timeout in (50.0, None, 20.0, None, 20.0, 50.0):
            assert (await rig.infer(make_request(1, 2), timeout=timeout)).outputs
    default = rig.service.facts.settings.timeout
    assert [round(timeout, 2) for timeout in timeouts] == timeouts  # whole hundredths, so that forms are alike
    assert [timeout == default for timeout in timeouts] == [False, True, False, True, False, False]
    assert all(15.0 < timeout < 21.0 for timeout in (timeouts[2], timeouts[4]))
    assert all(45.0 < timeout < 51.0 for timeout in (timeouts[0], timeouts[5]))


def test_an_answer_that_lacks_an_output_is_the_models_failure() -> None:
    known, service = MessageLayouts(), Service(Both, executor="inline")
    learn(known, make_request_of_two(0), service)
    form: Any = known.find(write_request(make_request_of_two(0)))
    whole = {"sum": np.zeros((1, 2)), "b": np.zeros((1, 2))}
    first, then = form.respond(service, whole), form.respond(service, whole)
    other = form.respond(service, {**whole, "sum": np.zeros((1, 2), np.float32)})  # as a hook may have left it
    assert isinstance(first, Writing) and isinstance(other, Writing) and first.write() == then == other.write()
    with pytest.raises(ModelError, match="output 'b': is missing"):
        form.respond(service, {"sum": np.zeros((1, 2))})
    large = {"sum": np.zeros((1000, 2)), "b": np.zeros((1000, 2))}
    assert all(isinstance(form.respond(service, large), Writing) for _ in range(2))  # the bytes take longest


async def test_a_model_that_was_replaced_answers_by_its_own_rules() -> None:
    class Triple(Double):
        def predict(self, batch: Any) -> Any:
            return {"y": 3 * batch["x"]}

    async with serving() as rig, Service(Triple, executor="inline", name="double") as other:
        for service, answer in ((rig.service, [[2, 4]]), (other, [[3, 6]]), (rig.service, [[2, 4]])):
            rig.registry.services["double"] = service
            for _ in range(3):
                assert (await rig.infer(make_request(1, 2))).outputs[0].array.tolist() == answer


async def answers(call: Any, *requests: InferenceRequest | bytes) -> list[tuple[str, InferenceResponse]]:
    """Send all requests, and return the error text and the response of each answer until the end."""
    for request in requests:
        await call.write(request if isinstance(request, bytes) else write_request(request))
    await call.done_writing()
    found = [read_stream_response(body) async for body in call]
    assert await call.code() is Code.OK
    return found


async def test_many_requests_in_one_stream_of_which_so_many_are_under_way() -> None:
    async with serving(grpc_stream_requests=2) as rig:
        found = await answers(rig.stream(), *[make_request(n, n, id=str(n)) for n in range(50)])
    assert {response.id: response.outputs[0].array.tolist() for _, response in found} == {
        str(n): [[2 * n, 2 * n]] for n in range(50)
    }
    assert all(response.parameters[FINAL] is True and not error for error, response in found)
    assert len(rig.observer.transfers) == 50
    assert max(len(dispatch.requests) for dispatch in rig.observer.dispatches) <= 2


async def test_answers_of_different_models_overtake_each_other() -> None:
    async with serving(Service(Double, executor=FakeExecutor()), Count) as rig:
        call = rig.stream()
        await call.write(write_request(make_request(id="slow")))
        await call.write(write_request(item(b"1", "count", id="quick")))
        assert read_stream_response(await call.read())[1].id == "quick"
        call.cancel()


async def test_the_answers_of_a_streaming_model_and_which_is_the_last() -> None:
    """A final answer without outputs is sent to those that want it, if no other was marked final."""
    async with serving(Script) as rig:
        for document, wanted, expected in (
            (b'["a", {"last": "b"}]', {}, [([b'"a"'], False), ([b'"b"'], True)]),
            (b'["a", {"last": "b"}]', {WANTS_FINAL: True}, [([b'"a"'], False), ([b'"b"'], True)]),
            (b'["a", "b"]', {}, [([b'"a"'], False), ([b'"b"'], False)]),
            (b'["a", "b"]', {WANTS_FINAL: True}, [([b'"a"'], False), ([b'"b"'], False), (None, True)]),
        ):
            found = await answers(rig.stream(), item(document, "script", id="7", **wanted))
            shown = [
                (each.outputs[0].array.tolist() if each.outputs else None, each.parameters[FINAL]) for _, each in found
            ]
            assert shown == expected
            assert found[-1][1].id == "7"


async def test_an_error_is_a_message_and_the_stream_goes_on() -> None:
    async with serving(Double, Script) as rig:
        bad, failing = make_request(model="nope", id="1"), item(b'["a", {"error": "no"}]', "script", id="2")
        found = await answers(rig.stream(), bad, failing, make_request(id="3"), b"\xff\xff")
        texts = sorted((response.id, error) for error, response in found)
        assert [(name, error[:20]) for name, error in texts] == [
            ("", "body: must be a infe"), ("1", "Request for unknown "), ("2", ""), ("2", "no"), ("3", ""),
        ]  # fmt: skip
        assert await answers(rig.stream()) == []  # without requests it just ends


async def test_a_draining_server_answers_the_requests_of_a_stream_and_ends_it() -> None:
    executor = FakeExecutor()
    async with serving(executor=executor) as rig:
        call = rig.stream()
        await call.write(write_request(make_request(id="7")))
        await until(lambda: bool(executor.pending))
        rig.server.refuse()
        draining = asyncio.ensure_future(rig.drain(10))
        executor.respond_next(lambda payloads: [{"y": payloads[0]["x"]}])
        assert read_stream_response(await call.read())[1].id == "7"
        assert await call.code() is Code.UNAVAILABLE
        assert await draining


async def test_who_leaves_amid_the_answers_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Count) as rig:
        for _ in range(10):
            call = rig.stream()
            for _ in range(5):
                await call.write(write_request(item(b"50", "count")))
            await call.read()
            call.cancel()
        await until(lambda: not rig.service.state()["waiting"] and rig.observer.ends >= 10)
    assert [record for record in caplog.records if record.name == "weir.grpc"] == []
