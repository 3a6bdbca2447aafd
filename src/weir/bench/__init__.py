"""A load generator: open loop, true to the microsecond as far as it can be, and honest about how far that was.

    from weir.bench import bench
    report = bench("http://localhost:8000/infer/square", rate=500, duration=30)
    print(report.outcome.p99_ms.value, report.outcome.errors)

rounds.py    when requests leave, and one round of them: open or closed loop
target.py    what is under load, the ledger of a round, and what a server counts of its batches
targets/     servers over HTTP, gRPC and WebSocket, and models in this process
run.py       all rounds of all targets, and what was measured
report.py    the progress bar, tables, Markdown, JSON and the figure
vectors.py   the tables of a server of sentence vectors
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import uvloop

from weir.bench.report import Display
from weir.bench.rounds import LoadSettings
from weir.bench.run import Lag, Outcome, Report, run_bench
from weir.bench.target import Target
from weir.bench.targets import make_target
from weir.bench.targets.http import HttpOptions, HttpTarget
from weir.bench.targets.inprocess import InProcessTarget
from weir.errors import SettingsError
from weir.model import Model
from weir.serving.service import Service
from weir.simulation.statistics import Estimate

__all__ = [
    "Estimate", "HttpOptions", "HttpTarget", "InProcessTarget", "Lag", "LoadSettings", "Outcome", "Report", "Target",
    "bench", "make_target", "run_bench", "run_shown",
]  # fmt: skip


def bench(
    *targets: str | type[Model] | type[Service] | Target, data: str | Sequence[Any] | None = None,
    headers: Mapping[str, str] | None = None, timeout: float = 10.0, progress: bool = False, **settings: Any,
) -> Report:  # fmt: skip
    """Put load on `targets`, one beside the other, and return what was measured.

    A target is a URL (http://HOST:PORT/PATH, https, http://unix:SOCKET:/PATH, grpc://HOST:PORT/MODEL or ws://HOST:PORT/MODEL), a model's
    class, which is served in this process, or a Target already made (InProcessTarget takes settings of the service). `data`, `headers` and `timeout` are
    of HttpTarget; `settings` those of LoadSettings: `arrivals`, `rate`, `duration`, `concurrency`, `warm_up`, `rounds`,
    `seed`, `max_lag_ms`.

    `progress` shows a bar on stderr. Runs an event loop of its own; within one, await `run_bench`. Raises SettingsError when a setting is wrong or a target
    cannot be had. A run that is no measurement says so in the report's `failures`.
    """
    with suppress(RuntimeError):  # what it raises where there is none
        asyncio.get_running_loop()
        raise SettingsError(
            "bench: cannot run where an event loop runs; await run_bench([target, ...], LoadSettings(...))"
        )
    options = HttpOptions(headers=headers or {}, timeout=timeout)
    made = [_target(each, data, options) for each in targets]
    return run_shown(made, LoadSettings(**settings), progress=progress)


def run_shown(targets: Sequence[Target], settings: LoadSettings, *, progress: bool) -> Report:
    """Await `run_bench` in an event loop of its own, with a bar on stderr if `progress`."""

    async def run(display: Display) -> Report:
        shown = asyncio.ensure_future(display.run())
        try:
            return await run_bench(targets, settings, watch=display.watch)
        finally:
            shown.cancel()

    with Display(progress) as display, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(display))


def _target(target: Any, data: str | Sequence[Any] | None, options: HttpOptions) -> Target:
    if isinstance(target, str):
        return make_target(target, data, options)
    if isinstance(target, type):
        return InProcessTarget(target, data, timeout=options.timeout)
    made: Target = target
    return made
