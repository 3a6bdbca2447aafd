"""Writes model archives of TorchServe, as torch-model-archiver does."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def manifest(name: str, handler: str = "handler.py", **more: Any) -> str:
    return json.dumps(
        {"runtime": "python", "model": {"modelName": name, "handler": handler, "modelVersion": "1.0", **more}}
    )


def archive(path: Path, files: Mapping[str, str | bytes], handler: str = "handler.py", **more: Any) -> Path:
    """Write an archive with these files and a manifest; `more` are further keys of its model."""
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("MAR-INF/MANIFEST.json", manifest(path.stem, handler, **more))
        for name, content in files.items():
            made.writestr(name, content)
    return path
