"""`weir embed serve`: serves the vectors of texts over HTTP, ZeroMQ and every other frontend."""

import inspect
import os
from dataclasses import replace
from typing import Any

import typer

from weir._version import __version__
from weir.commands.options import parameter, settings_of, settings_parameters, with_signature
from weir.settings import Settings, declared_settings
from weir.text_server.bert_as_service.settings import (
    BERT_PORT,
    BERT_PORT_OUT,
    ELSEWHERE,
    MODEL_DIRECTORY,
    OLD,
    ONE_DASH,
    ONE_DASH_PREFIX,
    PREFETCH,
    VERSION,
    XLA,
    Translated,
    ZeroMqSettings,
    translated,
)
from weir.text_server.flags import (
    MODEL_ID,
    OTHER_FLAGS,
    REVISION,
    SERVED_NAME,
    OtherFlag,
    check_as_given,
    from_other_servers,
)
from weir.text_server.server_settings import TEXTS

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

    from weir.console import MeasuringProgress, errors_logged, serve
    from weir.telemetry.logs import logging_to
    from weir.text_server.server import compose

    if options.get(VERSION):
        typer.echo(f"weir {__version__}, for clients of bert-as-service {_STOCK_VERSION}")
        return 0
    stock = translated(*from_other_servers(directories, options, os.environ), check_as_given)
    settings = settings_of(stock.directories, config, stock.settings, TEXTS)
    if stock.stock:
        settings = _with_stock_ports(settings, stock)
    with logging_to(settings.telemetry, captures=True), errors_logged(settings), MeasuringProgress() as measuring:
        server = asyncio.run(compose(settings, measuring.of))
        _log_differences(settings, stock)
    serve(server.settings, server.product)
    return 0


def old_parameters() -> list[inspect.Parameter]:
    """Return a parameter for each flag of bert-serving-start; `--help` does not show them."""
    switches = {VERSION, XLA, *(name for name, old in OLD.items() if old.value is not None)}
    both = [
        parameter(name, bool if name in switches else list[str], _hidden(f"-{name}", f"--{name}"))
        for name in (MODEL_DIRECTORY, *PREFETCH, VERSION, XLA, *OLD, *ELSEWHERE)
    ]
    return [*both, *[parameter(ONE_DASH_PREFIX + name, list[str], _hidden(f"-{name}")) for name in ONE_DASH]]


def other_parameters() -> list[inspect.Parameter]:
    """Return a parameter for each flag of TEI and infinity that is no setting of Weir's; `--help` does not show them."""
    named = [parameter(name, list[str], _hidden(f"--{name}")) for name in (MODEL_ID, REVISION, SERVED_NAME)]
    return [*named, *[_other_parameter(name, flag) for name, flag in OTHER_FLAGS.items()]]


def _other_parameter(name: str, flag: OtherFlag) -> inspect.Parameter:
    if not flag.is_switch:
        return parameter(name, list[str], _hidden(f"-{name}" if len(name) == 1 else f"--{name}"))
    return parameter(name, bool, _hidden(f"--{name}/--no-{name}"))


def _hidden(*flags: str) -> Any:
    return typer.Option(None, *[flag.replace("_", "-") for flag in flags], hidden=True)


def _with_stock_ports(settings: Settings, stock: Translated) -> Settings:
    """Return `settings` with ZeroMQ on the ports of bert-as-service, unless --zmq-port was given."""
    zeromq: ZeroMqSettings = settings.more["ZeroMQ"]
    if zeromq.zmq_port and not stock.old_port:
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
    if stock.stock and is_loopback(settings.http.host):
        logger.info(
            "flags of bert-serving-start: ZeroMQ listens as with bert-serving-start, but for this machine only; --host 0.0.0.0 opens it to others",
            host=settings.http.host,
            zmq_port=zeromq.zmq_port,
            zmq_port_out=zeromq.zmq_port_out,
        )
    if stock.xla and "compile" not in stock.today:
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
        *old_parameters(),
        *other_parameters(),
    ],
)
