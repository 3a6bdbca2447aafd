"""The fast path on a fake transport: bytes in, bytes out."""

import asyncio
import json
from functools import cache
from typing import Any

import pytest
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frontends.http.fast.kit import (
    CHUNKED,
    GET,
    ArenaExecutor,
    always,
    answers,
    block_of,
    exchange,
    pieces,
    post,
    settled,
    site,
    squared,
    statuses,
)
from tests.frontends.http.models import Words
from tests.rings import subcases
from tests.waiting import turns

from weir.errors import Overloaded
from weir.model import Measure, Model
from weir.protocols.access import Access, AccessSettings
from weir.testing import FakeExecutor
from weir.wire.cells import LARGE_BYTES

LARGE = post(b'"' + b"x" * 100_000 + b'"')


def text(size: int) -> bytes:
    """Return a text in JSON that is so long."""
    return b'"' + b"x" * (size - 2) + b'"'


async def test_answers_a_request_with_the_date_of_its_second() -> None:
    async with site() as here:
        transport = await exchange(here, post(b"12"))
        here.sweep(1.0)
        await transport.deliver(post(b"12"))
        first, second = answers(transport.sent)
        assert (first.status, first.body, second.body) == (200, b"144", b"144")
        assert first.headers["content-type"] == "application/json"
        assert first.headers["date"].endswith(" gmt") and first.headers["date"] != second.headers["date"]
        assert not transport.is_closing()


async def test_remembers_a_head_the_second_time_and_answers_the_same() -> None:
    async with site() as here:
        transport = await exchange(here, *[post(b"3")] * 5)
        assert [answer.body for answer in answers(transport.sent)] == [b"9"] * 5
        head = post(b"3").partition(b"\r\n\r\n")[0]
        assert here.shared.remembered(head) is not None
        here.shared.routes_changed()
        assert here.shared.remembered(head) is None


async def test_a_head_with_the_right_key_is_remembered_and_no_other_gets_in() -> None:
    async with site(access=Access(AccessSettings(api_key="k3y"))) as here:
        right, wrong = (post(b"3", f"Authorization: Bearer {key}") for key in ("k3y", "k3z"))
        for _ in range(3):
            assert [answer.body for answer in answers((await exchange(here, right)).sent)] == [b"9"]
            for each in (wrong, post(b"3")):  # which the ASGI application refuses
                assert b"/infer/square 3" in (await exchange(here, each)).sent
        known = [here.shared.remembered(each.partition(b"\r\n\r\n")[0]) for each in (right, wrong, post(b"3"))]
        assert [plan is not None for plan in known] == [True, False, False]


STREAM = b"".join(
    (
        post(b"2"), b"\r\n", post(b"30"), post(b'"x"', "X-Request-Id: 7"), post(b"", path="/inference"),
        post(b"5", path="/infer/nobody"), post(b"4", "X-Explain: 1"), post(text(302)), post(b"6", path="/inf%65rence"),
        post(b"7", "Expect: 100-continue"), post(b'"' + b"z" * 40_000 + b'"'), post(b"9", "X-Request-Timeout: no"),
    )
)  # fmt: skip
ENDINGS = {
    "nothing": b"",
    "close": post(b"8", "Connection: close"),
    "handed over": GET + post(b"1") + CHUNKED,
    "bare LF": b"POST / HTTP/1.1\nHost: x\r\n\r\n",
    "no host": post(b"1", host=""),
    "garbage": b"\x16\x03\x01\x02",
    "too large": post(b"1" * 80_000),
    "HTTP/1.0": post(b"8").replace(b"HTTP/1.1", b"HTTP/1.0"),
}


async def outcome(stream: bytes, cuts: list[int], *, wait: bool) -> tuple[list[tuple[int, bytes]], bool]:
    async with site(max_body_size=60_000) as here:
        transport = await exchange(here, *pieces(stream, cuts), wait=wait)
        got = [(answer.status, answer.body) for answer in answers(transport.sent) if answer.status != 100]
        return got, transport.is_closing() or transport.eof_sent


