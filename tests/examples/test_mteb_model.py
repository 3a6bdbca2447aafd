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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    models = folder / "plain", folder / "ranker"
    tiny.sentence_model(models[0], prompts={"query": "who: ", "document": "it: "})
    tiny.model(models[1], labels=1)
    settings: Any = {"executor": "thread", "threads": 1, "device_map": ["cpu"], "calibrate": False}
    with weir.embedding.serve(*models, port=0, cache=str(folder / "cache"), **settings) as server:
        yield server.url


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
