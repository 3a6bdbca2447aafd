"""Ten times more than the model can do; a thousand clients that send one byte a second; and the soak: hours of everything at once.

Children of this module: `load HOST PORT PATH RATE SECONDS CONNECTIONS BODY` is an open loop: requests leave at random instants of a given rate, whether
or not the answers come; it prints the answers by code, how many requests could not be sent, and the times of the good ones. `clients HOST PORT PATH
CLIENTS` are the slow clients: they connect again when they are turned away, and print "ready" when all are connected. `sink` accepts connections, never
reads from them, and prints its port. The last two end when their input does.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from statistics import quantiles
from typing import Any

import uvloop
from rich.console import Console

from benchmarks.harness.result import Result, count, mebibytes, middle, milliseconds, short, spread
from benchmarks.harness.rounds import Measurements, Rounds, medians, spreads
from benchmarks.harness.servers import ROOT, Server, ask_own, environment, load, serving, weir_command

WEIR = "Weir"
QUEUE = 64
TIMES = 10
OVERLOAD_PATH = "/infer/slow"


def _start_overload(stack: ExitStack) -> Mapping[str, Any]:
    command = weir_command("benchmarks.models:Slow", "--max-queue-size", str(QUEUE))
    return {WEIR: stack.enter_context(serving(WEIR, command, path=OVERLOAD_PATH, body=b"3", expected=b"3"))}


def _overload(server: Server, case: str, seconds: float) -> dict[str, float]:
    """Measure what the server can do with just enough connections, then ten times that in an open loop."""
    capacity = load(server.url, QUEUE, seconds).rate
    before = server.usage().memory_bytes
    seen = offer(server.port, OVERLOAD_PATH, TIMES * capacity, max(seconds, 2), 4 * QUEUE)
    codes = seen["codes"]
    others = {code: number for code, number in codes.items() if code not in ("200", "429", "unsent")}
    if others or seen["unanswered"]:
        raise RuntimeError(f"answers other than 200 and 429, or none: {seen}")
    return {
        "capacity": capacity,
        "offered": seen["offered_rate"],
        "good": seen["good_rate"],
        "goodput": seen["good_rate"] / capacity,
        "p50": seen["p50"],
        "p99": seen["p99"],
        "refused": codes.get("429", 0) / seen["sent"],
        "before": before,
        "after": server.usage().memory_bytes,
    }


def offer(port: int, path: str, rate: float, seconds: float, connections: int) -> dict[str, Any]:
    """Send "3" to a server of this machine in an open loop, from another process."""
    found: dict[str, Any] = ask_own("parts.overload", "load", "127.0.0.1", port, path, rate, seconds, connections, "3")
    return found


def _conclude_overload(result: Result, measured: Measurements) -> None:
    def of(figure: str) -> list[float]:
        return measured.of(WEIR, figure=figure)

    before, after = of("before")[0], of("after")[-1]
    result.rows += [
        ["capacity, responses/s", spread(of("capacity"), count)],
        ["offered, requests/s", spread(of("offered"), count)],
        ["good responses/s", spread(of("good"), count)],
        ["refused with 429", spread(of("refused"), lambda share: f"{100 * share:.1f} %")],
        ["p50 of the good, ms", spread(of("p50"), milliseconds)],
        ["p99 of the good, ms", spread(of("p99"), milliseconds)],
        ["memory before, MiB", mebibytes(before)],
        ["memory after, MiB", mebibytes(after)],
    ]
    goodput, times = middle(of("goodput")), middle(of("offered")) / middle(of("capacity"))
    result.at_least("goodput at least 0.9 of capacity", goodput, 0.9, "{:.3f}")
    result.goal("memory flat within 10 %", f"{100 * (after / before - 1):+.1f} %", after / before <= 1.1)
    result.values |= {"goodput": goodput, "growth": after / before, "times": times}
    result.notes.append(f"Requests arrived at random instants (an open loop), at {short(times)} times the capacity.")


OVERLOAD = Rounds(
    "overload",
    "Overload: ten times the capacity",
    f"A model that takes 20 ms for a batch of up to 8, and a queue of {QUEUE}. The capacity is the rate of {QUEUE} connections.",
    start=_start_overload,
    one=_overload,
    contenders=(WEIR,),
    heads=("", "median (smallest to largest)"),
    conclude=_conclude_overload,
    progress=("goodput", "{:.3f} of capacity".format),
    warm_ups=1,
)


GRACE_SECONDS = 5.0  # for the last answers


class Connection(asyncio.Protocol):
    """One connection with at most one request under way."""

    def __init__(self, loop: "OpenLoop") -> None:
        self.loop = loop
        self.transport: Any = None
        self.received = b""
        self.sent_at: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.loop.idle.append(self)
        self.loop.connections.add(self)

    def send(self, request: bytes) -> None:
        self.received = b""
        self.sent_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        if found and len(body) >= _content_length(head) and self.sent_at is not None:
            seconds, self.sent_at = time.perf_counter() - self.sent_at, None
            self.loop.answered(int(head[9:12]), seconds)
            self.loop.idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.loop.idle:
            self.loop.idle.remove(self)
        if self.sent_at is not None:
            self.loop.broken()
        self.loop.lost(self)


class OpenLoop:
    """Sends; counts what comes back."""

    def __init__(self, host: str, port: int, path: str, body: bytes) -> None:
        self.host, self.port = host, port
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body
        self.connections: set[Connection] = set()
        self.idle: list[Connection] = []
        self.closing = False
        self.codes: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.sent: int | None = None  # known at the end
        self.all_answered = asyncio.Event()
        self.connecting: set[asyncio.Task[Any]] = set()

    def answered(self, code: int, seconds: float) -> None:
        self.codes[str(code)] += 1
        if code == 200:
            self.seconds.append(seconds)
        self._note_the_end()

    def broken(self) -> None:
        self.codes["broken"] += 1
        self._note_the_end()

    def lost(self, connection: Connection) -> None:
        """Replace a connection that the server has closed."""
        self.connections.discard(connection)
        if self.closing:
            return
        task = asyncio.get_running_loop().create_task(self.connect())
        self.connecting.add(task)
        task.add_done_callback(self.connecting.discard)

    def close(self) -> None:
        """Close all connections, and open no more."""
        self.closing = True
        for task in self.connecting:
            task.cancel()
        for connection in list(self.connections):
            connection.transport.close()

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: Connection(self), self.host, self.port)

    async def run(self, rate: float, seconds: float, connections: int) -> dict[str, Any]:
        """Send for `seconds` at `rate`; wait a little for the last answers."""
        await asyncio.gather(*(self.connect() for _ in range(connections)))
        chance = random.Random(1)
        start = time.perf_counter()
        due, sent = start, 0
        while (now := time.perf_counter()) < start + seconds:
            while due <= now:
                due += chance.expovariate(rate)
                sent += self._send()
            await asyncio.sleep(0.0005)
        await self._last_answers(sent)
        return self._summary(seconds, sent)

    def _send(self) -> int:
        if not self.idle:
            self.codes["unsent"] += 1
            return 0
        self.idle.pop().send(self.request)
        return 1

    async def _last_answers(self, sent: int) -> None:
        self.sent = sent
        self._note_the_end()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.all_answered.wait(), GRACE_SECONDS)

    def _note_the_end(self) -> None:
        if self.sent is not None and self.codes.total() - self.codes["unsent"] >= self.sent:
            self.all_answered.set()

    def _summary(self, seconds: float, sent: int) -> dict[str, Any]:
        answered = self.codes.total() - self.codes["unsent"]
        cuts = quantiles(self.seconds, n=100) if len(self.seconds) > 1 else [0.0] * 99
        return {
            "codes": dict(self.codes), "sent": sent, "unanswered": sent - answered, "offered_rate": sent / seconds,
            "good_rate": self.codes["200"] / seconds, "p50": cuts[49], "p99": cuts[98],
        }  # fmt: skip


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


CLIENTS = 1000
CONNECTIONS = 64
PATH = "/infer/square"
ALONE = "without"
ELSEWHERE = f"{CLIENTS:,} slow clients at a process that never reads"
BESIDE = f"{CLIENTS:,} slow clients at this server"


def _start_slow(stack: ExitStack) -> Mapping[str, Any]:
    """Start the server and a sink. A contender is the server and, for a measurement, the slow clients beside it."""
    command = weir_command("benchmarks.models:Square", "--max-batch-size", "64")
    server = stack.enter_context(serving(WEIR, command, path=PATH, body=b"3", expected=b"9"))
    sink = stack.enter_context(_sink())
    ports = {ALONE: None, ELSEWHERE: sink, BESIDE: server.port}
    return {name: (server, port) for name, port in ports.items()}


def _slow(contender: Any, case: str, seconds: float) -> dict[str, float]:
    server, port = contender
    company: AbstractContextManager[None] = nullcontext() if port is None else slow_clients(port)
    with company:
        done = load(server.url, CONNECTIONS, seconds)
    return {"rate": done.rate, "p50": done.p50, "p99": done.p99}


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
    command = [sys.executable, "-m", "benchmarks.parts.overload", *arguments]
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


def _conclude_slow(result: Result, measured: Measurements) -> None:
    moved, of_machine = measured.times(BESIDE, ELSEWHERE, figure="p99"), measured.times(ELSEWHERE, ALONE, figure="p99")
    result.goal("the others' p99 moves by less than 20 %", f"{100 * (moved - 1):+.1f} %", moved < 1.2)
    result.values["p99 moved"] = moved
    result.notes.append(
        "The slow clients use the two cores as well: sending to a process that never reads, they change the p99 "
        f"by {100 * (of_machine - 1):+.1f} %; sending to the server, by "
        f"{100 * (measured.times(BESIDE, ALONE, figure='p99') - 1):+.1f} %."
    )


async def run_client(host: str, port: int, request: bytes, connected: asyncio.Semaphore) -> None:
    """Be one slow client for ever."""
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


def run_sink() -> None:
    """Print the port; accept until the input ends."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        sys.stdin.read()


