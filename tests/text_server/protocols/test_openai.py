"""OpenAI's endpoints, asked by the stock client and by hand: vectors, errors, and their description."""

import asyncio
import base64
import re
from typing import Any

import httpx
import numpy as np
import pytest
from tests.described import answer_faults, body_faults
from tests.late import openai, openapi_spec_validator
from tests.rings import subcases
from tests.text_server.hashing import DIMENSIONS, HashingEncoder, vector_of
from tests.text_server.served_texts import MAX_TEXTS, Served, Standing, apis_of, asked, described
from tests.text_server.served_texts import post as post_to

from weir.errors import DeadlineExceeded, Draining, ModelError, Overloaded
from weir.frontends.http.application import HTTP_FRONTENDS, code_of
from weir.frontends.http.asgi import described_paths
from weir.protocols import HttpSettings
from weir.text_models.packing import Packing, quantized
from weir.text_server.bert_as_service import http as encode_http
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.metrics import TextCounts
from weir.text_server.protocols import openai as openai_api
from weir.text_server.server import added_by
from weir.text_server.texts import TextFacts, TextOptions, TextQuery

TEXTS = ["first do it", "then do it right", "then do it better"]
EXPECTED = np.stack([vector_of(text) for text in TEXTS])
LONG = "one two three four five six seven"  # more tokens than the encoder reads


def post(encoder: HashingEncoder, document: Any = None, **sent: Any) -> httpx.Response:
    """Return the answer to one call."""
    return post_to("/v1/embeddings", document, encoder, **sent)


async def of_stock_client(server: Served, **said: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        return await client.embeddings.create(model="hashing", **said)


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_the_stock_client_gets_the_vectors(encoding_format: Any) -> None:
    encoder = HashingEncoder()
    said = {"encoding_format": encoding_format} if encoding_format else {}
    answer = asked(lambda server: of_stock_client(server, input=TEXTS, **said), encoder)
    found = [each.embedding for each in answer.data]
    if encoding_format == "base64":
        found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
    np.testing.assert_array_equal(np.array(found, np.float32), EXPECTED)
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("hashing", 11, 11)


def test_the_stock_client_that_blocks_gets_them_too() -> None:
    def block(url: str) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
            names = [model.id for model in client.models.list()]
            return names, client.models.retrieve("second").id, client.embeddings.create(model="second", input=TEXTS[0])

    encoders = HashingEncoder("first"), HashingEncoder("second")
    names, name, answer = asked(lambda server: asyncio.to_thread(block, server.url), *encoders)
    assert names == ["first", "second"] and name == "second"
    np.testing.assert_array_equal(answer.data[0].embedding, EXPECTED[0])


@pytest.mark.parametrize(("given", "texts"), [
    ("one", ["one"]), (["one", "two"], ["one", "two"]), ([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]]),
])  # fmt: skip
def test_input_is_texts_or_token_ids(given: Any, texts: Any) -> None:
    encoder = HashingEncoder()
    answer = asked(lambda server: of_stock_client(server, input=given, user="me", dimensions=3), encoder)
    assert encoder.heard[0].texts == texts
    assert {len(each.embedding) for each in answer.data} == {3}
    assert encoder.heard[0].query == TextQuery("openai", TextOptions(dimensions=3), client="me")


@pytest.mark.parametrize(("said", "chosen"), [
    ({"prompt_name": "query"}, "query"), ({"input_type": "query"}, "query"), ({"input_type": "search_document"}, "passage"),
    ({"task": "retrieval.query"}, "query"), ({"input_type": "clustering"}, None), ({"input_type": "passage"}, "passage"),
    ({"instruction": "Find the dam"}, "Instruct: Find the dam\nQuery:"), ({"instruction": "x", "input_type": "document"}, "passage"),
])  # fmt: skip
def test_the_prompt_is_chosen_by_name_by_the_kind_of_text_or_by_an_instruction(said: Any, chosen: str | None) -> None:
    encoder = HashingEncoder(
        facts=TextFacts(prompts={"query": "Instruct: Given a question\nQuery:", "passage": "passage: "})
    )
    assert post(encoder, {"input": "one", **said}).status_code == 200
    assert encoder.heard[0].query.options.prompt == chosen


@pytest.mark.parametrize("field", ["encoding_format", "embedding_type"])
@pytest.mark.parametrize("packing", ["int8", "uint8", "binary", "ubinary"])
def test_vectors_may_be_packed_after_they_are_cut(field: str, packing: str) -> None:
    answer = post(HashingEncoder(), {"input": TEXTS, field: packing, "dimensions": 5})
    expected = quantized(EXPECTED[:, :5], Packing(packing))
    assert [each["embedding"] for each in answer.json()["data"]] == expected.tolist()


