import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop
from tests.rings import subcases

from weir.bench.http import Address, HttpAnswer, LoadConnection, error_of, outcome_of, parse_address
from weir.errors import SettingsError

ONE = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n9"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[LoadConnection, socket.socket]]:
    """A connection, and the server's end of it."""
    here, there = socket.socketpair()
    here.setblocking(False)
    with there:
        connection = LoadConnection(here, direct=True)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=here)
        yield connection, there
        connection.close()
        await asyncio.sleep(0)


@subcases("step", [1, 2, 7, 1000])
def test_answers_are_read_however_they_are_cut(step: int) -> None:
    async def answers(*responses: bytes) -> list[tuple[int, bytes, bool]]:
        found: list[tuple[int, bytes, bool]] = []
        async with connected() as (connection, there):
            for data in responses:
                answer = connection.send(b"GET")
                assert there.recv(9) == b"GET" and not connection.is_free
                for at in range(0, len(data), step):
                    connection.data_received(data[at : at + step])
                found.append((answer.result().status, answer.result().body, connection.is_free))
        return found

    interim = b"HTTP/1.1 100 Continue\r\n\r\n" + ONE
    assert uvloop.run(answers(ONE, CHUNKED, interim, CLOSING)) == [
        (200, b"9", True), (200, b"abc", True), (200, b"9", True), (200, b"", False),
    ]  # fmt: skip


@subcases("data", [b"garbage\r\n\r\n", b"HTTP/1.1 twohundred\r\n\r\n", b"\x16\x03\x01", b"HTTP/9.9 200 OK\r\n\r\n"])
def test_garbage_is_reported(data: bytes) -> None:
    async def outcome() -> str:
        async with connected() as (connection, _):
            answer = connection.send(b"GET")
            connection.data_received(data)
            assert not connection.is_free
            return str(answer.exception())

    assert uvloop.run(outcome()) == "garbage"


@subcases("data", [ONE, b"garbage"])
def test_a_connection_is_of_no_more_use_after_what_no_request_asked_for(data: bytes) -> None:
    async def run() -> None:
        async with connected() as (connection, _):
            answer = connection.send(b"GET")
            connection.data_received(ONE)
            free = [connection.is_free]
            connection.data_received(data)
            assert [*free, connection.is_free] == [True, False] and answer.result().body == b"9"
        async with connected() as (connection, _):
            answer = connection.send(b"GET")
            connection.data_received(ONE + data)  # the server is about to close
            assert not connection.is_free

    uvloop.run(run())


@subcases(
    ("status", "body", "outcome"),
    [
        ("200 OK", b"9", "ok"),
        ("204 No Content", b"", "ok"),
        ("429 Too Many Requests", b'{"error":{"type":"Overloaded","message":"full"}}', "429 Overloaded"),
        ("500 Oops", b"<html>", "500"),
        ("500 Oops", b'{"error":"text"}', "500"),
        ("500 Oops", b'{"error":{"type":5}}', "500"),
        ("500 Oops", b"[1]", "500"),
        ("301 Moved", b"", "301"),
    ],
)
def test_errors_have_a_code_and_a_type(status: str, body: bytes, outcome: str) -> None:
    answer = HttpAnswer(int(status[:3]), [body], True)
    assert outcome_of(answer) == outcome
    assert isinstance(error_of(answer), dict)


def test_a_url_says_where_to_go() -> None:
    url = "http://localhost:8000/infer/square"
    assert parse_address(url) == Address(url, "localhost", 8000, "/infer/square", "", False)
    assert parse_address("https://a.example/x?y=1")[1:] == ("a.example", 443, "/x?y=1", "", True)
    assert parse_address("http://[::1]:80")[1:] == ("::1", 80, "/", "", False)
    assert parse_address("http://unix:/run/w.sock:/infer/square")[1:] == ("", 0, "/infer/square", "/run/w.sock", False)


@subcases(
    ("url", "authority"),
    [
        ("http://a:80/", "a"), ("http://a:81/", "a:81"), ("https://a/", "a"), ("https://a:80/", "a:80"),
        ("http://[::1]:8000/", "[::1]:8000"), ("http://unix:/x:/", "localhost"),
    ],
)  # fmt: skip
def test_the_host_header_names_the_port_where_it_is_not_the_usual_one(url: str, authority: str) -> None:
    assert parse_address(url).authority == authority


@subcases(
    "url",
    ["localhost:8000/x", "ftp://a/x", "http:///x", "http://a:port/", "http://unix:/x", "http://a/ä", "http://a/x y"],
)
def test_what_is_no_url_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^target .*must be") as caught:
        parse_address(url)
    assert "\n" not in str(caught.value)


pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")
