"""A system under test for MLPerf LoadGen: one of Weir's or a peer's frontends, asked from one uvloop in a thread beside LoadGen's own.

    python -m benchmarks.loadgen.sut SCENARIO http PORT PATH BODY TYPE EXPECTED ...     (and `grpc PORT MODEL`, `process NULL|TIMED`)

LoadGen gives a query in its own thread; the identifiers go into a queue, and the loop is woken once for however many lie there. It prints how
many responses were not what was expected, as JSON; LoadGen's files are in `--output`.
"""

import argparse
import array
import asyncio
import json
import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlperf_loadgen as lg
import uvloop

SERVER, SINGLE, MULTI, OFFLINE = "Server", "SingleStream", "MultiStream", "Offline"
SAMPLES = 64  # in LoadGen's library; all are alike
PER_QUERY = 8  # of MultiStream
CALL_SECONDS = 60.0
EXPECTED_NS = 50_000  # of a query one after another: so many are prepared that the time is what ends a run

Done = Callable[[bool], None]  # called once for each sample: was the response right?


class Sender:
    """Sends what LoadGen asks for, as far as `channel` can take it; what it can't take waits in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: "Channel") -> None:
        self.loop, self.channel = loop, channel
        self.waiting: deque[int] = deque()
        self.woken = False
        self.wrong = 0
        channel.free = self.send
        self._answer = array.array("B", b"9")

    def issue(self, samples: list[Any]) -> None:
        """Take a query. LoadGen calls it, in its own thread."""
        self.waiting.extend([sample.id for sample in samples])
        if not self.woken:
            self.woken = True
            self.loop.call_soon_threadsafe(self.send)

    def send(self) -> None:
        """Send what waits."""
        self.woken = False
        waiting, channel = self.waiting, self.channel
        while waiting and channel.send(self._done(waiting[0])):
            waiting.popleft()

    def _done(self, sample: int) -> Done:
        address, size = self._answer.buffer_info()

        def done(right: bool) -> None:
            self.wrong += not right
            lg.QuerySamplesComplete([lg.QuerySampleResponse(sample, address, size)])

        return done


class Channel:
    """Takes a sample and has its function called at its end; `free` is called when it may take another."""

    free: Callable[[], None]

    async def open(self) -> None:
        """Connect."""

    def send(self, done: Done) -> bool:
        """Send one; False if there is no room for now."""
        raise NotImplementedError


class Http(Channel):
    """Any number of connections with one request at a time on each."""

    def __init__(self, port: int, request: bytes, expected: bytes, connections: int) -> None:
        self.port, self.request, self.expected, self.connections = port, request, expected, connections
        self.idle: list[_Connection] = []

    async def open(self) -> None:
        for _ in range(self.connections):
            await self.connect()

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: _Connection(self), "127.0.0.1", self.port)

    def send(self, done: Done) -> bool:
        if not self.idle:
            return False
        self.idle.pop().send(done)
        return True


class _Connection(asyncio.Protocol):
    def __init__(self, channel: Http) -> None:
        self.channel = channel
        self.transport: Any = None
        self.received = b""
        self.done: Done | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.channel.idle.append(self)

    def send(self, done: Done) -> None:
        self.done, self.received = done, b""
        self.transport.write(self.channel.request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        if not found or self.done is None or not _whole(head.lower(), body):
            return
        done, self.done = self.done, None
        self.channel.idle.append(self)
        done(head.startswith(b"HTTP/1.1 200") and self.channel.expected in body)
        self.channel.free()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.channel.idle:
            self.channel.idle.remove(self)
        if self.done is not None:
            self.done(False)
        self.task = asyncio.get_running_loop().create_task(self.channel.connect())


def _whole(head: bytes, body: bytes) -> bool:
    length = re.search(rb"content-length: *(\d+)", head)
    return len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")


class Grpc(Channel):
    """A few connections with any number of calls on each."""

    def __init__(self, port: int, model: str, connections: int) -> None:
        from benchmarks.loadgen.messages import call_body  # needs Weir

        self.port, self.connections, self.body = port, connections, call_body(model)
        self.opened: list[Any] = []
        self.turn = 0

    async def open(self) -> None:
        from benchmarks.harness.calls import Calls

        method = "/inference.GRPCInferenceService/ModelInfer"
        for _ in range(self.connections):
            make = lambda: Calls(f"127.0.0.1:{self.port}", method, self.body)  # noqa: E731
            _, calls = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", self.port)
            await calls.ready
            self.opened.append(calls)

    def send(self, done: Done) -> bool:
        def ended(code: str) -> None:
            done(code == "OK")
            self.free()

        self.turn += 1
        return bool(self.opened[self.turn % len(self.opened)].call(CALL_SECONDS, ended))


class Process(Channel):
    """Calls in process, through `weir.Service`."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.service: Any = None
        self.tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        import weir
        from benchmarks.loadgen.models import MODELS

        self.service = weir.Service(MODELS[self.model], timeout=CALL_SECONDS)
        await self.service.start()

    def send(self, done: Done) -> bool:
        task = asyncio.get_running_loop().create_task(self._call(done))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def _call(self, done: Done) -> None:
        try:
            done(await self.service.infer(3) == 3)
        except Exception:
            done(False)


