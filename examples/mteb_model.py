"""A model of a server as MTEB evaluates models: its vectors, and its scores for reranking.

    weir embed serve ./bge-small-en ./reranker
    python -m examples.mteb_model http://localhost:8000 bge-small-en STSBenchmark NFCorpus

or, in a program of your own:

    with ServedEncoder("http://localhost:8000", "bge-small-en") as model:
        mteb.evaluate(model, mteb.get_tasks(tasks=["STSBenchmark"]))

Texts are sent as bulk work, so an evaluation costs the server's other callers little. It needs mteb (`pip install mteb`).
"""

import base64
import sys
from collections.abc import Iterable
from typing import Any, Self

import httpx
import mteb
import numpy as np
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction

SENT = 256  # texts in one request


class _Served:
    """A model called `model` of the server at `url`; `key` is its API key, if it asks for one."""

    def __init__(self, url: str, model: str, *, key: str | None = None, timeout: float = 600.0) -> None:
        headers = {"x-weir-class": "bulk", "x-request-timeout": str(timeout)}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout + 10)
        self._model = model
        fields = {"name": f"weir/{model}", "revision": "served", "similarity_fn_name": ScoringFunction.COSINE}
        self.mteb_model_meta = ModelMeta.create_empty(fields)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the connections."""
        self._client.close()

    def _post(self, path: str, **body: Any) -> Any:
        return self._client.post(path, json={"model": self._model, **body}).raise_for_status().json()


class ServedEncoder(_Served, AbsEncoder):  # type: ignore[misc]  # not installed where types are checked
    """A model of vectors. Queries and documents get the model's own prompts."""

    def encode(self, inputs: Iterable[Any], *, prompt_type: Any = None, **others: Any) -> Any:
        """Return the vectors of the texts in `inputs`."""
        kind = {} if prompt_type is None else {"input_type": prompt_type.value}
        vectors: list[Any] = []
        texts = _texts(inputs)
        for start in range(0, len(texts), SENT):
            answer = self._post("/v1/embeddings", input=texts[start : start + SENT], encoding_format="base64", **kind)
            vectors += [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer["data"]]
        return np.stack(vectors)


class ServedRanker(_Served):
    """A cross-encoder: MTEB's tasks of reranking give it pairs."""

    def predict(self, inputs1: Iterable[Any], inputs2: Iterable[Any], **others: Any) -> Any:
        """Return the score of each pair of a query and a document."""
        pairs = list(zip(_texts(inputs1), _texts(inputs2), strict=True))
        scores: list[float] = []
        for start in range(0, len(pairs), SENT):
            found = self._post("/predict", inputs=pairs[start : start + SENT], raw_scores=True)
            scores += [labels[0]["score"] for labels in found]
        return np.array(scores)


def _texts(inputs: Iterable[Any]) -> list[str]:
    # An empty text has no vector at OpenAI's endpoint, and some data sets have such.
    return [text or " " for batch in inputs for text in batch["text"]]


if __name__ == "__main__":
    url, model, *tasks = sys.argv[1:]
    with ServedEncoder(url, model) as encoder:
        print(mteb.evaluate(encoder, mteb.get_tasks(tasks=tasks)).to_dataframe())
