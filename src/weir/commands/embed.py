"""`weir embed`: the vectors of texts. Each subcommand is a function of its name, and imports what only it needs when it is called."""

import inspect
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir._version import __version__
from weir.commands.options import (
    STDOUT,
    Command,
    CommandGroup,
    check_results,
    flag,
    parameter,
    progress_bar,
    register,
    settings_of,
    settings_parameters,
    with_signature,
    write_atomically,
    write_json,
)
from weir.errors import SettingsError, reason_of
from weir.settings import Settings, declared_settings
from weir.text_models import TextSettings
from weir.text_server.server_settings import (
    BERT_FLAGS,
    BERT_PORT,
    BERT_PORT_OUT,
    BERT_PORTS,
    MODEL_ID,
    OTHER_FLAGS,
    REVISION,
    SERVED_NAME,
    TEXTS,
    VERSION,
    XLA,
    ForeignFlag,
    Translated,
    ZeroMqSettings,
    server_last,
    spellings,
    translated,
    with_commas,
)

if TYPE_CHECKING:
    from weir.bench.vectors import Connect, Table, TablesPlan

COMMANDS = {  # an example of each command, by name
    "serve": "weir embed serve ./bge-small-en --pooling cls --max-length 512 --workers 2 --zmq-port 5555",
    "benchmark": "weir embed benchmark ./bge-small-en --client-batch 1,64,1024 -- --workers 2",
    "convert": "weir embed convert ./uncased_L-12_H-768_A-12 ./bert-base-uncased",
    "search": "weir embed search questions.txt 'how do I get my money back?' --top 5",
    "terminate": "weir embed terminate --ip localhost --port 5555",
}


class StockCommand(Command):
    """A command that also accepts words as the commands of bert-as-service do: several values separated by spaces, and for
    `benchmark` the server's flags mixed with its own."""

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        """Parse `words`; see click's Command.parse_args. Raises SettingsError for an unknown option with one dash."""
        given = list(with_commas(words))
        try:
            return super().parse_args(context, server_last(given) if self.name == "benchmark" else given.copy())
        except typer.TyperException as error:
            unknown = getattr(error, "option_name", "")
            # For an unknown option with one dash, the parser's error names only its first letter.
            whole = [word for word in given if len(unknown) == 2 and re.match(rf"{re.escape(unknown)}[^-\W\d]", word)]
            if not whole:
                raise
            message = f"{whole[0].partition('=')[0]}: unknown option; weir embed {self.name} --help lists the options"
            raise SettingsError(message) from None


embed = typer.Typer(
    cls=CommandGroup,
    help="Serve, benchmark and use text-embedding models.",
    no_args_is_help=True,
    # The flags of bert-serving-start have underscores.
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)


def directory_of(model: str | None) -> Path:
    """Return the directory of `model`, a directory or an id on the Hugging Face Hub, which is downloaded; without it that of the small model.

    Raises SettingsError if that is not installed, or the download fails.
    """
    from weir.text_models.checkpoint.hub import local_directory
    from weir.text_server.server_settings import INSTALL, installed_model

    found = local_directory(model) if model else installed_model()
    if found is None:
        raise SettingsError(f"no model: give a directory or an id with --model, or install the small model: {INSTALL}")
    return found


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
) -> int:  # fmt: skip
    """Benchmark a model as bert-serving-benchmark does: start one server after another and print tables as Markdown.

    Progress goes to stderr, tables to stdout. Put flags of weir embed serve after two dashes. Each client waits for a
    response before it sends again.
    """
    from weir.bench.vectors import WORDS, Patience, TablesPlan

    check_results(json, markdown)
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
        WORDS if client_vocab_file is None else _words(client_vocab_file),
    )
    if quick:
        plan = plan._replace(batch=32, patience=Patience(num_repeat, 1.5))
    tables = _run(plan, [*([directory] if directory else []), *flags], zmq, wait_till_ready, shown=json != STDOUT)
    _write(tables, json, markdown)
    return 0


def _run(plan: "TablesPlan", flags: list[str], zmq: bool, timeout: float, *, shown: bool) -> "list[Table]":
    from weir.bench.vectors import Tables, text_server

    tables, began, done = [], time.monotonic(), count(1)

    @contextmanager
    def serve(more: Sequence[str]) -> "Iterator[Connect]":
        with text_server([*flags, *more], zmq=zmq, timeout=timeout) as running:
            yield running.__call__

    with progress_bar("measuring") as progress:

        def step(text: str) -> None:
            typer.echo(text, err=True)  # above the bar
            progress(next(done), plan.steps)

        for table in Tables(plan, serve, step).measure():
            tables.append(table)
            if shown:
                typer.echo(table.markdown())
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    typer.echo(f"measured in {minutes} min {seconds} s, over {'ZeroMQ' if zmq else 'HTTP'}", err=True)
    return tables


