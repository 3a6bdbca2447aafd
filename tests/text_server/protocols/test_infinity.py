"""The endpoints of infinity and vLLM over encoders without a model."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.rings import subcases
from tests.text_server.hashing import HashingEncoder, labeller, ranker
from tests.text_server.served_texts import Standing, asked, post

from weir._version import __version__
from weir.batching import BatchingSettings
from weir.errors import InvalidRequest


@pytest.fixture(scope="module")
def ranking() -> Iterator[Standing]:
    with Standing(ranker(), HashingEncoder()) as server:
        yield server


def test_documents_are_ranked(ranking: Standing) -> None:
    said = {"model": "ranker", "query": "q", "documents": ["bird", "dam", {"text": "weir"}]}
    answer = ranking.post("/rerank", {"top_n": 2, **said}).json()
    assert [(each["index"], each["document"]) for each in answer["results"]] == [(2, None), (1, None)]
    assert (answer["object"], answer["model"]) == ("rerank", "ranker") and answer["usage"]["total_tokens"] == 9
    assert ranking.encoder.heard[-1].texts[2] == ("q", "weir")
    shown = ranking.post("/rerank", {"raw_scores": True, "return_documents": True, **said}).json()["results"]
    assert [(each["relevance_score"], each["index"], each["document"]) for each in shown] == [
        (4.0, 2, "weir"), (2.0, 1, "dam"), (-2.0, 0, "bird"),
    ]  # fmt: skip


def test_texts_are_labelled() -> None:
    with Standing(HashingEncoder(), labeller()) as server:
        answer = server.post("/classify", {"input": ["dam", "bird"]}).json()
        raw = server.post("/classify", {"input": ["dam"], "raw_scores": True}).json()
    assert [row[0]["label"] for row in answer["data"]] == ["glad", "sad"]
    assert (answer["object"], answer["model"]) == ("classify", "labeller")
    assert [each["score"] for each in raw["data"][0]] == [1.0, 0.0, -1.0]


@subcases(("path", "document", "rule"), [
    ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n=-1: must be 1 or more"),
    ("/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents[0].text: is missing"),
    ("/classify", {"input": ["a"]}, "model 'ranker': has no task"),
    ("/classify", {"input": "a"}, "input='a': must be a list"),
])  # fmt: skip
def test_what_is_wrong_is_named(path: str, document: Any, rule: str) -> None:
    encoder = ranker()
    encoder.facts = encoder.facts._replace(tasks=encoder.facts.tasks[:1])
    answer = post(path, document, encoder)
    assert answer.status_code in (400, 422) and rule in str(answer.json())


def test_what_its_client_states_without_being_asked_changes_nothing(ranking: Standing) -> None:
    stated = {"model": "default/not-specified", "encoding_format": "float", "dimensions": 0, "modality": "text"}
    plain = ranking.post("/embeddings", {"input": ["dam"]}).json()
    answer = ranking.post("/embeddings", {"input": ["dam"], **stated}).json()
    assert answer["data"] == plain["data"] and isinstance(answer["id"], str) and isinstance(answer["created"], int)
    ranked = ranking.post("/rerank", {"query": "q", "documents": ["dam"], "model": "default/not-specified"})
    assert ranked.json()["model"] == "ranker"


def test_models_have_what_its_client_reads() -> None:
    encoder = ranker()
    encoder.facts = encoder.facts._replace(waiting=lambda: 3)
    encoder.batching = BatchingSettings(max_queue_size=12, max_batch_size=8)
    (card,) = asked(lambda server: server.client.get("/models"), encoder).json()["data"]
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


# The bodies of vLLM's example examples/pooling/score/score_api_online.py, and those with earlier names.
PAIRS: list[tuple[Any, list[tuple[str, str]]]] = [
    ({"queries": "q", "documents": "dam"}, [("q", "dam")]),
    ({"queries": "q", "documents": ["dam", "bird"]}, [("q", "dam"), ("q", "bird")]),
    ({"text_1": ["p", "q"], "text_2": ["dam", "weir"]}, [("p", "dam"), ("q", "weir")]),
    ({"queries": "q", "items": [{"content": [{"type": "text", "text": "dam"}]}]}, [("q", "dam")]),
    ({"data_1": "q", "data_2": "dam", "use_activation": False, "truncate_prompt_tokens": 3}, [("q", "dam")]),
]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_pairs_are_scored_as_by_vllm(path: str) -> None:
    encoder = ranker()
    with Standing(HashingEncoder(), encoder) as server:
        for body, pairs in PAIRS:
            answer = server.post(path, body).json()
            assert (answer["object"], answer["model"]) == ("list", "ranker")
            assert [each["index"] for each in answer["data"]] == list(range(len(pairs)))
            assert encoder.heard[-1].texts == pairs
        assert encoder.heard[-1].query.options.max_tokens == 3 and answer["data"][0]["score"] == 2.0


def test_without_a_model_that_ranks_the_score_is_the_cosine() -> None:
    with Standing(HashingEncoder()) as server:
        for body in ({"queries": "a", "documents": ["b", "a"]}, {"queries": ["b", "a"], "documents": ["a", "a"]}):
            scores = [each["score"] for each in server.post("/score", body).json()["data"]]
            assert scores[1] == pytest.approx(1.0, abs=1e-6) and scores[0] < 0.999
        wrong = server.post("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]})
        assert "queries: has 2 texts, must have 1, or as many as documents: 3" in wrong.json()["error"]["message"]


@subcases(("body", "place", "rule"), [
    ({"queries": "a", "documents": ["b", "c"]}, 2, "queries[0]: has 7 tokens"),
    ({"queries": ["a", "b"], "documents": ["c", "d"]}, 3, "queries[1]: has 7 tokens"),
    ({"data_1": "a", "data_2": ["b", "c"]}, 1, "data_2[1]: has 7 tokens"),
    ({"queries": "a", "items": ["b", {"content": []}]}, 0, "items={'content': []}: must be an object"),
    ({"queries": "a"}, 0, "documents: is missing"),
    ({"queries": "a", "documents": ["b", ""]}, 0, "documents[1]: must not be empty"),
])  # fmt: skip
def test_the_text_at_fault_is_named_by_its_side(body: Any, place: int, rule: str) -> None:
    encoder = HashingEncoder()
    encoder.error = InvalidRequest("has 7 tokens").at("texts", place)
    assert post("/score", body, encoder).json()["error"]["message"].startswith(rule)


def test_tokens_are_shown_and_put_together_as_by_vllm() -> None:
    with Standing(HashingEncoder()) as server:
        shown = server.post("/tokenize", {"prompt": "one two", "return_token_strs": True}).json()
        assert (shown["count"], shown["max_model_len"], shown["token_strs"]) == (3, 6, ["<s>", "one", "two"])
        bare = server.post("/tokenize", {"prompt": "one two", "add_special_tokens": False}).json()
        assert (bare["tokens"], bare["token_strs"]) == (shown["tokens"][1:], None)
        assert server.post("/detokenize", {"tokens": [0, 4, 5]}).json() == {"prompt": "0 4 5"}
        assert server.post("/tokenize", {"prompt": 3}).json()["error"]["message"].startswith("prompt=3: ")
        assert server.ask(lambda served: served.client.get("/version")).json() == {"version": __version__}
        assert server.post("/ping").status_code == 200
