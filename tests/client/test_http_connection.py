"""Responses over a connection of an event loop, and what is written to a server."""

import asyncio
import base64
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
import uvloop
from tests.frontends.http.sockets import TLS
from tests.rings import subcases

from weir.client.calls import ConnectionLost, Silence, Unreachable
from weir.client.http import AsyncHttpTransport
from weir.client.http_connection import (
    AsyncConnection,
    Connections,
    OutgoingRequest,
    ResponseReader,
    ServerAddress,
    headers_with,
)
from weir.client.methods import BlockingTransport
from weir.errors import Cancelled, DeadlineExceeded, InvalidRequest, ModelNotFound, SettingsError, WeirError

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


def test_headers_without_end_are_not_kept() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(OSError, match="headers of more than 262144 bytes"):
        for _ in range(300):
            reader.feed(b"x: %b\r\n" % (b"y" * 1000))
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: y\r\n\r\n")
    assert reader.headers == {"transfer-encoding": "chunked"}


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


GOOD = b"HTTP/1.1 200 OK\r\nX-Said: once\r\nContent-Length: 2\r\n\r\nok"
ASKED = OutgoingRequest("POST", "/encode", {"x-client-id": "me"}, b"body")
LONG = 20.0  # seconds that nothing here takes


class Last(bytes):
    """An answer after which the connection ends."""


class Peer:
    """Takes connections, one at a time; on each it answers one whole request after another with the next of its answers. One of b"" is
    none at all. With `tls` it speaks that."""

    def __init__(self, answers: Sequence[bytes], tls: ssl.SSLContext | None) -> None:
        self._answers = iter(answers)
        self._tls = tls
        self.heard: list[bytes] = []
        self.pieces: list[int] = []  # that each request arrived in
        self.accepted = 0
        self.asked = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            plain, _ = self._listening.accept()
            if plain.recv(3, socket.MSG_PEEK) == b"end":
                plain.close()
                return
            self.accepted += 1
            with suppress(ConnectionResetError), plain:
                self._answer_all(self._tls.wrap_socket(plain, server_side=True) if self._tls else plain)

    def _answer_all(self, connection: socket.socket) -> None:
        with connection:
            while request := self._request(connection):
                self.heard.append(request)
                self.asked.set()
                answer = next(self._answers)
                connection.sendall(answer)
                if isinstance(answer, Last):
                    return

    def _request(self, connection: socket.socket) -> bytes:
        """Return a whole request; of what is none, what there is."""
        received, pieces, size = b"", 0, 1
        while len(received) < size and (piece := connection.recv(1 << 20)):
            received, pieces = received + piece, pieces + 1
            head = received.partition(b"\r\n\r\n")[0]
            found = re.search(rb"content-length: (\d+)", head.lower())
            size = len(head) + 4 + int(found[1]) if found else len(received)
        self.pieces.append(pieces)
        return received

    def end(self) -> None:
        with self._listening, socket.create_connection(("127.0.0.1", self.port)) as last:
            last.sendall(b"end")
            self._thread.join()


