"""The command `weir simulate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weir.errors import SettingsError

DEFAULT = "smdp,greedy"

if TYPE_CHECKING:
    from weir.batching.settings import BatchingSettings
    from weir.policy.profile import Profile
    from weir.simulation.outcome import Comparison


def simulate(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Profile written by `weir profile`.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies, separated by commas; smdp is the one solved for this profile, or give a file (.npz). "
            "Without: smdp,greedy",
            show_default=False,
        ),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="Process and load (share of capacity), such as poisson:0.7, or trace:FILE; see the documentation.")
    ] = "poisson:0.7",
    workers: Annotated[int, typer.Option(help="Workers that serve the one line.")] = 1,
    requests: Annotated[
        int | None, typer.Option(help="Requests to simulate; 100000 if left out, of a trace all.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals and of random service times.")] = 1,
    warm_up: Annotated[float, typer.Option(help="Share of the requests, at the start, that is not counted.")] = 0.1,
    latency_weight: Annotated[float, typer.Option(help="Cost of a millisecond of mean response time.")] = 1.0,
    energy_weight: Annotated[float, typer.Option(help="Cost of a watt of mean power.")] = 1.0,
    reference_rate: Annotated[
        float | None, typer.Option(help="Rate in rows per second at which the weights hold; the price of waiting is constant then.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(metavar="DURATION", help="Timeout of each request, such as 50ms.")] = None,
    max_queue_delay: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Longest wait that a policy may impose; without it none is imposed on them.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write everything as JSON; - prints it.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw it, as PATH.png and PATH.svg.")] = None,
) -> None:
    """Compare policies on the same simulated arrivals, with the batcher that the server runs."""
    from rich.console import Console

    from weir.policy.prices import Prices
    from weir.simulation import report
    from weir.simulation.policies import split_policies
    from weir.simulation.simulator import simulate as compare

    measured = _read(profile)
    named = [each for text in policy or [DEFAULT] for each in split_policies(text)]
    with _Bars() as bars:
        compared = compare(
            measured, named, arrivals, workers=workers, requests=requests, seed=seed, warm_up=warm_up,
            prices=Prices(latency_weight, energy_weight, reference_rate),
            settings=_settings(measured, _seconds("max-queue-delay", max_queue_delay)),
            deadline=_seconds("deadline", deadline), progress=bars,
        )  # fmt: skip
    if json_path is not None:
        _write(compared, json_path)
    if figure is not None:
        report.draw(compared, figure)
    if json_path != Path("-"):
        console = Console(highlight=False)
        console.print(report.heading(compared), markup=False)
        console.print(report.table(compared))


def _read(path: Path) -> "Profile":
    from weir.policy.profile import Profile

    try:
        return Profile.from_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"profile {str(path)!r} cannot be read: {error}") from error


def _seconds(key: str, text: str | None) -> float | None:
    from weir.policy.grammar import parse_duration

    if text is None:
        return None
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0.0:
        raise SettingsError(f"--{key}={text}: must be a duration greater than 0, such as 20ms")
    return seconds


def _settings(profile: "Profile", max_queue_delay: float | None) -> "BatchingSettings | None":
    from dataclasses import replace

    from weir.simulation.policies import settings_for

    return None if max_queue_delay is None else replace(settings_for(profile), max_queue_delay=max_queue_delay)


def _write(compared: "Comparison", path: Path) -> None:
    text = json.dumps(compared.to_dict(), indent=2) + "\n"
    if path == Path("-"):
        typer.echo(text, nl=False)
    else:
        path.write_text(text)


class _Bars:
    """A bar of progress per policy, on stderr if that is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, object] = {}

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def __call__(self, policy: str, done: int, total: int) -> None:
        """So many requests of that policy are done."""
        task = self._tasks.get(policy)
        if task is None:
            task = self._tasks[policy] = self._progress.add_task(policy, total=total)
        self._progress.update(task, completed=done)
