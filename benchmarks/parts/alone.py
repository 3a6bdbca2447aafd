"""A request that few wait beside: one to 64 connections, each of which waits for its response; what one request costs Weir; and whether its rate depends on
the start.

A number squared as JSON, and two small tensors of the Open Inference Protocol as JSON. All servers but the one that is measured are stopped meanwhile.
What a request costs is counted in a server of its own: Python calls by sys.setprofile (counting/), system calls by strace where that is installed.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import grpc
import psutil
from reproduction.drawing import figure, plain_log, styles

from benchmarks.counting.sitecustomize import SIGNAL
from benchmarks.harness.result import Result, Table, count, short, spread
from benchmarks.harness.rounds import (
    LATENCIES,
    Measurements,
    Rounds,
    folder,
    micro,
    spreads,
    start_all,
    with_usage,
)
from benchmarks.harness.servers import ROOT, Server, free_port, load, serving
from benchmarks.parts import kserve
from benchmarks.parts.square import LITSERVE, MOSEC, NOTHING, SINGLE, WEIR, command_of, started

WEIR_KSERVE = "Weir, KServe v2"
SQUARES = (WEIR, SINGLE, MOSEC, LITSERVE, NOTHING)
TENSORS = (WEIR_KSERVE, kserve.TRITON, kserve.MLSERVER)
CONNECTIONS = (1, 2, 4, 8, 16, 32, 64)
PICTURE = ROOT / "docs" / "pictures" / "alone.png"
FEW = (4, 8, 16)  # connections, at which servers once had one of two rates by chance of their start
STARTS = 10
REQUESTS = 1000  # that are counted
TIMED = 20 * REQUESTS  # whose CPU time is taken: clocks tick every 10 ms
COUNTING = Path(__file__).parents[1] / "counting"


def _start(stack: ExitStack) -> Mapping[str, Server]:
    servers = started(stack, SQUARES)
    tensors = start_all(stack, kserve.servers((kserve.WEIR, kserve.TRITON, kserve.MLSERVER), {}))
    servers |= {WEIR_KSERVE if name == kserve.WEIR else name: server for name, server in tensors.items()}
    _stop(servers)
    return servers


def _stop(servers: Mapping[str, Server]) -> None:
    for server in servers.values():
        server.pause()


def _one(server: Server, connections: int, seconds: float) -> dict[str, float]:
    server.resume()
    try:
        return with_usage(server, lambda: load(server.url, connections, seconds, body=server.body))
    finally:
        server.pause()


def _conclude(result: Result, measured: Measurements) -> None:
    result.values |= measured.values()
    result.values |= {f"{name} p50": value for name, value in measured.values("p50").items()}
    result.at_least("1 connection: as many requests as mosec with batches of 1", measured.times(WEIR, SINGLE, 1), 1.0)
    result.at_least(
        "1 connection, KServe JSON: twice as many as Triton", measured.times(WEIR_KSERVE, kserve.TRITON, 1), 2.0
    )
    result.at_most("1 connection: CPU µs of server and worker", 1e6 * measured.middle(WEIR, 1, "all"), 80.0, "{:.0f}")
    result.tables.append(
        Table(
            "What one request costs",
            ["process", "Python calls", "system calls", "turns of the loop", "context switches", "CPU µs"],
            list(_costs()),
        )
    )
    starts = Table(f"{STARTS} starts", ["connections", "requests/s", "rows a batch"], [])
    for connections, rates, sizes in _starts():
        starts.rows.append([str(connections), spread(rates, count), spread(sizes, short)])
        result.at_least(f"{connections} connections: the slowest start, of the fastest", min(rates) / max(rates), 0.8)
    result.tables.append(starts)
    _draw(measured.run.picture(PICTURE), measured)


class Used(NamedTuple):
    """What a process has used: CPU seconds, and how often its threads have waited."""

    seconds: float
    switches: int


def _used(process: psutil.Process) -> Used:
    used = process.cpu_times()
    threads = Path(f"/proc/{process.pid}/task").glob("*/status")
    waits = [re.search(r"^voluntary_ctxt_switches:\s*(\d+)", each.read_text(), re.M) for each in threads]
    return Used(used.user + used.system, sum(int(each[1]) for each in waits if each))


def _starts() -> Iterator[tuple[int, list[float], list[float]]]:
    """Yield, for some numbers of connections, the requests per second and the rows of a batch after each of several starts."""
    found: dict[int, list[tuple[float, float]]] = {connections: [] for connections in FEW}
    for _ in range(STARTS):
        with serving(WEIR, command_of(WEIR)[0], path="/infer/square", body=b"3", expected=b"9") as server:
            for connections, of_starts in found.items():
                before = _batched(server)
                done = load(server.url, connections, 1.0)
                rows, batches = (after - early for after, early in zip(_batched(server), before, strict=True))
                of_starts.append((done.rate, rows / batches))
    for connections, of_starts in found.items():
        rates, sizes = zip(*of_starts, strict=True)
        yield connections, list(rates), list(sizes)


def _batched(server: Server) -> tuple[float, float]:
    """Return how many rows the server has computed, and in how many batches."""
    with urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
        text = response.read().decode()
    rows, batches = (re.search(rf"^weir_batch_size_{each}\S* (\S+)", text, re.M) for each in ("sum", "count"))
    assert rows is not None
    assert batches is not None
    return float(rows[1]), float(batches[1])


Send = Callable[[Server, int], None]  # sends requests over one connection, each after the response to the one before


def _costs() -> Iterator[list[str]]:
    """Yield a row for the server and one for its worker: what one request costs that nobody waits beside."""
    port = str(free_port())
    yield from _costs_of("HTTP", command_of(WEIR)[0], "/infer/square", b"3", _send)
    call = kserve.command(kserve.WEIR, port)
    yield from _costs_of("gRPC", call, kserve.SIMPLE, kserve.simple_body(), partial(_call, port))


def _costs_of(name: str, command: Sequence[str], path: str, body: bytes, send: Send) -> Iterator[list[str]]:
    with ExitStack() as stack:
        counted = folder(stack)
        variables = [f"COUNTED={counted}", f"PYTHONPATH={os.pathsep.join(map(str, (COUNTING, ROOT / 'src', ROOT)))}"]
        server = stack.enter_context(serving(name, ["env", *variables, *command], path=path, body=body, expected=None))
        send(server, REQUESTS)
        worker = max(server.front.children(recursive=True), key=lambda process: sum(process.cpu_times()[:2]))
        parts = {"server": server.front, "worker": worker}
        before = {part: _used(process) for part, process in parts.items()}
        send(server, TIMED)
        after = {part: _used(process) for part, process in parts.items()}
        calls = _python_calls(lambda: send(server, REQUESTS), parts, counted)
        for part, process in parts.items():
            seconds = (after[part].seconds - before[part].seconds) / TIMED
            switches = (after[part].switches - before[part].switches) / TIMED
            of_system = _system_calls(lambda: send(server, REQUESTS), process)
            yield [f"{name}, {part}", short(calls[part]), *of_system, short(switches), short(1e6 * seconds)]


def _send(server: Server, requests: int) -> None:
    request = b"POST /infer/square HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n3"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(requests):
            connection.sendall(request)
            if not connection.recv(65536).endswith(b"9"):
                raise RuntimeError(f"{server.name} gave a wrong response")


def _call(port: str, server: Server, requests: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(kserve.METHOD, request_serializer=None, response_deserializer=None)
        body = kserve.request_body()
        for _ in range(requests):
            call(body, timeout=10)


def _python_calls(send: Callable[[], None], parts: Mapping[str, psutil.Process], folder: Path) -> dict[str, float]:
    for process in parts.values():
        process.send_signal(SIGNAL)
    time.sleep(0.3)  # a process that waits for work runs its handler now; nothing says when it has
    send()
    for process in parts.values():
        process.send_signal(SIGNAL)
    time.sleep(0.3)
    return {name: int((folder / str(process.pid)).read_text()) / REQUESTS for name, process in parts.items()}


def _system_calls(send: Callable[[], None], process: psutil.Process) -> list[str]:
    """Return how many system calls a request takes, and how many of them are turns of the event loop; nothing without strace."""
    if shutil.which("strace") is None:
        return ["", ""]
    command = ["strace", "-c", "-f", "-p", str(process.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        time.sleep(1.0)  # strace says that it is attached before it has seen every thread
        send()
        strace.send_signal(signal.SIGINT)
        _, words = strace.communicate()
    rows = re.findall(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", words, re.M)
    found = {name: int(calls) for calls, name in rows if name != "total"}
    return [short(calls / REQUESTS) for calls in (sum(found.values()), found.get("epoll_pwait", 0))]


def _draw(path: Path, measured: Measurements) -> None:
    with figure(path, 2, 2, size=(9.5, 6.5)) as (_, axes):
        for row, (names, title) in enumerate(
            ((SQUARES, "a number squared"), (TENSORS, "two small tensors, KServe v2 as JSON"))
        ):
            for column, (key, label, factor) in enumerate((("rate", "requests/s", 1.0), ("p50", "p50, ms", 1e3))):
                axis = axes[row, column]
                for name, style in zip(names, styles(), strict=False):
                    axis.plot(
                        CONNECTIONS,
                        [factor * measured.middle(name, each, key) for each in CONNECTIONS],
                        label=name,
                        **style,
                    )
                plain_log(axis, "x", "y")
                axis.set_xticks(CONNECTIONS, [str(each) for each in CONNECTIONS])
                axis.minorticks_off()
                axis.set_xlabel("connections")
                axis.set_ylabel(label)
                axis.set_title(title, fontsize=9)
                if not column:
                    axis.legend(loc="lower right", fontsize=7)


ALONE = Rounds(
    "alone",
    "One request at a time, and a few",
    "One worker process, JSON, batches of up to 64; mosec waits up to 5 ms for a batch, or not at all with batches of 1.\n\n"
    "![Requests per second and median latency over connections](pictures/alone.png)",
    start=_start,
    one=_one,
    contenders=(*SQUARES, *TENSORS),
    cases=CONNECTIONS,
    heads=("connections", "server"),
    columns=(spreads("requests/s"), *LATENCIES, micro("CPU µs", "all")),
    conclude=_conclude,
)
