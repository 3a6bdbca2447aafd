"""Heads beside the classifier: SPLADE, BGE-M3's, ColBERT's, and labels of tokens; each against plain numpy over the vectors of the tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.text_models import tiny
from tests.text_models.checkpoint.test_weights import save as save_pickle
from tests.text_models.graph.reference import Network, gelu, tanh_gelu
from tests.text_models.graph.running import Array, cosines, running
from tests.text_models.opening import opened, results

from weir.errors import SettingsError
from weir.text_models import Pooling, Recipe
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.graph.building import build
from weir.text_models.model import TextEncoder, terms
from weir.text_models.recipe import chosen_recipe, further_poolings
from weir.text_models.texts import JUDGE_AFTER, JUDGE_BEFORE, JUDGE_INSTRUCTION, JUDGE_PAIR, Tokenized, TokenRule

TEXTS = [np.array([2, 30, 41, 30, 3]), np.array([2, 3]), np.array([2, 77, 8, 90, 31, 5, 3])]
random = np.random.default_rng(5)


def drawn(*shape: int) -> Array:
    return random.normal(0, 0.3, shape).astype(np.float32)


def with_weights(directory: Path, more: dict[str, Array], **config: Any) -> Path:
    """Add weights and keys of config.json to a model."""
    weights = load_file(directory / "model.safetensors")
    tiny.save(directory / "model.safetensors", {**weights, **more})
    return tiny.change(directory / "config.json", **config)


def modules(directory: Path, *named: tuple[str, str], **configs: dict[str, Any]) -> Path:
    """Write modules.json, and the config.json of each folder."""
    listed = [{"idx": at, "name": str(at), "path": path, "type": kind} for at, (path, kind) in enumerate(named)]
    (directory / "modules.json").write_text(json.dumps(listed))
    for folder, config in configs.items():
        path = directory / folder.replace("at_", "")
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
    return directory


def tokens_of(checkpoint: Checkpoint, folder: Path) -> list[Array]:
    """Return the last layer's vectors of the tokens of each text."""
    found = running(build(checkpoint, Recipe(Pooling.NONE)), folder)(TEXTS)
    return [found[place, : len(text)] for place, text in enumerate(TEXTS)]


# The names of a language model's head: dense, norm, bias of the words.
WORD_HEADS = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
    "xlm-roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    "modernbert": ("head.dense", "head.norm", "decoder.bias"),
    "deberta-v2": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    "albert": ("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
    "electra": ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
}
INNER = {"albert": 16, "electra": 16}  # the size of the embeddings of words, where that is not the hidden size


def splade(directory: Path, family: str, **pooling: str) -> tuple[Checkpoint, dict[str, Array]]:
    """Write a model with a language model's head, whose matrix is that of the embeddings, and a SpladePooling."""
    tiny.model(directory, family, tokenizer=False)
    count = json.loads((directory / "config.json").read_text())["vocab_size"]
    dense, normal, bias = WORD_HEADS[family]
    inner = INNER.get(family, 32)
    head = {f"{dense}.weight": drawn(inner, 32), f"{dense}.bias": drawn(inner), bias: drawn(count)}
    with_weights(directory, head | {f"{normal}.weight": 1 + drawn(inner), f"{normal}.bias": drawn(inner)})
    kinds = [f"sentence_transformers.sparse_encoder.models.{name}" for name in ("MLMTransformer", "SpladePooling")]
    modules(directory, ("", kinds[0]), ("1_SpladePooling", kinds[1]), at_1_SpladePooling=pooling)
    return read_checkpoint(directory), load_file(directory / "model.safetensors")


