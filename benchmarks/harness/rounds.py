"""The declared form of a comparison: contenders that take turns, round by round, and the table of what was measured.

A comparison declares what it starts, which cases there are, how one contender is measured in one case, and the columns of its table.
`Rounds` starts everything, alternates, reports progress and makes the table; `conclude` adds goals, notes and values to it.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.reference import loop_seconds
from benchmarks.harness.result import Result, Run, count, middle, milliseconds, ratio, rotated, short, spread
from benchmarks.harness.servers import Load, Server

Figures = Mapping[str, Any]  # what one measurement found, by name
Show = Callable[[float], str]


class Measurements:
    """The figures of every round of a `run`, by contender, case and name. Warm-up rounds are kept apart."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.prepared: Any = None  # what `Rounds.prepare` returned
        self._counted: defaultdict[tuple[str, Any], list[Figures]] = defaultdict(list)
        self._warm_up: defaultdict[tuple[str, Any], list[Figures]] = defaultdict(list)

    def add(self, name: str, case: Any, figures: Figures, *, warm_up: bool = False) -> None:
        """Keep one measurement."""
        (self._warm_up if warm_up else self._counted)[name, case].append(figures)

    def of(self, name: str, case: Any = "", figure: str = "rate") -> list[Any]:
        """Return a figure of each counted round; nothing where it was not measured."""
        return [each[figure] for each in self._counted[name, case] if figure in each]

    def before(self, name: str, case: Any = "", figure: str = "rate") -> Any:
        """Return a figure of the last warm-up round."""
        return self._warm_up[name, case][-1][figure]

    def middle(self, name: str, case: Any = "", figure: str = "rate") -> float:
        """Return the median of a figure."""
        return middle(self.of(name, case, figure))

    def times(self, ours: str, theirs: str, case: Any = "", figure: str = "rate") -> float:
        """Return the median over the rounds of our figure divided by theirs."""
        return ratio(self.of(ours, case, figure), self.of(theirs, case, figure))

    def pairs(self) -> Iterable[tuple[str, Any]]:
        """Return the pairs of a contender and a case that were measured."""
        return self._counted.keys()

    def values(self, figure: str = "rate") -> dict[str, float]:
        """Return the medians of a figure, under "contender case"."""
        return {f"{name} {case}".strip(): self.middle(name, case, figure) for name, case in self._counted}


class Column(NamedTuple):
    """A column of the table: its title, and what it shows of a contender in a case."""

    title: str
    show: Callable[[Measurements, str, Any], str]


def spreads(title: str, figure: str = "rate", show: Show = count, case: Any = None) -> Column:
    """Show the median with the smallest and the largest; of `case`, or of the row's own."""

    def cell(measured: Measurements, name: str, own: Any) -> str:
        values = measured.of(name, own if case is None else case, figure)
        return spread(values, show) if values else ""

    return Column(title, cell)


def medians(title: str, figure: str, show: Show = milliseconds, case: Any = None) -> Column:
    """Show the median; of `case`, or of the row's own."""

    def cell(measured: Measurements, name: str, own: Any) -> str:
        values = measured.of(name, own if case is None else case, figure)
        return show(middle(values)) if values else ""

    return Column(title, cell)


def times(title: str, other: str, show: str = "{:.2f}", figure: str = "rate") -> Column:
    """Show how many times the figure of `other` it is, in the same rounds."""

    def cell(measured: Measurements, name: str, case: Any) -> str:
        ours, theirs = measured.of(name, case, figure), measured.of(other, case, figure)
        return show.format(ratio(ours, theirs)) if ours and theirs else ""

    return Column(title, cell)


LATENCIES = (medians("p50 ms", "p50"), medians("p99 ms", "p99"))


def micro(title: str, figure: str, case: Any = None) -> Column:
    """Show a median in seconds as µs."""
    return medians(title, figure, lambda seconds: short(seconds * 1e6), case)


def loops(title: str) -> Column:
    """Show the processor time of the process that listens as a multiple of the loop in reference.py."""
    return medians(title, "front loops", "{:.2f}".format)


def of_load(done: Load, server: Server, *, refused: bool = False) -> dict[str, float]:
    """Return rate and latencies. Raises RuntimeError if a request was lost, or refused where none may be."""
    if done.broken or (done.refused and not refused):
        raise RuntimeError(f"{server.name}: {done}")
    return {"rate": done.rate, "p50": done.p50, "p99": done.p99, "refused": done.refused / done.requests}


