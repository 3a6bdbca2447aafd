"""A server as a target of load: the endpoint that a URL names, the requests for it, and how each protocol sends them.

A `Sender` is what differs between protocols. Whatever the protocol, what a request sends is made once, before any load.
"""

import asyncio
import re
import resource
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import isnan
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np

from weir.bench import HttpOptions
from weir.bench.target import OK, TIMEOUT, UNSENT, Counts, Target, read_counts, read_payloads
from weir.client.calls import Calls, Unreachable, run_async
from weir.client.http import HttpCalls
from weir.client.http_connection import (
    AsyncConnections,
    HttpReply,
    NotConnected,
    OutgoingRequest,
    ServerAddress,
    error_of,
)
from weir.client.methods import AsyncTransport
from weir.errors import CapacityError, DeadlineExceeded, InvalidRequest, NotFound, SettingsError, WeirError, add_extra
from weir.model import DATATYPES
from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_json import read_request
from weir.wire.websocket import ErrorMessage

# The endpoint that a URL names.

_INFER = re.compile(r"/v2/models/(?P<model>[^/?]+)(?:/versions/(?P<version>[^/?]+))?/infer")
_SCHEMES = {"grpc": "grpc", "grpcs": "grpc", "ws": "ws", "wss": "ws"}
_RULE = "must be like grpc://HOST:PORT/MODEL or ws://HOST:PORT/MODEL, perhaps with /VERSION"
_HTTP_RULE = "must be like http://HOST:PORT/PATH, https://HOST/PATH or http://unix:SOCKET:/PATH"


class TargetEndpoint(NamedTuple):
    """The endpoint that a URL names.

    Attributes:
        kind: "http" (any path and body), "kserve" (the Open Inference Protocol over HTTP), "grpc" or "ws".
        server: the URL of the server as clients take it; HOST:PORT for gRPC.
        path: the path of an endpoint of HTTP, with its query.
        model: the model, unless the kind is "http".
        version: its version, or "".
        tls: whether gRPC uses TLS.
        binary: whether tensors travel as raw bytes after the JSON.
    """

    kind: str
    server: str
    path: str = ""
    model: str = ""
    version: str = ""
    tls: bool = False
    binary: bool = False


def endpoint_of(url: str) -> TargetEndpoint:
    """Return the endpoint that `url` names; `#binary` at its end means raw tensors. `http://unix:/run/weir.sock:/infer/square` is a path on
    a Unix socket. Raises SettingsError."""
    plain, _, fragment = url.partition("#")
    read, rule = (_of_model, _RULE) if plain.partition(":")[0] in _SCHEMES else (_of_http, _HTTP_RULE)
    try:
        endpoint = read(plain)
    except ValueError as error:
        raise SettingsError(f"target {url!r}: {error}; {rule}") from error
    if endpoint is None:
        raise SettingsError(f"target {url!r}: {rule}")
    if not endpoint.path.isascii() or any(character <= " " for character in endpoint.path):
        raise SettingsError(f"target {url!r}: the path must be percent-encoded")
    if fragment not in ("", "binary") or (fragment and endpoint.kind not in ("kserve", "ws")):
        rule = (
            "only #binary may follow, and only where tensors would travel as JSON: after /v2/models/MODEL/infer and ws:"
        )
        raise SettingsError(f"target {url!r}: {rule}")
    return endpoint._replace(binary=bool(fragment))


def _of_http(url: str) -> TargetEndpoint | None:
    """Return the endpoint of HTTP that `url` names; None if it has another form. Raises ValueError for a wrong port or address."""
    if url.startswith("http://unix:"):
        socket, _, path = url.removeprefix("http://unix:").partition(":")
        server = f"unix:{socket}" if socket and path.startswith("/") else ""
    else:
        parts = urlsplit(url)
        has_host = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        server = f"{parts.scheme}://{parts.netloc}" if has_host else ""
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not server:
        return None
    found = _INFER.search(path)
    if found is None:
        return TargetEndpoint("http", server, path)
    return TargetEndpoint("kserve", server, path, unquote(found["model"]), found["version"] or "")


