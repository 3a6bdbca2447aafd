"""`weir simulate`: compares policies in virtual time."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weir.commands.options import STDOUT, check_results, flag, print_table, write_atomically
from weir.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from weir.policy.cost.profile import Profile
    from weir.simulation.results import Comparison
    from weir.simulation.scaling import ScalingComparison

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
    from weir.simulation.report import Bars
    from weir.simulation.simulator import settings_for, split_policies
    from weir.simulation.simulator import simulate as compare

    if device_order is not None and len(profile) == 1:
        raise SettingsError(f"--device-order={device_order}: needs several profiles: models that share a device")
    if len(profile) > 1:
        single = {
            "policy": policy,
            "bulk": bulk or None,
            "bulk-delay": bulk_delay,
            "reference-rate": reference_rate,
            "latency-objective": latency_objective,
            "scaling": scaling,
            "start-up-time": start_up_time,
            "target-load": target_load,
            "scale-to-zero-after": scale_to_zero_after,
            "figure": figure,
        }
        for key, value in single.items():
            if value is not None:
                shown = ",".join(value) if isinstance(value, list) else value
                raise SettingsError(f"--{key}={shown}: is for one profile, and {len(profile)} are given")
        check_results(json)
        _compare_orders(
            profile, arrivals or [], device_order, json, prices=Prices(latency_weight, energy_weight), workers=workers,
            requests=requests or 50_000, seed=seed, warm_up=warm_up, deadline=_seconds("deadline", deadline),
            max_queue_delay=_seconds("max-queue-delay", max_queue_delay),
        )  # fmt: skip
        return
    if len(arrivals or []) > 1:
        raise SettingsError(f"--arrivals: given {len(arrivals or [])} times for one profile; must be given once")
    measured, stream = read_profile(profile[0]), (arrivals or ["poisson:0.7"])[0]
    settings, delay = settings_for(measured), _seconds("max-queue-delay", max_queue_delay)
    settings = settings if delay is None else replace(settings, max_queue_delay=delay)
    prices = Prices(latency_weight, energy_weight, reference_rate)
    settings = replace(settings, bulk_delay=_seconds("bulk-delay", bulk_delay))
    check_results(json, figure=figure)
    allowed = WorkerRange.parse(workers)
    ranged = {
        "scaling": scaling,
        "start-up-time": start_up_time,
        "target-load": target_load,
        "scale-to-zero-after": scale_to_zero_after,
    }
    if ".." not in workers:
        for key, value in ranged.items():
            if value is not None:
                raise SettingsError(f"--{key}={value}: needs a range of workers, as in --workers 1..16")
        named = [each for text in policy or ["smdp,greedy"] for each in split_policies(text)]
        with Bars() as bars:
            compared = compare(
                measured, named, stream, workers=allowed.most, requests=requests, seed=seed, warm_up=warm_up,
                prices=prices, settings=settings, deadline=_seconds("deadline", deadline),
                latency_objective=latency_objective, bulk=bulk, progress=bars,
            )  # fmt: skip
        _show(compared, json, figure)
        return
    from weir.simulation.scaling import simulate_scaling

    if bulk:
        raise SettingsError(f"--bulk={bulk}: needs a fixed number of workers, as in --workers 4")
    if len(policy or []) > 1:
        raise SettingsError(f"--policy: given {len(policy or [])} times; with a range of workers there is one policy")
    rules = [each for text in scaling or ["weir"] for each in split_policies(text, "scaling")]
    with Bars() as bars:
        scaled = simulate_scaling(
            measured, rules, stream, workers=allowed, start_up=_seconds("start-up-time", start_up_time) or 10.0,
            requests=requests, seed=seed, warm_up=warm_up, policy=policy[0] if policy else "greedy", prices=prices,
            objective=latency_objective, target_load=target_load, deadline=_seconds("deadline", deadline),
            idle_after=_seconds("scale-to-zero-after", scale_to_zero_after) or 60.0, settings=settings, progress=bars,
        )  # fmt: skip
    _show_scaling(scaled, json, figure)


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
    from weir.simulation.device import compare_orders, orders_heading, orders_table

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
    _write(compared.to_dict(), json, lambda: (orders_heading(compared), orders_table(compared)))


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


def _show(compared: "Comparison", json: Path | None, figure: Path | None) -> None:
    from weir.simulation.report import draw, heading, table

    if figure is not None:
        draw(compared, figure)
    _write(compared.to_dict(), json, lambda: (heading(compared), table(compared)))


def _show_scaling(compared: "ScalingComparison", json: Path | None, figure: Path | None) -> None:
    from weir.simulation.scaling import draw_scaling, scaling_heading, scaling_table

    if figure is not None:
        draw_scaling(compared, figure)
    _write(compared.to_dict(), json, lambda: (scaling_heading(compared), scaling_table(compared)))


def _write(document: dict[str, Any], json: Path | None, shown: "Callable[[], tuple[str, Table]]") -> None:
    """Print the heading and the table that `shown` returns, and write `document` to the file `json`, if there is one; to
    stdout, only that.
    """
    import msgspec
    from rich.console import Console

    text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    if json == STDOUT:
        typer.echo(text, nl=False)
        return
    console, (line, table) = Console(highlight=False), shown()
    console.print(line, markup=False, soft_wrap=True)
    print_table(console, table)
    if json is not None:
        write_atomically(json, text)
