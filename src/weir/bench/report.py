"""Shows a run: its progress in a line, and its results as JSON and as a table with a column for each target."""

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from math import isfinite
from typing import Any

from rich.table import Table

from weir.bench.run import QUANTILES, Outcome, Report, TargetTurn, Watch
from weir.bench.target import Batches, Ledger
from weir.simulation.statistics import Estimate, plain

Row = tuple[str, list[str]]

_HIDDEN = ("times_ms", "instants")
_ESTIMATES = {"response time, ms: mean": "response_time_ms"} | dict(
    zip(("p50", "p90", "p95", "p99", "p99.9"), QUANTILES, strict=True)
)


def to_dict(report: Report) -> dict[str, Any]:
    """Return the report without the individual response times as a JSON-able dict; unknown values are None."""
    outcomes = {
        name: {key: plain(value) for key, value in vars(outcome).items() if key not in _HIDDEN}
        for name, outcome in report.outcomes.items()
    }
    return {**vars(report), "outcomes": outcomes}


def headline(report: Report) -> str:
    """Return one line of text that describes the load."""
    rate = "" if report.rate is None else f", {report.rate:,.6g} requests/s"
    rounds = "" if report.rounds == 1 else f" in {report.rounds} rounds, taking turns"
    warm_up = report.warm_up * report.rounds
    return f"{report.arrivals}{rate}, {report.duration:g} s{rounds}; {warm_up:g} s of these are the warm-up and not counted"


def table(report: Report) -> Table:
    """Return the table for a terminal."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    for name in report.outcomes:
        drawn.add_column(name, justify="right", overflow="fold")
    for label, cells in rows(report):
        drawn.add_row(label, *cells)
    return drawn


def rows(report: Report) -> list[Row]:
    """Return the rows of the table: a label, and a cell for each target. Rows without any content are left out."""
    outcomes = list(report.outcomes.values())
    found = [*_requests(outcomes), *_times(outcomes), *_batches([each.batches for each in outcomes])]
    return [(label, cells) for label, cells in found if any(cells)]


def _requests(outcomes: list[Outcome]) -> Iterator[Row]:
    yield "requests", [f"{each.requests:,}" for each in outcomes]
    yield "answered", [f"{each.answered:,}" for each in outcomes]
    for kind in sorted({kind for each in outcomes for kind in each.errors}):
        yield f"failed: {kind}", [f"{each.errors.get(kind, 0):,}" for each in outcomes]
    for label, name in (("timed out", "timeouts"), ("unfinished", "unfinished")):
        numbers = [getattr(each, name) for each in outcomes]
        yield label, [f"{number:,}" if any(numbers) else "" for number in numbers]
    yield "sent, 1/s", [f"{each.sent_rate:,.1f}" for each in outcomes]
    yield "answered, 1/s", [f"{each.throughput:,.1f}" for each in outcomes]


def _times(outcomes: list[Outcome]) -> Iterator[Row]:
    for label, name in _ESTIMATES.items():
        yield label, [_interval(getattr(each, name)) for each in outcomes]
    yield "max", [_number(each.max_ms) for each in outcomes]
    lags = [each.lag if each.rate is not None else () for each in outcomes]
    yield "send lag, ms: p50 / p99 / max", [" / ".join(map(_number, lag)) for lag in lags]
    yield "connections", [str(each.connections or "") for each in outcomes]
    yield "waited for a connection", [f"{each.held:,}" if each.held else "" for each in outcomes]


def _batches(batches: list[Batches | None]) -> Iterator[Row]:
    yield "batches", [f"{each.count:,}" if each else "" for each in batches]
    yield "mean batch size", [f"{each.mean_rows:.2f}" if each else "" for each in batches]
    for reason in sorted({reason for each in batches if each for reason in each.reasons}):
        yield f"cut by {reason}", [_share(each, reason) if each else "" for each in batches]
    for label, name in (("queue time, ms", "queue_time_ms"), ("predict of a batch, ms", "predict_time_ms")):
        yield label, [_number(getattr(each, name)) if each else "" for each in batches]


def _share(batches: Batches, reason: str) -> str:
    return f"{batches.reasons.get(reason, 0) / batches.count:.1%}" if batches.count else ""


def _interval(value: Estimate) -> str:
    half = value.half_width
    return f"{_number(value.value)} ± {_number(half)}" if isfinite(half) else _number(value.value)


def _number(value: float) -> str:
    if not isfinite(value):
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


_INTERVAL = 0.25  # seconds


@asynccontextmanager
async def progress_shown() -> AsyncIterator[Watch]:
    """Show several times a second how far a run is, in one line on stderr, until the block ends. It gives the yielded Watch to the run."""
    turns: list[tuple[TargetTurn, Ledger, float]] = []

    async def show() -> None:
        while True:
            await asyncio.sleep(_INTERVAL)
            for turn, ledger, since in turns[-1:]:
                line = progress_line(turn, ledger, time.monotonic() - since)
                await asyncio.to_thread(show_line, line)  # a terminal may be slow to take it

    showing = asyncio.ensure_future(show())
    try:
        yield lambda turn, ledger: turns.append((turn, ledger, time.monotonic()))
    finally:
        showing.cancel()


def show_line(line: str) -> None:
    """Put `line` in the place of the last line on stderr."""
    with suppress(OSError):  # the terminal is gone
        sys.stderr.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()


def progress_line(turn: TargetTurn, ledger: Ledger, elapsed: float) -> str:
    """Return the line to show `elapsed` seconds after the start of a turn."""
    done, whole = turn.index * turn.seconds + min(elapsed, turn.seconds), turn.count * turn.seconds
    text = f"{done / whole:4.0%}, {whole - done:.0f} s left: {ledger.begun:,} sent"
    text += f", {ledger.over - ledger.failed:,} ok, {ledger.failed:,} failed"
    return f"{text}, {turn.target}"
