"""Each architecture and each pooling against transformers and sentence-transformers (vectors.npz, made by make_reference.py)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.text_models.graph.random_models import FAMILIES, HEADS, LABELS, Case, cases, second_texts, texts, write_model
from tests.text_models.graph.running import Array, Running, cosines, running

from weir.text_models import Pooling, Precision, Recipe
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.graph.building import build

VECTORS = np.load(Path(__file__).parent / "vectors.npz")
EXACT, HALF, EIGHTH = 0.99999, 0.999, 0.98  # the least cosine in fp32 and fp16, and the least mean in int8
ALL = [pytest.param(family, case, id=f"{family}, {case.name}") for family in FAMILIES for case in cases(family)]

Reading = Callable[[str, Recipe], Checkpoint]


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Reading:
    """Return the model of a family that has what a recipe needs; each is written once."""
    folder, read = tmp_path_factory.mktemp("models"), dict[str, Checkpoint]()

    def get(family: str, recipe: Recipe) -> Checkpoint:
        labels = LABELS if recipe.pooling in HEADS else 0
        name = f"{family}-{labels}"
        if name not in read:
            read[name] = read_checkpoint(write_model(folder / name, family, labels=labels))
        return read[name]

    return get


def compute(run: Running, family: str, case: Case, order: list[int], width: int = 0) -> list[Array]:
    """Return the vectors of the family's texts, in this order; of each token where the pooling keeps them."""
    chosen, seconds = [texts(family)[place] for place in order], [second_texts(family)[place] for place in order]
    vectors = run(chosen, seconds, mask_special=case.recipe.mask_special, width=width)
    if case.recipe.pooling is Pooling.NONE:
        assert all(not vectors[row, len(text) :].any() for row, text in enumerate(chosen))
        return [vectors[row, : len(text)] for row, text in enumerate(chosen)]
    return list(vectors)


def reference(family: str, case: Case) -> list[Array]:
    """Return the vectors that are known, of the first texts or all."""
    known: Array = VECTORS[f"{family}, {case.name}"]
    if case.recipe.pooling is Pooling.NONE:
        return np.split(known, np.cumsum([len(text) for text in texts(family)[:3]])[:2])
    return list(known)


@pytest.mark.parametrize(("family", "case"), ALL)
def test_vectors_are_those_of_transformers_whatever_the_batch(
    family: str, case: Case, reading: Reading, tmp_path: Path
) -> None:
    checkpoint = reading(family, case.recipe)
    run = running(build(checkpoint, case.recipe), tmp_path / "graph")
    known = reference(family, case)
    together = compute(run, family, case, [0, 1, 2, 3, 4])
    turned = compute(run, family, case, [4, 3, 2, 1, 0])[::-1]
    alone = [compute(run, family, case, [place])[0] for place in range(5)]
    width = checkpoint.architecture.max_length
    wide = [compute(run, family, case, [place], width)[0] for place in range(5)]
    for found in (together, turned, alone, wide):
        for vector, expected in zip(found[: len(known)], known, strict=True):
            assert cosines(vector, expected).min() >= EXACT
            assert np.abs(vector - expected).max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_of_a_classifier_are_those_of_transformers(family: str, reading: Reading, tmp_path: Path) -> None:
    case = Case("logits", Recipe(Pooling.LOGITS))
    run = running(build(reading(family, case.recipe), case.recipe), tmp_path / "graph")
    logits = np.stack(compute(run, family, case, [0, 1, 2, 3, 4]))
    shares, sigmoids = (np.stack(list(VECTORS[f"{family}, {name}"])) for name in ("classification", "regression"))
    powers = np.exp(logits)
    np.testing.assert_allclose((powers / powers.sum(axis=1, keepdims=True))[: len(shares)], shares, atol=1e-5)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits))[: len(sigmoids)], sigmoids, atol=1e-5)


# A CPU runs the graphs for GPUs too: slowly, with fp16 as onnxruntime imitates it.
OTHERS = [
    *((pooling, "cpu", precision) for pooling in (Pooling.MEAN, Pooling.CLS, Pooling.MAX, Pooling.CLASSIFICATION) for precision in (Precision.FP16, Precision.INT8)),
    *((pooling, "cuda", precision) for pooling in (Pooling.MEAN, Pooling.CLS) for precision in (Precision.FP32, Precision.FP16)),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("pooling", "device", "precision"), OTHERS)
def test_fewer_bits_and_the_graphs_for_gpus_come_close(
    family: str, pooling: Pooling, device: str, precision: Precision, reading: Reading, tmp_path: Path
) -> None:
    case = Case(pooling.value, Recipe(pooling))
    recipe = replace(case.recipe, precision=precision)
    run = running(build(reading(family, recipe), recipe, device), tmp_path / "graph")
    found = cosines(np.stack(compute(run, family, case, [0, 1, 2, 3, 4])), np.stack(reference(family, case)))
    if precision is Precision.INT8:
        assert found.mean() >= EIGHTH
    else:
        assert found.min() >= (EXACT if precision is Precision.FP32 else HALF)
