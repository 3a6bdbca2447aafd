"""A thousand clients that send one byte a second, and what the others notice."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.load import Load, load
from benchmarks.result import Part, Result, Run, count, middle, milliseconds, ratio, spread
from benchmarks.servers import ROOT, Server, environment, serving, weir_command

CLIENTS = 1000
CONNECTIONS = 64
PATH = "/infer/square"


def measure(run: Run) -> Result:
    """Alternate rounds without and with them."""
    without: list[Load] = []
    beside: list[Load] = []
    command = weir_command("benchmarks.models:Square", "--max-batch-size", "64")
    with serving("Weir", command, path=PATH, body=b"3", expected=b"9") as server:
        load(server.url, CONNECTIONS, run.seconds)
        for _ in range(run.rounds):
            without.append(load(server.url, CONNECTIONS, run.seconds))
            run.step(f"without: p99 {milliseconds(without[-1].p99)} ms")
            with slow_clients(server):
                beside.append(load(server.url, CONNECTIONS, run.seconds))
            run.step(f"beside {CLIENTS} slow clients: p99 {milliseconds(beside[-1].p99)} ms")
    return _result(without, beside)


@contextmanager
def slow_clients(server: Server) -> Iterator[None]:
    """Run them until the end of the block, from the moment when all are connected."""
    command = [sys.executable, "-m", "benchmarks.runs.slow_clients", "127.0.0.1", str(server.port), PATH, str(CLIENTS)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes to the slow clients")
        try:
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("the slow clients could not connect")
            yield
        finally:
            process.stdin.close()
            process.wait(30)


def _result(without: list[Load], beside: list[Load]) -> Result:
    result = Result(["", "requests/s", "p50 ms", "p99 ms"])
    for name, loads in (("without", without), (f"beside {CLIENTS} slow clients", beside)):
        result.rows.append([
            name, spread([seen.rate for seen in loads], count), milliseconds(middle([seen.p50 for seen in loads])),
            spread([seen.p99 for seen in loads], milliseconds),
        ])  # fmt: skip
    moved = ratio([seen.p99 for seen in beside], [seen.p99 for seen in without])
    result.goal("the others' p99 moves by less than 20 %", f"{100 * (moved - 1):+.1f} %", moved < 1.2)
    result.values["p99 moved"] = moved
    return result


PART = Part(
    "slow-clients",
    "A thousand slow clients",
    f"Square, {CONNECTIONS} connections, alone and beside {CLIENTS:,} clients that send their requests one byte a second.",
    lambda rounds: rounds * 2,
    measure,
)
