"""The fast path on a fake transport: clients that leave, stall or are slow, the hand-over, and the end."""

import pytest
from tests.frontends.http.fast.kit import (
    CHUNKED,
    GET,
    ArenaExecutor,
    always,
    answers,
    exchange,
    post,
    run,
    settled,
    site,
    squared,
    statuses,
)

from weir.messages import Events
from weir.testing import FakeExecutor

LEAVING = {
    "between requests": b"",
    "in the head": post(b"3")[:20],
    "in a small body": post(b"345")[:-2],
    "in a large body": post(b"3" * 100_000)[:-2],
    "after dispatch": post(b"3"),
    "after dispatch of a large body": post(b"3" * 100_000),
    "with a request waiting behind": post(b"3") + post(b"4"),
    "while a body is skipped": post(b"3" * 100_000, path="/infer/nobody")[:-2],
}


@pytest.mark.parametrize("half_close", [True, False])
@pytest.mark.parametrize("stage", LEAVING)
def test_a_client_that_leaves_costs_nothing(stage: str, half_close: bool) -> None:
    async def body() -> None:
        executor = ArenaExecutor()
        async with site(executor) as here:
            transport = here.connect()
            transport.receive(LEAVING[stage])
            await settled()
            before = bytes(transport.sent)
            if half_close:
                assert not transport.protocol.eof_received()
                transport.close()
            else:
                transport.protocol.connection_lost(ConnectionResetError())
            await settled()
            for worker, batch in list(executor.pending):
                executor.reply(worker, Events(batch.batch_id, [b"9"] * len(batch.payloads)))
            await settled()
            assert transport.sent == before
            assert not here.shared.connections
            assert all(block.shares == 0 for block in executor.blocks)
            assert len(executor.batches) == stage.startswith(("after", "with"))
            assert len(executor.cancelled) == len(executor.batches)

    run(body)


def test_a_client_that_never_reads_is_cut_off() -> None:
    async def body() -> None:
        executor = FakeExecutor(always("x" * 100_000))
        async with site(executor) as here:
            transport = here.connect()
            transport.stuck = True
            transport.receive(post(b"1"))
            await settled()
            here.sweep(50.0)
            assert not transport.is_closing()
            here.sweep(11.0)
            assert transport.is_closing()

    run(body)


def test_idle_connections_are_closed() -> None:
    async def body() -> None:
        async with site() as here:
            transport = await exchange(here, post(b"3"))
            here.sweep(75.0)
            assert not transport.is_closing()
            here.sweep(1.0)
            assert transport.is_closing()

    run(body)


SLOW = {
    "head": (post(b"3")[:20], "header_timeout", 10.0),
    "body": (post(b"345")[:-2], "body_timeout", 60.0),
    "large body": (post(b"3" * 100_000)[:-2], "body_timeout", 60.0),
}


@pytest.mark.parametrize("stage", SLOW)
def test_slow_clients_get_an_error_and_are_closed(stage: str) -> None:
    async def body() -> None:
        request, setting, limit = SLOW[stage]
        async with site(ArenaExecutor(squared)) as here:
            transport = here.connect()
            for byte in request[:10]:
                transport.receive(bytes([byte]))
                here.sweep(0.5)
            transport.receive(request[10:])
            here.sweep(limit - 5.0 if setting == "header_timeout" else limit)
            assert not transport.sent
            here.sweep(1.0)
            await settled()
            (answer,) = answers(transport.sent)
            assert answer.status == 408
            assert setting in answer.body.decode()

    run(body)


def test_a_request_in_flight_is_left_in_peace() -> None:
    async def body() -> None:
        executor = FakeExecutor()
        async with site(executor) as here:
            transport = here.connect()
            transport.receive(post(b"3", "X-Request-Timeout: 10000"))
            await settled()
            here.sweep(5000.0)
            assert not transport.is_closing()
            executor.answer_next(always(b"9"))
            assert statuses(transport.sent) == [200]

    run(body)


def test_hand_over_replays_what_was_read() -> None:
    async def body() -> None:
        async with site() as here:
            transport = await exchange(here, post(b"3") + GET + CHUNKED)
            first, second, third = answers(transport.sent)
            assert (first.body, second.body, third.body) == (b"9", b"/hello ", b"/infer/square 3")
            assert all("date" in answer.headers for answer in (first, second, third))

    run(body)


def test_hand_over_happens_only_when_nothing_is_in_flight() -> None:
    async def body() -> None:
        executor = FakeExecutor()
        async with site(executor) as here:
            transport = here.connect()
            transport.receive(post(b"3") + GET)
            await settled()
            assert not transport.sent
            executor.answer_next(always(b"nine"))
            await settled()
            assert [answer.body for answer in answers(transport.sent)] == [b"nine", b"/hello "]

    run(body)


def test_stalled_clients_are_closed_after_the_hand_over_too() -> None:
    async def body() -> None:
        async with site() as here:
            for stalled, limit in ((GET + GET[:10], 10.0), (CHUNKED[:-5], 62.0)):
                transport = await exchange(here, stalled)
                here.sweep(limit)
                assert not transport.is_closing()
                here.sweep(1.0)
                await settled()
                assert transport.is_closing()
                assert not here.shared.connections

    run(body)


def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    async def body() -> None:
        executor = FakeExecutor()
        async with site(executor) as here:
            idle, busy = here.connect(), here.connect()
            busy.receive(post(b"3"))
            await settled()
            here.shared.drain()
            idle.receive(post(b"4"))
            executor.answer_next(always(b"9"))
            await settled()
            (refused,), (finished,) = answers(idle.sent), answers(busy.sent)
            assert (refused.status, refused.headers["connection"]) == (503, "close")
            assert (finished.status, finished.headers["connection"]) == (200, "close")
            assert idle.is_closing()
            assert busy.is_closing()

    run(body)


@pytest.mark.parametrize("path", ["/infer/square", "/elsewhere"])
def test_a_long_body_that_keeps_coming_may_take_as_long_as_it_needs(path: str) -> None:
    async def body() -> None:
        size, piece = 4 << 20, 512 << 10
        request = post(b'"%b"' % (b"3" * size), path=path)
        async with site(FakeExecutor(always(b"9"))) as here:
            transport = here.connect()
            for start in range(0, len(request), piece):
                transport.receive(request[start : start + piece])
                await settled()
                here.sweep(25.0)
                assert not transport.is_closing(), start
            await settled(3)
            assert statuses(transport.sent) == [200]

    run(body)


@pytest.mark.parametrize("path", ["/infer/square", "/elsewhere"])
@pytest.mark.parametrize("begun", [1000, 3 << 20])
def test_a_body_that_trickles_ends_its_connection(path: str, begun: int) -> None:
    async def body() -> None:
        async with site(FakeExecutor(squared)) as here:
            transport = here.connect()
            request = post(b"3" * (4 << 20), path=path)
            transport.receive(request[:begun])
            for second in range(63):
                transport.receive(request[begun + second : begun + second + 1])
                await settled()
                here.sweep(1.0)
                assert second > 58 or not (transport.is_closing() or transport.sent)
            await settled()
            assert transport.is_closing() or statuses(transport.sent) == [408]

    run(body)
