"""`weir reproduce`: recomputes what a paper says."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from weir.errors import SettingsError


class Paper(Enum):
    """What can be reproduced."""

    SMDP = "smdp"


def reproduce(
    paper: Annotated[Paper, typer.Argument(help="smdp: SMDP-based dynamic batching, arXiv 2301.12865.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder that gets the report and its figures.")
    ] = Path("reproduction"),
) -> None:
    """Recompute the paper behind the solver: its table, its figures and every claim, held against our own numbers.

    Takes some minutes on one core. The report is FOLDER/smdp.md.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from weir.workers.launch import compute_in_one_thread

    compute_in_one_thread()
    from weir.commands.files import check_drawing, check_folder
    from weir.simulation.paper.claims import Verdict
    from weir.simulation.reproduce import reproduce as recompute

    check_drawing()
    check_folder(output)
    if output.exists() and not output.is_dir():
        raise SettingsError(f"{output}: must be a folder, which gets the report and its figures")
    output.mkdir(exist_ok=True)
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        found = recompute(
            output, lambda what, done, total: bar.update(task, completed=done, total=total, description=what)
        )
    shares = ", ".join(f"{found.count(verdict)} {verdict.value}" for verdict in Verdict)
    typer.echo(f"{len(found.checked)} claims: {shares}")
    typer.echo(f"written: {found.path}")
