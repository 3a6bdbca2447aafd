"""Answers that are written bit by bit: whole to their readers, and no faster than they are read."""

import asyncio
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from tests.embedding.doors import MAX_TEXTS, Served, served
from tests.embedding.hashing import DIMENSIONS, HashingEncoder, vector_of

from weir.embedding.calling import Listing, send_listing

TEXTS = ["one two three four five six seven", *(f"text {number}" for number in range(MAX_TEXTS - 1))]
EXPECTED = [vector_of("one two three four five six"), *(vector_of(text) for text in TEXTS[1:])]


def listing(asked: list[int]) -> Listing:
    def items(start: int, stop: int) -> list[Any]:
        asked.append(stop)
        return list(range(start, stop))

    return Listing({"id": 1}, "result", 10, 30_000, items)


@pytest.mark.parametrize("path", ["/encode", "/v1/embeddings"])
def test_the_largest_answers_come_in_bits_and_say_the_same(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    said = {"texts": TEXTS} if path == "/encode" else {"input": TEXTS}
    found: list[httpx.Response] = []

    async def main() -> None:
        async with served(HashingEncoder()) as server:
            for largest in (1_000_000, 100):
                monkeypatch.setattr("weir.embedding.calling._LARGEST", largest)
                monkeypatch.setattr("weir.embedding.calling._NUMBERS_AT_ONCE", 10 * DIMENSIONS)
                found.append(await server.client.post(path, json=said, headers={"x-request-id": "r1"}))
            sizes.append(server.counted()["weir_texts_total", "hashing", "encode" if path == "/encode" else "openai"])

    sizes: list[float] = []
    asyncio.run(main())
    whole, bits = found
    assert "content-length" in whole.headers and bits.headers["transfer-encoding"] == "chunked"
    assert whole.json() == bits.json() and sizes == [2 * MAX_TEXTS]
    vectors = bits.json()["result"] if path == "/encode" else [each["embedding"] for each in bits.json()["data"]]
    np.testing.assert_array_equal(np.array(vectors, np.float32), EXPECTED)
    assert bits.json()["truncated"] == [0]
    for header, value in (("x-request-id", "r1"), ("x-weir-truncated", "1")):
        assert whole.headers[header] == bits.headers[header] == value


@pytest.mark.parametrize("at_once", [1, 90_000, 300_000])
def test_whole_it_says_the_same_as_in_bits(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("weir.embedding.calling._NUMBERS_AT_ONCE", at_once)
    made = listing([])
    assert msgspec.json.decode(made.whole().body) == {"id": 1, "result": list(range(10))}
    assert made.whole().body == b"".join(made.parts())


def test_a_client_of_http_1_0_gets_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.embedding.calling._LARGEST", 100)

    async def ask(server: Served) -> bytes:
        reader, writer = await asyncio.open_connection(server.client.base_url.host, server.client.base_url.port)
        body = msgspec.json.encode({"texts": TEXTS})
        writer.write(b"POST /encode HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def main() -> bytes:
        async with served(HashingEncoder()) as server:
            return await ask(server)

    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and len(msgspec.json.decode(body)["result"]) == MAX_TEXTS


def test_who_does_not_read_on_has_nothing_more_written() -> None:
    asked: list[int] = []

    async def main() -> None:
        gate, full, bodies = asyncio.Event(), asyncio.Event(), list[bytes]()

        async def send(message: Any) -> None:
            bodies.append(message.get("body", b""))
            if len(bodies) == 3:
                full.set()
                await gate.wait()

        sending = asyncio.ensure_future(send_listing(send, listing(asked), []))
        await full.wait()
        assert asked == [2, 4]  # two bits of two items: no other is made
        gate.set()
        assert await sending == len(b"".join(bodies))
        assert msgspec.json.decode(b"".join(bodies)) == {"id": 1, "result": list(range(10))}

    asyncio.run(main())
