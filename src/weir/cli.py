"""The command `weir`: reads flags, runs the app, and prints what people want to see.

Exit codes: 0 after a drain; 1 when a start or a check failed; 2 when a setting is wrong, which takes one line to say.
What only a running server needs is imported in the command that runs it, so that `weir --help` is quick.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from weir._version import __version__
from weir.commands import register
from weir.errors import ModelError, SettingsError, WeirError
from weir.settings import Declared, Settings, declared_settings, read_settings

FAILED, WRONG, INTERRUPTED = 1, 2, 130
EPILOG = (
    "Each option is a TOML key and a variable too: --max-batch-size is max_batch_size and WEIR_MAX_BATCH_SIZE. "
    "An option wins over a variable, that over the file, that over what the model's class says."
)
_PLACEHOLDERS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}

cli = typer.Typer(name="weir", add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command line; the entry point of the distribution."""
    try:
        code = cli(standalone_mode=False)
    except SettingsError as error:
        code = _complain(error.message, WRONG)
    except typer.TyperException as error:
        code = _complain(error.format_message(), WRONG)
    except ModelError as error:
        typer.echo(error.remote_traceback, err=True)
        code = _complain(error.message, FAILED)
    except (WeirError, OSError) as error:
        code = _complain(str(error), FAILED)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(code)


def _complain(text: str, code: int) -> int:
    typer.echo(f"weir: {text}", err=True)
    return code


@cli.callback(invoke_without_command=True)
def weir(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    """Serve machine-learning models with dynamic batching."""
    if version:
        typer.echo(f"weir {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _serve(settings: Settings) -> int:
    """Serve the models of all TARGETs until SIGTERM or SIGINT.

    A TARGET is module:Class or path/file.py:Class. Options apply to every one; values for one model go into the file.
    """
    from weir.console import serve

    serve(settings)
    return 0


def _check(settings: Settings) -> int:
    """Start one worker of each TARGET, run its examples, and show what came out, how large and how fast."""
    from weir.console import check

    return 0 if check(settings) else FAILED


def _command(name: str, run: Callable[[Settings], int], declared: Iterable[Declared]) -> None:
    """Add a command whose options are `declared`: typer reads them from the signature that is made here."""

    def command(targets: list[str] | None, config: list[str] | None, **said: list[Any] | None) -> int:
        flags = {name: [_text(value) for value in values] for name, values in said.items() if values}
        return run(read_settings(targets or [], flags, os.environ, _only(config)))

    parameters = [
        _parameter("targets", list[str], typer.Argument(None, metavar="TARGET...", help="What to run.")),
        _parameter("config", list[str], typer.Option(None, "--config", metavar="PATH", help="TOML file of settings.")),
        # Every option may be given several times, so that settings.py can refuse it where that makes no sense.
        *[_parameter(each.name, list[bool] if each.hint is bool else list[str], _option(each)) for each in declared],
    ]
    described: Any = command
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {each.name: each.annotation for each in parameters}
    cli.command(name, help=run.__doc__, epilog=EPILOG)(command)


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint | None)


def _option(declared: Declared) -> Any:
    flag = declared.flag
    names = f"{flag}/--no-{flag[2:]}" if declared.hint is bool else flag
    kinds = [kind for kind in getattr(declared.hint, "__args__", (declared.hint,)) if kind in _PLACEHOLDERS]
    return typer.Option(
        None, names, metavar=declared.metavar or (_PLACEHOLDERS[kinds[0]] if kinds else None), help=_help(declared),
        rich_help_panel=declared.part, show_default=False,
    )  # fmt: skip


def _help(declared: Declared) -> str:
    text = declared.help[0].upper() + declared.help[1:]
    default = declared.default
    if default in (None, [], {}):
        return text
    return f"{text} (default: {_text(default)})"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _only(config: list[str] | None) -> str | None:
    if config and len(config) > 1:
        raise SettingsError(f"--config: given {len(config)} times ({', '.join(config)}); must be given once")
    return config[0] if config else None


_command("serve", _serve, declared_settings().values())
_command("check", _check, [each for each in declared_settings().values() if each.of_model])
register(cli)
