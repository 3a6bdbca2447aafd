"""How well vectors keep classes apart, and the plane in which they differ most."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError

Floats = NDArray[Any]


class Separation(NamedTuple):
    """`knn_accuracy`: the share of texts whose nearest neighbours have its label in their majority. `silhouette`: from -1 to 1, how much nearer a text
    is to its own class than to the next (Rousseeuw, 1987)."""

    knn_accuracy: float
    silhouette: float


def separation(vectors: Floats, labels: Sequence[str], neighbours: int = 5) -> Separation:
    """Measure `vectors`, [texts, dimensions], by cosine distance. Raises SettingsError for fewer than two classes, or a class of one text."""
    check_labels(labels)
    distances = cosine_distances(vectors)
    return Separation(_knn_accuracy(distances, labels, neighbours), _silhouette(distances, labels))


def check_labels(labels: Sequence[str]) -> None:
    """Raise SettingsError unless there are two classes of two texts each, at least."""
    sizes = Counter(labels)
    if len(sizes) < 2:
        raise SettingsError(f"labels: there is one class, {labels[0]!r}; there must be two or more")
    for label, size in sizes.items():
        if size < 2:
            raise SettingsError(f"label {label!r}: has one text; a class has two or more")


def cosine_distances(vectors: Floats) -> Floats:
    """Return 1 - cosine of each with each, [texts, texts]."""
    unit = unit_vectors(vectors)
    return 1.0 - unit @ unit.T


def unit_vectors(vectors: Floats) -> Floats:
    """Return `vectors` at length 1; one of length 0 stays what it is."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return vectors / np.where(lengths, lengths, 1.0)


def _knn_accuracy(distances: Floats, labels: Sequence[str], neighbours: int) -> float:
    others = distances.copy()
    np.fill_diagonal(others, np.inf)  # nobody is his own neighbour
    count = min(neighbours, len(labels) - 1)
    nearest = np.argsort(others, axis=1, kind="stable")[:, :count]
    right = sum(_voted([labels[place] for place in row]) == label for row, label in zip(nearest, labels, strict=True))
    return right / len(labels)


def _voted(labels: list[str]) -> str:
    """Return the label that most have; among equals that of the nearest."""
    counts = Counter(labels)
    return max(counts, key=lambda label: (counts[label], -labels.index(label)))


def _silhouette(distances: Floats, labels: Sequence[str]) -> float:
    classes, own = np.unique(np.array(labels), return_inverse=True)
    member = np.eye(len(classes))[own]
    sizes = member.sum(axis=0)
    totals = distances @ member
    everyone = np.arange(len(labels))
    within = totals[everyone, own] / (sizes[own] - 1)
    means = totals / sizes
    means[everyone, own] = np.inf
    between = means.min(axis=1)
    widest = np.maximum(within, between)
    return float(np.mean(np.where(widest > 0, (between - within) / np.where(widest > 0, widest, 1.0), 0.0)))


def principal_plane(vectors: Floats) -> tuple[Floats, float]:
    """Return [texts, 2], the coordinates along the two directions of most variance (PCA), and the share of it that they hold."""
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    plane = np.zeros((len(vectors), 2))
    kept = min(2, len(sizes))
    plane[:, :kept] = left[:, :kept] * sizes[:kept]
    whole = float((sizes**2).sum())
    return plane, float((sizes[:2] ** 2).sum()) / whole if whole else 0.0
