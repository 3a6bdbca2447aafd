"""Both towers of CLIP and SigLIP give the vectors that plain numpy gives. runtime/test_towers.py compares them with transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.text_models import tiny_towers
from tests.text_models.graph.running import Array, Running, cosines, running
from tests.text_models.graph.towers_reference import Towers

from weir.text_models import Pooling, Precision, Recipe
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.graph.building import build

TEXT = Recipe(Pooling.PROJECTION, normalize=True)
IMAGE = replace(TEXT, images=True)
PIXELS = np.random.default_rng(3).normal(size=(5, 3, tiny_towers.IMAGE, tiny_towers.IMAGE)).astype(np.float32)


def texts(kind: str, checkpoint: Checkpoint) -> list[Array]:
    """Return texts as token ids. CLIP's end in their end token, and one has it twice; all of SigLIP's have the greatest length."""
    random, last = np.random.default_rng(4), checkpoint.architecture.vocab_size - 1
    if kind == "siglip":
        return [random.integers(5, last, 30) for _ in range(4)]
    return [
        np.array([last - 1, *random.integers(5, last - 1, count), last, *more])
        for count, more in ((5, ()), (20, ()), (3, (7, last)))
    ]


@pytest.fixture(params=tiny_towers.KINDS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Checkpoint]:
    return request.param, read_checkpoint(tiny_towers.model(tmp_path / "model", request.param))


@pytest.fixture
def opened(made: tuple[str, Checkpoint], tmp_path: Path) -> Callable[[Recipe, str], Running]:
    return lambda recipe, device: running(build(made[1], recipe, device), tmp_path / f"{recipe.images}-{device}")


def of_images(run: Running, pixels: Array) -> Array:
    found: Array = run.session.run(["vectors"], {"pixels": pixels})[0]
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vectors_are_those_of_the_reference_whatever_the_batch(
    made: tuple[str, Checkpoint], opened: Callable[[Recipe, str], Running], device: str
) -> None:
    kind, checkpoint = made
    network, ids = Towers(checkpoint.directory), texts(kind, checkpoint)
    of_texts, images = opened(TEXT, device), opened(IMAGE, device)
    expected = np.stack([network.text(text) for text in ids]), np.stack([network.image(each) for each in PIXELS])
    together = of_texts(ids), of_images(images, PIXELS)
    alone = (
        np.concatenate([of_texts([text]) for text in ids]),
        np.concatenate([of_images(images, each[None]) for each in PIXELS]),
    )
    for found in (together, alone):
        for vectors, wanted in zip(found, expected, strict=True):
            assert np.abs(vectors - wanted).max() < 1e-5


@pytest.mark.parametrize(("precision", "least"), [(Precision.FP16, 0.9999), (Precision.INT8, 0.98)])
def test_fewer_bits_come_close(
    made: tuple[str, Checkpoint], opened: Callable[[Recipe, str], Running], precision: Precision, least: float
) -> None:
    network = Towers(made[1].directory)
    found = of_images(opened(replace(IMAGE, precision=precision), "cpu"), PIXELS)
    assert cosines(found, np.stack([network.image(each) for each in PIXELS])).min() >= least


def test_vectors_may_be_cut_and_left_as_long_as_they_are(
    made: tuple[str, Checkpoint], opened: Callable[[Recipe, str], Running]
) -> None:
    network = Towers(made[1].directory)
    found = of_images(opened(replace(IMAGE, dimensions=8, normalize=False), "cpu"), PIXELS[:1])
    wanted = network.image(PIXELS[0])[:8]
    assert found.shape == (1, 8)
    assert np.abs(found[0] / np.linalg.norm(found[0]) - wanted / np.linalg.norm(wanted)).max() < 1e-5
    assert abs(np.linalg.norm(found[0]) - np.linalg.norm(wanted)) > 1e-2
