"""The listener and the fast path on real sockets, on uvloop and on asyncio's own loop: limits, the arena, the drain."""

import asyncio
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.http.fast.kit import ArenaExecutor, always, hello, post, settled, squared
from tests.frontends.http.sockets import FILES, GET, TLS, Client, serving
from tests.waiting import turns, until

from weir.catalog.registry import Registry
from weir.errors import SettingsError
from weir.frontends.http.server import HttpServer
from weir.model import Model
from weir.protocols import HttpSettings
from weir.protocols.account import RESERVED
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.testing import FakeExecutor

pytestmark = pytest.mark.usefixtures("loop_factory")

OPENING = (
    b"GET /ws HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def trust() -> ssl.SSLContext:
    """Return what a client needs to trust the server."""
    return ssl.create_default_context(cafile=TLS / "certificate.pem")


def listener(**settings: Any) -> HttpServer:
    """Return a server that does not listen yet."""
    return HttpServer(KserveContext(Registry([]), HttpSettings(**{"port": 0, **settings})), hello)


async def test_keep_alive_pipelining_and_hand_over_on_one_connection() -> None:
    async with serving() as server:
        client = await Client.connect(server)
        assert await client.call(post(b"3")) == (200, b"9")
        client.writer.write(post(b"4") * 3 + GET + post(b"5") + GET)
        got = [await client.answer() for _ in range(6)]
        assert got == [(200, b"16")] * 3 + [(200, b"/hello "), (200, b"/infer/square 5"), (200, b"/hello ")]
        client.close()
        await until(lambda: not server.connections)


LEAVING = {
    "between requests": b"",
    "in the head": post(b"3")[:20],
    "in a small body": post(b"345")[:-2],
    "in a large body": post(b"3" * 1_000_000)[:-2],
    "in a skipped body": post(b"3" * 100_000, path="/infer/nobody")[:-2],
    "after dispatch": post(b"3"),
    "after dispatch of a large body": post(b"3" * 500_000),
    "after dispatch, another waiting": post(b"3") + post(b"4"),
    "after a hand-over": GET[:20] + b"\r\nX: " + b"y" * 10,
    "in a handed-over body": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\n123",
}


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_a_client_that_leaves_at_any_stage_costs_nothing(how: str, subtests: pytest.Subtests) -> None:
    for stage, sent in LEAVING.items():
        executor, dispatched = ArenaExecutor(), stage.startswith("after dispatch")
        with subtests.test(stage):
            async with serving(executor) as server:
                client = await Client.connect(server)
                client.writer.write(sent)
                await client.writer.drain()
                await until(lambda: server.connections == 1 and len(executor.batches) == dispatched)  # noqa: B023  (it is called in this turn)
                if how == "half-close":
                    client.writer.write_eof()
                    assert (await client.rest())[9:12] == (b"404" if "skipped" in stage else b"")
                if how == "reset":
                    client.reset()
                else:
                    client.close()
                await until(lambda: not server.connections)
                while executor.pending:
                    executor.respond_next(always(b"9"))  # it comes too late
                assert all(block.shares == 0 for block in executor.blocks)
                assert len(executor.cancelled) == len(executor.batches) == dispatched
                other = await Client.connect(server)
                assert (await other.call(GET))[0] == 200
                other.close()


@pytest.mark.parametrize("tls", [{}, FILES])
async def test_over_the_limit_of_connections(tls: Any) -> None:
    """Whoever asks for it soon, and once; as many as the reserve holds wait, and the oldest gives way."""
    async with serving(max_connections=1, **tls) as server:
        connect = partial(Client.connect, server, ssl=trust() if tls else None)
        first = await connect()
        assert await first.call(post(b"3")) == (200, b"9")
        silent = [await connect() for _ in range(2 * RESERVED)]
        for path in (b"/health/live?x", b"/metrics"):
            probe = await connect()
            probe.writer.write(GET.replace(b"/hello", path) * 2)
            answered = await probe.rest()
            assert answered.startswith(b"HTTP/1.1 200") and answered.count(b"HTTP/1.1") == 1
            probe.close()
        for request in (GET, post(b"3"), post(b"3").replace(b"/infer/square", b"/metrics"), b"x" * 9):
            other = await connect()
            assert (await other.call(request + b"\r\n\r\n"))[0] == 429  # over TLS, the end would come later
            other.close()
        await until(lambda: server.account.connections <= 1 + RESERVED)
        assert [b"429" in await each.rest() for each in silent] == [True] * len(silent)
        for each in (first, *silent):
            each.close()
        await until(lambda: not server.account.connections)
        first = await connect()
        assert await first.call(post(b"3")) == (200, b"9")


async def test_tls_clients_that_never_close_take_no_more_than_the_reserve() -> None:
    async with serving(max_connections=1, **FILES) as server:
        context, clients, most = trust(), list[ssl.SSLSocket](), 0
        for _ in range(4 * RESERVED):
            plain = socket.create_connection(("127.0.0.1", server.port))
            clients.append(await asyncio.to_thread(context.wrap_socket, plain, server_hostname="localhost"))
            most = max(most, server.account.connections)
        for each in clients:
            each.close()
        assert most < 2 * RESERVED


@pytest.mark.parametrize("size", [10, 500_000])
async def test_tls(size: int) -> None:
    executor, content = ArenaExecutor(squared), b'"' + b"x" * size + b'"'
    async with serving(executor, **FILES) as server:
        assert server.address == f"https://127.0.0.1:{server.port}"
        client = await Client.connect(server, ssl=trust())
        for _ in range(3):
            assert await client.call(post(content)) == (200, content)
        client.writer.write(post(b"4") * 2 + GET + post(b"5"))
        got = [await client.answer() for _ in range(4)]
        assert got == [(200, b"16")] * 2 + [(200, b"/hello "), (200, b"/infer/square 5")]
        assert all(block.shares == 0 for block in executor.blocks)
        client.close()
        await until(lambda: not server.connections)


@pytest.mark.parametrize(("opening", "message"), [
    (GET * 4000, {"type": "http.response.start", "status": 204}),
    (OPENING + b"\x81\x81maskm" * 9, {"type": "websocket.accept"}),
], ids=["http", "websocket"])  # fmt: skip
async def test_tls_ends_for_who_left_while_nothing_was_read(opening: bytes, message: dict[str, Any]) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"headers": [(b"connection", b"close")], **message})
        begun.set()
        await go.wait()
        if scope["type"] == "http":
            await send({"type": "http.response.body"})

    async with serving(app=app, **FILES) as server:
        client = await Client.connect(server, ssl=trust())
        client.writer.write(opening)
        await begun.wait()
        await settled(10)
        with socket.socket(fileno=os.dup(client.writer.get_extra_info("socket").fileno())) as same:
            same.shutdown(socket.SHUT_WR)
        await settled(10)
        go.set()
        async with asyncio.timeout(30):
            await until(lambda: not server.connections)


