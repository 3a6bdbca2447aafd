"""The access log of HTTP: a line for each request, whoever answers it."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import httpx
import pytest
from tests.frontends.http import sockets
from tests.frontends.http.fast.kit import Square, squared
from tests.frontends.http.sockets import FILES, Client
from tests.rings import subcases
from tests.waiting import until
from websockets.asyncio.client import connect

import weir
from weir.errors import bounded
from weir.frontends.http.access_log import LEFT, HttpLog
from weir.frontends.http.server import HttpServer
from weir.protocols.access import Access, AccessSettings
from weir.serving.service import Service
from weir.testing import FakeClock, FakeExecutor

POST = b"POST /infer/square HTTP/1.1\r\nHost: test\r\nContent-Length: 1\r\n\r\n3"

KEY = "0123456789abcdef"
OPENING = (
    b"GET /v2/ws?key=secret HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"
)  # fmt: skip


class Lines(list[dict[str, Any]]):
    """A logger that keeps what it is given."""

    def info(self, event: str, **facts: Any) -> None:
        """Keep it."""
        self.append({"event": event, **facts})

    @property
    def short(self) -> list[tuple[Any, ...]]:
        """Method, path and status of each."""
        return [(line["method"], line["path"], line["status"]) for line in self]


@asynccontextmanager
async def serving(executor: FakeExecutor | None = None, **settings: Any) -> AsyncIterator[tuple[HttpServer, Lines]]:
    """Serve numbers squared on a free port, with a log."""
    lines = Lines()
    async with sockets.serving(executor, log=HttpLog(cast(Any, lines)), **settings) as server:
        yield server, lines


async def test_every_request_of_every_path_has_a_line() -> None:
    async with serving(max_body_size=100) as (server, lines):
        async with httpx.AsyncClient(base_url=server.address) as client:
            answers = [
                await client.post("/infer/square?key=secret", content=b"3"),  # the fast path
                await client.post("/infer/square", content=b"12"),
                await client.post("/infer/nobody", content=b"3"),
                await client.post("/infer/square", content=b"3" * 101),
                await client.post("/infer/square/batch", content=b"[1, 2]"),  # the application, from here on
                await client.get("/health/ready"),
                await client.get("/no/such/page?key=secret"),
                await client.delete("/v2/models/square/infer"),
            ]
        assert lines.short == [
            ("POST", "/infer/square", 200), ("POST", "/infer/square", 200), ("POST", "/infer/nobody", 404),
            ("POST", "/infer/square", 413), ("POST", "/infer/square/batch", 200), ("GET", "/health/ready", 200),
            ("GET", "/no/such/page", 404), ("DELETE", "/v2/models/square/infer", 405),
        ]  # fmt: skip
        assert [line["bytes"] for line in lines] == [len(answer.content) for answer in answers]
        assert {(line["event"], line["client"], line["protocol"]) for line in lines} == {
            ("http", "127.0.0.1", "HTTP/1.1")
        }
        assert all(0 <= line["milliseconds"] < 60_000 for line in lines)


@subcases(
    ("sent", "line"),
    [
        (b"GET\x1b[2J / HTTP/1.1\r\n\r\n", ("GET%1B[2J", "/", 400)),
        (b"POST /infer/square HTTP/1.1\r\nContent-Length: x\r\n\r\n", ("POST", "/infer/square", 400)),
        (POST.replace(b"Content-Length: 1", b"Transfer-Encoding: chunked") + b"xyz\r\n", ("POST", "/infer/square", 400)),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ("PRI", "*", 505)),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n", ("GET", bounded("/" + "a" * 40_000, 1024), 400)),
    ],
)  # fmt: skip
async def test_what_is_no_request_has_a_line(sent: bytes, line: tuple[Any, ...]) -> None:
    async with serving() as (server, lines):
        client = await Client.connect(server)
        client.writer.write(sent)
        await client.rest()
        assert lines.short == [line]


async def test_pipelined_requests_have_a_line_each() -> None:
    async with serving() as (server, lines):
        client = await Client.connect(server)
        client.writer.write(3 * POST)
        assert [await client.answer() for _ in range(3)] == [(200, b"9")] * 3
        assert lines.short == [("POST", "/infer/square", 200)] * 3
        assert [line["bytes"] for line in lines] == [1, 1, 1]


async def test_a_client_that_leaves_has_a_line() -> None:
    executor = FakeExecutor()
    async with serving(executor) as (server, lines):
        listed = POST.replace(b"/square", b"/square/batch").replace(b": 1\r\n\r\n3", b": 3\r\n\r\n[3]")
        for body in (POST, listed):
            client = await Client.connect(server)
            client.writer.write(body)
            await until(lambda: bool(executor.pending))
            before = len(lines)
            client.reset()
            await until(lambda: len(lines) > before)  # noqa: B023  (it is called in this turn)
            executor.respond_next(lambda payloads: [b"9"])
        assert [status for _, _, status in lines.short] == [LEFT, LEFT]


async def test_a_request_that_ends_for_what_comes_behind_it_has_one_line() -> None:
    executor = FakeExecutor()
    async with serving(executor, max_waiting_bytes=1 << 20) as (server, lines):
        client = await Client.connect(server)
        client.writer.write(POST)
        await until(lambda: bool(executor.pending))
        server.account.add(1 << 20)  # of others
        client.writer.write(100 * POST)
        assert b" 429 " in await client.rest()
        executor.respond_next(lambda payloads: [b"9"])
        client.close()
        assert lines.short == [("POST", "/infer/square", 429)]


async def test_what_is_sent_with_the_opening_of_a_web_socket_changes_no_line() -> None:
    async with serving() as (server, lines):
        for behind in (b"\x88\x80\0\0\0\0", b"\xff" * 9):
            client = await Client.connect(server)
            client.writer.write(OPENING + behind)
            assert b" 101 " in await client.rest()
            client.close()
        await until(lambda: len(lines) == 2)
        assert lines.short == [("GET", "/v2/ws", 101)] * 2


async def test_the_log_has_no_line_for_a_web_socket_nor_its_query(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (server, lines):
        with caplog.at_level(logging.DEBUG, "uvicorn.error"):
            async with connect(f"ws{server.address[4:]}/v2/ws?key=secret") as client:
                await client.send("{}")
                await client.recv()
        await until(lambda: len(lines) == 1)
    ours = [record for record in caplog.records if not record.name.startswith(("asyncio", "websockets"))]
    assert [record for record in ours if record.levelno >= logging.INFO] == []
    assert not any("secret" in record.getMessage() for record in ours)


async def test_connections_over_the_limit_and_web_sockets_have_a_line() -> None:
    async with serving(max_connections=1) as (server, lines):
        async with connect(f"ws{server.address[4:]}/v2/ws"):
            client = await Client.connect(server)
            assert b"429" in await client.rest()
            assert lines.short == [("-", "-", 429)]
            client.close()
        await until(lambda: len(lines) == 2)
        assert lines.short[-1] == ("GET", "/v2/ws", 101)


@subcases(
    ("before", "after", "line"),
    [
        (KEY.encode(), b"another key", ("GET", "/v2/ws", 401)),
        (b"Version: 13\r\n", b"Version: 13\r\nOrigin: http://elsewhere\r\n", ("GET", "/v2/ws", 403)),
        (b"/v2/ws", b"/v2/other", ("GET", "/v2/other", 404)),
        (b"AAAA==", b"", ("GET", "/v2/ws", 400)), (b"Version: 13", b"Version: 12", ("GET", "/v2/ws", 400)),
        (b"Host: test", b"Host: test\r\nX: \x01", ("GET", "/v2/ws", 400)),
        (b"Host: test", b"Host: test\r\nContent-Length: 1", ("GET", "/v2/ws", 400)),
        (b"GET", b"POST", ("POST", "/v2/ws", 405)),
    ],
)  # fmt: skip
async def test_refused_openings_of_web_sockets_have_a_line(before: bytes, after: bytes, line: tuple[Any, ...]) -> None:
    async with serving(access=Access(AccessSettings(api_key=KEY))) as (server, lines):
        client = await Client.connect(server)
        client.writer.write(OPENING.replace(before, after))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert (lines.short, int(head[9:12])) == ([line], line[2])
        assert lines[0]["bytes"] == len(body)


@pytest.mark.usefixtures("loop_factory")
async def test_tls_handshakes_that_fail_have_a_line_in_the_servers_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    with caplog.at_level(logging.INFO, "weir.http"):
        async with sockets.serving(clock=clock, **FILES) as server:
            for seconds in (0.0, 0.5, 0.6):
                clock.advance(seconds)
                client = await Client.connect(server)
                client.writer.write(OPENING)
                with suppress(ConnectionResetError):
                    assert b"HTTP" not in await client.rest()
                client.close()
    first, second = (record.getMessage() for record in caplog.records if record.name == "weir.http")
    assert first.startswith("TLS handshake with 127.0.0.1 failed: ") and first.endswith("(since_last=1)")
    assert second.endswith("(since_last=2)")


def test_a_path_cannot_write_a_line_of_its_own() -> None:
    lines, clock = Lines(), FakeClock()
    log = HttpLog(cast(Any, lines), clock)
    clock.advance(0.25)
    log.answered(None, "GET", b"/a\r\n\x1b[1mb\xff?secret", 200, 0, 0.0, "HTTP/1.1")
    assert (lines[0]["client"], lines[0]["path"]) == ("-", "/a%0D%0A%1B[1mb%FF")
    assert lines[0]["milliseconds"] == pytest.approx((clock() - 0.0) * 1000)


@pytest.mark.parametrize("access_log", [False, True])
async def test_a_hosted_application_has_the_log_too(access_log: bool, caplog: pytest.LogCaptureFixture) -> None:
    transport = httpx.ASGITransport(weir.asgi(Service(Square, executor=FakeExecutor(squared)), access_log=access_log))
    with caplog.at_level(logging.INFO, "weir.access"):
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/no/such%0Apage")).status_code == 404
    lines: list[Any] = [record.msg for record in caplog.records if record.name == "weir.access"]
    expected = [("http", "/no/such%0Apage", 404)] * access_log
    assert [(line["event"], line["path"], line["status"]) for line in lines] == expected