def test_the_vectors_may_be_scaled_to_length_one() -> None:
    found = post(HashingEncoder(), {"input": TEXTS, "normalized": True}).json()["data"]
    np.testing.assert_allclose([np.linalg.norm(each["embedding"]) for each in found], 1, rtol=1e-6)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
@pytest.mark.parametrize("said", [{}, {"encoding_format": "base64"}, {"dimensions": 3}, {"outputs": ["dense"]}])
def test_vectors_have_length_one_unless_the_caller_wants_them_as_they_are(path: str, said: Any) -> None:
    encoder = HashingEncoder()
    encoder.facts = encoder.facts._replace(unscaled=True)
    for texts in ("one", ["one"], ["one", "two", "three"]):

        async def ask(server: Served, texts: Any = texts) -> list[Any]:
            bodies = ({"input": texts, **said}, {"input": texts, "normalized": False, **said})
            return [(await server.client.post(path, json=body)).json()["data"] for body in bodies]

        scaled, plain = (np.array([numbers_of(each["embedding"]) for each in data]) for data in asked(ask, encoder))
        np.testing.assert_allclose(np.linalg.norm(scaled, axis=-1), 1, rtol=1e-6)
        np.testing.assert_allclose(scaled, plain / np.linalg.norm(plain, axis=-1, keepdims=True), atol=1e-6)
        assert abs(np.linalg.norm(plain, axis=-1) - 1).max() > 0.01


def numbers_of(embedding: Any) -> Any:
    return np.frombuffer(base64.b64decode(embedding), "<f4") if isinstance(embedding, str) else np.array(embedding)


def test_infinitys_and_jinas_ways_to_ask_are_answered_alike() -> None:
    async def ask(server: Served) -> list[Any]:
        plain = await server.client.post("/v1/embeddings", json={"input": ["one"]})
        infinity = await server.client.post(
            "/embeddings", json={"input": ["one"], "model": "hashing", "modality": "text"}
        )
        jina = await server.client.post("/v1/embeddings", json={"input": [{"text": "one"}], "truncate": True})
        return [plain.json(), infinity.json(), jina.json(), (await server.client.get("/models")).json()]

    plain, infinity, jina, models = asked(ask, HashingEncoder())
    assert infinity.pop("id").startswith("weir-") and infinity.pop("created") > 0
    assert plain == infinity == jina
    assert [each["id"] for each in models["data"]] == ["hashing"]


def test_the_left_end_of_a_text_may_be_kept() -> None:
    encoder = HashingEncoder()
    post(encoder, {"input": "one", "truncation_direction": "left"})
    assert encoder.heard[0].query.options.truncate_left


def test_a_prompt_may_be_named() -> None:
    encoder = HashingEncoder()
    asked(lambda server: of_stock_client(server, input="one", extra_body={"prompt": "query: "}), encoder)
    assert encoder.heard[0].query.options.prompt == "query: "


@pytest.mark.parametrize(("error", "kind", "code"), [
    (Overloaded("full", retry_after=2.0), "RateLimitError", "rate_limit_exceeded"),
    (Draining("ending"), "InternalServerError", "service_unavailable"),
    (ModelError("no"), "InternalServerError", None),
    (DeadlineExceeded("late"), "APIStatusError", "timeout"),
])  # fmt: skip
def test_what_fails_is_an_error_of_the_stock_client(error: Any, kind: str, code: Any) -> None:
    encoder = HashingEncoder()
    encoder.error = error
    with pytest.raises(getattr(openai, kind)) as caught:
        asked(lambda server: of_stock_client(server, input="text"), encoder)
    assert caught.value.code == code and str(error) in caught.value.message
    if isinstance(error, Overloaded):
        assert caught.value.response.headers["retry-after"] == "2"