SLOW_CLIENTS = Rounds(
    "slow-clients",
    "A thousand slow clients",
    f"Square, {CONNECTIONS} connections, alone and next to {CLIENTS:,} clients that send one byte a second.",
    start=_start_slow,
    one=_slow,
    contenders=(ALONE, ELSEWHERE, BESIDE),
    heads=("",),
    columns=(spreads("requests/s"), medians("p50 ms", "p50"), spreads("p99 ms", "p99", milliseconds)),
    conclude=_conclude_slow,
    progress=("p99", lambda seconds: f"p99 {milliseconds(seconds)} ms"),
    prepare=lambda running: load(running[ALONE][0].url, CONNECTIONS, 5.0),
)


# Hours of everything at once: load, killed workers, killers, bad clients; nothing may be lost, nothing may grow.

ROUND_SECONDS = 20.0
RATE = 2000
CODES = {"200", "429", "503", "unsent"}  # what a sound request may get while workers are killed


def soak(console: Console, minutes: float) -> None:
    """Run for `minutes`; end with an error when a request got no answer, a wrong one, or memory grew by 10 %."""
    command = weir_command("benchmarks.models:Square", "--workers", "2", "--max-queue-size", "4096")
    with serving("Weir", command, path=PATH, body=b"3", expected=b"9") as server:
        _soak_round(server, random.Random(0))
        before, end, number = server.usage().memory_bytes, time.monotonic() + 60 * minutes, 0
        while time.monotonic() < end:
            number += 1
            seen, pestered = _soak_round(server, random.Random(number))
            memory = server.usage().memory_bytes
            console.print(
                f"{number:5} {seen['codes']} p99 {1e3 * seen['p99']:.1f} ms, {dict(pestered)}, {mebibytes(memory)} MiB",
                soft_wrap=True,
            )
            _judge(seen, memory, before)
        if server.ask(b"7") != b"49":
            raise SystemExit("wrong answer after the soak")
    console.print(f"[green]{number} rounds; every request had its answer; memory stayed within 10 %")


