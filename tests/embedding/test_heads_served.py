"""Servers of tiny models with heads of their own: terms, and labels of tokens, as each text has them alone."""

from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from tests.embedding import tiny, tiny_tokens
from tests.embedding.graph.test_heads import splade
from tests.embedding.test_server import SETTINGS
from tests.embedding.test_tei_grpc import Stub, made

import weir.embedding
from weir.embedding.model import TextEncoder

TEXTS = ["first do it", "then do it right and faster than yesterday", "it", "it"]
NAMES = {"0": "O", "1": "B-PER", "2": "I-PER"}


def alone(model: Path, texts: list[str]) -> list[Any]:
    """Return the output of each text, computed one by one."""
    encoder = TextEncoder(str(model), cache=str(model.parent / "cache"), devices=["cpu"])
    encoder.load_shared()
    encoder.load()
    return [encoder.predict(encoder.preprocess_batch([text]))[0] for text in texts]


def test_terms_over_http_and_grpc(tmp_path: Path) -> None:
    splade(tmp_path / "splade", "bert", pooling_strategy="max", activation_function="relu")
    tiny_tokens.write(tmp_path / "splade", "bert")
    expected = alone(tmp_path / "splade", TEXTS)
    with weir.embedding.serve(tmp_path / "splade", cache=str(tmp_path / "cache"), grpc_port=0, **SETTINGS) as server:
        found = httpx.post(f"{server.url}/embed_sparse", json={"inputs": TEXTS}).json()
        assert httpx.post(server.url, json={"inputs": TEXTS}).json() == found
        refused = httpx.post(f"{server.url}/embed", json={"inputs": "it"}).json()
        with grpc.insecure_channel(server.addresses[1].removeprefix("grpc://")) as channel:
            one = Stub(channel).EmbedEmbedSparse(made("EmbedSparseRequest", inputs=TEXTS[0])).sparse_embeddings
    for text, terms in zip(found, expected, strict=True):
        assert [each["index"] for each in text] == terms[:, 0].astype(int).tolist()
        np.testing.assert_allclose([each["value"] for each in text], terms[:, 1], atol=1e-4)
    assert [each.index for each in one] == [each["index"] for each in found[0]]
    assert "model 'splade': has no task embed; it has embed_sparse" in refused["error"]


def test_labels_of_tokens(tmp_path: Path) -> None:
    model = tiny.model(tmp_path / "namer", labels=3, id2label=NAMES, architectures=["BertForTokenClassification"])
    logits = alone(model, TEXTS[:1])[0]
    with weir.embedding.serve(model, cache=str(tmp_path / "cache"), **SETTINGS) as server:
        said = {"inputs": TEXTS[0], "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}
        found = httpx.post(f"{server.url}/predict_tokens", json=said).json()
    powers = np.exp(logits)
    shares = (powers / powers.sum(axis=1, keepdims=True))[1:-1]  # without the special tokens
    assert [each["word"] for each in found] == TEXTS[0].split()
    assert [each["entity"] for each in found] == [NAMES[str(place)] for place in shares.argmax(axis=1)]
    np.testing.assert_allclose([each["score"] for each in found], shares.max(axis=1), atol=1e-4)
