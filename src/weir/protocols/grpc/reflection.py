"""gRPC's standard reflection service: tells clients that have no .proto files what there is to be called.

It answers from our own descriptor pool, and under both names that clients ask for (v1 and v1alpha).
"""

from collections.abc import Callable, Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2

from weir.wire.protobuf import POOL, message


def service_of(version: str) -> str:
    """Return the full name of the service of a version."""
    return f"grpc.reflection.{version}.ServerReflection"


VERSIONS = ("v1", "v1alpha")


class Reflection:
    """Answers what is asked of the services named, in the messages of one `version`."""

    def __init__(self, version: str, services: Iterable[str]) -> None:
        package = f"grpc.reflection.{version}"
        self._response = message(f"{package}.ServerReflectionResponse")
        self._services = sorted(services)
        self._answers: dict[str, Callable[[Any], dict[str, Any]]] = {
            "file_by_filename": lambda name: _files(POOL.FindFileByName(name)),
            "file_containing_symbol": lambda name: _files(POOL.FindFileContainingSymbol(name)),
            "list_services": self._list,
        }

    def answer(self, asked: Any) -> Any:
        """Return the answer to one request of a stream."""
        question = asked.WhichOneof("message_request")
        answered = self._response(valid_host=asked.host, original_request=asked)
        if question not in self._answers:  # our messages have no extensions, and never will
            return self._failed(answered, grpc.StatusCode.NOT_FOUND, f"there is nothing for {question}")
        try:
            said = self._answers[question](getattr(asked, question))
        except KeyError as error:
            return self._failed(answered, grpc.StatusCode.NOT_FOUND, str(error.args[0]))
        answered.MergeFrom(self._response(**said))
        return answered

    def _list(self, _: str) -> dict[str, Any]:
        return {"list_services_response": {"service": [{"name": name} for name in self._services]}}

    def _failed(self, answered: Any, code: grpc.StatusCode, text: str) -> Any:
        number: Any = code.value[0]
        answered.error_response.error_code, answered.error_response.error_message = number, text
        return answered


def _files(file: Any) -> dict[str, Any]:
    """Return a file and all that it imports."""
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        each = waiting.pop()
        if each.name not in found:
            found[each.name] = _serialized(each)
            waiting.extend(each.dependencies)
    return {"file_descriptor_response": {"file_descriptor_proto": list(found.values())}}


def _serialized(file: Any) -> bytes:
    described = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(described)
    return described.SerializeToString()
