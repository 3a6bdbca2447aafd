"""The clients for gRPC. Needs grpcio and protobuf (the extra `grpc`)."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict

from weir.client.calls import Calls, Metadata, Program, Retry, Silence, Streaming, error_of_code, error_of_status
from weir.client.methods import AsyncClient, Client, PerLoop
from weir.errors import DeadlineExceeded, InvalidRequest, SettingsError, WeirError
from weir.wire.data_plane import DATA_PLANE
from weir.wire.inference import ERROR_NAME, InferenceRequest, InferenceResponse
from weir.wire.kserve_grpc import methods, read_response, read_stream_response, write_parameters, write_request

SERVICE = "inference.GRPCInferenceService"

Pairs = tuple[tuple[str, str], ...]  # metadata of a call

_METHODS = {method.name: method for method in methods(SERVICE)}


class GrpcCall(NamedTuple):
    """A step: the path of a method, and its message as bytes. The response is the response's message as bytes."""

    path: str
    body: bytes


class GrpcCalls(Calls):
    """Calls whose steps are GrpcCalls."""

    def call(self, name: str, body: Mapping[str, Any] | None = None, /, **path: str) -> Program[Any]:
        """See Calls."""
        call = DATA_PLANE[name]
        method = _METHODS[call.grpc[0]]
        given, parameters = dict(body or {}), None
        if "parameters" in method.request.DESCRIPTOR.fields_by_name:
            given, parameters = {}, given if name == "load_worker" else given["parameters"]
        try:
            request = method.request(**{"name" if key == call.subject else key: path[key] for key in path}, **given)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{method.name}: {error}") from None
        if parameters:
            write_parameters(parameters, request.parameters)
        response = method.response.FromString((yield GrpcCall(method.path, request.SerializeToString())))
        document = MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return document[call.wrapped] if call.wrapped else document

    def model_metadata(self, name: str, version: str) -> Program[Metadata]:
        """See Calls."""
        found = yield from super().model_metadata(name, version)
        for tensor in (*found["inputs"], *found["outputs"]):
            # Protobuf's JSON has 64-bit integers as strings.
            tensor["shape"] = [int(length) for length in tensor["shape"]]
        return found

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


_PUSHBACK = "grpc-retry-pushback-ms"
_LATE = 0.1  # seconds after its timeout in which the core ends a call that it can end
_IDLE = 1.0  # seconds that a thread waits for the next call
_CLOSING = 1.0  # seconds that closing a connection may take
# Messages may have any size, each client has its own connection, only Retry decides which calls are sent again, and calls go to the
# server itself, as those over HTTP do.
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]


class OverGrpc:
    """The base class of the clients of a server's gRPC address. Each has the class of its `transport`.

    Arguments:
        address: HOST:PORT; grpcs://HOST:PORT uses TLS, with the system's certificates unless `credentials` are given.
        timeout: seconds for each call that has no timeout of its own.
        token: the control token, for the calls that need it.
        retry: which calls are sent again; by default Retry().
        credentials: for TLS.
    """

    transport: Callable[..., Any]

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 60.0,
        token: str | None = None,
        retry: Retry | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        made: Any = super()
        scheme, separator, place = address.rpartition("://")
        if separator and scheme not in ("grpc", "grpcs"):
            raise SettingsError(f"address={address!r}: must be HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT")
        if scheme == "grpcs" and credentials is None:
            credentials = grpc.ssl_channel_credentials()
        transport = type(self).transport(place, _metadata(token), credentials)
        made.__init__(GrpcCalls(), transport, timeout=timeout, retry=retry)


class _Connected:
    """The channel for the next call.

    The core of gRPC ends no call whose message is being written, so a server that stops reading holds every call of a connection and
    all that was to be sent. Their callers leave it, and the next call gets a new one. Calls that go on keep the old one open.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.channel = make()
        self.unary: Callable[[str], Any] = cache(self.channel.unary_unary)  # by path

    def leave(self, channel: Any) -> None:
        """Use `channel` for no further call."""
        if channel is self.channel:
            self.channel = self._make()
            self.unary = cache(self.channel.unary_unary)


class _Helpers:
    """Threads that wait for calls in the place of their callers, who can thus leave a call that does not end.

    A future of grpcio can be left, too, but costs a new thread for each call.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[tuple[Future[Any], Callable[[], Any]]]] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def run(self, work: Callable[[], Any], seconds: float) -> Any:
        """Return the result of `work`, or raise its error. Raises TimeoutError after `seconds`, while `work` goes on."""
        future = Future[Any]()
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            threading.Thread(target=self._help, args=(jobs,), name="weir-call", daemon=True).start()
        jobs.put((future, work))
        return future.result(seconds)

    def _help(self, jobs: "SimpleQueue[tuple[Future[Any], Callable[[], Any]]]") -> None:
        while True:
            try:
                future, work = jobs.get(timeout=_IDLE)
            except Empty:
                with suppress(ValueError):  # unless a caller has just taken it
                    self._idle.remove(jobs)
                    return
                continue
            try:
                result = work()
            except BaseException as error:
                end = partial(future.set_exception, error)
            else:
                end = partial(future.set_result, result)
                del result
            self._idle.append(jobs)
            end()
            del future, work, end  # nothing of a call may outlive it


