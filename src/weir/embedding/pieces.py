"""A text that is longer than the model reads, as pieces: each is computed like a text, and their vectors become one."""

from collections.abc import Sequence
from typing import Any

from weir.embedding.recipe import Pooling

_OF_HIGHEST = (Pooling.MAX, Pooling.HIERARCHICAL)


def highest_places(poolings: Sequence[Pooling], size: int) -> list[bool]:
    """Return of which of a vector's `size` numbers the highest is taken over pieces, as it is over tokens; of the others it is the mean."""
    parts = [
        part for each in poolings for part in ((Pooling.MEAN, Pooling.MAX) if each is Pooling.MEAN_MAX else (each,))
    ]
    return [part in _OF_HIGHEST for part in parts for _ in range(size // len(parts))]


class Pieces:
    """What has come of the pieces of one text: the mean of their vectors, each weighed by its tokens, but the highest of the numbers that
    `highest` says (all others: None); or, where each token has a vector, all of them in order."""

    __slots__ = ("_found", "_highest", "_left", "_normalize", "_weights")

    def __init__(self, weights: list[int], normalize: bool, highest: Sequence[bool] | None = None) -> None:
        self._highest = highest
        self._weights = weights
        self._left = len(weights)
        self._found: list[Any] = [None] * len(weights)
        self._normalize = normalize

    def put(self, piece: int, vector: Any) -> Any:
        """Keep the vector of a piece; return that of the text when all are there, else None."""
        self._found[piece] = vector
        self._left -= 1
        if self._left:
            return None
        import numpy

        if vector.ndim > 1:
            return numpy.concatenate(self._found)
        mean = numpy.average(self._found, axis=0, weights=self._weights)
        if self._highest is not None:
            mean = numpy.where(self._highest, numpy.max(self._found, axis=0), mean)
        if self._normalize:
            mean /= max(float(numpy.linalg.norm(mean)), 1e-12)
        return mean.astype(numpy.float32)
