"""Lines and points that compare policies: cost against weight, response time against power, accuracy against s_max."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from weir.figures import COLOURS, INK, MARKERS, figure, styles
from weir.simulation.plots.scales import plain_log


class Curve(NamedTuple):
    """One line; values that are not finite are left out."""

    name: str
    x: ArrayLike
    y: ArrayLike
    marked: int = 10  # about so many points carry the line's marker


class Panel(NamedTuple):
    """One part of a figure: lines, and named points (x, y)."""

    title: str
    curves: Sequence[Curve]
    points: Mapping[str, tuple[float, float]] = {}


def draw_panels(
    path: Path, panels: Sequence[Panel], *, x: str, y: str | Sequence[str], columns: int = 2, log_x: bool = False,
    log_y: bool | Sequence[bool] = False,
) -> None:  # fmt: skip
    """Draw the panels in a grid, all with the x label `x`; `y` and `log_y` are one for all or one for each.

    Lines differ in dash and marker as well as in colour, so does each point. Writes `path` as PNG and SVG.
    """
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    labels = [y] * len(panels) if isinstance(y, str) else list(y)
    logs = [log_y] * len(panels) if isinstance(log_y, bool) else list(log_y)
    with figure(path, rows, columns) as (_, axes):
        for place, panel, label, log in zip(axes.flat, panels, labels, logs, strict=False):
            _draw(place, panel)
            place.set(title=panel.title, xlabel=x, ylabel=label)
            plain_log(place, *(["x"] if log_x else []), *(["y"] if log else []))
            if panel.curves or panel.points:
                place.legend(fontsize=7)
        for place in list(axes.flat)[len(panels) :]:
            place.set_axis_off()


def _draw(axes: Any, panel: Panel) -> None:
    for curve, style in zip(panel.curves, styles(), strict=False):
        x, y = np.asarray(curve.x, dtype=float), np.asarray(curve.y, dtype=float)
        shown = np.isfinite(x) & np.isfinite(y)
        every = max(1, int(shown.sum()) // curve.marked)
        axes.plot(x[shown], y[shown], label=curve.name, markevery=every, **style)
    for index, (name, (across, up)) in enumerate(panel.points.items(), start=len(panel.curves)):
        if np.isfinite(across) and np.isfinite(up):
            marker, colour = MARKERS[index % len(MARKERS)], COLOURS[index % len(COLOURS)]
            axes.plot([across], [up], marker, color=colour, markersize=7, markeredgecolor=INK, label=name)
