"""The listener and the fast path on real sockets, on uvloop and on asyncio's own loop: limits, the arena, the drain."""

import asyncio
import errno
import os
import resource
import socket
import ssl
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.http.fast.kit import ArenaExecutor, hello, post, squared
from tests.frontends.http.sockets import FILES, GET, TLS, Client, Run, serving, until
from tests.rings import spread

from weir.catalog.registry import Registry
from weir.errors import SettingsError
from weir.frontends.http.server import HttpServer
from weir.model import Model
from weir.protocols import HttpSettings
from weir.protocols.account import RESERVED
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.testing import FakeExecutor, RecordingObserver


def test_keep_alive_pipelining_and_hand_over_on_one_connection(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client = await Client.connect(server)
            assert await client.call(post(b"3")) == (200, b"9")
            client.writer.write(post(b"4") * 3 + GET + post(b"5") + GET)
            got = [await client.answer() for _ in range(6)]
            assert got == [(200, b"16")] * 3 + [(200, b"/hello "), (200, b"/infer/square 5"), (200, b"/hello ")]
            client.close()
            await until(lambda: not server.connections)

    run(test)


class Flood:
    """A client that writes and reads only when told."""

    def __init__(self, server: HttpServer, requests: bytes) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self.socket.connect(("127.0.0.1", server.port))
        self.socket.setblocking(False)
        self.unsent = memoryview(requests)
        self.received = bytearray()

    def send(self) -> bool:
        """Send what can be sent; tell whether anything could."""
        before = len(self.unsent)
        with suppress(BlockingIOError):
            self.unsent = self.unsent[self.socket.send(self.unsent) :]
        return len(self.unsent) < before

    def receive(self) -> None:
        """Receive what is there."""
        with suppress(BlockingIOError):
            self.received += self.socket.recv(1 << 20)

    @property
    def answers(self) -> int:
        """How many answers have come; all are as long as the first."""
        length = self.received.find(b"HTTP/1.1 ", 1)
        return 0 if length < 0 else len(self.received) // length


@pytest.mark.parametrize(("run", "many"), spread([("uvloop", 60_000), ("asyncio", 50_000)]), indirect=["run"])
def test_very_many_pipelined_requests_that_nobody_reads(run: Run, many: int) -> None:
    async def test() -> None:
        executor = FakeExecutor(squared)
        async with serving(executor) as server:
            flood = Flood(server, post(b"3") * many)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            quiet = done = 0
            while quiet < 1000:
                quiet = 0 if flood.send() or done != len(executor.batches) else quiet + 1
                done = len(executor.batches)
                await asyncio.sleep(0)
            assert done < 0.9 * many, "the server goes on although nobody reads its answers"
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB
            while flood.answers < many:
                flood.send()
                flood.receive()
                await asyncio.sleep(0)
            assert flood.received.count(b"HTTP/1.1 200 OK\r\n") == many
            flood.socket.close()

    run(test)


LEAVING = {
    "between requests": b"",
    "in the head": post(b"3")[:20],
    "in a small body": post(b"345")[:-2],
    "in a large body": post(b"3" * 1_000_000)[:-2],
    "after dispatch": post(b"3"),
    "after dispatch of a large body": post(b"3" * 500_000),
    "after a hand-over": GET[:20] + b"\r\nX: " + b"y" * 10,
    "in a handed-over body": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\n123",
}


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stage", LEAVING)
def test_disconnects_at_every_stage(run: Run, stage: str, how: str) -> None:
    async def test() -> None:
        executor = ArenaExecutor()
        async with serving(executor) as server:
            client = await Client.connect(server)
            client.writer.write(LEAVING[stage])
            await client.writer.drain()
            await until(lambda: server.connections == 1 and bool(executor.batches) == stage.startswith("after dis"))
            if how == "half-close":
                client.writer.write_eof()
                assert await client.rest() == b""
            if how == "reset":
                client.reset()
            else:
                client.close()
            await until(lambda: not server.connections)
            assert all(block.shares == 0 for block in executor.blocks)
            assert len(executor.cancelled) == len(executor.batches)
            other = await Client.connect(server)
            assert (await other.call(GET))[0] == 200
            other.close()

    run(test)


def test_continue_then_body(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client = await Client.connect(server)
            request = post(b"12", "Expect: 100-continue")
            assert await client.call(request[:-2]) == (100, b"")
            assert await client.call(request[-2:]) == (200, b"144")
            client.close()

    run(test)


def test_a_client_that_is_refused_reads_why_though_it_sends_on(run: Run) -> None:
    async def test() -> None:
        async with serving(max_body_size=1000) as server:
            client = await Client.connect(server)
            client.writer.write(post(b"x" * 100_000_000))
            assert (await client.answer())[0] == 413
            client.close()
            await until(lambda: not server.connections)

    run(test)


def test_refused_connections_end_by_themselves(run: Run) -> None:
    async def test() -> None:
        clock = [0.0]
        async with serving(clock=lambda: clock[0]) as server:
            client = await Client.connect(server)
            client.writer.write(b"nonsense\n")
            assert b"400 Bad Request" in await client.rest()
            clock[0] += 3.0
            server.sweep()
            await until(lambda: not server.connections)
            client.close()

    run(test)


def test_slow_clients_do_not_last(run: Run) -> None:
    async def test() -> None:
        clock = [0.0]
        async with serving(clock=lambda: clock[0]) as server:
            clients = [await Client.connect(server) for _ in range(4)]
            for client, request in zip(clients, (post(b"3")[:9], post(b"34")[:-1], GET + GET[:9], b""), strict=True):
                client.writer.write(request)
            assert await clients[2].answer() == (200, b"/hello ")
            await until(lambda: server.connections == 4)
            await asyncio.sleep(0)
            clock[0] += 100.0
            server.sweep()
            got = [await client.rest() for client in clients]
            assert [answer[9:12] for answer in got] == [b"408", b"408", b"", b""]
            for client in clients:
                client.close()

    run(test)


@pytest.mark.parametrize("tls", [{}, FILES], ids=["plain", "tls"])
def test_over_the_limit_of_connections(run: Run, tls: Any) -> None:
    """Whoever asks for it soon, and once; as many as the reserve holds wait, and the oldest gives way."""

    async def test() -> None:
        async with serving(max_connections=1, **tls) as server:
            context = ssl.create_default_context(cafile=TLS / "certificate.pem") if tls else None
            first = await Client.connect(server, ssl=context)
            assert await first.call(post(b"3")) == (200, b"9")
            silent = [await Client.connect(server, ssl=context) for _ in range(2 * RESERVED)]
            for path in (b"/health/live?x", b"/metrics"):
                probe = await Client.connect(server, ssl=context)
                probe.writer.write(GET.replace(b"/hello", path) * 2)
                answered = await probe.rest()
                assert answered.startswith(b"HTTP/1.1 200") and answered.count(b"HTTP/1.1") == 1
                probe.close()
            for request in (GET, post(b"3"), post(b"3").replace(b"/infer/square", b"/metrics"), b"x" * 9):
                other = await Client.connect(server, ssl=context)
                other.writer.write(request + b"\r\n\r\n")
                assert b"429 Too Many Requests" in await other.rest()
                other.close()
            await until(lambda: server.account.connections <= 1 + RESERVED)
            assert [b"429" in await each.rest() for each in silent] == [True] * len(silent)
            for each in (first, *silent):
                each.close()
            await until(lambda: not server.account.connections)
            first = await Client.connect(server, ssl=context)
            assert await first.call(post(b"3")) == (200, b"9")
            first.close()

    run(test)


def test_tls_clients_that_never_close_take_no_more_than_the_reserve(run: Run) -> None:
    async def test() -> None:
        async with serving(max_connections=1, **FILES) as server:
            context = ssl.create_default_context(cafile=TLS / "certificate.pem")
            clients, most = list[ssl.SSLSocket](), 0
            for _ in range(4 * RESERVED):
                plain = socket.create_connection(("127.0.0.1", server.port))
                clients.append(await asyncio.to_thread(context.wrap_socket, plain, server_hostname="localhost"))
                most = max(most, server.account.connections)
            for each in clients:
                each.close()
            assert most < 2 * RESERVED

    run(test)


@pytest.mark.parametrize("size", [10, 500_000])
def test_tls(run: Run, size: int) -> None:
    async def test() -> None:
        context = ssl.create_default_context(cafile=TLS / "certificate.pem")
        executor = ArenaExecutor(squared)
        async with serving(executor, **FILES) as server:
            assert server.address == f"https://127.0.0.1:{server.port}"
            client = await Client.connect(server, ssl=context)
            content = b'"' + b"x" * size + b'"'
            for _ in range(3):
                assert await client.call(post(content)) == (200, content)
            client.writer.write(post(b"4") * 2 + GET + post(b"5"))
            got = [await client.answer() for _ in range(4)]
            assert got == [(200, b"16")] * 2 + [(200, b"/hello "), (200, b"/infer/square 5")]
            assert all(block.shares == 0 for block in executor.blocks)
            client.close()
            await until(lambda: not server.connections)

    run(test)


def test_handshakes_are_connections(run: Run) -> None:
    async def test() -> None:
        async with serving(FakeExecutor(squared), max_connections=3, **FILES) as server:
            silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3 + RESERVED)]
            await until(lambda: server.account.connections == 3 + RESERVED)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            assert await reader.read() == b""  # one too many
            writer.close()
            for each in silent:
                each.close()
            await until(lambda: server.account.connections == 0)
            client = await Client.connect(server, ssl=ssl.create_default_context(cafile=TLS / "certificate.pem"))
            assert await client.call(post(b"3")) == (200, b"9")
            client.close()

    run(test)


