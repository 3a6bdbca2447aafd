"""What a checkpoint cannot do is said before a graph is made, naming the setting and the rule."""

from pathlib import Path

import pytest
from tests.embedding import tiny

from weir.embedding.checkpoint.reading import Checkpoint, read_checkpoint
from weir.embedding.recipe import Pooling, Precision, Recipe, dimensions_of
from weir.errors import SettingsError


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a model of three layers of 32 without any head."""
    return read_checkpoint(tiny.model(tmp_path_factory.mktemp("models") / "bert", tokenizer=False, pooler=False))


@pytest.mark.parametrize(
    ("recipe", "device", "said"),
    [
        (Recipe(Pooling.MEAN, layers=(-4,)), "cpu", "layers: -4: must be -3 to -1: the model has 3 layers"),
        (Recipe(Pooling.MEAN, layers=(-1, 0)), "cpu", "layers: 0: must be -3 to -1"),
        (Recipe(Pooling.MEAN, layers=()), "cpu", "must name at least one layer"),
        (Recipe(Pooling.POOLER), "cpu", "pooling='pooler': .* no weights of a pooler"),
        (Recipe(Pooling.CLASSIFICATION), "cpu", "pooling='classification': .* no weights of a classifier"),
        (Recipe(Pooling.REGRESSION), "cpu", "pooling='regression': .* no weights of a classifier"),
        (Recipe(Pooling.MEAN, dimensions=33), "cpu", "dimensions=33: must be from 1 to 32"),
        (Recipe(Pooling.MEAN, dimensions=0), "cpu", "dimensions=0: must be from 1 to 32"),
        (Recipe(Pooling.MEAN, precision=Precision.BF16), "cpu", "precision='bf16': .* torch"),
        (Recipe(Pooling.MEAN, precision=Precision.INT8), "cuda", "precision='int8': .* on GPUs"),
    ],
)
def test_it_is_refused(recipe: Recipe, device: str, said: str, bare: Checkpoint) -> None:
    with pytest.raises(SettingsError, match=said):
        dimensions_of(bare, recipe, device)


def test_dimensions_are_those_of_the_layers_and_what_follows(bare: Checkpoint, tmp_path: Path) -> None:
    assert dimensions_of(bare, Recipe(Pooling.NONE)) == 32
    assert dimensions_of(bare, Recipe(Pooling.MEAN_MAX, layers=(-1, -2))) == 128
    assert dimensions_of(bare, Recipe(Pooling.MEAN_MAX, layers=(-1, -2), dimensions=5)) == 5
    dense = read_checkpoint(tiny.sentence_model(tmp_path / "dense", dense=20, labels=3, tokenizer=False))
    assert dimensions_of(dense, Recipe(Pooling.MEAN)) == 20
    assert dimensions_of(dense, Recipe(Pooling.NONE)) == 32
    assert dimensions_of(dense, Recipe(Pooling.CLASSIFICATION)) == 3
    with pytest.raises(SettingsError, match=r"make vectors of 64 numbers, and the dense layer .* reads 32"):
        dimensions_of(dense, Recipe(Pooling.MEAN_MAX))
