"""The subcommands of `weir` beside serve and check: one module each, named like it, with a function of that name.

The modules are imported for every `weir --help`, so what a command needs is imported inside its function.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import typer

COMMANDS: Mapping[str, str] = {  # each with an example
    "profile": "weir profile square:Square -o square.profile.toml",
    "solve": "weir solve square.profile.toml --latency-weight 1 --energy-weight 1 --reference-rate 200 -o square.policy.npz",
    "simulate": "weir simulate square.profile.toml --policy smdp,greedy,size-or-delay:size=32,delay=5ms --arrivals poisson:0.7",
    "reproduce": "weir reproduce smdp -o reproduction",
    "worker": "weir worker square:Square --connect unix:/run/weir/square.sock",
    "bench": "weir bench http://localhost:8000/infer/square --arrivals poisson --rate 500 --duration 30",
}


def register(cli: typer.Typer) -> None:
    """Add each command to `cli`; its options are the function's arguments, its help the docstring and an example."""
    for name, example in COMMANDS.items():
        command = getattr(import_module(f"weir.commands.{name}"), name)
        cli.command(name, help=_paragraphs(command), epilog=f"Example: {example}")(command)


def _paragraphs(command: Callable[..., Any]) -> str:
    """Return the docstring with a line for each paragraph, which the terminal breaks as it needs."""
    return "\n\n".join(" ".join(each.split()) for each in (inspect.getdoc(command) or "").split("\n\n"))