WRONG: list[tuple[Any, str | None, str]] = [
    ({}, "input", "is missing"),
    ({"input": []}, "input", "has 0 texts, must have 1 to 50"),
    ({"input": ["a"] * (MAX_TEXTS + 1)}, "input", "has 51 texts"),
    ({"input": ["a", ""]}, "input", r"input\[1\]: must not be empty"),
    ({"input": ""}, "input", "must not be empty"),
    ({"input": ["a", 3]}, "input", r"input\[1\]: must be a text, is 3"),
    ({"input": [3, "a"]}, "input", r"input\[1\]: must be a token id, is 'a'"),
    ({"input": [[3, -1]]}, "input", r"input\[0\]\[1\]: must be a token id"),
    ({"input": [[3], []]}, "input", r"input\[1\]: must not be empty"),
    ({"input": {"a": 1}}, "input", "must be a text or a list"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "must be one of float, base64"),
    ({"input": "a", "dimensions": -1}, "dimensions", "must be 1 or more"),
    ({"input": "a", "user": "x" * 513}, "user", "has 513 characters, must have at most 512"),
    ({"input": "a", "dimensions": 9}, "dimensions", "must be 1 to 8"),
    ({"input": None}, "input", "is missing"),
    ({"input": "a", "a - at `$.b`": 3}, "a - at `$.b`", "unknown field"),
    ({"input": "a", "kind": "query"}, "kind", "unknown field; available: "),
    ({"input": "a", "input_type": "question"}, "input_type", "must be one of query, "),
    ({"input": "a", "prompt_name": "query"}, "prompt_name", "unknown prompt; available: none"),
    ({"input": "a", "prompt": "query: ", "instruction": "Find it."}, "instruction", "only one of them may be given"),
    ({"input": "a", "truncation_direction": "up"}, "truncation_direction", "must be one of left, right"),
    ({"input": "a", "embedding_type": "int4"}, "embedding_type", "must be one of float, base64, int8, uint8, binary, ubinary"),
    ({"input": "a", "late_chunking": True}, "late_chunking", "must be false"),
    ({"input": [{"text": "a", "image": "b"}]}, "input", "must be a text"),
    ([1], None, "must be an object"),
]  # fmt: skip


@subcases(("document", "param", "rule"), WRONG)
def test_what_is_wrong_is_named(document: Any, param: str | None, rule: str, plain: Standing) -> None:
    answer = plain.post("/v1/embeddings", document)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert re.search(rule, error["message"]), error


