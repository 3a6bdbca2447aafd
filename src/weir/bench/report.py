"""A report for people and for machines: a table with a column for each target, Markdown, JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from weir.bench.outcome import QUANTILES, Outcome
from weir.bench.run import Report
from weir.figures import figure, styles
from weir.simulation.statistics import Estimate

Row = tuple[str, list[str]]

_HIDDEN = ("times_ms", "instants")
_LABELS = dict(zip(QUANTILES, ("p50", "p90", "p95", "p99", "p99.9"), strict=True))


def to_dict(report: Report) -> dict[str, Any]:
    """Return all but the single response times as a JSON-able dict; what is unknown is None."""
    values = {name: value for name, value in vars(report).items() if name != "outcomes"}
    outcomes = {
        name: {key: _plain(value) for key, value in vars(outcome).items() if key not in _HIDDEN}
        for name, outcome in report.outcomes.items()
    }
    return {**values, "outcomes": outcomes}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def headline(report: Report) -> str:
    """Return in one line what was done."""
    rate = "" if report.rate is None else f", {report.rate:,.6g} requests/s"
    rounds = "" if report.rounds == 1 else f" in {report.rounds} rounds, taking turns"
    warm_up = report.warm_up * report.rounds
    return f"{report.arrivals}{rate}, {report.duration:g} s{rounds}; of these {warm_up:g} s to warm up, not counted"


def table(report: Report) -> Table:
    """Return the table for a terminal."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    for name in report.outcomes:
        drawn.add_column(name, justify="right", overflow="fold")
    for label, cells in rows(report):
        drawn.add_row(label, *cells)
    return drawn


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    names = [name.replace("|", "\\|") for name in report.outcomes]
    lines = ["# Load test", "", headline(report) + ".", ""]
    lines += ["| " + " | ".join(["", *names]) + " |", "| --- |" + " ---: |" * len(names)]
    lines += ["| " + " | ".join([label, *cells]) + " |" for label, cells in rows(report)]
    if report.failures:
        lines += ["", "This run is no measurement:", "", *(f"- {line}" for line in report.failures)]
    return "\n".join(lines) + "\n"


def rows(report: Report) -> list[Row]:
    """Return the lines of the table: a label, and a cell for each target. Lines that say nothing of any are left out."""
    outcomes = list(report.outcomes.values())
    found = [*_requests(outcomes), *_times(outcomes), *_ours(outcomes), *_batches(outcomes)]
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
    yield "response time, ms: mean", [_interval(each.response_time_ms) for each in outcomes]
    for name, label in _LABELS.items():
        yield label, [_interval(getattr(each, name)) for each in outcomes]
    yield "max", [_number(each.max_ms) for each in outcomes]


def _ours(outcomes: list[Outcome]) -> Iterator[Row]:
    if outcomes[0].rate is not None:
        lags = [each.lag for each in outcomes]
        yield "send lag, ms: p50 / p99 / max", [" / ".join(map(_number, lag)) for lag in lags]
    yield "connections", [str(each.connections or "") for each in outcomes]
    yield "waited for a connection", [f"{each.held:,}" if each.held else "" for each in outcomes]


def _batches(outcomes: list[Outcome]) -> Iterator[Row]:
    batches = [each.batches for each in outcomes]
    yield "batches", [f"{each.count:,}" if each else "" for each in batches]
    yield "mean batch size", [f"{each.mean_rows:.2f}" if each else "" for each in batches]
    for reason in sorted({reason for each in batches if each for reason in each.reasons}):
        yield f"cut by {reason}", [_share(each.reasons.get(reason, 0), each.count) if each else "" for each in batches]
    for label, name in (("queue time, ms", "queue_time_ms"), ("predict of a batch, ms", "predict_time_ms")):
        yield label, [_number(getattr(each, name)) if each else "" for each in batches]


def _share(count: int, whole: int) -> str:
    return f"{count / whole:.1%}" if whole else ""


def _interval(value: Estimate) -> str:
    half = (value.high - value.low) / 2.0
    return f"{_number(value.value)} ± {_number(half)}" if isfinite(half) else _number(value.value)


def _number(value: float) -> str:
    if not isfinite(value):
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# The figure of a run: how response times are distributed, and how they went over time.


_POINTS = 400  # of a curve
_STRIPES = 100  # of the time axis
_MARKED = (0.5, 0.1, 0.01, 0.001)  # shares that have a name: p50, p90, p99, p99.9


def draw(report: Report, path: Path) -> None:
    """Write `path` as PNG and SVG. Raises SettingsError without matplotlib."""
    with figure(path, 1, 2, size=(9.6, 3.8)) as (drawing, axes):
        drawing.suptitle(headline(report), fontsize=9)
        for each in axes.flat:
            each.set(yscale="log")
        axes[0, 0].set(xscale="log")
        for outcome, style in zip(report.outcomes.values(), styles(), strict=False):
            if len(outcome.times_ms):
                _draw_tail(axes[0, 0], outcome, style)
                _draw_course(axes[0, 1], outcome, style)
        _label_tail(axes[0, 0])
        _label_course(axes[0, 1])


def _draw_tail(axes: Any, outcome: Outcome, style: dict[str, Any]) -> None:
    times = np.sort(outcome.times_ms)
    beyond = 1.0 - np.arange(len(times)) / len(times)
    # As many points to each decade of the share: the tail is what is looked at.
    shown = np.unique(np.searchsorted(-beyond, -np.geomspace(1.0, beyond[-1], _POINTS)).clip(0, len(times) - 1))
    marks = [int(np.searchsorted(-beyond[shown], -share)) for share in _MARKED if share > beyond[-1]]
    axes.plot(times[shown], beyond[shown], label=outcome.target, markevery=marks, **style)


def _draw_course(axes: Any, outcome: Outcome, style: dict[str, Any]) -> None:
    edges = np.linspace(outcome.instants.min(), outcome.instants.max() + 1e-9, min(_STRIPES, len(outcome.instants)) + 1)
    parts = np.split(outcome.times_ms, np.searchsorted(outcome.instants, edges[1:-1]))
    middles = (edges[1:] + edges[:-1]) / 2.0
    known = [index for index, part in enumerate(parts) if len(part)]
    plain = {**style, "marker": ""}
    axes.plot(middles[known], [np.median(parts[index]) for index in known], label=outcome.target, **plain)
    axes.plot(middles[known], [parts[index].max() for index in known], **{**plain, "linewidth": 0.6})


def _label_tail(axes: Any) -> None:
    axes.set(xlabel="response time from the intended instant, ms", ylabel="share of requests that took longer")
    axes.set_title("marked: p50, p90, p99, p99.9", fontsize=8, loc="right")
    _number_plainly(axes.xaxis)
    _number_plainly(axes.yaxis, (1.0,))
    axes.set_ylim(top=1.0)
    if axes.lines:
        axes.legend(fontsize=8, loc="lower left")


def _label_course(axes: Any) -> None:
    axes.set(xlabel="instant at which the request was to leave, s", ylabel="response time, ms")
    axes.set_title("thick: median, thin: largest", fontsize=8, loc="right")
    _number_plainly(axes.yaxis)


def _number_plainly(axis: Any, steps: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    """Write plain numbers at a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
