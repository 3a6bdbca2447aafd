"""The fast path on a fake transport: clients that stall or are slow, and the hand-over."""

import pytest
from tests.frontends.http.fast.kit import (
    CHUNKED,
    GET,
    ArenaExecutor,
    always,
    answers,
    exchange,
    post,
    settled,
    site,
    squared,
    statuses,
)
from tests.rings import subcases

from weir.testing import FakeExecutor


async def test_a_client_that_never_reads_is_charged_and_cut_off() -> None:
    async with site(FakeExecutor(always("x" * 100_000))) as here:
        transport = here.connect()
        transport.stuck = True
        await transport.deliver(post(b"1"))
        assert here.shared.account.held_bytes == transport.get_write_buffer_size() > 100_000
        here.sweep(50.0)
        assert not transport.is_closing()
        here.sweep(11.0)
        assert transport.is_closing()
        await settled()
        assert here.shared.account.held_bytes == 0


async def test_idle_connections_are_closed() -> None:
    async with site() as here:
        transport = await exchange(here, post(b"3"))
        here.sweep(75.0)
        assert not transport.is_closing()
        here.sweep(1.0)
        assert transport.is_closing()


async def test_the_time_that_a_server_stands_still_is_not_its_clients() -> None:
    async with site() as here:
        idle, slow = await exchange(here, post(b"3")), here.connect()
        slow.receive(post(b"4")[:20])
        here.clock.advance(5000.0)  # as of a process that was stopped, or of a machine that was suspended
        assert here.shared.on_second()
        for connection in list(here.shared.connections):
            connection.sweep(here.shared.tick)
        for transport, rest in ((idle, post(b"4")), (slow, post(b"4")[20:])):
            await transport.deliver(rest)
            assert answers(transport.sent)[-1].body == b"16"


SLOW = [
    (post(b"3")[:20], "header_timeout", 5.0),
    (post(b"345")[:-2], "body_timeout", 60.0),
    (post(b"3" * 100_000)[:-2], "body_timeout", 60.0),
]


@subcases(("request", "setting", "rest"), SLOW)
async def test_slow_clients_get_an_error_and_are_closed(request: bytes, setting: str, rest: float) -> None:
    async with site(ArenaExecutor(squared)) as here:
        transport = here.connect()
        for byte in request[:10]:
            transport.receive(bytes([byte]))
            here.sweep(0.5)
        transport.receive(request[10:])
        here.sweep(rest)
        assert not transport.sent
        here.sweep(1.0)
        await settled()
        (answer,) = answers(transport.sent)
        assert answer.status == 408
        assert setting in answer.body.decode()


async def test_a_request_in_flight_is_left_in_peace() -> None:
    async with site(FakeExecutor()) as here:
        transport = here.connect()
        await transport.deliver(post(b"3", "X-Request-Timeout: 10000"))
        here.sweep(5000.0)
        assert not transport.is_closing()
        here.executor.respond_next(always(b"9"))
        assert statuses(transport.sent) == [200]


async def test_hand_over_happens_only_when_nothing_is_in_flight() -> None:
    async with site(FakeExecutor()) as here:
        transport = here.connect()
        await transport.deliver(post(b"3") + GET + CHUNKED)
        assert not transport.sent
        here.executor.respond_next(always(b"nine"))
        await settled()
        received = answers(transport.sent)
        assert [answer.body for answer in received] == [b"nine", b"/hello ", b"/infer/square 3"]
        assert all("date" in answer.headers for answer in received)


async def test_stalled_clients_are_closed_after_the_hand_over_too() -> None:
    async with site() as here:
        for stalled, limit in ((GET + GET[:10], 10.0), (CHUNKED[:-5], 62.0)):
            transport = await exchange(here, stalled)
            here.sweep(limit)
            assert not transport.is_closing()
            here.sweep(1.0)
            await settled()
            assert transport.is_closing()
            assert not here.shared.connections


@pytest.mark.parametrize("path", ["/infer/square", "/elsewhere"])
async def test_a_long_body_that_keeps_coming_may_take_as_long_as_it_needs(path: str) -> None:
    size, piece = 4 << 20, 512 << 10
    request = post(b'"%b"' % (b"3" * size), path=path)
    async with site(FakeExecutor(always(b"9"))) as here:
        transport = here.connect()
        for start in range(0, len(request), piece):
            await transport.deliver(request[start : start + piece])
            here.sweep(25.0)
            assert not transport.is_closing(), start
        await settled(3)
        assert statuses(transport.sent) == [200]


@pytest.mark.parametrize("path", ["/infer/square", "/elsewhere"])
@pytest.mark.parametrize("begun", [1000, 3 << 20])
async def test_a_body_that_trickles_ends_its_connection(path: str, begun: int) -> None:
    async with site(FakeExecutor(squared)) as here:
        transport = here.connect()
        request = post(b"3" * (4 << 20), path=path)
        transport.receive(request[:begun])
        for second in range(63):
            await transport.deliver(request[begun + second : begun + second + 1])
            here.sweep(1.0)
            assert second > 58 or not (transport.is_closing() or transport.sent)
        await settled()
        assert transport.is_closing() or statuses(transport.sent) == [408]
