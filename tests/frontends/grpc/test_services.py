"""All other calls: health, metadata, configuration, reflection, and those that load, unload and share memory."""

import asyncio
import mmap
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.frontends.grpc.kit import INFERENCE, Double, Rig, make_request, refused, run, serving
from tests.streaming_models import Count

from weir.catalog.loading import ServiceMaker
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.sources import ModelToServe, TargetRepository
from weir.frontends.grpc.services import ALL, Health, service_of
from weir.serving.service import Service
from weir.testing import FakeExecutor
from weir.wire.inference import RequestedOutput
from weir.wire.kserve_grpc import ModelInferRequest, message, write_request
from weir.workers.cpus import cpu_count

Code = grpc.StatusCode
Status = health_pb2.HealthCheckResponse


def test_health_of_server_and_models() -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.call("ServerLive")).live
        assert (await rig.call("ServerReady")).ready
        assert (await rig.call("ModelReady", name="double")).ready
        assert not (await rig.call("ModelReady", name="nope")).ready
        assert not (await rig.call("ModelReady", name="double", version="3")).ready
        await rig.registry.stop()
        assert (await rig.call("ServerLive")).live
        assert not (await rig.call("ServerReady")).ready
        assert not (await rig.call("ModelReady", name="double")).ready

    run(test)


async def test_a_server_is_not_live_while_a_model_has_no_worker_if_that_counts() -> None:
    executor = FakeExecutor()
    async with serving(Service(Double, executor=executor), http={"liveness": "models"}) as rig:
        assert (await rig.call("ServerLive")).live
        executor.end("no weights")
        assert not (await rig.call("ServerLive")).live
        executor.revive(0)
        assert (await rig.call("ServerLive")).live


async def test_metadata() -> None:
    services = [Service(Double, name="m", version=version, executor="inline") for version in ("1", "2")]
    async with serving(*services, Service(Count, executor="inline")) as rig:
        server = await rig.call("ServerMetadata")
        assert server.name == "weir" and "binary_tensor_data" in server.extensions
        found = await rig.call("ModelMetadata", name="m")
        assert (found.name, list(found.versions), found.platform) == ("m", ["1", "2"], "python")
        (tensor,) = found.inputs
        assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("x", "INT32", [-1, 2])
        config = (await rig.call("ModelConfig", name="m", version="1")).config
        assert (config.max_batch_size, config.input[0].data_type, list(config.input[0].dims)) == (2, 8, [2])
        assert list((await rig.call("ModelList")).models) == ["m", "count"]
        for name in ("ModelMetadata", "ModelConfig"):
            code, text = await refused(rig.call(name, name="nope"))
            assert code is Code.NOT_FOUND and text.startswith("Request for unknown model: 'nope'")


async def test_statistics() -> None:
    services = [Service(Double, name="m", version=version, executor="inline") for version in ("1", "2")]
    async with serving(*services, Service(Count, executor="inline")) as rig:
        for _ in range(3):
            await rig.infer(make_request(model="m"))
        await refused(rig.call("ModelInfer", model_name="m"))
        every = (await rig.call("ModelStatistics")).model_stats
        assert [(each.name, each.version) for each in every] == [("m", "1"), ("m", "2"), ("count", "")]
        both = (await rig.call("ModelStatistics", name="m")).model_stats
        assert [each.inference_count for each in both] == [0, 3]
        (one,) = (await rig.call("ModelStatistics", name="m", version="2")).model_stats
        assert (one.execution_count, one.inference_stats.success.count, one.inference_stats.fail.count) == (3, 3, 1)
        assert [(each.batch_size, each.compute_infer.count) for each in one.batch_stats] == [(1, 3)]
        assert one.inference_stats.queue.count == 3 and one.last_inference > 0
        assert (await refused(rig.call("ModelStatistics", name="nope")))[0] is Code.NOT_FOUND


@pytest.mark.parametrize("name", ["TraceSetting", "LogSettings", "CudaSharedMemoryRegister"])
def test_what_is_not_offered_says_so(name: str) -> None:
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.call(name))
        assert code is Code.UNIMPLEMENTED and text

    run(test)


def test_there_are_no_regions_of_cuda_memory() -> None:
    async def test(rig: Rig) -> None:
        assert not (await rig.call("CudaSharedMemoryStatus")).regions
        await rig.call("CudaSharedMemoryUnregister")

    run(test)


