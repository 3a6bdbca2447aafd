"""A target of load: a model behind the Open Inference Protocol over gRPC. Needs grpcio and protobuf (the extra `grpc`)."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import grpc
import grpc.aio

from weir.bench.connection import Tasks
from weir.bench.http import HttpOptions
from weir.bench.target import (
    OK,
    TIMEOUT,
    DeclaredInput,
    LedgerTarget,
    TargetEndpoint,
    declared_inputs,
    given_requests,
    made_request,
)
from weir.client.grpc import CHANNEL_OPTIONS
from weir.errors import SettingsError
from weir.wire.kserve_grpc import message, write_request

_SERVICE = "/inference.GRPCInferenceService"


class GrpcTarget(LedgerTarget):
    """Calls ModelInfer with raw tensors over `options.channels` connections in turn. `data` is as for KserveTarget."""

    def __init__(
        self,
        url: str,
        endpoint: TargetEndpoint,
        data: str | Sequence[Any] | None = None,
        options: HttpOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(url, clock)
        self._endpoint = endpoint
        self._options = options or HttpOptions()
        if self._options.insecure and endpoint.tls:
            raise SettingsError(f"target {url!r}: gRPC accepts no certificate that it cannot check (insecure)")
        self._given = None if data is None else given_requests(data, endpoint)
        self._metadata = [(name.lower(), value) for name, value in self._options.headers.items()]
        self._channels: list[Any] = []
        self._messages: list[bytes] = []
        self._calls = Tasks()
        self._under_way: dict[int, asyncio.Task[None]] = {}

    @property
    def connections(self) -> int:
        """See Target."""
        return self._options.channels

    async def open(self) -> None:
        """Connect, and check that the model answers. Raises SettingsError."""
        self._channels = [self._connected() for _ in range(self._options.channels)]
        try:
            requests = self._given or [made_request(self._endpoint, await self._inputs(), self._options.rows)]
            self._messages = [write_request(request) for request in requests]
            for channel in self._channels:
                await self._try(channel)
        except grpc.aio.AioRpcError as error:
            raise SettingsError(f"{self.name}: {error.code().name}: {error.details()}") from error
        self._next = cycle([self._infer(channel) for channel in self._channels])

    async def _try(self, channel: Any) -> None:
        """Connect, and send one request, which a server that is busy may refuse or leave unanswered."""
        try:
            await self._infer(channel)(self._messages[0], timeout=self._options.timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise

    def send(self, index: int) -> None:
        """See Target."""
        self._under_way[index] = self._calls.start(self._call(index))

    def give_up(self) -> None:
        """End requests that have timed out: gRPC does not while it cannot write them."""
        limit = self._clock() - self._options.timeout
        for index in [each for each in self._under_way if self._ledger.sent[each] <= limit]:
            self._under_way[index].cancel()
            self._ended(index, TIMEOUT)

    def _ended(self, index: int, outcome: str) -> None:
        if self._under_way.pop(index, None) is not None:
            self._ledger.end(index, self._clock(), outcome)

    async def _call(self, index: int) -> None:
        messages = self._messages
        self._ledger.sent[index] = self._clock()
        try:
            await next(self._next)(
                messages[index % len(messages)], timeout=self._options.timeout, metadata=self._metadata
            )
            outcome = OK
        except grpc.aio.AioRpcError as error:
            outcome = TIMEOUT if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else error.code().name
        except Exception as error:  # a request without an end would have the round wait for ever
            outcome = type(error).__name__
        self._ended(index, outcome)

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()
        await self._calls.end()
        self._channels = []

    def _connected(self) -> Any:
        if self._endpoint.tls:
            return grpc.aio.secure_channel(self._endpoint.place, grpc.ssl_channel_credentials(), CHANNEL_OPTIONS)
        return grpc.aio.insecure_channel(self._endpoint.place, CHANNEL_OPTIONS)

    def _infer(self, channel: Any) -> Any:
        return channel.unary_unary(f"{_SERVICE}/ModelInfer")

    async def _inputs(self) -> list[DeclaredInput]:
        request = message("inference.ModelMetadataRequest")(name=self._endpoint.model, version=self._endpoint.version)
        call = self._channels[0].unary_unary(f"{_SERVICE}/ModelMetadata")
        body = await call(request.SerializeToString(), timeout=self._options.timeout, metadata=self._metadata)
        response = message("inference.ModelMetadataResponse").FromString(body)
        inputs = [{"name": each.name, "datatype": each.datatype, "shape": each.shape} for each in response.inputs]
        return declared_inputs(self._endpoint.model, {"inputs": inputs})
