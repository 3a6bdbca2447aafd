"""What `weir solve` shows: a bank as a table by rate, a solution of one rate as a table by state; both as documents."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from weir.commands.output import print_table
from weir.policy.cost.profile import Floats
from weir.policy.solve.bank import Bank, Solution
from weir.simulation.banks import Beside

_ROWS_SHOWN = 24


def about_bank(bank: Bank, rules: Sequence[Beside]) -> dict[str, Any]:
    """Return what a bank is predicted to do, and `rules` beside it, as plain values."""
    columns = {
        "rate": bank.rates, "limit": bank.limits(), "response_time_ms": bank.response_time_ms, "p99_ms": bank.p99_ms,
        "power_w": bank.power_w, "cost": costs(bank), "second_share": bank.shares, "max_waiting": bank.max_waiting,
    }  # fmt: skip
    rows = [
        dict(zip(columns, row, strict=True)) for row in zip(*(each.tolist() for each in columns.values()), strict=True)
    ]
    for row, rule in zip(rows, rules, strict=False):
        row |= {"greedy_cost": rule.greedy.cost, "best_limit": rule.best_limit, "best_limit_cost": rule.best.cost}
    return {
        "capacity": bank.capacity,
        "workers": bank.workers,
        "objective": str(bank.objective) if bank.objective else None,
        "prices": {
            "latency_weight": bank.prices.latency_weight, "energy_weight": bank.prices.energy_weight,
            "reference_rate": bank.prices.reference_rate,
        },
        "rates": rows,
    }  # fmt: skip


def costs(bank: Bank) -> Floats:
    """Return the predicted cost at each rate: latency weight (there) x response time + energy weight x power."""
    weights = np.array([bank.prices.latency_weight_at(rate) for rate in bank.rates.tolist()])
    return np.asarray(weights * bank.response_time_ms + bank.prices.energy_weight * bank.power_w, dtype=np.float64)


def show_bank(bank: Bank, rules: Sequence[Beside]) -> None:
    """Print a line for each of some rates."""
    table = Table(box=None, pad_edge=False)
    columns = ["rows/s", "load", "limit", "mean ms", "p99 ms", "W", "cost"]
    columns += ["greedy", "best limit"] if rules else []
    bounded, mixed = bool(bank.max_waiting.any()), bool(bank.shares.any())
    columns += ["mixed"] * mixed + ["most waiting"] * bounded
    for column in columns:
        table.add_column(column, justify="right")
    totals, limits = costs(bank), bank.limits()
    for i in _few(len(bank.rates)):
        rate = float(bank.rates[i])
        cells = [f"{rate:,.4g}", f"{rate / bank.capacity:.3f}", str(limits[i])]
        cells += [
            f"{bank.response_time_ms[i]:.4g}",
            f"{bank.p99_ms[i]:.4g}",
            f"{bank.power_w[i]:.4g}",
            f"{totals[i]:.5g}",
        ]
        cells += list(_compared(float(totals[i]), rules[i])) if rules else []
        cells += [f"{bank.shares[i]:.0%}"] * mixed + [str(bank.max_waiting[i])] * bounded
        table.add_row(*cells)
    console = Console(highlight=False)
    console.print(_heading(bank), markup=False, soft_wrap=True)
    print_table(console, table)
    if rules:
        console.print(
            "greedy, best limit: what these rules cost more; the limit is the best one for that very rate",
            markup=False, soft_wrap=True,
        )  # fmt: skip


def _heading(bank: Bank) -> str:
    workers = "one worker" if bank.workers == 1 else f"{bank.workers} workers"
    text = f"{workers}, up to {bank.capacity:,.4g} rows/s; batches of up to {bank.profile.max_batch_size}"
    if bank.objective is not None:
        return f"{text}; {bank.objective} with the least energy"
    prices = bank.prices
    text += f"; cost = {prices.latency_weight:g} x ms + {prices.energy_weight:g} x W"
    if prices.reference_rate is not None:
        text += f" at {prices.reference_rate:g} rows/s"
    if bank.profile.energy_source == "time":
        text += "; no energy was measured: 1 W is a busy worker"
    return text


def _compared(cost: float, rule: Beside) -> Iterator[str]:
    for other, name in ((rule.greedy.cost, ""), (rule.best.cost, f" ({rule.best_limit})")):
        more = round(100.0 * (other / cost - 1.0), 2) + 0.0 if np.isfinite(other) else np.inf  # + 0.0: no -0.00
        yield f"{more:+.2f} %{name}" if np.isfinite(more) else "unstable"


def _few(count: int) -> list[int]:
    """Return at most so many indices as are shown, evenly, both ends among them."""
    return sorted({round(place * (count - 1) / (_ROWS_SHOWN - 1)) for place in range(_ROWS_SHOWN)})


def about_solution(solution: Solution) -> dict[str, Any]:
    """Return a solution as plain values."""
    found = solution.performance
    return {
        "rate": solution.rate, "limit": solution.limit, "table": solution.table.tolist(),
        "values": solution.values.tolist(), "cost": solution.cost, "error_bound": solution.error_bound,
        "tail_share": 0.0, "s_max": solution.s_max, "overflow_cost": 0.0,  # nothing is truncated
        "method": "policy-iteration", "iterations": solution.iterations, "seconds": solution.seconds,
        "response_time_ms": found.response_time_ms, "power_w": found.power_w, "busy_share": found.busy_share,
        "batch_size": found.batch_size,
    }  # fmt: skip


def show_solution(solution: Solution, values: bool) -> None:
    """Print the table, run by run of states, and how it was found."""
    table = Table("waiting", "dispatch", box=None, pad_edge=False)
    if values:
        table.add_column("relative value", justify="right")
    for first, last, action in _runs(solution.table.tolist(), split=values):
        states = f"{first} or more" if last is None else str(first) if first == last else f"{first} - {last}"
        cells = [states, "wait" if action == "0" else action]
        table.add_row(*cells, *([f"{solution.values[first]:.6g}"] if values and first < len(solution.values) else []))
    console, found = Console(highlight=False), solution.performance
    print_table(console, table)
    for line in (
        f"control limit {solution.limit}; cost {solution.cost:.6f}, at most {solution.error_bound:.1e} above the optimum",
        f"mean response time {found.response_time_ms:.4g} ms, power {found.power_w:.4g} W, busy {found.busy_share:.1%}, "
        f"{found.batch_size:.3g} rows a batch",
        f"policy-iteration: {solution.iterations} steps in {1000.0 * (solution.seconds or 0.0):.1f} ms; s_max {solution.s_max}",
    ):  # fmt: skip
        console.print(line, markup=False, soft_wrap=True)


def _runs(table: list[int], *, split: bool) -> Iterator[tuple[int, int | None, str]]:
    """Yield (first state, last, action): states that wait, that dispatch all there is, or the same number, as one unless
    `split`. No last: the last entry of a table holds beyond it."""
    first = 0
    for state in range(1, len(table)):
        same = table[state] == table[first]
        whole = table[state] == state and table[first] == first and table[first] > 0
        if split or not (same or (whole and state - first <= table[state - 1] - table[first] + 1)):
            yield first, state - 1, _said(table, first, state - 1)
            first = state
    yield first, None, _said(table, first, first)


def _said(table: list[int], first: int, last: int) -> str:
    return "all" if last > first and table[first] == first and table[last] == last else str(table[first])
