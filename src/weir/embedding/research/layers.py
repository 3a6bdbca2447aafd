"""What each layer of a model says of labelled texts: the picture that bert-as-service is known by, and numbers for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.embedding.checkpoint.reading import read_checkpoint
from weir.embedding.research.encoding import POOLINGS, Progress, encode_layers
from weir.embedding.research.separation import Separation, check_labels, principal_plane, separation
from weir.errors import SettingsError
from weir.figures import COLOURS, MARKERS, figure

_WIDEST = 4  # panels in a row


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
