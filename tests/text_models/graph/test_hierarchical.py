"""Poolings that no library has, in the graph: the hierarchical one against sums in numpy, and several joined."""

from pathlib import Path

import numpy as np
import pytest
from tests.text_models import tiny
from tests.text_models.graph.running import Array, Running, highest_mean, running

from weir.text_models import Pooling, Recipe
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.graph.building import build, recipe_as_json, recipe_from_json
from weir.text_models.recipe import chosen_recipe, dimensions_of

TEXTS = [np.array([0, *range(5, 5 + count), 2]) for count in (1, 3, 4, 12)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return read_checkpoint(tiny.model(tmp_path_factory.mktemp("models") / "bert", tokenizer=False))


@pytest.fixture(scope="module")
def of_tokens(plain: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> list[Array]:
    whole: Running = running(build(plain, Recipe(Pooling.NONE)), tmp_path_factory.mktemp("graphs") / "none")
    return [vectors[: len(text)] for vectors, text in zip(whole(TEXTS), TEXTS, strict=True)]


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("mask_special", [False, True])
def test_it_is_the_highest_of_the_means_over_windows(
    window: int, mask_special: bool, plain: Checkpoint, of_tokens: list[Array], tmp_path: Path
) -> None:
    recipe = Recipe(Pooling.HIERARCHICAL, mask_special=mask_special, window=window)
    run = running(build(plain, recipe), tmp_path / "graph")
    counted = [vectors[1:-1] if mask_special else vectors for vectors in of_tokens]
    expected = np.stack([highest_mean(vectors, window) for vectors in counted])
    assert np.allclose(run(TEXTS, mask_special=mask_special), expected, atol=1e-5)
    assert np.allclose(run(TEXTS, mask_special=mask_special, width=50), expected, atol=1e-5)


def test_joined_poolings_stand_one_after_the_other(plain: Checkpoint, tmp_path: Path) -> None:
    poolings = (Pooling.MAX, Pooling.CLS, Pooling.MEAN_MAX)
    recipe = Recipe(poolings[0], joined=poolings[1:])
    run = running(build(plain, recipe), tmp_path / "joined")
    alone = [running(build(plain, Recipe(one)), tmp_path / one.value)(TEXTS) for one in poolings]
    assert dimensions_of(plain, recipe) == 4 * tiny.HIDDEN
    assert np.allclose(run(TEXTS), np.concatenate(alone, axis=1), atol=1e-6)
    assert recipe_from_json(recipe_as_json(recipe)) == recipe


def test_what_the_files_join_is_computed(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path / "model", pooling=["cls", "mean"], tokenizer=False))
    recipe = chosen_recipe(checkpoint)
    assert (recipe.poolings, recipe.normalize) == ((Pooling.CLS, Pooling.MEAN), True)
    vectors = running(build(checkpoint, recipe), tmp_path / "graph")(TEXTS)
    assert vectors.shape == (len(TEXTS), 2 * tiny.HIDDEN)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
