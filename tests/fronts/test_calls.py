"""gRPC before two fronts is that of one server: what fronts answer, what goes on to the dispatcher, and what one that ends takes with it."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy
import psutil
import pytest
from tests.fronts.kit import MODELS, Increase, fronts_of, metric
from tests.rings import subcases
from tests.served import COLD, Served, until
from tests.wire.test_tensors_packed import texts

from weir.client import GrpcClient
from weir.wire.inference import InferenceRequest, RequestedOutput, TensorValue
from weir.wire.kserve_grpc import message, methods, read_response, write_request

ROWS = numpy.array([[1, 2], [3, 4]], "<f4")
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@contextmanager
def channel(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(served.grpc, [("grpc.use_local_subchannel_pool", 1)]) as opened:
        yield opened


REGION: dict[str, Any] = {"shared_memory_region": "mine", "shared_memory_byte_size": 8}


def tensors(model: str, array: Any, datatype: str = "FP32", **more: Any) -> bytes:
    name = "input" if model in ("square", "measured") else "a"
    return write_request(InferenceRequest(model, [TensorValue(name, datatype, array)], **more))


CALLS = {
    "tensors": (INFER, tensors("add", ROWS)),
    "an id": (INFER, tensors("add", ROWS, id="mine", parameters={"priority": 1})),
    "an output in a region": (INFER, tensors("add", ROWS, outputs=[RequestedOutput("sum", REGION)])),
    "texts": (INFER, tensors("texts", texts(b"hi", b"you"), "BYTES")),
    "a large body": (INFER, tensors("mean", numpy.ones((3, 20_000), "<f4"))),
    "more rows than a batch has": (INFER, tensors("add", numpy.ones((300, 2), "<f4"))),
    "items": (INFER, tensors("square", texts(b"3", b"4"), "BYTES")),
    "measured items": (INFER, tensors("measured", texts(b"3"), "BYTES")),
    "a stream's model": (INFER, tensors("counts", texts(b"3"), "BYTES")),
    "an unknown model": (INFER, tensors("none", ROWS)),
    "an unknown version": (INFER, tensors("add", ROWS, version="7")),
    "no message": (INFER, b"\xff\xff"),
    "an unknown method": ("/inference.GRPCInferenceService/Nothing", b""),
    "readiness": ("/inference.GRPCInferenceService/ServerReady", b""),
    "metadata": ("/inference.GRPCInferenceService/ModelMetadata", b"\x0a\x03add"),
    "shared memory": ("/inference.GRPCInferenceService/SystemSharedMemoryStatus", b""),
    "health": ("/grpc.health.v1.Health/Check", b""),
}  # fmt: skip


def outcome(served: Served, path: str, body: bytes) -> tuple[Any, ...]:
    with channel(served) as opened:
        try:
            return "OK", opened.unary_unary(path)(body, timeout=200)
        except grpc.RpcError as error:
            failed: Any = error
            return failed.code(), failed.details(), sorted(failed.trailing_metadata())


@subcases(("path", "body"), CALLS.values())
def test_a_call_is_answered_as_by_one_front(served: Served, single: Served, path: str, body: bytes) -> None:
    assert [outcome(served, path, body) for _ in range(3)] == [outcome(single, path, body)] * 3


def test_streams_and_repeated_calls_go_through(served: Served) -> None:
    with GrpcClient(served.grpc) as client:
        for number in range(1, 20):
            assert client.infer("add", {"a": ROWS * number})["sum"].tolist() == [3.0 * number, 7.0 * number]
    with channel(served) as opened:
        answers = opened.stream_stream(STREAM)(iter([tensors("add", ROWS, id=str(index)) for index in range(5)]))
        read = message("inference.ModelStreamInferResponse").FromString
        assert sorted(read(each).infer_response.id for each in answers) == list("01234")


def test_large_calls_of_several_callers_are_kept_apart(served: Served) -> None:
    def is_right(number: int) -> bool:
        with GrpcClient(served.grpc) as client:
            rows = numpy.full((3, 20_000), number, "<f4")
            return all(client.infer("mean", {"a": rows})["mean"].tolist() == [number] * 3 for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, range(12)))
    free = metric(served, "weir_arena_free_bytes", model="mean")
    until(lambda: metric(served, "weir_arena_free_bytes", model="mean") > free)  # the places come back


def test_calls_are_counted_once_and_as_grpc(served: Served) -> None:
    more, labels = Increase(served), {"model": "add", "frontend": "grpc"}
    for _ in range(3):
        assert outcome(served, INFER, tensors("add", ROWS))[0] == "OK"
    assert outcome(served, INFER, tensors("add", ROWS.astype("<f8"), "FP64"))[0] != "OK"
    assert more("weir_requests_total", code="OK", **labels) == 3
    assert more("weir_requests_rejected_total", error="InvalidRequest", **labels) == 1
    until(lambda: more("weir_sent_bytes_total", **labels) > 0)


def test_a_model_is_loaded_and_unloaded_through_any_front(served: Served) -> None:
    unload, load = (f"/inference.GRPCInferenceService/RepositoryModel{name}" for name in ("Unload", "Load"))
    for _ in range(4):  # connections to both
        assert outcome(served, unload, _named("add"))[0] == "OK"
        assert outcome(served, INFER, tensors("add", ROWS))[0] is grpc.StatusCode.NOT_FOUND
        assert outcome(served, load, _named("add"))[0] == "OK"
        assert outcome(served, INFER, tensors("add", ROWS))[0] == "OK"


def _named(model: str) -> bytes:
    method = next(each for each in methods("inference.GRPCInferenceService") if each.name == "RepositoryModelLoad")
    body: bytes = method.request(model_name=model).SerializeToString()
    return body


def test_a_front_that_is_killed_loses_its_own_calls_only(served: Served) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(channel(served)) for _ in range(8)]
        calls = [each.unary_unary(INFER) for each in opened]
        body = tensors("add", ROWS)
        assert all(read_response(call(body)).outputs for call in calls)
        victim, other = fronts_of(served)
        victim.kill()
        until(lambda: len(fronts_of(served)) == 2)
        assert psutil.pid_exists(other.pid)
        assert all(read_response(call(body, wait_for_ready=True, timeout=200)).outputs for call in calls)


def test_the_key_is_required_for_what_fronts_answer_and_what_they_pass_on() -> None:
    with Served(f"{MODELS}:Add", "--fronts", 2, "--grpc-port", 0, "--api-key", "secret", env=COLD) as served:
        served.until_grpc().until_ready()
        with channel(served) as opened:
            for path, body in ((INFER, tensors("add", ROWS)), ("/inference.GRPCInferenceService/RepositoryIndex", b"")):
                with pytest.raises(grpc.RpcError) as refused:
                    opened.unary_unary(path)(body)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert opened.unary_unary(path)(body, metadata=[("authorization", "Bearer secret")]) is not None


def test_clients_are_counted_once_and_as_long_as_they_are_connected(served: Served) -> None:
    until(lambda: metric(served, "weir_connections") == 1)  # the one that asks
    with ExitStack() as stack:
        for opened in [stack.enter_context(channel(served)) for _ in range(4)]:
            assert opened.unary_unary(INFER)(tensors("add", ROWS), timeout=200)
            assert opened.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=200)  # is passed on
        until(lambda: metric(served, "weir_connections") == 5)
    until(lambda: metric(served, "weir_connections") == 1)


def test_calls_are_limited_for_all_fronts_together(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    arguments = (f"{MODELS}:GatedAdd", "--param", f"gate={gate}", "--max-batch-size", 2, "--max-connections", 8)
    with Served(*arguments, "--fronts", 2, "--grpc-port", 0) as served, ExitStack() as stack:
        served.until_grpc().until_ready()
        calls = [stack.enter_context(channel(served)).unary_unary(INFER) for _ in range(4)]
        body = tensors("gatedadd", ROWS)
        under_way = [call.future(body, timeout=200) for call in calls for _ in range(2)]
        until(lambda: metric(served, "weir_waiting_requests") == 7)
        for call in calls:
            with pytest.raises(grpc.RpcError, match="8 calls are in flight, which is the limit"):
                call(body, timeout=200)
        gate.write_text("go")
        assert all(read_response(each.result()).outputs for each in under_way)
