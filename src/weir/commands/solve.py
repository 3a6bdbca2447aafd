"""`weir solve`: solves for the policy that a server runs, from a profile. A policy file is printed as a table by rate, and
the solution for one rate as a table by state."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from weir.commands.options import (
    STDOUT,
    WEIGHTS,
    WeightSettings,
    check_results,
    flag,
    print_table,
    progress_bar,
    values_of,
    with_declared,
    write_atomically,
    write_json,
)
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.policy.cost import Floats, Profile
    from weir.policy.solve.bank import Bank, Solution
    from weir.simulation.banks import Beside


_SERVED, _ONE, _RESULT = "Server", "One rate only", "Result"


@with_declared(*WEIGHTS)
def solve(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Profile written by `weir profile`.")],
    output: Annotated[Path | None, flag("File to write (default: NAME.policy.npz).", _RESULT, "--output", "-o")] = None,
    workers: Annotated[int, flag("Workers that share the queue.", _SERVED)] = 1,
    max_batch_size: Annotated[int | None, flag("Largest batch in rows (default: the profile's).", _SERVED)] = None,
    seed: Annotated[int, flag("Seed of the simulations for several workers or a latency objective.", _SERVED)] = 1,
    rate: Annotated[
        float | None,
        flag("Solve for this rate only, in rows per second, and print the table; writes no policy file.", _ONE),
    ] = None,
    json: Annotated[Path | None, flag("File to write the result to as JSON; - prints it.", _RESULT)] = None,
    **options: list[Any] | None,
) -> None:
    """Solve for the batching policy with the least cost, and write the policy file for `weir serve --policy`.

    The cost is latency weight x mean response time (ms) + energy weight x mean power (W). The file has one table for each
    of many arrival rates; the server estimates the rate and uses its table.
    """
    from weir.workers.cpus import compute_in_one_thread

    compute_in_one_thread()
    from weir.policy.cost import read_profile

    weights = WeightSettings(**values_of(WEIGHTS, options))
    measured = read_profile(profile)
    measured = measured if max_batch_size is None else measured.up_to(max_batch_size)
    check_results(json)
    if rate is not None:
        _refuse_with_rate(output, workers, weights.latency_objective)
        _solve_one(measured, rate, weights.prices, json)
        return
    path = output or profile.with_name(profile.name.removesuffix(".toml").removesuffix(".profile") + ".policy.npz")
    check_results(path)
    _solve_bank(measured, {**vars(weights), "workers": workers, "seed": seed}, path, json)


def _refuse_with_rate(output: Path | None, workers: int, objective: str | None) -> None:
    given = {"--output": output, "--latency-objective": objective, "--workers": workers > 1 or None}
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise SettingsError(
            f"{', '.join(wrong)}: cannot be given with --rate, which solves for one worker and writes no policy"
        )


def _solve_one(profile: "Profile", rate: float, prices: Any, json: Path | None) -> None:
    from time import perf_counter

    from weir.policy.solve.bank import solve as solve_rate

    solution: Solution = solve_rate(profile, rate, prices, clock=perf_counter)
    if json != STDOUT:
        show_solution(solution)
    write_json(about_solution(solution), json)


def _solve_bank(profile: "Profile", arguments: dict[str, Any], path: Path, json: Path | None) -> None:
    from time import perf_counter

    from weir.simulation.banks import beside
    from weir.simulation.banks import solve as solve_rates

    began = perf_counter()
    with progress_bar("solving rates") as progress:
        bank = solve_rates(profile, progress=progress, **arguments)
    seconds = perf_counter() - began
    write_atomically(path, bank.to_bytes())
    # The rules can be evaluated exactly for one worker only, and they do not keep a latency objective.
    rules = beside(bank) if bank.workers == 1 and bank.objective is None else []
    if json != STDOUT:
        show_bank(bank, rules)
        typer.echo(f"solved in {seconds:.2f} s; written: {path}")
    write_json(about_bank(bank, rules), json)


_LOADS_SHOWN = (0.1, 0.3, 0.5, 0.7, 0.9)


def about_bank(bank: "Bank", rules: "Sequence[Beside]") -> dict[str, Any]:
    """Return the predictions for a bank by rate, and those for simple `rules` at the same rates, as a JSON-able dict."""
    columns = {
        "rate": bank.rates,
        "limit": bank.limits(),
        "response_time_ms": bank.response_time_ms,
        "p99_ms": bank.p99_ms,
        "power_w": bank.power_w,
        "cost": costs(bank),
        "max_waiting": bank.max_waiting,
    }
    rows = [
        dict(zip(columns, row, strict=True)) for row in zip(*(each.tolist() for each in columns.values()), strict=True)
    ]
    for row in rows:  # a percentile is infinite where an objective is not kept
        row["p99_ms"] = row["p99_ms"] if row["p99_ms"] < math.inf else None
    for row, rule in zip(rows, rules, strict=False):
        row |= {"greedy_cost": rule.greedy.cost, "best_limit": rule.best_limit, "best_limit_cost": rule.best.cost}
    return {
        "capacity": bank.capacity,
        "workers": bank.workers,
        "objective": str(bank.objective) if bank.objective else None,
        "prices": vars(bank.prices),
        "rates": rows,
    }


def costs(bank: "Bank") -> "Floats":
    """Return the predicted cost at each rate: latency weight at that rate x response time (ms) + energy weight x power (W)."""
    import numpy as np

    weights = np.array([bank.prices.latency_weight_at(rate) for rate in bank.rates.tolist()])
    return np.asarray(weights * bank.response_time_ms + bank.prices.energy_weight * bank.power_w, dtype=np.float64)


def show_bank(bank: "Bank", rules: "Sequence[Beside]") -> None:
    """Print a table with a row for the rate nearest to each of a few loads."""
    table = Table(box=None, pad_edge=False)
    columns = ["rows/s", "load", "limit", "mean ms", "p99 ms", "W", "cost"]
    columns += ["greedy", "best limit"] if rules else []
    bounded = bool(bank.max_waiting.any())
    columns += ["most waiting"] * bounded
    for column in columns:
        table.add_column(column, justify="right")
    totals, limits = costs(bank), bank.limits()
    loads = bank.rates / bank.capacity
    for i in sorted({int(abs(loads - load).argmin()) for load in _LOADS_SHOWN}):
        rate = float(bank.rates[i])
        cells = [f"{rate:,.4g}", f"{rate / bank.capacity:.3f}", str(limits[i])]
        cells += [
            f"{bank.response_time_ms[i]:.4g}",
            f"{bank.p99_ms[i]:.4g}",
            f"{bank.power_w[i]:.4g}",
            f"{totals[i]:.5g}",
        ]
        cells += list(_compared(float(totals[i]), rules[i])) if rules else []
        cells += [str(bank.max_waiting[i])] * bounded
        table.add_row(*cells)
    console = Console(highlight=False)
    console.print(_heading(bank), markup=False, soft_wrap=True)
    print_table(console, table)
    console.print(f"{len(bank.rates)} rates in all; --json PATH writes them", markup=False)
    if rules:
        console.print(
            "greedy, best limit: how much more these rules cost; the limit is the best one for that rate",
            markup=False,
            soft_wrap=True,
        )


def _heading(bank: "Bank") -> str:
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


def _compared(cost: float, rule: "Beside") -> Iterator[str]:
    for other, name in ((rule.greedy.cost, ""), (rule.best.cost, f" ({rule.best_limit})")):
        more = round(100.0 * (other / cost - 1.0), 2) + 0.0 if math.isfinite(other) else math.inf  # + 0.0: no -0.00
        yield f"{more:+.2f} %{name}" if math.isfinite(more) else "unstable"


def about_solution(solution: "Solution") -> dict[str, Any]:
    """Return a solution as a JSON-able dict."""
    found = solution.performance
    return {
        "rate": solution.rate, "limit": solution.limit, "table": solution.table.tolist(),
        "values": solution.values.tolist(), "cost": solution.cost, "error_bound": solution.error_bound,
        "s_max": solution.s_max, "method": "policy-iteration", "iterations": solution.iterations, "seconds": solution.seconds,
        "response_time_ms": found.response_time_ms, "power_w": found.power_w, "busy_share": found.busy_share,
        "batch_size": found.batch_size,
    }  # fmt: skip


def show_solution(solution: "Solution") -> None:
    """Print the table, with equal actions of adjacent states in one row, and how it was found."""
    table = Table("waiting", "dispatch", box=None, pad_edge=False)
    for first, last, action in _runs(solution.table.tolist()):
        states = f"{first} or more" if last is None else str(first) if first == last else f"{first} - {last}"
        table.add_row(states, "wait" if action == "0" else action)
    console, found = Console(highlight=False), solution.performance
    print_table(console, table)
    for line in (
        f"control limit {solution.limit}; cost {solution.cost:.6f}, at most {solution.error_bound:.1e} above the optimum",
        f"mean response time {found.response_time_ms:.4g} ms, power {found.power_w:.4g} W, busy {found.busy_share:.1%}, "
        f"{found.batch_size:.3g} rows a batch",
        f"policy-iteration: {solution.iterations} steps in {1000.0 * (solution.seconds or 0.0):.1f} ms; s_max {solution.s_max}",
    ):
        console.print(line, markup=False, soft_wrap=True)


def _runs(table: list[int]) -> Iterator[tuple[int, int | None, str]]:
    """Yield (first state, last state, action). Adjacent states that wait, dispatch all waiting rows or dispatch the same number
    are one entry. The last entry of the table also holds for all higher states: its last state is None."""
    first = 0
    for state in range(1, len(table)):
        same = table[state] == table[first]
        whole = table[state] == state and table[first] == first and table[first] > 0
        if not (same or (whole and state - first <= table[state - 1] - table[first] + 1)):
            yield first, state - 1, _action(table, first, state - 1)
            first = state
    yield first, None, _action(table, first, first)


def _action(table: list[int], first: int, last: int) -> str:
    return "all" if last > first and table[first] == first and table[last] == last else str(table[first])
