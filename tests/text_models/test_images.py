"""Models of texts and images: what of a directory is read, and what its workers make of texts, images and batches of both."""

import base64
import io
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.text_models import tiny, tiny_towers
from tests.text_models.graph.towers_reference import Towers
from tests.text_models.opening import opened, params_of, results
from tests.text_models.tokens.reading import ids

from weir.errors import InvalidRequest, ModelError, SettingsError
from weir.images import ImageLimits, Picture
from weir.images.preparation import Preparation
from weir.model import Measure
from weir.text_models import model as model_module
from weir.text_models.checkpoint.configuration import read_architecture
from weir.text_models.checkpoint.heads import tower_config, vision_architecture
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.checkpoint.weights import open_tensors
from weir.text_models.formats import JsonDocument
from weir.text_models.model import ImageTower, TextEncoder, TextTower, estimated_tokens
from weir.text_models.texts import EncodedImage, TokenRule

TEXTS = ["First do it", "then do it right", "do"]


@pytest.fixture(scope="module", params=tiny_towers.KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_towers.model(tmp_path_factory.mktemp("model"), request.param)


def picture(seed: int, width: int = 50, height: int = 40) -> bytes:
    """Return a PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def test_texts_and_images_of_a_batch_have_their_vectors_whatever_the_order(directory: Path) -> None:
    images = [picture(seed) for seed in range(5)]
    checkpoint, network = read_checkpoint(directory), Towers(directory)
    assert checkpoint.vision is not None and checkpoint.vision.preparation is not None
    pixels = [checkpoint.vision.preparation.prepare(each, ImageLimits()) for each in images]
    tokens = [np.array(ids(each)) for each in checkpoint.tokenizer().encode(TEXTS, TokenRule(30))]
    items = [
        TEXTS[0],
        Picture(images[0]),
        EncodedImage(images[1], 10).as_plain(),
        *TEXTS[1:],
        *map(Picture, images[2:]),
    ]
    expected = [
        network.text(tokens[0]), *map(network.image, pixels[:2]), *map(network.text, tokens[1:]), *map(network.image, pixels[2:]),
    ]  # fmt: skip
    for run_tokens in (1, 25, 1000):
        found = results(directory, items, run_tokens=run_tokens)
        assert np.abs(np.stack(found) - np.stack(expected)).max() < 1e-5


def test_a_broken_image_fails_alone(directory: Path) -> None:
    model = opened(directory)
    good, *broken = model.preprocess_batch([Picture(picture(1)), Picture(b"no image"), Picture(picture(1)[:200])])
    assert good.shape == (3, tiny_towers.IMAGE, tiny_towers.IMAGE)
    assert all(isinstance(each, InvalidRequest) for each in broken)
    limited = TextEncoder(directory, images={"max_image_pixels": 1999})
    limited.load_shared()
    (error,) = limited.preprocess_batch([Picture(picture(1))])
    assert "max_image_pixels" in error.message


def test_images_of_a_batch_are_decoded_by_all_threads_at_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, met = opened(directory, threads=2), threading.Barrier(2)
    prepare = Preparation.prepare

    def meets(self: Preparation, data: bytes, limits: ImageLimits) -> Any:
        met.wait(60)
        return prepare(self, data, limits)

    monkeypatch.setattr(Preparation, "prepare", meets)
    first, text, second = model.preprocess_batch([Picture(picture(1)), TEXTS[0], Picture(picture(2))])
    assert not isinstance(text, InvalidRequest)
    assert not np.array_equal(first, second)


def test_a_model_of_texts_reads_no_images(tmp_path: Path) -> None:
    (error,) = opened(tiny.model(tmp_path)).preprocess_batch([Picture(picture(1))])
    assert error.message == "an image: the model reads only texts"


def test_numbers_that_are_not_finite_are_errors_of_their_image(directory: Path) -> None:
    model, image = opened(directory), np.zeros((3, tiny_towers.IMAGE, tiny_towers.IMAGE), np.float32)
    found = model.predict([image, image * np.nan])
    assert np.isfinite(found[0]).all()
    assert isinstance(found[1], ModelError) and "this image" in str(found[1])


def test_towers_are_served_apart_and_each_refuses_what_the_other_reads(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(model_module, "release_free_memory", released.set)
    monkeypatch.setattr(model_module, "RELEASE_AFTER", 0.0)
    monkeypatch.setattr(model_module, "MANY_BYTES", 1)
    file = picture(1)
    expected = results(directory, [TEXTS[0], Picture(file)])
    params = params_of(directory, directory / "cache")
    texts, images = TextTower(**params), ImageTower(**params, images=ImageLimits(max_image_pixels=2000))
    for tower in (texts, images):
        tower.load_shared()
        tower.load()
    (found,) = texts.predict(texts.preprocess_batch([TEXTS[0]]))
    np.testing.assert_allclose(found, expected[0], atol=1e-5)
    items = [{"image": base64.b64encode(file).decode()}, Picture(file), EncodedImage(file, 10).as_plain()]
    for vector in images.predict(images.preprocess_batch(items)):
        np.testing.assert_allclose(vector, expected[1], atol=1e-5)
    assert released.wait(20)  # after large files
    assert isinstance(images.preprocess_batch(list(ImageTower.examples))[0], np.ndarray)  # whatever the limits
    wrong = [
        *texts.preprocess_batch([Picture(file)]),
        *images.preprocess_batch([TEXTS[0], {"image": "a"}, Picture(picture(1, 100))]),
    ]
    rules = ["reads only texts", "must be an object whose 'image'", "is not base64", "at most 0.002 M"]
    assert all(rule in str(error) for rule, error in zip(rules, wrong, strict=True)), wrong
    assert ImageTower.measure(TEXTS) == Measure()


def test_an_image_costs_its_tokens(directory: Path) -> None:
    vision = read_checkpoint(directory).vision
    assert vision is not None
    assert vision.image_tokens == 9 + (vision.kind == "clip")
    assert estimated_tokens(EncodedImage(picture(1), vision.image_tokens)) == vision.image_tokens


def test_scale_and_bias_are_those_of_the_weights(directory: Path) -> None:
    vision = read_checkpoint(directory).vision
    assert vision is not None
    assert vision.logit_scale == pytest.approx(np.exp(2))
    assert vision.logit_bias == (None if vision.kind == "clip" else -3.0)


def test_texts_of_siglip_are_canonical_and_of_one_length(tmp_path: Path) -> None:
    tokenizer = read_checkpoint(tiny_towers.model(tmp_path, "siglip")).tokenizer()
    plain, odd, long, pieces = (
        ids(tokenizer.encode(["first do it"], TokenRule(30))[0]),
        ids(tokenizer.encode(["  First, do \n IT!"], TokenRule(30))[0]),
        ids(tokenizer.encode(["do it " * 60], TokenRule(30))[0]),
        tokenizer.split("do it " * 60, TokenRule(30, split=True)),
    )
    end = tokenizer.vocabulary["</s>"]
    assert plain == odd
    assert plain[3:] == [end] * 27
    assert len(long) == 30 and long[-1] == end and long[-2] != end
    assert isinstance(pieces, list) and {len(each.ids) for each in pieces} == {4 * 30}


@pytest.mark.parametrize("kinds", [["CLIPModel"], ["Transformer"], ["Transformer", "Normalize"]])
def test_sentence_transformers_has_a_module_of_both_towers(kinds: list[str], tmp_path: Path) -> None:
    tiny_towers.model(tmp_path / "0_CLIPModel")
    folders = ("0_CLIPModel", "1_Normalize")
    modules = [{"path": folder, "type": f"x.{kind}"} for folder, kind in zip(folders, kinds, strict=False)]
    tiny.write(tmp_path / "modules.json", modules)
    found = results(tmp_path, [TEXTS[0], Picture(picture(1))])
    assert np.allclose(found, results(tmp_path / "0_CLIPModel", [TEXTS[0], Picture(picture(1))]), atol=1e-6)
    assert np.allclose(np.linalg.norm(found, axis=1), 1)


@pytest.mark.parametrize(
    ("kind", "values", "rule"),
    [
        ("siglip", {"model_type": "siglip2"}, "NaFlex"),
        ("clip", {"model_type": "jina_clip"}, "its towers are code of its own"),
        ("clip", {"text_config": 3}, "text_config=3: must be an object"),
        ("clip", {"projection_dim": 23}, "has the shape [24, 40], config.json requires [23, 40]"),
        ("siglip", {"vision_config.vision_use_head": False}, "must be true"),
        ("siglip", {"vision_config.num_channels": 1}, "must be 3"),
        ("clip", {"vision_config.patch_size": 21}, "must be at most the image_size 20"),
        ("clip", {"vision_config.num_attention_heads": 7}, "must divide the hidden size 40"),
        ("siglip", {"vision_config.image_size": 23}, "must be that of the files beside it"),
        ("siglip", {"text_config.projection_size": 24}, "has the shape [40, 32], config.json requires [24, 32]"),
    ],
)
def test_configurations_that_are_refused(kind: str, values: dict[str, Any], rule: str, tmp_path: Path) -> None:
    path = tiny_towers.model(tmp_path, kind) / "config.json"
    for key, value in values.items():
        part, _, inner = key.partition(".")
        tiny.change(path, **{part: tiny.read(path)[part] | {inner: value} if inner else value})
    with pytest.raises(SettingsError) as caught:
        read_checkpoint(tmp_path)
    assert rule in caught.value.message


def test_old_configurations(tmp_path: Path) -> None:
    """They state values of a part twice, and 2 for a token with the highest id."""
    path = tiny_towers.model(tmp_path) / "config.json"
    stated = tiny.read(path)["text_config"]
    last = stated["eos_token_id"]
    tiny.change(
        path, text_config=stated | {"hidden_size": None, "eos_token_id": 2}, text_config_dict={"hidden_size": 32}
    )
    assert read_checkpoint(tmp_path).architecture.end_id == -1
    found = results(tmp_path, [[last - 1, 5, 6, last, 7], [5, 9, 6]], tmp_path / "old")
    network = Towers(tmp_path)
    for vector, (text, end) in zip(found, (([last - 1, 5, 6, last, 7], last), ([5, 9, 6], 9)), strict=True):
        network.config["text_config"]["eos_token_id"] = end
        assert np.abs(vector - network.text(np.array(text))).max() < 1e-5


def test_what_a_configuration_leaves_out_is_usual() -> None:
    """The first SigLIP states nothing of its towers."""
    config = JsonDocument(Path("config.json"), {"model_type": "siglip", "text_config": {}})
    text = read_architecture(tower_config(config, "text_config"), has_pooler=False, has_classifier=False)
    image = vision_architecture(config)
    assert (text.hidden_size, text.layers, text.vocab_size, text.max_length) == (768, 12, 32000, 64)
    assert (image.hidden_size, image.layers, image.patch_size, image.max_length) == (768, 12, 16, 196)


def test_weights_outside_the_towers_are_one_number(tmp_path: Path) -> None:
    tiny_towers.model(tmp_path)
    stored = dict(open_tensors(tmp_path / "model.safetensors"))
    for values, rule in (
        ({}, "has no weight 'logit_scale'"), ({"logit_scale": np.ones(2, np.float32)}, "'logit_scale' has 2 numbers, must have 1"),
    ):  # fmt: skip
        kept = {name: value for name, value in stored.items() if name != "logit_scale"}
        tiny.save(tmp_path / "model.safetensors", kept | values)
        with pytest.raises(SettingsError, match=rule):
            read_checkpoint(tmp_path)


def test_both_towers_make_vectors_of_one_size(tmp_path: Path) -> None:
    path = tiny_towers.model(tmp_path, "siglip") / "config.json"
    stored = dict(open_tensors(tmp_path / "model.safetensors"))
    cut = {f"text_model.head.{kind}": stored[f"text_model.head.{kind}"][:24] for kind in ("weight", "bias")}
    tiny.save(tmp_path / "model.safetensors", stored | cut)
    tiny.change(path, text_config=tiny.read(path)["text_config"] | {"projection_size": 24})
    with pytest.raises(SettingsError, match="projection_size=24: must be that of images, 40"):
        read_checkpoint(tmp_path)


def test_the_pooling_is_the_projection(tmp_path: Path) -> None:
    both, texts = tiny_towers.model(tmp_path / "both"), tiny.model(tmp_path / "texts")
    for directory, pooling in ((both, "mean"), (texts, "projection")):
        with pytest.raises(SettingsError, match="only a model of texts and images has projection, and it has no other"):
            opened(directory, pooling=pooling)


def test_without_a_preparation_only_texts_are_read(tmp_path: Path) -> None:
    (tiny_towers.model(tmp_path) / "preprocessor_config.json").unlink()
    text, image = opened(tmp_path).preprocess_batch([TEXTS[0], Picture(picture(1))])
    assert isinstance(image, InvalidRequest) and not isinstance(text, InvalidRequest)
    shutil.rmtree(tmp_path / "cache")
