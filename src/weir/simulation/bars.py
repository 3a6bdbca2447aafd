"""Progress of a simulation in the terminal."""

from typing import Self

from rich.console import Console
from rich.progress import Progress, Task, TaskID


class Bars:
    """A bar per policy, on stderr if that is a terminal. To be given to `simulate` as `progress`."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._ids: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    @property
    def tasks(self) -> list[Task]:
        """The bars."""
        return self._progress.tasks

    def __call__(self, policy: str, done: int, total: int) -> None:
        """So many requests of that policy are done."""
        task = self._ids.get(policy)
        if task is None:
            task = self._ids[policy] = self._progress.add_task(policy, total=total)
        self._progress.update(task, completed=done)
