"""The end of a server: what was accepted is finished, what comes late is told so."""

import asyncio
from typing import Any

import pytest
from tests.protocols.fastlane.kit import hello, post
from tests.protocols.sockets import GET, Client, Run, serving, until

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
