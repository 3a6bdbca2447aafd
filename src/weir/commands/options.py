"""What commands share: options, each from a declared setting (settings.py); how a command joins its group; and files and tables that they write.

Files are checked before the work begins. No column of a table is cut off.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from weir.embedding.server_settings import TEXT_VARIABLES
from weir.errors import SettingsError
from weir.settings import MODELS, Declared, ServerKind, Settings, read_settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


EPILOG = (
    "Each option is a TOML key and a variable too: --max-batch-size is max_batch_size and WEIR_MAX_BATCH_SIZE. "
    "An option wins over a variable, that over the file, that over what the model's class says."
)
_PLACEHOLDERS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


def settings_parameters(declared: Iterable[Declared]) -> list[inspect.Parameter]:
    """Return the parameters `config` and one for each setting; what typer gives for them is for `settings_of`."""
    return [
        parameter("config", list[str], typer.Option(None, "--config", metavar="PATH", help="TOML file of settings.")),
        # Every option may be given several times, so that settings.py can refuse it where that makes no sense.
        *[parameter(each.name, list[bool] if each.is_switch else list[str], option(each)) for each in declared],
    ]


def settings_of(
    targets: list[str] | None, config: list[str] | None, said: Mapping[str, list[Any] | None], kind: ServerKind = MODELS
) -> Settings:
    """Return the settings that the command line, the file and the environment make. Raises SettingsError."""
    flags = {name: [text_of(value) for value in values] for name, values in said.items() if values}
    return read_settings(targets or [], flags, os.environ, _only(config), kind, ignored=TEXT_VARIABLES)


def with_signature(command: Callable[..., Any], parameters: list[inspect.Parameter]) -> Callable[..., Any]:
    """Return `command`, saying that these are its parameters."""
    described: Any = command
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Return a keyword parameter that may be left out."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint | None)


def option(declared: Declared) -> Any:
    """Return the option of one setting."""
    flag = declared.flag
    names = f"{flag}/--no-{flag[2:]}" if declared.is_switch else flag
    kinds = [kind for kind in getattr(declared.hint, "__args__", (declared.hint,)) if kind in _PLACEHOLDERS]
    return typer.Option(
        None, names, metavar=declared.metavar or (_PLACEHOLDERS[kinds[0]] if kinds else " " if declared.is_switch else None), help=_help(declared),
        rich_help_panel=declared.part, show_default=False,
    )  # fmt: skip


def _help(declared: Declared) -> str:
    text = declared.help[0].upper() + declared.help[1:]
    default = declared.found or declared.default
    if default in (None, [], {}):
        return text
    return f"{text} (default: {text_of(default)})"


def text_of(value: Any) -> str:
    """Return `value` as one writes it on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _only(config: list[str] | None) -> str | None:
    if config and len(config) > 1:
        raise SettingsError(f"--config: given {len(config)} times ({', '.join(config)}); must be given once")
    return config[0] if config else None


def register(
    cli: typer.Typer, commands: Mapping[str, str], package: str, kind: type[TyperCommand] = TyperCommand
) -> None:
    """Add each of `commands`, by name with an example, to `cli`; options are the function's arguments, its help the docstring and the
    example. Each is a command of `kind`, which reads the words that stand behind it."""
    for name, example in commands.items():
        command = getattr(import_module(f"{package}.{name}"), name)
        if isinstance(command, typer.Typer):
            cli.add_typer(command, name=name, epilog=f"Example: {example}")
        else:
            cli.command(name, cls=kind, help=_paragraphs(command), epilog=f"Example: {example}")(command)


def _paragraphs(command: Callable[..., Any]) -> str:
    """Return the docstring with a line for each paragraph, which the terminal breaks as it needs."""
    return "\n\n".join(" ".join(each.split()) for each in (inspect.getdoc(command) or "").split("\n\n"))


# What commands print and write: tables whose columns are never cut off, and files that are checked first and written whole.


STDOUT = Path("-")


def check_writable(path: Path) -> None:
    """Raise SettingsError, before anything takes time, if the file `path` cannot be written."""
    if path.is_dir():
        raise SettingsError(f"{path}: cannot be written: it is a folder; must be a file")
    check_folder(path)


def check_figure(path: Path) -> None:
    """Raise SettingsError, before anything takes time, if the figure `path` cannot be written as .png and .svg."""
    from weir.figures import files_of

    for file in files_of(path) if path.name else (path,):
        check_writable(file)


def check_folder(path: Path) -> None:
    """Raise SettingsError, before anything takes time, if there is no place for the file or folder `path`."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingsError(f"{path}: cannot be written: {folder} must be a folder that you may write to")


def can_draw() -> bool:
    """Tell whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def check_drawing(option: str = "--figure") -> None:
    """Raise SettingsError naming the `option`, before anything takes time, if nothing can be drawn."""
    if not can_draw():
        raise SettingsError(f"{option}: drawing needs matplotlib: pip install 'weir-serving[plots]'")


def check_results(*files: Path | None, figure: Path | None = None, option: str = "--figure") -> None:
    """Raise SettingsError, before anything takes time, for a result that could not be written after it.

    None is no path, and - is stdout. `option` is what the figure is asked for with.
    """
    for path in files:
        if path is not None and path != STDOUT:
            check_writable(path)
    if figure is not None:
        check_drawing(option)
        check_figure(figure)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` so that whoever reads `path` sees all of it or what was there before.

    Raises SettingsError, naming `path`, if it cannot be written: the disk is full, or it was never a place for files.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)


UNBOUNDED = 10_000  # columns


def print_table(console: "Console", table: "Table") -> None:
    """Print `table`, as wide as it must be: a terminal that is narrower breaks its lines, a file has no width.

    Only columns that say that they fold are made narrower.
    """
    from rich.measure import Measurement

    before, unbounded = console.width, console.options.update_width(UNBOUNDED)
    most = least = Measurement.get(console, unbounded, table).maximum
    for column in table.columns:
        width = max(Measurement.get(console, unbounded, cell).maximum for cell in column.cells)
        if column.overflow == "fold":
            least -= max(0, width - (column.min_width or 1))
        else:
            column.no_wrap, column.min_width = True, width
    console.width = max(least, min(most, before)) if console.is_terminal else most
    try:
        console.print(table)
    finally:
        console.width = before
