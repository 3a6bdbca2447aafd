"""Weir on Ray beside Ray Serve's `@serve.batch` and the drop-in for it: four workers that sleep, so that two cores suffice for all of them.

Each contender runs in the environment of Ray Serve (peers/ray_serve.py), under open load that rises from rate to rate, until its p99 is half a second.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from benchmarks.harness.result import Result, middle, milliseconds, short
from benchmarks.harness.rounds import Column, Measurements, Rounds
from benchmarks.harness.servers import ask, python_of, script
from benchmarks.harness.settings import HAPROXY, OPTIMIZED

RATES = (50, 100, 200, 400)
COMPARED = 100  # requests/s at which busy seconds are compared: all keep up there
LATEST = 0.05  # seconds of p99 within which a rate counts as kept

WEIR, DROP_IN, DEFAULT = "Weir on Ray", "@weir.ray.batch", "@serve.batch, its defaults"
AUTO, ROUTED = "Weir on Ray, auto:p99=45ms", "capacity router, 32 and 10 ms"
WAITS = (5, 10, 20)  # ms, with batches of 32
OPTIMISED = {f"@serve.batch, optimised, 32 and {wait} ms": f"serve:32,{wait}" for wait in WAITS[:2]}
SWEPT = {f"@serve.batch, 32 and {wait} ms": f"serve:32,{wait}" for wait in WAITS} | OPTIMISED
SAME = {f"@weir.ray.batch, 32 and {wait} ms": f"drop-in:32,{wait}" for wait in WAITS[1:]}
COMMANDS = {
    WEIR: "weir:size-or-delay:size=64,delay=18ms", AUTO: "weir:auto:p99=45ms", DROP_IN: "drop-in:32", **SAME, DEFAULT: "serve:", **SWEPT,
    ROUTED: "capacity:32,10",
}  # fmt: skip


def _one(name: str, case: Any, seconds: float) -> dict[str, Any]:
    found = in_ray_serve("ray_serve.py", COMMANDS[name], seconds, *RATES, variables=variables_of(name))
    kept = [each["rate"] for each in takewhile(lambda each: each["p99"] <= LATEST and not each["failed"], found)]
    by_rate = {each["rate"]: each for each in found}
    figures: dict[str, Any] = {"rate": max(kept, default=0.0)}
    for rate, each in by_rate.items():
        figures |= {f"p99 {rate:g}": each["p99"], f"busy {rate:g}": each["busy"], f"size {rate:g}": each["size"]}
    return figures


def _at(title: str, figure: str, rate: int, show: Any) -> Column:
    def cell(measured: Measurements, name: str, case: Any) -> str:
        values = measured.of(name, case, f"{figure} {rate}")
        return show(middle(values)) if values else "overloaded"

    return Column(f"{title}, {rate}/s", cell)


def in_ray_serve(program: str, *arguments: object, variables: Mapping[str, str] | None = None) -> Any:
    """Return what a program of benchmarks/peers finds in the environment of Ray Serve."""
    return ask([python_of("ray-serve"), script(program), *map(str, arguments)], variables=variables)


def variables_of(name: str, proxied: bool = False) -> Mapping[str, str] | None:
    """Return what makes Ray Serve's fast mode, for contenders that run in it."""
    return (HAPROXY if proxied else OPTIMIZED) if name in OPTIMISED else None


def _conclude(result: Result, measured: Measurements) -> None:
    tuned = max(SWEPT, key=lambda name: (measured.middle(name), -measured.middle(name, figure=f"p99 {COMPARED}")))
    result.values |= measured.values()
    for name in (WEIR, AUTO, DROP_IN, DEFAULT, tuned):
        result.values[f"busy {name}"] = measured.middle(name, figure=f"busy {COMPARED}")
    result.notes.append(f"{tuned} is the best setting of the sweep; *optimised*: `RAY_SERVE_THROUGHPUT_OPTIMIZED=1`.")
    rate, theirs = measured.middle(WEIR), measured.middle(tuned)
    result.goal(
        f"p99 within {LATEST * 1000:g} ms at 1.5 times the rate of the tuned one",
        f"{rate:g}/s, {theirs:g}/s",
        rate >= 1.5 * max(theirs, 1.0),
    )
    busy = {name: result.values[f"busy {name}"] for name in (WEIR, DEFAULT, tuned)}
    result.at_most("busy seconds: at most half of the default's", busy[WEIR] / busy[DEFAULT], 0.5)
    result.at_most("busy seconds: at most 0.8 of the tuned one's", busy[WEIR] / busy[tuned], 0.8)
    best = max(
        (DROP_IN, *SAME), key=lambda name: (measured.middle(name), -measured.middle(name, figure=f"p99 {COMPARED}"))
    )
    result.goal(
        f"the drop-in keeps at least the rate of the tuned one ({best})",
        f"{measured.middle(best):g}/s",
        measured.middle(best) >= theirs,
    )
    own, other = (measured.middle(name, figure=f"p99 {COMPARED}") for name in (best, tuned))
    result.at_most(f"the drop-in's p99 beside the tuned one's, at {COMPARED}/s", own / other, 1.0)


RAY = Rounds(
    "ray",
    "Weir on Ray, compared with Ray Serve",
    "Four workers, actors or replicas, that sleep 20 + 0.5·b ms for a batch of b; single calls at Poisson instants between handles, without HTTP. "
    "*Kept* is the highest rate with a p99 of at most 50 ms; *busy* is the time that workers sleep per 1,000 requests. Weir waits at most 18 ms for a batch of "
    "64, or solves; `@serve.batch` runs with its defaults, the settings of a sweep, and Ray Serve's capacity router.",
    one=_one,
    contenders=tuple(COMMANDS),
    heads=("contender",),
    columns=(
        Column("kept, requests/s", lambda measured, name, case: f"{measured.middle(name, case):g}"),
        *[_at("p99 ms", "p99", rate, milliseconds) for rate in (50, 100, 200, 400)],
        *[_at("busy s per 1,000", "busy", rate, short) for rate in (100, 400)],
        _at("mean batch", "size", 400, short),
    ),
    conclude=_conclude,
    progress=("rate", "{:g} requests/s kept".format),
    round="rising load",
)
