"""The figures of the report: curves that compare policies, policy maps, timelines of batches, predictions beside measurements.

Each function draws one figure and writes it as PNG and SVG.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reproduction.drawing import COLOURS, GREY, INK, MARKERS, figure, plain_log, styles

_LIGHT_TEXT_FROM = 0.55  # of the largest action: darker cells need light numbers
_LIMIT_OF_COLUMNS = 2
_LEAST_WIDTH = 0.012  # of the window: narrower bars carry no number
_HATCHES = ("", "///", "...", "xxx")
_SHADES = ("#9db8cc", "#e8c2ae", "#b5d6c8", "#d3c2de")
_LOG_FROM = 8.0  # ratio of the largest value to the smallest from which on axes are logarithmic


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
            _panel(place, panel)
            place.set(title=panel.title, xlabel=x, ylabel=label)
            plain_log(place, *(["x"] if log_x else []), *(["y"] if log else []))
            if panel.curves or panel.points:
                place.legend(fontsize=7)
        for place in list(axes.flat)[len(panels) :]:
            place.set_axis_off()


def _panel(axes: Any, panel: Panel) -> None:
    for curve, style in zip(panel.curves, styles(), strict=False):
        x, y = np.asarray(curve.x, dtype=float), np.asarray(curve.y, dtype=float)
        shown = np.isfinite(x) & np.isfinite(y)
        every = max(1, int(shown.sum()) // curve.marked)
        axes.plot(x[shown], y[shown], label=curve.name, markevery=every, **style)
    for index, (name, (across, up)) in enumerate(panel.points.items(), start=len(panel.curves)):
        if np.isfinite(across) and np.isfinite(up):
            marker, colour = MARKERS[index % len(MARKERS)], COLOURS[index % len(COLOURS)]
            axes.plot([across], [up], marker, color=colour, markersize=7, markeredgecolor=INK, label=name)


class PolicyMap(NamedTuple):
    """One panel: `tables[i]` is the policy at load `loads[i]`, entry n the rows dispatched with n waiting (0: wait)."""

    title: str
    loads: Sequence[float]
    tables: Sequence[ArrayLike]


def draw_policy_maps(path: Path, maps: Sequence[PolicyMap], *, states: int = 40) -> None:
    """Draw one panel for each map: states 0 ... `states` across, loads upwards. Hatched cells wait; the number, and the
    shade, of the others is the size of the batch. Writes `path` as PNG and SVG."""
    columns = min(_LIMIT_OF_COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    height = 0.8 + 0.19 * max(len(each.loads) for each in maps)
    with figure(path, rows, columns, size=(6.6 * columns, height * rows)) as (_, axes):
        for place, each in zip(axes.flat, maps, strict=False):
            _map_panel(place, each, states)
        for place in list(axes.flat)[len(maps) :]:
            place.set_axis_off()


def _map_panel(axes: Any, shown: PolicyMap, states: int) -> None:
    actions = np.stack([_stretched(table, states + 1) for table in shown.tables])
    largest = max(1, int(actions.max()))
    # The darkest shade is kept below black, and the lightest above white, so that lines and numbers stay visible.
    axes.imshow(
        np.where(actions > 0, 0.12 + 0.75 * actions / largest, np.nan),
        cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower",
    )  # fmt: skip
    for row, column in np.argwhere(actions == 0):
        axes.fill_between(
            [column - 0.5, column + 0.5],
            row - 0.5,
            row + 0.5,
            facecolor="none",
            edgecolor=GREY,
            hatch="///",
            linewidth=0,
        )
    for row, column in np.argwhere(actions > 0):
        action = int(actions[row, column])
        colour = "white" if action > _LIGHT_TEXT_FROM * largest else INK
        axes.text(column, row, action, ha="center", va="center", fontsize=5, color=colour)
    axes.grid(False)
    axes.set_title(shown.title, fontsize=9)
    axes.set_xlabel("requests waiting (state)")
    axes.set_ylabel("load ρ")
    axes.set_yticks(range(len(shown.loads)), [f"{load:g}" for load in shown.loads], fontsize=7)


def _stretched(table: ArrayLike, length: int) -> NDArray[np.int64]:
    """Return the first `length` entries; the last one of the table holds beyond its end."""
    values = np.asarray(table, dtype=np.int64)
    return values[np.minimum(np.arange(length), len(values) - 1)]


class Timeline(NamedTuple):
    """What happened under one policy; seconds. One entry a request in `arrival` and `rows` (None: one row each), one entry
    a batch in the others."""

    arrival: ArrayLike
    start: ArrayLike
    end: ArrayLike
    batch_rows: ArrayLike
    worker: ArrayLike
    rows: ArrayLike | None = None


def draw_timelines(path: Path, timelines: Mapping[str, Timeline], *, begin: float, end: float) -> None:
    """Draw the window from `begin` to `end` (seconds) for each policy, one below the other: above, the rows waiting, with a
    tick for each arrival; below, a bar for each batch on its worker's lane, with its rows. Writes `path` as PNG and SVG."""
    lanes = [int(np.max(np.asarray(each.worker), initial=0)) + 1 for each in timelines.values()]
    heights = [part for count in lanes for part in (1.5, 0.4 + 0.35 * count)]
    with figure(path, len(heights), 1, size=(9.0, 1.2 + sum(heights))) as (_, axes):
        axes[0, 0].get_gridspec().set_height_ratios(heights)
        for place in axes[1:, 0]:
            place.sharex(axes[0, 0])
        for index, (name, each) in enumerate(timelines.items()):
            line, bars = axes[2 * index, 0], axes[2 * index + 1, 0]
            _waiting(line, each, begin, end)
            _bars(bars, each, begin, end, lanes[index])
            line.set_title(name, loc="left", fontsize=9)
            line.tick_params(labelbottom=False)
            bars.tick_params(labelbottom=2 * index + 2 == len(heights))
        axes[0, 0].set_xlim(0.0, 1000.0 * (end - begin))
        axes[-1, 0].set_xlabel("time (ms)")


