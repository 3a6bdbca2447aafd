"""Requests of the Open Inference Protocol that get several answers."""

from contextlib import aclosing

import pytest
from examples.tensors import Affine
from tests.protocols.test_kserve_inference import items, tensor, with_service
from tests.streaming_models import Count, Script

from weir.errors import InvalidRequest, Unsupported
from weir.protocols.kserve_inference import infer, stream
from weir.serving.service import Service
from weir.wire.inference import InferenceRequest


def test_several_answers_and_whether_each_is_the_last() -> None:
    async def test(service: Service) -> None:
        request = InferenceRequest("script", [items(b'["a", {"last": "b"}]')], id="7")
        parts = [part async for part in stream(service, request, door="grpc")]
        assert [part.response.outputs[0].array.tolist() for part in parts] == [[b'"a"'], [b'"b"']]
        assert [part.last for part in parts] == [False, True]
        assert {part.response.id for part in parts} == {"7"}

    with_service(Script, test)


def test_the_end_may_come_without_a_last_answer() -> None:
    async def test(service: Service) -> None:
        request = InferenceRequest("count", [items(b"2")])
        assert [part.last async for part in stream(service, request, door="grpc")] == [False, False]

    with_service(Count, test)


def test_a_model_with_one_answer() -> None:
    async def test(service: Service) -> None:
        request = InferenceRequest("affine", [tensor([[1, 0, 0]])])
        (part,) = [part async for part in stream(service, request, door="grpc")]
        assert part.last and part.response.outputs[0].name == "y"

    with_service(Affine, test)


def test_an_error_comes_after_the_answers_before_it() -> None:
    async def test(service: Service) -> None:
        answers = stream(service, InferenceRequest("script", [items(b'[1, {"error": "no"}]')]), door="grpc")
        assert (await anext(answers)).response.outputs[0].array.tolist() == [b"1"]
        with pytest.raises(InvalidRequest, match="no"):
            await anext(answers)

    with_service(Script, test)


def test_leaving_ends_the_request() -> None:
    async def test(service: Service) -> None:
        async with aclosing(stream(service, InferenceRequest("count", [items(b"200")]), door="grpc")) as answers:
            await anext(answers)
        assert service.state()["waiting"] == 0

    observer = with_service(Count, test)
    assert [type(error).__name__ for _, error, _ in observer.answers] == ["Cancelled"]


def test_a_stream_is_for_one_item() -> None:
    async def test(service: Service) -> None:
        with pytest.raises(InvalidRequest, match="tensor 'input': has 2 items, a stream is for one"):
            await anext(stream(service, InferenceRequest("count", [items(b"1", b"2")]), door="grpc"))
        with pytest.raises(Unsupported, match="'count' streams its answers"):
            await infer(service, InferenceRequest("count", [items(b"1")]), door="grpc")

    observer = with_service(Count, test)
    assert len(observer.refusals) == 2
