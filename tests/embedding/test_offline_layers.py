"""Every layer of a model, against the model that is served with that layer alone."""

from pathlib import Path

import numpy as np
import pytest
from tests.embedding import tiny

from weir.embedding.offline import POOLINGS, Layers, draw, encode, search, study_layers, table, to_dict
from weir.errors import SettingsError

TEXTS = ["first do it", "then do it right", "then do it better", "the weather is lovely", "it is sunny"]
LABELS = ["work", "work", "work", "weather", "weather"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"), "bert", layers=3)


@pytest.fixture(scope="module")
def layers(model: Path, cache: str) -> Layers:
    return study_layers(model, TEXTS, LABELS, neighbours=1, cache=cache)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("layer", [-3, -2, -1])
def test_a_layer_is_what_a_model_of_that_layer_says(
    layers: Layers, model: Path, cache: str, pooling: str, layer: int
) -> None:
    served = encode(model, TEXTS, pooling=pooling, layers=(layer,), normalize=False, cache=cache)
    np.testing.assert_allclose(layers.vectors[pooling][layer], served, rtol=1e-4, atol=1e-5)


def test_the_table_has_a_line_for_each_layer(layers: Layers) -> None:
    columns, *lines = table(layers)
    assert [line[0] for line in lines] == ["-3", "-2", "-1"] and len(columns) == 7
    assert to_dict(layers)["mean"]["-1"]["knn_accuracy"] == pytest.approx(float(lines[-1][1]), abs=0.001)


def test_the_picture_has_a_panel_for_each_layer(layers: Layers, tmp_path: Path) -> None:
    draw(layers, tmp_path / "layers.png")
    drawn = (tmp_path / "layers.svg").read_text()
    assert all(f"layer {layer}: kNN" in drawn for layer in (-3, -2, -1)) and "weather" in drawn
    with pytest.raises(SettingsError, match="pooling='median': must be one of mean, max, cls"):
        draw(layers, tmp_path / "layers.png", "median")


def test_progress_is_told(model: Path, cache: str) -> None:
    told: list[tuple[int, int]] = []
    encode(model, TEXTS * 7, lambda done, of: told.append((done, of)), cache=cache)
    assert told == [(32, 35), (35, 35)]


def test_a_text_that_cannot_be_read_is_named(model: Path, cache: str) -> None:
    with pytest.raises(SettingsError, match="text 2: "):
        encode(model, ["one", "\ud800"], cache=cache)


def test_the_nearest_to_a_text_is_that_text(model: Path, cache: str) -> None:
    first, second = search(model, TEXTS, TEXTS[2], 2, cache=cache)
    assert (first.place, first.text) == (3, TEXTS[2]) and first.similarity == pytest.approx(1.0, abs=1e-5)
    assert second.similarity < first.similarity
