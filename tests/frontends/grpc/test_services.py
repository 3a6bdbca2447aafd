"""All other calls: health, metadata, configuration, reflection, and those that load, unload and share memory."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.frontends.grpc.kit import INFERENCE, Double, Rig, make_request, refuses, serving
from tests.late import needs_kserve
from tests.served import Served
from tests.streaming_models import Count

from weir.catalog.loading import ServiceMaker
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.sources import ModelToServe, TargetRepository
from weir.frontends.grpc.services import ALL, Health, service_of
from weir.serving.service import Service
from weir.testing import FakeExecutor
from weir.wire.data_plane import DATA_PLANE
from weir.wire.kserve_grpc import message

Code = grpc.StatusCode
Status = health_pb2.HealthCheckResponse


@asynccontextmanager
async def versions() -> AsyncIterator[Rig]:
    """Serve two versions of a model, and another one."""
    models = [Service(Double, name="m", version=version, executor="inline") for version in ("1", "2")]
    async with serving(*models, Count) as rig:
        yield rig


async def test_documents_become_messages() -> None:
    async with versions() as rig:
        found = await rig.call("ModelMetadata", name="m")
        assert (list(found.versions), found.platform) == (["1", "2"], "python")
        (tensor,) = found.inputs
        assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("x", "INT32", [-1, 2])
        config = (await rig.call("ModelConfig", name="m", version="1")).config
        assert (config.max_batch_size, config.input[0].data_type, list(config.input[0].dims)) == (2, 8, [2])
        await refuses(rig.call("ModelConfig", name="nope"), Code.NOT_FOUND, "^Request for unknown model: 'nope'")
        ready = [await rig.call("ModelReady", name="m", version=version) for version in ("1", "3")]
        assert [each.ready for each in ready] == [True, False]


async def test_statistics() -> None:
    async with versions() as rig:
        wide = make_request(model="m")
        wide.inputs[0].array = wide.inputs[0].array.repeat(5, axis=0)  # more rows than two batches have
        for request in (make_request(model="m"), make_request(model="m"), wide):
            await rig.infer(request)
        await refuses(rig.call("ModelInfer", model_name="m"), Code.INVALID_ARGUMENT)
        (one,) = (await rig.call("ModelStatistics", name="m", version="2")).model_stats
        assert (one.execution_count, one.inference_stats.success.count, one.inference_stats.fail.count) == (5, 3, 1)
        assert [(each.batch_size, each.compute_infer.count) for each in one.batch_stats] == [(1, 3), (2, 2)]
        assert one.inference_stats.queue.count == 3 and one.last_inference > 0


async def test_the_standard_health_client() -> None:
    async with serving() as rig:
        stub: Any = health_pb2_grpc.HealthStub(rig.channel)
        for name in ("", INFERENCE, "double"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == Status.SERVING
        await refuses(stub.Check(health_pb2.HealthCheckRequest(service="nope")), Code.NOT_FOUND, "service 'nope'")
        watched, unknown = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("double", "nope")]
        assert (await watched.read()).status == Status.SERVING
        assert (await unknown.read()).status == Status.SERVICE_UNKNOWN  # it may come
        unknown.cancel()
        bad = rig.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff\xff")
        assert await bad.code() is Code.INVALID_ARGUMENT
        rig.server.refuse()
        assert (await watched.read()).status == Status.NOT_SERVING
        assert await watched.code() is Code.OK
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING


async def test_who_watches_hears_of_changes_and_of_the_end() -> None:
    """Of the end also while an answer is on its way."""
    service = Service(Double, executor=FakeExecutor())
    health = Health(Registry([service]), [], look_every=0.001)
    watched = health.watch(message("grpc.health.v1.HealthCheckRequest")())
    assert (await anext(watched)).status == Status.NOT_SERVING
    async with service:
        assert (await anext(watched)).status == Status.SERVING
        health.refuse()
        assert [answer.status async for answer in watched] == [Status.NOT_SERVING]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection(version: str) -> None:
    request, answered = (
        message(f"grpc.reflection.{version}.ServerReflection{side}") for side in ("Request", "Response")
    )
    async with serving() as rig:
        call = rig.channel.stream_stream(f"/{service_of(version)}/ServerReflectionInfo")()

        async def send(**question: Any) -> Any:
            await call.write(request(**question).SerializeToString())
            return answered.FromString(await call.read())

        listed = (await send(list_services="")).list_services_response
        assert [service.name for service in listed.service] == sorted(ALL)
        by_symbol = await send(file_containing_symbol=INFERENCE)
        assert len(by_symbol.file_descriptor_response.file_descriptor_proto) == 2  # it and the file that it imports
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
        await call.write(b"\xff\xff")
        assert await call.code() is Code.INVALID_ARGUMENT


MODEL = ModelToServe("tests.frontends.grpc.kit:Double", "double", {}, [], {"executor": "inline"})


@asynccontextmanager
async def controlled(**options: Any) -> AsyncIterator[Rig]:
    """Serve with a manager that knows Double, which runs."""
    make = ServiceMaker([])
    manager = lambda registry: Manager(registry, TargetRepository([MODEL]), make)  # noqa: E731 - short
    async with serving(make(MODEL), manager=manager, **options) as rig:
        yield rig


async def test_models_of_the_repository_through_the_clients_of_each_product() -> None:
    """MLServer's look for it elsewhere."""
    async with controlled() as rig:

        async def states(**options: Any) -> list[tuple[str, str]]:
            return [(each.name, each.state) for each in (await rig.call("RepositoryIndex", **options)).models]

        mlservers = "inference.model_repository.ModelRepositoryService"
        for size, field, service in (
            (7, "model_name", INFERENCE),
            (5, "repository_name", INFERENCE),
            (2, "model_name", mlservers),
        ):
            named: Any = {field: "double", "service": service}
            assert await states(service=service) == [("double", "READY")]
            unloaded = await rig.call("RepositoryModelUnload", **named)
            assert await states() == [("double", "UNAVAILABLE")]
            assert await states(ready=True) == []
            if service == INFERENCE:
                assert (unloaded.model_name, unloaded.isUnloaded) == ("double", True)
                named["parameters"] = {"config": {"string_param": f'{{"max_batch_size": {size}}}'}}
            loaded = await rig.call("RepositoryModelLoad", **named)
            if service == INFERENCE:
                assert (loaded.model_name, loaded.isLoaded) == ("double", True)
            assert rig.context.registry.get("double").facts.batching.max_batch_size == size
            assert (await rig.infer(make_request())).outputs


