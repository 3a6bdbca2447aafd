"""`weir bench`: puts load on a server, or on a model in this process, and measures it."""

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
    write_result,
)
from weir.errors import SettingsError
from weir.settings import declared_by

if TYPE_CHECKING:
    from weir.bench import Report, Target
    from weir.catalog.sources import ModelToServe

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
_REQUESTS, _IN_PROCESS, _RESULT = "Requests", "In process", "Result"


@with_declared(*_LOAD, *(each for each in _OPTIONS if each.name != "headers"))
def bench(
    targets: Annotated[list[str] | None, typer.Argument(metavar="[URL]...", help=_URL)] = None,
    data: Annotated[str | None, flag(_DATA, _REQUESTS)] = None,
    header: Annotated[
        list[str] | None,
        flag("Header to send with each request; repeatable.", _REQUESTS, "--header", "-H", metavar="NAME: VALUE"),
    ] = None,
    in_process: Annotated[
        list[str] | None, flag("Serve module:Class in this process; repeatable.", _IN_PROCESS, metavar="TARGET")
    ] = None,
    policy: Annotated[
        list[str] | None,
        flag("Policy of the models in this process; repeatable, each is a target.", _IN_PROCESS, metavar="POLICY"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        flag("Setting of the models in this process; repeatable.", _IN_PROCESS, "--set", metavar="KEY=VALUE"),
    ] = None,
    json: Annotated[Path | None, flag("File to write the result to as JSON; - prints it.", _RESULT)] = None,
    markdown: Annotated[Path | None, flag("File to write the result to as Markdown; - prints it.", _RESULT)] = None,
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
    made: list[Target] = [ServerTarget(url, data, http) for url in targets or []]
    made += _in_process(in_process or [], policy or [], set_ or [], data, http.timeout)
    if not made:
        raise SettingsError("nothing to measure: give a URL, or a model with --in-process")
    check_results(json, markdown)
    report = run_shown(made, load, progress=Console(stderr=True).is_terminal)
    _write(report, json, markdown)
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


def _in_process(
    targets: Sequence[str], policies: Sequence[str], settings: Sequence[str], data: str | None, timeout: float
) -> "list[Target]":
    from weir.bench.target import InProcessTarget

    if (policies or settings) and not targets:
        raise SettingsError("--policy and --set are for models in this process: give one with --in-process")
    made: list[Target] = []
    for target in targets:
        for policy in policies or [""]:
            model = _model(target, [*settings, *([f"policy={policy}"] if policy else [])])
            made.append(InProcessTarget(model, data, name=f"{target} {policy}".strip(), timeout=timeout))
    return made


def _model(target: str, settings: Sequence[str]) -> "ModelToServe":
    """Return the model `target` with `settings`, each KEY=VALUE, which are read as `weir serve` reads flags."""
    from weir.serving import unknown_setting
    from weir.settings import TRUST, declared_settings, read_settings

    known = {name: declared for name, declared in declared_settings().items() if declared.of_model or name in TRUST}
    flags: dict[str, list[str]] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or name not in known:
            raise SettingsError(
                f"--set={text!r}: " + (unknown_setting(key, list(known)) if equals else "must be KEY=VALUE")
            )
        flags.setdefault(name, []).append(value)
    return read_settings([target], flags, {}).models[0]


def _write(report: "Report", json: Path | None, markdown: Path | None) -> None:
    from rich.console import Console

    from weir.bench.report import headline, table, to_dict
    from weir.bench.report import markdown as as_markdown

    console = Console(highlight=False)
    if STDOUT not in (json, markdown):
        console.print(headline(report), markup=False, soft_wrap=True)
        print_table(console, table(report))
    write_json(to_dict(report), json)
    write_result(as_markdown(report), markdown)
