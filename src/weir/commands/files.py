"""Files that commands write: refused before anything takes time, and never seen half written."""

import os
from pathlib import Path

from weir.errors import SettingsError


def check_writable(path: Path) -> None:
    """Raise SettingsError, before anything takes time, if `path` cannot be written."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingsError(f"{path}: cannot be written: {folder} must be a folder that you may write to")


def check_drawing() -> None:
    """Raise SettingsError, before anything takes time, if nothing can be drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise SettingsError("--figure: drawing needs matplotlib: pip install 'weir-serving[plots]'")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` so that whoever reads `path` sees all of it or what was there before."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
