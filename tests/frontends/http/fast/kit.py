"""A transport without a socket, a service with answers on command, and readers of answers: for tests of the fast path."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, NamedTuple, cast

from tests.fakes import RecordingObserver
from tests.waiting import turns
from tests.workers.models import Square as Square

from weir.catalog.registry import Registry
from weir.frontends.http.fast.connection import Connection
from weir.frontends.http.fast.handover import HandOver
from weir.frontends.http.fast.inference import HotKserve, HotNative
from weir.frontends.http.fast.shared import Clocks, HttpShared
from weir.model import Model
from weir.protocols import HttpSettings
from weir.protocols.access import Access
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.testing import FakeBlock, FakeClock, FakeExecutor

GET = b"GET /hello HTTP/1.1\r\nHost: test\r\n\r\n"
CHUNKED = b"POST /infer/square HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n3\r\n0\r\n\r\n"


def squared(batch: list[Any]) -> list[Any]:
    """Answer numbers with their squares, anything else with itself."""
    return [x * x if isinstance(x, (int, float)) else x for x in batch]


class ArenaExecutor(FakeExecutor):
    """A FakeExecutor with shared memory for `places` payloads, each of which forgets its content when it is released."""

    def __init__(self, answer: Callable[[list[Any]], list[Any]] | None = None, *, places: int = 100) -> None:
        super().__init__(answer)
        self.free = places

    def reserve(self, size_bytes: int) -> FakeBlock | None:
        if not self.free or size_bytes > self.gauges()["arena_bytes"]:
            return None
        self.free -= 1
        self.blocks.append(WipedBlock(size_bytes, self))
        return self.blocks[-1]

    def gauges(self) -> dict[str, Any]:
        return {**super().gauges(), "arena_bytes": 1 << 20}


class WipedBlock(FakeBlock):
    """A block that is overwritten as soon as it is free, as the next owner would."""

    def __init__(self, size_bytes: int, executor: ArenaExecutor | None = None) -> None:
        super().__init__(size_bytes)
        self._executor = executor

    def release(self) -> None:
        super().release()
        if not self.shares:
            self.view[:] = b"\xee" * len(self.view)
            if self._executor is not None:
                self._executor.free += 1


def block_of(content: bytes) -> WipedBlock:
    """Return a block that holds `content`."""
    block = WipedBlock(len(content))
    block.view[:] = content
    return block


class FakeTransport(asyncio.Transport):
    """Keeps what is written; with `stuck`, in its buffer, uncopied, as uvloop does."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.written = asyncio.Event()
        self.stuck = False
        self.eof_sent = False
        self._closing = False
        self._reading = True
        self.protocol: Any = None
        self._buffer: list[bytes | bytearray | memoryview] = []
        self._high, self._low = 65536, 16384
        self._paused = False
        self._lost = False

    def connect(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer.append(data)
        self.written.set()
        if not self.stuck:
            self.flush()
        elif self.get_write_buffer_size() > self._high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def flush(self) -> None:
        """Send what is in the buffer."""
        for data in self._buffer:
            self.sent += data
        self._buffer.clear()
        if self._paused and not self._closing:
            self._paused = False
            self.protocol.resume_writing()
        if self._closing:
            self._lose(None)

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._buffer))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high, self._low = (65536, 16384) if high is None else (high, high // 4)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return cast(asyncio.BaseProtocol, self.protocol)

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof_sent = True

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._buffer:
                self._lose(None)

    def abort(self) -> None:
        self._closing = True
        self._buffer.clear()
        self._lose(ConnectionAbortedError())

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def receive(self, data: bytes) -> bytes:
        """Deliver `data` as a transport does; return what was not read because reading is paused or over."""
        while data and self._reading and not self._closing:
            if isinstance(self.protocol, asyncio.BufferedProtocol):
                buffer = memoryview(self.protocol.get_buffer(-1))
                size = min(len(buffer), len(data))
                buffer[:size] = data[:size]
                self.protocol.buffer_updated(size)
            else:
                size = len(data)
                self.protocol.data_received(data)
            data = data[size:]
        return data

    async def deliver(self, data: bytes) -> bytes:
        """Deliver `data`, and let everything happen that follows of it."""
        rest = self.receive(data)
        await settled()
        return rest

    async def leave(self) -> None:
        """End as when the client has left, and let everything happen that follows of it."""
        self.abort()
        await settled()


class Site(NamedTuple):
    """A shared with one model, `square`, and a way to open connections to it."""

    shared: HttpShared
    service: Service
    executor: FakeExecutor
    observer: RecordingObserver
    clock: FakeClock

    def connect(self) -> FakeTransport:
        """Open a connection."""
        transport = FakeTransport()
        transport.connect(Connection(self.shared))
        return transport

    def sweep(self, seconds: float) -> None:
        """Let `seconds` pass, and look for connections that have been idle or slow for too long."""
        while seconds > 0.0:
            self.clock.advance(min(seconds, 1.0))
            self.shared.on_second()
            seconds -= 1.0
        for connection in list(self.shared.connections):
            connection.sweep(self.shared.tick)


@asynccontextmanager
async def site(
    executor: FakeExecutor | None = None,
    model: type[Model] = Square,
    app: Any = None,
    access: Access | None = None,
    **settings: Any,
) -> AsyncIterator[Site]:
    """Run a Site; `settings` are those of HttpSettings, without an executor numbers are squared, without an `app` it is `hello`."""
    executor = executor or FakeExecutor(squared)
    observer, clock = RecordingObserver(), FakeClock()
    service = Service(model, name="square", executor=executor, observers=[observer], clock=clock)
    http = HttpSettings(**settings)
    hand_over = HandOver(app or hello, http)
    hand_over.config.load()
    registry = Registry([service])
    route_handlers = (HotNative(registry, http), HotKserve(KserveContext(registry, http)))
    await service.start()
    try:
        yield Site(
            HttpShared(route_handlers, http, [observer], hand_over, clocks=Clocks(clock, clock), access=access),
            service,
            executor,
            observer,
            clock,
        )
        await settled()
    finally:
        stopping = asyncio.ensure_future(service.stop(0.0))
        await settled()
        clock.advance(1.0)
        await stopping


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application of these tests: reads the body and answers with it, after the path."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    content = scope["path"].encode() + b" " + body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


def always(output: Any) -> Callable[[list[Any]], list[Any]]:
    """Return a function that answers each item of a batch with `output`."""
    return lambda batch: [output for _ in batch]


async def settled(times: int = 1) -> None:
    """Return when the loop has had enough turns for all that is ready to happen, and for what follows of it so many `times`."""
    await turns(12 * times)


def post(body: bytes = b"3", *headers: str, path: str = "/infer/square", host: str = "Host: test") -> bytes:
    """Return a request."""
    lines = [f"POST {path} HTTP/1.1", *([host] if host else []), *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


class Got(NamedTuple):
    """An answer as a client sees it."""

    status: int
    headers: dict[str, str]
    body: bytes


def answers(received: bytes | bytearray) -> list[Got]:
    """Read `received`, which is complete answers framed by Content-Length (or 100 Continue), and nothing else."""
    found = []
    rest = bytes(received)
    while rest:
        head, separator, rest = rest.partition(b"\r\n\r\n")
        if not separator:
            raise ValueError(f"half an answer: {head!r}")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        size = int(headers.get("content-length", 0))
        if len(rest) < size:
            raise ValueError(f"answer cut short: {rest!r}, {size} bytes expected")
        found.append(Got(int(status.split()[1]), headers, rest[:size]))
        rest = rest[size:]
    return found


def statuses(received: bytes | bytearray) -> list[int]:
    """Return the codes of the answers in `received`."""
    return [answer.status for answer in answers(received)]


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Cut `data` at `cuts`."""
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges) if start < stop]


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test that needs a loop."""
    asyncio.run(body())


async def exchange(site: Site, *parts: bytes, wait: bool = True) -> FakeTransport:
    """Send `parts` on a new connection, one by one, and let everything happen."""
    transport = site.connect()
    rest = b""
    for part in parts:
        rest = transport.receive(rest + part)
        if wait:
            await settled()
    quiet = 0
    while quiet < 2:
        before = len(transport.sent), len(rest)
        await settled()
        rest = transport.receive(rest)
        quiet = quiet + 1 if before == (len(transport.sent), len(rest)) else 0
    return transport
