"""How far vectors of length 1 are from the exact ones of the same texts, and how far they rank the texts otherwise."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Likeness(NamedTuple):
    """What `compare` found."""

    mean: float  # of the cosines of each vector with the exact one
    least: float
    ranked: float  # Spearman's rank correlation, of the similarities of all pairs
    nearest: float  # the share of texts whose nearest stays the nearest

    def shown(self) -> list[str]:
        """Return the cells of COLUMNS."""
        return [f"{self.mean:.6f}", f"{self.least:.6f}", f"{self.ranked:.4f}", f"{100 * self.nearest:.1f} %"]


COLUMNS = ["cosine (mean)", "(least)", "rank correlation", "nearest is the same"]


def compare(found: Array, exact: Array) -> Likeness:
    """Compare vectors, one a row."""
    from scipy.stats import spearmanr

    cosines = (found * exact).sum(axis=1)
    mine, theirs = found @ found.T, exact @ exact.T
    pairs = np.triu_indices(len(found), 1)
    ranked = spearmanr(mine[pairs], theirs[pairs]).statistic
    for similar in (mine, theirs):
        np.fill_diagonal(similar, -1)
    nearest = (mine.argmax(axis=1) == theirs.argmax(axis=1)).mean()
    return Likeness(float(cosines.mean()), float(cosines.min()), float(ranked), float(nearest))
