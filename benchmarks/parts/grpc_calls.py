"""Unary gRPC calls with small tensors, beside MLServer, Triton, and a grpc.aio server that does nothing.

The load is h2load (of nghttp2), one call at a time on each connection: a client of grpcio costs several times as much for each call as
the faster servers do.
"""

import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy

from benchmarks.harness.kserve import MLSERVER, SIMPLE, TRITON, WEIR, servers
from benchmarks.harness.result import Part, Result, Run, count, middle, milliseconds, ratio, rotated, short, spread
from benchmarks.harness.servers import PEERS, Load, Server, free_port, serving_anything

NOTHING = "nothing on grpc.aio"
NAMES = (WEIR, MLSERVER, TRITON, NOTHING)
METHOD = "/inference.GRPCInferenceService/ModelInfer"
CONNECTIONS = (1, 16)
Seen = dict[tuple[str, int], dict[str, list[float]]]


def measure(run: Run) -> Result:
    """Alternate the servers round by round; each number of connections in turn."""
    seen: Seen = defaultdict(lambda: defaultdict(list))
    ports = {NOTHING: free_port()}
    nothing = [sys.executable, str(PEERS / "grpc_nothing.py"), str(ports[NOTHING])]
    body = request_body()
    with ExitStack() as running:
        started = [running.enter_context(server) for server in servers([WEIR, MLSERVER, TRITON], SIMPLE, ports)]
        started.append(running.enter_context(serving_anything(NOTHING, nothing, ports[NOTHING])))
        for turn in range(run.rounds):
            for connections in CONNECTIONS:
                for server in rotated(started, turn):
                    _one(run, server, ports[server.name], body, connections, seen[server.name, connections])
    return _result(seen)


def request_body() -> bytes:
    """Two rows of 16 numbers, raw, as stock clients write them."""
    from weir.wire.inference import InferenceRequest, TensorValue
    from weir.wire.kserve_grpc import write_request

    row = numpy.arange(16, dtype=numpy.int32).reshape(1, 16)
    inputs = [TensorValue(name, "INT32", row) for name in ("INPUT0", "INPUT1")]
    return write_request(InferenceRequest("simple", inputs=inputs))


def _one(run: Run, server: Server, port: int, body: bytes, connections: int, into: dict[str, list[float]]) -> None:
    before = server.usage()
    done = grpc_load(port, METHOD, body, connections, run.seconds)
    after = server.usage()
    into["rate"].append(done.rate)
    into["p50"].append(done.p50)
    into["p99"].append(done.p99)
    into["front"].append((after.front_seconds - before.front_seconds) / done.requests)
    into["all"].append(into["front"][-1] + (after.worker_seconds - before.worker_seconds) / done.requests)
    run.step(f"{server.name}, {connections} connections: {count(done.rate)} calls/s")


def _result(seen: Seen) -> Result:
    result = Result(
        ["connections", "server", "calls/s", "times MLServer", "p50 ms", "p99 ms", "CPU µs front", "CPU µs all"]
    )
    for connections in CONNECTIONS:
        for name in NAMES:
            got = seen[name, connections]
            times = ratio(got["rate"], seen[MLSERVER, connections]["rate"])
            result.rows.append([
                str(connections), name, spread(got["rate"], count), f"{times:.2f}", milliseconds(middle(got["p50"])),
                milliseconds(middle(got["p99"])), *(short(middle(got[part]) * 1e6) for part in ("front", "all")),
            ])  # fmt: skip
            result.values[f"{name} {connections}"] = middle(got["rate"])
    most = CONNECTIONS[-1]
    times = ratio(seen[WEIR, most]["rate"], seen[MLSERVER, most]["rate"])
    result.goal(f"{most} connections: at least 2 times MLServer", f"{times:.2f}", times >= 2)
    for connections in CONNECTIONS:
        beside = ratio(seen[WEIR, connections]["rate"], seen[TRITON, connections]["rate"])
        result.goal(
            f"{connections} connection{'s' * (connections > 1)}: more calls than Triton",
            f"{beside:.2f} times",
            beside > 1,
        )
    result.notes.append(
        "The load is h2load of nghttp2, with one thread; every answer must have the length of one that grpcio's own client got. "
        "CPU is user and system time per call, of the first process of a server and of all."
    )
    return result


_HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
_PREFIX = 5  # bytes before a message: whether it is compressed, and how long it is


def require_h2load() -> str:
    """Return h2load's path, or end with how to install it."""
    path = shutil.which("h2load")
    if path is None:
        raise SystemExit("h2load is missing. Debian, Ubuntu: apt install nghttp2-client; macOS: brew install nghttp2")
    return path


def grpc_load(port: int, method: str, message: bytes, connections: int, seconds: float) -> Load:
    """Call `method` with `message` over `connections` for `seconds`.

    All answers must be as long as one that a client of grpcio gets before: h2load does not read statuses, and an answer that is
    an error has no message. Raises RuntimeError otherwise.
    """
    answer = _ask(port, method, message)
    with tempfile.TemporaryDirectory() as folder:
        body, log = Path(folder) / "body", Path(folder) / "log"
        body.write_bytes(struct.pack(">?I", False, len(message)) + message)
        command = [
            require_h2load(),
            "-D",
            f"{seconds:g}",
            "-c",
            str(connections),
            "-m",
            "1",
            "-d",
            str(body),
            *_HEADERS,
        ]
        done = subprocess.run(
            [*command, f"--log-file={log}", f"http://127.0.0.1:{port}{method}"],
            capture_output=True, text=True, timeout=seconds + 60, check=False,
        )  # fmt: skip
        took = numpy.loadtxt(log, usecols=2, ndmin=1) * 1e-6 if log.exists() and log.stat().st_size else numpy.empty(0)
    received = next((_received(line) for line in done.stdout.splitlines() if line.startswith("traffic:")), 0)
    if done.returncode or not len(took) or received < len(took) * (_PREFIX + len(answer)):
        raise RuntimeError(f"not every call at port {port} was answered well: {done.stdout}{done.stderr}")
    p50, p99 = numpy.percentile(took, [50, 99])
    return Load(len(took), seconds, float(p50), float(p99), 0, 0)


def _received(traffic: str) -> int:
    """Return the bytes of data in h2load's line "traffic: 1.2MB (1234) total, 3KB (5) headers (...), 1.1MB (1200) data"."""
    return int(traffic.rpartition("(")[2].partition(")")[0])


def _ask(port: int, method: str, message: bytes) -> bytes:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(method, request_serializer=None, response_deserializer=None)
        answer: bytes = call(message, timeout=10)
    return answer


PART = Part(
    "grpc",
    "Open Inference Protocol over gRPC",
    "ModelInfer with two INT32 [1,16] tensors, raw contents, one call at a time on each connection.",
    lambda rounds: rounds * len(CONNECTIONS) * len(NAMES),
    measure,
)