def with_usage(server: Server, load: Callable[[], Load], *, refused: bool = False) -> dict[str, float]:
    """Put a load on a server. Return rate, latencies, CPU seconds per request (of the process that listens, `front`, of those below it,
    `workers`, and of `all`), `front loops`, which is `front` as a multiple of the loop in reference.py, and the memory afterwards."""
    loop = loop_seconds()
    before = server.usage()
    done = load()
    after = server.usage()
    loop = (loop + loop_seconds()) / 2
    front = (after.front_seconds - before.front_seconds) / done.requests
    workers = (after.worker_seconds - before.worker_seconds) / done.requests
    more = {"front": front, "workers": workers, "all": front + workers, "memory": after.memory_bytes}
    more["front loops"] = front / loop
    return of_load(done, server, refused=refused) | more


def start_all(stack: ExitStack, servers: Iterable[AbstractContextManager[Server]]) -> dict[str, Server]:
    """Start servers until the end of `stack`; return them by name."""
    return {server.name: server for server in map(stack.enter_context, servers)}


def folder(stack: ExitStack) -> Path:
    """Return a folder that is there until the end of `stack`."""
    return Path(stack.enter_context(tempfile.TemporaryDirectory()))


@dataclass(frozen=True)
class Rounds:
    """A comparison that can be measured alone.

    `start(stack)` starts what runs all the time and returns the contenders by name; without it a contender is its name.
    `one(contender, case, seconds)` measures one of them.
    Each case has a row for each contender, headed by `heads`: the title of the cases, if there are several, and that of the contenders.
    With `row_each` a contender has a single row. Without `columns` only the heads are put in the table, and `conclude` makes the rows.
    """

    name: str
    title: str
    about: str
    one: Callable[[Any, Any, float], Figures]
    contenders: Sequence[str]
    heads: Sequence[str]
    columns: Sequence[Column] = ()
    start: Callable[[ExitStack], Mapping[str, Any]] | None = None
    conclude: Callable[[Result, Measurements], None] = lambda result, measured: None
    cases: Sequence[Any] = ("",)
    takes_part: Callable[[str, Any], bool] = lambda name, case: True
    progress: tuple[str, Callable[[Any], str]] = ("rate", lambda rate: f"{count(rate)} requests/s")
    warm_ups: int = 0  # rounds before those that count
    prepare: Callable[[Mapping[str, Any]], Any] = lambda contenders: None  # done once, when all have started
    rest: Callable[[Mapping[str, Any]], None] = lambda contenders: None  # done before each measurement
    # Of contenders, where a row shows another text than the name.
    labels: Mapping[str, str] = field(default_factory=dict)
    row_each: bool = False
    round: str = ""  # what each round is of, where it is not the seconds of load that were asked for

    def steps(self, rounds: int) -> int:
        """Return how many measurements there are."""
        return (self.warm_ups + rounds) * sum(
            self.takes_part(name, case) for case in self.cases for name in self.contenders
        )

    def measure(self, run: Run) -> Result:
        """Start the contenders and alternate them, each case in turn; each round begins with another contender."""
        measured = Measurements(run)
        with ExitStack() as stack:
            running = self.start(stack) if self.start else {name: name for name in self.contenders}
            measured.prepared = self.prepare(running)
            for turn in range(self.warm_ups + run.rounds):
                for case in self.cases:
                    for name in rotated([name for name in self.contenders if self.takes_part(name, case)], turn):
                        self.rest(running)
                        figures = self.one(running[name], case, run.seconds)
                        measured.add(name, case, figures, warm_up=turn < self.warm_ups)
                        run.step(self._progress(name, case, figures))
        return self._result(measured)

    def _progress(self, name: str, case: Any, figures: Figures) -> str:
        figure, show = self.progress
        return f"{', '.join(filter(None, (name, str(case))))}: {show(figures[figure])}"

    def _result(self, measured: Measurements) -> Result:
        result = Result([*self.heads, *(column.title for column in self.columns)])
        if self.columns:
            for case in self.cases[:1] if self.row_each else self.cases:
                result.rows += [
                    self._row(measured, name, case) for name in self.contenders if self.takes_part(name, case)
                ]
        self.conclude(result, measured)
        return result

    def _row(self, measured: Measurements, name: str, case: Any) -> list[str]:
        heads = [str(case), self.labels.get(name, name)][-len(self.heads) :]
        return [*heads, *(column.show(measured, name, case) for column in self.columns)]
