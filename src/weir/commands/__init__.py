"""The subcommands of `weir` beside serve and check: one module each, named like it, with a function of that name.

The modules are imported for every `weir --help`, so what a command needs is imported inside its function.
"""

from importlib import import_module

import typer

COMMANDS: tuple[str, ...] = ("profile", "solve", "simulate", "reproduce", "bench")


def register(cli: typer.Typer) -> None:
    """Add each command to `cli`; its options are the function's arguments, its help the docstring."""
    for name in COMMANDS:
        cli.command(name)(getattr(import_module(f"weir.commands.{name}"), name))
