"""Open a model as its workers do, and the settings of a server of small models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weir.text_models import WorkerShare, split_settings
from weir.text_models.model import TextEncoder

SETTINGS: dict[str, Any] = {"port": 0, "executor": "thread", "threads": 1, "device_map": ["cpu"], "calibrate": False}


def params_of(directory: Path, cache: Path, **settings: Any) -> dict[str, Any]:
    """Return the arguments of TextEncoder for these settings and parts of a WorkerShare."""
    text, computing, share = split_settings({"cache": str(cache), **settings})
    return {"directory": directory, "text": text, "computing": computing, "share": WorkerShare(**share)}


def opened(directory: Path, cache: Path | None = None, **settings: Any) -> TextEncoder:
    """Open a model with these settings."""
    model = TextEncoder(**params_of(directory, cache or directory / "cache", **settings))
    model.load_shared()
    model.load()
    return model


def results(directory: Path, texts: Sequence[Any], cache: Path | None = None, **settings: Any) -> list[Any]:
    """Return the result of each text or pair."""
    model = opened(directory, cache, **settings)
    return model.predict(model.preprocess_batch(list(texts)))