@cache
def uncut(stream: bytes) -> tuple[list[tuple[int, bytes]], bool]:
    return asyncio.run(outcome(stream, [], wait=True))


@pytest.mark.parametrize("ending", ENDINGS)
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 60_000), max_size=12), wait=st.booleans())
def test_splits_make_no_difference(ending: str, cuts: list[int], wait: bool) -> None:
    stream = STREAM + ENDINGS[ending]
    assert asyncio.run(outcome(stream, cuts, wait=wait)) == uncut(stream)


@pytest.mark.parametrize("ending", ENDINGS)
def test_byte_by_byte(ending: str) -> None:
    stream = STREAM.replace(b"z" * 40_000, b"z" * 33_000) + ENDINGS[ending][:2000]
    assert asyncio.run(outcome(stream, [*range(len(stream))], wait=False)) == uncut(stream)


def test_the_stream_is_answered_in_order() -> None:
    got, closed = uncut(STREAM)
    assert [status for status, _ in got] == [200, 200, 200, 400, 404, 200, 200, 200, 200, 200, 400]
    assert [body for status, body in got if status == 200][:2] == [b"4", b"900"]
    assert not closed


REFUSED = {
    "duplicate length": (post(b"3", "Content-Length: 1"), 400),
    "length and chunked": (CHUNKED.replace(b"Host: t", b"Host: t\r\nContent-Length: 1"), 400),
    "+8": (post(b"3").replace(b"Length: 1", b"Length: +8"), 400),
    "8, 8": (post(b"3").replace(b"Length: 1", b"Length: 8, 8"), 400),
    "huge length": (post(b"3").replace(b"Length: 1", b"Length: 99999999999999999999999"), 400),
    "large length": (post(b"3").replace(b"Length: 1", b"Length: 9223372036854775807"), 413),
    "bare LF": (post(b"3").replace(b"Host: test\r\n", b"Host: test\n"), 400),
    "bare CR": (post(b"3").replace(b"Host: test\r\n", b"Host: test\r"), 400),
    "only LF": (b"POST /infer/square HTTP/1.1\nHost: t\n\n", 400),
    "space before colon": (post(b"3").replace(b"Host:", b"Host :"), 400),
    "folded": (post(b"3").replace(b"Host: test\r\n", b"Host: test\r\n more\r\n"), 400),
    "NUL": (post(b"3").replace(b"Host: test", b"Host: te\x00st"), 400),
    "no host": (post(b"3", host=""), 400),
    "two hosts": (post(b"3", "Host: other"), 400),
    "HTTP/1.2": (post(b"3").replace(b"HTTP/1.1", b"HTTP/1.2"), 400),
    "lower case": (b"post / HTTP/1.1\r\nHost: t\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01", 400),
    "large head": (post(b"3", "X: " + "y" * 5000), 431),
    "endless head": (b"POST / HTTP/1.1\r\nX: " + b"y" * 5000, 431),
    "gzip transfer": (CHUNKED.replace(b"chunked", b"gzip"), 400),
}


@subcases("name", REFUSED)
async def test_refuses_and_closes(name: str) -> None:
    request, status = REFUSED[name]
    async with site(max_header_size=4096) as here:
        transport = await exchange(here, request)
        (answer,) = answers(transport.sent)
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert transport.eof_sent
        assert not here.executor.batches
        assert transport.receive(b"more of the same" * 10_000) == b""  # read and forgotten
        here.sweep(5.0)
        await settled()
        assert transport.is_closing()
        assert not here.shared.connections
        assert len(here.observer.refusals) == 1