def _of_model(url: str) -> TargetEndpoint | None:
    """Return the endpoint of gRPC or WebSocket that `url` names; None if it has another form. Raises ValueError for a wrong port or
    address."""
    parts = urlsplit(url)
    name, *version = map(unquote, parts.path.removeprefix("/").split("/"))
    if not parts.hostname or parts.port is None or not name or not all(version) or len(version) > 1:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    kind, tls = _SCHEMES[parts.scheme], parts.scheme in ("grpcs", "wss")
    server = f"{host}:{parts.port}" if kind == "grpc" else f"http{'s' * tls}://{host}:{parts.port}"
    return TargetEndpoint(kind, server, "", name, "".join(version), tls)


# What is sent.


class DeclaredInput(NamedTuple):
    """An input of a model, from its metadata."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def made_request(
    endpoint: TargetEndpoint, inputs: Sequence[DeclaredInput], rows: int, example: Any = None
) -> InferenceRequest:
    """Return a request of `rows` rows. Its tensors consist of ones, or of the item `example` for a model of items.

    Dimensions of any length get length 1. Raises SettingsError for a BYTES input without an example.
    """
    tensors = [_made(endpoint, tensor, rows, example) for tensor in inputs]
    return InferenceRequest(endpoint.model, tensors, version=endpoint.version)


def _made(endpoint: TargetEndpoint, tensor: DeclaredInput, rows: int, example: Any) -> TensorValue:
    # A model without a batch dimension may have a fixed first dimension, or no dimensions.
    first = [rows if length == -1 else length for length in tensor.shape[:1]]
    shape = (*first, *(1 if length == -1 else length for length in tensor.shape[1:]))
    if tensor.datatype != "BYTES":
        return TensorValue(tensor.name, tensor.datatype, np.ones(shape, DATATYPES[tensor.datatype]))
    if example is None:
        raise SettingsError(
            f"model {endpoint.model!r}: its metadata do not say what {tensor.name!r} is; give it with --data"
        )
    array = np.empty(shape, object)
    array[...] = msgspec.json.encode(example)
    return TensorValue(tensor.name, tensor.datatype, array)


def declared_inputs(model: str, metadata: Any) -> list[DeclaredInput]:
    """Return the inputs in the metadata of `model`. Raises SettingsError if there are none, or none that can be sent."""
    try:
        inputs = [DeclaredInput(each["name"], each["datatype"], tuple(each["shape"])) for each in metadata["inputs"]]
    except (KeyError, TypeError):
        inputs = []
    if not inputs or any(each.datatype not in DATATYPES for each in inputs):
        raise SettingsError(
            f"model {model!r}: the server has no metadata about its inputs. Check the model's name, or give a request with --data"
        )
    return inputs


class ServerPages(NamedTuple):
    """Says what a server tells about itself over HTTP. `send` is that of a transport of weir.client, and `timeout` that of each request."""

    send: Callable[[Any, float], Awaitable[Any]]
    timeout: float

    async def json(self, path: str) -> Any:
        """Return the JSON document at `path`, or None if there is none."""
        reply = await self.send(OutgoingRequest("GET", path), self.timeout)
        try:
            return msgspec.json.decode(reply.body) if reply.status == 200 else None
        except msgspec.DecodeError:
            return None

    async def models(self) -> dict[str, Sequence[str]]:
        """Return the paths of each model of a Weir server; nothing for another server."""
        index = await self.json("/")
        try:
            return {model["name"]: model["paths"] for model in index["models"]}
        except (KeyError, TypeError):
            return {}

    async def counts(self, model: str) -> Counts | None:
        """Return the counts of `model` from /metrics; None if there is no such page."""
        reply = await self.send(OutgoingRequest("GET", "/metrics"), self.timeout)
        return read_counts(reply.body.decode(), model) if reply.status == 200 else None

    async def example(self, path: str) -> bytes:
        """Return the first example in the server's OpenAPI document for `path`. Raises SettingsError if there is none."""
        document = await self.json("/openapi.json")
        example = example_of(document, path)
        if example is None:
            known = _paths(document)
            wrong = "describes no example to send; give something with --data"
            if known and path not in known:
                wrong = f"accepts no requests at this path, but at {', '.join(known)}"
            raise SettingsError(f"the server {wrong}")
        return msgspec.json.encode(example)


