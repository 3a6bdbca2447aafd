"""Connections that go on under uvicorn's protocol."""

import asyncio
from typing import Any

import pytest
from tests.frontends.http.fast.kit import GET, Got, answers, hello, post, settled, site

UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
CHUNKED = b"POST /elsewhere HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"


async def exchanged(received: bytes) -> tuple[list[Got], bool]:
    """Return the answers to `received`, which comes at once, and whether the connection was closed after them."""
    async with site() as here:
        transport = here.connect()
        transport.receive(received)
        await settled()
        return answers(transport.sent), transport.is_closing()


def test_bodies_are_kept_when_the_client_would_like_another_protocol() -> None:
    requests = [post(b"[%d]" % number, *UPGRADE, path="/elsewhere") for number in range(3)]
    received, closed = asyncio.run(exchanged(b"".join(requests)))
    bodies = [b"/elsewhere [0]", b"/elsewhere [1]", b"/elsewhere [2]"]
    assert ([answer.body for answer in received], closed) == (bodies, False)


@pytest.mark.parametrize("rest", [b"GARBAGE\r\n\r\n", b"\x00", post() + b"GARBAGE\r\n\r\n"])
def test_requests_before_garbage_are_answered(rest: bytes) -> None:
    (first, *_), closed = asyncio.run(exchanged(post(b"[3]", path="/elsewhere") + rest))
    assert (first.status, first.body, closed) == (200, b"/elsewhere [3]", True)


def test_a_body_that_is_framed_wrongly_is_refused_as_everywhere() -> None:
    (answer,), closed = asyncio.run(exchanged(CHUNKED + b"Z\r\n3\r\n0\r\n\r\n"))
    assert (answer.status, answer.headers["content-type"], closed) == (400, "application/json", True)
    assert b'"type":"InvalidRequest"' in answer.body


def test_it_is_refused_in_the_form_of_the_protocol_that_was_meant() -> None:
    (answer,), _ = asyncio.run(
        exchanged(CHUNKED.replace(b"/elsewhere", b"/v2/models/square/infer") + b"Z\r\n3\r\n0\r\n\r\n")
    )
    assert (answer.status, answer.body[:19]) == (400, b'{"error":"request: ')


class Held:
    """An application that counts its calls, and answers when it is let."""

    def __init__(self) -> None:
        self.calls = 0
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        await self.go.wait()
        await hello(scope, receive, send)


def test_what_is_pipelined_waits_as_bytes_and_not_as_requests() -> None:
    async def main() -> None:
        app = Held()
        async with site(app=app) as here:
            transport = here.connect()
            requests = [b"GET /%d HTTP/1.1\r\nHost: test\r\n\r\n" % number for number in range(5000)]
            rest = transport.receive(b"".join(requests))
            await settled()
            assert (app.calls, transport.is_reading()) == (1, False)
            assert 64 << 10 <= here.shared.account.held_bytes <= 1 << 20
            app.go.set()
            while transport.sent.count(b"HTTP/1.1 200") < len(requests):
                await settled()
                rest = transport.receive(rest)
            assert [answer.body for answer in answers(transport.sent)] == [b"/%d " % each for each in range(5000)]
            assert (transport.is_reading(), here.shared.account.held_bytes) == (True, 0)

    asyncio.run(main())


def test_nothing_is_read_for_which_the_account_has_no_room() -> None:
    async def main() -> None:
        async with site(app=Held(), max_waiting_bytes=1000) as here:
            here.shared.account.take(900)
            transport = here.connect()
            transport.receive(GET * 10)
            await settled()
            assert (answers(transport.sent)[0].status, transport.is_closing()) == (429, True)
            assert here.shared.account.held_bytes == 900

    asyncio.run(main())


def test_bodies_that_are_cut_anywhere_arrive_whole() -> None:
    async def main() -> None:
        async with site() as here:
            chunked = CHUNKED + b"".join(
                b"%x;a=b\r\n%b\r\n" % (len(each), each) for each in (b"\r\n\r\n" * 700, b"[1]")
            )
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

    asyncio.run(main())


ENDLESS = b"GET /elsewhere HTTP/1.1\r\nHost: test\r\n\r\nGET /again HTTP/1.1\r\nX: " + b"x" * 70_000
EXTENSIONS = CHUNKED + b"1;" + b"x" * 70_000
CRUMBS = CHUNKED + b"".join(b"1;" + b"x" * 100 + b"\r\n0\r\n" for _ in range(2000))
TRAILERS = CHUNKED + b"0\r\n" + b"a: b\r\n" * 20_000
UPGRADE_TO_WEBSOCKET = (
    b"GET /v2/ws HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.mark.parametrize(
    ("received", "status", "said"),
    [
        (ENDLESS, 431, b"max_header_size"),
        (EXTENSIONS, 400, b"chunk extensions"),
        (CRUMBS, 400, b"chunk extensions"),
        (TRAILERS, 400, b"trailers"),
        (CHUNKED.replace(b"chunked", b"gzip, chunked"), 501, b"only chunked"),
        (CHUNKED.replace(b"Transfer", b"Transfer-Encoding: gzip\r\nTransfer"), 501, b"only chunked"),
        (UPGRADE_TO_WEBSOCKET + b"Content-Length: 5\r\n\r\n", 400, b"WebSocket"),
        (UPGRADE_TO_WEBSOCKET + b"Transfer-Encoding: chunked\r\n\r\n", 400, b"WebSocket"),
    ],
)
def test_what_is_framed_like_an_attack_is_refused(received: bytes, status: int, said: bytes) -> None:
    *_, answer = (outcome := asyncio.run(exchanged(received)))[0]
    assert (answer.status, outcome[1]) == (status, True)
    assert said in answer.body


def test_an_application_hears_that_its_request_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        heard.append(message)
        await hello(scope, receive, send)

    async def main() -> None:
        async with site(app=app) as here:
            transport = here.connect()
            transport.receive(CHUNKED + b"1\r\nx\r\n")
            await settled()
            transport.receive(b"JUNK\r\n")
            await settled()
            assert [answer.status for answer in answers(transport.sent)] == [400]

    asyncio.run(main())
    assert (heard, caplog.records[1:]) == ([{"type": "http.disconnect"}], [])


def test_trailers_do_not_become_headers() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await hello(scope, receive, send)
        seen.extend(scope["headers"])

    async def main() -> None:
        async with site(app=app) as here:
            here.connect().receive(CHUNKED + b"0\r\nAuthorization: Bearer x\r\n\r\n")
            await settled()

    asyncio.run(main())
    assert [name for name, _ in seen] == [b"host", b"transfer-encoding"]


def test_answers_that_nobody_reads_are_counted_and_end_the_connection() -> None:
    async def main() -> None:
        async with site(body_timeout=60.0) as here:
            transport = here.connect()
            transport.stuck = True
            transport.receive(post(b"x" * 100_000, path="/elsewhere"))
            await settled()
            assert here.shared.account.held_bytes > 100_000
            here.sweep(61.0)
            await settled()
            assert (here.shared.account.held_bytes, len(here.shared.connections)) == (0, 0)

    asyncio.run(main())


def test_a_connection_that_waits_to_be_closed_does_not_wait_for_ever() -> None:
    async def main() -> None:
        async with site(body_timeout=60.0) as here:
            for path in ("/elsewhere", "/infer/square"):
                transport = here.connect()
                transport.stuck = True
                transport.receive(post(b"3", "Connection: close", path=path))
                await settled()
                assert transport.is_closing()
                here.sweep(1.0)
                here.sweep(61.0)
                await settled()
                assert not here.shared.connections

    asyncio.run(main())