def _waiting(axes: Any, shown: Timeline, begin: float, end: float) -> None:
    arrival, start = np.asarray(shown.arrival, dtype=float), np.asarray(shown.start, dtype=float)
    rows = np.ones(len(arrival)) if shown.rows is None else np.asarray(shown.rows, dtype=float)
    times = np.concatenate([arrival, start])
    steps = np.concatenate([rows, -np.asarray(shown.batch_rows, dtype=float)])
    # At equal instants arrivals come first, so that what waits never falls below zero.
    order = np.lexsort((steps < 0, times))
    times, waiting = times[order], np.cumsum(steps[order])
    inside = (times >= begin) & (times <= end)
    before = float(waiting[times < begin][-1]) if np.any(times < begin) else 0.0
    x = np.concatenate([[0.0], 1000.0 * (times[inside] - begin), [1000.0 * (end - begin)]])
    y = np.concatenate([[before], waiting[inside], waiting[inside][-1:] if inside.any() else [before]])
    axes.fill_between(x, y, step="post", color=GREY)
    axes.step(x, y, where="post", color=COLOURS[0], linewidth=1.0)
    seen = arrival[(arrival >= begin) & (arrival <= end)]
    if len(seen):  # without points, what is not clipped has no extent, and confuses the layout
        axes.plot(1000.0 * (seen - begin), np.zeros(len(seen)), "|", color=INK, markersize=5, clip_on=False)
    axes.set_ylabel("rows waiting")
    axes.set_ylim(0.0, max(1.0, 1.05 * float(y.max())))
    axes.yaxis.get_major_locator().set_params(integer=True)


def _bars(axes: Any, shown: Timeline, begin: float, end: float, lanes: int) -> None:
    start, stop = np.asarray(shown.start, dtype=float), np.asarray(shown.end, dtype=float)
    batch_rows, worker = np.asarray(shown.batch_rows), np.asarray(shown.worker)
    for index in np.flatnonzero((stop > begin) & (start < end)):
        left, right = max(start[index], begin), min(stop[index], end)
        lane = int(worker[index])
        axes.barh(
            lane, 1000.0 * (right - left), left=1000.0 * (left - begin), height=0.7, facecolor=_SHADES[lane % len(_SHADES)],
            edgecolor=INK, linewidth=0.7, hatch=_HATCHES[lane % len(_HATCHES)] if lanes > 1 else "",
        )  # fmt: skip
        if right - left > _LEAST_WIDTH * (end - begin):
            middle = 500.0 * (left + right) - 1000.0 * begin
            axes.text(
                middle, lane, int(batch_rows[index]), ha="center", va="center", fontsize=6.5, color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8 if lanes > 1 else 0.0},
            )  # fmt: skip
    axes.set_yticks(range(lanes), [f"worker {lane}" for lane in range(lanes)], fontsize=7)
    axes.set_ylim(-0.55, lanes - 0.45)
    axes.grid(False, axis="y")


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
