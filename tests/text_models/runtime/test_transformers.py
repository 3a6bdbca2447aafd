"""Random checkpoints of transformers' own configuration classes: the onnx runtime gives what transformers gives, in each pooling.

JinaBERT v2 and experts of NomicBERT have no class in transformers; graph/test_families.py compares them with plain numpy.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import late_models, tiny, tiny_tokens
from tests.text_models.graph.running import cosines
from tests.text_models.late_models import DOCUMENTS, QUERIES, SEVERAL
from tests.text_models.opening import results
from tests.text_models.runtime import references
from tests.text_models.runtime.references import EXACT, WITH_TORCH, save
from tests.text_models.tokens.reading import ids

from weir.text_models import ComputingSettings, Pooling, Recipe
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.model import TokenIds, padded_inputs
from weir.text_models.packing import Packing, quantized
from weir.text_models.runtime import Inputs, Runtime, open_runtime
from weir.text_models.texts import JUDGE_AFTER, JUDGE_BEFORE, JUDGE_INSTRUCTION, JUDGE_PAIR, TokenRule

pytestmark = WITH_TORCH

POOLINGS = [Pooling.NONE, Pooling.MEAN, Pooling.MAX, Pooling.CLS, Pooling.SEP, Pooling.WEIGHTED_MEAN, Pooling.MEAN_SQRT]


@pytest.fixture(scope="module", params=references.FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_those_of_transformers(directory: Path, pooling: Pooling, tmp_path: Path) -> None:
    inputs = _inputs(read_checkpoint(directory).architecture.pad_id)
    found, expected = (_opened(directory, kind, pooling, tmp_path).run(inputs)[0] for kind in ("onnx", "torch"))
    kept = inputs.mask > 0 if pooling is Pooling.NONE else slice(None)
    assert cosines(found[kept], expected[kept]).min() >= EXACT
    assert np.abs(found[kept] - expected[kept]).max() < 2e-4


@pytest.mark.parametrize(("kind", "family"), references.ENCODERS.items())
def test_encoders_attend_both_ways(kind: str, family: str, tmp_path: Path) -> None:
    directory = save(tmp_path / "model", family, is_causal=False)
    inputs = _inputs()
    expected = _opened(directory, "torch", Pooling.MEAN, tmp_path).run(inputs)[0]
    tiny.change(directory / "config.json", model_type=kind, is_causal=None)
    found = _opened(directory, "onnx", Pooling.MEAN, tmp_path).run(inputs)[0]
    assert cosines(found, expected).min() >= EXACT
    assert np.abs(found - expected).max() < 1e-5


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_windows_of_encoders_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    window: dict[str, Any] = {
        "is_causal": False,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    }
    directory = save(tmp_path / "model", family, **window)
    inputs = _inputs()
    found, expected = (_opened(directory, kind, Pooling.MEAN, tmp_path).run(inputs)[0] for kind in ("onnx", "torch"))
    assert np.abs(found - expected).max() < 1e-5


def _inputs(pad_id: int = 1) -> Inputs:
    return padded_inputs(drawn(7, 40, 1, 23), pad_id=pad_id, mask_special=False)


def drawn(*counts: int) -> list[TokenIds]:
    """Return texts of so many tokens, always the same."""
    chance = np.random.default_rng(5)
    return [TokenIds(chance.integers(5, references.VOCABULARY, count).astype(np.int32), 0) for count in counts]


def _opened(directory: Path, kind: str, pooling: Pooling, cache: Path) -> Runtime:
    return open_runtime(read_checkpoint(directory), Recipe(pooling), ComputingSettings(runtime=kind, cache=str(cache)))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        *((family, {}) for family in references.CLASSIFIERS),
        *((family, {"classifier_pooling": each}) for family, reads in references.READS.items() for each in reads),
    ],
)
def test_classifiers_are_those_of_transformers(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    directory = save(tmp_path / "model", family, kind="SequenceClassification", num_labels=3, **more)
    assert read_checkpoint(directory).architecture.labels == 3
    texts = drawn(7, 40, 3)
    if family in (
        "qwen2",
        "qwen3",
        "gemma3-causal",
        "llama",
        "mistral",
    ):  # whose tokenizers may append the padding token
        texts.append(TokenIds(np.array([7, 8, 9, 1, 1], np.int32), 0))
    inputs = padded_inputs(texts, pad_id=1, mask_special=False)
    found, expected = (
        _opened(directory, kind, Pooling.CLASSIFICATION, tmp_path).run(inputs)[0] for kind in ("onnx", "torch")
    )
    assert np.abs(found - expected).max() < 1e-4
    assert np.ptp(found, axis=0).max() > 1e-2  # texts differ, by a hundred times what may be off


@pytest.mark.parametrize("family", ["modernbert", "nomic-bert", "gte", "qwen3", "gemma3", "deberta-v3", "mistral"])
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


@pytest.mark.parametrize("family", references.SPARSE)
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_sparse_vectors_are_those_of_sentence_transformers(family: str, strategy: str, tmp_path: Path) -> None:
    import torch
    import transformers
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    name, given = references.FAMILIES[family]
    (tmp_path / "network").mkdir()
    vocabulary = tiny_tokens.write(tmp_path / "network", "bert")
    config = getattr(transformers, f"{name}Config")(
        **{**references.SIZES, **given, "vocab_size": vocabulary, "pad_token_id": 0}
    )
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


@pytest.mark.parametrize("family", references.LABELLERS)
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


def test_a_quantizer_makes_whole_numbers_with_torch(tmp_path: Path) -> None:
    expected = _opened(save(tmp_path, "bert"), "torch", Pooling.MEAN, tmp_path).run(inputs := _inputs())[0]
    tiny.sentence_files(tmp_path, normalize=False, quantized=True)
    found = _opened(tmp_path, "torch", Pooling.MEAN, tmp_path).run(inputs)[0]
    np.testing.assert_array_equal(found, np.round(np.tanh(expected) * 127))


# Scores of pairs are those of sentence-transformers' CrossEncoder, whichever tokenizer a model has.


PAIRS = [("First do it", "then do it right"), ("do", "the river rises and the mill turns"), ("who reads this", "time")]


@pytest.mark.parametrize("family", ["bert", "albert", "deberta-v2"])
@pytest.mark.parametrize(
    ("tokens", "stated"),
    [
        ("bert", {}), ("bert", {"model_input_names": ["input_ids", "attention_mask"]}), ("bert", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("roberta", {}), ("xlm-roberta", {}),
    ],
)  # fmt: skip
def test_pairs_have_the_types_that_the_tokenizer_gives(
    family: str, tokens: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    vocabulary = tiny_tokens.write(tmp_path, tokens)
    tiny.change(tmp_path / "tokenizer_config.json", **stated)
    save(
        tmp_path, family, kind="SequenceClassification", vocab_size=vocabulary, num_labels=1, type_vocab_size=2,
        pad_token_id=1 if family == "roberta" else 0,
    )  # fmt: skip
    try:
        theirs = CrossEncoder(str(tmp_path), device="cpu")
    except TypeError:  # transformers makes no tokenizer of this class of these files
        pytest.skip("transformers has no such tokenizer")
    tokenizer = read_checkpoint(tmp_path).tokenizer()
    theirs.tokenizer.pad_token = theirs.tokenizer.pad_token or "[PAD]"
    if any(theirs.tokenizer(*pair)["input_ids"] != ids(tokenizer.encode([pair], TokenRule(512))[0]) for pair in PAIRS):
        pytest.skip("transformers reads other tokens from these files")
    expected = theirs.predict(PAIRS, activation_fn=None, batch_size=1)
    found = np.concatenate(results(tmp_path, PAIRS))
    import torch

    assert np.abs(torch.sigmoid(torch.tensor(found)).numpy() - expected).max() < 1e-4
    assert np.ptp(found) > 0.01


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_yes_no_is_the_score_of_logits(family: str, tmp_path: Path) -> None:
    import torch
    import transformers
    from sentence_transformers.cross_encoder.modules import LogitScore

    vocabulary = tiny_tokens.write(tmp_path, "bert")
    save(tiny.answering(tmp_path), family, kind="CausalLM", vocab_size=vocabulary, max_position_embeddings=1024)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = read_checkpoint(tmp_path).tokenizer()
    backend, words = tokenizer.backend, tokenizer.vocabulary
    score = LogitScore(true_token_id=words["yes"], false_token_id=words["no"])
    found = np.concatenate(results(tmp_path, PAIRS, pooling="yes-no", max_length=1024))
    for (query, document), own in zip(PAIRS, found, strict=True):
        text = JUDGE_PAIR.format(instruction=JUDGE_INSTRUCTION, query=query, document=document)
        parts = backend.encode_batch([JUDGE_BEFORE, text, JUDGE_AFTER], add_special_tokens=False)
        with torch.no_grad():
            logits = network(torch.tensor([[number for part in parts for number in part.ids]])).logits
        assert abs(float(score({"causal_logits": logits})["scores"].flatten()[0]) - own) < 1e-3
    assert np.ptp(found) > 0.01


# Vectors and scores of late interaction are those of sentence-transformers' MultiVectorEncoder, whichever library saved the model.


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
