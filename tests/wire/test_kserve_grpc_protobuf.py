"""Our messages are those that clients speak, and no other package of the process sees them."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from weir.wire import kserve_grpc as protobuf
from weir.wire.kserve_grpc import COMPILED, POOL, PROTOS, message, methods

SERVICE = "inference.GRPCInferenceService"
IMPORTS = {
    "weir": "from weir.wire import kserve_grpc",
    "tritonclient": "import tritonclient.grpc",
    "kserve": "from kserve.protocol.grpc import grpc_predict_v2_pb2",
}
# Has the messages of kserve loaded without all the rest of it, which takes seconds and has no messages.
BARE = """
import importlib.util, sys, types
for name in ("kserve", "kserve.protocol", "kserve.protocol.grpc"):
    package = types.ModuleType(name)
    package.__path__ = importlib.util.find_spec(name).submodule_search_locations
    sys.modules[name] = package
"""


def compiled() -> Any:
    return descriptor_pb2.FileDescriptorSet.FromString((PROTOS / COMPILED).read_bytes())


def test_what_is_packaged_is_the_sources_compiled(tmp_path: Path) -> None:
    sources = sorted(path.name for path in Path(str(PROTOS)).glob("*.proto"))
    output = tmp_path / COMPILED
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"--descriptor_set_out={output}", *sources]
    subprocess.run(command, check=True, timeout=30)
    made = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    by_name = {file.name: file for file in made.file}
    assert {file.name for file in compiled().file} == by_name.keys()
    assert all(file == by_name[file.name] for file in compiled().file)


def fields(descriptor: Any, prefix: str = "") -> set[tuple[Any, ...]]:
    """Return name, number, type and label of all fields of a message and of those inside of it."""
    name = f"{prefix}{descriptor.name}"
    found = {(name, field.name, field.number, field.type, field.label) for field in descriptor.field}
    return found.union(*[fields(inner, f"{name}.") for inner in descriptor.nested_type])


def described(module: str) -> list[Any]:
    """Return the files of a client's own messages, read in a process of their own."""
    code = f"{BARE}\nfrom {module} import DESCRIPTOR as d; sys.stdout.buffer.write(d.serialized_pb)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=50)
    return [descriptor_pb2.FileDescriptorProto.FromString(run.stdout)]


@pytest.mark.parametrize(
    ("module", "ours"),
    [
        ("tritonclient.grpc.service_pb2", "inference.proto"),
        ("tritonclient.grpc.model_config_pb2", "model_config.proto"),
        ("kserve.protocol.grpc.grpc_predict_v2_pb2", "inference.proto"),
    ],
)
def test_names_and_numbers_are_those_of_stock_clients(module: str, ours: str) -> None:
    own = next(file for file in compiled().file if file.name == ours)
    known = set().union(*[fields(each) for each in own.message_type])
    (theirs,) = described(module)
    expected = set().union(*[fields(each) for each in theirs.message_type])
    if "tritonclient" not in module:  # where the two contradict each other: the same number, and text in both
        expected = {field for field in expected if not field[0].startswith("RepositoryModel")}
        assert expected <= known
    elif ours == "inference.proto":
        assert expected <= known
        assert {method.name for service in theirs.service for method in service.method} <= {
            method.name for method in methods(SERVICE)
        }
    else:  # of the configuration we say what means something here
        assert known <= expected


def test_a_method_knows_its_path_and_messages() -> None:
    stream = next(method for method in methods(SERVICE) if method.name == "ModelStreamInfer")
    assert stream.path == "/inference.GRPCInferenceService/ModelStreamInfer"
    assert (stream.request, stream.response) == (
        message("inference.ModelInferRequest"),
        message("inference.ModelStreamInferResponse"),
    )
    assert stream.requests_stream and stream.responses_stream


def test_our_pool_is_ours_alone() -> None:
    from google.protobuf import descriptor_pool

    assert descriptor_pool.Default() is not POOL
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName("health.proto")
    assert protobuf.POOL.FindMessageTypeByName("grpc.health.v1.HealthCheckRequest") is not None


@pytest.mark.parametrize(
    ("order", "before"),
    [
        *[pytest.param(order, BARE, id="-".join(order)) for order in itertools.permutations(IMPORTS)],
        pytest.param(("kserve", "weir", "tritonclient"), "", id="the whole of kserve"),
    ],
)
def test_a_process_may_load_ours_and_those_of_clients_in_any_order(order: tuple[str, ...], before: str) -> None:
    """The two clients collide with each other, whoever comes first; ours with neither, before and after."""
    lines = [before, "collided = []"]
    for name in order:
        lines += ["try:", f"    {IMPORTS[name]}", "except TypeError:", f"    collided.append({name!r})"]
    second = [name for name in order if name != "weir"][1]
    lines.append(f"assert collided == [{second!r}], collided")
    lines.append(
        "assert kserve_grpc.ModelInferRequest.FromString(kserve_grpc.ModelInferRequest(id='7').SerializeToString()).id == '7'"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], check=True, timeout=50)
