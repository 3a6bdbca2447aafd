"""What changes the server through gRPC: models, workers, shared memory; and who may."""

import asyncio
import mmap
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.frontends.grpc.kit import Rig, asking, refused, serving

from weir.catalog.loading import ServiceMaker
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.sources import ModelToServe, TargetRepository
from weir.wire.inference import AskedOutput
from weir.wire.kserve_grpc import ModelInferRequest, write_request

Code = grpc.StatusCode
MODEL = ModelToServe("tests.frontends.grpc.kit:Double", "double", {}, [], {"executor": "inline"})
LOAD = {
    "batch_size": {"int64_param": 3},
    "timeout": {"double_param": 20.0},
    "config": {"string_param": '{"max_queue_size": 9}'},
}
REPOSITORY = "inference.model_repository.ModelRepositoryService"


def run(test: Callable[[Rig], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `test` against a server with a manager that knows Double, which runs."""

    async def main() -> None:
        make = ServiceMaker([])

        def managed(registry: Registry) -> Manager:
            return Manager(registry, TargetRepository([MODEL]), make)

        async with serving(make(MODEL), manager=managed, **options) as rig:
            await asyncio.wait_for(test(rig), 20)

    asyncio.run(main())


def test_a_load_takes_the_parameters_of_amds_client() -> None:
    async def test(rig: Rig) -> None:
        await rig.call("ModelLoad", name="double", parameters=LOAD)
        batching = rig.context.registry.get("double").batching
        assert (batching.max_batch_size, batching.max_queue_delay, batching.max_queue_size) == (3, 0.02, 9)
        code, text = await refused(rig.call("ModelLoad", name="double", parameters={"wrong": {"bool_param": True}}))
        assert code is Code.INVALID_ARGUMENT
        assert "parameter 'wrong': is no setting" in text

    run(test)


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
        assert rig.context.registry.get("double").batching.max_batch_size == 7
        assert (await rig.infer(asking())).outputs

    run(test)


def test_the_repository_where_mlservers_clients_look_for_it() -> None:
    async def test(rig: Rig) -> None:
        assert len((await rig.call("RepositoryIndex", service=REPOSITORY)).models) == 1
        await rig.call("RepositoryModelLoad", service=REPOSITORY, model_name="double")
        await rig.call("RepositoryModelUnload", service=REPOSITORY, model_name="double")

    run(test)


@pytest.mark.parametrize(
    ("call", "fields", "code", "said"),
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
def test_what_is_refused(call: str, fields: dict[str, Any], code: Any, said: str) -> None:
    async def test(rig: Rig) -> None:
        told = await refused(rig.call(call, **fields))
        assert told[0] is code and said in told[1]

    run(test, allow_shared_memory=True)


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

    run(test)


def test_hardware() -> None:
    async def test(rig: Rig) -> None:
        cpus = len(os.sched_getaffinity(0))
        for name, number, found in (("cpu", 0, True), ("CPU", cpus, True), ("cpu", cpus + 1, False), ("xrt", 1, False)):
            assert (await rig.call("HasHardware", name=name, num=number)).found is found

    run(test)


CONTROLLING = (
    "RepositoryModelLoad", "RepositoryModelUnload", "ModelLoad", "ModelUnload", "WorkerLoad", "WorkerUnload",
    "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
)  # fmt: skip


@pytest.mark.parametrize("call", CONTROLLING)
def test_a_token_is_asked_for(call: str, tmp_path: Path) -> None:
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

        run(allowed, control=with_token, allow_shared_memory=True)
    else:
        run(test, control=with_token, allow_shared_memory=True)


@pytest.mark.parametrize("call", CONTROLLING)
def test_what_a_proxy_passes_on_comes_from_anywhere(call: str) -> None:
    async def test(rig: Rig) -> None:
        code, _ = await refused(rig.call(call, metadata=(("x-forwarded-for", "192.0.2.7"),)))
        assert code is Code.PERMISSION_DENIED

    run(test, allow_shared_memory=True)


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
        code, said = await refused(rig.call("ModelInfer", model_name="double", inputs=[tensor]))
        assert code is Code.INVALID_ARGUMENT and "'r'" in said

    run(test, allow_shared_memory=True)


def test_shared_memory_is_off_unless_it_is_switched_on() -> None:
    async def test(rig: Rig) -> None:
        code, said = await refused(rig.call("SystemSharedMemoryStatus"))
        assert code is Code.PERMISSION_DENIED and "--allow-shared-memory" in said
        request = asking()
        request.outputs = [AskedOutput("y", {"shared_memory_region": "r", "shared_memory_byte_size": 8})]
        body = ModelInferRequest.FromString(write_request(request)).SerializeToString()
        assert (await refused(rig.raw("/inference.GRPCInferenceService/ModelInfer", body)))[0] is Code.PERMISSION_DENIED

    run(test)
