"""Vectors of many texts, computed in this process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.embedding.model import TextEncoder
from weir.errors import SettingsError

_TOGETHER = 32  # texts between two steps of a progress bar
POOLINGS = ("mean", "max", "cls")

Progress = Callable[[int, int], None]  # how many texts are done, of how many


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