@pytest.mark.parametrize(("opening", "start", "more"), [
    (GET * 2, {"type": "http.response.start", "status": 200}, {"type": "http.response.body", "body": b"x", "more_body": True}),
    (OPENING + b"\x81\x81maskm" * 9, {"type": "websocket.accept"}, {"type": "websocket.send", "text": "x"}),
], ids=["http", "websocket"])  # fmt: skip
@pytest.mark.parametrize("tls", [{}, FILES], ids=["plain", "tls"])
async def test_writes_to_a_client_that_left_are_not_logged(
    opening: bytes, start: dict[str, Any], more: dict[str, Any], tls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start)
        begun.set()
        await go.wait()
        with suppress(OSError):
            while server.connections:
                for _ in range(9):  # before the loop says that the connection is lost
                    await send(more)
                await asyncio.sleep(0)
        ended.set()

    async with serving(app=app, **tls) as server:
        client = await Client.connect(server, ssl=trust() if tls else None)
        client.writer.write(opening)
        await begun.wait()
        await settled(10)
        client.reset()
        go.set()
        async with asyncio.timeout(30):
            await ended.wait()
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []


async def test_handshakes_are_connections() -> None:
    async with serving(max_connections=3, **FILES) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3 + RESERVED)]
        await until(lambda: server.account.connections == 3 + RESERVED)
        one_too_many = await Client.connect(server)
        assert await one_too_many.rest() == b""
        one_too_many.close()
        for each in silent:
            each.close()
        await until(lambda: server.account.connections == 0)
        client = await Client.connect(server, ssl=trust())
        assert await client.call(post(b"3")) == (200, b"9")


