"""Open a model as its workers do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weir.text_models.model import TextEncoder


def opened(directory: Path, cache: Path | None = None, **options: Any) -> TextEncoder:
    """Open a model with these arguments of TextEncoder."""
    model = TextEncoder(str(directory), cache=str(cache or directory / "cache"), **options)
    model.load_shared()
    model.load()
    return model


def results(directory: Path, texts: Sequence[Any], cache: Path | None = None, **options: Any) -> list[Any]:
    """Return the result of each text or pair."""
    model = opened(directory, cache, **options)
    return model.predict(model.preprocess_batch(list(texts)))