def _soak_round(server: Server, chance: random.Random) -> tuple[dict[str, Any], Counter[str]]:
    done, pestered = threading.Event(), Counter[str]()
    pest = threading.Thread(target=_pester, args=(server, chance, done, pestered))
    pest.start()
    try:
        return offer(server.port, PATH, RATE, ROUND_SECONDS, 64), pestered
    finally:
        done.set()
        pest.join()


def _judge(seen: dict[str, Any], memory: float, before: float) -> None:
    if seen["unanswered"] or set(seen["codes"]) - CODES:
        raise SystemExit(f"answers that must not be, or none: {seen}")
    if memory > 1.1 * before:
        raise SystemExit(f"memory grew from {mebibytes(before)} to {mebibytes(memory)} MiB")


def _pester(server: Server, chance: random.Random, done: threading.Event, count: Counter[str]) -> None:
    """Do something unkind every 0.1 s or so."""
    unkind: list[Callable[[Server, random.Random], None]] = [_half_request, _garbage, _leave, _wrong_item]
    while not done.wait(chance.uniform(0.02, 0.2)):
        what = _kill if chance.random() < 0.02 else chance.choice(unkind)
        try:
            what(server, chance)
        except (OSError, ProcessLookupError):
            continue  # turned away, or it was gone already
        count[what.__name__.strip("_")] += 1


def _kill(server: Server, chance: random.Random) -> None:
    """End a worker; the launcher's own children only, never what anybody else started."""
    workers = server.front.children()
    if workers:
        os.kill(chance.choice(workers).pid, signal.SIGKILL)


def _say(server: Server, what: bytes, *, read: bool) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(what)
        if read:
            connection.recv(1 << 16)


def _request(body: bytes) -> bytes:
    return f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _half_request(server: Server, chance: random.Random) -> None:
    whole = _request(b"1" * 100)
    _say(server, whole[: chance.randrange(1, len(whole))], read=False)


def _garbage(server: Server, chance: random.Random) -> None:
    _say(server, chance.randbytes(chance.randrange(1, 2000)) + b"\r\n\r\n", read=False)


def _leave(server: Server, chance: random.Random) -> None:
    """Send a sound request and go away before its answer."""
    _say(server, _request(b"3"), read=False)


def _wrong_item(server: Server, chance: random.Random) -> None:
    """Send an item that predict raises for; its neighbours must not notice."""
    _say(server, _request(chance.choice([b"{}", b"nonsense", b'"text"', b"[1]"])), read=True)


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "sink":
        run_sink()
    elif kind == "clients":
        uvloop.run(run_clients(arguments[0], int(arguments[1]), arguments[2], int(arguments[3])))
    else:
        host, port, path, rate, seconds, connections, body = arguments
        loop = OpenLoop(host, int(port), path, body.encode())
        print(json.dumps(uvloop.run(loop.run(float(rate), float(seconds), int(connections)))))
