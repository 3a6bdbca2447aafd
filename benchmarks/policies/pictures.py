"""The pictures of docs/explanation/beyond-the-paper.md."""

from typing import Any

from benchmarks.policies.table import ROOT, stored_results
from weir.figures import figure, styles

FOLDER = ROOT / "docs" / "pictures"
PROMISE = {"exact": "best control limit", "delay": "best size and delay", "solved": "solved, guarded"}
CREW = {
    "split": "random splitting",
    "closed form": "limit by closed form",
    "limit": "best control limit",
    "solved": "solved",
}


def draw() -> None:
    """Draw what is stored."""
    stored = stored_results()
    if "promise" in stored:
        with figure(FOLDER / "latency-objective", size=(5.2, 3.4)) as (_, axes):
            _lines(axes[0, 0], stored["promise"]["values"], PROMISE, "")
            axes[0, 0].set_ylabel("power beyond the unavoidable, W")
    if "crew" in stored:
        with figure(FOLDER / "several-workers", 1, 2, size=(8.4, 3.4)) as (_, axes):
            for axis, workers in zip(axes[0], ("2", "4"), strict=True):
                _lines(axis, stored["crew"]["values"], CREW, f"{workers} ")
                axis.set_title(f"{workers} workers")
            axes[0, 0].set_ylabel("cost beyond the unavoidable")


def _lines(axis: Any, values: dict[str, list[float]], names: dict[str, str], prefix: str) -> None:
    for (key, label), style in zip(names.items(), styles(), strict=False):
        axis.plot(values["load"], values[prefix + key], label=label, **style)
    axis.set_xlabel("load")
    axis.set_ylim(bottom=0.0)
    axis.legend()
