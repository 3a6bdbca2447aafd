"""ModelStreamInfer through a real channel: many requests under way, several answers to one, errors, leaving, the end."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from tests.frontends.grpc.kit import Double, Rig, asking, item, run, serving
from tests.frontends.http.sockets import until
from tests.streaming_models import Count, Script

from weir.errors import Cancelled
from weir.frontends.grpc.inference import FINAL, WANTS_FINAL
from weir.serving.service import Service
from weir.testing import FakeExecutor, RecordingObserver
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_grpc import read_stream_response, write_request


async def answers(call: Any, *requests: InferenceRequest) -> list[tuple[str, InferenceResponse]]:
    """Send all requests, and return the error text and the response of each answer until the end."""
    for request in requests:
        await call.write(write_request(request))
    await call.done_writing()
    return [read_stream_response(body) async for body in call]


def test_many_requests_in_one_stream() -> None:
    async def test(rig: Rig) -> None:
        found = await answers(rig.stream(), *[asking(n, n, id=str(n)) for n in range(50)])
        assert {response.id: response.outputs[0].array.tolist() for _, response in found} == {
            str(n): [[2 * n, 2 * n]] for n in range(50)
        }
        assert all(response.parameters[FINAL] is True and not error for error, response in found)

    assert len(run(test).transfers) == 50


def test_answers_of_different_models_overtake_each_other() -> None:
    async def main() -> None:
        slow = Service(Double, executor=FakeExecutor())
        async with serving(slow, Service(Count, executor="inline")) as rig:
            call = rig.stream()
            await call.write(write_request(asking(id="slow")))
            await call.write(write_request(item(b"1", "count", id="quick")))
            assert read_stream_response(await call.read())[1].id == "quick"
            call.cancel()

    asyncio.run(main())


def test_unary_calls_streams_and_python_share_a_batch() -> None:
    async def main() -> None:
        executor = FakeExecutor()
        service = Service(Double, executor=executor, max_batch_size=8)
        async with serving(service) as rig:
            x = np.array([[1, 2]], np.int32)
            calls = [asyncio.ensure_future(rig.infer(asking()))]
            await until(lambda: bool(executor.pending))  # the worker is busy: the rest waits
            stream = rig.stream()
            await stream.write(write_request(asking()))
            calls += [asyncio.ensure_future(rig.infer(asking())), asyncio.ensure_future(service.infer({"x": x}))]
            await until(lambda: service.state()["waiting"] == 3)
            for _ in range(2):
                executor.answer_next(lambda payloads: [{"y": payload["x"]} for payload in payloads])
                await asyncio.sleep(0)
            assert read_stream_response(await stream.read())[1].outputs
            await asyncio.gather(*calls)
            assert [batch["rows"] for batch in service.state()["recent"]] in ([1, 3], [3, 1])
            stream.cancel()

    asyncio.run(main())


def test_a_streaming_model_gives_several_answers() -> None:
    async def test(rig: Rig) -> None:
        found = await answers(rig.stream(), item(b'["a", {"last": "b"}]', "script", id="7"))
        assert [response.outputs[0].array.tolist() for _, response in found] == [[b'"a"'], [b'"b"']]
        assert [response.parameters[FINAL] for _, response in found] == [False, True]

    run(test, Script)


@pytest.mark.parametrize(("document", "count"), [(b'["a", "b"]', 2), (b'["a", {"last": "b"}]', 1)])
def test_who_wants_a_final_answer_gets_one_without_outputs_if_none_said_so(document: bytes, count: int) -> None:
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
        bad = asking(model="nope", id="1")
        found = await answers(rig.stream(), bad, item(b'["a", {"error": "no"}]', "script", id="2"), asking(id="3"))
        said = [(response.id, error[:26]) for error, response in found]
        assert sorted(said) == [("1", "Request for unknown model:"), ("2", ""), ("2", "no"), ("3", "")]

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
        service = rig.context.registry.get("double")
        heard = next(each for each in service.observers if isinstance(each, RecordingObserver))
        call = rig.stream()
        for _ in range(3):
            await call.write(write_request(asking()))
        await until(lambda: service.state()["waiting"] + service.state()["in_flight"] == 3)
        call.cancel()
        await until(lambda: heard.ends == 3)
        assert service.state()["waiting"] == 0

    observer = run(test, executor=FakeExecutor())
    assert {type(error) for _, error, _ in observer.answers} == {Cancelled}


def test_no_more_than_so_many_requests_are_under_way() -> None:
    async def test(rig: Rig) -> None:
        found = await answers(rig.stream(), *[asking(id=str(n)) for n in range(20)])
        assert len(found) == 20

    observer = run(test, grpc_stream_requests=2)
    assert max(len(dispatch.requests) for dispatch in observer.dispatches) <= 2


def test_a_server_that_drains_answers_what_was_asked_and_ends_the_stream() -> None:
    async def test(rig: Rig) -> None:
        service = rig.context.registry.get("double")
        fake: Any = service.executor
        call = rig.stream()
        await call.write(write_request(asking(id="7")))
        await until(lambda: bool(fake.pending))
        rig.server.refuse()
        draining = asyncio.ensure_future(rig.server.drain(10))
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
            each for each in rig.context.registry.get("count").observers if isinstance(each, RecordingObserver)
        )
        for _ in range(10):
            call = rig.stream()
            for _ in range(5):
                await call.write(write_request(item(b"50", "count")))
            await call.read()
            call.cancel()
        await until(lambda: not rig.context.registry.get("count").state()["waiting"] and heard.ends >= 10)

    run(test, Count)
    assert [record for record in caplog.records if record.name == "weir.grpc"] == []
