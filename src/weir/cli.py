"""The command `weir`: its options, its exit codes, and how it reports errors.

Exit codes: 0 after a drain; 1 when a start or a check failed; 2 when a setting is wrong, with one line that says so; 130 after
Ctrl-C. What only one command needs is imported when it runs, so that `weir --help` is quick.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from types import MappingProxyType
from typing import Annotated, Any

import typer

from weir._version import __version__
from weir.catalog.sources import ON_DEMAND_SETTINGS
from weir.commands import COMMANDS
from weir.commands.options import (
    EPILOG,
    Command,
    CommandGroup,
    paragraphs,
    parameter,
    register,
    settings_of,
    settings_parameters,
    with_signature,
)
from weir.errors import ModelError, SettingsError, WeirError, add_extra, printable, reason_of
from weir.settings import TRUST, Declared, Settings, declared_settings
from weir.telemetry.output import open_standard_descriptors

FAILED, WRONG, INTERRUPTED = 1, 2, 130

# The extra that has a library which a command imports.
_EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "grpc": "grpc",
        "huggingface_hub": "embed",
        "onnx": "embed",
        "onnxruntime": "embed",
        "orjson": "embed",
        "ray": "ray",
        "safetensors": "embed",
        "tokenizers": "embed",
    }
)


def main() -> None:
    """Run the command line and end the process with its exit code."""
    open_standard_descriptors()
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # where it was a file and is a pipe now
            sys.stdout.reconfigure(errors="replace")  # tables have characters that not every encoding has
    words = sys.argv[1:]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        code = command_line(words)(words, standalone_mode=False)
    except SettingsError as error:
        code = _complain(error.message, WRONG)
    except typer.TyperException as error:
        code = _complain(text, WRONG) if (text := _misuse(error)) else WRONG  # without a command, it has shown the help
    except ModelError as error:
        with suppress(OSError):
            typer.echo(error.remote_traceback, err=True, nl=bool(error.remote_traceback))
        code = _complain(printable(error.message), FAILED)  # what the model raised may have several lines
    except WeirError as error:
        code = _complain(str(error), FAILED)
    except OSError as error:
        code = _complain(f"{error.filename}: {reason_of(error)}" if error.filename else reason_of(error), FAILED)
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get(str(error.name).partition(".")[0])) is None:
            raise
        code = _complain(f"{error.name} is not installed; {add_extra(extra)}", WRONG)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(code)


def _misuse(error: typer.TyperException) -> str:
    """Return what is wrong with the command line. Typer does not name a value that it refuses."""
    refused = getattr(error.__cause__, "errors", None)  # pydantic's
    if not isinstance(error, typer.BadParameter) or error.param is None or refused is None:
        return error.format_message()
    value, message = (refused()[0][name] for name in ("input", "msg"))
    rule = message.removeprefix("Value error, ").replace("Input should", "must").partition(", unable to")[0]
    return f"{error.param.opts[0]}={value!r}: {rule.replace(f'{value!r} is not one', 'must be one').rstrip('.')}"


def _complain(text: str, code: int) -> int:
    if _wants_json():
        from weir.telemetry import TelemetrySettings
        from weir.telemetry.logs import get_logger, logging_to

        with logging_to(TelemetrySettings(log_format="json")):
            get_logger("weir").critical(text)
    else:
        with suppress(OSError):  # the exit code still says it
            typer.echo(f"weir: {text}", err=True)
    return code


def _wants_json() -> bool:
    """Return whether the log is to be JSON, from the command line and the environment: the settings may be unreadable."""
    words, flag = sys.argv[1:], "--log-format"
    values = [after for word, after in zip(words, [*words[1:], ""], strict=True) if word == flag]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return (values or [os.environ.get("WEIR_LOG_FORMAT", "")])[-1] == "json"


def command_line(words: Sequence[str] = ()) -> typer.Typer:
    """Return the command line. If it begins with the name of a command, only that one is described, which saves a tenth of
    a server's start.
    """
    names = {"help_option_names": ["--help", "-h"]}
    cli = typer.Typer(
        name="weir", cls=CommandGroup, context_settings=names, add_completion=False, pretty_exceptions_enable=False
    )
    cli.callback(invoke_without_command=True)(weir)
    known = ("serve", "check", *COMMANDS)
    wanted = [name for name in known if name == words[0]] if words else []
    for name in wanted or known:
        if name == "serve":
            _command(cli, name, _serve, declared_settings().values())
        elif name == "check":
            settings = declared_settings().values()
            _command(cli, name, _check, [each for each in settings if each.of_model or each.name in _CHECKED])
        else:
            register(cli, {name: COMMANDS[name]}, f"weir.commands.{name}")
    return cli


def weir(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", metavar=" ", help="Show the version.")] = False,
) -> None:
    """Serve machine-learning models with dynamic batching."""
    if version:
        typer.echo(f"weir {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _serve(settings: Settings) -> int:
    """Serve models until SIGTERM, SIGINT, SIGQUIT or SIGHUP.

    A TARGET is module:Class or path/file.py:Class, where a function may replace the class; an .onnx, .skops, .joblib, .pkl
    or .mar file; or hf:TASK=MODEL. Options apply to all models; set values for one model in the TOML file.
    """
    from weir.console import serve

    serve(settings)
    return 0


_CHECKED = (*TRUST, "model_repository", "load", *ON_DEMAND_SETTINGS)


def _check(settings: Settings) -> int:
    """Start one worker for each TARGET, and each model of a repository, run its examples, and print the results, their sizes and times."""
    from weir.console import check

    return 0 if check(settings) else FAILED


def _command(cli: typer.Typer, name: str, run: Callable[[Settings], int], declared: Iterable[Declared]) -> None:
    """Add a command with the options `declared`, which typer reads from the signature made here."""

    def command(targets: list[str] | None, config: list[str] | None, **options: list[Any] | None) -> int:
        return run(settings_of(targets, config, options))

    targets = parameter("targets", list[str], typer.Argument(None, metavar="TARGET...", help="The models to run."))
    described = with_signature(command, [targets, *settings_parameters(declared)])
    cli.command(name, cls=Command, help=paragraphs(run), epilog=f"Example: weir {name} square:Square. {EPILOG}")(
        described
    )
