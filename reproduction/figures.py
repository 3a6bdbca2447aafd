"""Fig. 2 to 8 of the paper recomputed, and two of our own: a timeline, and the model against simulation."""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reproduction.findings import WORK_CONSERVING, Findings
from reproduction.frontier import Corner
from reproduction.plots import (
    Curve,
    Panel,
    Point,
    PolicyMap,
    Timeline,
    draw_panels,
    draw_policy_maps,
    draw_predictions,
    draw_timelines,
)
from reproduction.published import LOAD, MAP_WEIGHTS, PRICES, PROFILE, STATIC_SIZES, TABLE
from weir.policy.decision import Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import solve_bank
from weir.simulation.simulator import run, simulate

_MAP_LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_SHOWN_LOADS = (0.1, 0.3, 0.7, 0.9)
_TEXTS = {WORK_CONSERVING: "greedy", **{f"static {size}": f"full:{size}" for size in STATIC_SIZES}}
_SOLVED = "solved"
_MOST_ABOVE = 60.0  # percent above the optimum that Fig. 5 shows
_SIMULATED_LOADS = (0.1, 0.3, 0.5, 0.7, 0.8)
_WINDOW = (0.2, 0.27)  # seconds of the timeline
REQUESTS = 60_000  # of each simulation


class Picture(NamedTuple):
    """A figure: the name of its file, its caption, and the function that draws it."""

    name: str
    caption: str
    draw: Callable[[Findings, Path], None]


def _lines(findings: Findings, path: Path) -> None:
    sizes = PROFILE.sizes
    draw_panels(
        path,
        [
            Panel("Fig. 2", [Curve("0.3051·b + 1.052", sizes, PROFILE.service_time_ms)]),
            Panel("Fig. 3", [Curve("19.90·b + 19.60", sizes, PROFILE.energy_mj)]),
        ],
        x="batch size (rows)", y=["processing time (ms)", "energy (mJ)"], log_x=True,
    )  # fmt: skip


def _maps(findings: Findings, path: Path) -> None:
    maps = [
        PolicyMap(
            f"({letter}) w1 = {latency:g}, w2 = {energy:g}",
            _MAP_LOADS,
            [findings.solved(load, latency, energy).actions for load in _MAP_LOADS],
        )
        for letter, (latency, energy) in zip("abcd", MAP_WEIGHTS, strict=True)
    ]
    draw_policy_maps(path, maps)


def _costs(findings: Findings, path: Path) -> None:
    weights, costs, ratios = findings.weights, [], []
    for load in _SHOWN_LOADS:
        best = np.array([findings.optimum(load, weight) for weight in weights])
        curves, above = [Curve(_SOLVED, weights, best)], [Curve(_SOLVED, weights, np.zeros(len(best)))]
        for name in findings.tables:
            cost = np.array([findings.cost(load, name, weight) for weight in weights])
            more = 100.0 * (cost / best - 1.0)
            curves.append(Curve(name, weights, cost))
            above.append(Curve(name, weights, np.where(more <= _MOST_ABOVE, more, inf)))
        costs.append(Panel(f"ρ = {load:g}", curves))
        ratios.append(Panel(f"ρ = {load:g}", above))
    labels = ["cost per unit of time"] * len(costs) + ["above the optimum (%)"] * len(ratios)
    draw_panels(path, [*costs, *ratios], x="w2 (per W), w1 = 1", y=labels, columns=len(costs))


def _trade_off(findings: Findings, path: Path, value: Callable[[float, float], float], y: str) -> None:
    panels = []
    for load in _SHOWN_LOADS:
        found: list[Corner] = findings.frontier(load)
        curve = Curve(
            _SOLVED, [each.response_time_ms for each in found], [value(load, each.power_w) for each in found], 100
        )
        others = {name: findings.benchmark(load, name) for name in findings.tables}
        points = {
            name: (each.response_time_ms if each.stable else nan, value(load, each.power_w))
            for name, each in others.items()
        }
        panels.append(Panel(f"ρ = {load:g}", [curve], points))
    draw_panels(path, panels, x="mean response time (ms)", y=y, log_x=True)