def test_a_call_that_there_is_not() -> None:
    async def test(rig: Rig) -> None:
        code, _ = await refused(rig.raw(f"/{INFERENCE}/Nothing", b""))
        assert code is Code.UNIMPLEMENTED

    run(test)


def test_the_standard_health_client() -> None:
    async def test(rig: Rig) -> None:
        stub: Any = health_pb2_grpc.HealthStub(rig.channel)
        for name in ("", INFERENCE, "double"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == Status.SERVING
        code, text = await refused(stub.Check(health_pb2.HealthCheckRequest(service="nope")))
        assert code is Code.NOT_FOUND and "service 'nope'" in text
        watched = stub.Watch(health_pb2.HealthCheckRequest(service="double"))
        assert (await watched.read()).status == Status.SERVING
        rig.server.refuse()
        assert (await watched.read()).status == Status.NOT_SERVING
        assert await watched.code() is Code.OK
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING

    run(test)


async def test_who_watches_hears_of_changes() -> None:
    service = Service(Double, executor=FakeExecutor())
    registry = Registry([service])
    watched = Health(registry, [], look_every=0.001).watch(message("grpc.health.v1.HealthCheckRequest")())
    assert (await anext(watched)).status == Status.NOT_SERVING
    async with service:
        assert (await anext(watched)).status == Status.SERVING
    await watched.aclose()


async def test_who_watches_hears_of_the_end_also_while_an_answer_is_on_its_way() -> None:
    async with Service(Double, executor=FakeExecutor()) as service:
        health = Health(Registry([service]), [])
        watched = health.watch(message("grpc.health.v1.HealthCheckRequest")())
        assert (await anext(watched)).status == Status.SERVING
        health.refuse()
        assert [answer.status async for answer in watched] == [Status.NOT_SERVING]


def test_a_model_that_there_is_not_may_be_watched_until_it_comes() -> None:
    async def test(rig: Rig) -> None:
        stub: Any = health_pb2_grpc.HealthStub(rig.channel)
        watched = stub.Watch(health_pb2.HealthCheckRequest(service="nope"))
        assert (await watched.read()).status == Status.SERVICE_UNKNOWN
        watched.cancel()
        bad = rig.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff\xff")
        assert await bad.code() is Code.INVALID_ARGUMENT

    run(test)


def test_the_standard_reflection_client() -> None:
    async def test(rig: Rig) -> None:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
        request = reflection_pb2.ServerReflectionRequest
        call = stub.ServerReflectionInfo()

        async def send(**question: Any) -> Any:
            await call.write(request(**question))
            return await call.read()

        listed = (await send(list_services="")).list_services_response
        assert [service.name for service in listed.service] == sorted(ALL)
        by_symbol = await send(file_containing_symbol=INFERENCE)
        files = by_symbol.file_descriptor_response.file_descriptor_proto
        assert len(files) == 2  # it and the file that it imports
        assert by_symbol.original_request.file_containing_symbol == INFERENCE
        by_name = await send(file_by_filename="health.proto")
        assert len(by_name.file_descriptor_response.file_descriptor_proto) == 1
        for question in (
            {"file_containing_symbol": "no.such.Thing"},
            {"file_by_filename": "nothing.proto"},
            {"all_extension_numbers_of_type": INFERENCE},
            {},
        ):
            assert (await send(**question)).error_response.error_code == Code.NOT_FOUND.value[0]
        await call.done_writing()
        assert await call.code() is Code.OK

    run(test)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_in_both_versions(version: str) -> None:
    async def test(rig: Rig) -> None:
        request, answered = (
            message(f"grpc.reflection.{version}.ServerReflection{side}") for side in ("Request", "Response")
        )
        path = f"/{service_of(version)}/ServerReflectionInfo"
        call = rig.channel.stream_stream(path)()
        await call.write(request(list_services="").SerializeToString())
        assert len(answered.FromString(await call.read()).list_services_response.service) == len(ALL)
        await call.write(b"\xff\xff")
        assert await call.code() is Code.INVALID_ARGUMENT

    run(test)


MODEL = ModelToServe("tests.frontends.grpc.kit:Double", "double", {}, [], {"executor": "inline"})
LOAD = {
    "batch_size": {"int64_param": 3},
    "timeout": {"double_param": 20.0},
    "config": {"string_param": '{"max_queue_size": 9}'},
}
REPOSITORY = "inference.model_repository.ModelRepositoryService"


def run_controlled(test: Callable[[Rig], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `test` against a server with a manager that knows Double, which runs."""

    async def main() -> None:
        make = ServiceMaker([])

        def managed(registry: Registry) -> Manager:
            return Manager(registry, TargetRepository([MODEL]), make)

        async with serving(make(MODEL), manager=managed, **options) as rig:
            await asyncio.wait_for(test(rig), 60)

    asyncio.run(main())


def test_a_load_takes_the_parameters_of_amds_client() -> None:
    async def test(rig: Rig) -> None:
        await rig.call("ModelLoad", name="double", parameters=LOAD)
        batching = rig.registry.get("double").facts.batching
        assert (batching.max_batch_size, batching.max_queue_delay, batching.max_queue_size) == (3, 0.02, 9)
        code, text = await refused(rig.call("ModelLoad", name="double", parameters={"wrong": {"bool_param": True}}))
        assert code is Code.INVALID_ARGUMENT
        assert "parameter 'wrong': is not a setting" in text

    run_controlled(test)


@pytest.mark.parametrize("field", ["model_name", "repository_name"], ids=["triton", "kserve"])
def test_models_of_the_repository(field: str) -> None:
    async def test(rig: Rig) -> None:
        def states(found: Any) -> list[tuple[str, str]]:
            return [(each.name, each.state) for each in found.models]

        assert states(await rig.call("RepositoryIndex")) == [("double", "READY")]
        named: Any = {field: "double"}
        unloaded = await rig.call("RepositoryModelUnload", **named)
        assert (unloaded.model_name, unloaded.isUnloaded) == ("double", True)
        assert states(await rig.call("RepositoryIndex")) == [("double", "UNAVAILABLE")]
        assert states(await rig.call("RepositoryIndex", ready=True)) == []
        named["parameters"] = {"config": {"string_param": '{"max_batch_size": 7}'}}
        loaded = await rig.call("RepositoryModelLoad", **named)
        assert (loaded.model_name, loaded.isLoaded) == ("double", True)
        assert rig.registry.get("double").facts.batching.max_batch_size == 7
        assert (await rig.infer(make_request())).outputs

    run_controlled(test)


def test_the_repository_where_mlservers_clients_look_for_it() -> None:
    async def test(rig: Rig) -> None:
        assert len((await rig.call("RepositoryIndex", service=REPOSITORY)).models) == 1
        await rig.call("RepositoryModelLoad", service=REPOSITORY, model_name="double")
        await rig.call("RepositoryModelUnload", service=REPOSITORY, model_name="double")

    run_controlled(test)


@pytest.mark.parametrize(
    ("call", "fields", "code", "message"),
    [
        ("RepositoryModelLoad", {"model_name": "nope"}, Code.NOT_FOUND, "'nope'"),
        (
            "RepositoryModelLoad", {"model_name": "double", "parameters": {"x": {"int64_param": 1}}},
            Code.INVALID_ARGUMENT, "parameter 'x'",
        ),
        (
            "RepositoryModelLoad", {"model_name": "double", "parameters": {"x": {}}},
            Code.INVALID_ARGUMENT, "parameter 'x': has no value",
        ),
        (
            "RepositoryModelLoad",
            {
                "model_name": "double",
                "parameters": {"config": {"string_param": "{}"}, "file:1/model.py": {"bytes_param": b"code"}},
            },
            Code.PERMISSION_DENIED, "allow_model_files",
        ),
        (
            "RepositoryModelUnload", {"model_name": "double", "parameters": {"unload_dependents": {"int64_param": 1}}},
            Code.INVALID_ARGUMENT, "'unload_dependents'=1: must be true or false",
        ),
        ("WorkerLoad", {"name": "nope"}, Code.NOT_FOUND, "'nope'"),
        ("WorkerUnload", {"name": "nope"}, Code.NOT_FOUND, "'nope'"),
        (
            "SystemSharedMemoryRegister", {"name": "r", "key": "nowhere", "byte_size": 8},
            Code.INVALID_ARGUMENT, "'nowhere'",
        ),
        ("SystemSharedMemoryStatus", {"name": "r"}, Code.INVALID_ARGUMENT, "'r'"),
    ],
)  # fmt: skip
def test_what_is_refused(call: str, fields: dict[str, Any], code: Any, message: str) -> None:
    async def test(rig: Rig) -> None:
        text = await refused(rig.call(call, **fields))
        assert text[0] is code and message in text[1]

    run_controlled(test, allow_shared_memory=True)


def test_models_and_workers_as_amd_has_them() -> None:
    async def test(rig: Rig) -> None:
        await rig.call("ModelUnload", name="double")
        await rig.call("ModelLoad", name="double")
        assert (await rig.call("WorkerLoad", name="double")).endpoint == "double"
        parameters = {"max_batch_size": {"int64_param": 5}}
        assert (await rig.call("WorkerLoad", name="double", parameters=parameters)).endpoint == "double-1"
        assert list((await rig.call("ModelList")).models) == ["double", "double-1"]
        await rig.call("WorkerUnload", name="double-1")
        assert list((await rig.call("ModelList")).models) == ["double"]

    run_controlled(test)


def test_hardware() -> None:
    async def test(rig: Rig) -> None:
        cpus = cpu_count()
        for name, number, found in (("cpu", 0, True), ("CPU", cpus, True), ("cpu", cpus + 1, False), ("xrt", 1, False)):
            assert (await rig.call("HasHardware", name=name, num=number)).found is found

    run_controlled(test)


CONTROLLING = (
    "RepositoryModelLoad", "RepositoryModelUnload", "ModelLoad", "ModelUnload", "WorkerLoad", "WorkerUnload",
    "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
)  # fmt: skip


@pytest.mark.parametrize("call", CONTROLLING)
def test_a_token_is_required(call: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")

    async def test(rig: Rig) -> None:
        for metadata in (None, (("authorization", "Bearer wrong"),)):
            code, _ = await refused(rig.call(call, metadata=metadata))
            assert code is Code.UNAUTHENTICATED
        code, _ = await refused(rig.call(call, metadata=(("authorization", "Bearer secret"),)))
        assert code not in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)

    with_token = {"control_token_file": str(file)}
    if call in ("SystemSharedMemoryStatus", "SystemSharedMemoryUnregister"):

        async def allowed(rig: Rig) -> None:
            await rig.call(call, metadata=(("authorization", "Bearer secret"),))

        run_controlled(allowed, control=with_token, allow_shared_memory=True)
    else:
        run_controlled(test, control=with_token, allow_shared_memory=True)


@pytest.mark.parametrize("call", CONTROLLING)
def test_what_a_proxy_passes_on_comes_from_anywhere(call: str) -> None:
    async def test(rig: Rig) -> None:
        code, _ = await refused(rig.call(call, metadata=(("x-forwarded-for", "192.0.2.7"),)))
        assert code is Code.PERMISSION_DENIED

    run_controlled(test, allow_shared_memory=True)


@pytest.fixture
def region() -> Any:
    path = Path(f"/dev/shm/grpc-test-{os.getpid()}")
    path.write_bytes(bytes(64))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 64) as view:
            yield path.name, view
    finally:
        path.unlink()


def test_tensors_in_shared_memory(region: Any) -> None:
    key, view = region
    view[:8] = np.array([3, 4], np.int32).tobytes()

    async def test(rig: Rig) -> None:
        await rig.call("SystemSharedMemoryRegister", name="r", key=key, offset=0, byte_size=64)
        found = (await rig.call("SystemSharedMemoryStatus")).regions
        assert (found["r"].key, found["r"].byte_size) == (key, 64)
        place = {"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": 8}}
        tensor = {"name": "x", "datatype": "INT32", "shape": [1, 2], "parameters": place}
        wanted = {"name": "y", "parameters": {**place, "shared_memory_offset": {"int64_param": 8}}}
        answer = await rig.call("ModelInfer", model_name="double", inputs=[tensor], outputs=[wanted])
        assert answer.outputs[0].parameters["shared_memory_region"].string_param == "r"
        assert np.frombuffer(view[8:16], np.int32).tolist() == [6, 8]
        await rig.call("SystemSharedMemoryUnregister", name="r")
        code, text = await refused(rig.call("ModelInfer", model_name="double", inputs=[tensor]))
        assert code is Code.INVALID_ARGUMENT and "'r'" in text

    run_controlled(test, allow_shared_memory=True)


def test_shared_memory_is_off_unless_it_is_switched_on() -> None:
    async def test(rig: Rig) -> None:
        code, text = await refused(rig.call("SystemSharedMemoryStatus"))
        assert code is Code.PERMISSION_DENIED and "--allow-shared-memory" in text
        request = make_request()
        request.outputs = [RequestedOutput("y", {"shared_memory_region": "r", "shared_memory_byte_size": 8})]
        body = ModelInferRequest.FromString(write_request(request)).SerializeToString()
        assert (await refused(rig.raw("/inference.GRPCInferenceService/ModelInfer", body)))[0] is Code.PERMISSION_DENIED

    run_controlled(test)
