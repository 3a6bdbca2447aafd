"""MLPerf LoadGen's scenario Server again, with settings: Weir and the peers of part `loadgen`, each with the best of as many settings.

LoadGen's arrivals are the same in each run but for the rate. A try is one run at one rate, where the 99th percentile of the latency is compared;
the rate of the best settings is then found by bisection.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.result import Part, Result, Run, Table, count, milliseconds
from benchmarks.parts.loadgen import (
    BOUND_MS,
    CLIENT_MS,
    CONTENDERS,
    SMALLEST_STEP,
    TIMED,
    Contender,
    Judge,
    Settings,
    forget,
    kept,
)
from benchmarks.peers.judged.computing import BUSY, FIXED, PER_ROW

WEIR = "Weir, HTTP"
PROBE = 150.0  # queries/s of a try
REACH = 1.2  # the best rate is sought so far above or below
TRY_QUERIES, QUERIES, QUICK_QUERIES = 1000, 1500, 700
QUICK_STEP = 0.05
OF_PEERS = [Settings(batch, wait) for batch in (8, 16, 32) for wait in (0, 10)]
OF_WEIR = [
    Settings(flags=flags)
    for flags in (
        "", "--pipeline-depth 2", "--policy control-limit:2", "--policy size-or-delay:size=4,delay=10ms",
        "--policy size-or-delay:size=8,delay=10ms", f"--policy auto:p99={BOUND_MS - CLIENT_MS:.0f}ms",
    )
]  # fmt: skip
NAMES = (WEIR, "mosec", "litserve", "Triton, KServe gRPC")
SWEPT = [each for each in CONTENDERS if each.name in NAMES]
COLUMNS = ["server", "valid queries/s", "p99 ms there", "best settings"]
TRIES = ["server", "settings", f"p99 ms at {PROBE:.0f}/s", "mean batch size", "busy"]


def settings_of(contender: Contender) -> list[Settings]:
    """Return the settings that are tried, of each server as many."""
    return OF_WEIR if contender.ours else OF_PEERS


def _measure(run: Run) -> Result:
    result, tries, rates = Result(COLUMNS), Table("Each try", TRIES, []), dict[str, float]()
    tried = [(each, settings) for each in SWEPT for settings in settings_of(each)]
    best: dict[str, tuple[float, Settings, bool]] = {}
    for (contender, settings), [p99, valid, size] in kept(run, "tries", tried, lambda each: _try(run, *each)):
        shown = milliseconds(p99) if valid else f"{milliseconds(p99)} (INVALID)"
        busy = (FIXED / size + PER_ROW) * PROBE
        tries.rows.append([contender.name, str(settings), shown, f"{size:.1f}", f"{100 * busy:.1f} %"])
        best[contender.name] = min(best.get(contender.name, (p99, settings, valid)), (p99, settings, valid))
        run.step(f"{contender.name}, {settings}: p99 {shown} ms")
    for contender, [rate, p99] in kept(run, "best", SWEPT, lambda each: _edge(run, each, *best[each.name][1:])):
        rates[contender.name] = rate
        result.rows.append([contender.name, count(rate), milliseconds(p99), f"`{best[contender.name][1]}`"])
        run.step(f"{contender.name}: {count(rate)} queries/s")
    result.tables.append(tries)
    _conclude(result, rates)
    return result


def _try(run: Run, contender: Contender, settings: Settings) -> tuple[float, bool, float]:
    """Return the 99th percentile in seconds at PROBE queries/s, infinite if LoadGen gave up, whether the run was valid, and the mean batch size."""
    with tempfile.NamedTemporaryFile() as file, _named(file.name), contender.start(TIMED, settings) as asked:
        before = len(_batches(file.name))
        found = _judge(run, asked, contender, TRY_QUERIES).run("Server", PROBE)
        batches = _batches(file.name)[before:]
    return found.get("p99_ns", float("inf")) / 1e9, found["valid"], sum(map(len, batches)) / max(1, len(batches))


def _edge(run: Run, contender: Contender, settings: Settings, valid: bool) -> tuple[float, float]:
    """Return the highest valid rate with these settings, of which it is known whether PROBE is `valid`, and the 99th percentile there in seconds."""
    forget(run, f"{contender.name} swept")
    step = QUICK_STEP if run.quick else 0.0
    low, high = (PROBE, PROBE * REACH) if valid else (PROBE / REACH, PROBE)
    with contender.start(TIMED, settings) as asked:
        judge = _judge(run, asked, contender, QUERIES)
        rate, there = judge.highest(high, low, step)
        if not there:
            rate, there = judge.highest(low, step=step)
    return rate, there.get("p99_ns", 0) / 1e9


def _judge(run: Run, asked: Any, contender: Contender, queries: int) -> Judge:
    return Judge(asked, f"{contender.name} swept", run, 1.0, QUICK_QUERIES if run.quick else queries)


@contextmanager
def _named(path: str) -> Iterator[None]:
    os.environ[BUSY] = path
    try:
        yield
    finally:
        del os.environ[BUSY]


def _batches(path: str) -> list[bytes]:
    return Path(path).read_bytes().splitlines()


def _conclude(result: Result, rates: dict[str, float]) -> None:
    result.values |= rates
    peer = max((name for name in rates if name != WEIR), key=rates.__getitem__)
    result.at_least(f"Weir swept, of the best peer swept ({peer})", rates[WEIR] / max(1.0, rates[peer]), 1.0)
    result.notes += [
        f"Of {len(OF_WEIR)} settings the best has the lowest p99 at {PROBE:.0f} queries/s ({count(TRY_QUERIES)} queries); its rate is found by bisection to {SMALLEST_STEP:g}/s, with "
        f"{count(QUERIES)} queries for each rate. The model, the bound and the arrivals are the same for all; each server has one worker process.",
    ]


SWEPT_PART = Part(
    "loadgen-swept",
    "Judged by MLPerf LoadGen, with the best settings",
    f"The scenario *Server* with the model that takes time; each server has the best of {len(OF_WEIR)} settings.",
    lambda rounds: len(SWEPT) * (len(OF_PEERS) + 1),
    _measure,
    round=f"{count(QUERIES)} queries",
)
