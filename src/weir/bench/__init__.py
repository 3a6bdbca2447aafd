"""A load generator: it sends requests at exact instants (an open loop), and reports how late each one was actually sent.

    from weir.bench import bench
    report = bench("http://localhost:8000/infer/square", rate=500, duration=30)
    print(report.outcome.p99_ms.value, report.outcome.errors)

run.py      one round of requests, an open or a closed loop; all rounds of all targets, and the results
target.py   the contract of a target, the ledger of a round, the batches that a server counts; and a model in this process
server.py   an endpoint of a server: any path that accepts POST, or the Open Inference Protocol over HTTP, gRPC and WebSocket
report.py   the progress line, tables, Markdown, JSON and the figure
vectors.py  the tables for a server of text vectors
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import uvloop

from weir.bench.report import Progress
from weir.bench.run import Lag, LoadSettings, Outcome, Report, run_bench
from weir.bench.server import HttpOptions, ServerTarget
from weir.bench.target import InProcessTarget, Target
from weir.errors import SettingsError
from weir.model import Model
from weir.serving.service import Service
from weir.simulation.statistics import Estimate

__all__ = [
    "Estimate", "HttpOptions", "InProcessTarget", "Lag", "LoadSettings", "Outcome", "Report", "ServerTarget", "Target",
    "bench", "run_bench", "run_shown",
]  # fmt: skip


def bench(
    *targets: str | type[Model] | type[Service] | Target,
    data: str | Sequence[Any] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 10.0,
    progress: bool = False,
    **settings: Any,
) -> Report:
    """Put the same load on `targets`, in turns, and return the results.

    Arguments:
        targets: each is a URL (http://HOST:PORT/PATH, https, http://unix:SOCKET:/PATH, grpc://HOST:PORT/MODEL or
            ws://HOST:PORT/MODEL), a model's class, which is served in this process, or a Target (InProcessTarget takes
            settings of the service).
        data: the bodies to send; see `read_payloads`. None sends the model's own example.
        headers: headers of each HTTP request.
        timeout: seconds until a request counts as failed.
        progress: whether to show the progress in a line on stderr.
        settings: those of LoadSettings: `arrivals`, `rate`, `duration`, `concurrency`, `warm_up`, `rounds`, `seed`,
            `max_lag_ms`.

    This runs an event loop of its own; within an event loop, await `run_bench` instead. Raises SettingsError for a wrong setting
    or a target that does not answer. If the measurement is invalid, the report's `failures` say why.
    """
    with suppress(RuntimeError):  # raised if no event loop runs
        asyncio.get_running_loop()
        raise SettingsError(
            "bench: cannot run where an event loop runs; await run_bench([target, ...], LoadSettings(...))"
        )
    load = LoadSettings(**settings)
    connections = load.concurrency or HttpOptions.max_connections
    options = HttpOptions(headers=headers or {}, timeout=timeout, max_connections=connections)
    return run_shown([_target(each, data, options) for each in targets], load, progress=progress)


def run_shown(targets: Sequence[Target], settings: LoadSettings, *, progress: bool) -> Report:
    """Run `run_bench` in an event loop of its own, with its progress in a line on stderr if `progress`. Raises what it raises."""
    if not progress:
        return uvloop.run(run_bench(targets, settings))
    line = Progress()

    async def run() -> Report:
        showing = asyncio.ensure_future(line.run())
        try:
            return await run_bench(targets, settings, watch=line.watch)
        finally:
            showing.cancel()

    try:
        return uvloop.run(run())
    finally:
        line.clear()


def _target(target: Any, data: str | Sequence[Any] | None, options: HttpOptions) -> Target:
    if isinstance(target, str):
        return ServerTarget(target, data, options)
    if isinstance(target, type):
        return InProcessTarget(target, data, timeout=options.timeout)
    made: Target = target
    return made
