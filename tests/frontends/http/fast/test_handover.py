"""Connections that go on under uvicorn's protocol, as HTTP and as WebSockets."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.frontends.http.fast.kit import GET, FakeTransport, Got, Site, answers, hello, post, settled, site
from tests.rings import subcases
from uvicorn.protocols.utils import ClientDisconnected

UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
CHUNKED = b"POST /elsewhere HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
SHORT = CHUNKED + b"3\r\n[1]\r\n0\r\n\r\n"


async def exchanged(received: bytes) -> tuple[list[Got], bool]:
    """Return the answers to `received`, which comes at once, and whether the connection was closed after them."""
    async with site() as here:
        transport = here.connect()
        await transport.deliver(received)
        return answers(transport.sent), transport.is_closing()


async def test_bodies_are_kept_when_the_client_would_like_another_protocol() -> None:
    requests = [post(b"[%d]" % number, *UPGRADE, path="/elsewhere") for number in range(3)]
    received, closed = await exchanged(b"".join(requests))
    bodies = [b"/elsewhere [0]", b"/elsewhere [1]", b"/elsewhere [2]"]
    assert ([answer.body for answer in received], closed) == (bodies, False)


BEFORE_GARBAGE = [
    b"GARBAGE\r\n\r\n",
    b"\x00",
    post() + b"GARBAGE\r\n\r\n",
    CHUNKED.replace(b"chunked", b"gzip, chunked"),
]


@subcases("rest", BEFORE_GARBAGE)
async def test_requests_before_garbage_are_answered(rest: bytes) -> None:
    (first, *_), closed = await exchanged(SHORT + rest)
    assert (first.status, first.body, closed) == (200, b"/elsewhere [1]", True)


@subcases(("path", "beginning"), [
    (b"/elsewhere", b'{"error":{"type":"InvalidRequest"'), (b"/v2/models/square/infer", b'{"error":"request: '),
])  # fmt: skip
async def test_a_body_that_is_framed_wrongly_is_refused_as_everywhere(path: bytes, beginning: bytes) -> None:
    (answer,), closed = await exchanged(CHUNKED.replace(b"/elsewhere", path) + b"Z\r\n3\r\n0\r\n\r\n")
    assert (answer.status, answer.headers["content-type"], closed) == (400, "application/json", True)
    assert answer.body.startswith(beginning)


@subcases(("part", "statuses"), [(b"", [200]), (b"POST /elsewh", [200, 503]), (CHUNKED + b"2\r\n", [200, 503])])
async def test_what_has_not_arrived_when_the_server_ends_is_refused(part: bytes, statuses: list[int]) -> None:
    async with site() as here:
        transport = here.connect()
        await transport.deliver(post(b"[3]", path="/elsewhere") + part)
        (connection,) = here.shared.connections
        connection.stop()
        assert [answer.status for answer in answers(transport.sent)] == statuses
        assert transport.is_closing()


class Held:
    """An application that counts its calls, and answers when it is let."""

    def __init__(self) -> None:
        self.calls = 0
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        await self.go.wait()
        await hello(scope, receive, send)


async def test_what_is_pipelined_waits_as_bytes_and_not_as_requests() -> None:
    app = Held()
    async with site(app=app) as here:
        transport = here.connect()
        requests = [b"GET /%d HTTP/1.1\r\nHost: test\r\n\r\n" % number for number in range(5000)]
        rest = await transport.deliver(b"".join(requests))
        assert (app.calls, transport.is_reading()) == (1, False)
        assert 64 << 10 <= here.shared.account.held_bytes <= 1 << 20
        app.go.set()
        while transport.sent.count(b"HTTP/1.1 200") < len(requests):
            await settled()
            rest = transport.receive(rest)
        assert [answer.body for answer in answers(transport.sent)] == [b"/%d " % each for each in range(5000)]
        assert (transport.is_reading(), here.shared.account.held_bytes) == (True, 0)


async def test_nothing_is_read_for_which_the_account_has_no_room() -> None:
    async with site(app=Held(), max_waiting_bytes=1000) as here:
        here.shared.account.take(900)
        transport = here.connect()
        await transport.deliver(GET * 10)
        assert (answers(transport.sent)[0].status, transport.is_closing()) == (429, True)
        assert here.shared.account.held_bytes == 900


async def test_bodies_that_are_cut_anywhere_arrive_whole() -> None:
    async with site() as here:
        chunked = CHUNKED + b"".join(b"%x;a=b\r\n%b\r\n" % (len(each), each) for each in (b"\r\n\r\n" * 700, b"[1]"))
        plain = post(b"\r\n\r\n" * 900, path="/elsewhere")
        whole = plain + chunked + b"0\r\nTrailer: x\r\n\r\n" + plain + GET
        for size in (13, 977, len(whole)):
            transport = here.connect()
            for at in range(0, len(whole), size):
                transport.receive(whole[at : at + size])
                await asyncio.sleep(0)
            while len(answers(transport.sent)) < 4:
                await settled()
            bodies = [answer.body.partition(b" ")[2] for answer in answers(transport.sent)]
            assert bodies == [b"\r\n\r\n" * 900, b"\r\n\r\n" * 700 + b"[1]", b"\r\n\r\n" * 900, b""]


async def test_content_behind_a_short_chunked_body_is_no_framing() -> None:
    long, app = b"x" * 300_000, Held()
    async with site(app=app) as here:
        transport = here.connect()
        await transport.deliver(GET)
        rest = transport.receive(SHORT + post(long, path="/elsewhere") + post(b"[2]", path="/elsewhere"))
        app.go.set()
        while len(received := answers(transport.sent)) < 4:
            assert not transport.is_closing()
            await settled()
            rest = transport.receive(rest)
        assert [answer.body.partition(b" ")[2] for answer in received] == [b"", b"[1]", long, b"[2]"]


@subcases(("path", "behind", "kind"), [("/elsewhere", "/v2/a", dict), ("/v2/a", "/elsewhere", str)])
async def test_an_error_beside_a_request_in_flight_has_the_form_of_that(path: str, behind: str, kind: type) -> None:
    async with site(app=Held(), max_waiting_bytes=10_000) as here:
        here.shared.account.take(9_900)
        transport = here.connect()
        first = SHORT.replace(b"/elsewhere", path.encode())
        await transport.deliver(first + post(b"[2]", path=behind) + post(b"[3]" * 400, path=behind) + GET * 10)
        (refusal,) = answers(transport.sent)
        assert (refusal.status, type(json.loads(refusal.body)["error"])) == (429, kind)


UPGRADE_TO_WEBSOCKET = (
    b"GET /v2/ws HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@subcases(
    ("received", "status", "message"),
    [
        (GET + b"GET /again HTTP/1.1\r\nX: " + b"x" * 70_000, 431, b"max_header_size"),
        (CHUNKED + b"1;" + b"x" * 70_000, 400, b"chunk extensions"),
        (CHUNKED + (b"1;" + b"x" * 100 + b"\r\n0\r\n") * 2000, 400, b"chunk extensions"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 20_000, 400, b"trailers"),
        (CHUNKED.replace(b"chunked", b"gzip, chunked"), 501, b"only chunked"),
        (CHUNKED.replace(b"Transfer", b"Transfer-Encoding: gzip\r\nTransfer"), 501, b"only chunked"),
        (UPGRADE_TO_WEBSOCKET + b"Content-Length: 5\r\n\r\n", 400, b"WebSocket"),
        (UPGRADE_TO_WEBSOCKET + b"Transfer-Encoding: chunked\r\n\r\n", 400, b"WebSocket"),
    ],
)
async def test_what_is_framed_like_an_attack_is_refused(received: bytes, status: int, message: bytes) -> None:
    (*_, answer), closed = await exchanged(received)
    assert (answer.status, closed) == (status, True)
    assert message in answer.body


async def test_an_application_hears_that_its_request_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        heard.append(message)
        await hello(scope, receive, send)

    async with site(app=app) as here:
        transport = here.connect()
        for piece in (CHUNKED + b"1\r\nx\r\n", b"JUNK\r\n"):
            await transport.deliver(piece)
        assert [answer.status for answer in answers(transport.sent)] == [400]
    assert (heard, caplog.records[1:]) == ([{"type": "http.disconnect"}], [])


class Streaming:
    """An application that begins its responses at once, and ends none before its caller has left."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"beginning", "more_body": True})
        while (message := await receive())["type"] != "http.disconnect":
            pass
        self.heard.append(f"{scope['path']} {message['type']}")


