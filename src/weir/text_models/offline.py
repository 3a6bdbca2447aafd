"""The computations of `weir embed layers` and `weir embed search`, in the command's own process.

`study_layers` encodes labelled texts with every layer of a model and measures how well each layer separates the labels. `search` finds the texts that are
nearest to a query.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.figures import COLOURS, MARKERS, figure
from weir.text_models import DEFAULT_COMPUTING, DEFAULT_TEXT, ComputingSettings, TextSettings
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.model import TextEncoder

Floats = NDArray[Any]
Progress = Callable[[int, int], None]  # called with the number of texts that are done, and of all texts

POOLINGS = ("mean", "max", "cls")
MAX_FILE_BYTES = 1 << 28  # of a file of texts
_GROUP = 32  # texts between two steps of the progress
_MAX_COLUMNS = 4  # panels in a row of the figure


class Separation(NamedTuple):
    """How well vectors separate labels.

    Attributes:
        knn_accuracy: the share of texts whose label is the most frequent one among their nearest neighbours.
        silhouette: the mean silhouette, from -1 to 1: how much nearer a text is to its own class than to the nearest other one (Rousseeuw, 1987).
    """

    knn_accuracy: float
    silhouette: float


def separation(vectors: Floats, labels: Sequence[str], neighbours: int = 5) -> Separation:
    """Measure how well `vectors` [texts, dimensions] separate `labels`, by cosine distance and with so many `neighbours`.

    Raises SettingsError for fewer than two classes, or a class of one text.
    """
    check_labels(labels)
    distances = cosine_distances(vectors)
    return Separation(_knn_accuracy(distances, labels, neighbours), _silhouette(distances, labels))


def check_labels(labels: Sequence[str]) -> None:
    """Raise SettingsError unless there are at least two classes, each with at least two texts."""
    sizes = Counter(labels)
    if len(sizes) < 2:
        raise SettingsError(f"labels: there is one class, {labels[0]!r}; there must be two or more")
    for label, size in sizes.items():
        if size < 2:
            raise SettingsError(f"label {label!r}: has one text; a class has two or more")


def cosine_distances(vectors: Floats) -> Floats:
    """Return 1 - cosine for each pair of vectors, [texts, texts]."""
    unit = unit_vectors(vectors)
    return 1.0 - unit @ unit.T


def unit_vectors(vectors: Floats) -> Floats:
    """Return `vectors` scaled to length 1; a vector of zeros stays zeros."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return vectors / np.where(lengths, lengths, 1.0)


def _knn_accuracy(distances: Floats, labels: Sequence[str], neighbours: int) -> float:
    others = distances.copy()
    np.fill_diagonal(others, np.inf)  # no text is its own neighbour
    count = min(neighbours, len(labels) - 1)
    nearest = np.argsort(others, axis=1, kind="stable")[:, :count]
    correct = sum(
        _majority_label([labels[place] for place in row]) == label for row, label in zip(nearest, labels, strict=True)
    )
    return correct / len(labels)


def _majority_label(labels: list[str]) -> str:
    """Return the most frequent label; of several, that of the nearest neighbour. `labels` are those of the neighbours, the nearest first."""
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
    """Return the coordinates [texts, 2] along the two directions of greatest variance (PCA), and their share of the variance."""
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    plane = np.zeros((len(vectors), 2))
    kept = min(2, len(sizes))
    plane[:, :kept] = left[:, :kept] * sizes[:kept]
    whole = float((sizes**2).sum())
    return plane, float((sizes[:2] ** 2).sum()) / whole if whole else 0.0


def _quiet(done: int, of: int) -> None:
    """Show nothing."""


def encode(
    directory: Path,
    texts: Sequence[str],
    progress: Progress = _quiet,
    text: TextSettings = DEFAULT_TEXT,
    computing: ComputingSettings = DEFAULT_COMPUTING,
) -> NDArray[np.float32]:
    """Return the vectors of `texts`, [texts, dimensions], by a model with these settings.

    Raises SettingsError if the model cannot be loaded, or naming an invalid text.
    """
    return np.stack([vector for group in _groups(directory, texts, progress, text, computing) for vector in group])


