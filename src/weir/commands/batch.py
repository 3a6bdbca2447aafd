"""`weir batch`: runs a file of requests without a server."""

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir.commands.options import CommandGroup, check_writable, flag, only, progress_bar, settings_of
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.app import App
    from weir.jobs import JobSettings
    from weir.jobs.offline import Source

batch = typer.Typer(cls=CommandGroup, help="Run a file of requests without a server.", no_args_is_help=True)
_CLASS = re.compile(r".+:[A-Za-z_]\w*")
_INPUT, _MODELS = "Requests", "Models"


@batch.callback()
def _batch() -> None:
    """Run a file of requests without a server."""


@batch.command()
def run(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Requests: .jsonl as in OpenAI's Batch API, or a table, .csv or .parquet."),
    ],
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="The models: module:Class, or directories or ids of text models."),
    ],
    output: Annotated[Path, flag("File to write the results to, as JSON lines.", _INPUT, "--output", "-o")],
    url: Annotated[str | None, flag("Endpoint for the rows of a table, such as /v1/embeddings.", _INPUT)] = None,
    column: Annotated[str | None, flag("Column of the table to send (default: text, or the only one).", _INPUT)] = None,
    model: Annotated[str, flag("Model to name in the requests for the rows of a table.", _INPUT)] = "",
    concurrency: Annotated[int, flag("Requests to run at once.", _INPUT)] = 512,
    config: Annotated[
        list[str] | None, flag("TOML file of settings, as for weir serve.", _MODELS, metavar="PATH")
    ] = None,
) -> None:
    """Run the requests in FILE on the models TARGET..., and write the results to a file in the order of the requests.

    An interrupted run, even by a power cut, continues when you start it again. If requests fail, their errors go to
    a file next to OUTPUT that ends in .errors.jsonl, and the exit code is 1.
    """
    from weir.jobs import JobSettings
    from weir.jobs.offline import Source, check_source
    from weir.telemetry import TelemetrySettings
    from weir.telemetry.logs import logging_to

    check_writable(output)
    settings = JobSettings(batch_concurrency=concurrency, batch_max_requests=1 << 40, batch_max_bytes=1 << 50)
    only(config)
    source = Source(file, url, column, model)
    check_source(source)
    with logging_to(TelemetrySettings(log_level="warning")):
        failed = asyncio.run(_run(source, output, targets, config, settings))
    raise typer.Exit(1 if failed else 0)


async def _run(
    source: "Source", output: Path, targets: list[str], config: list[str] | None, settings: "JobSettings"
) -> int:
    from weir.jobs.offline import check_endpoint_of, run

    app = await _app(targets, config)
    check_endpoint_of(source, app.site.endpoints)
    with progress_bar(source.path.name) as progress:
        async with app.loaded():
            done = await run(
                source, output, app.site.call, settings, max_line=app.settings.http.max_body_size, progress=progress
            )
    wrong = "" if done.errors is None else f", {done.failed} failed: {done.errors}"
    typer.echo(f"{done.completed} responses: {done.output}{wrong}")
    return done.failed


def _is_class(target: str) -> bool:
    return bool(_CLASS.fullmatch(target)) and not Path(target).exists()


async def _app(targets: list[str], config: list[str] | None) -> "App":
    """Return the application that has the models, which nothing listens for. Raises SettingsError."""
    from weir.app import App

    classes = [_is_class(target) for target in targets]
    if any(classes) != all(classes):
        raise SettingsError(f"TARGET {' '.join(targets)!r}: must all be module:Class, or all be text models")
    own: dict[str, list[Any] | None] = {"bulk_workers": [0]}  # there is no other work that it would give way to
    if all(classes):
        return App(settings_of(targets, config, own))
    from weir.text_server.calibration import no_progress
    from weir.text_server.server import compose
    from weir.text_server.server_settings import TEXTS

    server = await compose(settings_of(targets, config, own, TEXTS), lambda name: no_progress)
    return App(server.settings, product=server.product)
