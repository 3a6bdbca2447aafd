"""What is computed of a text: names of poolings, today's and those of bert-as-service."""

from pathlib import Path

import pytest
from tests.rings import subcases
from tests.text_models import tiny

from weir.errors import SettingsError
from weir.text_models import BERT_AS_SERVICE_NAMES, Pooling, Precision, Recipe, pooling_named, poolings_named
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.recipe import dimensions_of


@subcases("pooling", Pooling)
def test_a_pooling_is_found_by_its_name(pooling: Pooling) -> None:
    assert pooling_named(pooling.value) is pooling
    assert pooling_named(pooling.value.upper()) is pooling or pooling.value.upper() in BERT_AS_SERVICE_NAMES


@subcases(("name", "pooling"), BERT_AS_SERVICE_NAMES.items())
def test_the_old_names_are_understood(name: str, pooling: Pooling) -> None:
    assert pooling_named(name) is pooling


def test_an_unknown_pooling_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match="pooling='median': must be one of none, max, mean"):
        pooling_named("median")


def test_several_are_joined_unless_one_stands_alone() -> None:
    assert poolings_named("cls + REDUCE_MEAN") == (Pooling.CLS, Pooling.MEAN)
    assert poolings_named("none") == (Pooling.NONE,)
    with pytest.raises(SettingsError, match="'mean\\+none': none cannot be joined with other poolings"):
        poolings_named("mean+none")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a model of three layers of 32 without any head."""
    return read_checkpoint(tiny.model(tmp_path_factory.mktemp("models") / "bert", tokenizer=False, pooler=False))


@subcases(
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
    with pytest.raises(SettingsError, match=r"make vectors of 64 numbers, but the dense layer .* takes 32"):
        dimensions_of(dense, Recipe(Pooling.MEAN_MAX))
