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
    if "bursts" in stored:
        with figure(FOLDER / "bursts", size=(6.4, 3.8)) as (_, axes):
            _runs(axes[0, 0], stored["bursts"]["values"])


def _runs(axis: Any, values: dict[str, list[float]]) -> None:
    """A dot for each run, on a scale that is linear up to a per cent; and the line that none may pass."""
    for place, runs in enumerate(values.values()):
        style = next(styles()) | {"linestyle": "", "marker": "o", "markersize": 2.5}
        axis.plot(runs, [place + 0.3 * (index / len(runs) - 0.5) for index in range(len(runs))], **style)
    axis.axvline(0.5, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("symlog", linthresh=1.0)
    axis.set_xticks([-30, -10, -3, -1, 0, 0.5, 1], ["-30", "-10", "-3", "-1", "0", "0.5", "1"])
    axis.set_yticks(range(len(values)), list(values))
    axis.invert_yaxis()
    axis.set_xlabel("cost beyond greedy's, %")


def _lines(axis: Any, values: dict[str, list[float]], names: dict[str, str], prefix: str) -> None:
    for (key, label), style in zip(names.items(), styles(), strict=False):
        axis.plot(values["load"], values[prefix + key], label=label, **style)
    axis.set_xlabel("load")
    axis.set_ylim(bottom=0.0)
    axis.legend()
