"""What the commands share that compute vectors themselves: which model, and a bar."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.embedding.offline import Progress


def directory_of(model: Path | None) -> Path:
    """Return the model's directory; without one that of the small model. Raises SettingsError if it is not installed."""
    from weir.embedding.server_settings import INSTALL, installed_model

    found = model or installed_model()
    if found is None:
        raise SettingsError(f"no model: name a directory with --model, or install the small one: {INSTALL}")
    return found


@contextmanager
def bar(title: str) -> "Iterator[Progress]":
    """Show on stderr, if it is a terminal, how many texts are encoded."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
