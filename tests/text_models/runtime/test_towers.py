"""Random checkpoints of transformers' CLIP and SigLIP: both runtimes give its vectors of texts and images, from files to vectors as well."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.images.pictures import varied
from tests.text_models import tiny_tokens, tiny_towers
from tests.text_models.opening import results
from tests.text_models.runtime.references import WITH_TORCH
from tests.text_models.tokens.reading import ids

from weir.images import Picture
from weir.text_models import ComputingSettings, Pooling, Recipe
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.model import TokenIds, padded_inputs
from weir.text_models.runtime import Pixels, open_runtime
from weir.text_models.texts import TokenRule

pytestmark = WITH_TORCH

NAMES = {"clip": "CLIP", "siglip": "Siglip"}
TEXT = Recipe(Pooling.PROJECTION, normalize=True)


@pytest.fixture(params=[("clip", {}), ("clip", {"eos_token_id": 2, "hidden_act": "gelu"}), ("siglip", {})])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """Return the directory of a random model, with the files of a tiny one beside its own, and the model."""
    import torch
    import transformers

    kind, more = request.param
    directory = tiny_towers.model(tmp_path / "model", kind)
    vocabulary = tiny_tokens.size(kind)
    given = tiny_towers.configuration(kind, vocabulary, vocabulary - 1)
    given["text_config"] |= more
    config = getattr(transformers, f"{NAMES[kind]}Config")(**given)
    torch.manual_seed(0)
    network = getattr(transformers, f"{NAMES[kind]}Model")(config).eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.normal_(0, 0.15)
            if "norm" in name and name.endswith("weight"):
                weight.add_(1.0)
    network.save_pretrained(directory)
    return directory, network


def unit(found: Any) -> Any:
    """Return features of transformers, which are the output itself or a part of it, scaled to length 1."""
    vectors = getattr(found, "pooler_output", found).detach().numpy()
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_vectors_are_those_of_transformers(saved: tuple[Path, Any], runtime: str, tmp_path: Path) -> None:
    import torch

    directory, network = saved
    checkpoint, random = read_checkpoint(directory), np.random.default_rng(5)
    counts = (30, 30, 30) if checkpoint.architecture.family == "siglip" else (7, 30, 3)
    texts = [random.integers(5, checkpoint.architecture.vocab_size, count).astype(np.int32) for count in counts]
    pixels = random.normal(size=(4, 3, tiny_towers.IMAGE, tiny_towers.IMAGE)).astype(np.float32)
    computing = ComputingSettings(runtime=runtime, cache=str(tmp_path))
    inputs = padded_inputs([TokenIds(text, 0) for text in texts], pad_id=0, mask_special=False)
    of_texts, of_images = (
        open_runtime(checkpoint, replace(TEXT, images=images), computing).run(given)[0]
        for images, given in ((False, inputs), (True, Pixels(pixels)))
    )
    with torch.inference_mode():
        alone = [unit(network.get_text_features(torch.tensor(text[None]).long())) for text in texts]
        images = unit(network.get_image_features(torch.tensor(pixels)))
    assert np.abs(of_texts - np.concatenate(alone)).max() < 1e-5
    assert np.abs(of_images - images).max() < 1e-5


def test_tokens_of_clip_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    directory = tiny_towers.model(tmp_path, "clip")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), read_checkpoint(directory).tokenizer()
    texts = [
        "First do it",
        "It's 5 o'clock!! the MILL\tturns " * 9,
        "caf\u00e9 \u6c34 na\u00efve \u2014 fast\u2026",
        "<|endoftext|> do it",
        "!!!",
    ]
    expected = theirs(texts, truncation=True, max_length=30)["input_ids"]
    assert [ids(each) for each in ours.encode(texts, TokenRule(30))] == expected


@pytest.mark.filterwarnings("ignore")  # of Pillow, about transparent palettes
def test_pictures_become_vectors_as_by_transformers(saved: tuple[Path, Any], tmp_path: Path) -> None:
    import torch
    from transformers.image_utils import load_image

    directory, network = saved
    processor, files = image_processor(directory), [data for _, data in varied()]
    found = np.stack(results(directory, [*map(Picture, files)], tmp_path))
    pixels = [
        processor(load_image(Image.open(io.BytesIO(data))), input_data_format="channels_last", return_tensors="pt")
        for data in files
    ]
    with torch.inference_mode():
        expected = unit(network.get_image_features(torch.cat([each["pixel_values"] for each in pixels])))
    assert (found * expected).sum(1).min() > 0.99999


def image_processor(directory: Path) -> Callable[..., Any]:
    """Return the processor that computes with Pillow."""
    import transformers

    found: Callable[..., Any] = transformers.AutoImageProcessor.from_pretrained(directory, use_fast=False)
    return found
