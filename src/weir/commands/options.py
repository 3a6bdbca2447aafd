"""This has what the commands share: their options, which follow from declared settings (settings.py); how they join the command line;
and how they write files and tables.

Files are checked before the work begins. No column of a table is cut off.
"""

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from weir.config import Checked, setting
from weir.errors import SettingsError
from weir.settings import (
    MODELS,
    Declared,
    ServerKind,
    Settings,
    declared_by,
    declared_settings,
    read_settings,
    value_of,
)
from weir.text_server.server_settings import TEXT_VARIABLES, TEXTS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from weir.catalog.sources import ModelToServe
    from weir.policy.cost import Prices


# The settings that `--help` shows, with an example of each; the others follow by --help=all, a heading or a word.
EXAMPLES: Mapping[str, str] = MappingProxyType({
    "name": "sentiment", "params": "threshold=0.5",
    "max_batch_size": "32", "policy": "size-or-delay:size=32,delay=5ms", "max_queue_size": "2000",
    "workers": "1..4", "predict_timeout": "10", "timeout": "5",
    "host": "0.0.0.0", "port": "8080", "grpc_port": "8001", "development": "", "reload": "", "api_key_file": "keys.txt",
    "log_format": "json",
    "pooling": "cls", "max_length": "512", "prompt": "'query: '", "precision": "int8", "device_map": "auto", "zmq_port": "5555",
})  # fmt: skip
EPILOG = (
    "Each option is also a TOML key and a variable: --max-batch-size is max_batch_size and WEIR_MAX_BATCH_SIZE. "
    "Options override variables, variables override the file, and the file overrides the model's class."
)
_PLACEHOLDERS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


def settings_parameters(declared: Iterable[Declared]) -> list[inspect.Parameter]:
    """Return a parameter `config` and one for each setting. `settings_of` takes the values that typer gives for them."""
    return [
        parameter("config", list[str], typer.Option(None, "--config", metavar="PATH", help="TOML file of settings.")),
        # typer accepts every option several times, so that settings.py can refuse repetition with an error of its own.
        *[_declared(each, rare=_is_rare(each)) for each in declared],
    ]


def _declared(declared: Declared, *, rare: bool = False) -> inspect.Parameter:
    """Return the parameter for a setting; `--help` hides a `rare` one."""
    return parameter(declared.name, list[bool] if declared.is_switch else list[str], option(declared, rare=rare))


def with_declared(*declared: Declared) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command an option for each of `declared`, between its first parameter and the others, in the place of
    its **options. See `values_of`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        named = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
        first, *others = [each.replace(kind=each.KEYWORD_ONLY) for each in named]
        return with_signature(command, [first, *map(_declared, declared), *others])

    return decorate


@dataclass(frozen=True)
class WeightSettings(Checked):
    """Says what a policy is solved for."""

    latency_weight: float = setting(1.0, "weight of a millisecond of mean response time")
    energy_weight: float = setting(1.0, "weight of a watt of mean power")
    reference_rate: float | None = setting(
        None,
        "arrival rate at which the weights hold, in rows per second; at other rates a waiting request costs the same",
    )
    latency_objective: str | None = setting(
        None,
        "objective instead of weights: p99=20ms keeps that latency with the least energy, by which policies are then compared; "
        "in-time=20ms answers as many requests as possible in time",
        metavar="pNN=DURATION",
    )

    @property
    def prices(self) -> "Prices":
        """The weights. Raises SettingsError."""
        from weir.policy.cost import Prices

        return Prices(self.latency_weight, self.energy_weight, self.reference_rate)


WEIGHTS = declared_by(WeightSettings, "Weights")


def values_of(declared: Iterable[Declared], options: Mapping[str, list[Any] | None]) -> dict[str, Any]:
    """Return the values by name of the settings in `declared` that the command line states in `options`. Raises SettingsError."""
    return {
        each.name: value_of(each, list(map(text_of, texts))) for each in declared if (texts := options.get(each.name))
    }


def settings_of(
    targets: list[str] | None,
    config: list[str] | None,
    options: Mapping[str, list[Any] | None],
    kind: ServerKind = MODELS,
) -> Settings:
    """Return the settings from the command line (`targets` and `options`), the file `config` and the environment. Raises
    SettingsError."""
    flags = {name: [text_of(value) for value in values] for name, values in options.items() if values}
    return read_settings(targets or [], flags, os.environ, only(config), kind, ignored=TEXT_VARIABLES)


