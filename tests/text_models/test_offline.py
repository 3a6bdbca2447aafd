"""How well vectors keep classes apart, against what can be worked out by hand."""

from pathlib import Path

import numpy as np
import pytest
from tests.rings import spread
from tests.text_models import tiny

from weir.errors import SettingsError
from weir.text_models import ComputingSettings, TextSettings
from weir.text_models.offline import (
    POOLINGS,
    LabelledTexts,
    LayerStudy,
    as_dict,
    check_labels,
    cosine_distances,
    draw,
    encode,
    principal_plane,
    read_labelled,
    search,
    separation,
    study_layers,
    table,
)

EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]


def test_classes_that_are_points_are_apart_and_other_labels_say_nothing() -> None:
    found = separation(np.array([EAST, EAST, NORTH, NORTH]), ["a", "a", "b", "b"], neighbours=1)
    assert found.knn_accuracy == 1.0 and found.silhouette == pytest.approx(1.0)
    found = separation(np.array([EAST, NORTH, EAST, NORTH]), ["a", "a", "b", "b"], neighbours=1)
    # Each is at distance 1 from its own class, and 0.5 from the other on average.
    assert found.knn_accuracy == 0.0 and found.silhouette == pytest.approx(-0.5)


def test_among_equal_numbers_of_votes_the_nearest_counts() -> None:
    vectors = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.3], [1.0, 0.6]])
    found = separation(vectors, ["a", "a", "b", "b"], neighbours=2)
    # 0 has 1 (a) and 2 (b): a. 1 has 0 (a) and 2 (b): a. 2 has 1 (a) and 0 or 3: the nearest is a. 3 has 2 (b) and 1 (a): b.
    assert found.knn_accuracy == 0.75


def test_a_silhouette_by_its_definition() -> None:
    random = np.random.default_rng(3)
    vectors, labels = random.normal(size=(12, 4)), ["a", "b", "c"] * 4
    distances = cosine_distances(vectors)
    expected = []
    for place, label in enumerate(labels):
        mean = {
            other: np.mean([distances[place, each] for each in range(12) if labels[each] == other and each != place])
            for other in "abc"
        }
        nearest = min(mean[other] for other in "abc" if other != label)
        expected.append((nearest - mean[label]) / max(nearest, mean[label]))
    assert separation(vectors, labels).silhouette == pytest.approx(np.mean(expected))


def test_a_vector_of_length_0_is_far_from_all() -> None:
    distances = cosine_distances(np.array([EAST, [0.0, 0.0], WEST]))
    assert distances[0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("labels", "message"), [(["a", "a"], "there is one class"), (["a", "a", "b"], "label 'b': has one text")]
)
def test_there_must_be_classes(labels: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_labels(labels)


def test_the_plane_is_that_of_most_variance() -> None:
    random = np.random.default_rng(5)
    spread = random.normal(size=(50, 5)) * [10.0, 3.0, 0.01, 0.01, 0.01]
    plane, share = principal_plane(spread)
    assert share > 0.999
    assert abs(np.corrcoef(plane[:, 0], spread[:, 0])[0, 1]) > 0.999
    assert abs(np.corrcoef(plane[:, 1], spread[:, 1])[0, 1]) > 0.99
    plane, share = principal_plane(np.ones((3, 4)))
    assert plane.tolist() == [[0.0, 0.0]] * 3 and share == 0.0


FOUND = LabelledTexts(["one, two", "three"], ["a", "b"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", '{"text": "one, two", "label": "a"}\n\n{"label": "b", "text": "three"}\n'),
        ("x.csv", 'label,text\na,"one, two"\nb,three\n'),
        ("x.tsv", "text\tlabel\none, two\ta\nthree\tb\n"),
        ("x.txt", "a\tone, two\nb\tthree\n"),
    ],
)
def test_every_form_says_the_same(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_labelled(tmp_path / name) == FOUND
    assert read_labelled(tmp_path / name, labels=False) == FOUND


@pytest.mark.parametrize(("name", "content"), [("x.txt", "one\ntwo\n"), ("x.jsonl", '"one"\n{"text": "two"}')])
def test_labels_may_be_missing_where_none_are_wanted(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_labelled(tmp_path / name, labels=False) == LabelledTexts(["one", "two"], ["", ""])
    with pytest.raises(SettingsError, match="line 1: has no label"):
        read_labelled(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"{", "line 1: must be JSON"),
        ("x.jsonl", b"[1]", "line 1: must be an object"),
        ("x.csv", b"a,b\n1,2\n", "its first line must name the columns"),
        ("x.txt", b"a\t \n", "line 1: has no text"),
        ("x.txt", b"", "has no texts"),
        ("x.txt", b"\xff", "cannot be read"),
        ("none", None, "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        read_labelled(tmp_path / name)


TEXTS = ["first do it", "then do it right", "then do it better", "the weather is lovely", "it is sunny"]
LABELS = ["work", "work", "work", "weather", "weather"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> ComputingSettings:
    return ComputingSettings(cache=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"), "bert", layers=3)


@pytest.fixture(scope="module")
def layers(model: Path, cache: ComputingSettings) -> LayerStudy:
    return study_layers(model, TEXTS, LABELS, neighbours=1, computing=cache)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("layer", spread([-2, -3, -1]))
def test_a_layer_is_what_a_model_of_that_layer_says(
    layers: LayerStudy, model: Path, cache: ComputingSettings, pooling: str, layer: int
) -> None:
    text = TextSettings(pooling=pooling, layers=[layer], normalize=False)
    served = encode(model, TEXTS, text=text, computing=cache)
    np.testing.assert_allclose(layers.vectors[pooling][layer], served, rtol=1e-4, atol=1e-5)


def test_the_table_has_a_line_for_each_layer(layers: LayerStudy) -> None:
    columns, *lines = table(layers)
    assert [line[0] for line in lines] == ["-3", "-2", "-1"] and len(columns) == 7
    assert as_dict(layers)["mean"]["-1"]["knn_accuracy"] == pytest.approx(float(lines[-1][1]), abs=0.001)


def test_the_picture_has_a_panel_for_each_layer(layers: LayerStudy, tmp_path: Path) -> None:
    draw(layers, tmp_path / "layers.png")
    drawn = (tmp_path / "layers.svg").read_text()
    assert all(f"layer {layer}: kNN" in drawn for layer in (-3, -2, -1)) and "weather" in drawn
    with pytest.raises(SettingsError, match="pooling='median': must be one of mean, max, cls"):
        draw(layers, tmp_path / "layers.png", "median")


def test_progress_is_reported(model: Path, cache: ComputingSettings) -> None:
    told: list[tuple[int, int]] = []
    encode(model, TEXTS * 7, lambda done, of: told.append((done, of)), computing=cache)
    assert told == [(32, 35), (35, 35)]


def test_a_text_that_cannot_be_read_is_named(model: Path, cache: ComputingSettings) -> None:
    with pytest.raises(SettingsError, match="text 2: "):
        encode(model, ["one", "\ud800"], computing=cache)


def test_the_nearest_to_a_text_is_that_text(model: Path, cache: ComputingSettings) -> None:
    first, second = search(model, TEXTS, TEXTS[2], 2, computing=cache)
    assert (first.place, first.text) == (3, TEXTS[2]) and first.similarity == pytest.approx(1.0, abs=1e-5)
    assert second.similarity < first.similarity
