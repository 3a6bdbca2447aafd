"""How well vectors keep classes apart, against what can be worked out by hand."""

import numpy as np
import pytest

from weir.embedding.offline import check_labels, cosine_distances, principal_plane, separation
from weir.errors import SettingsError

EAST, NORTH, WEST = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]


def test_classes_that_are_points_are_apart() -> None:
    found = separation(np.array([EAST, EAST, NORTH, NORTH]), ["a", "a", "b", "b"], neighbours=1)
    assert found.knn_accuracy == 1.0 and found.silhouette == pytest.approx(1.0)


def test_labels_that_say_nothing_of_the_vectors() -> None:
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


def test_equal_vectors_have_no_plane() -> None:
    plane, share = principal_plane(np.ones((3, 4)))
    assert plane.tolist() == [[0.0, 0.0]] * 3 and share == 0.0
