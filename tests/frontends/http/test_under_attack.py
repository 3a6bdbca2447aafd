"""A real server with little memory, and clients that want to end it: it lives, and goes on answering others."""

import gzip
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from tests.fronts.kit import metric
from tests.served import Served, until

MODELS = Path(__file__).parent / "models.py"
ROOM = 768 << 20  # bytes of address space that the server may take beside what it has at the start
BODY = 16 << 20
GET = b"GET /health/live HTTP/1.1\r\nHost: test\r\n\r\n"
UPGRADE = (
    b"GET /v2/ws HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def post(body: bytes, *headers: bytes) -> bytes:
    """Return a request to the model."""
    lines = [b"POST /infer/size HTTP/1.1", b"Host: test", b"Content-Length: %d" % len(body), *headers, b"", b""]
    return b"\r\n".join(lines) + body


class Attacked:
    """A server that has little memory, and connections to it, which are closed with `stack`."""

    def __init__(self, served: Served, stack: ExitStack) -> None:
        self.served = served
        self.stack = stack
        url = urlsplit(served.url)
        self.address = (url.hostname or "", url.port or 0)
        self.process = psutil.Process(served.process.pid)

    def connect(self) -> socket.socket:
        """Open a connection that reads as little as may be."""
        client = self.stack.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30.0)
        client.connect(self.address)
        return client

    def call(self, request: bytes) -> int:
        """Return the status of the answer to `request` on a connection of its own."""
        with self.connect() as client:
            client.sendall(request)
            return status(client)

    def lives(self) -> bool:
        """Return whether the server answers everybody else."""
        large = post(b'"' + b"x" * 200_000 + b'"')
        return (self.call(post(b'"abc"')), self.call(GET), self.call(large)) == (200, 200, 200)


def status(client: socket.socket) -> int:
    """Return the status of the next answer; 0 where the connection was closed without one."""
    with suppress(ConnectionResetError):
        return int(client.recv(12)[9:12] or 0)
    return 0


@pytest.fixture(scope="module")
def shared() -> Iterator[Attacked]:
    """Serve a model that measures texts, with 64 MB for requests and answers, for all tests."""
    with Served(f"{MODELS}:Size", "--max-waiting-bytes", 64 << 20) as served, ExitStack() as stack:
        server = Attacked(served.until_ready(), stack)
        limit = server.process.memory_info().vms + ROOM
        resource.prlimit(served.process.pid, resource.RLIMIT_AS, (limit, limit))
        yield server


@pytest.fixture
def server(shared: Attacked) -> Iterator[Attacked]:
    """The shared server, which lives while the connections of the test are open."""
    with ExitStack() as stack:
        yield Attacked(shared.served, stack)
        assert shared.lives()


LONG = 60_000  # bytes of a head
HEADS = {  # a head that takes a page, one that the fast path answers, one whose body is refused, and one whose body is not read
    "page": b"GET /%b HTTP/1.1\r\nHost: test\r\n\r\n" % (b"a" * LONG),
    "model": post(b'"abc"', b"X-Long: " + b"a" * LONG),
    "refused": post(b'"' + b"x" * 70_000 + b'"', b"Content-Type: a/b", b"X-Long: " + b"a" * LONG),
    "unread": b"POST /nothing HTTP/1.1\r\nHost: test\r\nContent-Length: 60000\r\n\r\n" + b"x" * LONG,
}


@pytest.mark.parametrize("name", HEADS)
def test_a_connection_keeps_nothing_of_a_request_that_was_answered(server: Attacked, name: str) -> None:
    for _ in range(100):  # until the collector frees as much as waits for it
        assert server.call(HEADS[name])
    before = server.process.memory_info().rss
    for _ in range(400):
        client = server.connect()
        client.sendall(HEADS[name])
        assert status(client)
    assert server.process.memory_info().rss - before < 400 * 20_000


@pytest.mark.parametrize("path", [b"/infer/size", b"/v2/repository/index", b"/v2/ws"])
def test_the_heads_of_requests_under_way_are_charged(server: Attacked, path: bytes) -> None:
    opening = UPGRADE.partition(b"\r\n")[2] if path == b"/v2/ws" else b"Host: test\r\nContent-Length: 9\r\n"
    head = b"%b %b HTTP/1.1\r\n" % (b"GET" if path == b"/v2/ws" else b"POST", path) + opening
    until(lambda: metric(server.served, "weir_held_bytes") < LONG)
    clients = [server.connect() for _ in range(20)]
    for client in clients:
        client.sendall(head + (b"X-Long: " + b"a" * 6000 + b"\r\n") * 10 + b"\r\n")
    until(lambda: metric(server.served, "weir_held_bytes") >= 20 * 2 * LONG)
    for client in clients:
        client.close()
    until(lambda: metric(server.served, "weir_held_bytes") < LONG)


def test_small_bodies_that_are_large_when_they_are_decompressed(server: Attacked) -> None:
    request = post(gzip.compress(b'"' + b"x" * (BODY - 2) + b'"'), b"Content-Encoding: gzip", b"X-Request-Timeout: 20")
    clients = [server.connect() for _ in range(60)]
    for client in clients:
        client.sendall(request)
    codes = Counter(map(status, clients))
    assert set(codes) <= {200, 408, 429, 504} and codes[200]