def _write(tables: "list[Table]", json: Path | None, markdown: Path | None) -> None:
    from weir.bench.vectors import as_markdown
    from weir.profiling.machine import describe_machine

    machine = describe_machine()
    write_json({"machine": machine, "tables": [table._asdict() for table in tables]}, json)
    if markdown is not None:
        write_atomically(markdown, as_markdown(tables, machine))


def _split(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the directory, if one is given, and the flags of the server."""
    first = next((index for index, each in enumerate(words) if each.startswith("-")), len(words))
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
    from weir.text_models.checkpoint.reading import read_checkpoint

    count = read_checkpoint(directory_of(directory)).architecture.layers
    return [-layer for layer in range(1, count + 1)]


def _words(file: Path) -> list[str]:
    try:
        words = [word for word in file.read_text(encoding="utf-8").split("\n") if word.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--client-vocab-file={file}: cannot be read ({reason_of(error)})") from None
    if not words:
        raise SettingsError(f"--client-vocab-file={file}: must have words, one per line")
    return words


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Directory with bert_config.json, vocab.txt and a checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="New directory to write.")],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "--ckpt-name", "-ckpt-name", metavar="NAME", help="Checkpoint to convert (default: bert_model.ckpt, or the only one)."),
    ] = None,
    cased: Annotated[
        bool | None,
        typer.Option("--cased/--no-cased", "--cased-tokenization/ ", "-cased-tokenization/ ", help="Distinguish upper and lower case (default: if the vocabulary does)."),
    ] = None,
) -> None:  # fmt: skip
    """Convert a TensorFlow checkpoint of the original BERT to a directory in Hugging Face's layout, without TensorFlow.

    A classifier trained on top is converted too.
    """
    from weir.text_server.bert_as_service.convert import convert as convert_checkpoint

    made = convert_checkpoint(Path(source), Path(target), name=checkpoint, cased=cased)
    typer.echo(f"wrote {made}: weir embed serve {made}")


_STOCK_VERSION = "1.10.0"  # of bert-as-service, whose clients this serves


def _serve(directories: list[str] | None, config: list[str] | None, **options: list[Any] | bool | None) -> int:
    """Serve text models until SIGTERM, SIGINT, SIGQUIT or SIGHUP; without a DIRECTORY, the small model, if it is installed.

    A DIRECTORY has the layout of Hugging Face or sentence-transformers, with weights as safetensors. You may also give an id
    on the Hugging Face Hub, such as BAAI/bge-small-en-v1.5, or BAAI/bge-small-en-v1.5@main with a revision: its files are
    downloaded once, into the usual Hugging Face cache. NAME=DIRECTORY names the model. Settings that you do not give are read
    from its files. Options apply to every model; set values for one model in the table models.NAME of the TOML file. Each
    option is also a TOML key and a variable: --max-length is max_length and WEIR_MAX_LENGTH.

    The flags and variables of text-embeddings-router and infinity_emb work too, as do the flags of bert-serving-start, with
    one dash or two. With any of the latter, ZeroMQ listens on the ports that bert-serving-start opens; -port is --zmq-port.
    """
    import asyncio

    from weir.console import errors_logged, measuring_progress, serve
    from weir.telemetry.logs import logging_to
    from weir.text_server.server import compose

    if options.get(VERSION):
        typer.echo(f"weir {__version__}, for clients of bert-as-service {_STOCK_VERSION}")
        return 0
    stock = translated(directories, options, os.environ)
    settings = settings_of(stock.directories, config, stock.settings, TEXTS)
    if stock.bert:
        settings = _with_stock_ports(settings, stock)
    with logging_to(settings.telemetry, captures=True), errors_logged(settings), measuring_progress() as measuring:
        server = asyncio.run(compose(settings, measuring))
        _log_differences(settings, stock)
    serve(server.settings, server.product)
    return 0


def foreign_parameters() -> list[inspect.Parameter]:
    """Return a parameter for each flag of other servers that is not a setting of Weir's; `--help` does not show them."""
    flags = {**dict.fromkeys((MODEL_ID, REVISION, SERVED_NAME), ForeignFlag()), **OTHER_FLAGS, **BERT_FLAGS}
    own = declared_settings(TEXTS)
    return [_foreign_parameter(name, flag) for name, flag in flags.items() if name not in own]


def _foreign_parameter(name: str, flag: ForeignFlag) -> inspect.Parameter:
    flags = [each.replace("_", "-") for each in spellings(name)]
    if flag.is_switch and name in OTHER_FLAGS:
        flags = [f"{flags[0]}/--no-{flags[0].removeprefix('--')}"]
    return parameter(name, bool if flag.is_switch else list[str], typer.Option(None, *flags, hidden=True))


def _with_stock_ports(settings: Settings, stock: Translated) -> Settings:
    """Return `settings` with ZeroMQ on the ports of bert-as-service, unless --zmq-port was given."""
    zeromq: ZeroMqSettings = settings.more["ZeroMQ"]
    if zeromq.zmq_port and not stock.bert & BERT_PORTS:
        return settings
    port, out = zeromq.zmq_port, zeromq.zmq_port_out
    if port != 0 and out is None:
        out = BERT_PORT_OUT
    zeromq = replace(zeromq, zmq_port=BERT_PORT if port is None else port, zmq_port_out=out)
    return settings._replace(more={**settings.more, "ZeroMQ": zeromq})


def _log_differences(settings: Settings, stock: Translated) -> None:
    """Log where this server differs from what users of bert-serving-start's flags may expect."""
    from weir.protocols.access import is_loopback
    from weir.telemetry.logs import get_logger

    logger, zeromq = get_logger("weir"), settings.more["ZeroMQ"]
    if stock.bert and is_loopback(settings.http.host):
        logger.info(
            "flags of bert-serving-start: ZeroMQ listens on its ports, but only for this machine; --host 0.0.0.0 opens them to others",
            host=settings.http.host,
            zmq_port=zeromq.zmq_port,
            zmq_port_out=zeromq.zmq_port_out,
        )
    if XLA in stock.bert and "compile" not in stock.today:
        logger.info(
            "-xla: changes nothing here; the graph is optimised anyway, and --runtime torch --compile compiles it"
        )


serve = with_signature(
    _serve,
    [
        parameter(
            "directories", list[str], typer.Argument(None, metavar="[NAME=]DIRECTORY...", help="The models to serve.")
        ),
        *settings_parameters(declared_settings(TEXTS).values()),
        *foreign_parameters(),
    ],
)


_URL = "http://localhost:8000"


def terminate(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help=f"The server: http://HOST:PORT, or tcp://HOST:PORT for ZeroMQ (default: {_URL}).")
    ] = None,
    ip: Annotated[str | None, typer.Option("--ip", "-ip", help="Instead of a URL: the host of a server over ZeroMQ.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", "--port-in", "--port-data", "-port", "-port-in", "-port-data", help=f"Its port for requests (default: {BERT_PORT}).", min=1, max=65535)
    ] = None,
    port_out: Annotated[
        int | None, typer.Option("--port-out", "--port-result", "-port-out", "-port-result", help="Its port for responses (default: the request port plus 1).", min=1, max=65535)
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File with the server's control token or API key. A server without a control token accepts this command only from its own machine. ZeroMQ cannot send a token.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its response.", min=0.001)] = 5.0,
    timeout_ms: Annotated[float | None, typer.Option("-timeout", hidden=True, min=1)] = None,  # a flag of bert-serving-terminate
) -> None:  # fmt: skip
    """Stop a server after it has finished the requests that it accepted.

    The server requires its control token; without one, it accepts this command only from its own machine. The flags of
    bert-serving-terminate work too, with one dash; -timeout is in milliseconds.
    """
    from weir.embedding import EmbeddingServer
    from weir.protocols.access import read_token

    over_zeromq = ip is not None or port is not None
    if url is not None and over_zeromq:
        raise SettingsError(f"{url}, --ip, --port: give either a URL, or --ip and --port")
    if over_zeromq:
        host = ip or "localhost"
        url = f"tcp://{f'[{host}]' if ':' in host else host}:{port or BERT_PORT}"
    token = None if token_file is None else read_token(str(token_file)).decode()
    seconds = timeout if timeout_ms is None else timeout_ms / 1000
    EmbeddingServer.shutdown(url or _URL, token=token, port_out=port_out, timeout=seconds)
    typer.echo(f"{url or _URL}: finishes what it has accepted, and stops")


