"""Responses over a connection of an event loop, and what is written to a server."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop
from tests.rings import subcases

from weir.client.http import AsyncHttpTransport
from weir.client.http_calls import OutgoingRequest
from weir.client.http_connection import AsyncConnection, ResponseReader, ServerAddress
from weir.client.methods import BlockingTransport
from weir.errors import InvalidRequest, WeirError

ONE = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n9"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[AsyncConnection, socket.socket]]:
    """A connection, and the server's end of it."""
    here, there = socket.socketpair()
    here.setblocking(False)
    with there:
        connection = AsyncConnection(direct=True)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=here)
        yield connection, there
        connection.close()
        await asyncio.sleep(0)


@subcases("step", [1, 2, 7, 1000])
def test_responses_are_read_however_they_are_cut(step: int) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" + ONE
    reader, found = ResponseReader(), []
    for data in (ONE, CHUNKED, interim, CLOSING):
        reader.begin()
        for at in range(0, len(data), step):
            assert not reader.is_complete
            reader.feed(data[at : at + step])
        found.append((reader.status, reader.take(), reader.keeps))
    assert found == [(200, b"9", True), (200, b"abc", True), (200, b"9", True), (200, b"", False)]


@subcases("data", [b"garbage\r\n\r\n", b"HTTP/1.1 twohundred\r\n\r\n", b"\x16\x03\x01", b"HTTP/9.9 200 OK\r\n\r\n"])
def test_garbage_is_reported(data: bytes) -> None:
    with pytest.raises(OSError, match="garbage"):
        ResponseReader().feed(data)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\n\r\nall of it")
    reader.feed(b"")
    assert (reader.is_complete, reader.take(), reader.keeps) == (True, b"all of it", False)


async def test_a_response_that_came_before_all_was_sent_is_read() -> None:
    async with connected() as (connection, there):
        there.sendall(ONE)
        connection._descriptor = -1  # so that nothing can be written
        assert (await connection.send(b"POST")).body == b"9"


def test_the_thread_of_a_client_that_nobody_closes_ends_with_it() -> None:
    client = BlockingTransport(AsyncHttpTransport("http://127.0.0.1:1", {}, 1, True))
    client._started().run(asyncio.sleep(0))
    thread = next(each for each in threading.enumerate() if each.name == "weir-client")
    del client
    thread.join()


@subcases("data", [ONE, b"garbage"])
def test_a_connection_is_of_no_more_use_after_what_no_request_asked_for(data: bytes) -> None:
    async def run() -> None:
        for together in (True, False):  # the server is about to close
            async with connected() as (connection, there):
                answer = connection.send(b"GET")
                assert there.recv(9) == b"GET" and not connection.is_free
                connection.data_received(ONE + data * together)
                assert connection.is_free is not together and answer.result().body == b"9"
                connection.data_received(data)
                assert not connection.is_free

    uvloop.run(run())


async def streamed(first: bytes, second: bytes = b"") -> list[bytes]:
    async with connected() as (connection, there):
        chunks = connection.chunks(b"GET")
        there.sendall(first)
        found = [await anext(chunks)]
        there.sendall(second)
        return found + [chunk async for chunk in chunks]


def test_a_stream_is_read_as_it_arrives() -> None:
    first = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n"
    assert uvloop.run(streamed(first, b"1\r\nc\r\n0\r\n\r\n")) == [b"ab", b"c"]
    with pytest.raises(OSError, match="garbage"):
        uvloop.run(streamed(first, b"garbage"))
    with pytest.raises(WeirError, match="why"):
        uvloop.run(streamed(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 3\r\n\r\nwhy"))


@subcases(
    ("url", "authority"),
    [
        ("http://a:80/", "a"), ("http://a:81/", "a:81"), ("https://a/", "a"), ("https://a:80/", "a:80"),
        ("http://[::1]:8000/", "[::1]:8000"), ("unix:/x", "localhost"), ("http://bücher.example", "xn--bcher-kva.example"),
    ],
)  # fmt: skip
def test_the_host_header_names_the_port_where_it_is_not_the_usual_one(url: str, authority: str) -> None:
    written = ServerAddress(url, {}).written(OutgoingRequest("GET", "/x"))
    assert written == f"GET /x HTTP/1.1\r\nhost: {authority}\r\n\r\n".encode()


@subcases("value", ["two\r\nlines", "two\nlines", "\u20ac", "\x85"])
def test_a_header_that_would_break_the_head_is_refused(value: str) -> None:
    for request in (OutgoingRequest("GET", "/x", {"x-client-id": value}), OutgoingRequest("GET", f"/{value}")):
        with pytest.raises(InvalidRequest, match="must be Latin-1 text in one line"):
            ServerAddress("http://a", {}).written(request)
    assert "é".encode("latin-1") in ServerAddress("http://a", {"x-name": "é"}).written(OutgoingRequest("GET", "/x"))
