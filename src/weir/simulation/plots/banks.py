"""A picture of a bank: the control limit of each rate, and what it is predicted to do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import ArrayLike

from weir.figures import COLOURS, figure, styles
from weir.policy.solve.bank import Bank
from weir.simulation.plots.scales import plain_log


class Compared(NamedTuple):
    """What another policy is predicted to do at each rate of a bank; not finite where it is unstable."""

    response_time_ms: ArrayLike
    power_w: ArrayLike


def draw_bank(path: Path, bank: Bank, others: Mapping[str, Compared] | None = None) -> None:
    """Draw the limits, the predicted response time and the power of `bank` over the rate, the last two beside `others`.
    Writes `path` as PNG and SVG."""
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