BEHIND = CHUNKED.replace(b"/elsewhere", b"/behind")


@subcases("behind", [(GET,), (BEHIND,), (BEHIND + GET,), (BEHIND, b"JUNK\r\n"), (BEHIND, b"1;" + b"x" * 70_000)])
async def test_who_leaves_amid_a_response_is_heard_of_and_no_error_is_in_it(behind: tuple[bytes, ...]) -> None:
    app = Streaming()
    async with site(app=app) as here:
        transport = here.connect()
        await transport.deliver(SHORT + behind[0])
        await transport.deliver(b"".join(behind[1:]))
        assert transport.sent.count(b"HTTP/1.1 ") == 1
        await transport.leave()
        assert app.heard == ["/elsewhere http.disconnect"]


@subcases(("version", "statuses"), [("1.1", [100]), ("1.0", [])])
async def test_an_old_client_gets_no_continue(version: str, statuses: list[int]) -> None:
    received, _ = await exchanged(CHUNKED.replace(b"1.1\r\n", f"{version}\r\nExpect: 100-continue\r\n".encode()))
    assert [answer.status for answer in received] == statuses


async def test_trailers_do_not_become_headers() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await hello(scope, receive, send)
        seen.extend(scope["headers"])

    async with site(app=app) as here:
        await here.connect().deliver(CHUNKED + b"0\r\nAuthorization: Bearer x\r\n\r\n")
    assert [name for name, _ in seen] == [b"host", b"transfer-encoding"]


