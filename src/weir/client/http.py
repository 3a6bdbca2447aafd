"""The clients for HTTP, which speak the Open Inference Protocol with tensors as raw bytes or JSON. Needs httptools."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from weir.client.calls import Calls, Decoder, Program, Retry, Silence, Streaming, error_of_status, reading
from weir.client.http_connection import (
    AsyncConnections,
    Connections,
    HttpReply,
    OutgoingRequest,
    ServerAddress,
    checked,
    error_text,
    failing,
    headers_with,
)
from weir.client.methods import AsyncClient, Client, PerLoop
from weir.wire import kserve_binary, kserve_json
from weir.wire.data_plane import DATA_PLANE
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.sse import CONTENT_TYPE, EventParser

CONNECTIONS = 64
HEADER_LENGTH = "inference-header-content-length"

_dumps, _loads = msgspec.json.encode, msgspec.json.Decoder(dict[str, Any] | list[Any]).decode


class HttpCalls(Calls):
    """Calls whose steps are OutgoingRequests, answered by HttpReplys. With `binary`, tensors travel as raw bytes both ways."""

    def __init__(self, *, binary: bool = True) -> None:
        self._binary = binary

    def call(self, name: str, body: Mapping[str, Any] | None = None, /, **path: str) -> Program[Any]:
        """See Calls."""
        call = DATA_PLANE[name]
        method, route = list(call.routes())[bool(path.get("version"))]
        filled = route.format(**{key: quote(value, safe="") for key, value in path.items()})
        if method == "GET":
            request = OutgoingRequest(method, filled)
        else:
            request = OutgoingRequest(method, filled, {"content-type": "application/json"}, _dumps(dict(body or {})))
        reply = yield request
        if call.asks:
            return {call.asks: _holds(method, reply)}
        checked(reply)
        if call.name == "load_worker":
            return reply.body.decode()
        with reading(filled):
            return _loads(reply.body) if reply.body else {}

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""
        sent = with_binary_outputs(request) if self._binary else request
        reply = checked((yield self._posted(sent, "/infer", "*/*")))
        length = reply.headers.get(HEADER_LENGTH)
        with reading(request.model):
            if length is None:
                return kserve_json.read_response(reply.body)
            return kserve_binary.read_response(reply.body, int(length))

    def stream(self, request: InferenceRequest) -> Streaming:
        """See Calls. Each response is an event in JSON, so FP16 and BF16 cannot be outputs."""
        return Streaming(self._posted(request, "/infer_stream", CONTENT_TYPE), _event_decoder)

    def _posted(self, request: InferenceRequest, call: str, accept: str) -> OutgoingRequest:
        written = kserve_binary.write_request(request, lambda _: self._binary)
        headers = {"accept": accept, "content-type": "application/json"}
        if written.header_length is not None:
            headers |= {"content-type": "application/octet-stream", HEADER_LENGTH: str(written.header_length)}
        path = _model(request.model, request.version) + call
        return OutgoingRequest("POST", path, headers, b"".join(written.parts))


def with_binary_outputs(request: InferenceRequest) -> InferenceRequest:
    """Return `request` with the parameter that makes the server send every output as raw bytes."""
    parameters = {**request.parameters, "binary_data_output": True}
    return InferenceRequest(
        request.model,
        request.inputs,
        version=request.version,
        id=request.id,
        outputs=request.outputs,
        parameters=parameters,
    )


def _event_decoder() -> Decoder:
    parser = EventParser()

    def feed(data: bytes) -> Iterable[InferenceResponse]:
        with reading("stream"):
            events = parser.feed(data)
        for event in events:
            if event.name == "error":
                text, name = error_text(event.data)
                raise error_of_status(500, text, name=name)
            with reading("stream"):
                response = kserve_json.read_response(event.data)
            yield response

    return feed


def _holds(method: str, reply: HttpReply) -> bool:
    """Return what the reply to a question says. Status 404 is no; to a GET, so is every other error but 401 and 403, as servers differ in these."""
    if reply.status == 404 or (method == "GET" and reply.status not in (200, 401, 403)):
        return False
    checked(reply)
    return True


def _model(name: str, version: str) -> str:
    return f"/v2/models/{quote(name, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


class AsyncHttpTransport:
    """An AsyncTransport for OutgoingRequests."""

    def __init__(self, url: str, headers: Mapping[str, str], connections: int, tls: Any) -> None:
        self._server = ServerAddress(url, headers, tls)
        self._pools = PerLoop(partial(AsyncConnections, self._server, connections), AsyncConnections.close)

    async def send(self, step: OutgoingRequest, timeout: float) -> HttpReply:
        """Send a request and return the response. Raises DeadlineExceeded after `timeout` seconds, Unreachable or
        ConnectionLost."""
        pool = await self._pools.get()
        with failing(self._server.url):
            async with asyncio.timeout(timeout):
                return await pool.start(self._server.written(step))

    async def chunks(self, step: OutgoingRequest, silence: Silence) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the response's body as it arrives. Raises Unreachable, ConnectionLost, or the error that the
        response stands for. See AsyncTransport."""
        pool = await self._pools.get()
        with failing(self._server.url):
            connection = await pool.take()
            try:
                async with aclosing(connection.chunks(self._server.written(step))) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                pool.give_back(connection)

    async def close(self) -> None:
        """Close all connections."""
        await self._pools.close()


class OverHttp:
    """The base class of the clients of a server's HTTP address. Each has the class of its calls, and the `transport` for the arguments.

    Arguments:
        url: http://HOST:PORT, https://HOST:PORT, or unix:PATH for a Unix socket.
        timeout: seconds for each call that has no timeout of its own.
        token: the control token, for the calls that need it.
        retry: which calls are sent again; by default Retry().
        binary: whether tensors travel as raw bytes; otherwise as JSON.
        connections: largest number of open connections, which are kept for later calls.
        tls: an ssl.SSLContext, or whether certificates are verified.
    """

    calls: type[HttpCalls] = HttpCalls
    transport: Callable[..., Any]

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        token: str | None = None,
        retry: Retry | None = None,
        binary: bool = True,
        connections: int = CONNECTIONS,
        tls: Any = True,
    ) -> None:
        kind = type(self)
        made: Any = super()
        transport = kind.transport(url, headers_with(token), connections, tls)
        made.__init__(kind.calls(binary=binary), transport, timeout=timeout, retry=retry)


class HttpClient(OverHttp, Client):
    """A client of a server over HTTP, such as `HttpClient("http://localhost:8000")`. Many threads may use it at a time. See OverHttp for the
    arguments."""

    transport = Connections


class AsyncHttpClient(OverHttp, AsyncClient):
    """HttpClient for an event loop: the methods are to be awaited."""

    transport = AsyncHttpTransport
