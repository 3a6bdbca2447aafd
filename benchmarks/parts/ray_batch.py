"""The drop-in `@weir.ray.batch` beside `@serve.batch`, with the same settings, inside one replica of Ray Serve.

Ray Serve's router, which the part `ray` measures with them, adds more to the p99 than the decorators differ by; here it is left out.
"""

from typing import Any

from benchmarks.harness.result import Result, middle, milliseconds, short
from benchmarks.harness.rounds import Measurements, Rounds, medians
from benchmarks.harness.servers import ask, python_of, script

RATES = (25, 50, 100, 400)  # requests/s of one replica
WAITS = (5, 10, 20)  # ms, with batches of 32
SERVE = {wait: f"@serve.batch, 32 and {wait} ms" for wait in WAITS}
WEIR = {wait: f"@weir.ray.batch, 32 and {wait} ms" for wait in WAITS}
AUTO = "@weir.ray.batch, auto:p99=45ms"
COMMANDS = (
    {SERVE[wait]: f"serve:32,{wait}" for wait in WAITS}
    | {WEIR[wait]: f"drop-in:32,{wait}" for wait in WAITS}
    | {AUTO: "drop-in:32"}
)


def _one(name: str, case: Any, seconds: float) -> dict[str, Any]:
    found: Any = ask([python_of("ray-serve"), script("ray_batch.py"), COMMANDS[name], str(seconds), *map(str, RATES)])
    if any(each["failed"] for each in found):
        raise RuntimeError(f"{name}: {found}")
    return {f"{figure} {each['rate']:g}": each[figure] for each in found for figure in ("p50", "p99", "busy", "size")}


def _conclude(result: Result, measured: Measurements) -> None:
    for rate in RATES:
        tuned = min(WAITS, key=lambda wait: measured.middle(SERVE[wait], figure=f"p99 {rate}"))
        theirs, own = (measured.of(name, figure=f"p99 {rate}") for name in (SERVE[tuned], WEIR[tuned]))
        result.values[f"p99 beside the tuned one's at {rate}"] = share = middle(own) / middle(theirs)
        result.at_most(f"{rate}/s: the drop-in's p99 beside that of the tuned one ({tuned} ms)", share, 1.0)


BATCH = Rounds(
    "ray-batch",
    "The drop-in inside one replica of Ray Serve",
    "One replica of Ray Serve that calls its own decorated method at Poisson instants; a batch of b sleeps 20 + 0.5·b ms. Same settings for both, and `auto`.",
    one=_one,
    contenders=tuple(COMMANDS),
    heads=("contender",),
    columns=(
        *[medians(f"p99 ms, {rate}/s", f"p99 {rate}") for rate in RATES],
        *[medians(f"busy s per 1,000, {rate}/s", f"busy {rate}", short) for rate in (RATES[0], RATES[-1])],
        medians(f"mean batch, {RATES[-1]}/s", f"size {RATES[-1]}", short),
    ),
    conclude=_conclude,
    progress=(f"p99 {RATES[-1]}", lambda seconds: f"p99 {milliseconds(seconds)} ms at {RATES[-1]}/s"),
    round="one rate after the other",
)