def example_of(document: Any, path: str) -> Any:
    """Return the first example of a body for `path` in an OpenAPI document; None if there is none."""
    try:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        return next(iter(body["examples"].values()))["value"]
    except (KeyError, TypeError, StopIteration, AttributeError):
        return None


def _paths(document: Any) -> list[str]:
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(paths, dict):
        return []
    posts = {
        path: methods["post"] for path, methods in paths.items() if isinstance(methods, dict) and "post" in methods
    }
    controls = "Open Inference Protocol"  # the tag of its calls that are for no single model
    return [path for path, post in posts.items() if not isinstance(post, dict) or controls not in post.get("tags", ())]


# How it is sent.


class Sender:
    """Sends requests to a server over the transports of a client of weir.client, each of which `make` returns and which carries many at a time.

    Attributes:
        channels: how many connections carry requests in turn.
        connections, held: see Target.
    """

    held = 0

    def __init__(self, make: Callable[[], AsyncTransport], options: HttpOptions) -> None:
        self._make = make
        self._timeout = options.timeout
        self.channels = self.connections = options.channels
        self._transports: list[AsyncTransport] = []

    async def connect(self) -> None:
        """Connect. Raises SettingsError."""
        self._transports = [self._make() for _ in range(self.channels)]

    def prepared(self, step: Any) -> Any:
        """Return what `start` sends again and again for a step."""
        return step

    async def send(self, step: Any, within: float, index: int = 0) -> Any:
        """Send `step`, prepared or not, over connection number `index`, and return the response, which must come `within` that many seconds.
        Raises SettingsError and WeirError."""
        return await self._transports[index].send(step, within)

    def start(self, step: Any, index: int, sent: Callable[[], object]) -> "asyncio.Future[Any]":
        """Send a prepared step over connection number `index`, call `sent` at that moment, and return the future response."""
        sent()
        return asyncio.ensure_future(self._transports[index].send(step, self._timeout))

    async def close(self) -> None:
        """Close the connections."""
        for transport in self._transports:
            await transport.close()
        self._transports = []


_SPARE = 16  # connections that are open before the first request
_OTHER_FILES = 100  # files that this process may have open besides its connections
USER_AGENT = "weir-bench"


class HttpSender(Sender):
    """A Sender over HTTP, where a connection carries one request at a time."""

    def __init__(self, endpoint: TargetEndpoint, options: HttpOptions) -> None:
        self.channels, self.connections = 1, 0
        headers = {"user-agent": USER_AGENT, **options.headers}
        self._server = ServerAddress(endpoint.server, headers, not options.insecure)
        self._limit = options.max_connections
        self._pool = AsyncConnections(self._server, self._limit)

    async def connect(self) -> None:
        """See Sender."""
        _allow_files(self._limit)
        try:
            await self._pool.warm(min(_SPARE, self._limit))
        except NotConnected as error:
            raise SettingsError(f"no server there: {error}") from error

    def prepared(self, step: OutgoingRequest) -> bytes:
        """See Sender."""
        return self._server.written(step)

    async def send(self, step: OutgoingRequest | bytes, within: float, index: int = 0) -> HttpReply:
        """See Sender."""
        data = step if isinstance(step, bytes) else self._server.written(step)
        try:
            async with asyncio.timeout(within):
                return await self._pool.start(data)
        except TimeoutError as error:
            raise SettingsError(f"no response within {within:g} s") from error
        except OSError as error:
            raise SettingsError(str(error)) from error

    def start(self, step: bytes, index: int, sent: Callable[[], object]) -> "asyncio.Future[HttpReply]":
        """See Sender."""
        return self._pool.start(step, sent)

    async def close(self) -> None:
        """See Sender."""
        self.connections, self.held = self._pool.most, self._pool.held
        await self._pool.close()


