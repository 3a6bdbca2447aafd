"""The figure of a run: how response times are distributed, and how they went over time."""

from pathlib import Path
from typing import Any

import numpy as np

from weir.bench.outcome import Outcome
from weir.bench.report import headline
from weir.bench.run import Report
from weir.figures import figure, styles

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
