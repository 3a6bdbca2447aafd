"""`weir embed`: the vectors of texts. Each subcommand has a module of its name with a function of that name."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weir.commands.options import Command, CommandGroup, register
from weir.errors import SettingsError
from weir.text_server.bert_as_service.settings import server_last, with_commas

if TYPE_CHECKING:
    from weir.text_models.offline import Progress

COMMANDS = {  # an example of each command, by name
    "serve": "weir embed serve ./bge-small-en --pooling cls --max-length 512 --workers 2 --zmq-port 5555",
    "benchmark": "weir embed benchmark ./bge-small-en --client-batch 1,64,1024 -- --workers 2",
    "convert": "weir embed convert ./uncased_L-12_H-768_A-12 ./bert-base-uncased",
    "layers": "weir embed layers reviews.tsv --model ./bert-base-uncased -o layers.png",
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
register(embed, COMMANDS, "weir.commands.embed", StockCommand)


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


@contextmanager
def bar(title: str) -> "Iterator[Progress]":
    """Show on stderr, if it is a terminal, how many texts are encoded."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
