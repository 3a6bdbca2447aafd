"""Repositories in temporary folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weir import Service
from weir.catalog.loading import make_service
from weir.catalog.repository.folder import FolderRepository
from weir.settings import read_model_table

PLAIN = "import weir\n\nclass Plain(weir.Model):\n    def predict(self, batch):\n        return [{answer!r} for _ in batch]\n"


def write(root: Path, files: Mapping[str, str | bytes]) -> FolderRepository:
    """Write `files` under `root`, and return it as a repository."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return FolderRepository(root, read_model_table)


def plain(answer: Any = 1) -> str:
    """Return the code of a model that always answers the same."""
    return PLAIN.format(answer=answer)


def services(folder: FolderRepository, name: str) -> list[Service]:
    """Return a service of each version, not started."""
    return [make_service(model, ()) for model in folder.read(name).versions]