async def test_a_client_of_http_2_reads_that_http_1_1_is_required() -> None:
    async with site() as here:
        client = H2Connection()
        client.initiate_connection()
        transport = await exchange(here, client.data_to_send())
        _, ended = client.receive_data(bytes(transport.sent))
        assert isinstance(ended, ConnectionTerminated) and ended.error_code is ErrorCodes.HTTP_1_1_REQUIRED
        assert b"proxy" in (ended.additional_data or b"") and transport.eof_sent
        assert [refusal[:2] for refusal in here.observer.refusals] == [("", "http")]


@subcases("name", ["+8", "endless head", "large head", "no host", "NUL"])
async def test_refuses_in_the_form_of_the_protocol_that_was_meant(name: str) -> None:
    request, status = REFUSED[name]
    async with site(max_header_size=4096) as here:
        for path, kind in ((b"/v2/models/square/infer", str), (b"/else", dict)):
            transport = await exchange(here, request.replace(request.split(b" ")[1], path, 1))
            (answer,) = answers(transport.sent)
            assert (answer.status, type(json.loads(answer.body)["error"])) == (status, kind)


async def test_http_1_0_is_answered_and_closed() -> None:
    async with site() as here:
        transport = await exchange(here, ENDINGS["HTTP/1.0"])
        (answer,) = answers(transport.sent)
        assert (answer.status, answer.headers["connection"], transport.is_closing()) == (200, "close", True)


async def test_errors_of_the_service_keep_the_connection() -> None:
    async with site(ArenaExecutor()) as here:
        here.executor.end("all workers are gone")
        transport = await exchange(here, post(b"3"), LARGE, post(b"5") + post(b"6"))
        assert statuses(transport.sent) == [503] * 4
        assert not transport.is_closing()
        assert all(block.shares == 0 for block in here.executor.blocks)
        assert {answer.headers["retry-after"] for answer in answers(transport.sent)} == {"1"}


async def test_an_error_of_the_request_is_its_answer() -> None:
    async with site(FakeExecutor(always(Overloaded("enough", retry_after=7.0)))) as here:
        first, second = answers((await exchange(here, post(b"3", "X-Request-Id: abc"), post(b"4"))).sent)
        assert (first.status, first.headers["retry-after"], first.headers["x-request-id"]) == (429, "7", "abc")
        assert second.status == 429


async def test_pipelined_requests_wait_for_the_one_before() -> None:
    async with site(FakeExecutor()) as here:
        await here.connect().deliver(post(b"1") + post(b"2"))
        assert here.executor.payloads == [[b"1"]]
        here.executor.respond_next(always(b"one"))
        await settled()
        assert here.executor.payloads == [[b"1"], [b"2"]]


async def test_what_waits_behind_a_request_is_bounded() -> None:
    async with site(FakeExecutor()) as here:
        transport, requests = here.connect(), post(b"1") * 3000
        rest = transport.receive(requests)
        assert not transport.is_reading()
        assert len(requests) - len(rest) < 200_000
        await settled()
        while here.executor.pending:
            here.executor.respond_next(always(b"one"))
            rest = transport.receive(rest)
            await turns(2)
        assert transport.is_reading()
        assert statuses(transport.sent) == [200] * 3000


async def test_no_request_is_begun_while_the_peer_reads_no_answers() -> None:
    async with site(FakeExecutor(always("x" * 10_000))) as here:
        transport = here.connect()
        transport.stuck = True
        rest = transport.receive(post(b"1") * 10_000)
        for _ in range(50):
            await settled()
            rest = transport.receive(rest)
        assert not transport.is_reading()
        assert len(here.executor.batches) < 10  # 64 KiB of answers, no more
        assert transport.get_write_buffer_size() < 100_000
        transport.stuck = False
        transport.flush()
        await settled()
        assert len(here.executor.batches) >= 10


async def test_bytes_are_reported_to_the_observers_once_a_second() -> None:
    async with site() as here:
        await exchange(here, post(b"12"), post(b"3"), post(b'"x"', "X-Explain: 1"))
        assert not here.observer.transfers
        here.sweep(1.0)
        here.sweep(1.0)
        assert here.observer.transfers == [("square", "http", 2 + 1 + 3, 3 + 1 + 3)]


