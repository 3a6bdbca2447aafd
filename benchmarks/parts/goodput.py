"""Ten and twenty times more than the model can do, every request with a timeout, over each protocol.

The child `PROTOCOL HOST PORT MODEL RATE SECONDS CONNECTIONS TIMEOUT` sends at random instants, whether or not the answers come. It prints
how many answers were good (a result within the timeout), how many came more than LATE after their deadline, the worst, and all ends by
code. Times are the client's own, from the instant at which a request was due to the one at which its end was read.

A client of grpcio costs several times as much as a call costs the server. So `Calls` writes the HTTP/2 frames itself: what is sent is
prepared but for the timeout; of what comes only the frames that end a call are looked at. The server is told to keep no table of
headers, so that equal trailers are equal bytes, and are decoded once.
"""

import asyncio
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from itertools import cycle
from typing import Any

import grpc
import numpy as np
import uvloop
from hpack import Decoder
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

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
    "http": {"200", "408", "429", "503"},
    "websocket": {"200", "408", "429", "503"},
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
        f"Capacity, by 16 connections in closed loops: {spread(capacity, count)} responses/s. A good response was read within {TIMEOUT:g} s of the instant "
        "at which its request was due. The client is a Python process on the same machine, and its own lateness counts."
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


Ended = Callable[[str], None]  # told how a call ended: the name of its status, or RST_STREAM with its code

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM = _ACK = 1
_END_HEADERS = 4
_HEAD_BYTES = 9
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_STREAMS = 1, 2, 3  # settings
_FIRST_WINDOW = 65535  # bytes that may be sent on a connection before the server asks for more
_MOST_DECODED = 1000
_NAMES = {str(status.value[0]): status.name for status in grpc.StatusCode}


class Calls(asyncio.Protocol):
    """Calls `method` with `message`; any number may be under way, as far as the server allows."""

    def __init__(self, authority: str, method: str, message: bytes) -> None:
        self._transport: Any = None
        self._received = b""
        self._next_stream = 1
        self._most = 100  # calls under way, until the server has said how many
        self._window = _FIRST_WINDOW
        self._calls: dict[int, Ended] = {}
        self._decoder = Decoder()
        self._decoder.max_allowed_table_size = 0
        self._decoded: dict[bytes, str] = {}
        self._fields = (
            b"\x83\x86" + _literal(b"\x04", method.encode()) + _literal(b"\x01", authority.encode())
            + _literal(b"\x0f\x10", b"application/grpc") + b"\x00" + _text(b"te") + _text(b"trailers")
            + b"\x00" + _text(b"grpc-timeout")
        )  # fmt: skip
        self._body = struct.pack(">?I", False, len(message)) + message
        self.ready = asyncio.get_running_loop().create_future()

    def call(self, timeout: float, ended: Ended) -> bool:
        """Send a call, and have `ended` called when it has its end; False if the server allows no more for now."""
        if len(self._calls) >= self._most or self._window < len(self._body) or self._transport.is_closing():
            return False
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._calls[stream] = ended
        self._window -= len(self._body)
        block = self._fields + _text(b"%du" % max(1, int(1e6 * timeout)))
        self._transport.write(
            _frame(_HEADERS, _END_HEADERS, stream, block) + _frame(_DATA, _END_STREAM, stream, self._body)
        )
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _ENABLE_PUSH, 0)
        more = struct.pack(">I", (1 << 31) - 1 - _FIRST_WINDOW)
        self._transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, error: Exception | None) -> None:
        calls, self._calls = self._calls, {}
        for ended in calls.values():
            ended("connection lost")

    def data_received(self, data: bytes) -> None:
        received = self._received + data
        place = 0
        while len(received) - place >= _HEAD_BYTES:
            begin = place + _HEAD_BYTES
            end = begin + int.from_bytes(received[place : place + 3])
            if end > len(received):
                break
            kind, flags, stream = received[place + 3], received[place + 4], int.from_bytes(received[place + 5 : begin])
            self._take(kind, flags, stream, received[begin:end])
            place = end
        self._received = received[place:]

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _HEADERS:
            status = self._status(body)  # whatever it says, the decoder has to know it
            if flags & _END_STREAM:
                self._calls.pop(stream)(status)
        elif kind == _RST_STREAM:
            ended = self._calls.pop(stream, None)
            if ended is not None:
                ended(f"RST_STREAM {int.from_bytes(body)}")
        elif kind == _SETTINGS and not flags & _ACK:
            self._set(body)
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, body))
        elif kind == _WINDOW_UPDATE and not stream:
            self._window += int.from_bytes(body)
        elif kind == _GOAWAY:
            self._transport.close()
        elif kind == _CONTINUATION:
            raise ValueError("headers longer than a frame: not expected of this server")

    def _set(self, body: bytes) -> None:
        settings = dict(struct.iter_unpack(">HI", body))
        self._most = settings.get(_MAX_STREAMS, 1 << 31)
        self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        if not self.ready.done():
            self.ready.set_result(None)

    def _status(self, block: bytes) -> str:
        status = self._decoded.get(block)
        if status is None:
            if len(self._decoded) >= _MOST_DECODED:
                self._decoded.clear()
            fields = {bytes(name): bytes(value).decode() for name, value in self._decoder.decode(block, raw=True)}
            status = self._decoded[block] = _NAMES.get(fields.get(b"grpc-status", ""), "no status")
        return status


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _text(value: bytes) -> bytes:
    """Return a string of HPACK that is shorter than 127 bytes."""
    if len(value) >= 127:
        raise ValueError(f"{value!r}: must be shorter than 127 bytes")
    return bytes([len(value)]) + value


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a field that no table keeps, with a name by its number."""
    return name + _text(value)


GOODPUT = Rounds(
    "goodput",
    "Overload with deadlines",
    "A model that takes 20 ms for a batch of up to 2; an open loop, random instants.",
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
