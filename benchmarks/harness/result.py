"""What a comparison is and what it hands back: tables, goals, values; and how a long one goes on after it was stopped."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import rich.table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.servers import ROOT


class Run(NamedTuple):
    """How a part is to be run. `step(text)` moves the progress bar on."""

    rounds: int
    seconds: float  # of load, each time
    step: Callable[[str], None]
    quick: bool = False  # a short run, which is not kept

    def picture(self, path: Path) -> Path:
        """Return where to draw a picture of the docs: there, or for a quick run under the same name in the folder for temporary files."""
        return Path(tempfile.gettempdir()) / path.name if self.quick else path


class Table(NamedTuple):
    """A table beside the main one."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass
class Result:
    """One part's outcome; JSON-able."""

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    goals: list[list[str]] = field(default_factory=list)  # goal, measured, "yes" or "no"
    notes: list[str] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)  # for pictures and the README
    tables: list[Table] = field(default_factory=list)

    def goal(self, text: str, measured: str, met: bool) -> None:
        """Set what was wished beside what was measured."""
        self.goals.append([text, measured, "yes" if met else "no"])

    def at_least(self, text: str, value: float, least: float, show: str = "{:.2f}") -> None:
        """Add a goal that is met by a `value` of `least` or more."""
        self.goal(text, show.format(value), value >= least)

    def at_most(self, text: str, value: float, most: float, show: str = "{:.2f}") -> None:
        """Add a goal that is met by a `value` of `most` or less."""
        self.goal(text, show.format(value), value <= most)

    def print(self, console: Console, title: str = "") -> None:
        """Show the tables, then the goals."""
        for name, columns, rows in ((title, self.columns, self.rows), *self.tables):
            console.print(rich_table(columns, rows, name))
        for text, measured, met in self.goals:
            console.print(f"[{'green' if met == 'yes' else 'red'}]{met:3}[/] {text}: {measured}")


class Part(NamedTuple):
    """One thing that can be measured alone. `steps(rounds)` is how often it will call `Run.step`."""

    name: str
    title: str
    about: str
    steps: Callable[[int], int]
    measure: Callable[[Run], Result]
    round: str = ""  # what each round is of, where it is not the seconds of load that were asked for


def rich_table(columns: Iterable[str], rows: Iterable[Sequence[str]], title: str = "") -> rich.table.Table:
    """Return a table for the console."""
    table = rich.table.Table(*columns, title=title or None)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *rows))


def progress_bar(console: Console) -> Progress:
    """Return the bar that shows how many steps are done."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def middle(values: Sequence[float]) -> float:
    """Return the median."""
    return median(values)


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Show the median with the smallest and the largest."""
    return f"{show(median(values))} ({show(min(values))} to {show(max(values))})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of rounds that ran side by side."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


def count(value: float) -> str:
    """12345.6 -> 12,346"""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    """Seconds, shown in ms."""
    return f"{seconds * 1e3:.3g}"


def mebibytes(size_bytes: float) -> str:
    """Bytes, shown in MiB."""
    return f"{size_bytes / 2**20:.1f}"


def rotated(values: Sequence[Any], by: int) -> list[Any]:
    """Return `values` begun at another place, so that no server always goes first."""
    by %= len(values)
    return [*values[by:], *values[:by]]


FOLDER = ROOT / "build"


def commit() -> str:
    """Return the short hash of the commit that is measured."""
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return said.stdout.strip()


def resumed(name: str, sources: Iterable[Path], find: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
    """Yield the results of `find(0)` in their order, as JSON has them: those that an earlier run with the very same `sources`
    (files, and folders of Python) has found are read, `find(number)` finds the others from that number on."""
    path = FOLDER / f"{name}-{_digest(sources)}.jsonl"
    FOLDER.mkdir(exist_ok=True)
    known = path.read_text().split("\n")[:-1] if path.exists() else []  # a run that was killed may leave half a line
    path.write_text("".join(f"{line}\n" for line in known))
    yield from map(json.loads, known)
    with path.open("a") as file:
        for each in find(len(known)):
            file.write(json.dumps(each) + "\n")
            file.flush()
            yield json.loads(json.dumps(each))


def _digest(sources: Iterable[Path]) -> str:
    found = sha256()
    for source in sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            found.update(path.read_bytes())
    return found.hexdigest()[:12]
