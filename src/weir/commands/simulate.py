"""`weir simulate`: compares policies in virtual time."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    write_json,
)
from weir.config import DURATION, Checked, parse_duration, setting
from weir.errors import SettingsError
from weir.settings import declared_by

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weir.batching import BatchingSettings
    from weir.policy.cost import Profile
    from weir.simulation.results import Comparison
    from weir.simulation.scaling import ScalingComparison

    Table = list[list[str]]  # the names of columns, and rows


def _duration(default: str | None, help: str) -> Any:
    return setting(default, help, metavar="DURATION", rule=DURATION)


@dataclass(frozen=True)
class SimulationSettings(Checked):
    """Says what is simulated. Durations are texts with a unit."""

    policy: list[str] = setting(
        [],
        "policies, separated by commas: smdp (solved for this profile), a policy file (.npz), or any that `weir serve` takes "
        "(default: smdp,greedy)",
        metavar="POLICY",
    )
    arrivals: str = setting(
        "poisson:0.7",
        "when requests arrive: a process with its load as a share of the workers' capacity (poisson:0.7), or with its rate in "
        "rows per second (poisson:rate=200). Processes: poisson, gamma, mmpp, on-off, sine, ramp, constant; or trace:FILE",
    )
    workers: str = setting(
        "1",
        "workers that share the queue; with a range, such as 1..16, scaling rules choose the number",
        metavar="N or N..M",
    )
    requests: int | None = setting(None, "requests to simulate (default: 100000, or all of a trace)")
    seed: int = setting(1, "seed of random arrivals and service times")
    warm_up: float = setting(0.1, "share of the requests, at the start, that is not counted")
    deadline: str | None = _duration(None, "timeout of each request, such as 50ms (default: none)")
    bulk: int = setting(0, "rows of bulk work queued at the start, in addition to the arrivals")
    bulk_delay: str | None = _duration(None, "time by which bulk work may delay a request (default: as in weir serve)")
    max_queue_delay: str | None = _duration(
        None, "longest time that a policy may hold a request back, such as 100ms (default: no limit)"
    )


@dataclass(frozen=True)
class ScalingSettings(Checked):
    """The settings by which the number of workers changes."""

    scaling: list[str] = setting(
        [],
        "rules for the number of workers, separated by commas: weir (as a server decides), or a number that stays, as in fixed:8 "
        "(default: weir)",
        metavar="RULE",
    )
    start_up_time: str = _duration("10s", "time that a worker takes to start")
    target_load: float | None = setting(
        None,
        "maximum share of the workers' capacity to use (default: what the latency objective allows, or the knee of the cost)",
    )
    scale_to_zero_after: str = _duration(
        "60s", "with a range from 0: time without requests after which all workers stop"
    )


_SIMULATION = declared_by(SimulationSettings, "Simulation")
_SCALING = declared_by(ScalingSettings, "Autoscaling")
_RULES = [each.name for each in _SCALING]


@with_declared(*_SIMULATION, *WEIGHTS, *_SCALING)
def simulate(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Profile written by `weir profile`.")],
    json: Annotated[Path | None, flag("File to write the result to as JSON; - prints it.", "Result")] = None,
    **options: list[Any] | None,
) -> None:
    """Compare policies on the same simulated arrivals, with the server's own batcher.

    All policies get the same arrivals and the same random service times. Confidence intervals are 95 %.

    With a range of workers, scaling rules are compared instead, under one policy (default: greedy).
    """
    from weir.workers.cpus import compute_in_one_thread

    compute_in_one_thread()
    from weir.policy.cost import read_profile

    given = {name: texts for name, texts in options.items() if texts}
    settings = SimulationSettings(**values_of(_SIMULATION, options))
    weights = WeightSettings(**values_of(WEIGHTS, options))
    scaling = ScalingSettings(**values_of(_SCALING, options))
    check_results(json)
    measured = read_profile(profile)
    if ".." in settings.workers:
        _refuse(given, ("bulk",), "needs a fixed number of workers, as in --workers 4")
        _compare_rules(measured, settings, scaling, weights, json)
    else:
        _refuse(given, _RULES, "needs a range of workers, as in --workers 1..16")
        _compare_policies(measured, settings, weights, json)


def _compare_policies(
    profile: "Profile", settings: SimulationSettings, weights: WeightSettings, json: Path | None
) -> None:
    from weir.policy.scaling import WorkerRange
    from weir.simulation.simulator import simulate as compare
    from weir.simulation.simulator import split_policies

    batching, workers = _batching(profile, settings), WorkerRange.parse(settings.workers).most
    named = [each for text in settings.policy or ["smdp,greedy"] for each in split_policies(text)]
    with progress_bar("simulating") as bar:
        compared = compare(
            profile, named, settings.arrivals, workers=workers, requests=settings.requests, seed=settings.seed,
            warm_up=settings.warm_up, prices=weights.prices, settings=batching, deadline=_seconds(settings.deadline),
            latency_objective=weights.latency_objective, bulk=settings.bulk, progress=lambda what, done, whole: bar(done, whole, what),
        )  # fmt: skip
    _write(compared, json, compared.table)


def _compare_rules(
    profile: "Profile",
    settings: SimulationSettings,
    scaling: ScalingSettings,
    weights: WeightSettings,
    json: Path | None,
) -> None:
    from weir.simulation.scaling import simulate_scaling
    from weir.simulation.simulator import split_policies

    policies = settings.policy
    if len(policies) > 1:
        raise SettingsError(f"--policy: given {len(policies)} times; with a range of workers there is one policy")
    rules = [each for text in scaling.scaling or ["weir"] for each in split_policies(text, "scaling")]
    with progress_bar("simulating") as bar:
        scaled = simulate_scaling(
            profile, rules, settings.arrivals, workers=settings.workers, start_up=parse_duration(scaling.start_up_time),
            requests=settings.requests, seed=settings.seed, warm_up=settings.warm_up, policy=policies[0] if policies else "greedy",
            prices=weights.prices, objective=weights.latency_objective, target_load=scaling.target_load,
            deadline=_seconds(settings.deadline), idle_after=parse_duration(scaling.scale_to_zero_after),
            settings=_batching(profile, settings), progress=lambda what, done, whole: bar(done, whole, what),
        )  # fmt: skip
    _write(scaled, json, lambda: _scaling_table(scaled))


def _seconds(duration: str | None) -> float | None:
    return None if duration is None else parse_duration(duration)


def _batching(profile: "Profile", settings: SimulationSettings) -> "BatchingSettings":
    from weir.simulation.simulator import settings_for

    batching = replace(settings_for(profile), bulk_delay=_seconds(settings.bulk_delay))
    delay = _seconds(settings.max_queue_delay)
    return batching if delay is None else replace(batching, max_queue_delay=delay)


def _refuse(given: "Mapping[str, list[Any]]", names: "Sequence[str]", why: str) -> None:
    """Raise SettingsError if one of the settings `names` is `given`."""
    for name in names:
        if name in given:
            raise SettingsError(f"--{name.replace('_', '-')}={','.join(map(str, given[name]))}: {why}")


def _scaling_table(compared: "ScalingComparison") -> "Table":
    """Return the outcomes as a table, in the order of the rules."""
    from weir.simulation.statistics import short

    late = compared.deadline is not None
    columns = ["rule", "worker-hours", "mean", "most", "busy", "starts", "response ms", "p50 ms", "p99 ms"]
    table = [columns + ["late"] * late]
    for name, each in compared.outcomes.items():
        workers = (
            f"{each.worker_hours:.3g}",
            f"{each.mean_workers:.1f}",
            str(each.most_workers),
            f"{each.busy_share:.0%}",
        )
        times = map(short, (each.response_time_ms, each.p50_ms, each.p99_ms))
        table.append([name, *workers, str(each.starts), *times, *[f"{each.late_share:.2%}"] * late])
    return table


_STYLES = {"best": "bold green", "unstable": "red", "not kept": "red", "loses more": "red"}


def _write(
    compared: "Comparison | ScalingComparison",
    json: Path | None,
    table_of: "Callable[[], Table]",
) -> None:
    """Print the heading and the table, and write `compared` to the file `json`, if there is one; to stdout, only that. A narrow terminal wraps the names
    in the first column."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    write_json(compared.to_dict(), json)
    if json == STDOUT:
        return
    columns, *rows = table_of()
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column(columns[0], overflow="fold", min_width=11)
    for column in columns[1:]:
        shown.add_column(column, justify="right", no_wrap=True)
    for name, *cells in rows:
        shown.add_row(name, *(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
    console = Console(highlight=False)
    console.print(compared.heading(), markup=False, soft_wrap=True)
    print_table(console, shown)
