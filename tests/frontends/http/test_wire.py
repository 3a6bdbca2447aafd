"""HTTP/1.1 as it comes on real sockets, through every frontend: in pieces, wrong, or not at all."""

import json
from collections.abc import Iterator

import pytest
from tests.frontends.http.fast.kit import answers
from tests.frontends.http.models import Echo
from tests.frontends.http.servers import SERVERS, Running, Serve, read_all, running

from weir.catalog.registry import Registry
from weir.protocols import HttpSettings
from weir.serving.service import Service
from weir.testing import FakeExecutor

POST = b"POST /infer/echo HTTP/1.1\r\nHost: x\r\n"


def request(body: bytes, *headers: bytes, path: bytes = b"/infer/echo") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return POST.replace(b"/infer/echo", path) + length + b"".join(headers) + b"\r\n" + body


def chunked(*chunks: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + framed


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server that must still answer when the tests are over."""
    registry = Registry([Service(Echo, executor=FakeExecutor(lambda items: items))])
    with running(request.param, registry, HttpSettings(port=0, max_body_size=200_000)) as server:
        yield server
        assert server.client.post("/infer/echo", json="alive").json() == "alive"


def test_bodies_in_pieces_and_of_exactly_the_limit(server: Running) -> None:
    one_byte_at_a_time = [bytes([byte]) for byte in request(b'{"a": 1}', b"Connection: close\r\n")]
    largest = b'"' + b"x" * 199_998 + b'"'
    for parts, body in (
        (one_byte_at_a_time, b'{"a":1}'),
        ([chunked(b"[1, ", b"2", b"]")], b"[1,2]"),
        ([request(largest, b"Connection: close\r\n")], largest),
    ):
        (answer,) = answers(server.exchange(*parts))
        assert (answer.status, answer.body) == (200, body)


@pytest.mark.parametrize("sent", [
    chunked(*[b" " * 50_000] * 5), request(b" " * 200_001).rstrip(b" "), request(b" " * 30_000_000),
], ids=["chunked", "before the body comes", "the client sends on"])  # fmt: skip
def test_whoever_sends_a_body_over_the_limit_gets_to_read_why(server: Running, sent: bytes) -> None:
    answer = answers(server.exchange(sent))[0]
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["type"]) == (413, "TooLarge") and "200000" in error["message"]


@pytest.mark.parametrize("path", [b"/infer/echo", b"/infer/echo/batch", b"/v2/repository/index"])
def test_a_body_that_does_not_arrive_in_time_answers_408(serve: Serve, path: bytes) -> None:
    """The rest of the body could be taken for it when a further request comes, so the connection is closed."""
    server = serve(Service(Echo, executor=FakeExecutor(lambda items: items)), body_timeout=0.1)
    with server.connect() as connection:
        connection.sendall(request(b"12345", path=path)[:-1])
        answer = answers(read_all(connection))[0]
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert "body_timeout" in str(json.loads(answer.body)["error"])
