"""Recompute the paper: `python -m reproduction [-o FOLDER]`, which `make reproduce` runs.

The report is FOLDER/smdp.md. It takes one to two minutes on one core.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from weir.commands.options import check_folder
from weir.errors import SettingsError
from weir.workers.cpus import compute_in_one_thread

if TYPE_CHECKING:
    from reproduction.report import Reproduction

FOLDER = Path(__file__).parents[1] / "docs" / "reproduction"


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says. Exits with 2 where the folder cannot be written."""
    parser = argparse.ArgumentParser("reproduction", description=__doc__)
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", type=Path, default=FOLDER, help="gets the report and its figures"
    )
    output: Path = parser.parse_args(arguments).output
    try:
        check_folder(output)
        if output.exists() and not output.is_dir():
            raise SettingsError(f"{output}: must be a folder, which gets the report and its figures")
    except SettingsError as error:
        parser.error(str(error))
    output.mkdir(exist_ok=True)
    compute_in_one_thread()
    from reproduction.claims import Verdict

    found = _with_progress(output)
    shares = ", ".join(f"{found.count(verdict)} {verdict.value}" for verdict in Verdict)
    print(f"{len(found.checked)} claims: {shares}")
    print(f"written: {found.path}")


def _with_progress(output: Path) -> "Reproduction":
    """Reproduce with a bar of progress, on stderr if that is a terminal."""
    from reproduction.report import reproduce

    console = Console(stderr=True)
    columns = (
        BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        return reproduce(
            output, lambda what, done, total: bar.update(task, completed=done, total=total, description=what)
        )


if __name__ == "__main__":
    main(sys.argv[1:])