def encode_layers(
    directory: Path,
    texts: Sequence[str],
    layers: int,
    progress: Progress = _quiet,
    text: TextSettings = DEFAULT_TEXT,
    computing: ComputingSettings = DEFAULT_COMPUTING,
) -> dict[str, NDArray[np.float32]]:
    """Return for each of POOLINGS the vectors of `texts` in each of the last `layers` layers, [layers, texts, dimensions], in order of the layers.

    The special tokens count in `mean` and `max`, as when a model is served without `--mask-special`. Raises SettingsError as `encode` does.
    """
    text = replace(text, pooling="none", layers=list(range(-layers, 0)), normalize=False)
    pooled: dict[str, list[Any]] = {name: [] for name in POOLINGS}
    for group in _groups(directory, texts, progress, text, computing):
        for tokens in group:
            each = tokens.reshape(len(tokens), layers, -1)
            for name, vector in (("mean", each.mean(axis=0)), ("max", each.max(axis=0)), ("cls", each[0])):
                pooled[name].append(vector)
    return {name: np.stack(vectors, axis=1) for name, vectors in pooled.items()}


def _groups(
    directory: Path, texts: Sequence[str], progress: Progress, text: TextSettings, computing: ComputingSettings
) -> Iterator[list[Any]]:
    """Yield the vectors of the texts, a group at a time."""
    model = TextEncoder(directory, text, computing)
    model.load_shared()
    model.load()
    for start in range(0, len(texts), _GROUP):
        tokenized = model.preprocess_batch(list(texts[start : start + _GROUP]))
        for place, each in enumerate(tokenized, start):
            if isinstance(each, Exception):
                raise SettingsError(f"text {place + 1}: {each}")
        yield model.predict(tokenized)
        progress(min(start + _GROUP, len(texts)), len(texts))


class SearchHit(NamedTuple):
    """A text that was found: its place among the texts, from 1, and the cosine of its vector and that of the query."""

    place: int
    text: str
    similarity: float


def search(
    directory: Path,
    texts: Sequence[str],
    query: str,
    top: int,
    progress: Progress = _quiet,
    text: TextSettings = DEFAULT_TEXT,
    computing: ComputingSettings = DEFAULT_COMPUTING,
) -> list[SearchHit]:
    """Return the `top` texts with the greatest cosine to `query`, in that order. Raises SettingsError as `encode` does."""
    *vectors, wanted = unit_vectors(encode(directory, [*texts, query], progress, text, computing))
    similarities = np.stack(vectors) @ wanted
    nearest = np.argsort(-similarities, kind="stable")[:top]
    return [SearchHit(int(place) + 1, texts[place], float(similarities[place])) for place in nearest]


class LabelledTexts(NamedTuple):
    """Texts, and the label of each: "" for a text without one."""

    texts: list[str]
    labels: list[str]