@contextmanager
def asking(
    *answers: bytes, most: int = 4, where: str = "http://127.0.0.1:{port}", token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[tuple[Peer, Connections]]:  # fmt: skip
    peer = Peer(answers, tls)
    client = Connections(where.format(port=peer.port), headers_with(token), most)
    try:
        yield peer, client
    finally:
        client.close()
        peer.end()


def test_a_connection_is_kept_and_a_small_request_arrives_in_one_piece() -> None:
    with asking(GOOD, GOOD, GOOD, where="http://127.0.0.1:{port}/below/", token="secret") as (peer, client):
        reply = client.send(ASKED, LONG)
        assert (reply.status, reply.headers["x-said"], reply.body) == (200, "once", b"ok")
        client.send(OutgoingRequest("GET", "/status"), LONG)
        client.send(OutgoingRequest("POST", "/encode", {}, large := bytes(range(256)) * 1000), LONG)
    assert peer.accepted == 1 and peer.pieces[:2] == [1, 1]
    first, second, third = peer.heard
    assert third.endswith(large)
    assert first.startswith(b"POST /below/encode HTTP/1.1\r\n") and first.endswith(b"\r\n\r\nbody")
    assert b"x-client-id: me\r\n" in first and b"authorization: Bearer secret\r\n" in first
    assert second.startswith(b"GET /below/status ") and b"content-length" not in second.lower()


def test_after_a_lost_connection_the_next_request_has_another() -> None:
    with asking(GOOD, Last(), GOOD) as (_, client):
        client.send(ASKED, LONG)
        with pytest.raises(ConnectionLost, match="ended before the response"):
            client.send(ASKED, LONG)
        assert client.send(ASKED, LONG).body == b"ok"


def test_a_connection_that_ended_is_not_used_again() -> None:
    for answer in (GOOD, Last(GOOD.replace(b"X-Said: once", b"Connection: close"))):
        with asking(answer, answer) as (peer, client):
            client.send(ASKED, LONG)
            if answer is GOOD:
                next(iter(client._kept.open)).sock.shutdown(socket.SHUT_RDWR)  # while idle
            assert client.send(ASKED, LONG).body == b"ok"
        assert peer.accepted == 2


@subcases("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nonly", b"nonsense\r\n\r\n"])
def test_half_an_answer_is_none(answer: bytes) -> None:
    with asking(Last(answer)) as (_, client), pytest.raises(ConnectionLost):
        client.send(ASKED, LONG)


def test_an_answer_that_came_before_all_was_sent_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    send = socket.socket.sendall

    def broken(sock: socket.socket, data: bytes) -> None:
        send(sock, data)
        if data.startswith(b"POST"):
            raise BrokenPipeError

    monkeypatch.setattr(socket.socket, "sendall", broken)
    with asking(GOOD) as (_, client):
        assert client.send(ASKED, LONG).body == b"ok"


def test_who_finds_no_place_is_late_and_who_waits_learns_of_the_end() -> None:
    cancelled = []
    with asking(b"", most=1) as (peer, client):

        def wait() -> None:
            with pytest.raises(Cancelled, match="has been closed"):
                client.send(ASKED, LONG)
            cancelled.append(True)

        waiting = threading.Thread(target=wait)
        waiting.start()
        peer.asked.wait()
        with pytest.raises(DeadlineExceeded, match="no response in time"):
            client.send(ASKED, 0.05)
        client.close()
        waiting.join()
    assert cancelled


def test_nothing_is_sent_after_the_end() -> None:
    with asking(GOOD) as (peer, client):
        client.close()
        client.close()
        with pytest.raises(Cancelled, match="has been closed"):
            client.send(ASKED, LONG)
    assert peer.heard == []


def test_a_stream_that_is_refused_raises_its_error() -> None:
    with asking(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n") as (_, client), pytest.raises(ModelNotFound):
        list(client.chunks(ASKED, Silence(LONG)))


def test_tls_wants_a_certificate_that_can_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "certificate.pem"))
    with asking(GOOD, where="https://127.0.0.1:{port}", tls=context) as (_, client):
        assert client.send(ASKED, LONG).body == b"ok"


def test_a_server_without_tls_is_no_server_with_it() -> None:
    with asking(Last(GOOD), where="https://127.0.0.1:{port}") as (_, client), pytest.raises(Unreachable):
        client.send(ASKED, LONG)


def test_a_url_may_have_a_name_and_a_password_and_no_scheme() -> None:
    with asking(GOOD, where="http://me:p%40ss@127.0.0.1:{port}") as (peer, client):
        client.send(ASKED, LONG)
    assert b"authorization: Basic " + base64.b64encode(b"me:p@ss") in peer.heard[0]
    with asking(GOOD, where="127.0.0.1:{port}") as (_, client):
        assert client.send(ASKED, LONG).status == 200


@subcases("url", ["ftp://a", "http://", "http://a:b", "http://a:0", "http://a?b=c", "http://[::1", "http://a..b"])
def test_what_is_no_url_of_a_server(url: str) -> None:
    with pytest.raises(SettingsError, match="url="):
        Connections(url, {}, 1)