async def test_answers_that_nobody_reads_are_counted_and_end_the_connection() -> None:
    async with site(body_timeout=60.0) as here:
        transport = here.connect()
        transport.stuck = True
        await transport.deliver(post(b"x" * 100_000, path="/elsewhere"))
        assert here.shared.account.held_bytes > 100_000
        here.sweep(61.0)
        await settled()
        assert (here.shared.account.held_bytes, len(here.shared.connections)) == (0, 0)


@subcases("path", ["/elsewhere", "/infer/square"])
async def test_a_connection_that_waits_to_be_closed_does_not_wait_for_ever(path: str) -> None:
    async with site(body_timeout=60.0) as here:
        transport = here.connect()
        transport.stuck = True
        await transport.deliver(post(b"3", "Connection: close", path=path))
        assert transport.is_closing()
        here.sweep(1.0)
        here.sweep(61.0)
        await settled()
        assert not here.shared.connections


OPENING = UPGRADE_TO_WEBSOCKET + b"\r\n"
TEXT, CONTINUATION, CLOSE, PING, PONG = 0x1, 0x0, 0x8, 0x9, 0xA
FIN = 0x80


def frame(opcode: int, payload: bytes = b"") -> bytes:
    """Return a frame as a client sends it, masked with zeros; `opcode` with FIN or without."""
    size = len(payload)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes([opcode]) + length + bytes(4) + payload