def single_model(settings: Settings, target: str) -> "ModelToServe":
    """Return the model of a command's only TARGET. Raises SettingsError if it is a folder of models."""
    for model in settings.models:
        if model.target == target:
            return model
    raise SettingsError(
        f"TARGET {target!r}: must be one model; a folder of models is served whole: weir serve {target}"
    )


def with_signature(command: Callable[..., Any], parameters: list[inspect.Parameter]) -> Callable[..., Any]:
    """Set `parameters` as the signature of `command`, which typer reads, and return `command`."""
    described: Any = command
    described.__signature__ = inspect.Signature(parameters)
    described.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """Return an optional keyword parameter."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint | None)


def flag(help: str, panel: str, *names: str, metavar: str | None = None) -> Any:
    """Return an option that `--help` shows in `panel`. Without `names`, the flag follows from the parameter's name."""
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


def _is_rare(declared: Declared) -> bool:
    """Return whether `declared` is a setting of servers that few need."""
    return declared.name not in EXAMPLES and declared.name in _names()


@cache
def _names() -> frozenset[str]:
    """Return the names of all settings of servers. Each of them is an option, and to find them takes a millisecond."""
    return frozenset({**declared_settings(), **declared_settings(TEXTS)})


def option(declared: Declared, *, rare: bool = False) -> Any:
    """Return the option of one setting; a `rare` one is hidden."""
    names = f"{declared.flag}/--no-{declared.flag[2:]}" if declared.is_switch else declared.flag
    kinds = [kind for kind in getattr(declared.hint, "__args__", (declared.hint,)) if kind in _PLACEHOLDERS]
    return typer.Option(
        None,
        names,
        metavar=declared.metavar or (_PLACEHOLDERS[kinds[0]] if kinds else " " if declared.is_switch else None),
        help=_help(declared),
        rich_help_panel=declared.part,
        show_default=False,
        hidden=rare,
    )


def _help(declared: Declared) -> str:
    text = declared.help[0].upper() + declared.help[1:]
    default = declared.found or declared.default
    if default not in (None, [], {}):
        text = f"{text} (default: {text_of(default)})"
    if example := EXAMPLES.get(declared.name):
        text = f"{text}. Example: {declared.flag} {example}"
    return text


def text_of(value: Any) -> str:
    """Return `value` as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def only(config: list[str] | None) -> str | None:
    """Return the file of --config, or None. Raises SettingsError if there are several."""
    if config and len(config) > 1:
        raise SettingsError(f"--config: given {len(config)} times ({', '.join(config)}); must be given once")
    return config[0] if config else None


# What the command line gives for these is what the function gets.
_AS_GIVEN = (bool, str, list[bool], list[str])


def _as_given(own: Any, context: Any, value: Any) -> Any:
    """Return the value of the parameter `own`; see click's Parameter.process_value."""
    if own.multiple or own.nargs == -1:
        value = list(value or ())
    return value if own.callback is None else own.callback(context, own, value)


class _TakesWords:
    """Lets typer pass on words and switches as they are. It would load pydantic to look at each of a hundred options that nobody
    has written, which takes a quarter of a server's start.
    """

    def get_params(self, context: Any) -> Any:
        """Return all parameters; see click's Command.get_params."""
        command: Any = super()
        found = command.get_params(context)
        for each in found:
            described = getattr(each, "type_descriptor", None)
            if (
                described
                and described.annotation in _AS_GIVEN
                and not (each.required or described.parameter_info.parser)
            ):
                each.process_value = partial(_as_given, each)
        return found

    def get_help_option(self, context: Any) -> Any:
        """Return the option --help without a type; see click's Command.get_help_option."""
        command: Any = super()
        found = command.get_help_option(context)
        if found is not None:
            found.metavar = " "
        return found


class CommandGroup(_TakesWords, TyperGroup):
    """A group of commands."""


