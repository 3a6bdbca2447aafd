"""Which texts are nearest to a query."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weir.embedding.research.encoding import Progress, encode
from weir.embedding.research.separation import unit_vectors


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
