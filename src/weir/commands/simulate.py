"""`weir simulate`: compares policies in virtual time."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir.commands.options import STDOUT, check_results, flag, print_table, progress_bar, write_json
from weir.errors import SettingsError
from weir.figures import short

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weir.policy.cost.profile import Profile
    from weir.simulation.device import OrdersComparison
    from weir.simulation.results import Comparison
    from weir.simulation.scaling import ScalingComparison

    Table = list[list[str]]  # the names of columns, and rows

_PROFILES = "Profile written by `weir profile`; several are models that share a device, whose orders are compared."
_ORDERS = "With several profiles: orders, separated by commas (default: solved,longest,oldest,fair)."
_POLICIES = (
    "Policies, separated by commas: smdp (solved for this profile), a policy file (.npz), or any that `weir serve` takes "
    "(default: smdp,greedy)."
)
_ARRIVALS = (
    "When requests arrive: a process with its load as a share of the workers' capacity (poisson:0.7), or with its rate in "
    "rows per second (poisson:rate=200). Processes: poisson, gamma, mmpp, on-off, sine, ramp, constant; or trace:FILE "
    "(default: poisson:0.7). With several profiles, once for each."
)
_SCALING = (
    "Rules for the number of workers, separated by commas: weir (as a server decides), or a number that stays, as in fixed:8 "
    "(default: weir)."
)
_DELAY = "Longest time that a policy may hold a request back, such as 100ms (default: no limit)."
_WHAT, _WORKERS, _PRICES, _RESULT = "Simulation", "Autoscaling", "Weights", "Result"


def simulate(
    profile: Annotated[list[Path], typer.Argument(metavar="PROFILE...", help=_PROFILES)],
    policy: Annotated[list[str] | None, flag(_POLICIES, _WHAT, metavar="POLICY")] = None,
    arrivals: Annotated[list[str] | None, flag(_ARRIVALS, _WHAT)] = None,
    workers: Annotated[
        str,
        flag(
            "Workers that share the queue; with a range, such as 1..16, scaling rules choose the number.",
            _WHAT,
            metavar="N or N..M",
        ),
    ] = "1",
    requests: Annotated[int | None, flag("Requests to simulate (default: 100000, or all of a trace).", _WHAT)] = None,
    seed: Annotated[int, flag("Seed of random arrivals and service times.", _WHAT)] = 1,
    warm_up: Annotated[float, flag("Share of the requests, at the start, that is not counted.", _WHAT)] = 0.1,
    deadline: Annotated[
        str | None, flag("Timeout of each request, such as 50ms (default: none).", _WHAT, metavar="DURATION")
    ] = None,
    bulk: Annotated[int, flag("Rows of bulk work queued at the start, in addition to the arrivals.", _WHAT)] = 0,
    bulk_delay: Annotated[
        str | None,
        flag("Time by which bulk work may delay a request (default: as in weir serve).", _WHAT, metavar="DURATION"),
    ] = None,
    max_queue_delay: Annotated[str | None, flag(_DELAY, _WHAT, metavar="DURATION")] = None,
    latency_weight: Annotated[float, flag("Weight of a millisecond of mean response time.", _PRICES)] = 1.0,
    energy_weight: Annotated[float, flag("Weight of a watt of mean power.", _PRICES)] = 1.0,
    reference_rate: Annotated[
        float | None,
        flag(
            "Arrival rate at which the weights hold, in rows per second; at other rates a waiting request costs the same.",
            _PRICES,
        ),
    ] = None,
    latency_objective: Annotated[
        str | None,
        flag(
            "Objective instead of weights, such as p99=20ms: smdp is solved for it with the least energy, and policies are "
            "compared by power.",
            _PRICES,
            metavar="pNN=DURATION",
        ),
    ] = None,
    scaling: Annotated[list[str] | None, flag(_SCALING, _WORKERS, metavar="RULE")] = None,
    start_up_time: Annotated[
        str | None, flag("Time that a worker takes to start (default: 10s).", _WORKERS, metavar="DURATION")
    ] = None,
    target_load: Annotated[
        float | None,
        flag(
            "Maximum share of the workers' capacity to use (default: what the latency objective allows, or "
            "the knee of the cost).",
            _WORKERS,
        ),
    ] = None,
    scale_to_zero_after: Annotated[
        str | None,
        flag(
            "With a range from 0: time without requests after which all workers stop (default: 60s).",
            _WORKERS,
            metavar="DURATION",
        ),
    ] = None,
    device_order: Annotated[str | None, flag(_ORDERS, _WHAT, metavar="ORDER")] = None,
    json: Annotated[Path | None, flag("File to write the result to as JSON; - prints it.", _RESULT)] = None,
    figure: Annotated[Path | None, flag("File to draw a figure to, as .png and .svg.", _RESULT)] = None,
) -> None:
    """Compare policies on the same simulated arrivals, with the server's own batcher.

    All policies get the same arrivals and the same random service times. Confidence intervals are 95 %.

    With a range of workers, scaling rules are compared instead, under one policy (default: greedy). With several profiles, the orders
    in which their models take turns on a device.
    """
    from weir.workers.cpus import compute_in_one_thread

    compute_in_one_thread()
    from weir.policy.cost.objective import Prices
    from weir.policy.cost.profile import read_profile
    from weir.policy.scaling import WorkerRange
    from weir.simulation.simulator import settings_for, split_policies
    from weir.simulation.simulator import simulate as compare

    ranged = {
        "scaling": scaling,
        "start-up-time": start_up_time,
        "target-load": target_load,
        "scale-to-zero-after": scale_to_zero_after,
    }
    if len(profile) > 1:
        single = {
            "policy": policy,
            "bulk": bulk or None,
            "bulk-delay": bulk_delay,
            "reference-rate": reference_rate,
            "latency-objective": latency_objective,
            **ranged,
            "figure": figure,
        }
        _refuse(single, f"is for one profile, and {len(profile)} are given")
        check_results(json)
        _compare_orders(
            profile, arrivals or [], device_order, json, prices=Prices(latency_weight, energy_weight), workers=workers,
            requests=requests or 50_000, seed=seed, warm_up=warm_up, deadline=_seconds("deadline", deadline),
            max_queue_delay=_seconds("max-queue-delay", max_queue_delay),
        )  # fmt: skip
        return
    _refuse({"device-order": device_order}, "needs several profiles: models that share a device")
    if len(arrivals or []) > 1:
        raise SettingsError(f"--arrivals: given {len(arrivals or [])} times for one profile; must be given once")
    measured, stream = read_profile(profile[0]), (arrivals or ["poisson:0.7"])[0]
    settings, delay = settings_for(measured), _seconds("max-queue-delay", max_queue_delay)
    settings = settings if delay is None else replace(settings, max_queue_delay=delay)
    prices = Prices(latency_weight, energy_weight, reference_rate)
    settings = replace(settings, bulk_delay=_seconds("bulk-delay", bulk_delay))
    check_results(json, figure=figure)
    allowed = WorkerRange.parse(workers)
    if ".." not in workers:
        _refuse(ranged, "needs a range of workers, as in --workers 1..16")
        named = [each for text in policy or ["smdp,greedy"] for each in split_policies(text)]
        with progress_bar("simulating") as bar:
            compared = compare(
                measured, named, stream, workers=allowed.most, requests=requests, seed=seed, warm_up=warm_up,
                prices=prices, settings=settings, deadline=_seconds("deadline", deadline),
                latency_objective=latency_objective, bulk=bulk, progress=lambda what, done, whole: bar(done, whole, what),
            )  # fmt: skip
        if figure is not None:
            from weir.commands.drawings import draw

            draw(compared, figure)
        _write(compared, json, compared.table)
        return
    from weir.simulation.scaling import simulate_scaling

    _refuse({"bulk": bulk or None}, "needs a fixed number of workers, as in --workers 4")
    if len(policy or []) > 1:
        raise SettingsError(f"--policy: given {len(policy or [])} times; with a range of workers there is one policy")
    rules = [each for text in scaling or ["weir"] for each in split_policies(text, "scaling")]
    with progress_bar("simulating") as bar:
        scaled = simulate_scaling(
            measured, rules, stream, workers=allowed, start_up=_seconds("start-up-time", start_up_time) or 10.0,
            requests=requests, seed=seed, warm_up=warm_up, policy=policy[0] if policy else "greedy", prices=prices,
            objective=latency_objective, target_load=target_load, deadline=_seconds("deadline", deadline),
            idle_after=_seconds("scale-to-zero-after", scale_to_zero_after) or 60.0, settings=settings,
            progress=lambda what, done, whole: bar(done, whole, what),
        )  # fmt: skip
    if figure is not None:
        from weir.commands.drawings import draw_scaling

        draw_scaling(scaled, figure)
    _write(scaled, json, lambda: _scaling_table(scaled))


def _refuse(options: "Mapping[str, Any]", why: str) -> None:
    """Raise SettingsError if one of `options` is given."""
    for key, value in options.items():
        if value is not None:
            raise SettingsError(f"--{key}={','.join(value) if isinstance(value, list) else value}: {why}")


def _compare_orders(
    paths: "Sequence[Path]",
    arrivals: "Sequence[str]",
    orders: str | None,
    json: Path | None,
    *,
    workers: str,
    **rest: Any,
) -> None:
    from weir.batching.workers import FAIR, LONGEST, OLDEST, ORDERS, SOLVED
    from weir.policy.cost.profile import read_profile
    from weir.simulation.device import compare_orders

    if not workers.isdecimal() or workers == "0":
        raise SettingsError(f"--workers={workers}: must be a number, 1 or more, with several profiles")
    if rest["seed"] < 0 or not 0.0 <= rest["warm_up"] < 1.0 or rest["requests"] < 1:
        raise SettingsError(
            f"--seed={rest['seed']}, --warm-up={rest['warm_up']}, --requests={rest['requests']}: must be 0 or more, from 0 to below 1, and 1 or more"
        )
    named = (orders or ",".join((SOLVED, LONGEST, OLDEST, FAIR))).split(",")
    for order in named:
        if order not in ORDERS:
            raise SettingsError(f"--device-order={order}: must be one of {', '.join(ORDERS)}")
    profiles: dict[str, Profile] = {}
    for path in paths:
        name = path.name.removesuffix(".profile.toml")
        same = sum(each.partition(" ")[0] == name for each in profiles)
        profiles[f"{name} {same + 1}" if same else name] = read_profile(path)
    compared = compare_orders(
        profiles, arrivals or [f"poisson:{0.7 / len(paths):.3g}"] * len(paths), named, workers=int(workers), **rest
    )
    _write(compared, json, lambda: _orders_table(compared), texts=2)


def _seconds(key: str, text: str | None) -> float | None:
    from weir.config import parse_duration

    if text is None:
        return None
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0.0:
        raise SettingsError(f"--{key}={text}: must be a duration greater than 0, such as 20ms")
    return seconds


def _orders_table(compared: "OrdersComparison") -> "Table":
    """Return the outcomes as a table, the cheapest order first."""
    columns = ["order", "model", "cost", "response ms", "p99 ms", "late %", "batch", "share", "W"]
    table = [columns]
    for order in sorted(compared.costs, key=lambda each: compared.costs[each]):
        heads = iter([(order, short(compared.costs[order]))])
        for name, each in compared.outcomes[order].items():
            first, cost = next(heads, ("", ""))
            times = short(each.response_time_ms), short(each.p99_ms), f"{100.0 * each.late_share:.2f}"
            table.append(
                [first, name, cost, *times, f"{each.batch_rows:.1f}", f"{each.share:.0%}", short(each.power_w)]
            )
    return table


def _scaling_table(compared: "ScalingComparison") -> "Table":
    """Return the outcomes as a table, in the order of the rules."""
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
    compared: "Comparison | OrdersComparison | ScalingComparison",
    json: Path | None,
    table_of: "Callable[[], Table]",
    texts: int = 1,
) -> None:
    """Print the heading and the table, and write `compared` to the file `json`, if there is one; to stdout, only that. The first `texts` columns are
    names, of which a narrow terminal wraps the last.
    """
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    write_json(compared.to_dict(), json)
    if json == STDOUT:
        return
    columns, *rows = table_of()
    shown = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns, 1):
        if index == texts:
            shown.add_column(column, overflow="fold", min_width=11)
        else:
            shown.add_column(column, justify="left" if index < texts else "right", no_wrap=index > texts)
    for names, cells in ((row[:texts], row[texts:]) for row in rows):
        shown.add_row(*names, *(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
    console = Console(highlight=False)
    console.print(compared.heading(), markup=False, soft_wrap=True)
    print_table(console, shown)
