"""Run as a program: gRPC's own clients of the health and reflection services against the server whose address is given."""

import sys
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

INFERENCE = "inference.GRPCInferenceService"


def healthy(channel: Any) -> None:
    """Ask how the server and a model are."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for name in ("", INFERENCE, "simple"):
        status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    watched = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    watched.cancel()


def reflected(channel: Any) -> None:
    """Call a method of which nothing is known but what the server says."""
    database: Any = ProtoReflectionDescriptorDatabase(channel)
    assert INFERENCE in database.get_services()
    pool: Any = DescriptorPool(database)
    method = pool.FindServiceByName(INFERENCE).FindMethodByName("ModelMetadata")
    request, answered = (GetMessageClass(each) for each in (method.input_type, method.output_type))
    call = channel.unary_unary(
        f"/{INFERENCE}/ModelMetadata", request.SerializeToString, answered.FromString
    )  # fmt: skip
    assert [each.name for each in call(request(name="simple"), timeout=60).inputs] == ["INPUT0", "INPUT1"]


if __name__ == "__main__":
    with grpc.insecure_channel(sys.argv[1]) as made:
        healthy(made)
        reflected(made)