def search(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Texts: one per line, .jsonl, .csv or .tsv; or a directory of pictures."),
    ],
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The text to look for.")],
    model: Annotated[
        str | None,
        typer.Option(help="The model's directory, or its id such as BAAI/bge-small-en-v1.5 (default: the small one)."),
    ] = None,
    top: Annotated[int, typer.Option("--top", "-n", help="Number of texts or pictures to print.", min=1)] = 10,
    max_length: Annotated[int | None, typer.Option(help="Maximum number of tokens per text.", min=4)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, an object per line.")] = False,
) -> None:
    """Find the texts in a file, or the pictures in a directory, that are most similar to a query; print their cosine similarity."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from weir.text_models.model import TextEncoder
    from weir.text_models.offline import read_pictures, read_texts
    from weir.text_models.offline import search as nearest

    if not query:
        raise SettingsError("QUERY: is empty, must be a text")
    texts = read_pictures(file) if file.is_dir() else read_texts(file)
    with progress_bar("encoding") as progress:
        encoder = TextEncoder(directory_of(model), TextSettings(max_length=max_length))
        hits = nearest(encoder, texts, query, top, progress)
    if json:
        for hit in hits:
            typer.echo(msgspec.json.encode(hit._asdict()).decode())
        return
    table = Table("cosine", "place", "text", box=None)
    for hit in hits:
        table.add_row(f"{hit.similarity:.3f}", str(hit.place), " ".join(hit.text.split()))
    Console(highlight=False, markup=False).print(table)


register(embed, COMMANDS, __name__, StockCommand)
