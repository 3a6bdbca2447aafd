"""Vectors and scores of late interaction are those of sentence-transformers' MultiVectorEncoder, whichever library saved the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import late_models
from tests.text_models.graph.running import cosines
from tests.text_models.late_models import DOCUMENTS, QUERIES, SEVERAL
from tests.text_models.opening import results
from tests.text_models.runtime.references import EXACT, WITH_TORCH

from weir.text_models.checkpoint.reading import read_checkpoint

pytestmark = WITH_TORCH


@pytest.mark.parametrize(
    ("saved", "settings"),
    [
        ("multi_vector", {}), ("multi_vector", {"query_expansion": {"strategy": "min", "length": 12, "attend": True}, "query_length": 20}),
        ("multi_vector", {"query_expansion": None, "query_length": 12}),
        ("pylate", {}), ("pylate", SEVERAL), ("pylate", {"prompts": {"query": "find: ", "document": "text: "}, "attend_to_expansion_tokens": True}),
        ("stanford", {}), ("stanford", {"attend_to_mask_tokens": True, "mask_punctuation": False}),
    ],
)  # fmt: skip
def test_queries_documents_and_their_scores(saved: str, settings: dict[str, Any], tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    directory = getattr(late_models, saved)(tmp_path, **settings)
    theirs = MultiVectorEncoder(str(directory), device="cpu")
    prompts = read_checkpoint(directory).prompts
    queries = results(directory, QUERIES, prompt=prompts["query"])
    documents = results(directory, DOCUMENTS, prompt=prompts["document"])
    expected = theirs.encode_query(QUERIES), theirs.encode_document(DOCUMENTS)
    for found, wanted in zip((queries, documents), expected, strict=True):
        assert [len(each) for each in found] == [len(each) for each in wanted]
        assert cosines(np.concatenate(found), np.concatenate([each.cpu().numpy() for each in wanted])).min() >= EXACT
    scores = theirs.similarity(*expected).numpy()
    pairs = [(query, document) for query in QUERIES for document in DOCUMENTS]
    ours = np.concatenate(results(directory, pairs)).reshape(scores.shape)
    assert np.abs(ours - scores).max() < 1e-4


def test_an_empty_query_or_document(tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    directory = late_models.pylate(tmp_path)
    theirs = MultiVectorEncoder(str(directory), device="cpu")
    queries, documents = [*QUERIES[:2], ""], [*DOCUMENTS[:2], ""]
    expected = theirs.similarity(theirs.encode_query(queries), theirs.encode_document(documents)).numpy()
    pairs = [(query, document) for query in queries for document in documents if query or document]
    ours = np.concatenate(results(directory, pairs))
    assert np.abs(ours - expected.flatten()[:-1]).max() < 1e-4
