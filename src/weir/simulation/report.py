"""A comparison of policies as a table in the terminal and as a picture; a bank of tables as a picture; and progress."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from weir.figures import COLOURS, INK, figure, plain_log, styles
from weir.policy.cost.objective import LatencySLO
from weir.policy.solve.bank import Bank
from weir.simulation.results import Comparison, PolicyOutcome
from weir.simulation.statistics import Estimate

SAME = 1e-12  # an interval narrower than this share of its value is not shown
POINTS = 400  # of a curve


def heading(compared: Comparison) -> str:
    """Return one line that says what was simulated."""
    workers = f"{compared.workers} worker{'s' if compared.workers > 1 else ''}"
    prices = compared.prices
    weights = f"cost = {prices.latency_weight:g}/ms, {prices.energy_weight:g}/W"
    if prices.reference_rate is not None:
        weights += f" at {prices.reference_rate:g} rows/s"
    if compared.objective is not None:
        weights = str(compared.objective)
        weights += " for the most requests" if compared.objective.counts_refusals else " with the least energy"
    requests = max((each.requests for each in compared.outcomes.values()), default=0)
    return (
        f"{compared.arrivals}: {compared.rate:,.4g} rows/s, load {compared.load:.3g} on {workers}; "
        f"{weights}; {requests:,} requests counted, seed {compared.seed}"
    )


def table(compared: Comparison) -> Table:
    """Return the outcomes as a table, the best first.

    ± is half the 95 % interval; in the last column, that of the difference from the best policy on the same arrivals.
    """
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("policy", overflow="fold", min_width=11)
    objective = compared.objective
    lossy = any(each.refused_share if objective else each.lost_share for each in compared.outcomes.values())
    with_bulk = _has_bulk(compared)
    columns = ["response ms", "p99 ms", "power W", "batch", "busy", *(["lost"] if lossy else [])]
    columns += ["bulk rows/s", "of idle"] if with_bulk else []
    if objective is None:
        columns += ["cost", "above best"]
    else:
        columns += ["late %", "in time %", "% beside best" if objective.counts_refusals else "W above best"]
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    best, outcomes = compared.best, compared.outcomes
    order = sorted(
        outcomes, key=lambda name: (not compared.is_eligible(name), not outcomes[name].stable, compared.value(name))
    )
    for name in order:
        shown.add_row(*_row(compared, outcomes[name], best, lossy=lossy))
    return shown


def _has_bulk(compared: Comparison) -> bool:
    return any(isfinite(each.bulk_rate) for each in compared.outcomes.values())


def _row(compared: Comparison, outcome: PolicyOutcome, best: str | None, *, lossy: bool) -> list[str | Text]:
    objective = compared.objective
    batches = [short(outcome.power_w.value), f"{outcome.batch_size:.1f}", f"{outcome.busy_share:.0%}"]
    if not outcome.stable:
        blank = [""] * (lossy + 2 * _has_bulk(compared) + (2 if objective is None else 3))
        return [outcome.policy, Text("unstable", style="red"), "", *batches, *blank]
    lost = outcome.lost_share if objective is None else outcome.refused_share
    bulk = [f"{outcome.bulk_rate:.0f}", f"{outcome.bulk_share:.0%}"] if _has_bulk(compared) else []
    judged = [outcome.cost] if objective is None else map(_percent, (outcome.late_share, outcome.in_time_share))
    return [
        outcome.policy,
        _text(outcome.response_time_ms),
        short(outcome.p99_ms.value),
        *batches,
        *([f"{lost:.2%}"] if lossy else []),
        *bulk,
        *map(_text, judged),
        _above(compared, outcome, best),
    ]


def _above(compared: Comparison, outcome: PolicyOutcome, best: str | None) -> Text:
    if outcome.policy == best:
        return Text("best", style="bold green")
    if compared.objective is not None and not outcome.keeps(compared.objective):
        return Text("not kept", style="red")
    if best is None or not compared.is_eligible(outcome.policy):
        return Text("loses more", style="red")
    difference = compared.difference(outcome.policy, best, compared.measure)
    if compared.measure == "in_time_share":
        return Text(_text(_percent(difference)))
    return Text(f"+{_text(difference)}")


def _percent(share: Estimate) -> Estimate:
    return Estimate(*(100.0 * value for value in share))


def _text(estimate: Estimate) -> str:
    half = estimate.half_width
    if not isfinite(half) or half <= SAME * abs(estimate.value):
        return short(estimate.value)
    digits = max(0, 1 - int(np.floor(np.log10(half))))
    return f"{estimate.value:.{digits}f} ± {half:.{digits}f}"


def short(value: float) -> str:
    return f"{value:.4g}" if isfinite(value) else "–"


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
        drawing.suptitle(heading(compared) + note, fontsize=8)


def _tails(axes: Any, outcomes: Sequence[PolicyOutcome], objective: LatencySLO | None) -> None:
    for outcome, style in zip(outcomes, styles(), strict=False):
        shares = np.geomspace(1.0, max(1.0 / outcome.requests, 1e-5), POINTS)
        times = [outcome.quantile_ms(1.0 - share) for share in shares.tolist()]
        axes.semilogy(times, shares, label=outcome.policy, markevery=POINTS // 8, **style)
    if objective is not None:
        axes.axvline(1000.0 * objective.deadline, color=INK, linewidth=0.8)
        axes.axhline(objective.late_share, color=INK, linewidth=0.8)
        axes.annotate(
            str(objective),
            (1000.0 * objective.deadline, objective.late_share),
            fontsize=7,
            color=INK,
            xytext=(4, 4),
            textcoords="offset points",
        )
    axes.set_xlabel("response time (ms)")
    axes.set_ylabel("share of requests that take longer")
    axes.legend(fontsize=7)


def _costs(axes: Any, outcomes: Sequence[PolicyOutcome], objective: LatencySLO | None) -> None:
    for place, (outcome, style) in enumerate(zip(outcomes, styles(), strict=False)):
        power, wait = outcome.power_w, outcome.response_time_ms
        axes.errorbar(
            wait.value,
            power.value,
            xerr=wait.half_width,
            yerr=power.half_width,
            linestyle="none",
            color=style["color"],
            marker=style["marker"],
            markersize=6,
            capsize=2,
        )
        says = f"cost {short(outcome.cost.value)}" if objective is None else f"late {outcome.late_share.value:.2%}"
        axes.annotate(
            f"{outcome.policy}\n{says}",
            (wait.value, power.value),
            fontsize=6,
            color=INK,
            xytext=(5, 3 if place % 2 else -12),
            textcoords="offset points",
        )
    axes.margins(x=0.3, y=0.15)
    axes.set_xlabel("mean response time (ms)")
    axes.set_ylabel("mean power (W)")


def _sizes(axes: Any, outcomes: Sequence[PolicyOutcome]) -> None:
    for outcome, style in zip(outcomes, styles(), strict=False):
        sizes = sorted(outcome.batch_sizes)
        axes.plot(sizes, [outcome.batch_sizes[size] for size in sizes], label=outcome.policy, **style)
    axes.set_xlabel("batch size (rows)")
    axes.set_ylabel("share of batches")


class Compared(NamedTuple):
    """What another policy is predicted to do at each rate of a bank, shape (R,); not finite where it is unstable."""

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
        for place in (limits, response, power):
            plain_log(place, "x")
        plain_log(response, "y")
        response.legend(fontsize=7)
        power.legend(fontsize=7)


# Progress of a simulation in the terminal.


class Bars(Progress):
    """A progress bar per policy, on stderr if that is a terminal; an argument `progress` of `simulate`."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        super().__init__(console=console, transient=True, disable=not console.is_terminal)
        self._ids: dict[str, TaskID] = {}

    def __call__(self, policy: str, done: int, total: int) -> None:
        """Show that `done` of `total` requests are done for `policy`."""
        task = self._ids.get(policy)
        if task is None:
            task = self._ids[policy] = self.add_task(policy, total=total)
        self.update(task, completed=done)