def heads_of(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the heads that a checkpoint has."""
    return [name for name in ("words", "weights", "tokens", "labels") if getattr(checkpoint.heads, name) is not None]


@pytest.mark.parametrize(
    ("strategy", "function"), [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu"), ("sum", "log1p_relu")]
)
@pytest.mark.parametrize("family", WORD_HEADS)
def test_splade(family: str, strategy: str, function: str, tmp_path: Path) -> None:
    checkpoint, weights = splade(tmp_path / "model", family, pooling_strategy=strategy, activation_function=function)
    recipe = chosen_recipe(checkpoint)
    assert recipe.pooling is Pooling.SPARSE
    assert heads_of(checkpoint) == ["words"]
    found = running(build(checkpoint, recipe), tmp_path / "graph")(TEXTS)
    dense, normal, bias = WORD_HEADS[family]
    table = next(weights[name] for name in weights if "word_embeddings" in name or "tok_embeddings" in name)
    network = Network(tmp_path / "model")
    for tokens, row in zip(tokens_of(checkpoint, tmp_path / "tokens"), found, strict=True):
        value = (tanh_gelu if family == "albert" else gelu)(network.linear(tokens, dense))
        numbers = network.layer_norm(value, normal) @ table.T + weights[bias]
        logs = np.log1p(np.maximum(numbers, 0))
        logs = np.log1p(logs) if function == "log1p_relu" else logs
        np.testing.assert_allclose(row, logs.max(axis=0) if strategy == "max" else logs.sum(axis=0), atol=1e-4)


def m3(directory: Path) -> tuple[Checkpoint, dict[str, Array]]:
    """Write a model with the heads of BGE-M3, and return them."""
    tiny.sentence_model(directory, "xlm-roberta", pooling="cls")
    own = np.random.default_rng(5)  # the heads are the same whichever tests ran before
    shapes = {"sparse.weight": (1, 32), "sparse.bias": (1,), "late.weight": (24, 32), "late.bias": (24,)}
    heads = {name: own.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, file in (("sparse", "sparse_linear.pt"), ("late", "colbert_linear.pt")):
        save_pickle(directory / file, {part: heads[f"{name}.{part}"] for part in ("weight", "bias")})
    return read_checkpoint(directory, allow_pickle=True), heads


def test_the_heads_of_bge_m3(tmp_path: Path) -> None:
    checkpoint, heads = m3(tmp_path / "model")
    assert heads_of(checkpoint) == ["weights", "tokens"]
    assert chosen_recipe(checkpoint).pooling is Pooling.CLS
    sparse = running(build(checkpoint, Recipe(Pooling.SPARSE)), tmp_path / "sparse")(TEXTS)
    late = running(build(checkpoint, Recipe(Pooling.TOKENS)), tmp_path / "late")(TEXTS)
    for place, tokens in enumerate(tokens_of(checkpoint, tmp_path / "tokens")):
        weights = np.maximum(tokens @ heads["sparse.weight"].T + heads["sparse.bias"], 0)
        np.testing.assert_allclose(sparse[place, : len(tokens)], weights, atol=1e-5)
        vectors = tokens @ heads["late.weight"].T + heads["late.bias"]
        assert cosines(late[place, : len(tokens)], vectors).min() > 0.99999
        np.testing.assert_allclose(np.linalg.norm(late[place, : len(tokens)], axis=1), 1, atol=1e-5)
        assert not late[place, len(tokens) :].any()


def test_terms_have_the_largest_weight_of_a_token_and_no_special_ones() -> None:
    weights = np.array([[9], [0.5], [2], [0], [1], [9]], np.float32)
    assert terms(weights, np.array([0, 7, 5, 8, 7, 2]), np.array([0, 2])).tolist() == [[5, 2], [7, 1]]
    assert terms(np.array([0, 0.25, 0, 3], np.float32), np.array([1]), np.array([0])).tolist() == [[1, 0.25], [3, 3]]
    assert terms(np.zeros(4, np.float32), np.array([1]), np.array([0])).shape == (0, 2)


def test_a_mask_that_a_text_spells_out_is_a_term(tmp_path: Path) -> None:
    m3(tmp_path / "model")
    tokenizer = read_checkpoint(tmp_path / "model").tokenizer()
    assert tokenizer.vocabulary["<mask>"] in tokenizer.special_ids
    assert tokenizer.unweighted_ids == {tokenizer.vocabulary[name] for name in ("<s>", "</s>", "<pad>", "<unk>")}
    model = opened(tmp_path / "model", tmp_path / "cache", pooling="sparse", allow_pickle=True)
    (text,) = model.preprocess_batch(["first <mask> it do"])
    weights = np.ones((len(text.ids), 1), np.float32)
    assert set(terms(weights, text.ids, model._unweighted_ids)[:, 0]) == set(text.ids) - tokenizer.unweighted_ids


class Counted:
    """A session that counts its passes, in place of the one that a model has."""

    def __init__(self, model: TextEncoder) -> None:
        runtime: Any = model._runtimes[False]
        self._session, self.passes = runtime._session, 0
        runtime._session = self

    def run(self, names: list[str], feeds: Any) -> Any:
        self.passes += 1
        return self._session.run(names, feeds)


def test_one_pass_makes_all_outputs_of_bge_m3(tmp_path: Path) -> None:
    checkpoint, _ = m3(tmp_path / "model")
    texts = ["do it right", "do it, do it, do it"]
    tokenized = checkpoint.tokenizer().encode(texts, TokenRule(64))
    ids = [np.frombuffer(each.ids, "<i4") for each in tokenized if isinstance(each, Tokenized)]
    expected = {
        name: results(tmp_path / "model", texts, tmp_path, pooling=name, allow_pickle=True)
        for name in ("cls", "sparse", "tokens")
    }
    for each, numbers in zip(expected["sparse"], ids, strict=True):
        assert set(each[:, 0]) <= set(numbers[1:-1].tolist())
        assert (each[:, 1] > 0).all()
    # The first token has no vector.
    assert [each.shape for each in expected["tokens"]] == [(len(numbers) - 1, 24) for numbers in ids]
    model = opened(tmp_path / "model", tmp_path, allow_pickle=True)
    read = model.preprocess_batch(texts)
    counted = Counted(model)
    both = model.predict([text._replace(outputs=("dense", "sparse", "tokens")) for text in read])
    assert counted.passes == 1
    for place, found in enumerate(both):
        assert cosines(found[0], expected["cls"][place]) > 0.99999
        np.testing.assert_allclose(found[1], expected["sparse"][place], atol=1e-5)
        np.testing.assert_allclose(found[2], expected["tokens"][place], atol=1e-5)
    dense, (tokens,) = model.predict([read[0], read[1]._replace(outputs=("tokens",))])
    assert counted.passes == 2  # texts that ask for different outputs share a pass
    np.testing.assert_allclose(dense, both[0][0], atol=1e-6)
    np.testing.assert_allclose(tokens, both[1][2], atol=1e-6)
    assert further_poolings(checkpoint, chosen_recipe(checkpoint)) == (Pooling.SPARSE, Pooling.TOKENS)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_dense_model_gives_the_vectors_of_tokens_that_it_pools(pooling: str, tmp_path: Path) -> None:
    tiny.sentence_model(tmp_path / "model", "bert", pooling=pooling)
    tokens = opened(tmp_path / "model", tmp_path, pooling="none")
    model = opened(tmp_path / "model", tmp_path)
    for text in ("do it right", "it"):
        (read,) = model.preprocess_batch([text])
        ((vectors,),) = model.predict([read._replace(outputs=("tokens",))])
        dense, vector = model.predict([read, read])[0], model.predict([read._replace(outputs=("dense",))])[0][0]
        np.testing.assert_allclose(vectors, tokens.predict([read])[0], atol=1e-5)
        np.testing.assert_allclose(vector, dense, atol=1e-6)
        pooled = vectors[0] if pooling == "cls" else vectors.mean(axis=0)
        assert cosines(dense, pooled) > 0.99999


def test_pickled_heads_are_not_read_unless_they_may(tmp_path: Path) -> None:
    m3(tmp_path / "model")
    checkpoint = read_checkpoint(tmp_path / "model")
    assert heads_of(checkpoint) == []
    rule = "has no head for it: sparse_linear.pt, colbert_linear.pt are pickles, which --allow-pickle reads"
    with pytest.raises(SettingsError, match=rule):
        build(checkpoint, Recipe(Pooling.SPARSE))
    assert checkpoint.content_hash() != read_checkpoint(tmp_path / "model", allow_pickle=True).content_hash()


@pytest.mark.parametrize("kind", ["colbert", "pylate"])
def test_vectors_of_tokens(kind: str, tmp_path: Path) -> None:
    weight = drawn(16, 32)
    if kind == "colbert":
        directory = tiny.model(tmp_path / "model", "bert", tokenizer=False)
        recipe = Recipe(Pooling.TOKENS, dimensions=8)
        checkpoint = read_checkpoint(with_weights(directory, {"linear.weight": weight}))
        assert heads_of(checkpoint) == ["tokens"]
    else:
        directory = tiny.model(tmp_path / "model", "modernbert", tokenizer=False)
        named = (("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense"))
        dense = {"in_features": 32, "out_features": 16, "bias": False}
        modules(directory, *named, at_1_Dense=dense | {"activation_function": "torch.nn.modules.linear.Identity"})
        tiny.save(directory / "1_Dense" / "model.safetensors", {"linear.weight": weight})
        checkpoint = read_checkpoint(directory)
        recipe = chosen_recipe(checkpoint)
        assert (recipe.pooling, recipe.dimensions) == (Pooling.TOKENS, None)
    found = running(build(checkpoint, recipe), tmp_path / "graph")(TEXTS)
    for place, tokens in enumerate(tokens_of(checkpoint, tmp_path / "tokens")):
        expected = (tokens @ weight.T)[:, : recipe.dimensions]
        assert cosines(found[place, : len(tokens)], expected).min() > 0.99999


@pytest.mark.parametrize("family", ["bert", "distilbert", "xlm-roberta", "electra", "deberta-v3"])
def test_labels_of_tokens(family: str, tmp_path: Path) -> None:
    directory = tiny.model(tmp_path / "model", family, tokenizer=False)
    weight, bias = drawn(4, 32), drawn(4)
    with_weights(
        directory, {"classifier.weight": weight, "classifier.bias": bias}, architectures=["AnyForTokenClassification"]
    )
    checkpoint = read_checkpoint(directory)
    assert checkpoint.architecture.labels == 0
    assert chosen_recipe(checkpoint).pooling is Pooling.TOKEN_LOGITS
    found = running(build(checkpoint, chosen_recipe(checkpoint)), tmp_path / "graph")(TEXTS)
    for place, tokens in enumerate(tokens_of(checkpoint, tmp_path / "tokens")):
        np.testing.assert_allclose(found[place, : len(tokens)], tokens @ weight.T + bias, atol=1e-4)


def test_heads_that_a_model_lacks_or_that_do_not_fit(tmp_path: Path) -> None:
    plain = read_checkpoint(tiny.model(tmp_path / "plain", tokenizer=False))
    for pooling in (Pooling.SPARSE, Pooling.TOKENS, Pooling.TOKEN_LOGITS):
        with pytest.raises(SettingsError, match=f"pooling='{pooling.value}': .* has no head for it"):
            build(plain, Recipe(pooling))
    wrong = with_weights(tiny.model(tmp_path / "wrong", tokenizer=False), {"linear.weight": drawn(16, 31)})
    with pytest.raises(SettingsError, match=r"must hold 'linear.weight' of the shape \[any, 32\]"):
        _ = read_checkpoint(wrong).heads
    checkpoint, _ = splade(tmp_path / "sparse", "bert")
    with pytest.raises(SettingsError, match="terms and labels have no dimensions to cut"):
        build(checkpoint, Recipe(Pooling.SPARSE, dimensions=1))
    other, _ = splade(tmp_path / "other", "bert", pooling_strategy="mean")
    with pytest.raises(SettingsError, match="pooling_strategy='mean, relu': must be max or sum"):
        _ = other.heads


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3-causal"])
def test_a_classifier_on_the_last_token_passes_over_appended_padding(family: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.model(tmp_path / "model", family, labels=3, pad_token_id=1))
    run = running(build(checkpoint, Recipe(Pooling.LOGITS)), tmp_path / "graph")
    plain, padded = run(TEXTS), run([np.append(text, [1] * place) for place, text in enumerate(TEXTS)])
    np.testing.assert_allclose(padded, plain, atol=1e-5)
    alone = run([np.array([1]), np.array([1, 1])])
    np.testing.assert_allclose(alone[0], alone[1], atol=1e-5)
    counted = read_checkpoint(tiny.model(tmp_path / "none", family, labels=3))
    run = running(build(counted, Recipe(Pooling.LOGITS)), tmp_path / "another")
    assert np.abs(run([np.append(TEXTS[0], 1)]) - run(TEXTS[:1])).max() > 1e-3


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_how_much_likelier_yes_is_than_no(family: str, tmp_path: Path) -> None:
    directory = tiny.answering(tiny.model(tmp_path / "model", family, max_position_embeddings=1024))
    checkpoint = read_checkpoint(directory)
    words = checkpoint.tokenizer().vocabulary
    table = load_file(directory / "model.safetensors")["embed_tokens.weight"]
    pair = ("what is it", "it is a weir")
    (found,) = results(directory, [pair], tmp_path, pooling="yes-no", max_length=1024)
    text = JUDGE_PAIR.format(instruction=JUDGE_INSTRUCTION, query=pair[0], document=pair[1])
    parts = [JUDGE_BEFORE, text, JUDGE_AFTER]
    ids = [each.ids for each in checkpoint.tokenizer().backend.encode_batch(parts, add_special_tokens=False)]
    last = running(build(checkpoint, Recipe(Pooling.SEP)), tmp_path / "last")([np.concatenate(ids)])[0]
    np.testing.assert_allclose(found, [last @ (table[words["yes"]] - table[words["no"]])], rtol=1e-4)
    separate = with_weights(directory, {"lm_head.weight": drawn(*table.shape)})
    assert results(separate, [pair], tmp_path, pooling="yes-no", max_length=1024)[0] != pytest.approx(found)


def test_models_that_cannot_answer_yes_or_no(tmp_path: Path) -> None:
    for family, rule in (("bert", "is not a decoder"), ("qwen3", "has no tokens for yes and no")):
        checkpoint = read_checkpoint(tiny.model(tmp_path / family, family))
        with pytest.raises(SettingsError, match=rule):
            build(checkpoint, Recipe(Pooling.YES_NO))