def main() -> None:
    """Run one scenario against one frontend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=(SERVER, SINGLE, MULTI, OFFLINE))
    parser.add_argument(
        "--rate", type=float, default=100.0, help="queries/s: the target of Server, what Offline expects"
    )
    parser.add_argument("--bound-ms", type=float, default=50.0, help="of Server: the 99th percentile of the latency")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True)
    kinds = parser.add_subparsers(dest="frontend", required=True)
    http = kinds.add_parser("http")
    for name in ("port", "path", "body", "type", "expected"):
        http.add_argument(name)
    http.add_argument("--head", default="", help="further lines of the request's head")
    grpc = kinds.add_parser("grpc")
    grpc.add_argument("port", type=int)
    grpc.add_argument("model")
    kinds.add_parser("process").add_argument("model")
    asked = parser.parse_args()
    print(json.dumps(run(asked, channel_of(asked))))


def channel_of(asked: argparse.Namespace) -> Channel:
    """Return the channel that the command line names."""
    if asked.frontend == "process":
        return Process(asked.model)
    if asked.frontend == "grpc":
        return Grpc(asked.port, asked.model, max(1, min(8, asked.connections)))
    body = Path(asked.body[1:]).read_bytes() if asked.body.startswith("@") else asked.body.encode()
    lines = [
        f"POST {asked.path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Type: {asked.type}",
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join([*lines, *filter(None, asked.head.split("\n")), "", ""])
    return Http(int(asked.port), head.encode() + body, asked.expected.encode(), asked.connections)


def run(asked: argparse.Namespace, channel: Channel) -> dict[str, Any]:
    """Let LoadGen ask over `channel`."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(channel.open(), loop).result(120)
    sender = Sender(loop, channel)
    asked.output.mkdir(parents=True, exist_ok=True)
    system = lg.ConstructSUT(sender.issue, lambda: None)
    library = lg.ConstructQSL(SAMPLES, SAMPLES, lambda _: None, lambda _: None)
    lg.StartTestWithLogSettings(system, library, settings(asked), _logs(asked.output))
    lg.DestroyQSL(library)
    lg.DestroySUT(system)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    return {"wrong": sender.wrong}


def settings(asked: argparse.Namespace) -> Any:
    """Return LoadGen's settings: its own but for rate, bound and duration."""
    made = lg.TestSettings()
    made.scenario = getattr(lg.TestScenario, asked.scenario)
    made.mode = lg.TestMode.PerformanceOnly
    made.min_duration_ms = int(1000 * asked.seconds)
    made.max_duration_ms = 0 if asked.scenario == OFFLINE else int(2500 * asked.seconds)
    if asked.scenario == SERVER:
        made.server_target_qps = asked.rate
        made.server_target_latency_ns = int(1e6 * asked.bound_ms)
        made.server_target_latency_percentile = 0.99
    elif asked.scenario == OFFLINE:
        made.offline_expected_qps = asked.rate
    made.multi_stream_samples_per_query = PER_QUERY
    made.single_stream_expected_latency_ns = made.multi_stream_expected_latency_ns = EXPECTED_NS
    return made


def _logs(output: Path) -> Any:
    files, logs = lg.LogOutputSettings(), lg.LogSettings()
    files.outdir, files.copy_summary_to_stdout = str(output), False
    logs.log_output, logs.enable_trace = files, False
    return logs


if __name__ == "__main__":
    main()
