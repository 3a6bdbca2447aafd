"""Draws a comparison of policies or of rules for the number of workers, and a bank of tables; each as PNG and SVG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from weir.figures import COLOURS, INK, figure, plain_log, short, styles
from weir.policy.cost.objective import LatencySLO
from weir.policy.solve.bank import Bank
from weir.simulation.results import Comparison, PolicyOutcome
from weir.simulation.scaling import ScalingComparison

POINTS = 400  # of a curve


def draw(compared: Comparison, path: Path) -> None:
    """Write a picture as PNG and SVG: shares of long waits, response time and power, and batch sizes, by policy.

    Raises SettingsError without matplotlib.
    """
    stable = [each for each in compared.outcomes.values() if each.stable]
    with figure(path, 1, 3, size=(12.0, 3.4)) as (drawing, axes):
        _tails(axes[0, 0], stable, compared.objective)
        _costs(axes[0, 1], stable, compared.objective)
        _sizes(axes[0, 2], stable)
        missing = [each.policy for each in compared.outcomes.values() if not each.stable]
        note = f"\nunstable, not drawn: {', '.join(missing)}" if missing else ""
        drawing.suptitle(compared.heading() + note, fontsize=8)


def _tails(axes: Any, outcomes: Sequence[PolicyOutcome], objective: LatencySLO | None) -> None:
    for outcome, style in zip(outcomes, styles(), strict=False):
        shares = np.geomspace(1.0, max(1.0 / outcome.requests, 1e-5), POINTS)
        times = [outcome.quantile_ms(1.0 - share) for share in shares.tolist()]
        axes.semilogy(times, shares, label=outcome.policy, markevery=POINTS // 8, **style)
    if objective is not None:
        axes.axvline(1000.0 * objective.deadline, color=INK, linewidth=0.8)
        axes.axhline(objective.late_share, color=INK, linewidth=0.8)
        _label(axes, str(objective), 1000.0 * objective.deadline, objective.late_share, (4, 4))
    axes.set_xlabel("response time (ms)")
    axes.set_ylabel("share of requests that take longer")
    axes.legend(fontsize=7)


def _costs(axes: Any, outcomes: Sequence[PolicyOutcome], objective: LatencySLO | None) -> None:
    for index, (outcome, style) in enumerate(zip(outcomes, styles(), strict=False)):
        power, wait = outcome.power_w, outcome.response_time_ms
        mark = {"linestyle": "none", "color": style["color"], "marker": style["marker"], "markersize": 6, "capsize": 2}
        axes.errorbar(wait.value, power.value, xerr=wait.half_width, yerr=power.half_width, **mark)
        says = f"cost {short(outcome.cost.value)}" if objective is None else f"late {outcome.late_share.value:.2%}"
        _label(axes, f"{outcome.policy}\n{says}", wait.value, power.value, (5, 3 if index % 2 else -12))
    axes.margins(x=0.3, y=0.15)
    axes.set_xlabel("mean response time (ms)")
    axes.set_ylabel("mean power (W)")


def _label(axes: Any, text: str, x: float, y: float, offset: tuple[float, float]) -> None:
    axes.annotate(text, (x, y), fontsize=6, color=INK, xytext=offset, textcoords="offset points")


def _sizes(axes: Any, outcomes: Sequence[PolicyOutcome]) -> None:
    for outcome, style in zip(outcomes, styles(), strict=False):
        sizes = sorted(outcome.batch_sizes)
        axes.plot(sizes, [outcome.batch_sizes[size] for size in sizes], label=outcome.policy, **style)
    axes.set_xlabel("batch size (rows)")
    axes.set_ylabel("share of batches")


class Compared(NamedTuple):
    """Says what another policy is predicted to do at each rate of a bank, shape (R,); not finite where it is unstable."""

    response_time_ms: ArrayLike
    power_w: ArrayLike


def draw_bank(path: Path, bank: Bank, others: Mapping[str, Compared] | None = None) -> None:
    """Draw the limits, the predicted response time and the power of `bank` by rate; the last two next to those of `others`.

    Writes `path` as PNG and SVG.
    """
    with figure(path, 1, 3) as (_, axes):
        limits, response, power = axes[0]
        limits.step(bank.rates, bank.limits(), where="mid", color=COLOURS[0], linewidth=1.4)
        limits.plot(bank.rates, bank.limits(), "o", color=COLOURS[0], markersize=3)
        limits.set(title="control limit", xlabel="rate (rows/s)", ylabel="rows waiting")
        limits.set_ylim(bottom=0)
        limits.yaxis.get_major_locator().set_params(integer=True)
        lines: dict[str, tuple[Any, Any]] = {"solved": (bank.response_time_ms, bank.power_w)}
        lines |= {name: (each.response_time_ms, each.power_w) for name, each in (others or {}).items()}
        for (name, (times, powers)), style in zip(lines.items(), styles(), strict=False):
            response.plot(bank.rates, times, label=f"{name}, mean", **style)
            power.plot(bank.rates, powers, label=name, **style)
            if name == "solved":
                response.plot(
                    bank.rates, bank.p99_ms, label="solved, p99", **{**style, "linestyle": ":", "marker": "x"}
                )
        response.set(title="predicted response time", xlabel="rate (rows/s)", ylabel="response time (ms)")
        power.set(title="predicted power", xlabel="rate (rows/s)", ylabel="power (W)")
        for each in axes[0]:
            plain_log(each, "x")
        plain_log(response, "y")
        response.legend(fontsize=7)
        power.legend(fontsize=7)


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
            _label(axes[0, 1], name, each.worker_hours, each.p99_ms / 1000.0, (5, 3))
        axes[0, 0].set_xlabel("minutes")
        axes[0, 0].set_ylabel("workers")
        axes[0, 0].legend(fontsize=6)
        axes[0, 1].set_xlabel("worker-hours")
        axes[0, 1].set_ylabel("p99 of the response time (s)")
        axes[0, 1].margins(x=0.3, y=0.2)
        drawing.suptitle(compared.heading(), fontsize=8)
