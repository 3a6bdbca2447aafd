"""OpenAI's endpoints, asked by the stock client and by hand: vectors, errors, and their description."""

import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.described import answer_faults, body_faults
from tests.late import openai, openapi_spec_validator
from tests.rings import subcases
from tests.text_server.hashing import DIMENSIONS, HashingEncoder, vector_of
from tests.text_server.served_texts import MAX_TEXTS, Served, Standing, apis_of, described, post, served

from weir.errors import DeadlineExceeded, Draining, ModelError, Overloaded
from weir.frontends.http.asgi import described_paths
from weir.protocols import HttpSettings
from weir.text_models.packing import Packing, quantized
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.metrics import TextCounts
from weir.text_server.server import added_by
from weir.text_server.texts import TextOptions, TextQuery

TEXTS = ["first do it", "then do it right", "then do it better"]
EXPECTED = np.stack([vector_of(text) for text in TEXTS])
LONG = "one two three four five six seven"  # more tokens than the encoder reads
PATH = "/v1/embeddings"


@asynccontextmanager
async def stock(*encoders: HashingEncoder) -> AsyncIterator[tuple["openai.AsyncOpenAI", Served]]:
    async with (
        served(*encoders) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client, server


def numbers_of(embedding: Any) -> Any:
    return np.frombuffer(base64.b64decode(embedding), "<f4") if isinstance(embedding, str) else np.array(embedding)


async def test_the_stock_client_gets_the_vectors() -> None:
    encoder = HashingEncoder()
    async with stock(encoder) as (client, _):
        for form in (openai.NOT_GIVEN, "float", "base64"):
            named: dict[str, Any] = {"encoding_format": form}
            answer = await client.embeddings.create(model="hashing", input=TEXTS, **named)
            np.testing.assert_array_equal([numbers_of(each.embedding) for each in answer.data], EXPECTED)
            assert [each.index for each in answer.data] == [0, 1, 2]
            assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("hashing", 11, 11)
        inputs: list[Any] = ["one", ["one", "two"], [5, 6, 7], [[5, 6], [7]]]
        for given, texts in zip(inputs, [["one"], ["one", "two"], [[5, 6, 7]], [[5, 6], [7]]], strict=True):
            answer = await client.embeddings.create(model="hashing", input=given, user="me", dimensions=3)
            assert {len(each.embedding) for each in answer.data} == {3}
            query = TextQuery("openai", TextOptions(dimensions=3), client="me", route="/v1/embeddings")
            assert encoder.heard[-1] == (texts, query)


@subcases("field", ["encoding_format", "embedding_type"])
def test_vectors_may_be_packed_after_they_are_cut(field: str, plain: Standing) -> None:
    for packing in ("int8", "uint8", "binary", "ubinary"):
        answer = plain.post(PATH, {"input": TEXTS, field: packing, "dimensions": 5})
        expected = quantized(EXPECTED[:, :5], Packing(packing))
        assert [each["embedding"] for each in answer.json()["data"]] == expected.tolist()


@pytest.mark.parametrize("path", [PATH, "/embeddings"])
def test_vectors_have_length_one_unless_the_caller_wants_them_as_they_are(path: str, plain: Standing) -> None:
    scaled = plain.post(path, {"input": TEXTS, "normalized": True}).json()["data"]  # the model's vectors are not
    np.testing.assert_allclose([np.linalg.norm(each["embedding"]) for each in scaled], 1, rtol=1e-6)
    encoder = HashingEncoder()
    encoder.facts = encoder.facts._replace(unscaled=True)
    with Standing(encoder) as server:
        for said in ({}, {"encoding_format": "base64"}, {"dimensions": 3}, {"outputs": ["dense"]}):
            for texts in ("one", ["one"], ["one", "two", "three"]):
                unit, plain_ones = (
                    np.array([numbers_of(each["embedding"]) for each in server.post(path, body).json()["data"]])
                    for body in ({"input": texts, **said}, {"input": texts, "normalized": False, **said})
                )
                np.testing.assert_allclose(np.linalg.norm(unit, axis=-1), 1, rtol=1e-6)
                lengths = np.linalg.norm(plain_ones, axis=-1, keepdims=True)
                np.testing.assert_allclose(unit, plain_ones / lengths, atol=1e-6)
                assert abs(lengths - 1).max() > 0.01


def test_infinitys_and_jinas_ways_to_ask_are_answered_alike(plain: Standing) -> None:
    first = plain.post(PATH, {"input": ["one"]}).json()
    infinity = plain.post("/embeddings", {"input": ["one"], "model": "hashing", "modality": "text"}).json()
    assert infinity.pop("id").startswith("weir-") and infinity.pop("created") > 0
    assert first == infinity == plain.post(PATH, {"input": [{"text": "one"}], "truncate": True}).json()


async def test_what_fails_is_an_error_of_the_stock_client() -> None:
    encoder = HashingEncoder()
    errors: list[tuple[Exception, type[openai.APIStatusError], str | None]] = [
        (Overloaded("full", retry_after=2.0), openai.RateLimitError, "rate_limit_exceeded"),
        (Draining("ending"), openai.InternalServerError, "service_unavailable"),
        (ModelError("no"), openai.InternalServerError, None), (DeadlineExceeded("late"), openai.APIStatusError, "timeout"),
    ]  # fmt: skip
    async with stock(encoder) as (client, server):
        for error, kind, code in errors:
            encoder.error = error
            with pytest.raises(kind) as caught:
                await client.embeddings.create(model="hashing", input="text")
            assert caught.value.code == code and str(error) in caught.value.message
            assert caught.value.response.headers.get("retry-after") == {"full": "2", "ending": "1"}.get(str(error))
        encoder.error = None
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.embeddings.create(model="other", input="a")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        assert server.counted()["weir_text_calls_total", "", "openai", "404"] == 2
        with pytest.raises(openai.NotFoundError, match=r"available: .*POST /v1/embeddings") as missing:
            await client.chat.completions.create(model="any", messages=[])
        assert missing.value.code == "unknown_url"
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]: has 7 tokens") as long:
            await client.embeddings.create(model="hashing", input=LONG, extra_body={"truncate": False})
        assert long.value.code == "context_length_exceeded"


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
    ({"input": {"a": 1}}, "input", "must be a text, is"),
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
    ({"input": "a", "truncate_prompt_tokens": 7}, "truncate_prompt_tokens", "must be -1, or 1 to 6"),
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
    first = plain.post(PATH, {"input": "a"}).json()
    for said in ({"prompt_cache_key": "y", **more}, {"input_type": None, "best": None}):
        assert plain.post(PATH, {"input": "a", **said}).json() == first


