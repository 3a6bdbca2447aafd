"""`weir reproduce`: names the command that has replaced it. The next release removes this one."""

from typing import Annotated

import typer

from weir.errors import SettingsError


def reproduce(
    paper: Annotated[str, typer.Argument(help="The paper: smdp.")] = "smdp",
    output: Annotated[str, typer.Option("--output", "-o", metavar="FOLDER", help="Ignored.")] = "",
) -> None:
    """Removed: run `make reproduce` in a checkout of Weir to recompute the paper behind the solver."""
    raise SettingsError("weir reproduce has moved: run `make reproduce` in a checkout of Weir")
