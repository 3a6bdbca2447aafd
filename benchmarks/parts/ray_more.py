"""Weir on Ray beside Ray Serve, what the rising load does not show: one call's price, HTTP, large tensors, and a node that is killed under load.

Each figure is measured in the environment of Ray Serve (peers/ray_more.py), one thing of one contender at a time.
"""

from pathlib import Path
from typing import Any

from reproduction.drawing import figure, styles

from benchmarks.harness.result import Result, short
from benchmarks.harness.rounds import Measurements, Rounds, medians
from benchmarks.harness.servers import ROOT
from benchmarks.parts.ray import COMMANDS, WEIR, in_ray_serve, variables_of

PICTURE = ROOT / "docs/pictures/ray-recovery.svg"
SHOWN = f"![Calls answered in time around a killed node](pictures/{PICTURE.name})"
TUNED, DROP_IN = "@serve.batch, 32 and 10 ms", "@weir.ray.batch, 32 and 10 ms"
FAST = "@serve.batch, optimised, 32 and 10 ms"
OVERHEAD, HTTP, TENSORS, RECOVERY = "overhead", "http", "tensors", "recovery"
CASES = {OVERHEAD: (WEIR,), HTTP: (WEIR, TUNED, FAST, DROP_IN), TENSORS: (WEIR, TUNED, FAST), RECOVERY: (WEIR, TUNED)}


def _one(name: str, case: Any, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, contenders in CASES.items():
        if name in contenders:
            got = in_ray_serve("ray_more.py", what, COMMANDS[name], seconds, variables=variables_of(name, proxied=True))
            found |= {f"{what} {figure}": value for figure, value in got.items()}
    return found


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
    got, awaited, ours = (measured.middle(WEIR, figure=f"overhead {each}") for each in ("got", "awaited", "weir"))
    result.values |= {"plain call, ray.get": got, "plain call, awaited": awaited, "batch": ours}
    for plain, call in ((got, "ray.get of a plain actor call"), (awaited, "an awaited plain actor call")):
        result.at_most(f"a batch of one beside {call} ({1000 * plain:.2f} ms), ms more", 1000 * (ours - plain), 0.3)
    for title, name, peer in (
        ("tensors over HTTP, MB/s", "tensors rate", FAST),
        ("seconds until calls are answered in time after a node is killed", "recovery seconds", TUNED),
    ):
        theirs, own = measured.middle(peer, figure=name), measured.middle(WEIR, figure=name)
        result.goal(
            f"{title}: beside Ray Serve", f"{own:.3g}, {theirs:.3g}", own > theirs if "MB" in title else own <= theirs
        )
    _draw(measured.run.picture(PICTURE), measured)
    result.notes += ["*Optimised*: `RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_ENABLE_HA_PROXY=1`.", SHOWN]


MORE = Rounds(
    "ray-more",
    "Weir on Ray: HTTP, tensors, a killed node",
    "Four workers as above. HTTP: 100 requests/s in an open loop. Tensors: 602 KB images over HTTP, 16 connections. Killed node: one of four, at 100 calls/s between handles; the "
    "service is in time again when 90 % of the calls in each half second take at most 0.5 s.",
    one=_one,
    contenders=(WEIR, TUNED, FAST, DROP_IN),
    heads=("contender",),
    columns=(
        medians("a batch of one, ms", "overhead weir"),
        medians("HTTP p50 ms", "http p50"),
        medians("HTTP p99 ms", "http p99"),
        medians("busy s per 1,000", "http busy", short),
        medians("tensors MB/s", "tensors rate", short),
        medians("in time again, s", "recovery seconds", short),
        medians("calls failed", "recovery failed", short),
    ),
    conclude=_conclude,
    progress=("http p99", "{:.3g} s of p99 over HTTP".format),
    round="one thing after the other",
)