def test_what_clients_add_that_changes_no_vector_is_ignored(plain: Standing) -> None:
    more: dict[str, Any] = {"safety_identifier": "x", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    bodies = (
        {"input": "a"},
        {"input": "a", "prompt_cache_key": "y", **more},
        {"input": "a", "input_type": None, "best": None},
    )
    first, second, third = (plain.post("/v1/embeddings", body).json() for body in bodies)
    assert first == second == third


def test_an_unknown_model_is_not_found_as_openai_says_it() -> None:
    async def ask(server: Served) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            with pytest.raises(openai.NotFoundError) as caught:
                await client.embeddings.create(model="other", input="a")
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("other")
        assert server.counted()["weir_text_calls_total", "", "openai", "404"] == 2

    asked(ask, HashingEncoder())


def test_a_text_that_was_cut_is_named(plain: Standing) -> None:
    long = "one two three four five six seven"
    answer = plain.post("/v1/embeddings", {"input": ["short", long, long]})
    assert answer.json()["truncated"] == [1, 2] and answer.headers["x-weir-truncated"] == "2"
    refused = plain.post("/v1/embeddings", {"input": ["short", long], "truncate": False})
    assert refused.status_code == 400 and "input[1]: has 7 tokens" in refused.json()["error"]["message"]
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "truncated" not in plain.post("/v1/embeddings", {"input": "short"}).json()


def test_vectors_of_tokens_have_no_place_in_its_shape() -> None:
    answer = post(HashingEncoder(per_token=True), {"input": "a b"})
    assert answer.status_code == 400 and "has no task embed; it has embed_all" in answer.json()["error"]["message"]


def test_the_line_counts_them_by_the_codes_of_http() -> None:
    assert {openai_api.NAME, encode_http.NAME} <= HTTP_FRONTENDS
    assert code_of(openai_api.NAME, Overloaded) == "429" and code_of(encode_http.NAME, None) == "200"


def test_calls_and_texts_are_counted() -> None:
    async def ask(server: Served) -> Any:
        await server.client.post("/v1/embeddings", json={"input": TEXTS})
        await server.client.post("/v1/embeddings", json={"input": []})
        await server.client.post("/encode", json={"id": 1, "texts": ["one two three four five six seven"]})
        return server.counted()

    assert asked(ask, HashingEncoder()) == {
        ("weir_text_calls_total", "hashing", "openai", "200"): 1,
        ("weir_text_calls_total", "", "openai", "400"): 1,
        ("weir_text_calls_total", "hashing", "encode", "200"): 1,
        ("weir_texts_total", "hashing", "openai"): 3,
        ("weir_texts_total", "hashing", "encode"): 1,
        ("weir_texts_truncated_total", "hashing", "openai"): 0,
        ("weir_texts_truncated_total", "hashing", "encode"): 1,
    }


def test_a_large_answer_is_made_in_a_thread_and_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.text_server.http.LONG_ANSWER", 100)
    monkeypatch.setattr("weir.protocols.offloading.LONG_ANSWER", 100)
    monkeypatch.setattr("weir.protocols.response.LONG_COMPRESSION", 100)
    encoder = HashingEncoder()
    texts = [f"text {number}" for number in range(MAX_TEXTS)]
    answer = post(encoder, json={"input": texts}, headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert [len(each["embedding"]) for each in answer.json()["data"]] == [DIMENSIONS] * MAX_TEXTS


@subcases(("method", "path", "status", "code", "rule"), [
    ("POST", "/v1/chat/completions", 404, "unknown_url", "unknown path; available: POST /v1/score, POST /v1/embed, POST /v1/rerank, POST /v1/embeddings, GET /v1/models, GET /v1/models/{model}"),
    ("GET", "/v1/", 404, "unknown_url", "/v1/: unknown path"),
    ("GET", "/v1/embeddings", 405, "method_not_allowed", "/v1/embeddings: takes POST only"),
    ("POST", "/v1/models", 405, "method_not_allowed", "takes GET only"),
    ("DELETE", "/v1/models/hashing", 405, "method_not_allowed", "takes GET only"),
])  # fmt: skip
def test_what_is_not_there_is_refused_in_its_shape(
    method: str, path: str, status: int, code: str, rule: str, plain: Standing
) -> None:
    answer = plain.ask(lambda server: server.client.request(method, path, headers={"x-request-id": "r1"}))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert rule in error["message"] and error["param"] is None
    assert answer.headers["x-request-id"] == "r1"
    assert (answer.headers.get("allow") is not None) == (status == 405)


def test_the_stock_client_shows_the_reason() -> None:
    async def ask(server: Served) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match=r"available: .*POST /v1/embeddings") as caught:
                await client.chat.completions.create(model="any", messages=[])
            assert caught.value.code == "unknown_url"
            long: Any = {"input": "a b c d e f g", "extra_body": {"truncate": False}}
            with pytest.raises(openai.BadRequestError, match=r"input\[0\]: has 7 tokens") as refused:
                await client.embeddings.create(model="hashing", **long)
            assert refused.value.code == "context_length_exceeded"

    asked(ask, HashingEncoder())


@subcases(("said", "place"), [
    (rb'{"input": ["a", "\ud800"]}', "input[1]"), (rb'{"input": "\ud800"}', "input"),
    (rb'{"input": "a", "user": "\ud800"}', "user"),
])  # fmt: skip
def test_half_of_a_surrogate_pair_is_named_by_its_place(said: bytes, place: str, plain: Standing) -> None:
    error = plain.post("/v1/embeddings", content=said).json()["error"]
    assert error["message"].startswith(f"{place}: is not valid Unicode: character 0 is half of a surrogate pair")
    assert error["param"] == place.partition("[")[0]


def test_every_route_is_described_and_no_other() -> None:
    added = added_by(apis_of(EmbeddingContext({}, HttpSettings(), 1, TextCounts())))
    refused = "/v1/{path}"  # of whatever is none of the others
    aliases = {"/", "/invocations"}  # of one of TEI's, as the first model decides
    paths = {each.shown_path for each in added.endpoints}
    aliases.add("/v1/score")
    assert paths == {refused, *aliases, *described_paths(added.endpoints)}


def test_the_description_is_valid() -> None:
    openapi_spec_validator.validate(described())


@pytest.mark.parametrize(("body", "rule"), [(body, rule) for body, _, rule in WRONG])
def test_the_description_refuses_what_the_server_refuses(body: Any, rule: str) -> None:
    of_this_server = (
        "51 texts",
        "1 to 8",
        "available: none",
        "must be one of query, ",
        "only one of them may be given",
    )  # its number of texts, its vectors
    assert bool(body_faults(described(), "/v1/embeddings", body)) != rule.endswith(of_this_server)


@pytest.mark.parametrize("body", [
    {"input": "a"}, {"input": ["a", "b"]}, {"input": [3, 4]}, {"input": [[3], [4, 5]], "model": None},
    {"input": "a", "encoding_format": "base64", "dimensions": 4, "user": "me", "truncate": True, "prompt": "query: ", "store": False},
])  # fmt: skip
def test_answers_are_as_described(body: Any, plain: Standing) -> None:
    async def ask(server: Served) -> None:
        document, client = described(), server.client
        assert body_faults(document, "/v1/embeddings", body) == []
        answers = {
            "/v1/embeddings": [
                await client.post("/v1/embeddings", json=each) for each in (body, {"input": LONG}, {"input": 3})
            ],
            "/v1/models": [await client.get("/v1/models")],
            "/v1/models/{model}": [await client.get("/v1/models/hashing"), await client.get("/v1/models/other")],
        }
        for path, found in answers.items():
            for answer in found:
                assert answer_faults(document, path, answer) == [], answer.text

    plain.ask(ask)