def _power(findings: Findings, path: Path) -> None:
    _trade_off(findings, path, lambda load, power: power, "mean power (W)")


def _efficiency(findings: Findings, path: Path) -> None:
    _trade_off(findings, path, lambda load, power: load * PROFILE.max_rate / power, "energy efficiency (rows per J)")


def _accuracy(findings: Findings, path: Path) -> None:
    costs, deltas = [], []
    for column in TABLE:
        sweeps = findings.accuracy[column.overflow_cost]
        sizes, name = [each.s_max for each in sweeps], f"c_o = {column.overflow_cost:g}"
        # Far above and below, the curves would leave nothing to see of the rest.
        costs.append(
            Curve(name, sizes, [each.cost if each.cost < 1.5 * findings.exact.cost else inf for each in sweeps])
        )
        deltas.append(Curve(name, sizes, [each.delta for each in sweeps]))
    draw_panels(
        path, [Panel("average cost", costs), Panel("part of it paid in S_o", deltas)], x="s_max (rows)",
        y=["g", "Δ"], log_y=[False, True],
    )  # fmt: skip


def _timeline(findings: Findings, path: Path) -> None:
    rate = 0.7 * PROFILE.max_rate
    times = np.cumsum(np.random.default_rng(7).exponential(1.0 / rate, 2_000))
    texts = {
        "work-conserving": "greedy",
        f"control limit {(limit := findings.solved(0.7, *MAP_WEIGHTS[2]).limit)}": f"control-limit:limit={limit}",
    }
    shown = {}
    for name, text in texts.items():
        found = run(PROFILE, text, times)
        shown[name] = Timeline(
            found.arrival, found.batches.start, found.batches.end, found.batches.rows, found.batches.worker
        )
    draw_timelines(path, shown, begin=_WINDOW[0], end=_WINDOW[1])


def _simulated(findings: Findings, path: Path) -> None:
    draw_predictions(path, simulated_points(findings))


def simulated_points(findings: Findings) -> dict[str, list[Point]]:
    """Return, for each policy, the exact mean response times beside simulated ones, where it is stable."""
    points: dict[str, list[Point]] = {_SOLVED: [], **{name: [] for name in _TEXTS}}
    for load in _SIMULATED_LOADS:
        bank = solve_bank(PROFILE, PRICES, rates=[load * PROFILE.max_rate])
        policies: dict[str, str | Policy] = {_SOLVED: SolvedPolicy(bank)}
        policies |= {name: text for name, text in _TEXTS.items() if findings.benchmark(load, name).stable}
        seen = simulate(PROFILE, policies, f"poisson:{load:g}", requests=REQUESTS, prices=PRICES).outcomes
        for name in policies:
            exact = findings.solved(load, 1.0, 1.0).performance if name == _SOLVED else findings.benchmark(load, name)
            points[name].append(Point(exact.response_time_ms, *seen[name].response_time_ms, f"{load:g}"))
    return points


PICTURES = (
    Picture("fig2-3", "Fig. 2 and 3: time and energy of a batch on the P4.", _lines),
    Picture("fig4", "Fig. 4: the optimal policies. Hatched: wait; the number is the size of the batch.", _maps),
    Picture("fig5", "Fig. 5: cost by w2, at w1 = 1, and how far it is above the optimum (up to 60 %). Batches of 8 are unstable at ρ = 0.9.", _costs),
    Picture("fig6", "Fig. 6: response time against power. Markers on the line: solved policies; single markers: the others.", _power),
    Picture("fig7", "Fig. 7: response time against energy efficiency.", _efficiency),
    Picture("fig8", f"Fig. 8: average cost, and the part of it paid in S_o, by s_max (ρ = {LOAD:g}, w1 = w2 = 1), after at most 10000 sweeps. Costs above 1.5 g* are left out.", _accuracy),
    Picture("timeline", "Ours: the same arrivals (ρ = 0.7) under two policies. Bars are batches, with their sizes; ticks are arrivals.", _timeline),
    Picture("simulated", f"Ours: the model's mean response time against the simulated batcher, {REQUESTS:,} requests each, the solved policy for w1 = w2 = 1, with 95 % intervals; the labels are loads.", _simulated),
)  # fmt: skip
