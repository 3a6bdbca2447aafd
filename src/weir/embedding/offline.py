"""What `weir embed layers` and `weir embed search` compute, in the command's own process.

`study_layers` encodes labelled texts with every layer of a model and measures how far each layer keeps the labels apart. `search` finds the
texts that are nearest to a query.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.embedding.checkpoint.reading import read_checkpoint
from weir.embedding.model import TextEncoder
from weir.errors import SettingsError
from weir.figures import COLOURS, MARKERS, figure

Floats = NDArray[Any]
Progress = Callable[[int, int], None]  # how many texts are done, of how many

POOLINGS = ("mean", "max", "cls")
LARGEST = 1 << 28  # bytes of a file of texts
_TOGETHER = 32  # texts between two steps of a progress bar
_WIDEST = 4  # panels in a row of the picture


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
    np.fill_diagonal(others, np.inf)  # no text is its own neighbour
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


def _quiet(done: int, of: int) -> None:
    """Show nothing."""


def encode(directory: Path, texts: Sequence[str], progress: Progress = _quiet, **chosen: Any) -> NDArray[np.float32]:
    """Return the vectors of `texts`, [texts, dimensions]; `chosen` are arguments of TextEncoder.

    Raises SettingsError naming a text that cannot be read.
    """
    model = _opened(directory, **chosen)
    vectors = [vector for _, group in _groups(model, texts, progress) for vector in group]
    return np.stack(vectors)


def encode_layers(
    directory: Path, texts: Sequence[str], layers: int, progress: Progress = _quiet, **chosen: Any
) -> dict[str, NDArray[np.float32]]:
    """Return for each of POOLINGS the vectors of `texts` in each layer, [layers, texts, dimensions], the first layer first.

    The special tokens count in `mean` and `max`, as they do when a model is served without `--mask-special`.
    """
    model = _opened(directory, pooling="none", layers=tuple(range(-layers, 0)), normalize=False, **chosen)
    pooled: dict[str, list[Any]] = {name: [] for name in POOLINGS}
    for _, group in _groups(model, texts, progress):
        for tokens in group:
            each = tokens.reshape(len(tokens), layers, -1)
            for name, vector in (("mean", each.mean(axis=0)), ("max", each.max(axis=0)), ("cls", each[0])):
                pooled[name].append(vector)
    return {name: np.stack(vectors, axis=1) for name, vectors in pooled.items()}


def _opened(directory: Path, **chosen: Any) -> TextEncoder:
    model = TextEncoder(str(directory), **chosen)
    model.load_shared()
    model.load()
    return model


def _groups(model: TextEncoder, texts: Sequence[str], progress: Progress) -> Iterator[tuple[int, list[Any]]]:
    for start in range(0, len(texts), _TOGETHER):
        read = model.preprocess_batch(list(texts[start : start + _TOGETHER]))
        for place, each in enumerate(read, start):
            if isinstance(each, Exception):
                raise SettingsError(f"text {place + 1}: {each}")
        yield start, model.predict(read)
        progress(min(start + _TOGETHER, len(texts)), len(texts))


class Hit(NamedTuple):
    """A text, its place in the file (from 1), and the cosine of its vector and the query's."""

    place: int
    text: str
    similarity: float


def search(
    directory: Path, texts: Sequence[str], query: str, top: int, progress: Progress = lambda done, of: None,
    **chosen: Any,
) -> list[Hit]:  # fmt: skip
    """Return the `top` texts nearest to `query`, the nearest first. Raises SettingsError naming a text that cannot be read."""
    wanted = encode(directory, [query], **chosen)
    similarities = unit_vectors(encode(directory, texts, progress, **chosen)) @ unit_vectors(wanted)[0]
    nearest = np.argsort(-similarities, kind="stable")[:top]
    return [Hit(int(place) + 1, texts[place], float(similarities[place])) for place in nearest]


class Labelled(NamedTuple):
    """Texts, and the label of each; "" where there is none."""

    texts: list[str]
    labels: list[str]


def read_labelled(path: Path, *, labels: bool = True) -> Labelled:
    """Return the texts of a file, with `labels` those that each must have.

    .jsonl: an object per line with `text` and `label`, or without labels a string. .csv and .tsv: a first line that names the columns text and
    label. Any other file: a text per line, before it its label and a tab. Empty lines are passed over. Raises SettingsError naming the line.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise SettingsError(f"{path}: is larger than {LARGEST >> 20} MiB")
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    read = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _table, ".tsv": _table}.get(path.suffix, _lines)
    found = Labelled([], [])
    for number, text, label in read(path, content):
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


class Layers(NamedTuple):
    """`vectors` by pooling, [layers, texts, dimensions]; `separations` by pooling, one for each layer, the first layer first."""

    labels: list[str]
    vectors: dict[str, NDArray[np.float32]]
    separations: dict[str, list[Separation]]


def study_layers(
    directory: Path, texts: Sequence[str], labels: Sequence[str], *, neighbours: int = 5,
    progress: Progress = lambda done, of: None, **chosen: Any,
) -> Layers:  # fmt: skip
    """Encode `texts` with every layer of the model and every pooling of POOLINGS, and measure how far they keep `labels` apart.

    `chosen` are arguments of TextEncoder, such as max_length. Raises SettingsError.
    """
    check_labels(labels)
    count = read_checkpoint(directory).architecture.layers
    vectors = encode_layers(directory, texts, count, progress, **chosen)
    separations = {
        pooling: [separation(of_layer, labels, neighbours) for of_layer in found] for pooling, found in vectors.items()
    }
    return Layers(list(labels), vectors, separations)


def table(layers: Layers) -> list[list[str]]:
    """Return the table's lines, the names of its columns first: a line for each layer, the last one -1."""
    names = [f"{pooling}: {what}" for pooling in POOLINGS for what in ("kNN accuracy", "silhouette")]
    lines = [["layer", *names]]
    count = len(layers.separations[POOLINGS[0]])
    for layer in range(count):
        found = [layers.separations[pooling][layer] for pooling in POOLINGS]
        lines.append([str(layer - count), *(f"{number:.3f}" for each in found for number in each)])
    return lines


def to_dict(layers: Layers) -> dict[str, Any]:
    """Return the numbers, JSON-able: by pooling, by layer."""
    return {
        pooling: {str(place - len(found)): each._asdict() for place, each in enumerate(found)}
        for pooling, found in layers.separations.items()
    }


def draw(layers: Layers, path: Path, pooling: str = "mean") -> None:
    """Write `path` as PNG and SVG: a panel per layer, each its own two directions of most variance; a colour and a mark per label."""
    if pooling not in POOLINGS:
        raise SettingsError(f"pooling={pooling!r}: must be one of {', '.join(POOLINGS)}")
    found, classes = layers.vectors[pooling], sorted(set(layers.labels))
    columns = next((each for each in (_WIDEST, _WIDEST - 1) if len(found) % each == 0), min(_WIDEST, len(found)))
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
        width = 0.8 if marks["marker"] == "x" else 0.0  # which is nothing but lines
        panel.scatter(own[:, 0], own[:, 1], s=9, alpha=0.75, linewidths=width, label=label, **marks)
    panel.set(xticks=[], yticks=[])
    panel.set_xlabel(f"{share:.0%} of the variance", fontsize=7)
