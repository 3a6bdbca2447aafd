"""The hierarchical pooling of one text, as Shen et al. (2018) describe it: means over windows, then the highest of each number."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def highest_mean(vectors: Array, window: int) -> Array:
    """Return the pooled vector of tokens [count, size]; a text that is shorter than a window is one."""
    size = min(window, len(vectors))
    means = [vectors[start : start + size].mean(axis=0) for start in range(len(vectors) - size + 1)]
    highest: Array = np.max(means, axis=0)
    return highest
