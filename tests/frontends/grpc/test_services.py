"""What can be asked: health, metadata, configuration; and the standard services for health and reflection."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.frontends.grpc.kit import INFERENCE, Double, Rig, asking, refused, run, serving
from tests.streaming_models import Count

from weir.catalog.registry import Registry
from weir.frontends.grpc.services import ALL, Health, service_of
from weir.serving.service import Service
from weir.testing import FakeExecutor
from weir.wire.kserve_grpc import message

Code = grpc.StatusCode
Status = health_pb2.HealthCheckResponse


def test_health_of_server_and_models() -> None:
    async def test(rig: Rig) -> None:
        assert (await rig.call("ServerLive")).live
        assert (await rig.call("ServerReady")).ready
        assert (await rig.call("ModelReady", name="double")).ready
        assert not (await rig.call("ModelReady", name="nope")).ready
        assert not (await rig.call("ModelReady", name="double", version="3")).ready
        await rig.context.registry.stop()
        assert (await rig.call("ServerLive")).live
        assert not (await rig.call("ServerReady")).ready
        assert not (await rig.call("ModelReady", name="double")).ready

    run(test)


def test_a_server_is_not_live_while_a_model_can_start_no_worker_if_that_counts() -> None:
    async def main() -> None:
        executor = FakeExecutor()
        async with serving(Service(Double, executor=executor), http={"liveness": "models"}) as rig:
            assert (await rig.call("ServerLive")).live
            executor.end("no weights")
            assert not (await rig.call("ServerLive")).live
            executor.revive(0)
            assert (await rig.call("ServerLive")).live

    asyncio.run(main())


def test_metadata() -> None:
    async def main() -> None:
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
                code, said = await refused(rig.call(name, name="nope"))
                assert code is Code.NOT_FOUND and said.startswith("Request for unknown model: 'nope'")

    asyncio.run(main())


def test_statistics() -> None:
    async def main() -> None:
        services = [Service(Double, name="m", version=version, executor="inline") for version in ("1", "2")]
        async with serving(*services, Service(Count, executor="inline")) as rig:
            for _ in range(3):
                await rig.infer(asking(model="m"))
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

    asyncio.run(main())


@pytest.mark.parametrize("name", ["TraceSetting", "LogSettings", "CudaSharedMemoryRegister"])
def test_what_is_not_offered_says_so(name: str) -> None:
    async def test(rig: Rig) -> None:
        code, said = await refused(rig.call(name))
        assert code is Code.UNIMPLEMENTED and said

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
        code, said = await refused(stub.Check(health_pb2.HealthCheckRequest(service="nope")))
        assert code is Code.NOT_FOUND and "service 'nope'" in said
        watched = stub.Watch(health_pb2.HealthCheckRequest(service="double"))
        assert (await watched.read()).status == Status.SERVING
        rig.server.refuse()
        assert (await watched.read()).status == Status.NOT_SERVING
        assert await watched.code() is Code.OK
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING

    run(test)


def test_who_watches_hears_of_changes() -> None:
    async def main() -> None:
        service = Service(Double, executor=FakeExecutor())
        registry = Registry([service])
        watched = Health(registry, [], look_every=0.001).watch(message("grpc.health.v1.HealthCheckRequest")())
        assert (await anext(watched)).status == Status.NOT_SERVING
        async with service:
            assert (await anext(watched)).status == Status.SERVING
        await watched.aclose()

    asyncio.run(main())


def test_who_watches_hears_of_the_end_also_while_an_answer_is_on_its_way() -> None:
    async def main() -> None:
        async with Service(Double, executor=FakeExecutor()) as service:
            health = Health(Registry([service]), [])
            watched = health.watch(message("grpc.health.v1.HealthCheckRequest")())
            assert (await anext(watched)).status == Status.SERVING
            health.refuse()
            assert [answer.status async for answer in watched] == [Status.NOT_SERVING]

    asyncio.run(main())


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
        asked = reflection_pb2.ServerReflectionRequest
        call = stub.ServerReflectionInfo()

        async def ask(**question: Any) -> Any:
            await call.write(asked(**question))
            return await call.read()

        listed = (await ask(list_services="")).list_services_response
        assert [service.name for service in listed.service] == sorted(ALL)
        by_symbol = await ask(file_containing_symbol=INFERENCE)
        files = by_symbol.file_descriptor_response.file_descriptor_proto
        assert len(files) == 2  # it and the file that it imports
        assert by_symbol.original_request.file_containing_symbol == INFERENCE
        by_name = await ask(file_by_filename="health.proto")
        assert len(by_name.file_descriptor_response.file_descriptor_proto) == 1
        for question in (
            {"file_containing_symbol": "no.such.Thing"},
            {"file_by_filename": "nothing.proto"},
            {"all_extension_numbers_of_type": INFERENCE},
            {},
        ):
            assert (await ask(**question)).error_response.error_code == Code.NOT_FOUND.value[0]
        await call.done_writing()
        assert await call.code() is Code.OK

    run(test)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_in_both_versions(version: str) -> None:
    async def test(rig: Rig) -> None:
        asked, answered = (
            message(f"grpc.reflection.{version}.ServerReflection{side}") for side in ("Request", "Response")
        )
        path = f"/{service_of(version)}/ServerReflectionInfo"
        call = rig.channel.stream_stream(path)()
        await call.write(asked(list_services="").SerializeToString())
        assert len(answered.FromString(await call.read()).list_services_response.service) == len(ALL)
        await call.write(b"\xff\xff")
        assert await call.code() is Code.INVALID_ARGUMENT

    run(test)