class App:
    """Keeps what comes, and reads on when it is let."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while True:
            await self.go.wait()
            message = await receive()
            self.messages.append(message)
            if message["type"] != "websocket.receive":
                return

    @property
    def sizes(self) -> list[int]:
        """The lengths of the texts that came."""
        return [len(message["text"]) for message in self.messages]


@asynccontextmanager
async def opened(app: Any = None, **settings: Any) -> AsyncIterator[tuple[Site, FakeTransport]]:
    async with site(app=app or App(), **settings) as here:
        transport = here.connect()
        await transport.deliver(OPENING)
        assert transport.sent.startswith(b"HTTP/1.1 101 ")
        assert here.shared.account.connections == 1
        del transport.sent[:]
        yield here, transport
        await transport.leave()
        assert (here.shared.account.held_bytes, len(here.shared.connections)) == (0, 0)


async def test_who_does_not_read_pongs_is_not_read_either() -> None:
    async with opened() as (here, transport):
        transport.stuck = True
        rest = frame(FIN | PING, b"x" * 100) * 10_000
        for _ in range(100):
            rest = await transport.deliver(rest)
        assert transport.get_write_buffer_size() < 128 << 10
        assert not transport.is_reading()
        assert here.shared.account.held_bytes > 0
        here.sweep(61.0)
        await settled()
        assert not here.shared.connections


async def test_a_turn_of_the_loop_parses_a_bounded_part_of_a_flood() -> None:
    async with opened() as (_, transport):
        transport.receive(frame(FIN | PING) * 20_000)
        assert len(transport.sent) < 6000  # two bytes a pong
        while len(transport.sent) < 40_000:
            await settled()
        await settled()
        assert (len(transport.sent), transport.is_reading()) == (40_000, True)


async def test_pieces_of_a_message_are_not_kept_apart() -> None:
    app = App()
    async with opened(app) as (here, transport):
        transport.receive(frame(TEXT, b"a") + frame(CONTINUATION, b"b" * 50) * 2_000 + frame(CONTINUATION) * 500)
        await settled(50)
        assert len(transport.protocol.frames) == 1
        assert 100_000 < here.shared.account.held_bytes < 1 << 20
        await transport.deliver(frame(FIN | CONTINUATION, b"c"))
        assert app.messages == [{"type": "websocket.receive", "text": "a" + "b" * 100_000 + "c"}]
        assert here.shared.account.held_bytes == 0


async def test_a_message_of_empty_pieces_ends_the_connection_once() -> None:
    app = App()
    async with opened(app) as (_, transport):
        app.go.clear()
        for count in (1020, 1000):
            transport.receive((frame(TEXT, b"a") if count == 1020 else b"") + frame(CONTINUATION) * count)
            await settled(10)
        assert transport.sent[2:4] == (1008).to_bytes(2, "big")
        assert transport.is_closing()
        assert transport.protocol.queue.qsize() <= 1


async def test_messages_are_read_one_at_a_time() -> None:
    app = App()
    async with opened(app) as (here, transport):
        app.go.clear()
        await transport.deliver(frame(FIN | TEXT, b"x" * 10_000) * 10)
        assert transport.protocol.queue.qsize() <= 2
        assert not transport.is_reading()
        assert here.shared.account.held_bytes >= 80_000
        app.go.set()
        await settled(5)
        assert (app.sizes, transport.is_reading()) == ([10_000] * 10, True)


async def test_a_message_for_which_there_is_no_memory_waits_for_room() -> None:
    app = App()
    async with opened(app, max_waiting_bytes=100_000) as (here, transport):
        here.shared.account.take(50_000)
        for opcode in (TEXT, FIN | CONTINUATION):
            transport.receive(frame(opcode, b"x" * 20_000))
            await settled(10)
        here.sweep(1.0)
        assert (app.messages, transport.is_reading(), transport.is_closing()) == ([], False, False)
        here.shared.account.give(50_000)
        here.sweep(1.0)
        await settled(10)
        assert (app.sizes, transport.is_reading()) == ([40_000], True)


async def test_a_message_for_which_there_is_never_room_ends_the_connection() -> None:
    async with opened(max_waiting_bytes=100_000) as (here, transport):
        transport.receive(frame(TEXT, b"x" * 60_000) + frame(CONTINUATION, b"x" * 60_000))
        for _ in range(6):
            assert not transport.is_closing()
            await settled()
            here.sweep(1.0)
        await settled()
        assert transport.sent[2:4] == (1013).to_bytes(2, "big")
        assert (transport.is_closing(), here.shared.account.held_bytes) == (True, 0)


async def test_a_request_that_opens_none_is_answered_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with site(app=App()) as here:
        for headers in (b"X: y\r\n" * 200, b"X: " + b"y" * 20_000 + b"\r\n"):
            transport = here.connect()
            await transport.deliver(UPGRADE_TO_WEBSOCKET + headers + b"\r\n")
            assert transport.sent.startswith(b"HTTP/1.1 400 ")
            assert transport.is_closing()
        await settled()
        assert not here.shared.connections
    assert not [record for record in caplog.records if record.exc_info]


async def test_who_answers_no_ping_is_left() -> None:
    async with opened(websocket_ping=20.0) as (here, transport):
        for _ in range(4):
            here.sweep(15.0)
            transport.receive(frame(FIN | PONG))
        assert here.shared.connections
        for _ in range(5):
            here.sweep(15.0)
        await settled()
        assert not here.shared.connections


async def talkative(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await receive()
    await asyncio.gather(*[send({"type": "websocket.send", "bytes": b"x" * 100_000}) for _ in range(20)])
    await receive()


async def test_who_reads_slowly_gets_one_answer_after_the_other_and_is_not_left() -> None:
    async with opened(talkative, websocket_ping=1.0) as (here, transport):
        transport.stuck = True
        await transport.deliver(frame(FIN | TEXT, b"go"))
        here.sweep(10.0)  # ten pings, but nothing is read from a slow client, which may have answered them
        assert here.shared.connections
        for _ in range(25):
            assert transport.get_write_buffer_size() < 128 << 10
            transport.flush()
            await settled()
        assert len(transport.sent) > 2_000_000
        here.sweep(0.5)
        await settled()
        assert here.shared.connections


async def test_the_end_of_the_server_closes_the_websocket() -> None:
    async with opened() as (here, transport):
        (connection,) = here.shared.connections
        connection.drain()
        assert not connection.busy
        connection.stop()
        connection.stop()
        assert transport.sent[2:4] == (1012).to_bytes(2, "big")
        await settled()


def ended(code: int, reason: str) -> dict[str, Any]:
    return {"type": "websocket.disconnect", "code": code, "reason": reason}


@pytest.mark.parametrize("apart", [False, True])
@subcases(
    ("behind", "sent", "messages"),
    [
        (frame(FIN | TEXT, b"a"), b"", [{"type": "websocket.receive", "text": "a"}]),
        (frame(FIN | PING, b"x"), b"\x8a\x01x", []),
        (frame(FIN | CLOSE), b"\x88\x00", [ended(1005, "")]),
        (
            frame(FIN | CONTINUATION),
            b"\x88\x1f\x03\xeaunexpected continuation frame",
            [ended(1002, "unexpected continuation frame")],
        ),
        (
            frame(FIN | TEXT, b"\xff"),
            b"\x88 \x03\xefa message of text is not UTF-8",
            [ended(1007, "a message of text is not UTF-8")],
        ),
    ],
)
async def test_what_comes_before_the_opening_is_answered_is_read_after_it(
    apart: bool, behind: bytes, sent: bytes, messages: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    async with site(app=app) as here:
        transport = here.connect()
        for piece in [OPENING, behind] if apart else [OPENING + behind]:
            transport.receive(piece)
        assert not transport.sent
        assert here.shared.account.held_bytes == len(behind)
        await settled()
        head, _, frames = bytes(transport.sent).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        assert (frames, app.messages) == (sent, messages)
        await transport.leave()
        assert (here.shared.account.held_bytes, len(here.shared.connections)) == (0, 0)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_an_application_that_accepts_too_late_gets_an_error(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[type[Exception]] = []

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        try:
            await send({"type": "websocket.accept"})
        except OSError as error:
            refused.append(type(error))
            raise

    async with site(app=late) as here:
        transport = here.connect()
        transport.receive(OPENING)
        transport.close()
        await settled()
        assert refused == [ClientDisconnected]
        assert not here.shared.connections
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
