"""Ten and twenty times more than the model can do, every request with a timeout, over each protocol.

The child `PROTOCOL HOST PORT MODEL RATE SECONDS CONNECTIONS TIMEOUT` sends at random instants, whether or not the answers come. It prints
how many answers were good (a result within the timeout), how many came more than LATE after their deadline, the worst, and all ends by
code. Times are the client's own, from the instant at which a request was due to the one at which its end was read.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import cycle
from typing import Any

import numpy as np
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from benchmarks.harness.calls import Calls
from benchmarks.harness.result import Result, count, middle, milliseconds, short, spread
from benchmarks.harness.rounds import Measurements, Rounds
from benchmarks.harness.servers import ask_own, free_port, load, serving, weir_command
from benchmarks.parts.overload import Connection, OpenLoop
from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_grpc import write_request

TIMES = (10, 20)
CLOSED = "closed loops"
TIMEOUT = 0.3  # seconds
# HTTP has one request at a time on each connection; the others have any number.
CONNECTIONS = {"http": 800, "websocket": 8, "grpc": 8}
# Two in 20 ms: so few requests/s that 20 times as many, and who sends them, do not fill two processors.
BATCH = 2
CAPACITY = 100
# How a request may end whose deadline has passed, or cannot be met: by it, or by what a client may try again.
ENDS = {
    "http": {"200", "504", "429", "503"},
    "websocket": {"200", "504", "429", "503"},
    "grpc": {"OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"},
}


def _start(stack: ExitStack) -> Mapping[str, Any]:
    grpc_port = free_port()
    command = weir_command("benchmarks.models:Four", "--max-batch-size", str(BATCH), "--grpc-port", str(grpc_port))
    server = stack.enter_context(serving("Weir", command, path="/infer/four", body=b"3", expected=b"3"))
    return {name: (server, grpc_port, name) for name in (CLOSED, *map(str, TIMES))}


def _one(contender: Any, protocol: str, seconds: float) -> dict[str, Any]:
    """Measure what closed loops get, or offer so many times the capacity over one protocol."""
    server, grpc_port, name = contender
    if name == CLOSED:
        return {"good_rate": load(server.url, 16, seconds).rate}
    port = grpc_port if protocol == "grpc" else server.port
    wanted = (int(name) * CAPACITY, max(2.0, seconds), CONNECTIONS[protocol], TIMEOUT)
    got: dict[str, Any] = ask_own("parts.goodput", protocol, "127.0.0.1", port, "four", *wanted)
    if got["unanswered"]:
        raise RuntimeError(f"{protocol}: requests without an end: {got}")
    return got


def _conclude(result: Result, measured: Measurements) -> None:
    capacity = measured.of(CLOSED, figure="good_rate")
    for protocol in CONNECTIONS:
        for times in map(str, TIMES):
            _conclude_one(result, measured, protocol, times)
    result.notes.append(
        f"Capacity, with 16 connections in closed loops: {spread(capacity, count)} responses/s. A good response arrives within {TIMEOUT:g} s of the instant "
        "at which its request was due."
    )


def _conclude_one(result: Result, measured: Measurements, protocol: str, times: str) -> None:
    """Add the row and the goals of one protocol at so many times the capacity."""
    rates, capacity = measured.of(times, protocol, "good_rate"), measured.of(CLOSED, figure="good_rate")
    late, codes = measured.of(times, protocol, "late"), measured.of(times, protocol, "codes")
    shares = [rate / most for rate, most in zip(rates, capacity, strict=True)]
    worst = middle(measured.of(times, protocol, "worst_late"))
    result.rows.append(
        [
            protocol,
            times,
            spread(rates, count),
            spread(shares, short),
            short(middle(late)),
            milliseconds(worst),
            _others(codes),
        ]
    )
    result.values[f"{protocol} {times}"] = middle(shares)
    about = f"{protocol}, {times} times"
    result.at_least(f"{about}: goodput at least 0.9 of capacity", middle(shares), 0.9, "{:.3f}")
    result.at_most(f"{about}: no answer more than 10 ms late", sum(late), 0, "{:g}")
    strange = sorted({code for each in codes for code in each} - ENDS[protocol] - {"unsent"})
    result.goal(f"{about}: ends by the deadline, or as may be tried again", ", ".join(strange) or "all", not strange)


def _others(codes: list[dict[str, int]]) -> str:
    """Show how the requests ended that got no result, in all rounds."""
    ends: Counter[str] = Counter()
    for each in codes:
        ends.update(each)
    return ", ".join(f"{code}: {count(number)}" for code, number in ends.most_common() if code not in ("200", "OK"))


LATE = 0.010  # seconds
GRACE = 5.0  # seconds that the last answers get
_METHOD = "/inference.GRPCInferenceService/ModelInfer"

# Sends one request that was due at an instant; tells `Ends.end` of it.
Send = Callable[[float], None]


class Ends:
    """Counts what becomes of requests that have `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.codes: Counter[str] = Counter()
        self.good = 0
        self.late: list[float] = []
        self.open = 0
        self.none_open = asyncio.Event()

    def begin(self) -> None:
        """A request leaves."""
        self.open += 1
        self.none_open.clear()

    def end(self, due: float, code: str, *, result: bool) -> None:
        """A request has its end."""
        over = time.perf_counter() - due - self.timeout
        self.codes[code] += 1
        if result and over <= 0:
            self.good += 1
        elif result and over > LATE:
            self.late.append(over)
        self.open -= 1
        if not self.open:
            self.none_open.set()

    def summary(self, seconds: float) -> dict[str, Any]:
        """Return what is to be printed."""
        return {
            "good_rate": self.good / seconds, "late": len(self.late), "worst_late": max(self.late, default=0.0),
            "codes": dict(self.codes), "unanswered": self.open,
        }  # fmt: skip


class HttpConnection(Connection):
    """One request at a time; those that find no idle connection are not sent."""

    due = 0.0

    def __init__(self, loop: OpenLoop, ends: Ends) -> None:
        super().__init__(loop)
        self.ends = ends

    def data_received(self, data: bytes) -> None:
        waits = self.sent_at is not None
        head = (self.received + data)[9:12].decode()
        super().data_received(data)
        if waits and self.sent_at is None:
            self.ends.end(self.due, head, result=head == "200")


async def http(host: str, port: int, model: str, connections: int, ends: Ends) -> Send:
    """Connect `connections` times."""
    loop = OpenLoop(host, port, f"/infer/{model}", b"3")
    loop.request = loop.request.replace(b"\r\n\r\n", b"\r\nX-Request-Timeout: %g\r\n\r\n" % ends.timeout, 1)
    running = asyncio.get_running_loop()
    for _ in range(connections):
        await running.create_connection(lambda: HttpConnection(loop, ends), host, port)

    def send(due: float) -> None:
        if not loop.idle:
            ends.codes["unsent"] += 1
            return
        connection: Any = loop.idle.pop()
        connection.due = due
        ends.begin()
        connection.send(loop.request)

    return send


async def websocket(host: str, port: int, model: str, connections: int, ends: Ends) -> Send:
    """Connect `connections` times; each has any number of requests under way."""
    due: dict[str, float] = {}

    async def listen(socket: ClientConnection) -> None:
        with suppress(ConnectionClosed):
            async for message in socket:
                said = json.loads(message)
                code = str(said.get("status", 200))
                ends.end(due.pop(said["id"]), code, result=code == "200")

    sockets = [await connect(f"ws://{host}:{port}/v2/ws", compression=None) for _ in range(connections)]
    listening = [asyncio.create_task(listen(socket)) for socket in sockets]
    turns = cycle(sockets)
    waiting: set[asyncio.Task[None]] = set()
    assert listening

    def send(at: float) -> None:
        name = f"{len(due)}-{at}"
        due[name] = at
        ends.begin()
        text = json.dumps({
            "model_name": model, "id": name, "parameters": {"timeout": int(1e6 * ends.timeout)},
            "inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "data": ["3"]}],
        })  # fmt: skip
        task = asyncio.create_task(next(turns).send(text))
        waiting.add(task)
        task.add_done_callback(waiting.discard)

    return send


async def grpc_calls(host: str, port: int, model: str, connections: int, ends: Ends) -> Send:
    """Connect `connections` times; each has as many calls under way as the server allows."""
    data = np.empty(1, object)
    data[0] = b"3"
    body = write_request(InferenceRequest(model, [TensorValue("input", "BYTES", data)]))
    running = asyncio.get_running_loop()
    opened = [
        (await running.create_connection(lambda: Calls(f"{host}:{port}", _METHOD, body), host, port))[1]
        for _ in range(connections)
    ]
    for each in opened:
        await each.ready
    turns = cycle(opened)

    def send(due: float) -> None:
        left = due + ends.timeout - time.perf_counter()
        if next(turns).call(left, lambda code: ends.end(due, code, result=code == "OK")):
            ends.begin()
        else:
            ends.codes["unsent"] += 1

    return send


PROTOCOLS = {"http": http, "websocket": websocket, "grpc": grpc_calls}


async def offer(
    protocol: str, host: str, port: int, model: str, rate: float, seconds: float, connections: int, allowed: float
) -> dict[str, Any]:
    """Send for `seconds`, after a second that does not count."""
    ends = Ends(allowed)
    send = await PROTOCOLS[protocol](host, port, model, connections, ends)
    chance = random.Random(1)
    start = time.perf_counter()
    due, counted = start, False
    while (now := time.perf_counter()) < start + 1.0 + seconds:
        if not counted and now >= start + 1.0:
            counted, ends.good, ends.late = True, 0, []
            ends.codes.clear()
        while due <= now:
            send(due)
            due += chance.expovariate(rate)
        await asyncio.sleep(0.0005)
    good = ends.good
    with suppress(TimeoutError):
        await asyncio.wait_for(ends.none_open.wait(), GRACE)
    return {**ends.summary(seconds), "good_rate": good / seconds, "lag": time.perf_counter() - now}


GOODPUT = Rounds(
    "goodput",
    "Overload with deadlines",
    "A model that takes 20 ms for a batch of up to 2; requests arrive at random instants (an open loop).",
    start=_start,
    one=_one,
    contenders=(CLOSED, *map(str, TIMES)),
    cases=("", *CONNECTIONS),
    takes_part=lambda name, protocol: (name == CLOSED) == (protocol == ""),
    heads=(
        "protocol",
        "times the capacity",
        "good responses/s",
        "of capacity",
        "late by more than 10 ms",
        "worst, ms",
        "other ends",
    ),
    conclude=_conclude,
    progress=("good_rate", "{:,.0f} good responses/s".format),
)


if __name__ == "__main__":
    name, host, port, model, rate, seconds, connections, timeout = sys.argv[1:]
    done = offer(name, host, int(port), model, float(rate), float(seconds), int(connections), float(timeout))
    print(json.dumps(uvloop.run(done)))
