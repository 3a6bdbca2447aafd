"""A comparison of rules for the number of workers as a table in the terminal and as a picture."""

from pathlib import Path

import numpy as np
from rich.table import Table

from weir.figures import INK, figure, styles
from weir.simulation.report import short
from weir.simulation.scaling import ScalingComparison


def scaling_heading(compared: ScalingComparison) -> str:
    """Return one line that says what was simulated."""
    late = "" if compared.deadline is None else f"; late after {compared.deadline:g} s"
    return (
        f"{compared.arrivals}: {compared.rate:,.4g} rows/s on {compared.allowed} workers, which start in {compared.start_up:g} s; "
        f"goal {compared.goal}{late}; policy {compared.policy}"
    )


def scaling_table(compared: ScalingComparison) -> Table:
    """Return the outcomes as a table, in the order of the rules."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("rule", overflow="fold", min_width=11)
    columns = ["worker-hours", "mean", "most", "busy", "starts", "response ms", "p50 ms", "p99 ms"]
    for column in [*columns, *(["late"] if compared.deadline is not None else [])]:
        shown.add_column(column, justify="right", no_wrap=True)
    for name, each in compared.outcomes.items():
        cells = [
            f"{each.worker_hours:.3g}",
            f"{each.mean_workers:.1f}",
            str(each.most_workers),
            f"{each.busy_share:.0%}",
            str(each.starts),
            *(short(value) for value in (each.response_time_ms, each.p50_ms, each.p99_ms)),
        ]
        shown.add_row(name, *cells, *([f"{each.late_share:.2%}"] if compared.deadline is not None else []))
    return shown


def draw_scaling(compared: ScalingComparison, path: Path) -> None:
    """Write a picture as PNG and SVG: the number of workers over time by rule, and the worker-hours and the 99th
    percentile of the response time.

    Raises SettingsError without matplotlib.
    """
    with figure(path, 1, 2, size=(11.0, 3.6)) as (drawing, axes):
        for (name, each), style in zip(compared.outcomes.items(), styles(), strict=False):
            instants, counts = zip(*each.counts, strict=True)
            line = {key: style[key] for key in ("color", "linestyle", "linewidth")}
            axes[0, 0].step(np.array(instants) / 60.0, counts, where="post", label=name, **line)
            axes[0, 1].plot(
                each.worker_hours, each.p99_ms / 1000.0, color=style["color"], marker=style["marker"], linestyle="none"
            )
            axes[0, 1].annotate(
                name,
                (each.worker_hours, each.p99_ms / 1000.0),
                fontsize=6,
                color=INK,
                xytext=(5, 3),
                textcoords="offset points",
            )
        axes[0, 0].set_xlabel("minutes")
        axes[0, 0].set_ylabel("workers")
        axes[0, 0].legend(fontsize=6)
        axes[0, 1].set_xlabel("worker-hours")
        axes[0, 1].set_ylabel("p99 of the response time (s)")
        axes[0, 1].margins(x=0.3, y=0.2)
        drawing.suptitle(scaling_heading(compared), fontsize=8)
