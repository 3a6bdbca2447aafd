"""The clients for gRPC. Needs grpcio and protobuf (the extra `grpc`)."""

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio
import msgspec
from google.protobuf.json_format import MessageToDict

from weir.client.calls import Metadata, Program, Retry, Silence, Streaming, error_of_code, error_of_status
from weir.client.loops import PerLoop
from weir.client.methods import AsyncClient, Client
from weir.errors import InvalidRequest
from weir.wire.inference import ERROR_NAME, InferenceRequest, InferenceResponse, Parameter
from weir.wire.kserve_grpc import methods, read_response, read_stream_response, write_parameters, write_request

SERVICE = "inference.GRPCInferenceService"

_METHODS = {method.name: method for method in methods(SERVICE)}


class GrpcCall(NamedTuple):
    """A step: the path of a method, and its message as bytes. The answer is the response's message as bytes."""

    path: str
    body: bytes


class GrpcCalls:
    """Calls whose steps are GrpcCalls."""

    def server_metadata(self) -> Program[Metadata]:
        """See Calls."""
        return _document((yield from _called("ServerMetadata")))

    def server_live(self) -> Program[bool]:
        """See Calls."""
        return bool((yield from _called("ServerLive")).live)

    def server_ready(self) -> Program[bool]:
        """See Calls."""
        return bool((yield from _called("ServerReady")).ready)

    def model_ready(self, name: str, version: str) -> Program[bool]:
        """See Calls."""
        return bool((yield from _called("ModelReady", name=name, version=version)).ready)

    def model_metadata(self, name: str, version: str) -> Program[Metadata]:
        """See Calls."""
        found = _document((yield from _called("ModelMetadata", name=name, version=version)))
        for tensor in (*found["inputs"], *found["outputs"]):
            tensor["shape"] = [
                int(length) for length in tensor["shape"]
            ]  # protobuf's JSON has 64-bit integers as strings
        return found

    def models(self) -> Program[list[str]]:
        """See Calls."""
        return list((yield from _called("ModelList")).models)

    def has_hardware(self, name: str, count: int) -> Program[bool]:
        """See Calls."""
        return bool((yield from _called("HasHardware", name=name, num=count)).found)

    def load_model(self, name: str, config: Mapping[str, Any] | None) -> Program[None]:
        """See Calls."""
        request = _METHODS["ModelLoad"].request(name=name)
        if config is not None:
            write_parameters({"config": msgspec.json.encode(dict(config)).decode()}, request.parameters)
        yield from _sent("ModelLoad", request)

    def unload_model(self, name: str) -> Program[None]:
        """See Calls."""
        yield from _called("ModelUnload", name=name)

    def load_worker(self, name: str, parameters: Mapping[str, Parameter]) -> Program[str]:
        """See Calls."""
        request = _METHODS["WorkerLoad"].request(name=name)
        write_parameters(dict(parameters), request.parameters)
        return str((yield from _sent("WorkerLoad", request)).endpoint)

    def unload_worker(self, endpoint: str) -> Program[None]:
        """See Calls."""
        yield from _called("WorkerUnload", name=endpoint)

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
        raise error_of_status(500, text, name=name)
    yield response


def _called(call: str, /, **fields: Any) -> Program[Any]:
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


_PUSHBACK = "grpc-retry-pushback-ms"
# Messages may have any size, each client has its own connection, only Retry decides which calls are sent again, and calls go to the
# server itself, as those over HTTP do.
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0),
]  # fmt: skip


class GrpcClient(Client):
    """A client of a server over gRPC, such as `GrpcClient("localhost:8001")`. Many threads may use it at a time.

    All calls share one connection.

    Arguments:
        address: HOST:PORT.
        timeout: seconds for each call that has no timeout of its own.
        token: the control token, for the calls that need it.
        retry: which calls are sent again; by default Retry().
        credentials: for TLS.
    """

    def __init__(
        self, address: str, *, timeout: float = 60.0, token: str | None = None, retry: Retry | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:  # fmt: skip
        super().__init__(GrpcCalls(), GrpcTransport(address, token, credentials), timeout=timeout, retry=retry)


class AsyncGrpcClient(AsyncClient):
    """GrpcClient for an event loop: the methods are to be awaited."""

    def __init__(
        self, address: str, *, timeout: float = 60.0, token: str | None = None, retry: Retry | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:  # fmt: skip
        super().__init__(GrpcCalls(), AsyncGrpcTransport(address, token, credentials), timeout=timeout, retry=retry)


class GrpcTransport:
    """A Transport for GrpcCalls."""

    def __init__(self, address: str, token: str | None, credentials: grpc.ChannelCredentials | None) -> None:
        self._channel: Any  # grpcio's type stubs require serializers, which bytes do not need
        if credentials is None:
            self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, CHANNEL_OPTIONS)
        self._metadata = _metadata(token)

    def send(self, step: GrpcCall, timeout: float) -> bytes:
        """Make a call and return the response's message. Raises the WeirError that a failure stands for."""
        with _failing():
            answer: bytes = self._channel.unary_unary(step.path)(step.body, timeout=timeout, metadata=self._metadata)
        return answer

    def chunks(self, step: GrpcCall, silence: Silence) -> Generator[bytes, None, None]:
        """Make a call and yield the responses' messages. Raises DeadlineExceeded when `silence` is over; a stream has no time limit as
        a whole."""
        call = self._channel.stream_stream(step.path)(iter([step.body]), metadata=self._metadata)
        try:
            with silence.ending(call.cancel), _failing():
                yield from call
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class AsyncGrpcTransport:
    """An AsyncTransport for GrpcCalls."""

    def __init__(self, address: str, token: str | None, credentials: grpc.ChannelCredentials | None) -> None:
        self._metadata = _metadata(token)

        def make() -> Any:
            if credentials is None:
                return grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
            return grpc.aio.secure_channel(address, credentials, CHANNEL_OPTIONS)

        self._channels = PerLoop(make, lambda channel: channel.close())

    async def send(self, step: GrpcCall, timeout: float) -> bytes:
        """Make a call and return the response's message. Raises the WeirError that a failure stands for."""
        with _failing():
            call = (await self._channels.get()).unary_unary(step.path)
            answer: bytes = await call(step.body, timeout=timeout, metadata=self._metadata)
        return answer

    async def chunks(self, step: GrpcCall, timeout: float) -> AsyncGenerator[bytes, None]:
        """Make a call and yield the responses' messages. A stream has no time limit as a whole."""
        call = (await self._channels.get()).stream_stream(step.path)(iter([step.body]), metadata=self._metadata)
        try:
            with _failing():
                async for message in call:
                    yield message
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the connection."""
        await self._channels.close()


@contextmanager
def _failing() -> Iterator[None]:
    """Translate errors of grpcio in the block into ours."""
    try:
        yield
    except grpc.RpcError as error:
        call: Any = error
        trailers = dict(_pairs(call.trailing_metadata()))
        wait = trailers.get(_PUSHBACK)
        after = int(wait) / 1000 if wait is not None else None
        text = call.details() or ""
        raise error_of_code(call.code().name, text, name=trailers.get(ERROR_NAME, ""), retry_after=after) from error


def _pairs(metadata: Iterable[Any] | None) -> Iterator[tuple[str, str]]:
    for name, value in metadata or ():
        yield name, value if isinstance(value, str) else value.decode("latin-1")


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)