_HELPERS = _Helpers()


class GrpcTransport:
    """A Transport for GrpcCalls."""

    def __init__(self, address: str, metadata: Pairs, credentials: grpc.ChannelCredentials | None) -> None:
        self._address = address
        self._connected = _Connected(partial(_channel, grpc, address, credentials))
        self._metadata = metadata

    def send(self, step: GrpcCall, timeout: float) -> bytes:
        """Make a call and return the response's message. Raises the WeirError that a failure stands for."""
        channel = self._connected.channel
        call = partial(self._connected.unary(step.path), step.body, timeout=timeout, metadata=self._metadata)
        try:
            with _failing():
                response: bytes = _HELPERS.run(call, timeout + _LATE)
        except TimeoutError as error:
            if isinstance(error, WeirError):
                raise
            self._connected.leave(channel)
            raise _late(self._address) from None
        return response

    def chunks(self, step: GrpcCall, silence: Silence) -> Generator[bytes, None, None]:
        """Make a call and yield the responses' messages. Raises DeadlineExceeded when `silence` is over; a stream has no time limit as
        a whole."""
        channel = self._connected.channel
        call = channel.stream_stream(step.path)(iter([step.body]), metadata=self._metadata)
        answered = False
        try:
            with _failing():
                while (message := _HELPERS.run(partial(next, call, None), silence.left)) is not None:
                    answered = True
                    yield message
        except TimeoutError as error:
            raise error if isinstance(error, WeirError) else silence.error() from None
        finally:
            call.cancel()
            if silence.is_over and not answered:
                self._connected.leave(channel)

    def close(self) -> None:
        """Close the connection."""
        # It waits for the end of all calls, but a message that nobody reads may hold them.
        closing = threading.Thread(target=self._connected.channel.close, name="weir-close", daemon=True)
        closing.start()
        closing.join(_CLOSING)


class AsyncGrpcTransport:
    """An AsyncTransport for GrpcCalls."""

    def __init__(self, address: str, metadata: Pairs, credentials: grpc.ChannelCredentials | None) -> None:
        self._metadata = metadata
        self._address = address
        make = partial(_channel, grpc.aio, address, credentials)
        self._connected = PerLoop(lambda: _Connected(make), lambda connected: connected.channel.close())

    async def send(self, step: GrpcCall, timeout: float) -> bytes:
        """Make a call and return the response's message. Raises the WeirError that a failure stands for."""
        connected = await self._connected.get()
        channel = connected.channel
        limit = asyncio.timeout(timeout + _LATE)
        try:
            async with limit:
                with _failing():
                    response: bytes = await connected.unary(step.path)(
                        step.body, timeout=timeout, metadata=self._metadata
                    )
        except TimeoutError:
            if not limit.expired():
                raise
            connected.leave(channel)
            raise _late(self._address) from None
        return response

    async def chunks(self, step: GrpcCall, silence: Silence) -> AsyncGenerator[bytes, None]:
        """Make a call and yield the responses' messages. A stream has no time limit as a whole."""
        connected = await self._connected.get()
        channel, answered = connected.channel, False
        call = channel.stream_stream(step.path)(iter([step.body]), metadata=self._metadata)
        try:
            with _failing():
                async for message in call:
                    answered = True
                    yield message
        finally:
            call.cancel()
            if silence.is_over and not answered:
                connected.leave(channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._connected.close()


class GrpcClient(OverGrpc, Client):
    """A client of a server over gRPC, such as `GrpcClient("localhost:8001")`. Many threads may use it at a time. See OverGrpc for the
    arguments.

    All calls share one connection; a server that stops reading holds none of them, and the next call gets a new one.
    """

    transport = GrpcTransport


class AsyncGrpcClient(OverGrpc, AsyncClient):
    """GrpcClient for an event loop: the methods are to be awaited."""

    transport = AsyncGrpcTransport


def _channel(library: Any, address: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """Return a channel of grpc or grpc.aio."""  # whose type stubs require serializers, which bytes do not need
    if credentials is None:
        return library.insecure_channel(address, CHANNEL_OPTIONS)
    return library.secure_channel(address, credentials, CHANNEL_OPTIONS)


def _late(address: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{address}: no response in time")


@contextmanager
def _failing() -> Iterator[None]:
    """Translate errors of grpcio in the block into ours."""
    try:
        yield
    except grpc.RpcError as error:
        raise _error_of(error) from error


def _error_of(call: Any) -> WeirError:
    trailers = dict(_pairs(call.trailing_metadata()))
    wait = trailers.get(_PUSHBACK)
    after = int(wait) / 1000 if wait is not None else None
    return error_of_code(call.code().name, call.details() or "", name=trailers.get(ERROR_NAME, ""), retry_after=after)


def _pairs(metadata: Iterable[Any] | None) -> Iterator[tuple[str, str]]:
    for name, value in metadata or ():
        yield name, value if isinstance(value, str) else value.decode("latin-1")


def _metadata(token: str | None) -> Pairs:
    return () if token is None else (("authorization", f"Bearer {token}"),)
