"""Reads the items to measure with from a file or a folder."""

from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from weir.errors import SettingsError, WeirError
from weir.messages import JSON
from weir.profiling.items import Body
from weir.wire.values import decode


def read_items(path: Path) -> list[Any]:
    """Return the items in a file, or those that the files in a folder are; at least one.

    In a folder every file is a body in the model's own content type (pictures, say). In a file:
    `.npz`: named arrays of equal length, for a tensor model; their rows are the items. `.jsonl`: one item in JSON on each
    line. Anything else is either that or one JSON list. Raises SettingsError naming the file and, in lines, the line.
    """
    try:
        items = _items(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"items={path}: cannot be read: {error}") from error
    if not items:
        raise SettingsError(f"items={path}: there are none in it")
    return items


def _items(path: Path) -> list[Any]:
    if path.is_dir():
        return [Body(file.read_bytes()) for file in sorted(path.iterdir()) if file.is_file()]
    return _rows(path) if path.suffix == ".npz" else _values(path.read_text("utf-8"), path)


def _values(text: str, path: Path) -> list[Any]:
    if path.suffix not in (".jsonl", ".ndjson"):
        with suppress(WeirError):
            whole = decode(text.encode(), JSON)
            return whole if isinstance(whole, list) else [whole]
    return [_line(line, number, path) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _line(line: str, number: int, path: Path) -> Any:
    try:
        return decode(line.encode(), JSON)
    except WeirError as error:
        raise SettingsError(
            f"items={path}: line {number}: {error.message}; must be a JSON list, or one item in JSON on each line"
        ) from None


def _rows(path: Path) -> list[Any]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, EOFError, BadZipFile) as error:
        raise SettingsError(f"items={path}: must be arrays saved by numpy.savez: {error}") from error
    return [arrays] if arrays else []
