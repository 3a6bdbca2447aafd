"""Directories that cannot be served are refused by an error that names the file and the rule."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny

from weir.errors import SettingsError
from weir.text_models import ComputingSettings, Pooling, Recipe
from weir.text_models.checkpoint.reading import read_checkpoint, read_for
from weir.text_models.checkpoint.weights import open_tensors
from weir.text_models.graph.cache import graph_file


def refused(directory: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        read_checkpoint(directory).tokenizer()
    return caught.value.message


def test_no_directory_and_no_weights(tmp_path: Path) -> None:
    assert "must be a directory with a model" in refused(tmp_path / "nowhere")
    assert "config.json: cannot be read: No such file" in refused(tmp_path)
    tiny.model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "has no weights: must hold model.safetensors" in refused(tmp_path / "model")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    tiny.model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "Pickles can run any code" in refused(tmp_path)
    assert "save_pretrained(directory, safe_serialization=True)" in refused(tmp_path)


def test_checkpoints_of_tensorflow_name_the_command(tmp_path: Path) -> None:
    (tmp_path / "bert_model.ckpt.index").write_bytes(b"")
    assert f"convert it with `weir embed convert {tmp_path} TARGET`" in refused(tmp_path)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"model_type": None}, "has no model_type, which the model cannot be read without"),
        ({"model_type": "gpt2"}, "model_type='gpt2': must be one of bert, roberta, camembert"),
        ({"hidden_size": None}, "has no hidden_size or dim"),
        ({"hidden_size": "32"}, "hidden_size='32': must be a whole number of at least 1"),
        ({"hidden_size": 30}, "num_attention_heads=4: must divide the hidden size 30"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: must be a whole number"),
        ({"num_hidden_layers": 4}, "has no weight 'encoder.layer.3.attention.self.query.weight'"),
        ({"layer_norm_eps": 0}, "layer_norm_eps=0: must be a positive number"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key': must be absolute"),
        ({"is_decoder": True}, "is_decoder=True: must be false"),
        ({"max_position_embeddings": 2}, "max_position_embeddings=2: must be more than 2"),
        ({"vocab_size": 1000}, "word_embeddings.weight' has the shape [181, 32], config.json requires [1000, 32]"),
        ({"intermediate_size": 99}, "has the shape [64, 32], config.json requires [99, 32]"),
    ],
)
def test_configurations_that_do_not_fit(values: dict[str, Any], rule: str, tmp_path: Path) -> None:
    path = tiny.model(tmp_path) / "config.json"
    now = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in now.items() if value is not None}))
    assert rule in refused(tmp_path)
    assert str(tmp_path) in refused(tmp_path)


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "qwen3"])
def test_more_layers_than_the_configuration_names(family: str, tmp_path: Path) -> None:
    path = tiny.model(tmp_path, family) / "config.json"
    values = json.loads(path.read_text())
    values |= {key: 2 for key in ("num_hidden_layers", "n_layers") if key in values}
    path.write_text(json.dumps(values))
    assert "model.safetensors: has weights of 3 layers, config.json names 2" in refused(tmp_path)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_weights_that_are_no_numbers(number: float, kind: str, tmp_path: Path) -> None:
    directory = tiny.model(tmp_path / "model")
    weights = {name: np.array(value) for name, value in open_tensors(directory / "model.safetensors").items()}
    weights["encoder.layer.1.output.dense.weight"][3, 5] = number
    tiny.save(directory / "model.safetensors", weights, kind)
    with pytest.raises(SettingsError) as caught:
        graph_file(read_checkpoint(directory), Recipe(Pooling.MEAN), tmp_path / "cache")
    said = f"{directory}/model.safetensors: 'encoder.layer.1.output.dense.weight' has a weight that is NaN or infinite"
    assert said in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 5000])
def test_files_that_are_not_json(text: str, tmp_path: Path) -> None:
    (tiny.model(tmp_path) / "config.json").write_text(text)
    assert f"{tmp_path / 'config.json'}: " in refused(tmp_path)


def test_parts_of_different_models(tmp_path: Path) -> None:
    tiny.model(tmp_path, vocab_size=100)
    assert "the tokenizer's vocabulary goes up to the id 180, the weights have 100 words" in refused(tmp_path)
    config = json.loads((tiny.model(tmp_path, labels=2) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": []}))
    assert "id2label=[]: must name at least one label" in refused(tmp_path)
    tiny.save(tmp_path / "model.safetensors", {"wte.weight": np.zeros((2, 2), np.float32)})
    assert "has no weight 'embeddings.word_embeddings.weight'" in refused(tmp_path)


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"", b"short", b"\xff" * 40, header(b"{}"), header(b"[1]"), header(b"not json"), header(b'{"a": 1}'), header(b'{"a": {}}'),
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', bytes(8)),
        header(b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', bytes(8)),
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', bytes(8)),
        header(b'{"a": {"dtype": "F8", "shape": [8], "data_offsets": [0, 8]}}', bytes(8)),
        header(b'{"a": {"dtype": 3, "shape": "x", "data_offsets": []}}', bytes(8)),
    ],
)  # fmt: skip
def test_safetensors_that_are_broken(content: bytes, tmp_path: Path) -> None:
    path = tiny.model(tmp_path) / "model.safetensors"
    path.write_bytes(content)
    assert refused(tmp_path).startswith(f"{path}: ")


def test_quantised_weights(tmp_path: Path) -> None:
    path = tiny.model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype": "F32"', b'"dtype": "I32"'))
    assert "is quantised: weights must be floating-point numbers" in refused(tmp_path)


def test_safetensors_that_are_cut_or_changed_anywhere(tmp_path: Path) -> None:
    path = tiny.model(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(1)
    refusals = 0
    for _ in range(150):
        data = bytearray(whole[: random.integers(len(whole))]) if random.random() < 0.3 else bytearray(whole)
        for place in random.integers(8 + length, size=2):
            if place < len(data):
                data[place] = random.integers(256)
        path.write_bytes(data)
        try:
            for value in open_tensors(path).values():
                value.sum()
            read_checkpoint(tmp_path)
        except SettingsError as error:
            assert "safetensors" in error.message
            refusals += 1
    assert refusals > 100


@pytest.mark.parametrize("files", [{"a": "../model.safetensors"}, {"a": 3}, [1], None])
def test_indices_of_parts_that_are_wrong(files: Any, tmp_path: Path) -> None:
    tiny.model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert "model.safetensors.index.json: " in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "gone.safetensors: cannot be read" in refused(tmp_path)


def test_a_model_with_a_decoder_is_refused_by_name(tmp_path: Path) -> None:
    directory = tiny.model(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    sizes = {"model_type": "t5", "is_encoder_decoder": True, "d_model": 32, "num_layers": 2, "num_heads": 4}
    (directory / "config.json").write_text(json.dumps(config | sizes))
    with pytest.raises(SettingsError, match="is_encoder_decoder=True: must be false: t5 has a decoder"):
        read_for(directory, ComputingSettings(runtime="torch"))
    with pytest.raises(
        SettingsError,
        match=r"model_type='t5': .* others are served from an ONNX file that the model has, or with --runtime torch",
    ):
        read_for(directory)
