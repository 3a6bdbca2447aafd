"""h2load (of nghttp2) as the load of gRPC: unary calls of a fixed message, one at a time on each connection.

What is measured is the server: a client of grpcio costs several times as much for each call as the faster servers do.
"""

import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import grpc
import numpy

from benchmarks.load import Load

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
