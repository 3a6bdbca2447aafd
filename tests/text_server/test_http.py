"""Small requests on the fast path, answered as the ASGI application answers them; and answers that are written bit by bit."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from tests.text_server.hashing import DIMENSIONS, HashingEncoder, Heard, vector_of
from tests.text_server.served_texts import MAX_TEXTS, Served, served
from tests.waiting import turns, until

from weir.errors import ModelError
from weir.frontends.http.asgi import ClientLeft
from weir.messages import CURRENT_TRACE, Dispatch, Reason, Trace, Wakeup
from weir.protocols.exchange import PassedOn
from weir.text_models.texts import Text, TextOutput
from weir.text_server.http import Listing, listing, send_listing
from weir.text_server.requests import SMALL_REQUEST
from weir.text_server.texts import Encoded, TextFacts, TextQuery

OPENAI, ENCODE = "/v1/embeddings", "/encode"
LONG = "one two three four five six seven"
FORM = "application/x-www-form-urlencoded"
MSGPACK = "application/msgpack"


@asynccontextmanager
async def dialled(server: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of one's own."""
    reader, writer = await asyncio.open_connection(server.client.base_url.host, server.client.base_url.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def request(path: str, document: Any, *headers: str, version: str = "1.1") -> bytes:
    """Return a request as bytes."""
    body = json.dumps(document).encode()
    lines = [f"POST {path} HTTP/{version}", "host: t", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def answer_on(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Read one answer: its code, its head in lower case, and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), head, await reader.readexactly(length)


def said_of(answer: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    """Return what must be alike, however it was answered."""
    return answer.status_code, {name: value for name, value in answer.headers.items() if name != "date"}, answer.content


CALLS: list[tuple[str, dict[str, Any]]] = [
    (OPENAI, {"json": {"input": "one text"}}),
    (OPENAI, {"json": {"input": ["one", "two", "one"], "encoding_format": "base64", "dimensions": 3, "user": "me"}}),
    (OPENAI, {"json": {"input": [LONG, "two"]}, "headers": {"x-request-id": "r1", "x-client-id": "me"}}),
    (OPENAI, {"json": {"input": LONG, "truncate": False}, "headers": {"x-request-id": "r2"}}),
    (OPENAI, {"json": {"input": "a", "dimensions": 9}}),
    (OPENAI, {"json": {"input": ""}, "headers": {"x-request-id": "r3"}}),
    (OPENAI, {"json": {"input": "a", "model": "other"}}),
    (OPENAI, {"json": {"input": "a"}, "headers": {"x-request-timeout": "soon"}}),
    (OPENAI, {"json": {"input": "a"}, "headers": {"x-client-id": "m" * 200}}),
    (OPENAI, {"json": {"input": "a"}, "headers": {"x-request-id": "r" * 300}}),
    (OPENAI, {"json": {"input": "a"}, "headers": {"content-encoding": "br"}}),
    (OPENAI, {"json": {"input": [f"text {number}" for number in range(16)]}, "headers": {"accept-encoding": "gzip"}}),
    (OPENAI, {"json": {"input": [f"text {number}" for number in range(17)]}}),
    (OPENAI, {"content": b'{"input": "\xff"}'}),
    (OPENAI, {"content": b""}),
    (ENCODE, {"json": {"id": 7, "texts": ["one", ["two", "words"]], "is_tokenized": None}}),
    (ENCODE, {"json": {"id": 7, "texts": ["one", LONG], "show_tokens": True}}),
    (ENCODE, {"json": {"id": 7, "texts": [["a", "b"]], "pairs": True}}),
    (ENCODE, {"json": {"id": 7, "texts": ["one"]}, "headers": {"accept": MSGPACK}}),
    (ENCODE, {"json": {"id": 7, "texts": ["one"]}, "headers": {"accept": "text/html"}}),
    (ENCODE, {"json": {"id": 7, "texts": ["one"], "dimensions": 0}}),
    (ENCODE, {"json": {"id": 7, "texts": [""]}}),
    (ENCODE, {"json": {"id": 7, "text": "one"}}),
    (ENCODE, {"content": b"texts=one+two&texts=three&id=4", "headers": {"content-type": FORM}}),
    (ENCODE, {"content": b"one", "headers": {"content-type": "text/plain"}}),
]  # fmt: skip


async def test_the_fast_path_answers_as_the_application_does() -> None:
    fast, slow = HashingEncoder(), HashingEncoder()
    async with served(fast) as first, served(slow, fast=False) as second:
        for path, said in CALLS:
            found = []
            for server in (first, second):
                answers = [said_of(await server.client.post(path, **said)) for _ in range(3)]
                assert answers[0] == answers[1] == answers[2], (path, said)
                found.append((answers[0], server.counted()))
            assert (found[0], fast.heard) == (found[1], slow.heard), (path, said)


async def test_a_response_for_which_there_is_no_room_is_counted_once() -> None:
    async with served(HashingEncoder(), fast=False, max_waiting_bytes=3000, max_body_size=2000) as server:
        texts, plain = {"input": ["text"] * 40}, {"accept-encoding": "identity"}
        assert (await server.client.post(OPENAI, json=texts, headers=plain)).status_code == 413
        calls = {labels: count for labels, count in server.counted().items() if labels[0] == "weir_text_calls_total"}
        assert calls == {("weir_text_calls_total", "hashing", "openai", "200"): 1}


async def test_an_error_in_the_turn_in_which_its_caller_leaves_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = HashingEncoder()
    encoder.gate, encoder.error, left = asyncio.Event(), ModelError("broken"), asyncio.Event()

    async def leaves(response: asyncio.Future[Any], receive: Any) -> None:
        await until(lambda: encoder.heard)
        response.cancel()  # as is what a task awaits that is cancelled, which hears of it only later
        assert encoder.gate is not None
        encoder.gate.set()
        await turns(10)
        left.set()
        raise ClientLeft("the caller disconnected")

    monkeypatch.setattr("weir.text_server.http.unless_left", leaves)
    async with served(encoder, fast=False) as server, dialled(server) as (_, writer):
        writer.write(request(ENCODE, {"id": 7, "texts": ["one"]}))
        await left.wait()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize(("said", "headers"), [
    ({"input": [f"text {place}" for place in range(SMALL_REQUEST + 1)]}, []),
    ({"input": "a" * 40_000}, []),
    ({"input": "a", "outputs": ["dense", "tokens"]}, []),
    ({"input": "a"}, ["expect: 100-continue"]),
    ({"input": "a"}, ["content-encoding: identity", "x-request-priority: high"]),
    ({"input": "a", "model": "tokens"}, []),
])  # fmt: skip
async def test_what_is_more_than_that_is_left_to_the_application(
    said: Any, headers: list[str], handed_over: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.text_server.http.LONG_RESPONSE", 1000)  # bytes

    facts = TextFacts(outputs=tuple(TextOutput))
    encoders = HashingEncoder(facts=facts), HashingEncoder("tokens", per_token=True, facts=TextFacts())
    async with served(*encoders, hot=["hashing"]) as server, dialled(server) as (reader, writer):
        # The next request has arrived with it, and is answered after it.
        writer.write(request(OPENAI, said, *headers) + request(OPENAI, {"input": "next", "encoding_format": "base64"}))
        if "expect: 100-continue" in headers:
            assert b"100" in await reader.readuntil(b"\r\n\r\n")
        assert (await answer_on(reader))[0] in (200, 400, 501)
        assert (await answer_on(reader))[0] == 200
        assert [heard.texts for heard in encoders[0].heard][-1] == ["next"]
    assert len(handed_over) == 1


async def test_who_leaves_has_his_call_cancelled_and_the_others_have_theirs() -> None:
    encoder = HashingEncoder()
    encoder.gate, encoder.entered, encoder.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with served(encoder) as server, dialled(server) as (reader, writer):
        async with dialled(server) as (_, leaving):
            leaving.write(request(OPENAI, {"input": "first"}))
            await encoder.entered.wait()
            writer.write(request(OPENAI, {"input": "second"}))
        await encoder.left.wait()
        encoder.gate.set()
        assert (await answer_on(reader))[0] == 200
        assert server.counted()["weir_text_calls_total", "hashing", "openai", "200"] == 1


async def test_a_span_is_named_in_its_own_answer_only() -> None:
    class Traced(HashingEncoder):
        async def encode(self, texts: Any, query: TextQuery) -> Any:
            if texts != ["bare"]:
                CURRENT_TRACE.set(Trace(len(self.heard) + 1, 2))
            return await super().encode(texts, query)

    encoder = Traced()
    encoder.one_by_one = False  # as that of a service that traces
    async with served(encoder) as server, dialled(server) as (reader, writer):
        writer.write(b"".join(request(OPENAI, {"input": text}) for text in ("one", "", "bare", "two")))
        found = [(await answer_on(reader))[1] for _ in range(4)]
    assert [b"traceparent: 00-" in head for head in found] == [True, False, False, True]


async def test_a_server_that_ends_finishes_it_and_refuses_the_next() -> None:
    encoder = HashingEncoder()
    encoder.gate, encoder.entered = asyncio.Event(), asyncio.Event()
    async with served(encoder) as server, dialled(server) as (reader, writer), dialled(server) as (other, late):
        writer.write(request(OPENAI, {"input": "a"}))
        await encoder.entered.wait()
        server.server.refuse()
        late.write(request(OPENAI, {"input": "b"}))
        status, head, body = await answer_on(other)
        assert status == 503 and b"connection: close" in head and b"retry-after" in head
        assert json.loads(body)["error"]["code"] == "service_unavailable"
        assert server.server.busy == 1
        encoder.gate.set()
        status, head, _ = await answer_on(reader)
        assert status == 200 and b"connection: close" in head and await server.server.drain(5.0)


async def test_a_head_that_is_none_is_refused_in_the_words_of_the_endpoint() -> None:
    keys = {
        OPENAI: {"error"}, "/embeddings": {"error"}, "/v1/embed": {"id", "message", "detail"},
        "/embed": {"error", "error_type"}, "/encode": {"id", "type", "description", "status"},
    }  # fmt: skip
    async with served(HashingEncoder()) as server:
        for path in keys:
            async with dialled(server) as (reader, writer):
                writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n".encode())
                status, _, body = await answer_on(reader)
            assert status in (400, 422) and json.loads(body).keys() == keys[path]  # 422 is TEI's


async def test_callers_at_a_unix_socket_are_local(tmp_path: Any) -> None:
    async with served(HashingEncoder(), uds=str(tmp_path / "s")) as server:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(request(ENCODE, {"texts": ["a"]}))
        assert (await answer_on(reader))[0] == 200
        writer.close()
        assert [row["identity"] for row in server.clients.table()] == ["local"]


TEXTS = ["one two three four five six seven", *(f"text {number}" for number in range(MAX_TEXTS - 1))]
EXPECTED = [vector_of("one two three four five six"), *(vector_of(text) for text in TEXTS[1:])]


def listed(asked: list[int]) -> Listing:
    def items(start: int, stop: int) -> list[Any]:
        asked.append(stop)
        return list(range(start, stop))

    return listing({"id": 1}, "result", 10, 30_000, items)


@pytest.mark.parametrize(("path", "said"), [("/encode", {"texts": TEXTS}), ("/v1/embeddings", {"input": TEXTS})])
async def test_the_largest_answers_come_in_bits_and_say_the_same(
    monkeypatch: pytest.MonkeyPatch, path: str, said: dict[str, Any]
) -> None:
    monkeypatch.setattr("weir.text_server.http._NUMBERS_PER_PART", 10 * DIMENSIONS)
    async with served(HashingEncoder(), fast=False) as server:
        whole = await server.client.post(path, json=said, headers={"x-request-id": "r1"})
        monkeypatch.setattr("weir.text_server.http._STREAMED_ABOVE", 100)
        bits = await server.client.post(path, json=said, headers={"x-request-id": "r1"})
        assert server.counted()["weir_texts_total", "hashing", "openai" if "input" in said else "encode"] == 100
        async with dialled(server) as (reader, writer):
            writer.write(request(path, said, version="1.0"))
            head, _, old = (await reader.read()).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and b"connection: close" in head.lower()  # HTTP/1.0 knows no bits
    assert "content-length" in whole.headers and bits.headers["transfer-encoding"] == "chunked"
    assert whole.json() == bits.json() == json.loads(old)
    vectors = bits.json()["result"] if path == "/encode" else [each["embedding"] for each in bits.json()["data"]]
    np.testing.assert_array_equal(np.array(vectors, np.float32), EXPECTED)
    assert bits.json()["truncated"] == [0]
    for header, value in (("x-request-id", "r1"), ("x-weir-truncated", "1")):
        assert whole.headers[header] == bits.headers[header] == value


async def test_what_is_asked_for_beside_the_vectors_counts_as_part_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weir.text_server.http._STREAMED_ABOVE", 2 * DIMENSIONS)
    monkeypatch.setattr("weir.text_server.http._NUMBERS_PER_PART", 8 * DIMENSIONS)

    async with served(HashingEncoder(facts=TextFacts(outputs=tuple(TextOutput)))) as server:
        said = {"input": ["a", "one two three"], "outputs": ["dense", "tokens"]}
        answer = await server.client.post(OPENAI, json=said)
    assert answer.headers["transfer-encoding"] == "chunked"
    assert [len(each["tokens"]) for each in answer.json()["data"]] == [1, 3]


async def test_an_answer_says_that_its_texts_waited_for_a_worker_to_start() -> None:
    batch = Dispatch(1, 0, [], None, 1, 1.0, Reason.IDLE, 1, 0.0, None, Wakeup.ARRIVAL, 12.0)
    batch.woken_at = 11.5
    encoder = HashingEncoder()
    async with served(encoder) as server:
        for dispatch, waited in ((None, None), ((batch, 10.0), "1.500000")):
            encoder.dispatch = dispatch
            for path, field, count in (
                ("/encode", "texts", 1), (OPENAI, "input", 1), ("/embed", "inputs", 1), (OPENAI, "input", 20),  # a task of its own
            ):  # fmt: skip
                answer = await server.client.post(path, json={field: ["a"] * count})
                assert answer.headers.get("x-start-time") == waited


@pytest.mark.parametrize("at_once", [1, 90_000, 300_000])
def test_whole_it_says_the_same_as_in_bits(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("weir.text_server.http._NUMBERS_PER_PART", at_once)
    made = listed([])
    assert msgspec.json.decode(made.whole().body) == {"id": 1, "result": list(range(10))}
    assert made.whole().body == b"".join(made.parts())


async def test_who_does_not_read_on_has_nothing_more_written() -> None:
    asked: list[int] = []
    gate, full, bodies = asyncio.Event(), asyncio.Event(), list[bytes]()

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))
        if len(bodies) == 3:
            full.set()
            await gate.wait()

    sending = asyncio.ensure_future(send_listing(send, listed(asked), []))
    await full.wait()
    assert asked == [2, 4]  # two bits of two items: no other is made
    gate.set()
    assert await sending == len(b"".join(bodies))
    assert msgspec.json.decode(b"".join(bodies)) == {"id": 1, "result": list(range(10))}


class Elsewhere(HashingEncoder):
    """Has another process respond to the first request."""

    async def encode(self, texts: Sequence[Text], query: TextQuery) -> Encoded:
        if not self.heard:
            self.heard.append(Heard(texts, query))
            raise PassedOn
        return await super().encode(texts, query)


async def test_a_request_that_is_passed_on_is_counted_once() -> None:
    async with served(Elsewhere()) as server:
        answer = await server.client.post(OPENAI, json={"input": ["one", "two"]}, headers={"X-Client-Id": "me"})
        assert answer.status_code == 200
        (client,) = server.clients.table()
        assert (client["identity"], client["num_request"], client["num_total_seq"]) == ("me", 1, 2)
