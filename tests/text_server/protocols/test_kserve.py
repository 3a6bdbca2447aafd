"""Texts by the Open Inference Protocol and as items: real servers of tiny models, stock clients and Weir's own."""

import asyncio
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import httpx
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray
from tests.rings import subcases
from tests.text_models import tiny, tiny_tokens
from tests.text_models.opening import SETTINGS

import weir.embedding
from weir.client import GrpcClient, HttpClient, WebSocketClient
from weir.client.embedding import EmbeddingClient
from weir.embedding import EmbeddingServer
from weir.errors import DeadlineExceeded, InvalidRequest
from weir.protocols import HttpSettings
from weir.text_server.exchange import EmbeddingContext, TextExchange
from weir.text_server.metrics import TextCounts
from weir.text_server.protocols.kserve import Item, encode_items
from weir.text_server.texts import Encoded, Encodes, TextOptions, TextQuery

TEXTS = ["first do it", "then do it right", "it"]
LONG = "it " * 20
PAIRS = [["do it", "right"], [LONG, "it"]]

Clients = Callable[[], Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingServer]:
    """A model of sentence-transformers', cut to 8 tokens, and one with a vector for each token."""
    folder = tmp_path_factory.mktemp("models")
    small = tiny.sentence_model(folder / "small", max_length=8, prompts={"query": "do: "})
    said = SETTINGS | {"cache": str(folder / "cache"), "grpc_port": 0, "max_texts": 40}
    with weir.embedding.serve(small, **said) as made:
        yield made


@pytest.fixture
def vectors(server: EmbeddingServer) -> Iterator[Callable[..., NDArray[Any]]]:
    """What `/encode` answers."""
    with EmbeddingClient(server.url, check_length=False, ignore_all_checks=True) as client:
        yield client.encode


def grpc_of(server: EmbeddingServer) -> str:
    return next(address for address in server.addresses if "grpc" in address).partition("://")[2]


@pytest.fixture(params=["http", "json", "grpc", "websocket"])
def client(request: pytest.FixtureRequest, server: EmbeddingServer) -> Iterator[Any]:
    """Weir's clients, over each of the protocol's frontends."""
    make: dict[str, Clients] = {
        "http": lambda: HttpClient(server.url), "json": lambda: HttpClient(server.url, binary=False),
        "grpc": lambda: GrpcClient(grpc_of(server)), "websocket": lambda: WebSocketClient(server.url),
    }  # fmt: skip
    with make[request.param]() as made:
        yield made


def texts(*elements: Any) -> dict[str, NDArray[Any]]:
    return {"input": np.array(elements, object)}


def test_texts_are_bytes_and_vectors_numbers(client: Any, vectors: Any) -> None:
    result = client.infer("small", texts(*TEXTS))
    assert (result["output"].dtype, result["output"].shape) == (np.float32, (3, tiny.HIDDEN))
    np.testing.assert_array_equal(result["output"], vectors(TEXTS))
    assert result["truncated"].tolist() == [False] * 3 and "truncated" not in result.parameters
    described = client.model_metadata("small")
    assert described["inputs"] == [{"name": "input", "datatype": "BYTES", "shape": [-1]}]
    assert described["outputs"] == [
        {"name": "output", "datatype": "FP32", "shape": [-1, tiny.HIDDEN]},
        {"name": "truncated", "datatype": "BOOL", "shape": [-1]},
        # These two only where they are asked for.
        {"name": "tokens", "datatype": "FP32", "shape": [-1, -1, tiny.HIDDEN]},
        {"name": "token_counts", "datatype": "INT32", "shape": [-1]},
    ]


def test_options_hold_and_an_answer_says_which_texts_were_cut(client: Any, vectors: Any) -> None:
    said = {"dimensions": "3", "prompt": "query", "truncate": "true", "client": "me"}
    result = client.infer("small", texts(*TEXTS), parameters=said)
    np.testing.assert_array_equal(result["output"], vectors(TEXTS, dimensions=3, prompt="query"))
    result = client.infer("small", texts("it", LONG))
    assert (result["truncated"].tolist(), result.parameters["truncated"]) == ([False, True], 1)
    alone = client.infer("small", texts("it", LONG), outputs=["output"])
    assert (list(alone), alone.parameters["truncated"]) == (["output"], 1)
    np.testing.assert_array_equal(alone["output"], vectors(["it", LONG]))
    with pytest.raises(InvalidRequest, match=r"tensor 'input'\[1\]: .*may not be cut"):
        client.infer("small", texts("it", LONG), parameters={"truncate": False})


