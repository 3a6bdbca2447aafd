"""ONNX files of a repository: the vectors are those of the same network computed from its weights, and what cannot be served is refused in one line."""

import logging
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from tests.late import onnxruntime
from tests.rings import spread
from tests.text_models import tiny
from tests.text_models.graph.running import cosines
from tests.text_models.onnx_files import export
from tests.text_models.opening import SETTINGS, opened

import weir.embedding
from weir.errors import SettingsError, WeirError
from weir.text_models.checkpoint.onnx_files import file_names, is_computed, wanted_names

TEXTS = ["first do it", "then do it right and faster than yesterday", "it"]


def vectors(directory: Path, cache: Path, *outputs: str, **options: Any) -> list[Any]:
    model = opened(directory, cache, **options)
    return model.predict([text._replace(outputs=outputs) for text in model.preprocess_batch(TEXTS)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sentence-transformers with its weights and onnx/model.onnx; `dense` and `plain` beside it."""
    folder = tmp_path_factory.mktemp("onnx")
    for name, dense in (("dense", 20), ("plain", 0)):
        directory = tiny.sentence_model(folder / name, "bert", dense=dense, residual=True)
        export(directory, directory / "onnx" / "model.onnx", beside=name == "dense")
    return folder


POOLINGS = ["mean", "max", "mean-max", "cls", "sep", "weighted-mean", "mean-sqrt", "hierarchical", "cls+mean", "none"]


@pytest.mark.parametrize("pooling", spread(POOLINGS, 4))
def test_each_pooling_gives_what_the_weights_give(pooling: str, folder: Path) -> None:
    here = {"pooling": pooling, "mask_special": pooling == "max", "layers": [-1]}
    expected = vectors(folder / "plain", folder, **here)
    found = vectors(folder / "plain", folder, runtime="onnx-file", **here)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and cosines(one, other).min() > 0.99999


def test_dense_layers_dimensions_and_several_outputs_follow(folder: Path) -> None:
    expected = vectors(folder / "dense", folder, "dense", "tokens", dimensions=8)
    found = vectors(folder / "dense", folder, "dense", "tokens", dimensions=8, runtime="onnx-file")
    for (one, tokens), (other, others) in zip(found, expected, strict=True):
        assert one.shape == (8,) and cosines(one, other) > 0.99999
        assert cosines(tokens, others).min() > 0.99999


@pytest.mark.parametrize("runtime", ["onnx", "onnx-file"])
def test_a_quantizer_makes_whole_numbers(runtime: str, folder: Path, tmp_path: Path) -> None:
    """As the module FlexibleQuantizer of pplx-embed does."""
    plain, model = folder / "plain", tmp_path / "model"
    expected = np.stack(vectors(plain, folder, normalize=False))
    shutil.copytree(plain, model)
    tiny.sentence_files(model, normalize=False, quantized=True)
    found = np.stack(vectors(model, tmp_path, runtime=runtime))
    np.testing.assert_array_equal(found, np.round(np.tanh(expected) * 127))
    assert np.ptp(found) > 50
    cut = np.stack(vectors(model, tmp_path, runtime=runtime, dimensions=8, normalize=True))
    np.testing.assert_allclose(cut, found[:, :8] / np.linalg.norm(found[:, :8], axis=1, keepdims=True), rtol=1e-5)


def test_a_file_that_makes_vectors_of_texts_or_labels_is_served_as_it_is(tmp_path: Path) -> None:
    model = tiny.sentence_model(tmp_path / "texts", "bert", pooling="cls")
    expected = vectors(model, tmp_path)
    export(model, model / "model.onnx", "sentence_embedding")
    assert cosines(np.array(vectors(model, tmp_path, runtime="onnx-file")), np.array(expected)).min() > 0.99999
    rule = r"pooling='mean': .*model.onnx makes one vector of a text, so there is nothing to pool"
    with pytest.raises(SettingsError, match=rule):
        vectors(model, tmp_path, runtime="onnx-file", pooling="mean")
    labels = tiny.model(tmp_path / "labels", "bert", labels=3, architectures=["BertForSequenceClassification"])
    export(labels, labels / "onnx" / "model.onnx", "logits")
    for pooling in (None, "classification", "regression"):
        expected = vectors(labels, tmp_path, pooling=pooling)
        np.testing.assert_allclose(vectors(labels, tmp_path, pooling=pooling, runtime="onnx-file"), expected, atol=1e-5)


def test_what_cannot_be_served_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    for options, rule in (
        ({"dtype": "int8"}, r"has no model_int8.onnx or model_quantized.onnx.*: there are onnx/model.onnx"),
        ({"precision": "fp16"}, r"precision='fp16': .*choose another file by --dtype"),
        ({"pooling": "pooler"}, r"pooler"),
        ({"pooling": "yes-no"}, r"pooling='yes-no': cannot be computed from .*model.onnx"),
        ({"positions": False}, r"positions=False"),
    ):
        with pytest.raises(SettingsError, match=rule):
            vectors(folder / "plain", folder, runtime="onnx-file", **options)
    broken = tiny.sentence_model(tmp_path / "broken")
    (broken / "model.onnx").write_bytes(b"\xff" * 40)
    with pytest.raises(SettingsError, match=r"model.onnx: is damaged, or is not an ONNX file"):
        vectors(broken, tmp_path, runtime="onnx-file")
    (broken / "model.onnx").unlink()
    export(broken, broken / "model.onnx", stray="task_id")
    rule = "model.onnx: has the input 'task_id': must be among input_ids, attention_mask"
    with pytest.raises(SettingsError, match=rule):
        vectors(broken, tmp_path, runtime="onnx-file")


def test_an_unknown_family_is_served_from_its_file_and_the_log_says_so(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = vectors(folder / "plain", folder)
    model = tiny.change(shutil.copytree(folder / "plain", tmp_path / "new") / "config.json", model_type="funnel")
    (model / "model.safetensors").unlink()
    whole, small = (model / "onnx" / name for name in ("model.onnx", "model_quantized.onnx"))
    quantization = onnxruntime.quantization
    options = {"DefaultTensorType": 1}
    quantization.quantize_dynamic(whole, small, weight_type=quantization.QuantType.QInt8, extra_options=options)
    caplog.set_level(logging.INFO, "weir")
    settings = {**SETTINGS, "cache": str(tmp_path / "cache")}
    with weir.embedding.serve(model, **settings) as server:
        found = httpx.post(f"{server.url}/embed", json={"inputs": TEXTS}).json()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert f"funnel cannot be built from its weights; serving {model}/onnx/model.onnx instead" in caplog.text
    with weir.embedding.serve(model, dtype="q8", **settings) as server:
        rough = httpx.post(f"{server.url}/embed", json={"inputs": TEXTS}).json()
        assert httpx.get(f"{server.url}/info").json()["model_dtype"] == "int8"
    assert 0.9 < cosines(np.array(rough), np.array(expected)).min() < 0.999999
    whole.unlink()
    with pytest.raises(SettingsError, match="model_type='funnel': must be one of"):
        weir.embedding.serve(model, **settings)


def test_which_file_is_wanted(tmp_path: Path) -> None:
    bert = tiny.model(tmp_path / "bert") / "config.json"
    relative, wrong = (tiny.model(tmp_path / name) / "config.json" for name in ("relative", "wrong"))
    tiny.change(relative, position_embedding_type="relative_key")
    assert (is_computed(bert), is_computed(relative)) == (True, False)
    tiny.change(wrong, hidden_size="--runtime torch")
    assert is_computed(wrong)  # it is refused for its size, whatever the message says
    assert wanted_names("onnx", None, bert) == wanted_names("torch", None, relative) == ()
    assert wanted_names("onnx", None, relative) == wanted_names("onnx-file", None, bert) == ("model.onnx",)
    assert file_names("O3") == ("model_O3.onnx",) and file_names("mine.onnx") == ("mine.onnx",)


def test_a_file_with_weights_that_are_no_numbers_does_not_start(tmp_path: Path) -> None:
    directory = tiny.sentence_model(tmp_path / "model")
    path = export(directory, directory / "model.onnx")
    graph = onnx.load(path)
    place, matrix = next(found for found in enumerate(graph.graph.initializer) if len(found[1].dims) == 2)
    numbers = np.array(onnx.numpy_helper.to_array(matrix))
    numbers[:, 0] = np.nan
    graph.graph.initializer[place].CopyFrom(onnx.numpy_helper.from_array(numbers, matrix.name))
    onnx.save_model(graph, path)
    server = weir.embedding.serve(directory, runtime="onnx-file", **SETTINGS)
    with pytest.raises(WeirError, match="the model computed NaN or infinite numbers"), server:
        pass
