"""A text that is longer than the model reads, as pieces: each is computed like a text, and their vectors become one."""

from typing import Any


class Pieces:
    """What has come of the pieces of one text: the mean of their vectors, each weighed by its tokens; or, where each token has a
    vector, all of them in order."""

    __slots__ = ("_found", "_left", "_normalize", "_weights")

    def __init__(self, weights: list[int], normalize: bool) -> None:
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
        if self._normalize:
            mean /= max(float(numpy.linalg.norm(mean)), 1e-12)
        return mean.astype(numpy.float32)
