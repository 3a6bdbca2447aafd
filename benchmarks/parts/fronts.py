"""What fronts cost: the CPU time of reading, queueing and writing one request, with one front (the server itself) and with more."""

from collections.abc import Mapping
from contextlib import ExitStack, suppress

import psutil

from benchmarks.harness.result import Result
from benchmarks.harness.rounds import LATENCIES, Measurements, Rounds, micro, of_load, spreads, start_all, times
from benchmarks.harness.servers import Server, load, serving, weir_command
from benchmarks.parts.kserve import SIMPLE, simple_body

FRONTS = (1, 2, 4)
SQUARE, KSERVE = "square", "KServe JSON"
CASES = {f"{what}, {connections}": (what, connections) for what in (SQUARE, KSERVE) for connections in (1, 64, 256)}
MOST_TIMES = 1.25  # CPU time of fronts and dispatcher, as a multiple of that of one front
MOST_MORE = 60e-6  # seconds by which p50 over one connection may grow
DISPATCHER = 5e-6  # seconds of CPU per request


def _name(fronts: int) -> str:
    return f"--fronts {fronts}"


def _start(stack: ExitStack) -> Mapping[str, Mapping[str, Server]]:
    found: dict[str, dict[str, Server]] = {_name(fronts): {} for fronts in FRONTS}
    for what, target, path, body in (
        (SQUARE, "benchmarks.models:Square", "/infer/square", b"3"),
        (KSERVE, "benchmarks.models:Simple", SIMPLE, simple_body()),
    ):
        servers = start_all(
            stack,
            (
                serving(
                    _name(fronts),
                    weir_command(target, "--max-batch-size", "64", "--fronts", str(fronts)),
                    path=path,
                    body=body,
                    expected=None,
                )
                for fronts in FRONTS
            ),
        )
        for name, server in servers.items():
            found[name][what] = server
    return found


def _seconds(server: Server) -> dict[str, float]:
    """Return the CPU time used so far, of the dispatcher, its fronts and its workers."""
    spent = {"dispatcher": _cpu(server.front), "fronts": 0.0, "workers": 0.0}
    for process in server.front.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            spent["fronts" if "weir.fronts.entry" in process.cmdline() else "workers"] += _cpu(process)
    return spent


def _cpu(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def _one(servers: Mapping[str, Server], case: str, seconds: float) -> dict[str, float]:
    what, connections = CASES[case]
    server = servers[what]
    before = _seconds(server)
    done = load(server.url, connections, seconds, body=server.body)
    after = _seconds(server)
    spent = {name: (after[name] - before[name]) / done.requests for name in before}
    return of_load(done, server) | spent | {"edge": spent["dispatcher"] + spent["fronts"]}


def _conclude(result: Result, measured: Measurements) -> None:
    alone, two = _name(1), _name(2)
    for case in CASES:
        result.values[f"times {case}"] = measured.times(two, alone, case, "edge")
    for what in (SQUARE, KSERVE):
        dearer = result.values[f"times {what}, 256"]
        result.at_most(f"{what}, 256 connections: at most {MOST_TIMES} times the CPU of one front", dearer, MOST_TIMES)
    spent = measured.middle(two, f"{SQUARE}, 256", "dispatcher")
    result.at_most("dispatcher: at most 5 µs of CPU per request", spent * 1e6, DISPATCHER * 1e6, "{:.1f}")
    more = measured.middle(two, f"{SQUARE}, 1", "p50") - measured.middle(alone, f"{SQUARE}, 1", "p50")
    result.at_most("1 connection: p50 at most 60 µs more", more * 1e6, MOST_MORE * 1e6, "{:.0f}")


PART = Rounds(
    "fronts",
    "Several fronts",
    "One worker process, batches of up to 64; wrk with one thread runs on the same cores. The CPU time of fronts and dispatcher counts, not the rate: two cores"
    " run the load and all processes.",
    start=_start,
    one=_one,
    contenders=tuple(map(_name, FRONTS)),
    cases=tuple(CASES),
    heads=("requests, connections", "server"),
    columns=(
        micro("CPU µs dispatcher", "dispatcher"),
        micro("CPU µs fronts", "fronts"),
        micro("CPU µs both", "edge"),
        times("times one front", _name(1), figure="edge"),
        micro("CPU µs workers", "workers"),
        spreads("requests/s"),
        *LATENCIES,
    ),
    conclude=_conclude,
)  # fmt: skip
