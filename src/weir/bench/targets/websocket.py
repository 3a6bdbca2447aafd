"""A target of load: a model behind WebSocket. Each connection carries many requests, whose answers are matched by id."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from weir.bench.target import OK, TIMEOUT, Counts, LedgerTarget
from weir.bench.targets.connection import CLOSED, Dialler, Tasks, parse_address, tls_context
from weir.bench.targets.http import HttpOptions, counted, example_request, is_counted
from weir.bench.targets.payloads import TargetEndpoint, given_requests
from weir.errors import SettingsError
from weir.wire.inference import InferenceRequest
from weir.wire.websocket import Message, write_cancel, write_request

PATH = "/v2/ws"
_NO_ID = "weir-bench-0000000000"  # all ids have this length: a message is written once, and then its id is replaced
_HEAD = 4  # bytes at the start of a binary message that hold the length of its JSON
_PASSING = (408, 429, 503, 504)  # codes of a server that works but is overloaded


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
        for socket in self._sockets:
            self._tasks.start(self._receive(socket))
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
        for socket in self._sockets:
            await socket.close()

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