CONFIG = {"config": {"string_param": "{}"}, "file:1/model.py": {"bytes_param": b"code"}}
REGION = {"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": {"int64_param": 8}}
TENSOR = {"name": "x", "datatype": "INT32", "shape": [1, 2], "parameters": REGION}
REFUSED: list[tuple[str, dict[str, Any], Code, str]] = [
    ("TraceSetting", {}, Code.UNIMPLEMENTED, "."),
    ("RepositoryModelLoad", {"model_name": "nope"}, Code.NOT_FOUND, "'nope'"),
    ("RepositoryModelLoad", {"model_name": "double", "parameters": {"x": {"int64_param": 1}}}, Code.INVALID_ARGUMENT, "parameter 'x'"),
    ("RepositoryModelLoad", {"model_name": "double", "parameters": {"x": {}}}, Code.INVALID_ARGUMENT, "parameter 'x': has no value"),
    ("RepositoryModelLoad", {"model_name": "double", "parameters": CONFIG}, Code.PERMISSION_DENIED, "allow_model_files"),
    (
        "RepositoryModelUnload", {"model_name": "double", "parameters": {"unload_dependents": {"int64_param": 1}}},
        Code.INVALID_ARGUMENT, "unload_dependents=1: must be true or false",
    ),
    ("SystemSharedMemoryRegister", {"name": "r", "key": "nowhere", "byte_size": 8}, Code.INVALID_ARGUMENT, "'nowhere'"),
    ("SystemSharedMemoryStatus", {"name": "r"}, Code.INVALID_ARGUMENT, "'r'"),
    ("ModelInfer", {"model_name": "double", "inputs": [TENSOR]}, Code.INVALID_ARGUMENT, "'r'"),
]  # fmt: skip


async def test_what_is_refused() -> None:
    async with controlled(allow_shared_memory=True) as rig:
        for call, fields, code, text in REFUSED:
            await refuses(rig.call(call, **fields), code, text)


async def codes_of(rig: Rig, *metadata: tuple[str, str]) -> set[Code]:
    """Return how the calls that control the server end, with such metadata."""
    calls = [name for call in DATA_PLANE.values() if call.controls for name in call.grpc]
    return {await rig.raw(f"/{INFERENCE}/{call}", b"", metadata=metadata).code() for call in calls}


async def test_a_token_is_required(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    async with controlled(control={"control_token_file": str(file)}, allow_shared_memory=True) as rig:
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            assert await codes_of(rig, *metadata) == {Code.UNAUTHENTICATED}
        allowed = await codes_of(rig, ("authorization", "Bearer secret"))
        assert allowed == {Code.OK, Code.NOT_FOUND, Code.INVALID_ARGUMENT}


async def test_what_a_proxy_passes_on_comes_from_anywhere() -> None:
    async with controlled(allow_shared_memory=True) as rig:
        assert await codes_of(rig, ("x-forwarded-for", "192.0.2.7")) == {Code.PERMISSION_DENIED}


async def test_shared_memory_is_off_unless_it_is_switched_on() -> None:
    async with controlled() as rig:
        await refuses(rig.call("SystemSharedMemoryStatus"), Code.PERMISSION_DENIED, "--allow-shared-memory")
        given = {"name": "x", "datatype": "INT32", "shape": [1, 2]}
        wanted = {"name": "y", "parameters": REGION}
        for fields in (
            {"inputs": [{**given, "contents": {"int_contents": [1, 2]}}], "outputs": [wanted]},
            {"inputs": [TENSOR]},
        ):
            await refuses(rig.call("ModelInfer", model_name="double", **fields), Code.PERMISSION_DENIED)


ROOT = Path(__file__).parents[3]
REPOSITORY = ROOT / "examples" / "repository"
CLIENTS = Path(__file__).parent / "clients"
MODELS = (
    REPOSITORY / "simple" / "1" / "model.py:Simple",
    REPOSITORY / "simple_string" / "1" / "model.py:SimpleString",
    ROOT / "tests" / "streaming_models.py:Count",
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Served(*MODELS, "--grpc-port", "0", "--allow-shared-memory") as served:
        yield served.until_grpc().until_ready().grpc


def check_client(client: str, address: str) -> None:
    command = [sys.executable, "-W", "ignore", str(CLIENTS / client), address]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("client", ["standard.py", "triton.py", pytest.param("kserve_client.py", marks=needs_kserve)])
def test_client(address: str, client: str) -> None:
    check_client(client, address)
