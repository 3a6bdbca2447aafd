"""Random checkpoints of transformers' own configuration classes: the onnx runtime gives what transformers gives, in each pooling.

JinaBERT v2 has no class in transformers; graph/test_families.py compares it with plain numpy.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny, tiny_tokens
from tests.text_models.graph.running import cosines
from tests.text_models.opening import results
from tests.text_models.runtime.references import (
    CLASSIFIERS,
    EXACT,
    FAMILIES,
    LABELLERS,
    READS,
    SIZES,
    SPARSE,
    VOCABULARY,
    WITH_TORCH,
    save,
)

from weir.text_models import ComputingSettings, Pooling, Recipe
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.model import TokenIds, padded_inputs
from weir.text_models.packing import Packing, quantized
from weir.text_models.runtime import Runtime, open_runtime

pytestmark = WITH_TORCH

POOLINGS = [Pooling.NONE, Pooling.MEAN, Pooling.MAX, Pooling.CLS, Pooling.SEP, Pooling.WEIGHTED_MEAN, Pooling.MEAN_SQRT]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_those_of_transformers(directory: Path, pooling: Pooling, tmp_path: Path) -> None:
    pad_id = read_checkpoint(directory).architecture.pad_id
    inputs = padded_inputs(drawn(7, 40, 1, 23), pad_id=pad_id, mask_special=False)
    found, expected = (_opened(directory, kind, pooling, tmp_path).run(inputs)[0] for kind in ("onnx", "torch"))
    kept = inputs.mask > 0 if pooling is Pooling.NONE else slice(None)
    assert cosines(found[kept], expected[kept]).min() >= EXACT
    assert np.abs(found[kept] - expected[kept]).max() < 2e-4


def drawn(*counts: int) -> list[TokenIds]:
    """Return texts of so many tokens, always the same."""
    chance = np.random.default_rng(5)
    return [TokenIds(chance.integers(5, VOCABULARY, count).astype(np.int32), 0) for count in counts]


def _opened(directory: Path, kind: str, pooling: Pooling, cache: Path) -> Runtime:
    return open_runtime(read_checkpoint(directory), Recipe(pooling), ComputingSettings(runtime=kind, cache=str(cache)))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        *((family, {}) for family in CLASSIFIERS),
        *((family, {"classifier_pooling": each}) for family, reads in READS.items() for each in reads),
    ],
)
def test_classifiers_are_those_of_transformers(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    directory = save(tmp_path / "model", family, kind="SequenceClassification", num_labels=3, **more)
    assert read_checkpoint(directory).architecture.labels == 3
    texts = drawn(7, 40, 3)
    if family in ("qwen2", "qwen3", "gemma3-causal"):  # whose tokenizers may append the padding token
        texts.append(TokenIds(np.array([7, 8, 9, 1, 1], np.int32), 0))
    inputs = padded_inputs(texts, pad_id=1, mask_special=False)
    found, expected = (
        _opened(directory, kind, Pooling.CLASSIFICATION, tmp_path).run(inputs)[0] for kind in ("onnx", "torch")
    )
    assert np.abs(found - expected).max() < 1e-4
    assert np.ptp(found, axis=0).max() > 0.05  # texts differ


@pytest.mark.parametrize("family", ["modernbert", "nomic-bert", "gte", "qwen3", "gemma3", "deberta-v3"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_texts_are_encoded_as_by_sentence_transformers(family: str, pooling: str, tmp_path: Path) -> None:
    import sentence_transformers

    vocabulary = tiny_tokens.write(tmp_path, "bert")
    save(tmp_path, family, vocab_size=vocabulary, pad_token_id=0)
    tiny.sentence_files(tmp_path, pooling=pooling, prompts={"query": "find: "})
    texts = ["First do it", "then do it right, " * 4, "do"]
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    found = np.stack(results(tmp_path, texts, prompt="query"))
    assert cosines(found, theirs.encode(texts, prompt_name="query")).min() >= EXACT


@pytest.mark.parametrize("whole", [False, True])
def test_routes_are_those_of_sentence_transformers(whole: bool, tmp_path: Path) -> None:
    import torch
    from sentence_transformers import SentenceTransformer, models

    (tmp_path / "network").mkdir()
    vocabulary = tiny_tokens.write(tmp_path / "network", "bert")
    save(tmp_path / "network", "bert", vocab_size=vocabulary, pad_token_id=0)
    tiny.sentence_files(tmp_path / "network")

    def network() -> list[Any]:
        return [models.Transformer(str(tmp_path / "network")), models.Pooling(32, pooling_mode="mean")]

    torch.manual_seed(0)
    heads = [models.Dense(32, size) for size in (20, 12)]
    parts = [[*network(), heads[0]], [*network(), heads[1]]] if whole else [[head] for head in heads]
    router = models.Router.for_query_document(query_modules=parts[0], document_modules=parts[1])
    theirs = SentenceTransformer(modules=[router] if whole else [*network(), router], device="cpu")
    theirs.save_pretrained(str(tmp_path / "model"))
    for route, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        found = np.stack(results(tmp_path / "model", ["First do it", "do"], router=route))
        assert found.shape[1] == {"query": 20, "document": 12}[route]
        assert cosines(found, encode(["First do it", "do"])).min() >= EXACT


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_sparse_vectors_are_those_of_sentence_transformers(family: str, strategy: str, tmp_path: Path) -> None:
    import torch
    import transformers
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    name, given = FAMILIES[family]
    (tmp_path / "network").mkdir()
    vocabulary = tiny_tokens.write(tmp_path / "network", "bert")
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **given, "vocab_size": vocabulary, "pad_token_id": 0})
    network = transformers.AutoModelForMaskedLM.from_config(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight_name, weight in network.named_parameters():
            weight.normal_(0, 0.15)
            if "norm" in weight_name.lower() and weight_name.endswith("weight"):
                weight.add_(1.0)
    network.save_pretrained(tmp_path / "network")
    theirs = SparseEncoder(modules=[MLMTransformer(str(tmp_path / "network")), SpladePooling(strategy)], device="cpu")
    theirs.save_pretrained(str(tmp_path / "model"))
    texts = ["First do it", "then do it right, " * 4, "do"]
    expected = theirs.encode(texts, convert_to_sparse_tensor=False)
    for terms, row in zip(results(tmp_path / "model", texts), expected, strict=True):
        found = np.zeros(vocabulary, np.float32)
        found[terms[:, 0].astype(int)] = terms[:, 1]
        assert cosines(found, row.numpy()) >= EXACT


@pytest.mark.parametrize("family", LABELLERS)
def test_labels_of_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    import torch
    import transformers

    directory = save(tmp_path / "model", family, kind="TokenClassification", num_labels=4)
    checkpoint = read_checkpoint(directory)
    inputs = padded_inputs(drawn(7, 40, 3), pad_id=1, mask_special=False)
    found = open_runtime(
        checkpoint, Recipe(Pooling.TOKEN_LOGITS), ComputingSettings(runtime="onnx", cache=str(tmp_path))
    ).run(inputs)[0]
    network = transformers.AutoModelForTokenClassification.from_pretrained(directory)
    ids, mask = (torch.tensor(each).long() for each in (inputs.ids, inputs.mask))
    with torch.inference_mode():
        expected = network(ids, attention_mask=mask).logits.numpy()
    assert np.abs(found - expected)[inputs.mask > 0].max() < 2e-4


@pytest.mark.parametrize(("family", "kind"), [("bert", "MaskedLM"), ("qwen3", "CausalLM"), ("modernbert", "")])
def test_files_of_transformers_are_served_as_by_sentence_transformers(family: str, kind: str, tmp_path: Path) -> None:
    import sentence_transformers

    vocabulary = tiny_tokens.write(tmp_path, "bert")
    save(tmp_path, family, kind=kind, vocab_size=vocabulary, pad_token_id=0)
    texts = ["First do it", "then do it right, " * 4, "do"]
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    assert cosines(np.stack(results(tmp_path, texts)), theirs.encode(texts)).min() >= EXACT


def test_static_embeddings_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    import sentence_transformers
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    tiny_tokens.write(tmp_path, "bert")
    table = np.random.default_rng(5).normal(size=(tiny_tokens.size("bert"), 24)).astype(np.float32)
    module = StaticEmbedding(Tokenizer.from_file(str(tmp_path / "tokenizer.json")), embedding_weights=table)
    theirs = sentence_transformers.SentenceTransformer(modules=[module], device="cpu")
    theirs.save_pretrained(str(tmp_path / "model"))
    texts = ["First do it", "then do it right, " * 90, "do"]
    assert cosines(np.stack(results(tmp_path / "model", texts)), theirs.encode(texts)).min() >= EXACT


@pytest.mark.parametrize("packing", [Packing.INT8, Packing.UINT8])
def test_integers_in_ranges_are_those_of_sentence_transformers(packing: Packing) -> None:
    from sentence_transformers.util.quantization import quantize_embeddings

    random = np.random.default_rng(5)
    vectors = random.normal(size=(20, 32)).astype(np.float32)
    ranges = np.sort(random.normal(size=(2, 32)), axis=0).astype(np.float32)
    expected = quantize_embeddings(vectors, precision=packing.value, ranges=ranges)
    np.testing.assert_array_equal(quantized(vectors, packing, ranges), expected)
