"""A thousand clients that send one byte a second, and what the others notice."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from benchmarks.load import Load, load
from benchmarks.result import Part, Result, Run, count, middle, milliseconds, ratio, rotated, spread
from benchmarks.servers import ROOT, environment, serving, weir_command

CLIENTS = 1000
CONNECTIONS = 64
PATH = "/infer/square"
ALONE = "without"
ELSEWHERE = f"{CLIENTS:,} slow clients at a process that never reads"
BESIDE = f"{CLIENTS:,} slow clients at this server"


def measure(run: Run) -> Result:
    """Alternate rounds: nobody else, the slow clients at a server that does nothing, the slow clients at ours."""
    rounds: dict[str, list[Load]] = {name: [] for name in (ALONE, ELSEWHERE, BESIDE)}
    command = weir_command("benchmarks.models:Square", "--max-batch-size", "64")
    with serving("Weir", command, path=PATH, body=b"3", expected=b"9") as server, _sink() as sink:
        load(server.url, CONNECTIONS, run.seconds)
        for turn in range(run.rounds):
            for name in rotated((ALONE, ELSEWHERE, BESIDE), turn):
                with _company(name, server.port, sink):
                    rounds[name].append(load(server.url, CONNECTIONS, run.seconds))
                run.step(f"{name}: p99 {milliseconds(rounds[name][-1].p99)} ms")
    return _result(rounds)


def _company(name: str, port: int, sink: int) -> AbstractContextManager[None]:
    if name == ALONE:
        return nullcontext()
    return slow_clients(port if name == BESIDE else sink)


@contextmanager
def _sink() -> Iterator[int]:
    """Run a server that never reads; its port."""
    with _child("benchmarks.runs.sink") as first_line:
        yield int(first_line)


@contextmanager
def slow_clients(port: int) -> Iterator[None]:
    """Run them until the end of the block, from the moment when all are connected."""
    with _child("benchmarks.runs.slow_clients", "127.0.0.1", str(port), PATH, str(CLIENTS)) as first_line:
        if first_line != b"ready\n":
            raise RuntimeError("the slow clients could not connect")
        yield


@contextmanager
def _child(module: str, *arguments: str) -> Iterator[bytes]:
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError(f"no pipes to {module}")
        try:
            yield process.stdout.readline()
        finally:
            process.stdin.close()
            process.wait(30)


def _result(rounds: dict[str, list[Load]]) -> Result:
    result = Result(["", "requests/s", "p50 ms", "p99 ms"])
    for name, loads in rounds.items():
        result.rows.append([
            name, spread([seen.rate for seen in loads], count), milliseconds(middle([seen.p50 for seen in loads])),
            spread([seen.p99 for seen in loads], milliseconds),
        ])  # fmt: skip
    p99 = {name: [seen.p99 for seen in loads] for name, loads in rounds.items()}
    moved, of_machine = ratio(p99[BESIDE], p99[ELSEWHERE]), ratio(p99[ELSEWHERE], p99[ALONE])
    result.goal("the others' p99 moves by less than 20 %", f"{100 * (moved - 1):+.1f} %", moved < 1.2)
    result.values["p99 moved"] = moved
    result.notes.append(
        "The clients need a share of the two cores themselves: sending to a process that never reads, they already move "
        f"the p99 by {100 * (of_machine - 1):+.1f} %. What the server adds is compared with that; all together it is "
        f"{100 * (ratio(p99[BESIDE], p99[ALONE]) - 1):+.1f} %."
    )
    return result


PART = Part(
    "slow-clients",
    "A thousand slow clients",
    f"Square, {CONNECTIONS} connections, alone and while {CLIENTS:,} clients run that send their requests one byte a second.",
    lambda rounds: rounds * 3,
    measure,
)
