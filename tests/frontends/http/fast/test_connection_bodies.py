"""The fast path on a fake transport: bodies and answers, where they are received, and what is refused."""

import asyncio
import gzip

import pytest
from tests.frontends.http.fast.kit import (
    ArenaExecutor,
    always,
    answers,
    block_of,
    exchange,
    post,
    run,
    settled,
    site,
    squared,
    statuses,
)

from weir.testing import FakeExecutor
from weir.wire.cells import LARGE_BYTES


def test_continue_is_sent_when_the_body_is_wanted() -> None:
    async def body() -> None:
        async with site(max_body_size=100_000) as here:
            for size in (10, 50_000):
                request = post(b'"' + b"x" * (size - 2) + b'"', "Expect: 100-continue")
                transport = await exchange(here, request[:-size])
                assert transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
                transport.receive(request[-size:])
                await settled()
                assert statuses(transport.sent) == [100, 200]
            transport = await exchange(here, post(b"3", "Expect: 100-continue"))
            assert statuses(transport.sent) == [200]  # the body was there

    run(body)


@pytest.mark.parametrize("size", [10, 50_000, 200_000])
def test_continue_is_not_sent_when_the_request_is_refused(size: int) -> None:
    async def body() -> None:
        async with site(max_body_size=100_000) as here:
            request = post(b"1" * size, "Expect: 100-continue", path="/infer/nobody")
            transport = await exchange(here, request[:-size])
            (answer,) = answers(transport.sent)
            assert (answer.status, answer.headers["connection"]) == (404, "close")

    run(body)


def test_too_large_is_answered_before_the_body() -> None:
    async def body() -> None:
        async with site(max_body_size=1000) as here:
            transport = await exchange(here, post(b"1" * 2000)[:-2000])
            (answer,) = answers(transport.sent)
            assert (answer.status, answer.headers["connection"]) == (413, "close")

    run(body)


def test_a_refused_large_body_is_skipped_and_the_connection_goes_on() -> None:
    async def body() -> None:
        async with site() as here:
            request = post(b"1" * 200_000, path="/infer/nobody")
            transport = await exchange(here, request[:500])
            assert statuses(transport.sent) == [404]
            transport.receive(request[500:] + post(b"4"))
            await settled()
            assert statuses(transport.sent) == [404, 200]

    run(body)


def test_large_bodies_are_received_into_blocks() -> None:
    async def body() -> None:
        executor = ArenaExecutor(squared)
        async with site(executor) as here:
            content = b'"' + bytes(range(35, 91)) * 2000 + b'"'
            transport = await exchange(here, post(content) * 3 + post(content)[:90], post(content)[90:])
            assert [answer.body for answer in answers(transport.sent)] == [content] * 4
            assert all(isinstance(payload, type(executor.blocks[0])) for each in executor.payloads for payload in each)
            assert [block.shares for block in executor.blocks] == [0] * 4

    run(body)


def test_small_bodies_travel_as_bytes() -> None:
    async def body() -> None:
        executor = ArenaExecutor(squared)
        async with site(executor) as here:
            await exchange(here, post(b'"' + b"x" * 1000 + b'"'))
            assert not executor.blocks

    run(body)


def test_a_full_arena_is_429_and_the_connection_goes_on() -> None:
    async def body() -> None:
        executor = ArenaExecutor(places=1)
        async with site(executor) as here:
            first, second = here.connect(), here.connect()
            request = post(b'"' + b"x" * 100_000 + b'"')
            first.receive(request)
            second.receive(request + post(b"5"))
            await settled()
            while executor.pending:
                executor.answer_next(always(b"25"))
                await settled()
            refused, answer = answers(second.sent)
            assert (refused.status, "retry-after" in refused.headers, answer.body) == (429, True, b"25")
            assert statuses(first.sent) == [200]
            second.receive(request)
            await settled()
            while executor.pending:
                executor.answer_next(always(b"25"))
                await settled()
            assert statuses(second.sent) == [429, 200, 200]

    run(body)


def test_who_announces_much_and_sends_little_keeps_nobody_out_of_the_arena() -> None:
    async def body() -> None:
        executor = ArenaExecutor(squared, places=3)
        async with site(executor) as here:
            request = post(b'"' + b"x" * 100_000 + b'"')
            slow = [here.connect() for _ in range(20)]
            for number, transport in enumerate(slow):
                transport.receive(request[: 500 + number])
            half = here.connect()
            half.receive(request[:50_000])
            honest = here.connect()
            honest.receive(request)
            await settled()
            assert statuses(honest.sent) == [200]
            assert half.protocol.arrived > 40_000
            assert half.protocol in here.shared.receiving  # of which most has come stays where it is
            for number, transport in enumerate(slow):
                transport.receive(request[500 + number :])
            half.receive(request[50_000:])
            await settled()
            assert [statuses(each.sent) for each in [*slow, half]] == [[200]] * 21
            assert (executor.free, here.shared.account.held_bytes, len(here.shared.receiving)) == (3, 0, 0)

    run(body)


def test_nobody_is_moved_where_there_is_no_memory() -> None:
    async def body() -> None:
        async with site(ArenaExecutor(squared, places=1), max_waiting_bytes=40_000) as here:
            request = post(b'"' + b"x" * 100_000 + b'"')
            first, second = here.connect(), here.connect()
            first.receive(request[:-1])
            second.receive(request)
            await settled()
            assert statuses(second.sent) == [429]
            first.receive(request[-1:])
            await settled()
            assert statuses(first.sent) == [200]

    run(body)


