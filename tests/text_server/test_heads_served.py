"""Servers of tiny models with heads of their own: terms, and labels of tokens, as each text has them alone."""

from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from tests.documentation.pages import ROOT, ask, read_blocks
from tests.text_models import tiny, tiny_tokens
from tests.text_models.graph.test_heads import m3, splade
from tests.text_models.opening import opened
from tests.text_server.protocols.test_tei_grpc import Stub, made
from tests.text_server.test_server import SETTINGS

import weir.embedding

TEXTS = ["first do it", "then do it right and faster than yesterday", "it", "it"]
NAMES = {"0": "O", "1": "B-PER", "2": "I-PER"}


def alone(model: Path, texts: list[str]) -> list[Any]:
    """Return the output of each text, computed one by one."""
    encoder = opened(model, model.parent / "cache", device_map=["cpu"])
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


def test_several_outputs_from_one_request(tmp_path: Path) -> None:
    m3(tmp_path / "m3")
    read = opened(tmp_path / "m3", tmp_path / "cache", device_map=["cpu"], allow_pickle=True)
    texts = [text._replace(outputs=("dense", "sparse", "tokens")) for text in read.preprocess_batch(TEXTS)]
    expected = read.predict(texts)
    settings = {**SETTINGS, "cache": str(tmp_path / "cache"), "allow_pickle": True, "grpc_port": 0}
    with weir.embedding.serve(tmp_path / "m3", **settings) as server, httpx.Client(base_url=server.url) as http:

        def asked(path: str, **body: Any) -> Any:
            return http.post(path, json=body).json()

        wanted = ["tokens", "sparse", "dense"]
        openai = asked("/v1/embeddings", input=TEXTS, outputs=wanted)["data"]
        alone = asked("/v1/embeddings", input=TEXTS, outputs=["sparse"])["data"]
        items = [{"text": text, "outputs": wanted} for text in TEXTS[:2]]
        native = http.post("/infer/m3/batch", json=[*items, {"text": "it", "outputs": ["colour"]}, "it"]).json()
        tensors = ("output", "sparse_indices", "sparse_values", "tokens", "token_counts")
        tensor = {"name": "input", "shape": [4], "datatype": "BYTES", "data": TEXTS}
        oip = asked("/v2/models/m3/infer", inputs=[tensor], outputs=[{"name": name} for name in tensors])
        dense, terms, tokens, root = (
            asked(path, inputs=TEXTS) for path in ("/embed", "/embed_sparse", "/embed_all", "/")
        )
        for block in read_blocks(ROOT / "docs" / "how-to" / "serve-embeddings.md"):
            if block.shown_only and "/embed_sparse" in block.text:
                ask(block, server.url, tmp_path)
        wrong = asked("/v1/embeddings", input="a", outputs=["colour"])["error"]
        cut = asked("/v1/embeddings", input="a", outputs=["sparse"], dimensions=3)["error"]
        with grpc.insecure_channel(server.addresses[1].removeprefix("grpc://")) as channel:
            one = Stub(channel).EmbedEmbedAll(made("EmbedAllRequest", inputs=TEXTS[0])).token_embeddings
    arrays = {each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in oip["outputs"]}
    assert set(arrays) == set(tensors)
    for place, (vector, words, late) in enumerate(expected):
        listed = {"indices": words[:, 0].astype(int).tolist(), "values": openai[place]["sparse"]["values"]}
        assert openai[place]["sparse"] == alone[place]["sparse"] == listed
        assert set(alone[place]) == {"object", "index", "sparse"}
        for found in (openai[place]["sparse"]["values"], [each["value"] for each in terms[place]]):
            np.testing.assert_allclose(found, words[:, 1], atol=1e-4)
        for found in (openai[place]["embedding"], dense[place], root[place], arrays["output"][place]):
            np.testing.assert_allclose(found, vector, atol=1e-4)
        count = arrays["token_counts"][place]
        for found in (openai[place]["tokens"], tokens[place], arrays["tokens"][place][:count]):
            np.testing.assert_allclose(found, late, atol=1e-4)
        assert arrays["sparse_indices"][place][: len(words)].tolist() == listed["indices"]
    np.testing.assert_allclose([each.embeddings for each in one], expected[0][2], atol=1e-4)
    for place in (0, 1):  # each item has its own end
        assert native[place]["output"]["sparse"]["indices"] == openai[place]["sparse"]["indices"]
        np.testing.assert_allclose(native[place]["output"]["tokens"], expected[place][2], atol=1e-4)
    np.testing.assert_allclose(native[3]["output"], dense[2], atol=1e-4)
    rule = "outputs: 'colour': model 'm3' makes dense, sparse, tokens"
    assert native[2]["error"]["message"].startswith(rule)
    assert (wrong["param"], wrong["message"]) == ("outputs", rule)
    assert cut["message"] == "dimensions=3: of dense vectors alone"


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
