"""What all endpoints of texts do alike, each in the form of errors of its API."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.described import body_faults
from tests.rings import subcases
from tests.text_server.hashing import HashingEncoder
from tests.text_server.served_texts import MAX_TEXTS, Served, Standing, apis_of, described, message_of

from weir.errors import Cancelled, DeadlineExceeded, Draining, InvalidRequest, ModelError, Overloaded
from weir.frontends.http.application import HTTP_FRONTENDS
from weir.protocols import HttpSettings
from weir.text_models.texts import TextOutput
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.metrics import TextCounts
from weir.text_server.texts import TextFacts, TextOptions, TextTask

MAX_BODY = 1000  # bytes
INFINITY_RERANK = "/rerank?of=infinity"
EXAMPLES: dict[str, Any] = {
    path: next(iter(each["post"]["requestBody"]["content"]["application/json"]["examples"].values()))["value"]
    for path, each in described()["paths"].items()
    if "requestBody" in each.get("post", {}) and path != "/vertex"  # whose instances are bodies of the others
} | {INFINITY_RERANK: {"query": "q", "documents": ["a", "b"]}}
ENCODING = sorted(EXAMPLES.keys() - {"/tokenize", "/decode", "/detokenize"})  # those that give their texts to a model
TEI = {"/embed", "/embed_all", "/embed_sparse", "/similarity", "/rerank", "/predict", "/predict_tokens", "/tokenize", "/decode"}  # fmt: skip
COHERE = {"/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank"}
OPENAI = {"/v1/embeddings", "/embeddings", "/classify", "/score", "/detokenize", INFINITY_RERANK}
FORMS = [(TEI, {"error", "error_type"}), (COHERE, {"message", "detail"}), (OPENAI, {"error"}), ({"/encode", "/post", "/rank"}, {"id", "type", "description", "status"})]  # fmt: skip
KEYS = {path: keys for paths, keys in FORMS for path in paths}


@pytest.fixture(scope="module")
def encoder() -> HashingEncoder:
    return HashingEncoder(facts=TextFacts(tasks=tuple(TextTask), labels=tuple("abcdefgh"), outputs=tuple(TextOutput)))


@pytest.fixture(scope="module")
def standing(encoder: HashingEncoder) -> Iterator[Standing]:
    with Standing(encoder, max_body_size=MAX_BODY) as server:
        yield server


def test_every_endpoint_is_here() -> None:
    assert KEYS.keys() == EXAMPLES.keys()


def test_metrics_count_every_endpoint_by_the_codes_of_http() -> None:
    apis = apis_of(EmbeddingContext({}, HttpSettings(), 1, TextCounts()))
    assert {texts.endpoint.name for api in apis for texts in api.texts} <= HTTP_FRONTENDS


ERRORS = [
    (Overloaded("full", retry_after=2.0), 429, "2", "Overloaded"), (Draining("ending"), 503, "1", "Unhealthy"),
    (DeadlineExceeded("late"), 504, None, "Backend"), (ModelError("no"), 500, None, "Backend"),
    (Cancelled("gone"), 499, None, "Backend"), (ValueError("a bug"), 500, None, "Backend"),
]  # fmt: skip


@pytest.mark.parametrize("path", ENCODING)
def test_an_error_of_the_encoder_has_its_status_in_the_form_of_the_api(
    path: str, standing: Standing, encoder: HashingEncoder, caplog: pytest.LogCaptureFixture, handed_over: list[bytes]
) -> None:
    for error, status, wait, kind in ERRORS:
        encoder.error = error
        answer = standing.post(path, EXAMPLES[path], headers={"x-request-id": "r1"})
        encoder.error = None
        wanted = 424 if path in TEI and isinstance(error, ModelError) else status
        assert (answer.status_code, answer.headers["x-request-id"]) == (wanted, "r1"), error
        assert answer.headers.get("retry-after") == wait and answer.json().keys() >= KEYS[path], error
        assert path not in TEI or answer.json()["error_type"] == kind, error
        is_bug = isinstance(error, ValueError)
        assert is_bug == ("a bug" in caplog.text) and (str(error) in message_of(answer)) != is_bug
    assert not handed_over or path == "/embed_all"  # the fast path answers, except with vectors of tokens


SMALL: list[tuple[str, Any]] = [
    *((path, EXAMPLES[path]) for path in sorted(EXAMPLES.keys() - {"/embed_all", "/embed_sparse", "/predict_tokens"})),
    ("/embed?once=1", {"inputs": "a"}), ("/v1/embeddings", {"input": ["a", "b"], "outputs": ["dense", "sparse"]}),
    ("/rerank", {"query": "a", "texts": ["b"] * MAX_TEXTS}), ("/v2/rerank", {"query": "a", "documents": ["b"] * MAX_TEXTS}),
]  # fmt: skip


@subcases(("path", "said"), SMALL)
def test_small_calls_stay_on_the_fast_path(path: str, said: Any, standing: Standing, handed_over: list[bytes]) -> None:
    assert standing.post(path, said).status_code == 200
    assert not handed_over


@subcases("path", ENCODING)
def test_an_error_of_a_text_names_the_field_and_the_place(
    path: str, standing: Standing, encoder: HashingEncoder
) -> None:
    encoder.error = InvalidRequest("is wrong").at("texts", 0)
    answer = standing.post(path, EXAMPLES[path])
    encoder.error = None
    field = next(name for name in ("input", "inputs", "texts", "documents", "data") if name in EXAMPLES[path])
    field += ".source_sentence" if path == "/similarity" else ""
    assert (answer.status_code, message_of(answer)) == (422 if path in TEI else 400, f"{field}[0]: is wrong")


@pytest.mark.parametrize("path", ENCODING)
def test_headers_state_who_calls_and_until_when(path: str, standing: Standing, encoder: HashingEncoder) -> None:
    headers = {"X-Request-Timeout": "2.5", "X-Request-Priority": "3", "X-Client-Id": "me", "X-Request-Id": "r1"}
    assert standing.post(path, EXAMPLES[path], headers=headers).headers.get_list("x-request-id") == ["r1"]
    query = encoder.heard[-1].query
    assert (query.timeout, query.priority, query.client) == (2.5, 3, "me")
    for name, value in (("X-Request-Timeout", "soon"), ("X-Request-Id", "r" * 257)):
        wrong = standing.post(path, EXAMPLES[path], headers={name: value})
        assert wrong.status_code == (422 if path in TEI else 400) and name in message_of(wrong)
        assert "x-request-id" not in wrong.headers


@pytest.mark.parametrize("path", sorted(EXAMPLES.keys() - {INFINITY_RERANK}))  # in that of TEI, whose path it is
def test_a_body_that_cannot_be_read_is_refused(path: str, standing: Standing) -> None:
    invalid = 422 if path in TEI else 400
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"content": b"{"}, invalid, "body: is not JSON"),
        ({"content": b""}, invalid, "body: is not JSON"),
        ({"content": b'{"a": "\xff"}'}, invalid, "body: is not JSON"),
        ({"content": rb'{"a": "\ud800"'}, invalid, "body: is not " + ("JSON" if path == "/encode" else "valid Unicode: byte 7 begins")),
        ({"json": [1]}, invalid, "body: must be an object"),
        ({"json": {}}, invalid, ": is missing" if path not in ("/v1/embed", "/v2/embed") else "texts: must be a list"),
        ({"json": {**EXAMPLES[path], "model": "other"}}, 404, "unknown model 'other'; available: hashing"),
        ({"content": b"x" * (MAX_BODY + 1)}, 413, "must be at most 1000 bytes (max_body_size)"),
    ]  # fmt: skip
    for sent, status, rule in wrong:
        answer = standing.post(path, headers={"x-request-id": "r1"}, **sent)
        assert answer.status_code == status and rule in message_of(answer), (sent, answer.text)
        assert answer.headers.get_list("x-request-id") == ["r1"] and answer.json().keys() >= KEYS[path]
        assert path not in TEI or answer.json()["error_type"] == "Validation"
        assert path not in OPENAI or status != 413 or answer.json()["error"]["code"] == "request_too_large"


@subcases(("path", "said", "options"), [
    ("/v1/embeddings", {"prompt": "query: "}, {"prompt": "query: "}), ("/v1/embeddings", {"prompt_name": "query"}, {"prompt": "query"}),
    ("/v1/embeddings", {"input_type": "query"}, {"prompt": "query"}), ("/v1/embeddings", {"input_type": "search_document"}, {"prompt": "passage"}),
    ("/v1/embeddings", {"task": "retrieval.query"}, {"prompt": "query"}), ("/v1/embeddings", {"input_type": "clustering"}, {}),
    ("/embeddings", {"input_type": "passage"}, {"prompt": "passage"}),
    ("/v1/embeddings", {"instruction": "Find the dam"}, {"prompt": "Instruct: Find the dam\nQuery:"}),
    ("/v1/embeddings", {"instruction": "x", "input_type": "document"}, {"prompt": "passage"}),
    ("/v1/embeddings", {"truncation_direction": "left"}, {"truncate_left": True}), ("/v1/embeddings", {"truncation_side": "left"}, {"truncate_left": True}),
    ("/v1/embeddings", {"truncate_prompt_tokens": 3}, {"max_tokens": 3}), ("/embeddings", {"truncate_prompt_tokens": -1}, {"truncate": True}),
    ("/embed", {"truncate": True, "truncation_direction": "Left"}, {"truncate": True, "truncate_left": True}),
    ("/embed", {"truncate": False, "truncation_direction": "right"}, {"truncate": False, "truncate_left": False}),
    ("/embed", {"prompt_name": "query", "dimensions": 3}, {"prompt": "query", "dimensions": 3}), ("/embed", {"prompt_name": None}, {}),
    ("/v2/embed", {"input_type": "search_query", "truncate": "NONE"}, {"prompt": "query", "truncate": False}),
    ("/v2/embed", {"truncate": "START"}, {"prompt": "passage", "truncate": True, "truncate_left": True}),
    ("/v1/embed", {"truncate": "END"}, {"prompt": "passage", "truncate": True, "truncate_left": False}),
    ("/v1/embed", {"input_type": "clustering", "output_dimension": 4}, {"dimensions": 4}),
    ("/encode", {"prompt": "query", "is_tokenized": None, "show_tokens": True}, {"prompt": "query", "want_tokens": True}),
])  # fmt: skip
def test_options_are_passed_on(path: str, said: Any, options: dict[str, Any], prompted: Standing) -> None:
    assert prompted.post(path, {**EXAMPLES[path], **said}).status_code == 200
    assert prompted.encoder.heard[-1].query.options == TextOptions(**options)


@subcases(("path", "given"), [
    ("/rerank", {"query": "a", "texts": ["b"]}), ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/tokenize", {"inputs": ["b"]}), ("/tokenize", {"prompt": "b"}),
])  # fmt: skip
def test_a_path_of_two_products_is_described_for_both(path: str, given: dict[str, Any]) -> None:
    last = list(given)[-1]
    assert body_faults(described(), path, given) == []
    assert body_faults(described(), path, {**given, last: 5}) and body_faults(described(), path, {"query": "a"})


ODD: tuple[Any, ...] = (
    None, True, 5, -1, 1.5, 1e300, 2**70, "", "x", "\0", [], {}, {"a": 1},
    [None], [True], [5], [-1], [1.5], [2**70], [[]], [[5]], [[2**70]], [{}], [["a", 5]], ["a", ["b"]],
)  # fmt: skip


def fields_of(path: str) -> set[str]:
    """Return the fields that the description of `path` has, and those of its example."""
    known = described()

    def names(schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            schema = known["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return {*schema.get("properties", {})}.union(*map(names, schema.get("anyOf", [])))

    content = known["paths"][path.partition("?")[0]]["post"]["requestBody"]["content"]
    return {*EXAMPLES[path], *names(content["application/json"]["schema"])}


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.keys() - {"/embed_sparse", "/predict_tokens"})
)  # the double makes neither
def test_no_value_of_a_field_is_an_internal_error(path: str, standing: Standing) -> None:
    for field in sorted(fields_of(path)):
        for odd in ODD:
            answer = standing.post(path, {**EXAMPLES[path], field: odd})
            assert answer.status_code < 500 or answer.status_code == 501, (field, odd, answer.text)
            assert answer.status_code == 200 or "\n" not in message_of(answer)


@subcases("path", ENCODING)
def test_a_caller_who_leaves_takes_the_texts_along(path: str, standing: Standing, encoder: HashingEncoder) -> None:
    async def ask(server: Served) -> None:
        encoder.gate, encoder.entered, encoder.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        before = server.counted()
        call = asyncio.ensure_future(server.client.post(path, json=EXAMPLES[path]))
        await asyncio.wait_for(encoder.entered.wait(), 60)
        call.cancel()
        await asyncio.wait((call,))
        await asyncio.wait_for(encoder.left.wait(), 60)
        assert server.counted() == before

    try:
        standing.ask(ask)
    finally:
        encoder.gate = encoder.entered = encoder.left = None
