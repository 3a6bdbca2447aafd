"""The wrapper for MTEB, on tasks made here and models of a server: `make test-torch`, as mteb brings torch."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tests.text_models import tiny

import weir.embedding

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # theirs

SENTENCES = ["first do it", "then do it right", "do it better", "it is a bird", "who reads this", ""]
SCORES = [4.0, 1.0, 3.0, 0.0, 2.0, 5.0]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    tiny.sentence_model(folder / "plain", prompts={"query": "who: ", "document": "it: "})
    tiny.model(folder / "ranker", labels=1)
    models, settings = (
        (folder / "plain", folder / "ranker"),
        {"executor": "thread", "threads": 1, "device_map": ["cpu"]},
    )
    with weir.embedding.serve(*models, port=0, cache=str(folder / "cache"), calibrate=False, **settings) as server:
        yield server.url


def metadata(kind: str, score: str) -> Any:
    from mteb import TaskMetadata

    about = dict.fromkeys(
        (
            "date",
            "domains",
            "task_subtypes",
            "license",
            "annotations_creators",
            "dialect",
            "sample_creation",
            "bibtex_citation",
        )
    )
    return TaskMetadata(
        name=f"Tiny{kind}", description="made here", reference=None, type=kind, category="t2t", modalities=["text"], eval_splits=["test"],
        eval_langs=["eng-Latn"], main_score=score, dataset={"path": "none/none", "revision": "1"}, **about,
    )  # fmt: skip


def test_an_evaluation_uses_the_vectors_of_the_server(url: str) -> None:
    import mteb
    from datasets import Dataset
    from examples.mteb_model import ServedEncoder
    from mteb.abstasks.sts import AbsTaskSTS
    from scipy.stats import spearmanr

    others = SENTENCES[1:] + SENTENCES[:1]

    class Task(AbsTaskSTS):  # type: ignore[misc]  # not installed where types are checked
        def load_data(self, **options: Any) -> None:
            rows = {"sentence1": SENTENCES, "sentence2": others, "score": SCORES}
            self.dataset, self.data_loaded = {"test": Dataset.from_dict(rows)}, True

    Task.metadata = metadata("STS", "cosine_spearman")
    with ServedEncoder(url, "plain") as model:
        result = mteb.evaluate(model, Task(), cache=None, co2_tracker=False, show_progress_bar=False)
    (found,) = result.task_results[0].scores["test"]
    first, second = (
        np.array(httpx.post(f"{url}/embed", json={"inputs": [text or " " for text in texts]}).json())
        for texts in (SENTENCES, others)
    )
    assert found["cosine_spearman"] == pytest.approx(spearmanr((first * second).sum(1), SCORES)[0])


def test_queries_and_documents_get_their_prompts(url: str) -> None:
    from examples.mteb_model import SENT, ServedEncoder
    from mteb.types import PromptType

    texts = [f"do it {number}" for number in range(SENT + 3)]
    for kind in (PromptType.query, PromptType.document):
        with ServedEncoder(url, "plain") as model:
            vectors = model.encode([{"text": texts[:100]}, {"text": texts[100:]}], prompt_type=kind)
        expected = httpx.post(f"{url}/embed", json={"inputs": texts, "prompt_name": kind.value}).json()
        np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_pairs_get_the_scores_of_the_ranker(url: str) -> None:
    from examples.mteb_model import ServedRanker
    from mteb.models import CrossEncoderProtocol

    with ServedRanker(url, "ranker") as ranker:
        assert isinstance(ranker, CrossEncoderProtocol)
        scores = ranker.predict([{"text": ["who"] * 5}], [{"text": SENTENCES[:5]}])
    ranks = httpx.post(f"{url}/rerank", json={"query": "who", "texts": SENTENCES[:5], "raw_scores": True}).json()
    np.testing.assert_allclose(
        scores, [each["score"] for each in sorted(ranks, key=lambda each: each["index"])], atol=1e-5
    )
