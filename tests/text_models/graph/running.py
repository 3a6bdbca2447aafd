"""Run a graph on texts of token ids, as a worker would."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.late import onnxruntime

from weir.text_models.graph import Graph
from weir.text_models.graph.building import write

Array = NDArray[Any]
TYPES = {"tensor(int32)": np.int32, "tensor(float)": np.float32}


class Running:
    """A session of one thread. `inputs` are the names of what the graph reads."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.types = {one.name: TYPES[one.type] for one in self.session.get_inputs()}

    def __call__(
        self, texts: Sequence[Array], seconds: Sequence[int] = (), *, mask_special: bool = False, width: int = 0
    ) -> Array:  # fmt: skip
        """Return the vectors of texts, filled up to `width` tokens at least."""
        shape = (len(texts), max(width, *map(len, texts)))
        ids, mask, types, pool = np.ones(shape), np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for row, (text, second) in enumerate(zip(texts, seconds or [0] * len(texts), strict=True)):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
            types[row, second : len(text)] = second > 0
            pool[row, mask_special : len(text) - mask_special] = 1
        given = {"ids": ids, "mask": mask, "types": types, "pool": pool}
        feeds = {name: given[name].astype(dtype) for name, dtype in self.types.items()}
        vectors: Array = self.session.run(["vectors"], feeds)[0]
        return vectors


def running(graph: Graph, folder: Path) -> Running:
    """Write a graph into a new folder, and open it."""
    folder.mkdir()
    return Running(write(graph, folder))


def cosines(first: Array, second: Array) -> Array:
    """Return the cosine of each pair of vectors; 1 for two that are zeros."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    equal = np.all(first == second, axis=-1)
    return np.where(equal, 1.0, (first * second).sum(axis=-1) / np.where(lengths == 0, 1, lengths))


def highest_mean(vectors: Array, window: int) -> Array:
    """Return the hierarchical pooling of the tokens [count, size] of a text, as Shen et al. (2018) describe it: the highest of the means over windows."""
    size = min(window, len(vectors))
    means = [vectors[start : start + size].mean(axis=0) for start in range(len(vectors) - size + 1)]
    highest: Array = np.max(means, axis=0)
    return highest
