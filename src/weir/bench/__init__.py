"""A load generator: it sends requests at exact instants (an open loop), and reports how late each one was actually sent.

    from weir.bench import bench
    report = bench("http://localhost:8000/infer/square", rate=500, duration=30)
    print(report.outcome.p99_ms.value, report.outcome.errors)

run.py      one round of requests, an open or a closed loop; all rounds of all targets; the results, also as a table and JSON, and the progress line
target.py   the contract of a target, the ledger of a round, the batches that a server counts
server.py   an endpoint of a server: any path that accepts POST, or the Open Inference Protocol over HTTP, gRPC and WebSocket
vectors.py  the tables for a server of text vectors

Importing this module loads the settings only, from which the command line is made.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Checked, setting
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.bench.run import Lag, Outcome, Report, run_bench
    from weir.bench.server import ServerTarget
    from weir.bench.target import Target
    from weir.simulation.statistics import Estimate

__all__ = [
    "Estimate", "HttpOptions", "Lag", "LoadSettings", "Outcome", "Report", "ServerTarget", "Target", "bench", "run_bench", "run_shown",
]  # fmt: skip

_WHERE = {
    **dict.fromkeys(("Lag", "Outcome", "Report", "run_bench"), "weir.bench.run"),
    "Target": "weir.bench.target",
    "ServerTarget": "weir.bench.server",
    "Estimate": "weir.simulation.statistics",
}

_FINITE = (lambda value: 0 < value < inf, "must be greater than 0, and finite")


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'weir.bench' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


@dataclass(frozen=True)
class LoadSettings(Checked):
    """The load of a run. Durations are in seconds; `arrivals` may also be an instance of Arrivals."""

    arrivals: Any = setting(
        "poisson",
        "when requests are sent: poisson, constant, gamma:cv=2, mmpp:..., on-off:on=1s,off=1s, sine:..., ramp:..., trace:FILE",
        metavar="TEXT",
    )
    rate: float | None = setting(None, "requests per second, unless the arrivals state a rate", rule=_FINITE)
    duration: float | None = setting(None, "seconds of load (default: 10, or the length of the trace)", rule=_FINITE)
    concurrency: int | None = setting(
        None,
        "closed loop instead: number of callers, each of which waits for a response before it sends again",
        rule=AT_LEAST_ONE,
    )
    warm_up: float = setting(
        0.1,
        "share of each round, at its start, that is not counted",
        rule=(lambda value: 0 <= value < 1, "must be 0 or more, and less than 1"),
    )
    rounds: int | None = setting(
        None, "rounds in which targets take turns (default: 5, or 1 for a single target)", rule=AT_LEAST_ONE
    )
    seed: int = setting(1, "seed of random arrivals", rule=AT_LEAST_ZERO)
    max_lag_ms: float | None = setting(
        None, "p99 send lag in ms above which the run fails (default: above 1 ms, it warns)", rule=POSITIVE
    )


@dataclass(frozen=True)
class HttpOptions(Checked):
    """The settings by which requests are sent to a server."""

    headers: Mapping[str, str] = setting({}, "header to send with each request; repeatable", metavar="NAME: VALUE")
    timeout: float = setting(10.0, "seconds after which a request counts as failed", rule=POSITIVE)
    max_connections: int = setting(1000, "maximum number of open connections", rule=AT_LEAST_ONE)
    insecure: bool = setting(False, "accept any certificate")
    channels: int = setting(4, "connections for gRPC or WebSocket; each carries many requests", rule=AT_LEAST_ONE)
    rows: int = setting(1, "rows per request, if requests are generated from the model's metadata", rule=AT_LEAST_ONE)


def bench(
    *targets: "str | Target",
    data: str | Sequence[Any] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 10.0,
    progress: bool = False,
    **settings: Any,
) -> "Report":
    """Put the same load on `targets`, in turns, and return the results.

    Arguments:
        targets: each is a URL (http://HOST:PORT/PATH, https, http://unix:SOCKET:/PATH, grpc://HOST:PORT/MODEL or
            ws://HOST:PORT/MODEL) or a Target.
        data: the bodies to send; see `read_payloads`. None sends the model's own example.
        headers: headers of each HTTP request.
        timeout: seconds until a request counts as failed.
        progress: whether to show the progress in a line on stderr.
        settings: those of LoadSettings: `arrivals`, `rate`, `duration`, `concurrency`, `warm_up`, `rounds`, `seed`,
            `max_lag_ms`.

    This runs an event loop of its own; within an event loop, await `run_bench` instead. Raises SettingsError for a wrong setting
    or a target that does not respond. If the measurement is invalid, the report's `failures` say why.
    """
    from weir.bench.server import ServerTarget

    with suppress(RuntimeError):  # raised if no event loop runs
        asyncio.get_running_loop()
        raise SettingsError(
            "bench: cannot run where an event loop runs; await run_bench([target, ...], LoadSettings(...))"
        )
    load = LoadSettings(**settings)
    connections = load.concurrency or HttpOptions.max_connections
    options = HttpOptions(headers=headers or {}, timeout=timeout, max_connections=connections)
    made = [ServerTarget(each, data, options) if isinstance(each, str) else each for each in targets]
    return run_shown(made, load, progress=progress)


def run_shown(targets: "Sequence[Target]", settings: LoadSettings, *, progress: bool) -> "Report":
    """Run `run_bench` in an event loop of its own, with its progress in a line on stderr if `progress`. Raises what it raises."""
    from weir.bench.run import progress_shown, run_bench, show_line
    from weir.workers.timer import new_loop

    async def run() -> "Report":
        async with progress_shown() as watch:
            return await run_bench(targets, settings, watch=watch)

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(run() if progress else run_bench(targets, settings))
    finally:
        if progress:
            show_line("")
