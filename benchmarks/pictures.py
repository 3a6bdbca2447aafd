"""The picture of docs/benchmarks.md."""

from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

OURS, THEIRS, INK = "#1f6f8b", "#c9ced6", "#30363d"


class Bars(NamedTuple):
    """One panel: ours above theirs."""

    title: str
    peer: str
    ours: str  # keys of the values
    theirs: str
    times: str


PANELS = (
    Bars("HTTP, 64 connections", "mosec", "square: Weir 64", "square: mosec 64", "square: times mosec 64"),
    Bars("HTTP, 256 connections", "mosec", "square: Weir 256", "square: mosec 256", "square: times mosec 256"),
    Bars("HTTP, bodies of 600 KB", "mosec", "large-bodies: Weir", "large-bodies: mosec", "large-bodies: times mosec"),
    Bars(
        "calls in process",
        "mpservice",
        "in-process: Weir uvloop",
        "in-process: mpservice uvloop",
        "in-process: times mpservice uvloop",
    ),
)


def draw(values: dict[str, float], path: Path) -> bool:
    """Draw the panels that have been measured; tell whether there was any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [panel for panel in PANELS if {panel.ours, panel.theirs, panel.times} <= set(values)]
    if not panels:
        return False
    rows = (len(panels) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(8, 0.5 + 1.5 * rows), squeeze=False)
    for axis, panel in zip_longest(axes.flat, panels):
        if panel is None:
            axis.set_axis_off()
        else:
            _panel(axis, panel, values)
    figure.suptitle("requests per second, in the same run", x=0.01, ha="left", fontsize=10, color=INK)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return True


def _panel(axis: Any, panel: Bars, values: dict[str, float]) -> None:
    ours, theirs = values[panel.ours], values[panel.theirs]
    axis.barh([panel.peer, "Weir"], [theirs, ours], color=[THEIRS, OURS], height=0.62)
    axis.set_title(f"{panel.title}: {values[panel.times]:.1f} times", fontsize=9, color=INK, loc="left")
    axis.set_xlim(0, 1.3 * max(ours, theirs))
    for place, value in enumerate((theirs, ours)):
        axis.text(value, place, f" {value:,.0f}", va="center", fontsize=8, color=INK)
    axis.tick_params(left=False, bottom=False, labelbottom=False, labelsize=9, labelcolor=INK)
    for side in axis.spines.values():
        side.set_visible(False)
