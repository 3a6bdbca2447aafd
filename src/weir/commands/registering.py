"""How subcommands join a command: each is a function in a module of the same name; a group of them is a Typer."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand


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