async def test_a_connection_for_which_there_is_no_descriptor_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async with serving(**FILES) as server:
        monkeypatch.setattr(os, "dup", refuse)
        client = await Client.connect(server)
        async with asyncio.timeout(60):
            assert await client.rest() == b""
        client.close()
        monkeypatch.undo()


async def test_who_connected_just_before_the_end_is_refused_and_not_cut_off() -> None:
    async with serving() as server:
        client = await Client.connect(server)
        await until(lambda: server.connections == 1)

        async def end() -> None:
            await server.drain()
            await server.stop()

        ending = asyncio.ensure_future(end())
        await asyncio.sleep(0)
        assert (await client.call(post(b"3")))[0] == 503
        client.close()
        await ending


async def answers_at(path: Path) -> None:
    """Hold that a server answers at the Unix socket."""
    client = Client(*await asyncio.open_unix_connection(path))
    assert await client.call(post(b"3")) == (200, b"9")
    assert await client.call(GET) == (200, b"/hello ")


@pytest.fixture
def odd_name() -> Iterator[None]:
    """The process has a name that is no text."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"\xc3x\x1b")
    yield
    name.write_bytes(before)


class TestStart:
    @pytest.mark.usefixtures("odd_name")
    async def test_a_port_that_is_taken_is_refused_with_who_has_it(self) -> None:
        async with serving() as server:
            says = rf"port={server.port}: cannot listen there: Address already in use by process {os.getpid()} \(\ufffdx\\x1b\); choose another port"
            with pytest.raises(SettingsError, match=says):
                await listener(port=server.port).start()

    async def test_a_unix_socket_is_taken_over_from_the_dead_only(self, tmp_path: Path) -> None:
        path = tmp_path / "weir.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        async with serving(uds=str(path)) as server:
            assert (server.address, server.port) == (f"unix:{path}", 0)
            await answers_at(path)
            with pytest.raises(SettingsError, match=r"weir\.sock': cannot listen there: Address already in use"):
                await listener(uds=str(path)).start()
            await answers_at(path)
        assert not path.exists()

    async def test_a_host_that_is_none(self) -> None:
        with pytest.raises(SettingsError, match=r"host='300\.1\.1\.1', port=0: cannot listen there: [A-Z]") as caught:
            await listener(host="300.1.1.1").start()
        assert "Unknown error" not in caught.value.message

    async def test_an_unusable_certificate(self) -> None:
        for certificate in ("missing.pem", "key.pem"):
            server = listener(tls_certfile=str(TLS / certificate))
            with pytest.raises(
                SettingsError, match=rf"tls_certfile='.*{certificate}'.*: must be a certificate and its private key"
            ):
                await server.start()
            await server.stop()

    async def test_a_unix_socket_is_its_owners_unless_set_otherwise(self, tmp_path: Path) -> None:
        path, before = str(tmp_path / "s"), os.umask(0)
        modes: dict[int, dict[str, Any]] = {0o600: {}, 0o660: {"uds_mode": "660"}, 0o666: {"uds_mode": "0666"}}
        try:
            for permissions, settings in modes.items():
                async with serving(uds=path, **settings):
                    assert stat.S_IMODE(os.stat(path).st_mode) == permissions
                    assert os.umask(0) == 0
        finally:
            os.umask(before)
        with pytest.raises(SettingsError, match="uds_mode='9'"):
            HttpSettings(uds_mode="9")


class Repeat(Model):
    """Answers a number with as many bytes."""

    Output = bytes

    def predict(self, batch: list[int]) -> list[bytes]:
        return [bytes([item % 251]) * item for item in batch]


def arena(service: Service) -> tuple[int, int]:
    """Return how many bytes the arena of `service` has, and how many are free."""
    gauges = service.state()["gauges"]
    return gauges["arena_bytes"], gauges["arena_free_bytes"]


@pytest.mark.usefixtures("nothing_is_left")
class TestWorkerProcesses:
    """The real arena, and a process that reads it."""

    async def test_large_answers_to_slow_readers(self) -> None:
        service = Service(Repeat, name="square", arena_bytes=64 << 20)
        async with serving(service=service) as server:
            clients = {1_000_000 + number: await Client.connect(server, limit=1000) for number in range(8)}
            for size, client in clients.items():
                client.writer.write(post(b"%d" % size, "Accept: application/octet-stream") * 2)
            for size, client in clients.items():
                for _ in range(2):
                    assert await client.answer() == (200, bytes([size % 251]) * size)
                client.close()
            await until(lambda: arena(service) == (64 << 20, 64 << 20))


async def test_drain_finishes_what_was_accepted() -> None:
    executor = FakeExecutor()
    async with serving(executor) as server:
        busy, idle, late = [await Client.connect(server) for _ in range(3)]
        busy.writer.write(post(b"3"))
        await until(lambda: bool(executor.pending) and server.connections == 3)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0)  # it begins
        assert (await late.call(post(b"4")))[0] == 503
        assert not draining.done()
        with pytest.raises(OSError):
            await Client.connect(server)
        executor.respond_next(lambda _: [b"nine"])
        assert await draining
        assert await busy.answer() == (200, b"nine")
        assert await busy.rest() == b""
        await server.stop()
        assert await idle.rest() == b""


async def test_refusing_goes_on_listening_and_closes_each_connection_it_answers() -> None:
    async with serving() as server:
        old, handed_over = await Client.connect(server), await Client.connect(server)
        assert await old.call(post(b"3")) == (200, b"9")
        assert await handed_over.call(GET) == (200, b"/hello ")
        server.refuse()
        new = await Client.connect(server)
        for client, request, code in ((old, post(b"3"), b"503"), (new, post(b"3"), b"503"), (handed_over, GET, b"200")):
            client.writer.write(request)
            answer = await client.rest()
            assert answer[9:12] == code and b"\r\nconnection: close\r\n" in answer
            client.close()


async def test_drain_waits_for_handed_over_requests_too() -> None:
    go_on = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await hello(scope, receive, send)

    async with serving(app=slow) as server:
        client = await Client.connect(server)
        client.writer.write(GET)
        await until(lambda: server.busy == 1)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        go_on.set()
        assert await draining
        assert b"connection: close" in await client.rest()


async def test_drain_gives_up() -> None:
    executor = FakeExecutor()
    async with serving(executor) as server:
        client = await Client.connect(server)
        client.writer.write(post(b"3"))
        await until(lambda: bool(executor.pending))
        assert not await server.drain(0.0)
        await server.stop()
        assert await client.rest() == b""
        assert executor.cancelled


async def test_stop_tells_those_whose_request_has_not_arrived() -> None:
    async with serving(max_connections=1) as server:
        clients = [await Client.connect(server) for _ in range(3)]  # two are over the limit
        for client, request in zip(clients, (post(b"345")[:-1], post(b"345")[:9], b""), strict=True):
            client.writer.write(request)
        await until(lambda: server.connections == 3)
        await turns(2)
        stopping = asyncio.ensure_future(server.stop())
        assert [(await client.rest())[9:12] for client in clients] == [b"503", b"503", b""]
        for client in clients:
            client.close()
        await stopping


@pytest.mark.parametrize("where", ["tcp", "unix", "tls"])
async def test_connections_not_yet_accepted_learn_that_the_server_drains(where: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tcp": {}, "unix": {"uds": str(tmp_path / "socket")}, "tls": FILES}[where]

    def connect(server: HttpServer) -> socket.socket:
        client = socket.socket(socket.AF_UNIX if where == "unix" else socket.AF_INET)
        client.connect(settings["uds"] if where == "unix" else ("127.0.0.1", server.port))
        if where == "tls":
            return trust().wrap_socket(client, server_hostname="localhost", do_handshake_on_connect=False)
        client.sendall(post(b"3"))
        return client

    def call(client: socket.socket) -> bytes:
        with client:
            if where == "tls":
                client.sendall(post(b"3"))
            return b"".join(iter(lambda: client.recv(4096), b""))

    async with serving(**settings) as server:
        server.refuse()
        clients = [connect(server) for _ in range(50)]  # at once: the loop has no turn
        draining = asyncio.ensure_future(server.drain(10))
        with ThreadPoolExecutor(50) as threads:
            calls = [asyncio.get_running_loop().run_in_executor(threads, call, client) for client in clients]
            assert await draining
            await server.stop()
            answers = await asyncio.gather(*calls)
        assert {answer[9:12] for answer in answers} == {b"503"}