class Command(_TakesWords, TyperCommand):
    """A command whose `--help` shows the options that people use most, and `--help=WHAT` all, those of a heading, or
    those with a word.
    """

    def get_help_option(self, context: Any) -> Any:
        """Return the option --help, whose own help says what else there is; see click's Command.get_help_option."""
        found = super().get_help_option(context)
        if found is not None and any(each.hidden for each in self._options()):
            found.help = _MORE_HELP
        return found

    def parse_args(self, context: Any, words: list[str]) -> list[str]:
        """Parse `words`; see click's Command.parse_args. Raises SettingsError if no option has the word of --help=WORD."""
        own = words[: words.index("--")] if "--" in words else words
        for word in own:
            if word.startswith("--help="):
                self._show(context, word.partition("=")[2].strip().lower())
                context.exit()
        return super().parse_args(context, words)

    def _options(self) -> list[Any]:
        """Return the options that are explained; those without a help are old names, and settings that have gone."""
        options: list[Any] = [each for each in self.params if each.param_type_name == "option"]
        return [each for each in options if each.help]

    def _show(self, context: Any, what: str) -> None:
        headings = {_heading(each) for each in self._options()}
        chosen = {each for each in headings if what and (each.lower().startswith(what) or what in each.lower().split())}

        def wanted(each: Any) -> bool:
            if chosen or what == "all":
                return what == "all" or _heading(each) in chosen
            return bool(what) and what in f"{' '.join(each.opts)} {each.help}".lower()

        found = {each.name for each in self._options() if wanted(each)}
        if not found:
            known = ", ".join(sorted(headings, key=str.lower))
            raise SettingsError(f"--help={what}: no option has this word; must be all, a word, or a heading: {known}")
        whole = copy.copy(self)
        whole.params = [copy.copy(each) for each in self.params]
        for each in whole._options():
            each.hidden = each.name not in found
        whole.format_help(context, context.make_formatter())


_MORE_HELP = "Show the most common options. --help=all shows every option, --help=batching those under a heading, --help=WORD those with a word."


def _heading(each: Any) -> str:
    return each.rich_help_panel or "Options"


def register(cli: typer.Typer, commands: Mapping[str, str], module: str, kind: type[Command] = Command) -> None:
    """Add `commands` to `cli`: an example of each, by name.

    Each is the function of its name in `module`. Its options are the function's arguments, and its help is the
    docstring and the example. `kind` is the class of the commands, which parses their words.
    """
    for name, example in commands.items():
        command = getattr(import_module(module), name)
        if isinstance(command, typer.Typer):
            cli.add_typer(command, name=name, epilog=f"Example: {example}")
        else:
            cli.command(name, cls=kind, help=paragraphs(command), epilog=f"Example: {example}")(command)


def paragraphs(command: Callable[..., Any]) -> str:
    """Return the docstring with each paragraph in one line, which the terminal wraps."""
    return "\n\n".join(" ".join(each.split()) for each in (inspect.getdoc(command) or "").split("\n\n"))


STDOUT = Path("-")


def check_writable(path: Path) -> None:
    """Raise SettingsError if the file `path` cannot be written."""
    if path.is_dir():
        raise SettingsError(f"{path}: cannot be written: is a directory; must be a file")
    check_folder(path)


def check_folder(path: Path) -> None:
    """Raise SettingsError if the file or folder `path` cannot be created."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SettingsError(f"{path}: cannot be written: {folder} must be a writable directory")


def check_results(*files: Path | None) -> None:
    """Raise SettingsError if a result cannot be written. Call this before work that takes long.

    None means no file, and - means stdout.
    """
    for path in files:
        if path is not None and path != STDOUT:
            check_writable(path)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` in one step: a reader sees either all of it or the former file.

    Raises SettingsError naming `path` if it cannot be written; the former file stays then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(document: Any, path: Path | None) -> None:
    """Write `document` as JSON to the file `path`; - prints it, and None does nothing."""
    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    if path == STDOUT:
        typer.echo(text, nl=False)
    elif path is not None:
        write_atomically(path, text)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Show on stderr, if it is a terminal, how much is done. What this yields takes what is done, of how much (0: unknown), and a new title."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total, now=title: shown.update(task, completed=done, total=total or None, description=now)


UNBOUNDED = 10_000  # columns


def print_table(console: "Console", table: "Table") -> None:
    """Print `table` without cutting off anything: a narrow terminal wraps the lines, and a file has no width limit.

    Only columns with overflow "fold" are made narrower.
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