def read_labelled(path: Path, *, labels: bool = True) -> LabelledTexts:
    """Return the texts of a file and their labels. With `labels`, each text must have one.

    The format depends on the suffix. Empty lines are skipped.

    - .jsonl, .ndjson: each line is an object with `text` and `label`, or a string without a label;
    - .csv, .tsv: the first line names the columns, among them text and label;
    - others: each line is a label, a tab and a text, or a text without a label.

    Raises SettingsError naming the file, the line and the rule.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path}: is larger than {MAX_FILE_BYTES >> 20} MiB")
        content = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    parse = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _table, ".tsv": _table}.get(path.suffix, _lines)
    found = LabelledTexts([], [])
    for number, text, label in parse(path, content):
        if not text.strip():
            raise SettingsError(f"{path}, line {number}: has no text")
        if labels and not label:
            raise SettingsError(f"{path}, line {number}: has no label")
        found.texts.append(text)
        found.labels.append(label)
    if not found.texts:
        raise SettingsError(f"{path}: has no texts")
    return found


def _json_lines(path: Path, content: str) -> Any:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise SettingsError(f"{path}, line {number}: must be JSON: {error}") from error
            table = {"text": value} if isinstance(value, str) else value
            if not (isinstance(table, dict) and isinstance(table.get("text"), str)):
                raise SettingsError(f'{path}, line {number}: must be an object with "text", or a text')
            yield number, table["text"], str(table.get("label", ""))


def _table(path: Path, content: str) -> Any:
    rows = csv.DictReader(content.splitlines(keepends=True), delimiter="\t" if path.suffix == ".tsv" else ",")
    if "text" not in (rows.fieldnames or ()):
        raise SettingsError(f"{path}: its first line must name the columns, one of them text")
    for row in rows:
        yield rows.line_num, row["text"] or "", row.get("label") or ""


def _lines(path: Path, content: str) -> Any:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            label, tab, text = line.partition("\t")
            yield (number, text, label) if tab else (number, line, "")


class LayerStudy(NamedTuple):
    """The vectors of labelled texts in every layer, and how well each layer separates the labels.

    Attributes:
        labels: the label of each text.
        vectors: by pooling, [layers, texts, dimensions].
        separations: by pooling, a separation for each layer in order.
    """

    labels: list[str]
    vectors: dict[str, NDArray[np.float32]]
    separations: dict[str, list[Separation]]


def study_layers(
    directory: Path,
    texts: Sequence[str],
    labels: Sequence[str],
    *,
    neighbours: int = 5,
    progress: Progress = _quiet,
    text: TextSettings = DEFAULT_TEXT,
    computing: ComputingSettings = DEFAULT_COMPUTING,
) -> LayerStudy:
    """Encode `texts` with every layer of the model and every pooling of POOLINGS, and measure how well each separates `labels`.

    Raises SettingsError as `separation` and `encode` do.
    """
    check_labels(labels)
    count = read_checkpoint(directory).architecture.layers
    vectors = encode_layers(directory, texts, count, progress, text, computing)
    separations = {
        pooling: [separation(of_layer, labels, neighbours) for of_layer in found] for pooling, found in vectors.items()
    }
    return LayerStudy(list(labels), vectors, separations)


def table(layers: LayerStudy) -> list[list[str]]:
    """Return the rows of a table, the names of the columns first: a row for each layer, counted from the end, so that the last is -1."""
    names = [f"{pooling}: {what}" for pooling in POOLINGS for what in ("kNN accuracy", "silhouette")]
    lines = [["layer", *names]]
    count = len(layers.separations[POOLINGS[0]])
    for layer in range(count):
        found = [layers.separations[pooling][layer] for pooling in POOLINGS]
        lines.append([str(layer - count), *(f"{number:.3f}" for each in found for number in each)])
    return lines


def as_dict(layers: LayerStudy) -> dict[str, Any]:
    """Return the separations as JSON: by pooling, then by layer, counted from the end."""
    return {
        pooling: {str(place - len(found)): each._asdict() for place, each in enumerate(found)}
        for pooling, found in layers.separations.items()
    }


def draw(layers: LayerStudy, path: Path, pooling: str = "mean") -> None:
    """Draw the figure `path` as PNG and SVG. Each layer has a panel with the plane of greatest variance of its vectors; each label a colour and a mark.

    Raises SettingsError for a pooling that is not in POOLINGS.
    """
    if pooling not in POOLINGS:
        raise SettingsError(f"pooling={pooling!r}: must be one of {', '.join(POOLINGS)}")
    found, classes = layers.vectors[pooling], sorted(set(layers.labels))
    columns = next(
        (each for each in (_MAX_COLUMNS, _MAX_COLUMNS - 1) if len(found) % each == 0), min(_MAX_COLUMNS, len(found))
    )
    rows = -(-len(found) // columns)
    labels = np.array(layers.labels)
    with figure(path, rows, columns, size=(3.0 * columns, 2.9 * rows + 0.6)) as (drawing, axes):
        for place, panel in enumerate(axes.flat):
            if place >= len(found):
                panel.set_visible(False)
                continue
            _draw_panel(panel, found[place], labels, classes)
            each = layers.separations[pooling][place]
            panel.set_title(
                f"layer {place - len(found)}: kNN {each.knn_accuracy:.2f}, silhouette {each.silhouette:.2f}", fontsize=8
            )
        drawing.legend(
            *axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(6, len(classes))
        )


def _draw_panel(panel: Any, vectors: NDArray[Any], labels: NDArray[Any], classes: list[str]) -> None:
    plane, share = principal_plane(vectors)
    for number, label in enumerate(classes):
        own = plane[labels == label]
        marks = {"marker": MARKERS[number % len(MARKERS)], "color": COLOURS[number % len(COLOURS)]}
        width = 0.8 if marks["marker"] == "x" else 0.0  # an x consists of lines alone
        panel.scatter(own[:, 0], own[:, 1], s=9, alpha=0.75, linewidths=width, label=label, **marks)
    panel.set(xticks=[], yticks=[])
    panel.set_xlabel(f"{share:.0%} of the variance", fontsize=7)
