"""What a part hands back: tables, goals, values. Rendered by report.py, so that no figure is typed by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple


class Run(NamedTuple):
    """How a part is to be run. `step(text)` moves the progress bar on."""

    rounds: int
    seconds: float  # of load, each time
    step: Callable[[str], None]
    quick: bool = False  # a short run, which is not kept


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


class Part(NamedTuple):
    """One thing that can be measured alone. `steps(rounds)` is how often it will call `Run.step`."""

    name: str
    title: str
    about: str
    steps: Callable[[int], int]
    measure: Callable[[Run], Result]
    round: str = ""  # what each round is of, where it is not the seconds of load that were asked for


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
