"""`weir simulate`: compares policies in virtual time."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weir.commands.options import STDOUT, check_results, flag, print_table, write_atomically
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.simulation.results import Comparison

_POLICIES = (
    "Policies, separated by commas: smdp (solved for this profile), a bank (.npz), or any that `weir serve` takes "
    "(default: smdp,greedy)."
)
_ARRIVALS = (
    "When requests arrive: a process with its load as a share of what the workers can serve (poisson:0.7), or with its rate "
    "in rows per second (poisson:rate=200). Processes: poisson, gamma, mmpp, on-off, sine, ramp, constant; or trace:FILE."
)
_DELAY = "Longest wait that a policy may impose, such as 100ms (default: no limit)."
_WHAT, _PRICES, _RESULT = "Simulation", "Prices", "Result"


def simulate(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Profile written by `weir profile`.")],
    policy: Annotated[list[str] | None, flag(_POLICIES, _WHAT, metavar="POLICY")] = None,
    arrivals: Annotated[str, flag(_ARRIVALS, _WHAT)] = "poisson:0.7",
    workers: Annotated[int, flag("Workers that share the queue.", _WHAT)] = 1,
    requests: Annotated[int | None, flag("Requests to simulate (default: 100000, or all of a trace).", _WHAT)] = None,
    seed: Annotated[int, flag("Seed of random arrivals and service times.", _WHAT)] = 1,
    warm_up: Annotated[float, flag("Share of the requests, at the start, that is not counted.", _WHAT)] = 0.1,
    deadline: Annotated[
        str | None, flag("Timeout of each request, such as 50ms (default: none).", _WHAT, metavar="DURATION")
    ] = None,
    max_queue_delay: Annotated[str | None, flag(_DELAY, _WHAT, metavar="DURATION")] = None,
    latency_weight: Annotated[float, flag("Cost of a millisecond of mean response time.", _PRICES)] = 1.0,
    energy_weight: Annotated[float, flag("Cost of a watt of mean power.", _PRICES)] = 1.0,
    reference_rate: Annotated[
        float | None,
        flag("Rows per second at which the weights hold; a waiting request costs the same at other rates.", _PRICES),
    ] = None,
    latency_objective: Annotated[
        str | None,
        flag(
            "Latency to keep with the least energy, such as p99=20ms: smdp is solved for it, and policies are compared by "
            "power; the weights then have no effect.",
            _PRICES,
            metavar="pNN=DURATION",
        ),
    ] = None,
    json: Annotated[Path | None, flag("File that gets the result as JSON; - prints it instead.", _RESULT)] = None,
    figure: Annotated[Path | None, flag("File that gets a figure, as .png and .svg.", _RESULT)] = None,
) -> None:
    """Compare policies on the same simulated arrivals, with the batcher that the server runs.

    All policies get the same arrivals and the same random service times. Confidence intervals are 95 %.
    """
    from weir.workers.process.launch import compute_in_one_thread

    compute_in_one_thread()
    from weir.policy.cost.objective import Prices
    from weir.simulation.report import Bars
    from weir.simulation.simulator import read_profile, settings_for, split_policies
    from weir.simulation.simulator import simulate as compare

    measured = read_profile(profile)
    named = [each for text in policy or ["smdp,greedy"] for each in split_policies(text)]
    settings, delay = settings_for(measured), _seconds("max-queue-delay", max_queue_delay)
    settings = settings if delay is None else replace(settings, max_queue_delay=delay)
    check_results(json, figure=figure)
    with Bars() as bars:
        compared = compare(
            measured, named, arrivals, workers=workers, requests=requests, seed=seed, warm_up=warm_up,
            prices=Prices(latency_weight, energy_weight, reference_rate), settings=settings,
            deadline=_seconds("deadline", deadline), latency_objective=latency_objective, progress=bars,
        )  # fmt: skip
    _show(compared, json, figure)


def _seconds(key: str, text: str | None) -> float | None:
    from weir.policy.loading import parse_duration

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
    import msgspec
    from rich.console import Console

    from weir.simulation.report import draw, heading, table

    text = msgspec.json.format(msgspec.json.encode(compared.to_dict()), indent=2).decode() + "\n"
    if figure is not None:
        draw(compared, figure)
    if json == STDOUT:
        typer.echo(text, nl=False)
        return
    console = Console(highlight=False)
    console.print(heading(compared), markup=False, soft_wrap=True)
    print_table(console, table(compared))
    if json is not None:
        write_atomically(json, text)
