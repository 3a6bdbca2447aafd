"""The calls over gRPC: what is sent for each, and what its answer means. Needs protobuf."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from google.protobuf.json_format import MessageToDict

from weir.client import failures
from weir.client.calls import Metadata, Streaming
from weir.client.programs import Program
from weir.errors import InvalidRequest
from weir.wire.inference import ERROR_NAME, InferenceRequest, InferenceResponse, Parameter
from weir.wire.kserve_grpc import read_response, read_stream_response, write_parameters, write_request
from weir.wire.protobuf import methods

SERVICE = "inference.GRPCInferenceService"

_METHODS = {method.name: method for method in methods(SERVICE)}


class GrpcCall(NamedTuple):
    """A call to be made: its path and its message, as bytes. The answer is bytes too."""

    path: str
    body: bytes


class GrpcCalls:
    """Calls as GrpcCalls."""

    def server_metadata(self) -> Program[Metadata]:
        """See Calls."""
        return _document((yield from _asked("ServerMetadata")))

    def server_live(self) -> Program[bool]:
        """See Calls."""
        return bool((yield from _asked("ServerLive")).live)

    def server_ready(self) -> Program[bool]:
        """See Calls."""
        return bool((yield from _asked("ServerReady")).ready)

    def model_ready(self, name: str, version: str) -> Program[bool]:
        """See Calls."""
        return bool((yield from _asked("ModelReady", name=name, version=version)).ready)

    def model_metadata(self, name: str, version: str) -> Program[Metadata]:
        """See Calls."""
        found = _document((yield from _asked("ModelMetadata", name=name, version=version)))
        for tensor in (*found["inputs"], *found["outputs"]):
            tensor["shape"] = [int(length) for length in tensor["shape"]]  # JSON of protobuf writes them as texts
        return found

    def models(self) -> Program[list[str]]:
        """See Calls."""
        return list((yield from _asked("ModelList")).models)

    def has_hardware(self, name: str, count: int) -> Program[bool]:
        """See Calls."""
        return bool((yield from _asked("HasHardware", name=name, num=count)).found)

    def load_model(self, name: str, config: Mapping[str, Any] | None) -> Program[None]:
        """See Calls."""
        request = _METHODS["ModelLoad"].request(name=name)
        if config is not None:
            write_parameters({"config": msgspec.json.encode(dict(config)).decode()}, request.parameters)
        yield from _sent("ModelLoad", request)

    def unload_model(self, name: str) -> Program[None]:
        """See Calls."""
        yield from _asked("ModelUnload", name=name)

    def load_worker(self, name: str, parameters: Mapping[str, Parameter]) -> Program[str]:
        """See Calls."""
        request = _METHODS["WorkerLoad"].request(name=name)
        write_parameters(dict(parameters), request.parameters)
        return str((yield from _sent("WorkerLoad", request)).endpoint)

    def unload_worker(self, endpoint: str) -> Program[None]:
        """See Calls."""
        yield from _asked("WorkerUnload", name=endpoint)

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""
        return read_response((yield GrpcCall(_METHODS["ModelInfer"].path, write_request(request))))

    def stream(self, request: InferenceRequest) -> Streaming:
        """See Calls."""
        return Streaming(GrpcCall(_METHODS["ModelStreamInfer"].path, write_request(request)), lambda: _decode)


def _decode(message: bytes) -> Iterable[InferenceResponse]:
    text, response = read_stream_response(message)
    if text:
        name = str(response.parameters.get(ERROR_NAME, ""))
        raise failures.of_status(500, text, name=name)
    yield response


def _asked(call: str, /, **fields: Any) -> Program[Any]:
    try:
        request = _METHODS[call].request(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{call}: {error}") from None
    return (yield from _sent(call, request))


def _sent(name: str, request: Any) -> Program[Any]:
    method = _METHODS[name]
    body = yield GrpcCall(method.path, request.SerializeToString())
    return method.response.FromString(body)


def _document(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
