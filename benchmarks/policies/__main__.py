"""`python -m benchmarks.policies [NAME...] [--seeds N] [--requests N]`; without names, all. `report` only writes the page."""

import argparse
import os
import platform
from importlib.metadata import version

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded: its threads spin while they wait

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.policies import (
    bursts,
    crew,
    day,
    extremes,
    foreign,
    in_time,
    overload,
    pictures,
    promise,
    rates,
    sample,
    silence,
)
from benchmarks.policies.lines import FIRST_SEED, Effort
from benchmarks.policies.table import Compared, Comparison, keep, write_page

COMPARISONS = {
    each.COMPARISON.name: each.COMPARISON
    for each in (day, rates, foreign, crew, promise, in_time, overload, silence, bursts, sample, extremes)
}


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser("benchmarks.policies", description=__doc__)
    parser.add_argument(
        "what", nargs="*", choices=[*COMPARISONS, "report", []], metavar="NAME", help=", ".join(COMPARISONS)
    )
    parser.add_argument("--seeds", type=int, default=8, help="independent lines of arrivals")
    parser.add_argument("--requests", type=int, default=50_000, help="of each line")
    asked = parser.parse_args()
    console = Console()
    for name, comparison in COMPARISONS.items():
        if not asked.what or name in asked.what:
            _play(console, comparison, asked.seeds, asked.requests)
    pictures.draw()
    write_page()


def _play(console: Console, comparison: Comparison, seeds: int, requests: int) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(comparison.title, total=comparison.steps(seeds))
        compared = comparison.compare(Effort(seeds, requests, lambda text: progress.advance(task)))
    _show(console, comparison.title, compared)
    versions = f"weir-serving {version('weir-serving')}, Python {platform.python_version()}, numpy {version('numpy')}"
    lines = f"seeds {FIRST_SEED} to {FIRST_SEED + seeds - 1}, {requests:,} requests each"
    about = {} if comparison.exact else {"lines": lines, "intervals": "95 %, over the lines"}
    keep(comparison.name, compared, {**about, "versions": versions})


def _show(console: Console, title: str, compared: Compared) -> None:
    table = Table(*compared.columns, title=title)
    for row in compared.rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
