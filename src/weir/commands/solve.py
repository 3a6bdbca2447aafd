"""`weir solve`: from a profile to the policy that a server runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.policy.cost.profile import Profile
    from weir.policy.solve.bank import Bank, Solution
    from weir.simulation.banks import Beside

_PRICES, _SERVED, _ONE, _RESULT = "What it is worth", "What is served", "One rate only", "Result"

_METHOD = "policy-iteration"


def _option(help: str, panel: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


def solve(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Profile written by `weir profile`.")],
    output: Annotated[
        Path | None, _option("File to write (default: NAME.policy.npz).", _RESULT, "--output", "-o")
    ] = None,
    latency_weight: Annotated[float, _option("Cost of a millisecond of mean response time.", _PRICES)] = 1.0,
    energy_weight: Annotated[float, _option("Cost of a watt of mean power.", _PRICES)] = 1.0,
    reference_rate: Annotated[
        float | None, _option("Rows per second at which these hold; waiting costs the same at other rates.", _PRICES)
    ] = None,
    latency_objective: Annotated[
        str | None,
        _option(
            "Promise to keep with the least energy, such as p99=20ms; or in-time=20ms, the most answers in time. The weights then decide nothing.",
            _PRICES,
            metavar="pNN=DURATION",
        ),
    ] = None,
    workers: Annotated[int, _option("Workers that serve the one line.", _SERVED)] = 1,
    max_batch_size: Annotated[int | None, _option("Largest batch (default: the profile's).", _SERVED)] = None,
    seed: Annotated[int, _option("Of the simulations for several workers or a promise.", _SERVED)] = 1,
    rate: Annotated[
        float | None, _option("Solve for this rate, in rows per second, and show the table; writes no policy.", _ONE)
    ] = None,
    method: Annotated[str, _option("Only policy-iteration; the option goes with the next release.", _ONE)] = _METHOD,
    values: Annotated[bool, _option("Show the relative values too.", _ONE, "--values")] = False,
    json: Annotated[Path | None, _option("File that gets the result as JSON; - prints it instead.", _RESULT)] = None,
    figure: Annotated[Path | None, _option("File that gets a figure, as .png and .svg.", _RESULT)] = None,
) -> None:
    """Solve for the batching policy with the least cost, and write it to a file that `weir serve --policy` takes.

    The cost is latency weight x mean response time (ms) + energy weight x mean power (W). One table is solved for each of
    some rates; the server estimates the rate and looks its table up.
    """
    from weir.workers.launch import compute_in_one_thread

    compute_in_one_thread()
    from weir.commands.output import check_results
    from weir.policy.cost.objective import Prices
    from weir.simulation.simulator import read_profile

    measured = read_profile(profile)
    measured = measured if max_batch_size is None else measured.up_to(max_batch_size)
    check_results(json, figure=figure)
    if method != _METHOD:
        raise SettingsError(
            f"--method={method}: must be {_METHOD}; value iteration is part of `reproduction`, in a checkout of Weir"
        )
    if rate is not None:
        _refuse_with_rate(output, workers, latency_objective, figure)
        prices = Prices(latency_weight, energy_weight, reference_rate)
        _solve_one(measured, rate, prices, values, json)
        return
    if values:
        raise SettingsError("--values: is for one rate; add --rate")
    path = output or profile.with_name(_stem(profile) + ".policy.npz")
    check_results(path)
    arguments = {
        "latency_weight": latency_weight, "energy_weight": energy_weight, "reference_rate": reference_rate,
        "workers": workers, "latency_objective": latency_objective, "seed": seed,
    }  # fmt: skip
    _solve_bank(measured, arguments, path, json, figure)


def _stem(profile: Path) -> str:
    return profile.name.removesuffix(".toml").removesuffix(".profile")


def _refuse_with_rate(output: Path | None, workers: int, objective: str | None, figure: Path | None) -> None:
    given = {"--output": output, "--latency-objective": objective, "--figure": figure, "--workers": workers > 1 or None}
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise SettingsError(
            f"{', '.join(wrong)}: cannot be given with --rate, which solves for one worker and writes no policy"
        )


def _solve_one(profile: "Profile", rate: float, prices: Any, values: bool, json: Path | None) -> None:
    from time import perf_counter

    from weir.commands.solutions import about_solution, show_solution
    from weir.policy.solve.bank import solve as solve_rate

    solution: Solution = solve_rate(profile, rate, prices, clock=perf_counter)
    if json != Path("-"):
        show_solution(solution, values)
    _write_json(about_solution(solution), json)


def _solve_bank(
    profile: "Profile", arguments: dict[str, Any], path: Path, json: Path | None, figure: Path | None
) -> None:
    from time import perf_counter

    from weir.commands.output import write_atomically
    from weir.commands.solutions import about_bank, show_bank
    from weir.simulation.banks import beside
    from weir.simulation.banks import solve as solve_rates

    began = perf_counter()
    with _progress() as told:
        bank = solve_rates(profile, progress=told, **arguments)
    seconds = perf_counter() - began
    write_atomically(path, bank.to_bytes())
    # What the rules do is known exactly for one worker; with an objective they would not keep it.
    rules = beside(bank) if bank.workers == 1 and bank.objective is None else []
    if json != Path("-"):
        show_bank(bank, rules)
        typer.echo(f"solved in {seconds:.2f} s; written: {path}")
    _write_json(about_bank(bank, rules), json)
    if figure is not None:
        _draw(bank, rules, figure)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show how many rates are solved, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("solving"), BarColumn(), MofNCompleteColumn(), TextColumn("rates"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _write_json(document: dict[str, Any], path: Path | None) -> None:
    if path is None:
        return
    import msgspec

    from weir.commands.output import write_atomically

    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    if path == Path("-"):
        typer.echo(text, nl=False)
    else:
        write_atomically(path, text)


def _draw(bank: "Bank", rules: "list[Beside]", path: Path) -> None:
    from weir.simulation.report import Compared, draw_bank

    others = {}
    if rules:
        greedy = [each.greedy for each in rules]
        others["greedy"] = Compared([each.response_time_ms for each in greedy], [each.power_w for each in greedy])
    draw_bank(path, bank, others)
