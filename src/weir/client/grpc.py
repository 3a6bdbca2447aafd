"""The clients that speak gRPC. Needs grpcio and protobuf (the extra `grpc`)."""

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from weir.client import failures
from weir.client.asynchronous import AsyncClient
from weir.client.grpc_calls import GrpcCall, GrpcCalls
from weir.client.retrying import Retry
from weir.client.synchronous import Client
from weir.wire.inference import ERROR_NAME

_PUSHBACK = "grpc-retry-pushback-ms"
# Messages of any size; a connection of its own for each client; what is sent again is said by Retry alone.
_OPTIONS = [
    ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0),
]  # fmt: skip


class GrpcClient(Client):
    """Asks a server over gRPC, such as `GrpcClient("localhost:8001")`. May be used by many threads at a time.

    `timeout` is in seconds, for each call that names none; `token` is the control token, for the calls that need it;
    `credentials` are grpc.ChannelCredentials, for TLS. All calls share one connection.
    """

    def __init__(
        self, address: str, *, timeout: float = 60.0, token: str | None = None, retry: Retry | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:  # fmt: skip
        super().__init__(GrpcCalls(), GrpcTransport(address, token, credentials), timeout=timeout, retry=retry)


class AsyncGrpcClient(AsyncClient):
    """The same for an event loop; see GrpcClient."""

    def __init__(
        self, address: str, *, timeout: float = 60.0, token: str | None = None, retry: Retry | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:  # fmt: skip
        super().__init__(GrpcCalls(), AsyncGrpcTransport(address, token, credentials), timeout=timeout, retry=retry)


class GrpcTransport:
    """Makes GrpcCalls."""

    def __init__(self, address: str, token: str | None, credentials: grpc.ChannelCredentials | None) -> None:
        self._channel: Any  # its stubs want serializers; bytes need none
        if credentials is None:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        self._metadata = _metadata(token)

    def send(self, step: GrpcCall, timeout: float) -> bytes:
        """Return the message that answers one call."""
        with _failing():
            answer: bytes = self._channel.unary_unary(step.path)(step.body, timeout=timeout, metadata=self._metadata)
        return answer

    def chunks(self, step: GrpcCall, timeout: float) -> Generator[bytes, None, None]:
        """Yield the messages that answer one; a stream as a whole has no time limit."""
        call = self._channel.stream_stream(step.path)(iter([step.body]), metadata=self._metadata)
        try:
            with _failing():
                yield from call
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class AsyncGrpcTransport:
    """Makes GrpcCalls from an event loop."""

    def __init__(self, address: str, token: str | None, credentials: grpc.ChannelCredentials | None) -> None:
        self._address = address
        self._credentials = credentials
        self._metadata = _metadata(token)
        self._opened: Any = None

    async def send(self, step: GrpcCall, timeout: float) -> bytes:
        """Return the message that answers one call."""
        with _failing():
            call = self._channel.unary_unary(step.path)
            answer: bytes = await call(step.body, timeout=timeout, metadata=self._metadata)
        return answer

    async def chunks(self, step: GrpcCall, timeout: float) -> AsyncGenerator[bytes, None]:
        """Yield the messages that answer one; a stream as a whole has no time limit."""
        call = self._channel.stream_stream(step.path)(iter([step.body]), metadata=self._metadata)
        try:
            with _failing():
                async for message in call:
                    yield message
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the connection."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _channel(self) -> Any:
        """The connection: it belongs to the event loop in which it is made, so the first call makes it."""
        if self._opened is None:
            self._opened = (
                grpc.aio.secure_channel(self._address, self._credentials, _OPTIONS)
                if self._credentials is not None
                else grpc.aio.insecure_channel(self._address, _OPTIONS)
            )
        return self._opened


@contextmanager
def _failing() -> Iterator[None]:
    """Raise our errors for those of the library."""
    try:
        yield
    except grpc.RpcError as error:
        call: Any = error
        trailers = dict(_pairs(call.trailing_metadata()))
        wait = trailers.get(_PUSHBACK)
        after = int(wait) / 1000 if wait is not None else None
        text = call.details() or ""
        raise failures.of_code(call.code().name, text, name=trailers.get(ERROR_NAME, ""), retry_after=after) from error


def _pairs(metadata: Iterable[Any] | None) -> Iterator[tuple[str, str]]:
    for name, value in metadata or ():
        yield name, value if isinstance(value, str) else value.decode("latin-1")


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)
