"""Policy maps: which batch a policy dispatches in each state, at each load (Fig. 4 of the paper)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weir.figures import GREY, INK, figure

_LIGHT_TEXT_FROM = 0.55  # of the largest action: darker cells need light numbers
_LIMIT_OF_COLUMNS = 2


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
            _panel(place, each, states)
        for place in list(axes.flat)[len(maps) :]:
            place.set_axis_off()


def _panel(axes: Any, shown: PolicyMap, states: int) -> None:
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
