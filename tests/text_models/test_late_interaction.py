"""Late interaction: vectors of queries and documents are those of PyLate (late.npz, written by late_make_reference.py), and the score of a pair is MaxSim."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.text_models import late_models
from tests.text_models.graph.running import cosines
from tests.text_models.late_models import CASES, DOCUMENTS, QUERIES
from tests.text_models.opening import opened, results

import weir.embedding
from weir.errors import SettingsError
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.late_interaction import LateInteraction, maxsim

EXPECTED = np.load(Path(__file__).parent / "late.npz")
SETTINGS: dict[str, Any] = {"port": 0, "workers": 1, "device_map": ["cpu"], "calibrate": False}


def score(query: Any, document: Any) -> float:
    return float(sum(max(float(one @ other) for other in document) for one in query))


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_pylate(name: str, tmp_path: Path) -> None:
    late_models.pylate(tmp_path, name.partition(",")[0], **CASES[name])
    prompts = read_checkpoint(tmp_path).prompts
    for kind, texts in (("query", QUERIES), ("document", DOCUMENTS)):
        found = results(tmp_path, texts, prompt=prompts[kind])
        assert [len(each) for each in found] == EXPECTED[f"{name}, {kind}, counts"].tolist()
        assert cosines(np.concatenate(found), EXPECTED[f"{name}, {kind}"]).min() > 0.99999


def test_the_score_of_a_pair_is_the_sum_of_the_greatest_products(tmp_path: Path) -> None:
    late_models.pylate(tmp_path)
    prompts = read_checkpoint(tmp_path).prompts
    queries = results(tmp_path, QUERIES, prompt=prompts["query"])
    documents = results(tmp_path, DOCUMENTS, prompt=prompts["document"])
    pairs = [(query, document) for query in QUERIES for document in DOCUMENTS]
    expected = [score(query, document) for query in queries for document in documents]
    found = results(tmp_path, pairs)
    assert all(each.shape == (1,) for each in found)
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5)
    mean = maxsim(queries[0], documents[0], mean=True)
    np.testing.assert_allclose(mean, [expected[0] / len(queries[0])], rtol=1e-5)
    assert maxsim(queries[0], documents[0][:0], mean=False) == 0


def test_every_protocol_ranks_by_maxsim_and_embeds_both_kinds_of_texts(tmp_path: Path) -> None:
    model = late_models.pylate(tmp_path / "model")
    with (
        weir.embedding.serve(model, **SETTINGS, cache=str(tmp_path / "cache")) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        (query,) = http.post("/embed_all", json={"inputs": [QUERIES[0]], "prompt_name": "query"}).json()
        documents = [http.post("/embed_all", json={"inputs": [text]}).json()[0] for text in DOCUMENTS]
        expected = [score(np.array(query), np.array(each)) for each in documents]
        tei = http.post("/rerank", json={"query": QUERIES[0], "texts": DOCUMENTS}).json()
        cohere = http.post("/v1/rerank", json={"query": QUERIES[0], "documents": DOCUMENTS}).json()["results"]
        info = http.get("/info").json()
    assert len(query) == 16
    assert info["similarity_fn_name"] == "maxsim" and "embedding" in info["model_type"]
    for found, key in ((tei, "score"), (cohere, "relevance_score")):
        by_place = sorted(found, key=lambda each: each["index"])
        np.testing.assert_allclose([each[key] for each in by_place], expected, rtol=1e-4)


def test_what_other_libraries_save(tmp_path: Path) -> None:
    late = read_checkpoint(late_models.multi_vector(tmp_path / "multi")).layout.late
    assert late == LateInteraction(
        "find: ", "text: ", query_length=16, document_length=40, expands_to=16, skipped=(",", "!"), mean=True
    )
    late = read_checkpoint(late_models.stanford(tmp_path / "stanford")).layout.late
    assert late is not None
    assert (late.query, late.query_marker) == ("[unused0] ", "[unused0] ")
    assert (late.query_length, late.document_length) == (16, 40)
    (query,) = results(tmp_path / "stanford", ["first do it"], prompt="[unused0] ")
    assert query.shape == (16, late_models.SIZE)


def test_what_cannot_be_right_is_refused(tmp_path: Path) -> None:
    model = late_models.pylate(tmp_path / "model")
    with pytest.raises(SettingsError, match="split=True: texts of late interaction are not read in pieces"):
        weir.embedding.serve(model, split=True, **SETTINGS)
    late_models.multi_vector(tmp_path / "other", query_expansion={"strategy": "fixed", "length": 8, "token": "<pad>"})
    with pytest.raises(SettingsError, match="the vocabulary has no token '<pad>', with which queries are filled up"):
        opened(tmp_path / "other")


def test_several_dense_layers_follow_each_other_with_their_residuals(tmp_path: Path) -> None:
    model = late_models.pylate(tmp_path, **late_models.SEVERAL)
    ids: Any = [[2, 30, 31, 32, 3]]
    (value,) = results(model, ids, pooling="none", normalize=False)
    for layer in read_checkpoint(model).layout.dense:
        out = value @ layer.weight.T + (0 if layer.bias is None else layer.bias)
        value = out if layer.residual is None else out + value @ layer.residual.T
    (found,) = results(model, ids)
    assert found.shape == value.shape == (5, late_models.SIZE)
    assert cosines(found, value / np.linalg.norm(value, axis=-1, keepdims=True)).min() > 0.99999
