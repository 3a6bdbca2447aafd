"""The end of a server: what was accepted is finished, what comes late is told so."""

import asyncio
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.http.fast.kit import hello, post
from tests.frontends.http.sockets import FILES, GET, Client, Run, serving, until

from weir.frontends.http.server import HttpServer
from weir.testing import FakeExecutor


def test_drain_finishes_what_was_accepted(run: Run) -> None:
    async def test() -> None:
        executor = FakeExecutor()
        async with serving(executor) as server:
            busy, idle, late = [await Client.connect(server) for _ in range(3)]
            busy.writer.write(post(b"3"))
            await until(lambda: bool(executor.pending) and server.connections == 3)
            draining = asyncio.ensure_future(server.drain())
            await asyncio.sleep(0)  # it begins
            assert (await late.ask(post(b"4")))[0] == 503
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
            assert await old.ask(post(b"3")) == (200, b"9")
            assert await handed_over.ask(GET) == (200, b"/hello ")
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
        async with serving() as server:
            client = await Client.connect(server)
            client.writer.write(post(b"345")[:-1])
            await until(lambda: server.connections == 1)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stopping = asyncio.ensure_future(server.stop())
            assert b"503 Service Unavailable" in await client.rest()
            client.close()
            await stopping

    run(test)


@pytest.mark.parametrize("where", ["tcp", "unix", "tls"])
def test_connections_that_nobody_has_accepted_yet_are_told_that_it_drains(run: Run, where: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"uds": str(tmp_path / "socket")} if where == "unix" else {}
    settings |= FILES if where == "tls" else {}

    def connect(server: HttpServer) -> socket.socket:
        if where != "unix":
            return socket.create_connection(("127.0.0.1", server.port))
        client = socket.socket(socket.AF_UNIX)
        client.connect(settings["uds"])
        return client

    def ask(client: socket.socket) -> bytes:
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
                asking = [loop.run_in_executor(threads, ask, client) for client in clients]
                assert await draining
                await server.stop()
                answers = await asyncio.gather(*asking)
            assert {answer[9:12] for answer in answers} == {b"503"}

    run(test)
