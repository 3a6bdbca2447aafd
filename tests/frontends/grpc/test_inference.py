"""ModelInfer through a real channel: answers, refusals, deadlines, callers who leave."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from tests.frontends.grpc.kit import INFER, Double, Rig, asking, item, refused, run, serving
from tests.frontends.http.sockets import until
from tests.streaming_models import Count

from weir.errors import Cancelled, DeadlineExceeded
from weir.model import Model
from weir.protocols.kserve.metadata import find
from weir.serving.service import Service
from weir.testing import FakeExecutor, RecordingObserver
from weir.wire.inference import AskedOutput
from weir.wire.kserve_grpc import ModelInferResponse, write_request

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
        response = await rig.infer(asking(3, 4, id="7"))
        assert (response.model, response.version, response.id) == ("double", "", "7")
        (output,) = response.outputs
        assert (output.name, output.datatype, output.array.tolist()) == ("y", "INT32", [[6, 8]])

    observer = run(test)
    assert [request.door for request in observer.answers[0][0]] == ["grpc"]
    ((model, door, received, sent),) = observer.transfers
    assert (model, door) == ("double", "grpc") and received > 8 and sent > 8


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
        said = await refused(rig.infer(item(b'"x"', "strict")))
        assert said[0] is Code.INVALID_ARGUMENT and "tensor 'input'[0]" in said[1]

    run(test, Strict)


def test_a_request_larger_than_a_batch_is_divided() -> None:
    async def main() -> None:
        service = Service(Double, executor="inline", max_queue_size=5000, max_batch_size=64)
        async with serving(service) as rig:
            request = asking()
            request.inputs[0].array = np.arange(10_000, dtype=np.int32).reshape(5000, 2)
            response = await rig.infer(request)
            np.testing.assert_array_equal(response.outputs[0].array, 2 * request.inputs[0].array)

    asyncio.run(main())


def tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "INT32", "shape": [1, 2], **fields}


RAW = {"raw_input_contents": [bytes(8)]}
INT = {"int_contents": [1, 2]}


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"inputs": [tensor()], "raw_input_contents": [bytes(7)]}, Code.INVALID_ARGUMENT, "'x': has 7 bytes, INT32"),
        ({"inputs": [tensor(contents=INT)], **RAW}, Code.INVALID_ARGUMENT, "tensor 'x': has contents, but raw_input"),
        ({"inputs": [tensor(shape=[-1, 2])], **RAW}, Code.INVALID_ARGUMENT, "'x': has shape [-1, 2], dimensions"),
        ({"inputs": [tensor(shape=[1 << 40] * 2)], **RAW}, Code.INVALID_ARGUMENT, "takes more than"),
        ({"inputs": [tensor(datatype="FP32")], **RAW}, Code.INVALID_ARGUMENT, "'x': has datatype 'FP32', must be INT32"),
        ({"inputs": [tensor(name="z")], **RAW}, Code.INVALID_ARGUMENT, "tensor 'z': not one of 'x'"),
        ({"inputs": [tensor(shape=[2, 1])], **RAW}, Code.INVALID_ARGUMENT, "'x': has shape [2, 1], must be [-1, 2]"),
        ({"inputs": [tensor()]}, Code.INVALID_ARGUMENT, "tensor 'x': has no data"),
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
def test_bad_input_is_refused_by_name_and_observers_hear(fields: dict[str, Any], code: Any, said: str) -> None:
    async def test(rig: Rig) -> None:
        told = await refused(rig.call("ModelInfer", model_name="double", **fields))
        assert told[0] is code and said in told[1]
        assert (await rig.infer(asking())).outputs  # the server is unharmed

    observer = run(test)
    assert [(model, door) for model, door, _ in observer.refusals] == [("double", "grpc")]


def test_models_and_versions_that_there_are_not() -> None:
    async def test(rig: Rig) -> None:
        code, said = await refused(rig.infer(asking(model="nope")))
        assert code is Code.NOT_FOUND and said.startswith("Request for unknown model: 'nope' is not found")
        code, said = await refused(rig.call("ModelInfer", model_name="double", model_version="9"))
        assert code is Code.NOT_FOUND and "version '9'" in said

    run(test)


def test_a_body_that_is_no_message() -> None:
    async def test(rig: Rig) -> None:
        code, said = await refused(rig.raw(INFER, b"\xff\xff"))
        assert code is Code.INVALID_ARGUMENT and "must be a inference.ModelInferRequest" in said
        code, said = await refused(rig.raw("/inference.GRPCInferenceService/ModelReady", b"\xff\xff"))
        assert code is Code.INVALID_ARGUMENT and "must be a inference.ModelReadyRequest" in said

    run(test)


def test_a_message_over_the_limit_is_refused() -> None:
    async def test(rig: Rig) -> None:
        code, _ = await refused(rig.raw(INFER, bytes(5000)))
        assert code is Code.RESOURCE_EXHAUSTED

    run(test, grpc_max_message_size=4999)


@pytest.mark.parametrize("development", [False, True])
def test_what_the_model_raised_is_for_developers(development: bool) -> None:
    async def test(rig: Rig) -> None:
        code, said = await refused(rig.infer(item(b"-1", "strict")))
        assert code is Code.INTERNAL and ("Traceback" in said) == development

    run(test, Strict, http={"development": development})


def test_an_error_of_ours_says_nothing_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        monkeypatch.setattr(rig.context.registry, "get", None)
        assert await refused(rig.infer(asking())) == (Code.INTERNAL, "internal error")

    run(test)


def test_a_streaming_model_is_not_for_unary_calls() -> None:
    async def test(rig: Rig) -> None:
        code, said = await refused(rig.infer(item(b"2", "count")))
        assert code is Code.UNIMPLEMENTED and "'count' streams its answers" in said

    run(test, Count)


def test_a_caller_who_leaves_leaves_the_line() -> None:
    async def test(rig: Rig) -> None:
        service = find(rig.context.registry, "double")
        calls = [rig.raw(INFER, write_request(asking(index, index))) for index in range(3)]
        heard = next(each for each in service.observers if isinstance(each, RecordingObserver))
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
            each for each in find(rig.context.registry, "double").observers if isinstance(each, RecordingObserver)
        )
        code, _ = await refused(rig.infer(asking(), timeout=0.05))
        assert code is Code.DEADLINE_EXCEEDED
        await until(lambda: heard.ends == 1)

    observer = run(test, executor=FakeExecutor())
    (request,) = observer.answers[0][0]
    assert 0 < request.timeout < 0.1  # the default is 60
    assert type(observer.answers[0][1]) in (DeadlineExceeded, Cancelled)


def test_a_timeout_can_be_a_parameter_too() -> None:
    async def test(rig: Rig) -> None:
        code, said = await refused(rig.infer(asking(timeout=50_000)))
        assert code is Code.DEADLINE_EXCEEDED and "timeout of 0.05 s" in said

    run(test, executor=FakeExecutor())


def test_a_full_line_says_when_to_come_again() -> None:
    async def main() -> None:
        service = Service(Double, executor=FakeExecutor(), max_queue_size=1, max_batch_size=1)
        async with serving(service) as rig:
            calls = [rig.raw(INFER, write_request(asking()))]
            await until(lambda: service.state()["in_flight"] == 1)
            calls.append(rig.raw(INFER, write_request(asking())))
            await until(lambda: service.state()["waiting"] == 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.infer(asking())
            assert caught.value.code() is Code.RESOURCE_EXHAUSTED
            trailers: Any = caught.value.trailing_metadata()
            assert int(trailers["grpc-retry-pushback-ms"]) >= 1000
            for call in calls:
                call.cancel()

    asyncio.run(main())


def test_only_the_outputs_asked_for() -> None:
    async def test(rig: Rig) -> None:
        request = asking()
        request.outputs = [AskedOutput("y", {})]
        answer = ModelInferResponse.FromString(await rig.raw(INFER, write_request(request)))
        assert [output.name for output in answer.outputs] == ["y"]

    run(test)


@pytest.mark.parametrize("name", ["x" * 20_000, "\u00e9%\n" * 7_000])
def test_a_long_message_keeps_its_code(name: str) -> None:
    # Trailers of more than 16 KB are refused by the client: RESOURCE_EXHAUSTED, "Stream removed".
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.infer(asking(model=name)))
        assert code is Code.NOT_FOUND
        assert text.startswith(f"Request for unknown model: '{name[0]}") and text.endswith("...")

    run(test)