def test_pairs_words_and_token_ids_pass(client: Any, http: httpx.Client) -> None:
    def asked(inputs: dict[str, NDArray[Any]], parameters: dict[str, Any], said: list[Any], **more: Any) -> None:
        answer = client.infer("small", inputs, parameters=parameters)
        np.testing.assert_allclose(answer["output"], expected(http, *said, **more), atol=1e-7)

    asked(texts(*PAIRS), {}, PAIRS, pairs=True)
    lists = [["first", "do", "its"], ["better", "", ""]]
    said = [lists[0], lists[1][:1]]
    asked(texts(*lists), {"is_tokenized": False}, said)
    asked(texts(*lists), {"is_tokenized": True}, said, is_tokenized=True)
    ids = [[2, 6, 7, 3], [2, 8, 3, -1]]
    for kind in (np.int32, np.int64):
        asked({"input": np.array(ids, kind)}, {}, [ids[0], ids[1][:3]])


def test_an_answer_says_which_token_ids_are_of_another_model(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    who = {"client": f"ids of {uuid4()}"}  # the server is the same for all clients, and warns once of each
    fine = client.infer("small", texts("it"), parameters=who)
    piece = tiny_tokens.pieces(tiny_tokens.SQUARE).index("##s")  # no text of its own begins within a word
    other = client.infer("small", {"input": np.array([[piece] * 3, [piece, 9, -1]], np.int32)}, parameters=who)
    assert "foreign_ids" not in fine.parameters and other.parameters["foreign_ids"] == 2
    client.infer("small", {"input": np.array([[piece]], np.int32)}, parameters=who)
    assert len([record for record in caplog.records if repr(who["client"]) in record.getMessage()]) == 1


@subcases(("inputs", "parameters", "rule"), [
    (texts("it", ""), {}, r"tensor 'input'\[1\]: the text is empty"),
    (texts("it", b"\xff"), {}, r"tensor 'input'\[1\]: must be a text in UTF-8"),
    (texts(["a", "b", "c"]), {}, r"\[1, 3\], must be \[texts\], \[texts, 2\] for pairs, or with the parameter is_tokenized"),
    (texts("a"), {"is_tokenized": True}, r"\[1\], must be \[texts, words\] \(is_tokenized\)"),
    (texts(["a", "b"], ["", ""]), {"is_tokenized": True}, r"tensor 'input'\[1\]: is empty, must have a word"),
    ({"input": np.array([[2, 3]], np.int32)}, {"is_tokenized": True}, "has token ids, must have words"),
    ({"input": np.array([2, 3], np.int32)}, {}, r"\[2\], must be \[texts, tokens\]"),
    ({"input": np.array([[2, 99999, 3]], np.int32)}, {}, r"tensor 'input'\[0\]: token id 1 is 99999"),
    ({"input": np.array([[2.0]], np.float32)}, {}, "datatype 'FP32', must be BYTES"),
    ({"text": np.array(["a"], object)}, {}, "tensors 'text': must be 'input' alone"),
    ({}, {}, "tensors none: must be 'input' alone"),
    (texts("a"), {"truncate": "maybe"}, "parameter 'truncate'='maybe': must be true or false"),
    (texts("a"), {"dimensions": 0}, "parameter 'dimensions'=0: must be an integer from 1 to"),
    (texts("a"), {"dimensions": 1000}, "parameter 'dimensions'=1000: must be an integer from 1 to"),
    (texts("a"), {"prompt": 7}, "parameter 'prompt'=7: must be a text"),
    (texts("a"), {"prompt": "qury"}, "available: query"),
    (texts("a"), {"client": ""}, "parameter 'client' '': must have 1 to 128 characters"),
])  # fmt: skip
def test_what_is_wrong_is_refused_in_a_line(
    server: EmbeddingServer, inputs: Any, parameters: dict[str, Any], rule: str
) -> None:
    with HttpClient(server.url) as client, pytest.raises(InvalidRequest, match=rule) as refused:
        client.infer("small", inputs, parameters=parameters)
    assert "\n" not in refused.value.message


def test_outputs_that_there_are_not_and_deadlines(server: EmbeddingServer) -> None:
    with GrpcClient(grpc_of(server)) as client:
        with pytest.raises(InvalidRequest, match="output 'other'"):
            client.infer("small", texts("it"), outputs=["other"])
        with pytest.raises(DeadlineExceeded):
            client.infer("small", texts(*[f"it {number}" for number in range(40)]), parameters={"timeout": 1})


def test_tritons_client(server: EmbeddingServer, vectors: Any) -> None:
    with triton.InferenceServerClient(server.url.partition("://")[2]) as client:
        assert client.get_model_config("small")["output"][0] == {
            "name": "output", "data_type": "TYPE_FP32", "dims": [tiny.HIDDEN],
        }  # fmt: skip
        for binary in (True, False):
            tensor = triton.InferInput("input", [3], "BYTES")
            tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], object), binary_data=binary)
            wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("output", "truncated")]
            result = client.infer("small", [tensor], outputs=wanted, parameters={"prompt": "query"})
            np.testing.assert_array_equal(result.as_numpy("output"), vectors(TEXTS, prompt="query"))
            assert result.as_numpy("truncated").tolist() == [False] * 3


