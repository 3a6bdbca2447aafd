"""Targets of load that are called as Weir's own clients call them: a model behind the Open Inference Protocol over gRPC or WebSocket.

A failed request counts under the name of the error that a client would raise.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from weir.bench.target import CallTarget, Counts, HttpOptions, ServerPages, TargetEndpoint, given_requests
from weir.client.calls import Calls, Unreachable, run_async
from weir.client.methods import AsyncTransport
from weir.errors import CapacityError, DeadlineExceeded, SettingsError, WeirError, add_extra
from weir.wire.inference import InferenceRequest


class ClientTarget(CallTarget):
    """Calls the model of `endpoint` over `options.channels` connections in turn. `data` are the requests as JSON (see
    target.given_requests); without it, a request is made from the model's metadata. Raises SettingsError, also for a missing library."""

    def __init__(
        self,
        url: str,
        endpoint: TargetEndpoint,
        data: str | Sequence[Any] | None = None,
        options: HttpOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(url, options or HttpOptions(), clock)
        self._endpoint = endpoint
        make = _grpc if endpoint.kind == "grpc" else _websocket
        try:
            self._calls, self._connect = make(url, endpoint, self._options)
        except ImportError as error:
            extra = add_extra("grpc" if endpoint.kind == "grpc" else "client")
            raise SettingsError(f"target {url!r}: needs {error.name}; {extra}") from error
        self._requests = [] if data is None else given_requests(data, endpoint)
        self._transports: list[AsyncTransport] = []
        self._site: ServerPages | None = None  # where batches are counted

    @property
    def connections(self) -> int:
        """See Target."""
        return self._options.channels

    async def open(self) -> None:
        """Connect, and check that the model answers; a server that is busy may refuse, or not answer in time. Raises SettingsError."""
        self._transports = [self._connect() for _ in range(self._options.channels)]
        site = ServerPages(self._transports[0].send, self._options.timeout)
        has_pages = self._endpoint.kind != "grpc"
        try:
            self._requests = self._requests or [
                await site.example(self._calls, self._endpoint, self._options.rows, has_pages=has_pages)
            ]
            for transport in self._transports:
                await self._try(transport)
            if has_pages and self._endpoint.model in await site.models():
                self._site = site
        except WeirError as error:
            raise SettingsError(f"{self.name}: {type(error).__name__}: {error.message}") from error

    async def _try(self, transport: AsyncTransport) -> None:
        try:
            await self._infer(self._requests[0], transport)
        except (CapacityError, DeadlineExceeded) as error:
            if isinstance(error, Unreachable):
                raise

    async def _call(self, index: int) -> str:
        self._ledger.sent[index] = self._clock()
        requests, transports = self._requests, self._transports
        await self._infer(requests[index % len(requests)], transports[index % len(transports)])
        return "ok"

    async def _infer(self, request: InferenceRequest, transport: AsyncTransport) -> None:
        await run_async(self._calls.infer(request), transport.send, self._options.timeout)

    async def counts(self) -> Counts | None:
        """See Target."""
        return None if self._site is None else await self._site.counts(self._endpoint.model)

    async def close(self) -> None:
        """Close the connections."""
        await super().close()
        for transport in self._transports:
            await transport.close()
        self._transports = []


Made = tuple[Calls, Callable[[], AsyncTransport]]  # the calls of a protocol, and what makes a connection


def _grpc(url: str, endpoint: TargetEndpoint, options: HttpOptions) -> Made:
    import grpc

    from weir.client.grpc import AsyncGrpcTransport, GrpcCalls

    if options.insecure and endpoint.tls:
        raise SettingsError(f"target {url!r}: gRPC accepts no certificate that it cannot check (insecure)")
    metadata = tuple((name.lower(), value) for name, value in options.headers.items())
    credentials = grpc.ssl_channel_credentials() if endpoint.tls else None
    return GrpcCalls(), lambda: AsyncGrpcTransport(endpoint.authority, metadata, credentials)


def _websocket(url: str, endpoint: TargetEndpoint, options: HttpOptions) -> Made:
    from weir.client.http import AsyncHttpTransport
    from weir.client.websocket import AsyncWebSocketTransport, WebSocketCalls, connect_options

    server = f"{'https' if endpoint.tls else 'http'}://{endpoint.authority}"
    given = connect_options(server, not options.insecure, options.headers)

    def connect() -> AsyncTransport:
        http = AsyncHttpTransport(server, options.headers, 1, not options.insecure)
        return AsyncWebSocketTransport(server, given, http)

    return WebSocketCalls(binary=endpoint.binary), connect
