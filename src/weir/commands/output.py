"""What commands print and write: tables whose columns are never cut off, and files that are checked first and written whole."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from weir.errors import SettingsError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


STDOUT = Path("-")


def check_writable(path: Path) -> None:
    """Raise SettingsError, before anything takes time, if the file `path` cannot be written."""
    if path.is_dir():
        raise SettingsError(f"{path}: cannot be written: it is a folder; must be a file")
    check_folder(path)


def check_figure(path: Path) -> None:
    """Raise SettingsError, before anything takes time, if the figure `path` cannot be written as .png and .svg."""
    from weir.figures import files_of

    for file in files_of(path) if path.name else (path,):
        check_writable(file)


def check_folder(path: Path) -> None:
    """Raise SettingsError, before anything takes time, if there is no place for the file or folder `path`."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingsError(f"{path}: cannot be written: {folder} must be a folder that you may write to")


def can_draw() -> bool:
    """Tell whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def check_drawing(option: str = "--figure") -> None:
    """Raise SettingsError naming the `option`, before anything takes time, if nothing can be drawn."""
    if not can_draw():
        raise SettingsError(f"{option}: drawing needs matplotlib: pip install 'weir-serving[plots]'")


def check_results(*files: Path | None, figure: Path | None = None, option: str = "--figure") -> None:
    """Raise SettingsError, before anything takes time, for a result that could not be written after it.

    None is no path, and - is stdout. `option` is what the figure is asked for with.
    """
    for path in files:
        if path is not None and path != STDOUT:
            check_writable(path)
    if figure is not None:
        check_drawing(option)
        check_figure(figure)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` so that whoever reads `path` sees all of it or what was there before.

    Raises SettingsError, naming `path`, if it cannot be written: the disk is full, or it was never a place for files.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)


UNBOUNDED = 10_000  # columns


def print_table(console: "Console", table: "Table") -> None:
    """Print `table`, as wide as it must be: a terminal that is narrower breaks its lines, a file has no width.

    Only columns that say that they fold are made narrower.
    """
    from rich.measure import Measurement

    before, unbounded = console.width, console.options.update_width(UNBOUNDED)
    most = least = Measurement.get(console, unbounded, table).maximum
    for column in table.columns:
        width = max(Measurement.get(console, unbounded, cell).maximum for cell in column.cells)
        if column.overflow == "fold":
            least -= max(0, width - (column.min_width or 1))
        else:
            column.no_wrap, column.min_width = True, width
    console.width = max(least, min(most, before)) if console.is_terminal else most
    try:
        console.print(table)
    finally:
        console.width = before