def test_a_connection_for_which_there_is_no_descriptor_is_closed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def test() -> None:
        async with serving(**FILES) as server:
            monkeypatch.setattr(os, "dup", refuse)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            writer.close()
            monkeypatch.undo()

    run(test)


def test_a_client_that_does_not_speak_tls(run: Run) -> None:
    async def test() -> None:
        async with serving(**FILES) as server:
            client = await Client.connect(server)
            client.writer.write(post(b"3"))
            with suppress(ConnectionResetError):
                assert b"HTTP" not in await client.rest()
            client.close()

    run(test)


def test_unix_socket(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        path = str(tmp_path / "weir.sock")
        async with serving(uds=path) as server:
            assert (server.address, server.port) == (f"unix:{path}", 0)
            client = Client(*await asyncio.open_unix_connection(path))
            assert await client.call(post(b"3")) == (200, b"9")
            assert await client.call(GET) == (200, b"/hello ")
            client.close()

    run(test)
    assert not (tmp_path / "weir.sock").exists()


def test_who_connected_just_before_the_end_is_refused_and_not_cut_off(run: Run) -> None:
    async def test() -> None:
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

    run(test)


def test_web_sockets_are_handed_over(run: Run) -> None:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "websocket"
        await receive()
        await send({"type": "websocket.accept"})
        message = await receive()
        await send({"type": "websocket.send", "text": message["text"] + "!"})
        await send({"type": "websocket.close"})

    async def test() -> None:
        async with serving(app=echo) as server:
            client = await Client.connect(server)
            assert await client.call(post(b"3")) == (200, b"9")
            handshake = (
                "Upgrade: websocket",
                "Connection: Upgrade",
                f"Sec-WebSocket-Key: {'A' * 22}==",
                "Sec-WebSocket-Version: 13",
            )
            client.writer.write("\r\n".join(("GET /ws HTTP/1.1", "Host: t", *handshake, "", "")).encode())
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
            client.writer.write(b"\x81\x82\0\0\0\0hi")  # masked with zeros
            assert await client.reader.readexactly(5) == b"\x81\x03hi!"
            client.close()
            await until(lambda: not server.connections)

    run(test)


class TestStart:
    def test_a_port_that_is_taken(self, run: Run) -> None:
        async def test() -> None:
            async with serving() as server:
                says = rf"port={server.port}: cannot listen there: Address already in use by process {os.getpid()} \(.+\); choose another port"
                with pytest.raises(SettingsError, match=says):
                    await HttpServer(KserveContext(Registry([]), HttpSettings(port=server.port)), hello).start()

        run(test)

    def test_a_port_taken_by_a_process_with_an_odd_name(self, run: Run, request: pytest.FixtureRequest) -> None:
        async def test() -> None:
            async with serving() as server:
                with pytest.raises(
                    SettingsError, match=rf"by process {os.getpid()} \(\ufffdx\\x1b\); choose another port"
                ):
                    await HttpServer(KserveContext(Registry([]), HttpSettings(port=server.port)), hello).start()

        name = Path("/proc/self/comm")
        request.addfinalizer(partial(name.write_bytes, name.read_bytes()))
        name.write_bytes(b"\xc3x\x1b")
        run(test)

    def test_a_unix_socket_that_is_taken(self, run: Run, tmp_path: Path) -> None:
        path = str(tmp_path / "weir.sock")

        async def test() -> None:
            async with serving(uds=path):
                with pytest.raises(SettingsError, match=r"weir\.sock': cannot listen there: Address already in use"):
                    await HttpServer(KserveContext(Registry([]), HttpSettings(uds=path)), hello).start()
                client = Client(*await asyncio.open_unix_connection(path))
                assert await client.call(post(b"3")) == (200, b"9")
                client.close()

        run(test)

    def test_a_unix_socket_that_a_dead_server_has_left(self, run: Run, tmp_path: Path) -> None:
        path = str(tmp_path / "weir.sock")

        async def test() -> None:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(path)
            async with serving(uds=path):
                client = Client(*await asyncio.open_unix_connection(path))
                assert await client.call(post(b"3")) == (200, b"9")
                client.close()

        run(test)

    def test_a_host_that_is_none(self, run: Run) -> None:
        async def test() -> None:
            with pytest.raises(
                SettingsError, match=r"host='300\.1\.1\.1', port=0: cannot listen there: [A-Z]"
            ) as caught:
                await HttpServer(KserveContext(Registry([]), HttpSettings(host="300.1.1.1", port=0)), hello).start()
            assert "Unknown error" not in caught.value.message

        run(test)

    @pytest.mark.parametrize("certificate", ["missing.pem", "key.pem"])
    def test_an_unusable_certificate(self, run: Run, certificate: str) -> None:
        async def test() -> None:
            server = HttpServer(
                KserveContext(Registry([]), HttpSettings(port=0, tls_certfile=str(TLS / certificate))), hello
            )
            with pytest.raises(SettingsError, match=rf"tls_certfile='.*{certificate}'.*: not a usable certificate"):
                await server.start()
            await server.stop()

        run(test)


def test_the_date_moves_on_both_sides_of_the_hand_over(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            client = await Client.connect(server)
            for request in (post(b"3"), GET):
                client.writer.write(request)
                head = await client.reader.readuntil(b"\r\n\r\n")
                assert b"\r\ndate: " in head
                await client.reader.readexactly(1 if request is not GET else 7)
            client.close()

    run(test)


def test_observers_of_the_server_hear_of_what_is_no_request(run: Run) -> None:
    async def test() -> None:
        observer = RecordingObserver()
        server = HttpServer(KserveContext(Registry([]), HttpSettings(port=0)), hello, [observer])
        await server.start()
        client = await Client.connect(server)
        assert (await client.call(b"nonsense\n"))[0] == 400
        client.close()
        await server.stop()
        assert [(model, frontend) for model, frontend, _ in observer.refusals] == [("", "http")]

    run(test)


@pytest.mark.parametrize(("mode", "permissions"), [("600", 0o600), ("660", 0o660), ("0666", 0o666)])
def test_a_unix_socket_is_its_owners_unless_set_otherwise(
    mode: str, permissions: int, run: Run, tmp_path: Path
) -> None:
    async def test() -> None:
        path = str(tmp_path / "s")
        answer: dict[str, Any] = {} if mode == "600" else {"uds_mode": mode}
        before = os.umask(0)
        try:
            async with serving(uds=path, **answer):
                assert stat.S_IMODE(os.stat(path).st_mode) == permissions
                assert os.umask(0) == 0
        finally:
            os.umask(before)

    run(test)


def test_permissions_are_three_octal_digits() -> None:
    with pytest.raises(SettingsError, match="uds_mode='9'"):
        HttpSettings(uds_mode="9")


class Checksum(Model):
    """Sums up bytes, so that a test sees whether they arrived as they were."""

    Output = int

    def predict(self, batch: list[bytes]) -> list[int]:
        return [zlib.crc32(item) for item in batch]


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

    def test_large_bodies_arrive_as_they_were_sent(self, run: Run) -> None:
        async def test() -> None:
            service = Service(Checksum, name="square", arena_bytes=16 << 20)
            async with serving(service=service) as server:
                bodies = [os.urandom(600_000 + 1000 * number) for number in range(16)]
                headers = ("Content-Type: application/octet-stream",)

                async def one(body: bytes) -> None:
                    client = await Client.connect(server)
                    for _ in range(10):
                        assert await client.call(post(body, *headers)) == (200, str(zlib.crc32(body)).encode())
                    client.close()

                await asyncio.gather(*map(one, bodies))
                assert arena(service) == (16 << 20, 16 << 20)

        run(test)

    def test_large_answers_to_slow_readers(self, run: Run) -> None:
        async def test() -> None:
            service = Service(Repeat, name="square", arena_bytes=64 << 20)
            async with serving(service=service) as server:
                sizes = [1_000_000 + number for number in range(8)]
                clients = [await Client.connect(server, limit=1000) for _ in sizes]
                for client, size in zip(clients, sizes, strict=True):
                    client.writer.write(post(b"%d" % size, "Accept: application/octet-stream") * 2)
                for client, size in zip(clients, sizes, strict=True):
                    for _ in range(2):
                        assert await client.answer() == (200, bytes([size % 251]) * size)
                    client.close()
                await until(lambda: arena(service) == (64 << 20, 64 << 20))

        run(test)


def test_drain_finishes_what_was_accepted(run: Run) -> None:
    async def test() -> None:
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
            executor.answer_next(lambda _: [b"nine"])
            assert await draining
            assert await busy.answer() == (200, b"nine")
            assert await busy.rest() == b""
            await server.stop()
            assert await idle.rest() == b""
            for client in (busy, idle, late):
                client.close()

    run(test)


def test_refusing_goes_on_listening_and_closes_each_connection_after_its_answer(run: Run) -> None:
    async def test() -> None:
        async with serving() as server:
            old, handed_over = await Client.connect(server), await Client.connect(server)
            assert await old.call(post(b"3")) == (200, b"9")
            assert await handed_over.call(GET) == (200, b"/hello ")
            server.refuse()
            new = await Client.connect(server)
            for client, request, code in (
                (old, post(b"3"), b"503"),
                (new, post(b"3"), b"503"),
                (handed_over, GET, b"200"),
            ):
                client.writer.write(request)
                answer = await client.rest()
                assert answer[9:12] == code
                assert b"\r\nconnection: close\r\n" in answer
                client.close()

    run(test)


def test_drain_waits_for_handed_over_requests_too(run: Run) -> None:
    async def test() -> None:
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
            client.close()

    run(test)


def test_drain_gives_up(run: Run) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        async with serving(executor) as server:
            client = await Client.connect(server)
            client.writer.write(post(b"3"))
            await until(lambda: bool(executor.pending))
            assert not await server.drain(0.0)
            await server.stop()
            assert await client.rest() == b""
            assert executor.cancelled
            client.close()

    run(test)


def test_stop_tells_those_whose_request_has_not_arrived(run: Run) -> None:
    async def test() -> None:
        async with serving(max_connections=1) as server:
            clients = [await Client.connect(server) for _ in range(3)]  # two are over the limit
            for client, request in zip(clients, (post(b"345")[:-1], post(b"345")[:9], b""), strict=True):
                client.writer.write(request)
            await until(lambda: server.connections == 3)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stopping = asyncio.ensure_future(server.stop())
            assert [(await client.rest())[9:12] for client in clients] == [b"503", b"503", b""]
            for client in clients:
                client.close()
            await stopping

    run(test)


@pytest.mark.parametrize("where", ["tcp", "unix", "tls"])
def test_connections_not_yet_accepted_learn_that_the_server_drains(run: Run, where: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"uds": str(tmp_path / "socket")} if where == "unix" else {}
    settings |= FILES if where == "tls" else {}

    def connect(server: HttpServer) -> socket.socket:
        if where != "unix":
            return socket.create_connection(("127.0.0.1", server.port))
        client = socket.socket(socket.AF_UNIX)
        client.connect(settings["uds"])
        return client

    def call(client: socket.socket) -> bytes:
        with client:
            if where == "tls":
                client.sendall(post(b"3"))
            return b"".join(iter(lambda: client.recv(4096), b""))

    async def test() -> None:
        async with serving(**settings) as server:
            server.refuse()
            clients = [connect(server) for _ in range(50)]  # at once: the loop has no turn
            if where == "tls":
                context = ssl.create_default_context(cafile=FILES["tls_certfile"])
                clients = [
                    context.wrap_socket(client, server_hostname="localhost", do_handshake_on_connect=False)
                    for client in clients
                ]
            else:
                for client in clients:
                    client.sendall(post(b"3"))
            draining = asyncio.ensure_future(server.drain(10))
            with ThreadPoolExecutor(50) as threads:
                loop = asyncio.get_running_loop()
                calls = [loop.run_in_executor(threads, call, client) for client in clients]
                assert await draining
                await server.stop()
                answers = await asyncio.gather(*calls)
            assert {answer[9:12] for answer in answers} == {b"503"}

    run(test)
