"""Weir on Ray beside Ray Serve, what the rising load does not show: one call's price, HTTP, large tensors, and a node that is killed under load.

Each figure is measured in the environment of Ray Serve (peers/ray_more.py), one thing of one contender at a time.
"""

from pathlib import Path
from typing import Any

from benchmarks.harness.result import Result, Run, milliseconds, short
from benchmarks.harness.rounds import Column, Measurements, Rounds
from benchmarks.harness.servers import ROOT, ask, python_of, script
from weir.figures import figure, styles

PICTURE = ROOT / "docs/pictures/ray-recovery.svg"
WEIR, TUNED, DROP_IN = "Weir on Ray", "@serve.batch, 32 and 10 ms", "@weir.ray.batch, 32 and 10 ms"
COMMANDS = {WEIR: "weir:size-or-delay:size=64,delay=15ms", TUNED: "serve:32,10", DROP_IN: "drop-in:32,10"}
OVERHEAD, HTTP, TENSORS, RECOVERY = "overhead", "http", "tensors", "recovery"
CASES = {OVERHEAD: (WEIR,), HTTP: (WEIR, TUNED, DROP_IN), TENSORS: (WEIR, TUNED), RECOVERY: (WEIR, TUNED)}


def _one(name: str, case: Any, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, contenders in CASES.items():
        if name in contenders:
            got: Any = ask([python_of("ray-serve"), script("ray_more.py"), what, COMMANDS[name], str(seconds)])
            found |= {f"{what} {figure}": value for figure, value in got.items()}
    return found


def _of(title: str, name: str, show: Any) -> Column:
    def cell(measured: Measurements, contender: str, case: Any) -> str:
        return show(measured.middle(contender, figure=name)) if measured.of(contender, figure=name) else ""

    return Column(title, cell)


def _draw(path: Path, measured: Measurements) -> None:
    with figure(path) as (_, grid):
        axes = grid[0, 0]
        for name, style in zip(CASES[RECOVERY], styles(), strict=False):
            shares = measured.of(name, figure="recovery shares")[-1]
            axes.plot(
                [0.5 * number - 4.0 for number in range(len(shares))],
                [100 * share for share in shares],
                label=name,
                **style,
            )
        axes.set(xlabel="seconds after a node is killed", ylabel="calls answered within 0.5 s, %", ylim=(0, 105))
        axes.legend()


def _conclude(result: Result, measured: Measurements) -> None:
    plain, ours = (measured.middle(WEIR, figure=f"overhead {each}") for each in ("plain", "weir"))
    result.values |= {"plain call": plain, "batch": ours}
    result.at_most("one batch beside a plain actor call, ms more", 1000 * (ours - plain), 0.3)
    for title, name in (
        ("tensors over HTTP, MB/s", "tensors rate"),
        ("seconds until calls are answered in time after a node is killed", "recovery seconds"),
    ):
        theirs, own = measured.middle(TUNED, figure=name), measured.middle(WEIR, figure=name)
        result.goal(
            f"{title}: beside Ray Serve", f"{own:.3g}, {theirs:.3g}", own > theirs if "MB" in title else own <= theirs
        )
    _draw(Run(1, 0.0, print).picture(PICTURE), measured)


MORE = Rounds(
    "ray-more",
    "Weir on Ray: HTTP, tensors, a killed node",
    "Four workers as above. HTTP: 100 requests/s by an open load. Tensors: 602 KB images over HTTP by 16 connections, with four workers. A killed node: one of four, under "
    "100 calls/s, handle to handle; in time is 90 % of the calls of each half second within 0.5 s.",
    one=_one,
    contenders=tuple(COMMANDS),
    heads=("contender",),
    columns=(
        _of("HTTP p50 ms", "http p50", milliseconds),
        _of("HTTP p99 ms", "http p99", milliseconds),
        _of("busy s per 1,000", "http busy", short),
        _of("tensors MB/s", "tensors rate", short),
        _of("in time again, s", "recovery seconds", short),
        _of("calls failed", "recovery failed", short),
    ),
    conclude=_conclude,
    progress=("http p99", "{:.3g} s of p99 over HTTP".format),
    round="one thing after the other",
)
