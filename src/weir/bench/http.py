"""Targets of load over HTTP: any path that accepts POST, and models behind the Open Inference Protocol; and such models behind WebSocket.

Each connection of WebSocket carries many requests, whose answers are matched by id.
"""

import asyncio
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from weir.bench.connection import (
    CLOSED,
    NO_REQUEST,
    Address,
    Dialler,
    HttpAnswer,
    LoadConnection,
    Tasks,
    error_of,
    outcome_of,
    parse_address,
    reason_of,
    tls_context,
)
from weir.bench.target import (
    OK,
    TIMEOUT,
    UNSENT,
    Counts,
    LedgerTarget,
    TargetEndpoint,
    declared_inputs,
    given_requests,
    made_request,
    read_counts,
    read_payloads,
)
from weir.config import AT_LEAST_ONE, POSITIVE, Checked, setting
from weir.errors import SettingsError
from weir.messages import OCTETS
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import InferenceRequest
from weir.wire.websocket import Message, write_cancel, write_request

USER_AGENT = "weir-bench"


def request_bytes(method: str, address: Address, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return the bytes of an HTTP request; `headers` override the default ones."""
    given = {name.lower() for name in headers}
    lines = [f"{method} {address.path} HTTP/1.1"]
    if "host" not in given:
        lines.append(f"Host: {address.authority}")
    if "user-agent" not in given:
        lines.append(f"User-Agent: {USER_AGENT}")
    if method == "POST":
        lines.append(f"Content-Length: {len(body)}")
        if "content-type" not in given:
            lines.append("Content-Type: application/json")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class _OneRequest:
    """The listener of a connection for one request."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()

    def answered(self, connection: LoadConnection, index: int, answer: HttpAnswer) -> None:
        connection.close()
        self.answer.set_result(answer)

    def broken(self, connection: LoadConnection, index: int, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(OSError(why))


async def fetch(dialler: Dialler, data: bytes, within: float) -> HttpAnswer:
    """Send the request `data` on a new connection and return the answer. Raises SettingsError if the connection fails, or if there is
    no response within `within` seconds."""
    url, listener = dialler.address.url, _OneRequest()

    def make(sock: socket.socket) -> LoadConnection:
        return LoadConnection(listener, sock, direct=False, bodies=True)

    connection = None
    try:
        async with asyncio.timeout(within):
            connection = await dialler.dial(make)
            connection.send(0, data)
            return await listener.answer
    except TimeoutError as error:
        raise SettingsError(f"{url}: no response within {within:g} s") from error
    except OSError as error:
        raise SettingsError(f"{url}: {reason_of(error)}") from error
    finally:
        if connection is not None:
            connection.close()


async def fetch_json(dialler: Dialler, path: str, within: float) -> Any:
    """Return the JSON document at `path` of the server, or None if there is none."""
    data = request_bytes("GET", dialler.address.at(path), {})
    answer = await fetch(dialler, data, within)
    try:
        return msgspec.json.decode(answer.body) if answer.status == 200 else None
    except msgspec.DecodeError:
        return None


async def example_request(dialler: Dialler, endpoint: TargetEndpoint, rows: int, within: float) -> InferenceRequest:
    """Return a request that fits the model's metadata, with an item from OpenAPI if it is a model of items. Raises SettingsError if
    the metadata do not suffice."""
    inputs = declared_inputs(endpoint.model, await fetch_json(dialler, f"/v2/models/{quote(endpoint.model)}", within))
    example = None
    if inputs[0].datatype == "BYTES":  # a Weir server may describe an item
        example = example_of(await fetch_json(dialler, "/openapi.json", within), f"/infer/{endpoint.model}")
    return made_request(endpoint, inputs, rows, example)


async def is_counted(dialler: Dialler, model: str, within: float) -> bool:
    """Return whether the server is a Weir server with a model of this name."""
    index = await fetch_json(dialler, "/", within)
    try:
        return model in [each["name"] for each in index["models"]]
    except (KeyError, TypeError):
        return False


async def counted(dialler: Dialler, model: str, within: float) -> Counts | None:
    """Return the counts of the model from the server's /metrics; None if it has no such page."""
    answer = await fetch(dialler, request_bytes("GET", dialler.address.at("/metrics"), {}), within)
    return read_counts(answer.body.decode(), model) if answer.status == 200 else None


def example_of(document: Any, path: str) -> Any:
    """Return the first example of a body for `path` in an OpenAPI document; None if there is none."""
    try:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        return next(iter(body["examples"].values()))["value"]
    except (KeyError, TypeError, StopIteration, AttributeError):
        return None


class PoolListener(Protocol):
    """Gets the reports of a pool."""

    def sent(self, index: int, now: float) -> None:
        """The request `index` was sent just before `now`."""

    def ended(self, index: int, outcome: str) -> None:
        """The request `index` has ended."""


class Pool:
    """The connections of one target. Each carries one request at a time, and is kept for later requests.

    At most `limit` connections are open. A request without a connection waits, and `held` counts the requests that waited because
    of the limit. Up to `spare` connections are opened before they are needed. `give_up` ends requests that have no answer `timeout`
    seconds after they were sent, and closes their connections. `most` is the largest number of connections open at a time.
    """

    def __init__(
        self,
        dialler: Dialler,
        listener: PoolListener,
        *,
        limit: int,
        spare: int,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._dialler = dialler
        self._listener = listener
        self._limit = limit
        self._spare = spare
        self._timeout = timeout
        self._clock = clock
        self._idle: list[LoadConnection] = []
        self._busy: set[LoadConnection] = set()
        self._waiting: deque[tuple[int, bytes, float]] = deque()
        self._opening = Tasks()
        self.held = 0
        self.most = 0

    async def warm(self) -> None:
        """Open the first spare connections."""
        self._grow()
        await self._opening.wait()

    def send(self, index: int, data: bytes) -> None:
        """Send a request now, or as soon as there is a connection."""
        if self._idle:
            self._send_on(self._idle.pop(), index, data)  # the one used last, whose memory is in the caches
        else:
            self._waiting.append((index, data, self._clock()))
            self.held += self._size >= self._limit
        if len(self._idle) < self._spare:
            self._grow()

    def give_up(self) -> None:
        """End the requests that have timed out."""
        limit = self._clock() - self._timeout
        for connection in [each for each in self._busy if each.since <= limit]:
            connection.close()
            self._busy.discard(connection)
            self._listener.ended(connection.index, TIMEOUT)
        while self._waiting and self._waiting[0][2] <= limit:
            self._listener.ended(self._waiting.popleft()[0], UNSENT)
        if self._waiting:
            self._grow()

    async def close(self) -> None:
        """Close all connections."""
        await self._opening.end()
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        self._busy.clear()
        await asyncio.sleep(0)  # the event loop closes the sockets in its next turn

    # The ConnectionListener protocol.

    def answered(self, connection: LoadConnection, index: int, answer: HttpAnswer) -> None:
        """Report the end of a request, and use its connection again."""
        self._busy.discard(connection)
        self._listener.ended(index, outcome_of(answer))
        if answer.keeps and not connection.unsent:
            self._free(connection)
        else:
            connection.close()
            self._grow_if_needed()

    def broken(self, connection: LoadConnection, index: int, why: str) -> None:
        """Report the end of a request whose connection is lost."""
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if index != NO_REQUEST:
            self._listener.ended(index, why)
        self._grow_if_needed()

    def _free(self, connection: LoadConnection) -> None:
        if self._waiting:
            index, data, _ = self._waiting.popleft()
            self._send_on(connection, index, data)
        else:
            self._idle.append(connection)

    def _send_on(self, connection: LoadConnection, index: int, data: bytes) -> None:
        self._busy.add(connection)
        connection.send(index, data)
        connection.since = now = self._clock()
        self._listener.sent(index, now)

    @property
    def _size(self) -> int:
        return len(self._idle) + len(self._busy) + len(self._opening)

    def _grow_if_needed(self) -> None:
        if self._waiting:
            self._grow()

    def _grow(self) -> None:
        wanted = len(self._waiting) + self._spare - len(self._idle) - len(self._opening)
        for _ in range(min(wanted, self._limit - self._size)):
            self._opening.start(self._open())

    async def _open(self) -> None:
        try:
            connection = await self._dialler.dial(lambda sock: LoadConnection(self, sock, direct=self._dialler.direct))
        except OSError as error:
            if self._waiting:  # each failure ends one waiting request, so that the attempts come to an end
                self._listener.ended(self._waiting.popleft()[0], f"connect: {reason_of(error)}")
            return
        self._free(connection)
        self.most = max(self.most, len(self._idle) + len(self._busy))


_SPARE = 16  # connections that are open before they are needed
_OTHER_FILES = 100  # files that this process may have open besides its connections
_PASSING = (408, 429, 503, 504)  # codes of a server that works but is overloaded


@dataclass(frozen=True)
class HttpOptions(Checked):
    """How requests are sent to a server."""

    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = setting(10.0, "seconds after which a request counts as failed", rule=POSITIVE)
    max_connections: int = setting(1000, "maximum number of open connections", rule=AT_LEAST_ONE)
    insecure: bool = setting(False, "accept any certificate")
    channels: int = setting(4, "gRPC or WebSocket connections; each carries many requests", rule=AT_LEAST_ONE)
    rows: int = setting(1, "rows per request, if requests are generated from the model's metadata", rule=AT_LEAST_ONE)


class HttpTarget(LedgerTarget):
    """Sends POST requests to `url`. `data` are the bodies (see `read_payloads`); None sends the server's example for this path."""

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
        self._options = options or HttpOptions()
        self._address = parse_address(url)
        self._dialler = Dialler(self._address, insecure=self._options.insecure)
        self._bodies = None if data is None else read_payloads(data)
        self._requests: list[bytes] = []
        self._model: str | None = None
        self._pool = Pool(
            self._dialler,
            self,
            limit=self._options.max_connections,
            spare=min(_SPARE, self._options.max_connections),
            timeout=self._options.timeout,
            clock=clock,
        )

    @property
    def connections(self) -> int:
        """See Target."""
        return self._pool.most

    @property
    def held(self) -> int:
        """See Target."""
        return self._pool.held

    async def open(self) -> None:
        """Find the server, check that it answers, and open the first connections. Raises SettingsError."""
        _allow_files(self._options.max_connections)
        await self._dialler.find()
        self._requests = await self._made()
        answer = await fetch(self._dialler, self._requests[0], self._options.timeout)
        if outcome_of(answer) != "ok" and answer.status not in _PASSING:
            raise SettingsError(f"{self._address.url}: {_error_text(answer)}")
        self._model = await self._served_model()
        await self._pool.warm()

    def send(self, index: int) -> None:
        """See Target."""
        requests = self._requests
        self._pool.send(index, requests[index % len(requests)])

    def give_up(self) -> None:
        """See Target."""
        self._pool.give_up()

    async def counts(self) -> Counts | None:
        """Return the counts from the server's /metrics; None if it is not a Weir server."""
        if self._model is None:
            return None
        return await counted(self._dialler, self._model, self._options.timeout)

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()

    # The PoolListener protocol.

    def sent(self, index: int, now: float) -> None:
        """Record when a request was sent."""
        self._ledger.sent[index] = now

    def ended(self, index: int, outcome: str) -> None:
        """Record how a request ended."""
        self._ledger.end(index, self._clock(), outcome)

    async def _made(self) -> list[bytes]:
        """Return the requests to send in turn."""
        bodies = self._bodies if self._bodies is not None else [await self._example()]
        return [request_bytes("POST", self._address, self._options.headers, body) for body in bodies]

    async def _example(self) -> bytes:
        """Return the first example in the server's OpenAPI document for this path. Raises SettingsError if there is none."""
        document = await fetch_json(self._dialler, "/openapi.json", self._options.timeout)
        path = self._address.path.partition("?")[0]
        example = example_of(document, path)
        if example is None:
            known = _paths(document)
            wrong = "describes no example to send; give something with --data"
            if known and path not in known:
                wrong = f"accepts no requests at this path, but at {', '.join(known)}"
            raise SettingsError(f"{self._address.url}: the server {wrong}")
        return msgspec.json.encode(example)

    async def _served_model(self) -> str | None:
        """Return the name under which the server counts these requests; None if it is not a Weir server."""
        index = await fetch_json(self._dialler, "/", self._options.timeout)
        path = self._address.path.partition("?")[0]
        try:
            names = [model["name"] for model in index["models"] if path in model["paths"]]
        except (KeyError, TypeError):
            return None
        return names[0] if len(names) == 1 else None


def _allow_files(connections: int) -> None:
    """Raise this process's limit of open files for `connections` connections. Raises SettingsError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        rule = f"must be at most {hard - _OTHER_FILES}, as this process may open {hard} files (ulimit -Hn)"
        raise SettingsError(f"max_connections={connections}: {rule}")
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _paths(document: Any) -> list[str]:
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(paths, dict):
        return []
    return [path for path, methods in paths.items() if isinstance(methods, dict) and "post" in methods]


def _error_text(answer: HttpAnswer) -> str:
    message = error_of(answer).get("message")
    text = message if isinstance(message, str) else " ".join(answer.body[:200].decode("latin-1").split())
    return f"{outcome_of(answer)}: {text}" if text else outcome_of(answer)


_HEADER_LENGTH = "Inference-Header-Content-Length"


class KserveTarget(HttpTarget):
    """Sends requests of the Open Inference Protocol, with tensors as JSON or raw bytes. `data` are the requests as JSON (see
    target.given_requests); without it, a request is made from the model's metadata."""

    def __init__(
        self,
        url: str,
        endpoint: TargetEndpoint,
        data: str | Sequence[Any] | None = None,
        options: HttpOptions | None = None,
    ) -> None:
        super().__init__(url.partition("#")[0], None, options, name=url)
        self._endpoint = endpoint
        self._given = None if data is None else given_requests(data, endpoint)

    async def _made(self) -> list[bytes]:
        options = self._options
        requests = self._given or [await example_request(self._dialler, self._endpoint, options.rows, options.timeout)]
        return [self._written(request) for request in requests]

    def _written(self, request: InferenceRequest) -> bytes:
        headers = dict(self._options.headers)
        if not self._endpoint.binary:
            return request_bytes("POST", self._address, headers, kserve_json.write_request(request))
        request.parameters = {**request.parameters, "binary_data_output": True}
        written = kserve_binary.write_request(request)
        headers |= {_HEADER_LENGTH: str(written.header_length), "Content-Type": OCTETS}
        return request_bytes("POST", self._address, headers, b"".join(written.parts))

    async def _served_model(self) -> str | None:
        model = self._endpoint.model
        return model if await is_counted(self._dialler, model, self._options.timeout) else None


PATH = "/v2/ws"
_NO_ID = "weir-bench-0000000000"  # all ids have this length: a message is written once, and then its id is replaced
_HEAD = 4  # bytes at the start of a binary message that hold the length of its JSON


class AnswerHead(msgspec.Struct):
    """The fields of an answer that tell how its request ended."""

    id: str = ""
    error: str | None = None
    type: str = ""
    status: int = 0


_read = msgspec.json.Decoder(AnswerHead).decode


class WebSocketTarget(LedgerTarget):
    """Sends requests over `options.channels` connections in turn. `data` is as for KserveTarget. A lost connection ends all requests
    that are under way on it, and is not opened again."""

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
        self._given = None if data is None else given_requests(data, endpoint)
        scheme = "https" if endpoint.tls else "http"
        self._dialler = Dialler(parse_address(f"{scheme}://{endpoint.place}/"), insecure=self._options.insecure)
        self._sockets: list[ClientConnection] = []
        self._tasks = Tasks()
        self._under_way: dict[int, ClientConnection] = {}
        self._messages: list[Message] = []
        self._model: str | None = None

    @property
    def connections(self) -> int:
        """See Target."""
        return len(self._sockets)

    async def open(self) -> None:
        """Connect, and check that the model answers. Raises SettingsError."""
        endpoint, options = self._endpoint, self._options
        await self._dialler.find()
        requests = self._given or [await example_request(self._dialler, endpoint, options.rows, options.timeout)]
        self._messages = [self._written(request) for request in requests]
        self._sockets = [await self._connected() for _ in range(options.channels)]
        await self._try(self._sockets[0])
        self._model = endpoint.model if await is_counted(self._dialler, endpoint.model, options.timeout) else None
        for each in self._sockets:
            self._tasks.start(self._receive(each))
        self._next = cycle(self._sockets)

    def send(self, index: int) -> None:
        """See Target."""
        socket = next(self._next)
        self._under_way[index] = socket
        self._ledger.sent[index] = self._clock()
        message = with_id(self._messages[index % len(self._messages)], index)
        self._tasks.start(self._write(socket, index, message))

    def give_up(self) -> None:
        """End requests that have timed out, and cancel them at the server."""
        limit = self._clock() - self._options.timeout
        for index in [each for each in self._under_way if self._ledger.sent[each] <= limit]:
            socket = self._under_way[index]
            self._ended(index, TIMEOUT)
            self._tasks.start(self._write(socket, None, write_cancel(id_of(index))))

    async def counts(self) -> Counts | None:
        """Return the counts from the server's /metrics; None if it is not a Weir server."""
        return None if self._model is None else await counted(self._dialler, self._model, self._options.timeout)

    async def close(self) -> None:
        """Close the connections."""
        await self._tasks.end()
        for each in self._sockets:
            await each.close()

    async def _connected(self) -> ClientConnection:
        endpoint, options = self._endpoint, self._options
        url = f"{'wss' if endpoint.tls else 'ws'}://{endpoint.place}{PATH}"
        tls = tls_context(options.insecure) if endpoint.tls else None
        try:
            return await connect(
                url,
                ssl=tls,
                max_size=None,
                compression=None,
                open_timeout=options.timeout,
                close_timeout=0.1,
                additional_headers=dict(options.headers),
                proxy=None,
            )
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise SettingsError(f"{self.name}: no WebSocket at {PATH}: {error}") from error

    async def _try(self, socket: ClientConnection) -> None:
        try:
            async with asyncio.timeout(self._options.timeout):
                await socket.send(with_id(self._messages[0], 0))
                head = read_head(await socket.recv())
        except (ConnectionClosed, TimeoutError) as error:
            raise SettingsError(f"{self.name}: no response: {str(error) or 'timed out'}") from error
        if head.error is not None and head.status not in _PASSING:
            raise SettingsError(f"{self.name}: {head.status} {head.type}: {head.error}")

    async def _write(self, socket: ClientConnection, index: int | None, message: Message) -> None:
        try:
            await socket.send(message)
        except ConnectionClosed:
            if index is not None:
                self._ended(index, CLOSED)

    async def _receive(self, socket: ClientConnection) -> None:
        """Record the answers that come on one connection, and its loss."""
        try:
            async for message in socket:
                head = read_head(message)
                index = int(head.id[len(_NO_ID) - 10 :])
                self._ended(index, OK if head.error is None else f"{head.status} {head.type}")
        except ConnectionClosed:
            pass
        for index in [each for each, on in self._under_way.items() if on is socket]:
            self._ended(index, CLOSED)

    def _ended(self, index: int, outcome: str) -> None:
        if self._under_way.pop(index, None) is not None:
            self._ledger.end(index, self._clock(), outcome)

    def _written(self, request: InferenceRequest) -> Message:
        request.id = _NO_ID
        if self._endpoint.binary:
            request.parameters = {**request.parameters, "binary_data_output": True}
        return write_request(request, binary=self._endpoint.binary)


def id_of(index: int) -> str:
    """Return the id of the request `index`."""
    return f"{_NO_ID[:-10]}{index:010d}"


def with_id(message: Message, index: int) -> Message:
    """Return `message` with the id of the request `index`."""
    if isinstance(message, str):
        return message.replace(_NO_ID, id_of(index), 1)
    return message.replace(_NO_ID.encode(), id_of(index).encode(), 1)


def read_head(message: Message) -> AnswerHead:
    """Return the fields of an answer that tell how its request ended."""
    if isinstance(message, str):
        return _read(message)
    return _read(message[_HEAD : _HEAD + int.from_bytes(message[:_HEAD], "big")])
