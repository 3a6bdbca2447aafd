"""HTTP/1.1 as it comes on real sockets, through every frontend: in pieces, pipelined, wrong, or not at all."""

import json
import socket
import struct
from collections.abc import Iterator

import pytest
from tests.frontends.http.models import Echo
from tests.frontends.http.servers import Running, Serve, read_all

from weir.serving.service import Service
from weir.testing import FakeExecutor

CLOSE = b"Connection: close\r\n"


def request(body: bytes, *headers: bytes, path: bytes = b"/infer/echo", method: bytes = b"POST") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"%s %s HTTP/1.1\r\nHost: x\r\n%s%s\r\n%s" % (method, path, length, b"".join(headers), body)


def chunked(*chunks: bytes, ending: bytes = b"0\r\n\r\n") -> bytes:
    head = b"POST /infer/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + ending


def answers(received: bytes) -> list[tuple[int, bytes]]:
    """Take apart answers that have a Content-Length."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        length = int(headers[b"content-length"])
        found.append((int(status.split()[1]), rest[:length]))
        received = rest[length:]
    return found


@pytest.fixture
def server(serve: Serve) -> Iterator[Running]:
    """A server that must still answer when the test is over."""
    running = serve(Service(Echo, executor=FakeExecutor(lambda items: items)), max_body_size=200_000)
    yield running
    assert running.client.post("/infer/echo", json="alive").json() == "alive"


def test_one_byte_at_a_time(server: Running) -> None:
    parts = [bytes([byte]) for byte in request(b'{"a": 1}', CLOSE)]
    assert answers(server.exchange(*parts)) == [(200, b'{"a":1}')]


@pytest.mark.parametrize("cut", [1, 10, 40, 60, -1])
def test_in_two_pieces(server: Running, cut: int) -> None:
    data = request(b'{"a": 1}', CLOSE)
    assert answers(server.exchange(data[:cut], data[cut:])) == [(200, b'{"a":1}')]


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    data = b"".join(request(b"%d" % number) for number in range(99)) + request(b"99", CLOSE)
    assert answers(server.exchange(data)) == [(200, b"%d" % number) for number in range(100)]


def test_pages_and_inference_share_a_connection(server: Running) -> None:
    live = request(b"", path=b"/health/live", method=b"GET")
    data = request(b"1") + live + request(b"2") + live + request(b"3", CLOSE)
    assert [body for _, body in answers(server.exchange(data))] == [
        b"1",
        b'{"live":true}',
        b"2",
        b'{"live":true}',
        b"3",
    ]


def test_chunked_bodies(server: Running) -> None:
    assert answers(server.exchange(chunked(b"[1, ", b"2", b"]"))) == [(200, b"[1,2]")]


def test_a_chunked_body_over_the_limit_is_refused(server: Running) -> None:
    received = server.exchange(chunked(*[b" " * 50_000] * 5))
    assert answers(received)[0][0] == 413


def test_a_declared_length_over_the_limit_is_refused_before_the_body_comes(server: Running) -> None:
    head = b"POST /infer/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 200001\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head)
        status, body = answers(read_all(connection))[0]
    assert (status, json.loads(body)["error"]["type"]) == (413, "TooLarge")
    assert "200000" in json.loads(body)["error"]["message"]


def test_whoever_sends_a_body_over_the_limit_gets_to_read_why(server: Running) -> None:
    received = server.exchange(request(b" " * 3_000_000))
    assert answers(received)[0][0] == 413


def test_a_body_of_exactly_the_limit_passes(server: Running) -> None:
    body = b'"' + b"x" * 199_998 + b'"'
    assert answers(server.exchange(request(body, CLOSE))) == [(200, body)]


def test_expect_100_continue(server: Running) -> None:
    head, _, body = request(b"7", CLOSE, b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
    with server.connect() as connection:
        connection.sendall(head + b"\r\n\r\n")
        interim = b""
        while not interim.endswith(b"\r\n\r\n"):
            interim += connection.recv(1)
        assert interim.startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert answers(read_all(connection)) == [(200, b"7")]


def test_a_refused_request_that_expects_100_gets_the_refusal_instead(server: Running) -> None:
    head = b"POST /infer/echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 900000\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head)
        assert answers(read_all(connection))[0][0] == 413


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n\r\nnonsense\r\n\r\n", b"\0\1\2\3\r\n\r\n", b"POST /infer/echo HTTP/9.9\r\n\r\n",
        b"POST /infer/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n\r\n",
        b"POST /infer/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /infer/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 50_000 + b"\r\n",
    ],
)  # fmt: skip
def test_what_is_no_http_is_refused_or_the_connection_closed(server: Running, data: bytes) -> None:
    with server.connect() as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            received = read_all(connection)
        except (ConnectionResetError, BrokenPipeError):
            received = b""
    assert not received or 400 <= int(received.split()[1]) < 500


def test_silence_and_a_connection_closed_after_any_byte_harm_nobody(server: Running) -> None:
    data = request(b'{"a": 1}')
    halves = [server.connect() for _ in range(20)]
    for number, connection in enumerate(halves):
        connection.sendall(data[: 10 + 4 * number])
    for count in range(len(data) + 1):
        with server.connect() as connection:
            connection.sendall(data[:count])
            if count % 2:  # a reset rather than a farewell
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert server.client.post("/infer/echo", json=1).json() == 1
    for connection in halves:
        connection.close()


@pytest.mark.parametrize("path", [b"/infer/echo", b"/infer/echo/batch", b"/v2/repository/index"])
def test_a_body_that_does_not_arrive_in_time_answers_408(serve: Serve, path: bytes) -> None:
    """The rest of the body could be taken for it when a further request comes, so the connection is closed."""
    server = serve(Service(Echo, executor=FakeExecutor(lambda items: items)), body_timeout=0.1)
    with server.connect() as connection:
        connection.sendall(request(b"12345", path=path)[:-1])
        received = read_all(connection)
    status, body = answers(received)[0]
    assert (status, b"connection: close" in received.lower()) == (408, True)
    error = json.loads(body)["error"]
    assert "body_timeout" in (error["message"] if isinstance(error, dict) else error)


def test_many_connections_at_once(server: Running) -> None:
    opened = [server.connect() for _ in range(50)]
    for number, connection in enumerate(opened):
        connection.sendall(request(b"%d" % number, CLOSE))
    assert [answers(read_all(connection)) for connection in opened] == [[(200, b"%d" % n)] for n in range(50)]
    for connection in opened:
        connection.close()