def test_many_token_ids_are_read_beside_the_loop(server: EmbeddingServer) -> None:
    ids = np.full((40, 200), -1, np.int32)
    ids[:, :3] = [2, 6, 3]
    ids[7, 3] = 3
    with HttpClient(server.url) as client:
        output = client.infer("small", {"input": ids})["output"]
    assert not np.array_equal(output[7], output[0])
    np.testing.assert_allclose(np.delete(output, 7, axis=0), np.repeat(output[:1], 39, axis=0), atol=1e-6)


def test_raw_and_generated(http: httpx.Client, vectors: Any) -> None:
    raw = http.post("/v2/models/small/infer", content=b"it", headers={"Inference-Header-Content-Length": "0"})
    events = http.post("/v2/models/small/generate_stream", json={"input": "it", "parameters": {"dimensions": 2}})
    assert int(raw.headers["Inference-Header-Content-Length"]) + 4 * tiny.HIDDEN + 1 == len(raw.content)
    (said,) = [line for line in events.text.splitlines() if line.startswith("data:")]
    assert '"truncated":false' in said
    assert str(float(vectors(["it"], dimensions=2)[0, 0]))[:6] in said


def test_a_vector_for_each_token(tmp_path: Path) -> None:
    model = tiny.sentence_model(tmp_path / "small")
    settings = SETTINGS | {"cache": str(tmp_path / "cache"), "pooling": "none"}
    with weir.embedding.serve(model, **settings) as server, HttpClient(server.url) as client:
        assert client.model_metadata("small")["outputs"][0]["shape"] == [-1, -1, tiny.HIDDEN]
        output = client.infer("small", texts("it", "do it"))["output"]
        assert output.shape == (2, 4, tiny.HIDDEN) and not output[0, 3:].any()
        with httpx.Client(base_url=server.url) as http:
            answer = http.post("/infer/small/batch", json=["it", "", "do it"]).json()
    # Without those of the neighbours.
    assert [np.shape(answer[place]["output"]) for place in (0, 2)] == [(3, tiny.HIDDEN), (4, tiny.HIDDEN)]
    assert answer[1]["code"] == 400


MSGPACK, OCTETS = "application/msgpack", "application/octet-stream"


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


