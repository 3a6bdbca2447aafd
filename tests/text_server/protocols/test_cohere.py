"""Cohere's and Jina's endpoints over encoders without a model."""

from typing import Any

import numpy as np
import pytest
from tests.rings import subcases
from tests.text_server.hashing import ranker, vector_of
from tests.text_server.protocols.test_tei import TEXTS
from tests.text_server.served_texts import Standing, post

from weir.text_models.packing import Packing, quantized

EXPECTED = np.stack([vector_of(text) for text in TEXTS])


def test_vectors_come_in_all_the_types_that_are_requested(plain: Standing) -> None:
    types = ["float", "int8", "ubinary", "base64"]
    said = {"model": "hashing", "texts": TEXTS, "input_type": "search_query", "embedding_types": types}
    answer = plain.post("/v2/embed", said).json()
    assert answer["response_type"] == "embeddings_by_type" and answer["texts"] == TEXTS
    assert list(answer["embeddings"]) == types
    np.testing.assert_array_equal(np.array(answer["embeddings"]["float"], np.float32), EXPECTED)
    assert answer["embeddings"]["int8"] == quantized(EXPECTED, Packing.INT8).tolist()
    assert answer["embeddings"]["ubinary"] == quantized(EXPECTED, Packing.UBINARY).tolist()
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 11}}


def test_the_first_version_answers_a_list(plain: Standing) -> None:
    answer = plain.post("/v1/embed", {"texts": TEXTS}).json()
    assert answer["response_type"] == "embeddings_floats"
    assert answer["meta"]["api_version"] == {"version": "1"}
    np.testing.assert_array_equal(np.array(answer["embeddings"], np.float32), EXPECTED)
    typed = plain.post("/v1/embed", {"texts": TEXTS, "embedding_types": ["int8"]}).json()
    assert list(typed["embeddings"]) == ["int8"]


def test_texts_may_come_as_content(plain: Standing) -> None:
    plain.post("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": text}]} for text in "ab"]})
    assert plain.encoder.heard[-1].texts == ["a", "b"]


def test_documents_are_ranked_with_their_texts_below_the_first_version() -> None:
    said = {"model": "ranker", "query": "q", "documents": ["bird", "dam", "weir"], "top_n": 2}
    answer = post("/v2/rerank", {"max_tokens_per_doc": 4096, **said}, ranker()).json()
    assert [(each["index"], "document" in each) for each in answer["results"]] == [(2, False), (1, False)]
    assert answer["results"][0]["relevance_score"] == pytest.approx(0.98201, abs=1e-5)
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    jina = post("/v1/rerank", said, ranker()).json()
    assert [each["document"] for each in jina["results"]] == [{"text": "weir"}, {"text": "dam"}]
    assert jina["usage"]["total_tokens"] == 9 and jina["model"] == "ranker"


@subcases(("path", "document", "status", "rule"), [
    ("/v2/embed", {"texts": []}, 400, "texts"),
    ("/v2/embed", {"texts": ["a"], "truncate": "LEFT"}, 400, "truncate='LEFT': must be one of NONE, START, END"),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["int4"]}, 400, "embedding_types='int4': must be one of float"),
    ("/v2/embed", {"texts": ["a"], "embedding_types": []}, 400, "embedding_types: must name one or more"),
    ("/v2/embed", {"texts": ["a"], "input_type": "question"}, 400, "input_type='question': must be one of"),
    ("/v2/embed", {"images": ["a"], "input_type": "image"}, 400, "images[0]: is not base64"),
    ("/v2/embed", {"images": ["/9j/"], "input_type": "image"}, 400, "model 'hashing' reads no images"),
    ("/v2/embed", {"texts": ["a"], "inputs": [{}]}, 400, "texts, inputs: only one of them may be given"),
    ("/v2/embed", {"inputs": [{"content": [{"type": "image_url"}]}]}, 400, "inputs[0]"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n=0: must be 1 or more"),
])  # fmt: skip
def test_what_is_wrong_has_coheres_shape(path: str, document: Any, status: int, rule: str, plain: Standing) -> None:
    answer = plain.post(path, document)
    assert answer.status_code == status and rule in answer.json()["message"] == answer.json()["detail"]
