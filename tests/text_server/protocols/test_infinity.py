"""The endpoints of infinity and vLLM over encoders without a model."""

from typing import Any

import pytest
from tests.text_server.hashing import HashingEncoder, labeller, ranker
from tests.text_server.served_texts import Served, Standing, asked, post

from weir._version import __version__
from weir.batching.settings import BatchingSettings


def test_documents_are_ranked() -> None:
    encoder = ranker()
    answer = post(
        "/rerank",
        {"model": "ranker", "query": "q", "documents": ["bird", "dam", {"text": "weir"}], "top_n": 2},
        encoder,
    ).json()
    assert [(each["index"], each["document"]) for each in answer["results"]] == [(2, None), (1, None)]
    assert (answer["object"], answer["model"]) == ("rerank", "ranker") and answer["usage"]["total_tokens"] == 9
    assert encoder.heard[0].texts[2] == ("q", "weir")


def test_raw_scores_and_documents_are_answered_on_request() -> None:
    said = {"query": "q", "documents": ["bird", "dam"], "raw_scores": True, "return_documents": True}
    assert post("/rerank", said, ranker()).json()["results"] == [
        {"relevance_score": 2.0, "index": 1, "document": "dam"}, {"relevance_score": -2.0, "index": 0, "document": "bird"},
    ]  # fmt: skip


def test_texts_are_labelled() -> None:
    answer = post("/classify", {"input": ["dam", "bird"]}, HashingEncoder(), labeller()).json()
    assert [row[0]["label"] for row in answer["data"]] == ["glad", "sad"]
    assert (answer["object"], answer["model"]) == ("classify", "labeller")
    raw = post("/classify", {"input": ["dam"], "raw_scores": True}, labeller()).json()
    assert [each["score"] for each in raw["data"][0]] == [1.0, 0.0, -1.0]


@pytest.mark.parametrize(("path", "document", "rule"), [
    ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n=-1: must be 1 or more"),
    ("/rerank", {"query": "q", "documents": ["a"] * 51}, "documents: has 51 texts, must have 1 to 50 (max_texts)"),
    ("/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents[0].text: is missing"),
    ("/rerank", {"query": "q", "documents": ["dam", 4]}, "documents[1]: must be a text, is 4"),
    ("/classify", {"input": ["a"]}, "model 'ranker': has no task"),
    ("/classify", {"input": "a"}, "input='a': must be a list"),
])  # fmt: skip
def test_what_is_wrong_is_named(path: str, document: Any, rule: str) -> None:
    encoder = ranker()
    encoder.facts = encoder.facts._replace(tasks=encoder.facts.tasks[:1])
    answer = post(path, document, encoder)
    assert answer.status_code in (400, 422) and rule in str(answer.json())


def test_what_its_client_states_without_being_asked_changes_nothing() -> None:
    stated = {"model": "default/not-specified", "encoding_format": "float", "dimensions": 0, "modality": "text"}
    encoder = HashingEncoder()
    plain = post("/embeddings", {"input": ["dam"]}, encoder).json()
    answer = post("/embeddings", {"input": ["dam"], **stated}, encoder).json()
    assert answer["data"] == plain["data"] and isinstance(answer["id"], str) and isinstance(answer["created"], int)
    ranked = post("/rerank", {"query": "q", "documents": ["dam"], "model": "default/not-specified"}, ranker())
    assert ranked.json()["model"] == "ranker"


def test_models_have_what_its_client_reads() -> None:
    async def ask(server: Served) -> Any:
        return (await server.client.get("/models")).json()

    encoder = ranker()
    encoder.facts = encoder.facts._replace(waiting=lambda: 3)
    encoder.batching = BatchingSettings(max_queue_size=12, max_batch_size=8)
    (card,) = asked(ask, encoder)["data"]
    assert card["stats"] == {"queue_fraction": 0.25, "queue_absolute": 3, "results_pending": 3, "batch_size": 8}
    assert (card["id"], card["owned_by"], card["object"]) == ("ranker", "infinity", "model")
    assert card["capabilities"] == ["rerank", "classify"]


def test_an_empty_document_is_ranked_as_any_other() -> None:
    encoder = ranker()
    encoder.scores = {"dam": [2.0], "": [-3.0]}
    for body in ({"query": "q", "documents": ["dam", ""]}, {"query": "q", "texts": ["dam", ""]}):
        answer = post("/rerank", body, encoder)
        assert answer.status_code == 200, answer.text
        assert encoder.heard[-1].texts == [("q", "dam"), ("q", "")]
    assert post("/rerank", {"query": "", "documents": ["dam"]}, encoder).status_code in (400, 422)


def test_what_vllm_s_clients_send_besides_is_read() -> None:
    with Standing(HashingEncoder()) as server:
        most = server.post("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 7}).json()["error"]
        assert (most["param"], "must be -1, or 1 to 6" in most["message"]) == ("truncate_prompt_tokens", True)
        assert server.post("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": -1}).status_code == 200
        assert server.ask(lambda served: served.client.get("/version")).json() == {"version": __version__}
        assert server.post("/ping").status_code == 200
