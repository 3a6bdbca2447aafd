"""Batch timelines: when requests came, how many waited, and which batch ran where and when."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from weir.figures import COLOURS, GREY, INK, figure

_LEAST_WIDTH = 0.012  # of the window: narrower bars carry no number
_HATCHES = ("", "///", "...", "xxx")
_SHADES = ("#9db8cc", "#e8c2ae", "#b5d6c8", "#d3c2de")


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
            _batches(bars, each, begin, end, lanes[index])
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


def _batches(axes: Any, shown: Timeline, begin: float, end: float, lanes: int) -> None:
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
