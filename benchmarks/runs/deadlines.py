"""An open loop of requests with a deadline: they leave at random instants of a given rate, whether or not the answers come.

Prints how many answers were good (a result within the timeout), how many came more than LATE after their deadline, the worst,
and all ends by code. Times are the client's own: from the instant at which a request was due to the one at which its end was read.
Arguments: PROTOCOL (http, websocket, grpc) HOST PORT MODEL RATE SECONDS CONNECTIONS TIMEOUT.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from typing import Any

import numpy as np
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from benchmarks.runs.grpc_frames import Calls
from benchmarks.runs.open_loop import Connection, OpenLoop
from weir.wire.inference import InferenceRequest, TensorValue
from weir.wire.kserve_grpc import write_request

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


async def run(
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


if __name__ == "__main__":
    name, host, port, model, rate, seconds, connections, timeout = sys.argv[1:]
    done = run(name, host, int(port), model, float(rate), float(seconds), int(connections), float(timeout))
    print(json.dumps(uvloop.run(done)))