def test_an_answer_to_items_says_which_token_ids_are_of_another_model(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    other = [tiny_tokens.pieces(tiny_tokens.SQUARE).index("##s")] * 3  # no text of its own begins within a word
    who = {"x-client-id": "native ids"}
    answers = [http.post("/infer/small", json=item, headers=who) for item in ("do it", other, other)]
    assert [answer.headers.get("x-weir-foreign-ids") for answer in answers] == [None, "1", "1"]
    for path, field in (("/encode", "texts"), ("/v1/embeddings", "input")):
        for count in (1, 3):  # on the fast path, and off it
            answer = http.post(path, json={field: [*["it"] * 30 * (count > 1), *[other] * count]}, headers=who)
            assert answer.headers["x-weir-foreign-ids"] == str(count)
    many = http.post("/infer/small/batch", json=["it", other, {"text": other}], headers=who)
    assert many.headers["x-weir-foreign-ids"] == "2"
    assert len([record for record in caplog.records if "'native ids' sent 1 texts" in record.getMessage()]) == 1


@subcases(("item", "rule"), [
    ("", "must not be empty"),
    (3, "an item of type int: must be a text, a list of words or of token ids, or an object"),
    ([], "must not be empty"),
    (["a", 3], "must be a text, a list of words, or a list of token ids"),
    ([2, 99999], "token id 1 is 99999"),
    ({}, "text: is missing"),
    ({"text": "a", "colour": 1}, "colour: unknown field; available: text, pair"),
    ({"text": ["a"], "pair": "b"}, "text: must be a text"),
    ({"text": "a", "pair": ""}, "pair: must not be empty"),
    ({"text": "a", "is_tokenized": True}, "must be a list of words"),
    ({"text": "a", "dimensions": 1000}, "dimensions=1000: must be 1 to"),
    ({"text": "a", "truncate": "no"}, "truncate='no': must be true or false"),
    ({"text": "a", "prompt": "qury"}, "available: query"),
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
    assert "byte 2 begins half of a surrogate pair" in answered[1]["error"]["message"]
    assert "body: is not valid Unicode: byte 25" in answered[2]["error"]["message"]
    assert "has a NUL at character 1" in answered[3]["error"]["message"]


def test_lists_as_wholes(http: httpx.Client) -> None:
    assert http.post("/infer/small/batch", json=[]).json() == []
    assert [each["code"] for each in http.post("/infer/small/batch", json=[3, ""]).json()] == [400, 400]
    many = b'["a"' + b',"a"' * 40 + b"]"
    for body, rule in ((b'{"a": 1}', "body: must be"), (b"", "body: is empty"), (many, "max_texts")):
        refused = http.post("/infer/small/batch", content=body)
        assert refused.status_code == 400 and rule in refused.text
    one_line = http.post("/infer/small", json="it", headers={"X-Client-Id": "x" * 200})
    assert one_line.status_code == 400 and "X-Client-Id" in one_line.text


def test_headers_hold_as_at_the_native_endpoint_and_calls_are_counted(
    http: httpx.Client, server: EmbeddingServer
) -> None:
    said = {"X-Explain": "1", "X-Request-Id": "7", "X-Client-Id": "explained", "X-Request-Timeout": "20"}
    answer = http.post("/infer/small", json="it", headers=said)
    assert answer.headers["x-request-id"] == "7" and int(answer.headers["x-batch-size"]) >= 1
    late = http.post("/infer/small/batch", json=["it"] * 40, headers={"X-Request-Timeout": "0.000001"}).json()
    assert {each["code"] for each in late} == {504}
    with GrpcClient(grpc_of(server)) as client:
        client.infer("small", texts("it", LONG), parameters={"client": "counted"})
        with pytest.raises(InvalidRequest):
            client.infer("small", texts(""))
    known = {(row["identity"], row["frontend"]) for row in http.get("/status/client").json()["clients"]}
    assert {("explained", "http"), ("counted", "grpc")} <= known
    lines = http.get("/metrics").text.splitlines()
    counted = {name for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#") if float(value)}
    of = 'frontend="grpc",model="small"'
    assert {f'weir_text_calls_total{{code="{code}",{of}}}' for code in (200, 400)} <= counted
    assert {f"weir_texts_truncated_total{{{of}}}", 'weir_sent_bytes_total{frontend="http",model="small"}'} <= counted
    assert 'weir_text_calls_total{code="200",frontend="http",model="small"}' in counted


async def test_of_many_items_with_options_of_their_own_only_some_are_under_way() -> None:
    # 40,000 texts with a prompt each were as many requests for vectors, begun in one turn of the loop.
    under_way, most, timeouts = list[str](), 0, list[float]()

    class Waiting:
        async def encode(self, texts: list[str], query: TextQuery) -> Encoded:
            nonlocal most
            under_way.append(texts[0])
            most = max(most, len(under_way))
            timeouts.append(query.timeout or 0.0)
            await asyncio.sleep(0)
            under_way.remove(texts[0])
            return Encoded(np.full((1, 2), float(texts[0]), np.float32), [1], [False])

    encoder = cast(Encodes, Waiting())
    exchange = TextExchange(EmbeddingContext({}, HttpSettings(), 1000, TextCounts()), "http", client="one")
    items: list[Any] = [Item(str(place), TextOptions(prompt=f"{place}: ")) for place in range(1000)]
    ends: list[Any] = (await encode_items(encoder, exchange, items, 30.0, None)).results
    assert [end.made[0] for end in ends] == list(range(1000))
    assert (len(timeouts), most) == (1000, 64)
    assert 0 < min(timeouts) <= max(timeouts) <= 30.0
    late: list[Any] = (await encode_items(encoder, exchange, items[:2], 0.0, None)).results
    assert [type(end).__name__ for end in late] == ["DeadlineExceeded"] * 2
