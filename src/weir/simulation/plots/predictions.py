"""What a model predicts against what was measured: points with their intervals, the diagonal, and the differences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weir.figures import COLOURS, INK, MARKERS, figure
from weir.simulation.plots.scales import plain_log

_LOG_FROM = 8.0  # ratio of the largest value to the smallest from which on axes are logarithmic


class Point(NamedTuple):
    """A prediction, and the measurement with its interval, in one unit; `label` says where (a load, say)."""

    predicted: float
    measured: float
    low: float
    high: float
    label: str = ""


def draw_predictions(
    path: Path, points: Mapping[str, Sequence[Point]], *, what: str = "mean response time", unit: str = "ms"
) -> None:
    """Draw the points of each name (a policy, say) with one marker: measured over predicted beside the diagonal, and the
    difference in percent. Points that are not finite (unstable) are left out. Writes `path` as PNG and SVG."""
    kept = {name: [each for each in some if np.all(np.isfinite(each[:4]))] for name, some in points.items()}
    values = [value for some in kept.values() for each in some for value in each[:4] if value > 0.0]
    with figure(path, 1, 2, size=(9.0, 3.8)) as (_, axes):
        agreement, difference = axes[0]
        for index, (name, some) in enumerate(kept.items()):
            style = {"marker": MARKERS[index % len(MARKERS)], "color": COLOURS[index % len(COLOURS)]}
            _agreement(agreement, some, name, style)
            _difference(difference, some, style)
        if values:
            ends = [min(values) * 0.9, max(values) * 1.1]
            agreement.plot(ends, ends, color=INK, linewidth=0.8)
            if ends[1] > _LOG_FROM * ends[0]:
                plain_log(agreement, "x", "y")
                plain_log(difference, "x")
        agreement.set(xlabel=f"predicted {what} ({unit})", ylabel=f"measured {what} ({unit})")
        agreement.legend(fontsize=7)
        difference.axhline(0.0, color=INK, linewidth=0.8)
        difference.set(xlabel=f"predicted {what} ({unit})", ylabel="measured beyond predicted (%)")


def _agreement(axes: Any, points: Sequence[Point], name: str, style: Mapping[str, Any]) -> None:
    axes.errorbar(
        [each.predicted for each in points], [each.measured for each in points],
        yerr=[[max(0.0, each.measured - each.low) for each in points], [max(0.0, each.high - each.measured) for each in points]],
        linestyle="none", markersize=4, capsize=2, elinewidth=0.8, label=name, **style,
    )  # fmt: skip


def _difference(axes: Any, points: Sequence[Point], style: Mapping[str, Any]) -> None:
    for each in points:
        middle, low, high = (100.0 * (value / each.predicted - 1.0) for value in each[1:4])
        axes.errorbar(
            [each.predicted], [middle], yerr=[[max(0.0, middle - low)], [max(0.0, high - middle)]],
            linestyle="none", markersize=4, capsize=2, elinewidth=0.8, **style,
        )  # fmt: skip
        axes.annotate(each.label, (each.predicted, middle), xytext=(5, 3), textcoords="offset points", fontsize=6)
