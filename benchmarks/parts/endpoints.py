"""Every endpoint of one server under the loads that the AMD Inference Server measured itself with, by `weir bench`."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks.harness.result import Result
from benchmarks.harness.rounds import Measurements, Rounds, medians, spreads
from benchmarks.harness.servers import ROOT, environment, free_port, serving, weir_command
from benchmarks.parts.kserve import SIMPLE, simple_body

NATIVE, IN_PROCESS = "HTTP, native", "in process"
ITEM_NATIVE, ITEM_IN_PROCESS = "one number: HTTP, native", "one number: in process"
# What `weir bench` is given.
TARGETS = {
    NATIVE: "{http}/infer/simple",
    "HTTP, KServe JSON": "{http}/v2/models/simple/infer",
    "HTTP, KServe binary": "{http}/v2/models/simple/infer#binary",
    "gRPC": "{grpc}/simple",
    "WebSocket, JSON": "{ws}/simple",
    "WebSocket, binary": "{ws}/simple#binary",
    IN_PROCESS: "--in-process=benchmarks.models:Simple",
    ITEM_NATIVE: "{http}/infer/square",
    ITEM_IN_PROCESS: "--in-process=benchmarks.models:Square",
}
SINGLE, SERVER, OFFLINE = "SingleStream", "Server", "Offline"
RATE, CALLERS = 500, 64


class Shape(NamedTuple):
    """How an endpoint is called: flags of `weir bench`."""

    flags: tuple[str, ...]
    about: str


SHAPES = {
    SINGLE: Shape(("--concurrency", "1"), "one caller"),
    SERVER: Shape(("--arrivals", "poisson", "--rate", str(RATE)), f"{RATE} requests/s at random instants"),
    OFFLINE: Shape(("--concurrency", str(CALLERS)), f"{CALLERS} requests at once"),
}


def _start(stack: ExitStack) -> Mapping[str, Any]:
    port = free_port()
    server = stack.enter_context(serving("Weir", _command(port), path=SIMPLE, body=simple_body(), expected=None))
    places = {
        "http": f"http://127.0.0.1:{server.port}",
        "ws": f"ws://127.0.0.1:{server.port}",
        "grpc": f"grpc://127.0.0.1:{port}",
    }
    return {endpoint: target.format(**places) for endpoint, target in TARGETS.items()}


def _command(grpc_port: int) -> list[str]:
    command = weir_command("benchmarks.models:Simple", "benchmarks.models:Square", "--grpc-port", str(grpc_port))
    return [*command, "--max-batch-size", "64"]


def _bench(url: str, shape: str, seconds: float) -> dict[str, Any]:
    """Return the outcome of one run of the load generator. Times are in seconds."""
    command = [sys.executable, "-m", "weir", "bench", url, *SHAPES[shape].flags, "--duration", f"{seconds:g}"]
    command += ["--max-lag-ms", "1e9", "--json", "-"]  # the lag is in the table
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    (outcome,) = json.loads(done.stdout)["outcomes"].values()
    if outcome["answered"] != outcome["requests"]:
        raise RuntimeError(f"{url}: not all were answered: {outcome['errors']}")
    figures = {name: outcome[f"{name}_ms"]["value"] / 1000 for name in ("p50", "p90", "p99")}
    batches = {"batch": outcome["batches"]["mean_rows"]} if outcome["batches"] else {}
    return figures | batches | {"rate": outcome["throughput"], "lag": outcome["lag"]["p99_ms"] / 1000}


def _conclude(result: Result, measured: Measurements) -> None:
    result.values |= {endpoint: measured.middle(endpoint, OFFLINE) for endpoint in TARGETS}
    for mine, http, what in ((IN_PROCESS, NATIVE, "tensors"), (ITEM_IN_PROCESS, ITEM_NATIVE, "one number")):
        times = result.values[mine] / result.values[http]
        result.at_least(f"{what}: in process at least 3 times native HTTP", times, 3)
    shapes = "; ".join(f"{name}: {shape.about}" for name, shape in SHAPES.items())
    result.notes.append(
        f"{shapes}. The load generator is one Python process, and its own cost is most of what fast endpoints show; for the server's, see the tables measured with wrk."
    )


ENDPOINTS = Rounds(
    "endpoints",
    "Every endpoint of one server",
    "Two INT32 [1,16] tensors in, two out, one worker process, called by `weir bench` in three ways.",
    start=_start,
    one=_bench,
    contenders=tuple(TARGETS),
    cases=tuple(SHAPES),
    heads=("endpoint",),
    columns=(
        medians(f"{SINGLE}: p50 ms", "p50", case=SINGLE),
        medians("p90 ms", "p90", case=SINGLE),
        medians(f"{SERVER}: p50 ms", "p50", case=SERVER),
        medians("p99 ms", "p99", case=SERVER),
        medians("send lag p99 ms", "lag", case=SERVER),
        spreads(f"{OFFLINE}: requests/s", case=OFFLINE),
        medians("p50 ms", "p50", case=OFFLINE),
        medians("mean batch", "batch", "{:.1f}".format, case=OFFLINE),
    ),
    conclude=_conclude,
    row_each=True,
)