def test_a_text_that_was_cut_is_named(plain: Standing) -> None:
    answer = plain.post(PATH, {"input": ["short", LONG, LONG]})
    assert answer.json()["truncated"] == [1, 2] and answer.headers["x-weir-truncated"] == "2"
    refused = plain.post(PATH, {"input": ["short", LONG], "truncate": False})
    error = refused.json()["error"]
    assert refused.status_code == 400 and "input[1]: has 7 tokens" in error["message"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "truncated" not in plain.post("/v1/embeddings", {"input": "short"}).json()


async def test_calls_and_texts_are_counted() -> None:
    async with served(HashingEncoder()) as server:
        await server.client.post(PATH, json={"input": TEXTS})
        await server.client.post(PATH, json={"input": []})
        await server.client.post("/encode", json={"id": 1, "texts": [LONG]})
        counted = server.counted()
    assert counted == {
        ("weir_text_calls_total", "hashing", "openai", "200"): 1,
        ("weir_text_calls_total", "", "openai", "400"): 1,
        ("weir_text_calls_total", "hashing", "encode", "200"): 1,
        ("weir_texts_total", "hashing", "openai"): 3,
        ("weir_texts_total", "hashing", "encode"): 1,
        ("weir_texts_truncated_total", "hashing", "openai"): 0,
        ("weir_texts_truncated_total", "hashing", "encode"): 1,
    }


def test_a_large_answer_is_made_in_a_thread_and_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.text_server.http.LONG_RESPONSE", 100)
    monkeypatch.setattr("weir.protocols.offloading.LONG_RESPONSE", 100)
    monkeypatch.setattr("weir.protocols.response.LONG_COMPRESSION", 100)
    texts = [f"text {number}" for number in range(MAX_TEXTS)]
    answer = post(PATH, {"input": texts}, headers={"accept-encoding": "gzip"})
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


def test_every_route_is_described_and_no_other() -> None:
    added = added_by(apis_of(EmbeddingContext({}, HttpSettings(), 1, TextCounts())))
    more = {"/v1/{path}", "/", "/invocations", "/v1/score"}  # whatever is none of the others, and aliases
    assert {each.shown_path for each in added.endpoints} == {*more, *described_paths(added.endpoints)}


def test_the_description_is_valid() -> None:
    openapi_spec_validator.validate(document := described())
    referred = re.findall(
        r'"#/components/schemas/([^"]+)"', json.dumps(document)
    )  # which the validator does not look up
    assert {*referred} <= document["components"]["schemas"].keys()


@pytest.mark.parametrize(("body", "rule"), [(body, rule) for body, _, rule in WRONG])
def test_the_description_refuses_what_the_server_refuses(body: Any, rule: str) -> None:
    limits = "51 texts", "1 to 8", "available: none", "one of query, ", "-1, or 1 to 6", "only one of them may be given"
    assert bool(body_faults(described(), "/v1/embeddings", body)) != rule.endswith(
        limits
    )  # of this server, which it does not know


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
