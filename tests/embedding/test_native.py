"""Texts at the native door: items, each with an end of its own, at a real server of a tiny model."""

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from tests.embedding import tiny, tiny_tokens

import weir.embedding
from weir.embedding import EmbeddingServer
from weir.embedding.native import Item, ItemOptions, _Work
from weir.embedding.texts import Encoded
from weir.protocols.native import RequestHead

LONG = "it " * 20
SETTINGS: dict[str, Any] = {"port": 0, "executor": "thread", "threads": 1, "device_map": ["cpu"], "calibrate": False}
MSGPACK, OCTETS = "application/msgpack", "application/octet-stream"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingServer]:
    """A model of sentence-transformers', cut to 8 tokens."""
    folder = tmp_path_factory.mktemp("models")
    small = tiny.sentence_model(folder / "small", max_length=8, prompts={"query": "do: "})
    with weir.embedding.serve(small, cache=str(folder / "cache"), max_texts=40, **SETTINGS) as made:
        yield made


@pytest.fixture
def http(server: EmbeddingServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as made:
        yield made


def expected(http: httpx.Client, *texts: Any, **said: Any) -> Any:
    """Return what `/encode` answers."""
    return http.post("/encode", json={"texts": texts, **said}).json()["result"]


def test_all_forms_of_a_text_pass(http: httpx.Client) -> None:
    items: list[tuple[Any, Any]] = [
        ("first do it", expected(http, "first do it")),
        (["first", "its"], expected(http, ["first", "its"])),
        ([2, 6, 7, 3], expected(http, [2, 6, 7, 3])),
        ({"text": "first do it"}, expected(http, "first do it")),
        ({"text": "first do it", "pair": "right"}, expected(http, ["first do it", "right"], pairs=True)),
        ({"text": ["first", "its"], "is_tokenized": True}, expected(http, ["first", "its"], is_tokenized=True)),
        ({"text": "it", "prompt": "query", "dimensions": 3}, expected(http, "it", prompt="query", dimensions=3)),
    ]
    for item, (vector,) in items:
        answer = http.post("/infer/small", json=item)
        assert answer.status_code == 200, answer.text
        np.testing.assert_allclose(answer.json(), vector, atol=1e-6)
        packed = http.post("/infer/small", content=msgspec.msgpack.encode(item), headers={"content-type": MSGPACK})
        np.testing.assert_allclose(msgspec.msgpack.decode(packed.content), vector, atol=1e-6)
    many = http.post("/infer/small/batch", json=[item for item, _ in items]).json()
    for answered, (_, (vector,)) in zip(many, items, strict=True):
        np.testing.assert_allclose(answered["output"], vector, atol=1e-6)


def test_token_ids_as_octets_and_vectors_too(http: httpx.Client) -> None:
    (vector,) = expected(http, [2, 6, 7, 3])
    body = struct.pack("<4i", 2, 6, 7, 3)
    said = http.post("/infer/small", content=body, headers={"content-type": OCTETS})
    assert said.headers["content-type"] == "application/json"
    np.testing.assert_allclose(said.json(), vector, atol=1e-6)
    raw = http.post("/infer/small", content=body, headers={"content-type": OCTETS, "accept": OCTETS})
    np.testing.assert_allclose(np.frombuffer(raw.content, "<f4"), vector, atol=1e-6)
    refused = http.post("/infer/small", content=b"12345", headers={"content-type": OCTETS})
    assert refused.status_code == 400 and "token ids of 5 bytes" in refused.text


def test_an_answer_says_what_was_cut(http: httpx.Client) -> None:
    fine, cut = http.post("/infer/small", json="it"), http.post("/infer/small", json=LONG)
    assert "x-weir-truncated" not in fine.headers and cut.headers["x-weir-truncated"] == "1"
    np.testing.assert_allclose(cut.json(), expected(http, LONG)[0], atol=1e-6)
    for media, decode in (("application/json", msgspec.json.decode), (MSGPACK, msgspec.msgpack.decode)):
        many = http.post("/infer/small/batch", json=["it", LONG, LONG], headers={"accept": media})
        answered: Any = decode(many.content)
        assert [sorted(each) for each in answered] == [["output"], *[["output", "truncated"]] * 2]
        assert many.headers["x-weir-truncated"] == "2" and answered[1]["truncated"] is True
    refused = http.post("/infer/small", json={"text": LONG, "truncate": False})
    assert refused.status_code == 400 and "may not be cut" in refused.json()["error"]["message"]


def test_an_answer_says_which_token_ids_are_of_another_model(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    other = [tiny_tokens.pieces(tiny_tokens.SQUARE).index("##s")] * 3  # no text of its own begins within a word
    who = {"x-client-id": "native ids"}
    answers = [http.post("/infer/small", json=item, headers=who) for item in ("do it", other, other)]
    assert [answer.headers.get("x-weir-foreign-ids") for answer in answers] == [None, "1", "1"]
    for path, field in (("/encode", "texts"), ("/v1/embeddings", "input")):
        for count in (1, 3):  # by the fast lane, and read beside it
            answer = http.post(path, json={field: [*["it"] * 30 * (count > 1), *[other] * count]}, headers=who)
            assert answer.headers["x-weir-foreign-ids"] == str(count)
    many = http.post("/infer/small/batch", json=["it", other, {"text": other}], headers=who)
    assert many.headers["x-weir-foreign-ids"] == "2"
    assert len([record for record in caplog.records if "'native ids' sent 1 texts" in record.getMessage()]) == 1


@pytest.mark.parametrize(("item", "rule"), [
    ("", "must not be empty"),
    (3, "an item of type int: must be a text, a list of words or of token ids, or an object"),
    ([], "must not be empty"),
    (["a", 3], "must be a text, a list of words, or a list of token ids"),
    ([2, 99999], "token id 1 is 99999"),
    ({}, "text: is missing"),
    ({"text": "a", "colour": 1}, "'colour': there is no such field; there are text, pair"),
    ({"text": ["a"], "pair": "b"}, "text: must be a text"),
    ({"text": "a", "pair": ""}, "pair: must not be empty"),
    ({"text": "a", "is_tokenized": True}, "must be a list of words"),
    ({"text": "a", "dimensions": 1000}, "dimensions=1000: must be 1 to"),
    ({"text": "a", "truncate": "no"}, "truncate='no': must be true or false"),
    ({"text": "a", "prompt": "qury"}, "it has query"),
])  # fmt: skip
def test_a_wrong_item_fails_alone(http: httpx.Client, item: Any, rule: str) -> None:
    alone = http.post("/infer/small", json=item)
    assert alone.status_code == 400
    message = alone.json()["error"]["message"]
    assert rule in message and "\n" not in message
    before, wrong, after = http.post("/infer/small/batch", json=["it", item, LONG]).json()
    assert (wrong["code"], wrong["error"]["message"]) == (400, message)
    assert before["output"] and after["truncated"]


def test_an_item_that_is_no_text_fails_alone(http: httpx.Client) -> None:
    body = rb'["it", "a\ud800", {"text": "b", "prompt": "\udc00"}, "a\u0000", "then"]'
    answered = http.post("/infer/small/batch", content=body, headers={"content-type": "application/json"}).json()
    assert [each.get("code") for each in answered] == [None, 400, 400, 400, None]
    assert "character 1 is half of a surrogate pair" in answered[1]["error"]["message"]
    assert "prompt: is not valid Unicode" in answered[2]["error"]["message"]
    assert "has a NUL at character 1" in answered[3]["error"]["message"]


def test_lists_as_wholes(http: httpx.Client) -> None:
    assert http.post("/infer/small/batch", json=[]).json() == []
    assert [each["code"] for each in http.post("/infer/small/batch", json=[3, ""]).json()] == [400, 400]
    for body, rule in (
        (b'{"a": 1}', "body: must be"),
        (b"", "body: is empty"),
        (b'["a"' + b',"a"' * 40 + b"]", "max_texts"),
    ):
        refused = http.post("/infer/small/batch", content=body)
        assert refused.status_code == 400 and rule in refused.text
    one_line = http.post("/infer/small", json="it", headers={"X-Client-Id": "x" * 200})
    assert one_line.status_code == 400 and "X-Client-Id" in one_line.text


def test_headers_hold_as_at_the_native_door(http: httpx.Client) -> None:
    said = {"X-Explain": "1", "X-Request-Id": "7", "X-Client-Id": "explained", "X-Request-Timeout": "20"}
    answer = http.post("/infer/small", json="it", headers=said)
    assert answer.headers["x-request-id"] == "7" and int(answer.headers["x-batch-size"]) >= 1
    late = http.post("/infer/small/batch", json=["it"] * 40, headers={"X-Request-Timeout": "0.000001"}).json()
    assert {each["code"] for each in late} == {408}
    known = http.get("/status/client").json()["clients"]
    assert ("explained", "http") in {(row["identity"], row["door"]) for row in known}
    lines = http.get("/metrics").text.splitlines()
    counted = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    assert float(counted['weir_text_calls_total{code="200",door="http",model="small"}']) >= 1
    assert float(counted['weir_sent_bytes_total{door="http",model="small"}']) > 0


def test_a_long_list_is_answered_in_order(http: httpx.Client) -> None:
    texts = [f"{'it ' * (number % 5)}do {number}" for number in range(40)]
    answer = http.post("/infer/small/batch", json=texts)
    np.testing.assert_allclose([each["output"] for each in answer.json()], expected(http, *texts), atol=1e-6)


def test_a_vector_for_each_token_without_those_of_the_neighbours(tmp_path: Path) -> None:
    model = tiny.sentence_model(tmp_path / "small")
    settings = SETTINGS | {"cache": str(tmp_path / "cache"), "pooling": "none"}
    with weir.embedding.serve(model, **settings) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post("/infer/small/batch", json=["it", "", "do it"]).json()
        assert [np.shape(answer[place]["output"]) for place in (0, 2)] == [(3, tiny.HIDDEN), (4, tiny.HIDDEN)]
        assert answer[1]["code"] == 400


def test_who_leaves_takes_his_texts_along(server: EmbeddingServer) -> None:
    async def main() -> None:
        host, port = server.url.partition("://")[2].split(":")
        body = msgspec.json.encode([f"{LONG} {number}" for number in range(40)])
        head = f"POST /infer/small/batch HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        for _ in range(5):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    asyncio.run(main())
    with httpx.Client(base_url=server.url, timeout=20) as http:
        assert http.post("/infer/small", json="it").status_code == 200


def test_of_many_wishes_only_some_are_under_way() -> None:
    # 40,000 texts with a prompt each were as many requests for vectors, begun in one turn of the loop.
    class Waiting:
        """An encoder that answers when it is let."""

        def __init__(self) -> None:
            self.under_way = self.most = self.ended = 0
            self.timeouts: list[float] = []

        async def encode(self, texts: list[str], *, timeout: float, **said: Any) -> Encoded:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            self.timeouts.append(timeout)
            await asyncio.sleep(0)
            self.under_way -= 1
            self.ended += 1
            return Encoded(np.full((1, 2), float(texts[0]), np.float32), [1], [False])

    async def main() -> None:
        class Model(weir.Model):
            """Never asked."""

            def predict(self, batch: list[Any]) -> list[Any]:
                return batch

        ask = RequestHead(weir.Service(Model, executor="inline"), True)
        encoder: Any = Waiting()
        items: list[Any] = [Item(str(place), ItemOptions(prompt=f"{place}: ")) for place in range(1000)]
        ends: list[Any] = await _Work(encoder, ask, items, "one").ends(None)
        assert [end.numbers[0] for end in ends] == list(range(1000))
        assert (encoder.ended, encoder.most) == (1000, 64)
        assert 0 < min(encoder.timeouts) <= max(encoder.timeouts) <= ask.timeout
        ask.timeout = 0.0
        late: list[Any] = await _Work(encoder, ask, items[:2], "one").ends(None)
        assert [type(end).__name__ for end in late] == ["DeadlineExceeded"] * 2

    asyncio.run(main())
