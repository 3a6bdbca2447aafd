"""Servers of tiny classifiers: documents are ranked and texts are labelled, by every protocol, as each is by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.rings import spread
from tests.text_models import tiny
from tests.text_models.opening import opened
from tests.text_server.test_server import SETTINGS

import weir.embedding
from weir.errors import SettingsError
from weir.text_models.checkpoint.reading import read_checkpoint

QUERY = "who reads this"
LONG = "the mill turns faster than yesterday, and the river rises"
DOCUMENTS = ["first do it", "a weir holds the water back", "it", LONG, "it"]
LABELS = {"0": "sad", "1": "glad", "2": "mad"}


@pytest.fixture(scope="module", params=spread(tiny.FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of three models of a family: one that ranks, one that labels, and one that does neither."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny.model(folder / "ranker", request.param, labels=1)
    tiny.model(folder / "labeller", request.param, labels=3, id2label=LABELS)
    tiny.sentence_model(folder / "plain", request.param)
    return folder


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[httpx.Client]:
    models = [directory / name for name in ("plain", "ranker", "labeller")]
    with (
        weir.embedding.serve(*models, cache=str(directory / "cache"), **SETTINGS) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        yield client


def logits(model: Path, texts: list[Any]) -> Any:
    """Return the numbers of the classifier of each text or pair, computed one by one."""
    encoder = opened(model, model.parent / "cache", device_map=["cpu"])
    return np.concatenate([np.stack(encoder.predict(encoder.preprocess_batch([text]))) for text in texts])


def test_documents_are_ranked_as_each_pair_is_scored_alone(client: httpx.Client, directory: Path) -> None:
    numbers = logits(directory / "ranker", [(QUERY, document) for document in DOCUMENTS])[:, 0]
    order = sorted(range(len(DOCUMENTS)), key=lambda place: (-numbers[place], place))
    tei = client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}).json()
    by_place = sorted(tei, key=lambda each: each["index"])
    np.testing.assert_allclose([each["score"] for each in by_place], numbers, atol=1e-5)
    said = {"query": QUERY, "documents": DOCUMENTS, "model": "ranker"}
    cohere = client.post("/v2/rerank", json=said).json()["results"]
    assert sorted(each["index"] for each in cohere) == [0, 1, 2, 3, 4]
    scores = [each["relevance_score"] for each in cohere]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-numbers[order])), atol=1e-5)


def test_texts_are_labelled_as_each_is_alone(client: httpx.Client, directory: Path) -> None:
    texts: list[Any] = [DOCUMENTS[0], (DOCUMENTS[1], DOCUMENTS[2])]
    powers = np.exp(logits(directory / "labeller", texts))
    tei = client.post("/predict", json={"inputs": [[texts[0]], list(texts[1])], "model": "labeller"}).json()
    for row, found in zip(powers / powers.sum(axis=1, keepdims=True), tei, strict=True):
        assert [each["score"] for each in found] == sorted((each["score"] for each in found), reverse=True)
        by_label = {each["label"]: each["score"] for each in found}
        np.testing.assert_allclose([by_label.pop(LABELS[str(place)]) for place in range(3)], row, atol=1e-5)
        assert not by_label


def test_labels_of_one_text_as_hosted_pipelines_answer_them(client: httpx.Client, directory: Path) -> None:
    def found(**parameters: Any) -> Any:
        body = {"inputs": DOCUMENTS[0], "parameters": parameters, "model": "labeller"}
        return client.post("/predict", json=body).json()

    plain = client.post("/predict", json={"inputs": DOCUMENTS[0], "model": "labeller"}).json()
    numbers = np.sort(logits(directory / "labeller", [DOCUMENTS[0]])[0])[::-1]
    assert found() == [plain]
    assert found(top_k=1, function_to_apply="softmax") == [plain[:1]]
    np.testing.assert_allclose([each["score"] for each in found(function_to_apply="none")[0]], numbers, atol=1e-5)
    sigmoids = [each["score"] for each in found(top_k=2, function_to_apply="sigmoid")[0]]
    np.testing.assert_allclose(sigmoids, 1 / (1 + np.exp(-numbers[:2])), atol=1e-5)
    assert "top_k" in found(top_k=0)["error"]


def test_a_pair_that_is_too_long_is_cut_or_refused(client: httpx.Client) -> None:
    long = "do it " * 100
    assert client.post("/rerank", json={"query": "a", "texts": [long]}).headers["x-weir-truncated"] == "1"
    refused = client.post("/rerank", json={"query": "a", "texts": ["b", long], "truncate": False})
    assert refused.status_code == 413
    assert refused.json()["error"].startswith("texts[1]: the text has more than the 64 tokens")
    nul = {"query": "a", "documents": ["b", "\0"]}
    refused = client.post("/rerank", json=nul)
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("documents[1]: ")
    assert client.post("/v2/rerank", json=nul).json()["message"].startswith("documents[1]: ")


def test_what_the_files_and_the_settings_state_of_a_classifier(tmp_path: Path) -> None:
    """Its labels may hold together, and it may make vectors."""
    model = tiny.model(tmp_path / "labeller", labels=3, id2label=LABELS, problem_type="multi_label_classification")
    with weir.embedding.serve(model, cache=str(tmp_path / "cache"), **SETTINGS) as server:
        found = {each["label"]: each["score"] for each in httpx.post(f"{server.url}/", json={"inputs": "it"}).json()}
        info = httpx.get(f"{server.url}/info").json()
    expected = 1 / (1 + np.exp(-logits(model, ["it"])[0]))
    np.testing.assert_allclose([found[LABELS[str(place)]] for place in range(3)], expected, atol=1e-5)
    assert info["model_type"]["classifier"]["id2label"] == LABELS
    with weir.embedding.serve(model, pooling="mean", cache=str(tmp_path / "cache"), **SETTINGS) as server:
        assert len(httpx.post(f"{server.url}/embed", json={"inputs": "it"}).json()[0]) == tiny.HIDDEN


def test_only_what_was_trained_to_label_texts_does(tmp_path: Path) -> None:
    few = read_checkpoint(tiny.model(tmp_path / "few", labels=3, id2label={"0": "sad", "1": "glad", "3": "mad"}))
    with pytest.raises(SettingsError, match=r"id2label=.*: must have a text for each number from 0 to 2"):
        print(few.labels)
    assert few.classifies
    of_tokens = tiny.model(tmp_path / "two", labels=3, architectures=["BertForTokenClassification"])
    assert not read_checkpoint(of_tokens).classifies
    assert not read_checkpoint(tiny.model(tmp_path / "three")).classifies