def test_a_body_larger_than_the_arena_is_413() -> None:
    async def body() -> None:
        async with site(ArenaExecutor(squared)) as here:
            transport = await exchange(here, post(b"1" * (2 << 20)))
            assert statuses(transport.sent) == [413]

    run(body)


def test_bodies_in_ordinary_memory_are_bounded_together() -> None:
    async def body() -> None:
        executor = FakeExecutor()
        async with site(executor, max_waiting_bytes=16 * 50_000) as here:
            request = post(b'"' + b"x" * 49_998 + b'"')
            transports = [here.connect() for _ in range(17)]
            for transport in transports:
                transport.receive(request[:-1])
            await settled()
            assert [statuses(each.sent) for each in transports] == [[]] * 16 + [[429]]
            transports[0].protocol.connection_lost(None)
            assert here.shared.account.held_bytes == 15 * 50_000
            transports[1].receive(request[-1:])
            await settled()
            assert here.shared.account.held_bytes == 15 * 50_000  # as long as the request is in flight
            executor.answer_next(squared)
            await settled()
            assert statuses(transports[1].sent) == [200]
            assert here.shared.account.held_bytes == 14 * 50_000

    run(body)


def test_memory_is_taken_as_a_body_comes() -> None:
    async def body() -> None:
        async with site(max_waiting_bytes=400_000) as here:
            request = post(b'"' + b"x" * 999_998 + b'"')
            transports = [here.connect() for _ in range(5)]
            for transport in transports:
                transport.receive(request[:100])
            assert here.shared.account.held_bytes == 5 * (64 << 10)
            transports[0].receive(request[100:])
            await settled()
            assert (statuses(transports[0].sent), here.shared.account.held_bytes) == ([429], 4 * (64 << 10))

    run(body)


def test_heads_and_small_bodies_that_wait_for_their_rest_are_counted() -> None:
    async def body() -> None:
        async with site(max_waiting_bytes=50_000) as here:
            transports = [here.connect() for _ in range(3)]
            for transport in transports:
                transport.receive(b"POST /infer/square HTTP/1.1\r\nX: " + b"x" * 20_000)
            assert [statuses(each.sent) for each in transports] == [[], [], [429]]
            assert 40_000 <= here.shared.account.held_bytes <= 50_000
            transports[0].receive(b"\r\nHost: test\r\nContent-Length: 1\r\n\r\n3")
            await settled()
            assert statuses(transports[0].sent) == [200]
            assert here.shared.account.held_bytes < 25_000
            transports[1].abort()
            await settled()
            assert here.shared.account.held_bytes == 0

    run(body)


@pytest.mark.parametrize("headers", [(), ("X-Explain: 1",), ("Connection: close",), ("Accept-Encoding: br",)])
def test_blocks_are_sent_from_where_they_are_and_released_when_sent(headers: tuple[str, ...]) -> None:
    async def body() -> None:
        content = b"0123456789" * 5000
        executor = FakeExecutor()
        async with site(executor) as here:
            for stuck in (False, True):
                transport, block = here.connect(), block_of(content)
                transport.stuck = stuck
                transport.receive(post(b"1", *headers) + post(b"2", *headers))
                await settled()
                executor.answer_next(always(block))
                await settled()
                assert block.shares == stuck
                if not headers:
                    assert len(executor.pending) == (not stuck)  # the next request waits until the block has been sent
                transport.stuck = False
                transport.flush()
                await settled()
                assert block.shares == 0
                assert answers(transport.sent)[0].body == content
                while executor.pending:
                    executor.answer_next(always(b"end"))
                    await settled()

    run(body)


def test_a_block_is_released_when_the_peer_leaves_before_it_is_sent() -> None:
    async def body() -> None:
        executor = FakeExecutor()
        async with site(executor) as here:
            transport, block = here.connect(), block_of(b"x" * 50_000)
            transport.stuck = True
            transport.receive(post(b"1"))
            await settled()
            executor.answer_next(always(block))
            assert block.shares == 1
            transport.abort()
            await settled()
            assert block.shares == 0

    run(body)


@pytest.mark.parametrize("size", [2000, 600_000])
def test_large_answers_are_compressed_for_those_who_ask(size: int) -> None:
    async def body() -> None:
        executor = FakeExecutor(always("x" * size))
        async with site(executor) as here:
            transport = await exchange(here, post(b"1", "Accept-Encoding: gzip"))
            await transport.written.wait()  # a thread may compress it
            (answer,) = answers(transport.sent)
            assert answer.headers["content-encoding"] == "gzip"
            assert gzip.decompress(answer.body) == b'"' + b"x" * size + b'"'

    run(body)


def test_a_large_body_that_is_refused_as_it_comes_closes_its_connection() -> None:
    async def main() -> None:
        async with site() as here:
            transport = here.connect()
            path = "/v2/models/square/infer"
            body = b"[]".ljust(LARGE_BYTES + 1)
            request = post(body, "Connection: close", "Inference-Header-Content-Length: 2", path=path)
            transport.receive(request[:20])  # so that it is not begun where it has been received
            transport.receive(request[20:])
            await settled()
            assert transport.sent.startswith(b"HTTP/1.1 400 ")
            assert transport.is_closing()
            assert not here.shared.connections

    asyncio.run(main())
