"""`weir bench`: puts load on a server, and measures it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir.bench import HttpOptions, LoadSettings
from weir.commands.options import (
    STDOUT,
    check_results,
    flag,
    print_table,
    values_of,
    with_declared,
    write_json,
)
from weir.errors import SettingsError
from weir.settings import declared_by

if TYPE_CHECKING:
    from weir.bench import Report

FAILED = 1

_URL = (
    "http(s)://HOST:PORT/PATH, http://unix:SOCKET:/PATH, grpc(s)://HOST:PORT/MODEL or ws(s)://HOST:PORT/MODEL. With #binary"
    " after .../v2/models/MODEL/infer or ws://..., tensors are sent as raw bytes."
)
_DATA = (
    "The body to send, @FILE, or @FILE.jsonl to send its lines in turn (default: the model's own example)."
    " For gRPC, WebSocket and #binary, the inference request as JSON."
)
_LOAD, _OPTIONS = declared_by(LoadSettings, "Load"), declared_by(HttpOptions, "Requests")
_REQUESTS, _RESULT = "Requests", "Result"


@with_declared(*_LOAD, *(each for each in _OPTIONS if each.name != "headers"))
def bench(
    targets: Annotated[list[str] | None, typer.Argument(metavar="[URL]...", help=_URL)] = None,
    data: Annotated[str | None, flag(_DATA, _REQUESTS)] = None,
    header: Annotated[
        list[str] | None,
        flag("Header to send with each request; repeatable.", _REQUESTS, "--header", "-H", metavar="NAME: VALUE"),
    ] = None,
    json: Annotated[Path | None, flag("File to write the result to as JSON; - prints it.", _RESULT)] = None,
    **options: list[Any] | None,
) -> int:
    """Load-test a server. Response times count from when each request was due to be sent.

    Several targets get the same load, in turns. The exit code is 1 if the measurement is invalid, because requests were
    sent later than --max-lag-ms or none succeeded, and 2 if a setting is wrong or no server responds.
    """
    from rich.console import Console

    from weir.bench import ServerTarget, run_shown

    load = LoadSettings(**values_of(_LOAD, options))
    http = HttpOptions(_headers(header or []), **values_of(_OPTIONS, options))
    http = replace(http, max_connections=min(http.max_connections, load.concurrency or http.max_connections))
    if not targets:
        raise SettingsError("nothing to measure: give a URL")
    made = [ServerTarget(url, data, http) for url in targets]
    check_results(json)
    report = run_shown(made, load, progress=Console(stderr=True).is_terminal)
    _write(report, json)
    for line in [*(f"warning: {each}" for each in report.warnings), *report.failures]:
        typer.echo(f"weir: {line}", err=True)
    return FAILED if report.failures else 0


def _headers(lines: Sequence[str]) -> dict[str, str]:
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not (colon and name.strip()) or not line.isprintable():
            raise SettingsError(f"--header={line!r}: must be NAME: VALUE")
        headers[name.strip()] = value.strip()
    return headers


def _write(report: "Report", json: Path | None) -> None:
    from rich.console import Console

    from weir.bench.run import headline, table, to_dict

    console = Console(highlight=False)
    if json != STDOUT:
        console.print(headline(report), markup=False, soft_wrap=True)
        print_table(console, table(report))
    write_json(to_dict(report), json)
