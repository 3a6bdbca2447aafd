"""The messages of the gRPC services, in a descriptor pool of their own.

Generated code puts its messages into one pool for the whole process, where two packages that both speak the Open Inference
Protocol collide. These are built at run time, in a pool that nobody else sees, so that a process may load the clients of
Triton and KServe too. `protos/` has their sources, and compiled by `make protos`, `messages.binpb`.
"""

from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PROTOS = files("weir.wire") / "protos"
COMPILED = "messages.binpb"


class Method(NamedTuple):
    """One call of a service: its path, and the classes of what it takes and gives."""

    service: str
    name: str
    request: Any
    response: Any
    requests_stream: bool
    responses_stream: bool

    @property
    def path(self) -> str:
        """What travels as the name of the call."""
        return f"/{self.service}/{self.name}"


def _load() -> DescriptorPool:
    compiled = descriptor_pb2.FileDescriptorSet.FromString((PROTOS / COMPILED).read_bytes())
    pool = DescriptorPool()
    for file in compiled.file:  # each comes after those that it imports
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _load()


def message(name: str) -> Any:
    """Return the class of the message of that full name, such as `inference.ModelInferRequest`."""
    return GetMessageClass(POOL.FindMessageTypeByName(name))


def methods(service: str) -> list[Method]:
    """Return the calls of the service of that full name, in the order of its source."""
    return [
        Method(
            service, each.name, GetMessageClass(each.input_type), GetMessageClass(each.output_type),
            each.client_streaming, each.server_streaming,
        )
        for each in POOL.FindServiceByName(service).methods
    ]  # fmt: skip