def _allow_files(connections: int) -> None:
    """Raise this process's limit of open files for `connections` connections. Raises SettingsError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        rule = f"must be at most {hard - _OTHER_FILES}, as this process may open {hard} files (ulimit -Hn)"
        raise SettingsError(f"max_connections={connections}: {rule}")
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


Made = tuple[Calls, Sender]


def _http(endpoint: TargetEndpoint, options: HttpOptions) -> Made:
    return HttpCalls(binary=endpoint.binary), HttpSender(endpoint, options)


def _grpc(endpoint: TargetEndpoint, options: HttpOptions) -> Made:
    import grpc

    from weir.client.grpc import AsyncGrpcTransport, GrpcCalls

    if options.insecure and endpoint.tls:
        raise SettingsError(
            "insecure: gRPC accepts no certificate that it cannot check; name its authority in GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
        )
    metadata = tuple((name.lower(), value) for name, value in options.headers.items())
    credentials = grpc.ssl_channel_credentials() if endpoint.tls else None
    return GrpcCalls(), Sender(partial(AsyncGrpcTransport, endpoint.server, metadata, credentials), options)


def _websocket(endpoint: TargetEndpoint, options: HttpOptions) -> Made:
    from weir.client.websocket import AsyncWebSocketTransport, WebSocketCalls

    connect = partial(AsyncWebSocketTransport, endpoint.server, options.headers, 1, not options.insecure)
    return WebSocketCalls(binary=endpoint.binary), Sender(connect, options)


# What makes the calls of a kind of endpoint and their Sender.
_PROTOCOLS = {"http": _http, "kserve": _http, "grpc": _grpc, "ws": _websocket}
_PASSING = (408, 429, 503, 504)  # codes of a server that works but is overloaded


class ServerTarget(Target):
    """The endpoint that `url` names, of whatever protocol.

    Arguments:
        data: the bodies to send in turn (see read_payloads), which are inference requests as JSON but for a path of HTTP. Without it, the
            server's example for the path, or a request that fits the model's metadata.
        options: how requests are sent.
        name: the name in tables; by default the URL.
        clock: returns the time in seconds.

    Raises SettingsError, also for a missing library.
    """

    def __init__(
        self,
        url: str,
        data: str | Sequence[Any] | None = None,
        options: HttpOptions | None = None,
        *,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name or url, clock)
        self._url = url
        self._options = options or HttpOptions()
        self._endpoint = endpoint = endpoint_of(url)
        self._has_pages = endpoint.kind != "grpc"  # by which the server tells over HTTP about itself
        with self._named():
            try:
                self._calls, self._sender = _PROTOCOLS[endpoint.kind](endpoint, self._options)
            except ImportError as error:
                raise SettingsError(f"needs {error.name}; {add_extra('grpc')}") from error
        self._given = None if data is None else self._read(read_payloads(data))
        self._pages = ServerPages(self._sender.send, self._options.timeout)
        self._steps: list[Any] = []
        self._model: str | None = None  # the name under which the server counts these requests
        self._under_way: dict[int, tuple[float, asyncio.Future[Any]]] = {}  # since when, the oldest first

    async def open(self) -> None:
        """Connect, make the requests, and check that the first ones have responses. Raises SettingsError."""
        with self._named():
            await self._sender.connect()
            requests = self._given or [await self._example()]
            self._steps = [self._sender.prepared(self._step(request)) for request in requests]
            for index in range(self._sender.channels):
                await self._check(index)
            if self._has_pages:
                self._model = self._counted(await self._pages.models())

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the URL to errors of the block, all of which become SettingsErrors."""
        try:
            yield
        except SettingsError as error:
            raise SettingsError(f"{self._url}: {error.message}") from error
        except WeirError as error:
            raise SettingsError(f"{self._url}: {type(error).__name__}: {error.message}") from error

    def _read(self, bodies: Sequence[bytes]) -> Sequence[Any]:
        endpoint = self._endpoint
        if endpoint.kind == "http":
            return bodies
        try:
            return [read_request(body, endpoint.model, endpoint.version) for body in bodies]
        except InvalidRequest as error:
            raise SettingsError(f"data: must be inference requests as JSON: {error.message}") from error

    async def _example(self) -> Any:
        """Return a request that fits the endpoint, by what the server tells about it."""
        endpoint, metadata, example = self._endpoint, None, None
        if endpoint.kind == "http":
            return await self._pages.example(endpoint.path.partition("?")[0])
        with suppress(NotFound):
            program = self._calls.model_metadata(endpoint.model, endpoint.version)
            metadata = await run_async(program, self._sender.send, self._options.timeout)
        inputs = declared_inputs(endpoint.model, metadata)
        if self._has_pages and inputs[0].datatype == "BYTES":  # a Weir server may describe an item
            example = example_of(await self._pages.json("/openapi.json"), f"/infer/{endpoint.model}")
        return made_request(endpoint, inputs, self._options.rows, example)

    def _step(self, request: Any) -> Any:
        endpoint = self._endpoint
        if endpoint.kind == "http":
            return OutgoingRequest("POST", endpoint.path, {"content-type": "application/json"}, request)
        step = next(self._calls.infer(request))
        return step._replace(path=endpoint.path) if endpoint.kind == "kserve" else step

    async def _check(self, index: int) -> None:
        """Check that a request over connection number `index` has a response; a server that is busy may refuse it, or be late."""
        try:
            reply = await self._sender.send(self._steps[index % len(self._steps)], self._options.timeout, index)
        except (CapacityError, DeadlineExceeded) as error:
            if isinstance(error, Unreachable):
                raise
            return
        outcome = outcome_of(reply)
        if outcome != OK and reply.status not in _PASSING:
            text = error_of(reply).message if isinstance(reply, HttpReply) else reply.error
            raise SettingsError(f"{outcome}: {' '.join(text.split())}")

    def _counted(self, models: Mapping[str, Sequence[str]]) -> str | None:
        """Return the name under which a Weir server that has `models`, each with its paths, counts the requests; None if it does not."""
        if self._endpoint.kind != "http":
            return self._endpoint.model if self._endpoint.model in models else None
        path = self._endpoint.path.partition("?")[0]
        names = [name for name, paths in models.items() if path in paths]
        return names[0] if len(names) == 1 else None

    def send(self, index: int) -> None:
        """See Target."""
        steps, sender = self._steps, self._sender
        reply = sender.start(steps[index % len(steps)], index % sender.channels, partial(self._sent, index))
        self._under_way[index] = self._clock(), reply
        reply.add_done_callback(partial(self._replied, index))

    def _sent(self, index: int) -> None:
        self.ledger.sent[index] = self._clock()

    def _replied(self, index: int, reply: "asyncio.Future[Any]") -> None:
        error = None if reply.cancelled() else reply.exception()
        if self._under_way.pop(index, None) is None:
            return  # it has been given up
        if error is None:
            outcome = outcome_of(reply.result())
        elif isinstance(error, DeadlineExceeded):
            outcome = TIMEOUT
        elif isinstance(error, OSError):
            outcome = f"connect: {error}" if isinstance(error, NotConnected) else str(error)
        else:
            outcome = type(error).__name__
        self.ledger.end(index, self._clock(), outcome)

    def give_up(self) -> None:
        """End the requests that have timed out, whatever they wait for."""
        limit = self._clock() - self._options.timeout
        while self._under_way:
            index, (since, reply) = next(iter(self._under_way.items()))
            if since > limit:
                return
            del self._under_way[index]
            reply.cancel()
            self.ledger.end(index, self._clock(), UNSENT if isnan(self.ledger.sent[index]) else TIMEOUT)

    async def counts(self) -> Counts | None:
        """See Target."""
        return None if self._model is None else await self._pages.counts(self._model)

    async def close(self) -> None:
        """Cancel what is under way, and close the connections. Idempotent."""
        replies = [reply for _, reply in self._under_way.values()]
        self._under_way.clear()
        for reply in replies:
            reply.cancel()
        if replies:
            await asyncio.wait(replies)
        await self._sender.close()
        self.connections, self.held = self._sender.connections, self._sender.held


def outcome_of(reply: Any) -> str:
    """Return how a request with this response ended: "ok"; for a code of HTTP other than 2xx, the code, followed by the type of the error if the
    body has it: "429 Overloaded"; and for an error over WebSocket, its type."""
    if not isinstance(reply, HttpReply):
        return reply.type if isinstance(reply, ErrorMessage) else OK
    if 200 <= reply.status < 300:
        return OK
    try:
        kind = msgspec.json.decode(reply.body)["error"]["type"]
    except (msgspec.DecodeError, KeyError, TypeError, IndexError):
        kind = None
    return f"{reply.status} {kind}" if isinstance(kind, str) else str(reply.status)
