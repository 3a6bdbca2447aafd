"""A thousand clients that send one byte a second, and what the others notice.

The child `clients HOST PORT PATH CLIENTS` connects again when it is turned away, and prints "ready" when all are connected; the child
`sink` accepts connections, never reads from them, and prints its port. Both end when their input does.
"""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import uvloop

from benchmarks.harness.result import Part, Result, Run, count, middle, milliseconds, ratio, rotated, spread
from benchmarks.harness.servers import ROOT, Load, environment, load, serving, weir_command

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
    with _child("sink") as first_line:
        yield int(first_line)


@contextmanager
def slow_clients(port: int) -> Iterator[None]:
    """Run them until the end of the block, from the moment when all are connected."""
    with _child("clients", "127.0.0.1", str(port), PATH, str(CLIENTS)) as first_line:
        if first_line != b"ready\n":
            raise RuntimeError("the slow clients could not connect")
        yield


@contextmanager
def _child(*arguments: str) -> Iterator[bytes]:
    command = [sys.executable, "-m", "benchmarks.parts.slow_clients", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError(f"no pipes to {arguments[0]}")
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


async def run_client(host: str, port: int, request: bytes, connected: asyncio.Semaphore) -> None:
    """Be run_client slow client for ever."""
    first = True
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
            if first:
                connected.release()
                first = False
            for byte in request:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)
            writer.close()
        except OSError:
            await asyncio.sleep(1)


async def run_clients(host: str, port: int, path: str, clients: int) -> None:
    """Run all of them until the input ends."""
    request = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    connected = asyncio.Semaphore(0)
    tasks = []
    for _ in range(clients):
        tasks.append(asyncio.create_task(run_client(host, port, request.encode() + b"1" * 100, connected)))
        await asyncio.sleep(0.001)  # not all their bytes at the same instant
    for _ in range(clients):
        await connected.acquire()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()


def accept(listener: socket.socket) -> None:
    """Keep whatever connects, and let the kernel keep what it sends."""
    kept = []
    while True:
        kept.append(listener.accept()[0])


PART = Part(
    "slow-clients",
    "A thousand slow clients",
    f"Square, {CONNECTIONS} connections, alone and while {CLIENTS:,} clients run that send their requests one byte a second.",
    lambda rounds: rounds * 3,
    measure,
)


def run_sink() -> None:
    """Print the port; accept until the input ends."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "sink":
        run_sink()
    else:
        uvloop.run(run_clients(sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
