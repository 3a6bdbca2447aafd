"""`weir embed benchmark`: measures the tables of bert-as-service's benchmark on this machine, with any model."""

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weir.commands.options import STDOUT, check_results, flag, write_atomically
from weir.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weir.bench.vectors import Connect, Table, TablesPlan

_MEASURED, _HOW, _RESULT = "Tables", "Measurement", "Result"
_LISTED = "Comma-separated; '' leaves the table out."


def benchmark(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIRECTORY] [-- FLAGS...]", help="The model (default: the small one), and flags for weir embed serve."
        ),
    ] = None,
    lengths: Annotated[
        str, flag(f"Tokens per text. {_LISTED}", _MEASURED, "--length", "--test-max-seq-len", "-test-max-seq-len", metavar="NUMBERS")
    ] = "20,40,80,160,320",
    batches: Annotated[
        str,
        flag(
            f"Texts per request, for one client. {_LISTED}", _MEASURED, "--client-batch", "--test-client-batch-size", "-test-client-batch-size",
            metavar="NUMBERS",
        ),
    ] = "1,4,8,16,64,256,512,1024,2048,4096",
    clients: Annotated[
        str, flag(f"Concurrent clients. {_LISTED}", _MEASURED, "--clients", "--test-num-client", "-test-num-client", metavar="NUMBERS")
    ] = "1,2,4,8,16,32",
    batch_sizes: Annotated[
        str,
        flag(f"Texts per batch in the server. {_LISTED}", _MEASURED, "--batch-size", "--test-max-batch-size", "-test-max-batch-size", metavar="NUMBERS"),
    ] = "32,64,128,256,512",
    layers: Annotated[
        str,
        flag(
            f"Layers to pool, counted from the end: -1 is the last. {_LISTED} (default: every layer of the model)",
            _MEASURED, "--layer", "--test-pooling-layer", "-test-pooling-layer", metavar="NUMBERS",
        ),
    ] = "all",
    small_and_large: Annotated[bool, flag("Compare small requests with large ones.", _MEASURED)] = True,
    text_length: Annotated[int, flag("Tokens per text in the other tables.", _HOW)] = 40,
    texts: Annotated[int, flag("Texts per request in the other tables.", _HOW)] = 256,
    num_repeat: Annotated[int, flag("Maximum number of counted requests if there is one client.", _HOW, "--num-repeat", "-num-repeat")] = 8,
    seconds: Annotated[float, flag("Seconds to measure each figure; at least one request is counted.", _HOW)] = 5.0,
    wait_till_ready: Annotated[float, flag("Seconds that a server may take to start.", _HOW, "--wait-till-ready", "-wait-till-ready")] = 300.0,
    client_vocab_file: Annotated[
        Path | None, flag("File of words, one per line, to make texts of (default: common English words).", _HOW, "--client-vocab-file", "-client-vocab-file")
    ] = None,
    zmq: Annotated[bool, flag("Protocol that the clients use.", _HOW, "--zmq/--http")] = True,
    quick: Annotated[
        bool, flag("Fewer texts per request, and 1.5 seconds per figure: takes minutes instead of a quarter of an hour.", _HOW, "--quick")
    ] = False,
    json: Annotated[Path | None, flag("File to write the tables to as JSON; - prints them.", _RESULT)] = None,
    markdown: Annotated[Path | None, flag("File to write the tables to as Markdown.", _RESULT)] = None,
    figure: Annotated[Path | None, flag("File to draw the tables to, as .png and .svg.", _RESULT)] = None,
) -> int:  # fmt: skip
    """Benchmark a model as bert-serving-benchmark does: start one server after another and print tables as Markdown.

    Progress goes to stderr, tables to stdout. Put flags of weir embed serve after two dashes. In all tables but the last,
    each client waits for a response before it sends again. The last table compares small requests with large ones, on the
    same texts and with equally many texts in flight.
    """
    from weir.bench.vectors import WORDS, Patience, TablesPlan

    check_results(json, markdown, figure=figure)
    directory, flags = _split(words or [])
    plan = TablesPlan(
        _numbers("--length", lengths),
        _numbers("--client-batch", batches),
        _numbers("--clients", clients),
        _numbers("--batch-size", batch_sizes),
        _every_layer(directory) if layers == "all" else _numbers("--layer", layers, negative=True),
        text_length,
        texts,
        Patience(num_repeat, seconds),
        small_and_large,
        WORDS if client_vocab_file is None else _words(client_vocab_file),
    )
    if quick:
        plan = plan._replace(batch=32, patience=Patience(num_repeat, 1.5))
    tables = _run(plan, [*([directory] if directory else []), *flags], zmq, wait_till_ready, shown=json != STDOUT)
    _write(tables, json, markdown, figure)
    return 0


def _run(plan: "TablesPlan", flags: list[str], zmq: bool, timeout: float, *, shown: bool) -> "list[Table]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from weir.bench.vectors import Tables, text_server

    console, tables, began = Console(stderr=True), [], time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    @contextmanager
    def serve(more: "Sequence[str]") -> "Iterator[Connect]":
        with text_server([*flags, *more], zmq=zmq, timeout=timeout) as running:
            yield running.__call__

    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=plan.steps)

        def step(text: str) -> None:
            progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
            progress.advance(task)

        for table in Tables(plan, serve, step).measure():
            tables.append(table)
            if shown:
                typer.echo(table.markdown())
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    console.print(f"measured in {minutes} min {seconds} s, over {'ZeroMQ' if zmq else 'HTTP'}", highlight=False)
    return tables


def _write(tables: "list[Table]", json: Path | None, markdown: Path | None, figure: Path | None) -> None:
    from weir.bench.vectors import as_json, as_markdown, draw
    from weir.profiling.machine import describe_machine

    machine = describe_machine()
    if json == STDOUT:
        typer.echo(as_json(tables, machine), nl=False)
    elif json is not None:
        write_atomically(json, as_json(tables, machine))
    if markdown is not None:
        write_atomically(markdown, as_markdown(tables, machine))
    if figure is not None:
        draw(tables, figure)


def _split(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the directory, if one is given, and the flags of the server."""
    first = next((place for place, each in enumerate(words) if each.startswith("-")), len(words))
    named, flags = words[:first], words[first:]
    if len(named) > 1:
        raise SettingsError(f"{' '.join(named)}: must be one DIRECTORY; flags of the server follow after --")
    return (named[0] if named else None), flags


def _numbers(name: str, text: str, *, negative: bool = False) -> list[int]:
    rule = "negative whole numbers" if negative else "whole numbers of 1 or more"
    try:
        numbers = [int(each) for each in text.replace(",", " ").split()]
    except ValueError:
        raise SettingsError(f"{name}={text!r}: must be {rule}, comma-separated") from None
    if any((number >= 0) if negative else (number < 1) for number in numbers):
        raise SettingsError(f"{name}={text!r}: must be {rule}, comma-separated")
    return numbers


def _every_layer(directory: str | None) -> list[int]:
    from weir.commands.embed import directory_of
    from weir.text_models.checkpoint.reading import read_checkpoint

    count = read_checkpoint(directory_of(directory)).architecture.layers
    return [-place for place in range(1, count + 1)]


def _words(file: Path) -> list[str]:
    try:
        words = [word for word in file.read_text(encoding="utf-8").split("\n") if word.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--client-vocab-file={file}: cannot be read ({error})") from None
    if not words:
        raise SettingsError(f"--client-vocab-file={file}: must have words, one per line")
    return words
