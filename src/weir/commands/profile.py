"""`weir profile`: measures a model and writes its profile."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weir.catalog.sources import ModelToServe
from weir.commands.options import (
    check_writable,
    option,
    parameter,
    print_table,
    progress_bar,
    settings_of,
    settings_parameters,
    single_model,
    values_of,
    with_signature,
    write_atomically,
)
from weir.profiling import ProfilingSettings
from weir.settings import TRUST, declared_by, declared_settings
from weir.workers.settings import ONE_WORKER

if TYPE_CHECKING:
    from weir.policy.cost import Profile

ROWS_SHOWN = 16
OWN = {each.name: each for each in declared_by(ProfilingSettings, "Measurement")}
# The settings that affect how a batch runs. `workers` is not among them, as one worker is measured.
OF_MODEL = [
    each
    for name, each in declared_settings().items()
    if (each.part == "Workers" and name not in ONE_WORKER) or name in ("name", "params", "max_batch_size", *TRUST)
]


def _profile(
    target: str,
    output: Path | None = None,
    items: Path | None = None,
    config: list[str] | None = None,
    **options: list[Any] | None,
) -> None:
    """Measure how long batches of each size take and how much energy they use, and write a profile.

    One worker is measured, started as `weir serve` would start it with the same options. TARGET is any that `weir serve`
    takes. `weir solve` and `weir simulate` read the profile.
    """
    own = values_of(OWN.values(), options)
    settings = settings_of([target], config, {name: value for name, value in options.items() if name not in OWN})
    model = single_model(settings, target)
    path = output or Path(f"{model.name}.profile.toml")
    check_writable(path)
    profile = _measure(model, ProfilingSettings(**own), items)
    write_atomically(path, profile.to_toml())
    _show(profile, model.name)
    typer.echo(f"written: {path}")


profile = with_signature(
    _profile,
    [
        parameter("target", str, typer.Argument(..., metavar="TARGET", help="The model to measure.")),
        parameter("output", Path, typer.Option(None, "--output", "-o", metavar="PATH", help="File to write (default: NAME.profile.toml).")),
        parameter("items", Path, typer.Option(None, "--items", metavar="FILE", help="Items to measure with: .jsonl, .json, .npz for a tensor model, or a directory of request bodies (default: the model's examples).")),
        *[parameter(name, list[str], option(each)) for name, each in OWN.items()],
        *settings_parameters(OF_MODEL),
    ],
)  # fmt: skip


def _measure(model: ModelToServe, settings: ProfilingSettings, items: Path | None) -> "Profile":
    from weir.catalog.loading import for_measuring, make_service, profile_service

    service = make_service(model._replace(settings=for_measuring(model.settings)), ())
    about = {"target": model.target, "command": command_line(sys.argv[1:])}
    with progress_bar(f"profiling {model.name}") as bar:

        def shown(share: float, what: str) -> None:
            bar(round(100 * share), 100, f"profiling {model.name}: {what}")

        return profile_service(service, settings, items=items, about=about, progress=shown)


def command_line(arguments: list[str]) -> str:
    """Return the command line as text, with values hidden whose names suggest a secret."""
    import shlex

    from weir.telemetry.logs import redacted

    def shown(argument: str) -> str:
        *keys, _ = argument.split("=")
        secret = any(redacted({key: ""})[key] for key in keys)
        return f"{keys[0]}=***" if secret else argument

    return shlex.join(["weir", *map(shown, arguments)])


def _show(profile: "Profile", name: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    print_table(console, _table(profile))
    for line in _summary(profile, name):
        console.print(line, markup=False, soft_wrap=True)


def _table(profile: "Profile") -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("rows", "time ms", "cv", "rows/s", "energy mJ", "W"):
        table.add_column(column, justify="right")
    for size in _shown(profile):
        time, energy = profile.service_time_ms[size - 1], profile.energy_mj[size - 1]
        mark = "*" if size == profile.best_batch_size else ""
        cells = (f"{mark}{size}", f"{time:.4g}", f"{profile.cv[size - 1]:.1%}", f"{1000 * size / time:,.1f}")
        table.add_row(*cells, f"{energy:.4g}", f"{energy / time:.4g}")
    return table


def _shown(profile: "Profile") -> list[int]:
    """Return at most ROWS_SHOWN of the measured sizes, evenly spread, and the best one."""
    sizes = list(profile.about["sizes_measured"])
    last = len(sizes) - 1
    few = {sizes[round(step * last / (ROWS_SHOWN - 1))] for step in range(ROWS_SHOWN)}
    return sorted(few | {profile.best_batch_size})


def _summary(profile: "Profile", name: str) -> Iterator[str]:
    fit, about = profile.fit(), profile.about
    yield ""
    yield f"{name}: at best {profile.max_rate:,.1f} rows/s, in batches of b* = {profile.best_batch_size} (largest: {profile.max_batch_size})"
    yield f"service time {fit.alpha_ms:.4g}·b + {fit.tau0_ms:.4g} ms, R² {fit.time_r2:.4f}"
    if profile.energy_source != "time":
        yield f"energy {fit.beta_mj:.4g}·b + {fit.zeta0_mj:.4g} mJ, R² {fit.energy_r2:.4f}"
    if profile.pipeline_depth > 1:
        yield f"a caller waits {profile.latency_offset_ms:.4g} ms more: {profile.pipeline_depth} batches are in flight"
    yield f"energy source: {about['energy']}"
    yield from (f"{what}: {about[key]}" for key, what in _FACTS.items() if about.get(key))
    yield from (f"WARNING: {warning}" for warning in about.get("warnings", ()))


_FACTS: Mapping[str, str] = {
    "energy_not_read": "energy was not read",
    "idle_power_w": "idle power (W)",
    "power_w": "power while busy (W)",
    "edges": "the time rises by a step after",
    "confidence": "confidence",
    "left_out": "left out",
}