async def test_long_items_are_measured_in_a_thread_and_hold_no_place() -> None:
    async with site(ArenaExecutor(), model=Words) as here:
        transport = here.connect()
        transport.receive(post(b'"' + b"x " * 20_000 + b'"'))
        await transport.written.wait()
        await transport.deliver(post(b'"unfinished'))
        assert statuses(transport.sent) == [413, 400]
        assert not here.executor.blocks


class Misjudging(Model):
    """Says of items what may not be said, or of one what breaks the server."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch

    @classmethod
    def measure(cls, item: Any) -> Any:
        return {"text": "large", "list": Measure(key=(["a"],)), "size": Measure(rows="3")}[item]  # type: ignore[arg-type]  # on purpose


@subcases("item", [b'"text"', b'"list"', b'"size"'])
async def test_a_model_that_measures_wrongly_is_at_fault(item: bytes) -> None:
    async with site(model=Misjudging) as here:
        transport = await exchange(here, post(item))
        (answer,) = answers(transport.sent)
        assert answer.status == 500
        assert b'"type":"ModelError","message":"Misjudging.measure returned ' in answer.body
        assert not transport.is_closing()


async def test_a_fault_of_the_server_is_answered_and_costs_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Any) -> None:
        raise ZeroDivisionError("ours")

    async with site() as here:
        transport = here.connect()
        with monkeypatch.context() as patch:
            patch.setattr(here.service, "submit", broken)
            transport.receive(post(b"3"))
        await transport.deliver(post(b"3"))
        failed, good = answers(transport.sent)
        assert (failed.status, good.body) == (500, b"9")
        assert b"ours" not in failed.body
        transport.close()
        await settled()
        assert not here.shared.connections


async def test_continue_is_sent_when_the_body_is_wanted() -> None:
    async with site() as here:
        for size in (10, 50_000):
            request = post(text(size), "Expect: 100-continue")
            transport = await exchange(here, request[:-size])
            assert transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
            await transport.deliver(request[-size:])
            assert statuses(transport.sent) == [100, 200]
        transport = await exchange(here, post(b"3", "Expect: 100-continue"))
        assert statuses(transport.sent) == [200]  # the body was there


@subcases(("size", "path", "status"), [
    (10, "/infer/nobody", 404), (50_000, "/infer/nobody", 404), (200_000, "/infer/nobody", 404), (200_000, "/infer/square", 413),
])  # fmt: skip
async def test_continue_is_not_sent_when_the_request_is_refused(size: int, path: str, status: int) -> None:
    async with site(max_body_size=100_000) as here:
        transport = await exchange(here, post(b"1" * size, "Expect: 100-continue", path=path)[:-size])
        (answer,) = answers(transport.sent)
        assert (answer.status, answer.headers["connection"]) == (status, "close")


async def test_a_refused_large_body_is_skipped_and_the_connection_goes_on() -> None:
    async with site() as here:
        request = post(b"1" * 200_000, path="/infer/nobody")
        transport = await exchange(here, request[:500])
        assert statuses(transport.sent) == [404]
        await transport.deliver(request[500:] + post(b"4"))
        assert statuses(transport.sent) == [404, 200]


async def test_large_bodies_are_received_into_blocks_and_small_ones_are_not() -> None:
    async with site(ArenaExecutor(squared)) as here:
        await exchange(here, post(text(1000)))
        assert not here.executor.blocks
        content = b'"' + bytes(range(35, 91)) * 2000 + b'"'
        transport = await exchange(here, post(content) * 3 + post(content)[:90], post(content)[90:])
        assert [answer.body for answer in answers(transport.sent)] == [content] * 4
        kinds = [type(payload) for each in here.executor.payloads[1:] for payload in each]
        assert kinds == [type(here.executor.blocks[0])] * 4
        assert [block.shares for block in here.executor.blocks] == [0] * 4


async def test_a_full_arena_is_429_and_the_connection_goes_on() -> None:
    async with site(ArenaExecutor(places=1)) as here:
        first, second = here.connect(), here.connect()
        first.receive(LARGE)
        second.receive(LARGE + post(b"5"))
        for _ in range(2):
            await settled()
            while here.executor.pending:
                here.executor.respond_next(always(b"25"))
                await settled()
            refused, *good = answers(second.sent)
            assert (refused.status, "retry-after" in refused.headers) == (429, True)
            second.receive(LARGE)
        assert [answer.body for answer in good] == [b"25"] * 2
        assert statuses(first.sent) == [200]


async def test_who_announces_much_and_sends_little_keeps_nobody_out_of_the_arena() -> None:
    executor = ArenaExecutor(squared, places=3)
    async with site(executor) as here:
        slow = [here.connect() for _ in range(20)]
        for number, transport in enumerate(slow):
            transport.receive(LARGE[: 500 + number])
        half, honest = here.connect(), here.connect()
        half.receive(LARGE[:50_000])
        await honest.deliver(LARGE)
        assert statuses(honest.sent) == [200]
        assert half.protocol.arrived > 40_000
        assert half.protocol in here.shared.receiving  # of which most has come stays where it is
        for number, transport in enumerate(slow):
            transport.receive(LARGE[500 + number :])
        await half.deliver(LARGE[50_000:])
        assert [statuses(each.sent) for each in [*slow, half]] == [[200]] * 21
        assert (executor.free, here.shared.account.held_bytes, len(here.shared.receiving)) == (3, 0, 0)


@pytest.mark.parametrize("room", [40_000, 80_000])  # for the first piece of the body, too
async def test_nobody_is_moved_where_there_is_no_memory(room: int) -> None:
    async with site(ArenaExecutor(squared, places=1), max_waiting_bytes=room) as here:
        first, second = here.connect(), here.connect()
        first.receive(LARGE[:-1])
        await second.deliver(LARGE)
        assert statuses(second.sent) == [429]
        await first.deliver(LARGE[-1:])
        assert (statuses(first.sent), here.shared.account.held_bytes) == ([200], 0)


async def test_a_body_larger_than_the_arena_is_413() -> None:
    async with site(ArenaExecutor(squared)) as here:
        assert statuses((await exchange(here, post(b"1" * (2 << 20)))).sent) == [413]


async def test_bodies_in_ordinary_memory_are_bounded_together() -> None:
    executor, request = FakeExecutor(), post(text(50_000))
    async with site(executor, max_waiting_bytes=16 * 50_000) as here:
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
        executor.respond_next(squared)
        await settled()
        assert statuses(transports[1].sent) == [200]
        assert here.shared.account.held_bytes == 14 * 50_000


async def test_memory_is_taken_as_a_body_comes() -> None:
    async with site(max_waiting_bytes=400_000) as here:
        request = post(text(1_000_000))
        transports = [here.connect() for _ in range(5)]
        for transport in transports:
            transport.receive(request[:100])
        assert here.shared.account.held_bytes == 5 * (64 << 10)
        transports[0].receive(request[100:])
        await settled()
        assert (statuses(transports[0].sent), here.shared.account.held_bytes) == ([429], 4 * (64 << 10))


async def test_heads_and_small_bodies_that_wait_for_their_rest_are_counted() -> None:
    async with site(max_waiting_bytes=130_000) as here:
        transports = [here.connect() for _ in range(7)]
        for transport in transports:
            transport.receive(b"POST /infer/square HTTP/1.1\r\nX: " + b"x" * 20_000)
        assert [statuses(each.sent) for each in transports] == [[]] * 6 + [[429]]
        assert 120_000 <= here.shared.account.held_bytes <= 130_000
        for transport in transports[2:]:
            transport.abort()
        await settled()
        transports[0].receive(b"\r\nHost: test\r\nContent-Length: 1\r\n\r\n3")
        await settled()
        assert statuses(transports[0].sent) == [200]
        assert here.shared.account.held_bytes < 25_000
        transports[1].abort()
        await settled()
        assert here.shared.account.held_bytes == 0


KSERVE = b'{"inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "data": ["3"]}]}'


@subcases(("path", "body", "behind", "kind"), [
    ("/infer/square", b"3", "/v2/models/square/infer", dict), ("/v2/models/square/infer", KSERVE, "/infer/square", str),
])  # fmt: skip
async def test_an_error_for_what_waits_behind_a_request_has_the_form_of_that(
    path: str, body: bytes, behind: str, kind: type
) -> None:
    async with site(FakeExecutor(), max_waiting_bytes=60_000) as here:
        here.connect().receive(b"POST /infer/square HTTP/1.1\r\nX: " + b"x" * 20_000)
        transport = here.connect()
        await transport.deliver(post(body, path=path))
        assert not transport.sent
        transport.receive(post(b"4" * 50_000, path=behind))
        (refusal,) = answers(transport.sent)
        assert (refusal.status, refusal.headers["connection"]) == (429, "close")
        assert type(json.loads(refusal.body)["error"]) is kind


@subcases("headers", [(), ("X-Explain: 1",), ("Connection: close",), ("Accept-Encoding: br",)])
async def test_blocks_are_sent_from_where_they_are_and_released_when_sent(headers: tuple[str, ...]) -> None:
    content, executor = b"0123456789" * 5000, FakeExecutor()
    async with site(executor) as here:
        for stuck in (False, True):
            transport, block = here.connect(), block_of(content)
            transport.stuck = stuck
            await transport.deliver(post(b"1", *headers) + post(b"2", *headers))
            executor.respond_next(always(block))
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
                executor.respond_next(always(b"end"))
                await settled()


async def test_a_block_is_released_when_the_peer_leaves_before_it_is_sent() -> None:
    async with site(FakeExecutor()) as here:
        transport, block = here.connect(), block_of(b"x" * 50_000)
        transport.stuck = True
        await transport.deliver(post(b"1"))
        here.executor.respond_next(always(block))
        assert block.shares == 1
        await transport.leave()
        assert block.shares == 0


async def test_a_large_body_that_is_refused_as_it_comes_closes_its_connection() -> None:
    async with site() as here:
        transport, body = here.connect(), b"[]".ljust(LARGE_BYTES + 1)
        headers = ("Connection: close", "Inference-Header-Content-Length: 2")
        request = post(body, *headers, path="/v2/models/square/infer")
        transport.receive(request[:20])  # so that it is not begun where it has been received
        await transport.deliver(request[20:])
        assert transport.sent.startswith(b"HTTP/1.1 400 ")
        assert transport.is_closing()
        assert not here.shared.connections


@subcases("headers", [(), ("X-Explain: 1",), ("Accept-Encoding: br",)])
async def test_a_long_response_for_which_there_is_no_room_is_refused(headers: tuple[str, ...]) -> None:
    async with site(FakeExecutor(always("x" * 300_000)), max_waiting_bytes=700_000, compress_above=1 << 20) as here:
        transports = [here.connect() for _ in range(3)]
        for transport in transports:
            transport.stuck = True
            await transport.deliver(post(b"1", *headers))
        assert 600_000 < here.shared.account.held_bytes < 700_000
        for transport in transports:
            transport.flush()
        assert [statuses(each.sent) for each in transports] == [[200], [200], [429]]
        assert b"max_waiting_bytes" in transports[2].sent
        assert here.observer.kinds == {"": 2, "Overloaded": 1}
        await settled()
        assert here.shared.account.held_bytes == 0


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
