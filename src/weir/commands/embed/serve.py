"""`weir embed serve`: vectors of texts over HTTP, ZeroMQ and every other door."""

from typing import Any

import typer

from weir.commands.embed.old_names import old_parameters, translated
from weir.commands.options import parameter, settings_of, settings_parameters, with_signature
from weir.settings import declared_settings
from weir.textserver import TEXTS, compose


def _serve(directories: list[str] | None, config: list[str] | None, **said: list[Any] | bool | None) -> int:
    """Serve the models of all DIRECTORYs until SIGTERM, SIGINT, SIGQUIT or SIGHUP; without one, the small model that can be installed.

    A DIRECTORY is one of Hugging Face's or of sentence-transformers, with weights as safetensors; NAME=DIRECTORY says what the model is
    called. What is not said is read from its files. Options apply to every model; values for one model go into its table of the file,
    models.NAME. Each option is a TOML key and a variable too: --max-length is max_length and WEIR_MAX_LENGTH.

    The flags of bert-serving-start are taken too, with one dash or two; -port is --zmq-port.
    """
    import asyncio

    from weir.console import Measuring, serve
    from weir.telemetry.logs import logging_to

    found, today = translated(directories, said)
    settings = settings_of(found, config, today, TEXTS)
    with logging_to(settings.telemetry), Measuring() as measuring:
        server = asyncio.run(compose(settings, measuring.of))
    serve(server.settings, server.product)
    return 0


serve = with_signature(
    _serve,
    [
        parameter("directories", list[str], typer.Argument(None, metavar="[NAME=]DIRECTORY...", help="What to serve.")),
        *settings_parameters(declared_settings(TEXTS).values()),
        *old_parameters(),
    ],
)
