"""Every door of one server under the loads that the AMD Inference Server measured itself with, by `weir bench`."""

import json
import subprocess
import sys
from collections import defaultdict
from typing import Any, NamedTuple

from benchmarks.harness.kserve import SIMPLE, simple_body
from benchmarks.harness.result import Part, Result, Run, count, middle, milliseconds, rotated, spread
from benchmarks.harness.servers import ROOT, environment, free_port, serving, weir_command

NATIVE, IN_PROCESS = "HTTP, native", "in process"
ITEM_NATIVE, ITEM_IN_PROCESS = "one number: HTTP, native", "one number: in process"
# What `weir bench` is given.
DOORS = {
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
    """How a door is asked: flags of `weir bench`."""

    flags: tuple[str, ...]
    about: str


SHAPES = {
    SINGLE: Shape(("--concurrency", "1"), "one caller, who asks again when he has his answer"),
    SERVER: Shape(("--arrivals", "poisson", "--rate", str(RATE)), f"{RATE} requests/s that come by chance"),
    OFFLINE: Shape(("--concurrency", str(CALLERS)), f"{CALLERS} requests under way all the time"),
}
Seen = dict[tuple[str, str], list[dict[str, Any]]]


def measure(run: Run) -> Result:
    """Ask each door in each shape, in turns."""
    seen: Seen = defaultdict(list)
    port = free_port()
    with serving("Weir", _command(port), path=SIMPLE, body=simple_body(), expected=None) as server:
        places = {
            "http": f"http://127.0.0.1:{server.port}",
            "ws": f"ws://127.0.0.1:{server.port}",
            "grpc": f"grpc://127.0.0.1:{port}",
        }
        for turn in range(run.rounds):
            for shape in SHAPES:
                for door in rotated(tuple(DOORS), turn):
                    url = DOORS[door].format(**places)
                    outcome = _bench(url, SHAPES[shape], run.seconds)
                    seen[door, shape].append(outcome)
                    run.step(f"{door}, {shape}: {count(outcome['throughput'])} requests/s")
    return _result(seen)


def _command(grpc_port: int) -> list[str]:
    command = weir_command("benchmarks.models:Simple", "benchmarks.models:Square", "--grpc-port", str(grpc_port))
    return [*command, "--max-batch-size", "64"]


def _bench(url: str, shape: Shape, seconds: float) -> dict[str, Any]:
    """Return the outcome of one run of the load generator."""
    command = [sys.executable, "-m", "weir", "bench", url, *shape.flags, "--duration", f"{seconds:g}"]
    command += ["--max-lag-ms", "1e9", "--json", "-"]  # the lag is in the table
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    (outcome,) = json.loads(done.stdout)["outcomes"].values()
    if outcome["answered"] != outcome["requests"]:
        raise RuntimeError(f"{url}: not all were answered: {outcome['errors']}")
    return dict(outcome)


def _result(seen: Seen) -> Result:
    result = Result([
        "door", f"{SINGLE}: p50 ms", "p90 ms", f"{SERVER}: p50 ms", "p99 ms", "send lag p99 ms",
        f"{OFFLINE}: requests/s", "p50 ms", "mean batch",
    ])  # fmt: skip
    for door in DOORS:
        single, server, offline = (seen[door, shape] for shape in SHAPES)
        rates = [each["throughput"] for each in offline]
        batches = [each["batches"]["mean_rows"] for each in offline if each["batches"]]
        result.rows.append([
            door, _ms(single, "p50_ms"), _ms(single, "p90_ms"), _ms(server, "p50_ms"), _ms(server, "p99_ms"),
            milliseconds(middle([each["lag"]["p99_ms"] / 1000 for each in server])), spread(rates, count),
            _ms(offline, "p50_ms"), f"{middle(batches):.1f}" if batches else "",
        ])  # fmt: skip
        result.values[door] = middle(rates)
    for mine, http, what in ((IN_PROCESS, NATIVE, "tensors"), (ITEM_IN_PROCESS, ITEM_NATIVE, "one number")):
        times = result.values[mine] / result.values[http]
        result.goal(f"{what}: in process at least 3 times native HTTP", f"{times:.2f}", times >= 3)
    result.notes += [f"{name}: {shape.about}." for name, shape in SHAPES.items()]
    result.notes.append(
        "The load generator is one Python process: where a door is fast, its own cost is most of what is seen. What the "
        "server alone can do is in the tables that are measured with wrk."
    )
    return result


def _ms(outcomes: list[dict[str, Any]], name: str) -> str:
    return milliseconds(middle([each[name]["value"] / 1000 for each in outcomes]))


PART = Part(
    "doors",
    "Every door of one server",
    "Two INT32 [1,16] tensors in, two out, one worker process, asked by `weir bench` in the three shapes that the AMD "
    "Inference Server measures itself in.",
    lambda rounds: rounds * len(SHAPES) * len(DOORS),
    measure,
)
